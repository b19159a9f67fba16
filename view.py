"""What each forward did, live in the terminal, as a page (generate.py --trace out.html), as a picture.

Which forward decided each token, how a block fills in out of order (Algorithm 2), which drafts verified
decoding kept (method section 10). Page and picture stand alone: no network, no fonts, no script needed:

    python generate.py --gamma 0.1 --trace docs/trace.svg
    python generate.py --mode verified --trace docs/trace-verified.svg
"""
import copy
import itertools
import textwrap
import unicodedata
from collections import Counter, namedtuple
from dataclasses import replace
from html import escape

from hf import need, write_whole

# Colours, (light, dark). Forwards take c0 to c5 in turn: neighbours differ in hue and in lightness.
FILLS = dict(page=("#ffffff", "#0d1117"), slot=("#eef1f4", "#1c2129"), c0=("#ffdfb0", "#8a5a14"),
             c1=("#7cc0f2", "#0f4168"), c2=("#f7ee9c", "#716b17"), c3=("#bba6e8", "#42297a"),
             c4=("#bff0d8", "#1f6e4e"), c5=("#f2a0ae", "#6b1d35"))
INKS = {".ink,text": ("#1f2328", "#f0f6fc"), ".dim,.mask,.behind": ("#59636e", "#9da7b3")}
EM, LINE, MARGIN, GUTTER, WIDTH = 8.43, 24, 16, 17, 108   # of a picture: pixels; columns
LEGEND = dict(sbd=[("new", "c1", "decided now"), ("old", "c2", "decided earlier"), ("mask", "slot", "masked"),
                   ("behind", "", "behind the end")],
              verified=[("next", "c1", "next token"), ("new", "c1", "accepted draft"),
                        ("rejected", "", "rejected"), ("behind", "", "discarded"), ("fix", "", "correction")],
              ntp=[("new", "c1", "decided now")])
LIGHT, DARK = ("".join([f".{name}{{fill:{c[i]};background:{c[i]}}}" for name, c in FILLS.items()]
                       + [f"{names}{{fill:{c[i]};color:{c[i]}}}" for names, c in INKS.items()])
               for i in (0, 1))
STYLE = f"""text,.text{{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace}}
text{{font-size:14px;white-space:pre}}.next,.fix,.bold{{font-weight:bold}}
.rejected,.behind{{text-decoration:line-through}}{LIGHT}@media (prefers-color-scheme:dark){{{DARK}}}"""
PAGE_STYLE = """:root{color-scheme:light dark}
body{font:16px/1.5 system-ui,sans-serif;margin:auto;padding:1rem;max-width:78rem}
h2{font-size:1.15rem;margin:1.5rem 0 .2rem}p{margin:.4rem 0}summary{cursor:pointer}
input{width:min(24rem,60%);vertical-align:middle}
.text{white-space:pre-wrap;overflow-wrap:anywhere;line-height:2}.text span{border-radius:3px;padding:2px 0}
.run::before{content:attr(data-forward);font:.65em system-ui;vertical-align:super;padding:0 1px}
.bars{width:100%;height:5rem;display:block;margin-top:.6rem}details div{overflow-x:auto}.later{opacity:.08}"""
# A token in the text, or in a forward's line. kind: as in LEGEND; forward: the one that decided it.
Cell = namedtuple("Cell", "text kind color title token forward", defaults=(-1, 0))
REPLAY = """for (const s of document.querySelectorAll('section')) {
  const n = s.dataset.nfe, r = document.createElement('input')
  Object.assign(r, {type: 'range', max: n, value: n, ariaLabel: 'forward'})
  s.querySelector('.text').before('Replay: ', r)
  r.oninput = () => s.querySelectorAll('[data-forward]').forEach(
    t => t.classList.toggle('later', +t.dataset.forward > +r.value))
}"""


def record(step):
    """The step as it stands when `decode` yields it: its row moves on."""
    return replace(step, row=copy.copy(step.row))


def show_block(step, tokenizer, color: bool) -> str:
    """One line: the block after a forward, what it revealed marked."""
    new, cells = {position for position, _ in step.revealed}, []
    marked, plain = ("\033[1;32m{}\033[0m", "{}") if color else ("[{}]", " {} ")
    for position, token in enumerate(step.block or step.final, step.start):
        text = "···" if token is None else "".join(map(visible, tokenizer.decode([token])))
        cells.append((marked if position in new else plain).format(text))
    return f"forward {step.row.nfe:3d}  " + ("|" if color else "").join(cells)


def visible_text(text) -> str:
    """A text for a terminal: what could drive or deceive it is made visible. New lines and tabs stay, and
    what is part of words and emoji: joiners, private characters, and those newer than Python's tables."""
    kept = "\n\t\u200c\u200d"
    return "".join(c if c in kept or unicodedata.category(c) in ("Cn", "Co") else visible(c) for c in text)


def visible(char) -> str:
    hidden = ("Cc", "Cf", "Cn", "Co", "Zl", "Zp")
    shown = f"⟨U+{ord(char):04X}⟩" if unicodedata.category(char) in hidden else char
    return {"\n": "⏎", "\t": "⇥"}.get(char, shown)


def columns(text) -> int:
    wide = (2 if unicodedata.east_asian_width(c) in "WF" else not unicodedata.combining(c) for c in text)
    return max(sum(wide), 1)


def spell(ids, tokenizer) -> list[str]:
    """What to show of each token. A character split across tokens stands in the last; lone bytes: ⟨f0 9f⟩."""
    pieces = [tokenizer.decode_bytes([id]) for id in ids]
    data, owner = b"".join(pieces), [i for i, piece in enumerate(pieces) for _ in piece]
    texts, at = [""] * len(ids), 0
    for char in data.decode("utf-8", "surrogateescape"):   # no character: U+DC80 to U+DCFF
        end, lone = at + len(char.encode("utf-8", "surrogateescape")), "\udc80" <= char <= "\udcff"
        for j in range(at, end):
            if lone or owner[j] != owner[end - 1]:
                texts[owner[j]] += f"⟨{data[j]:02x}⟩"
        texts[owner[end - 1]] += "" if lone else visible(char)
        at = end
    return [text.replace("⟩⟨", " ") or f"⟨#{id}⟩" for id, text in zip(ids, texts)]


def read(steps, tokenizer):
    """The recorded steps of a sample -> its text, a Cell a token, and its lines, Cells for each forward."""
    tokens = [token for s in steps for token in s.final]
    decided = {position: (s.row.nfe, token) for s in steps for position, token in s.revealed}
    texts = {p: spell([token], tokenizer)[0] for p, (_, token) in decided.items()}
    texts |= dict(enumerate(spell(tokens, tokenizer)))
    nexts = {s.start for s in steps if not s.block} if any(s.drafted for s in steps) else ()

    def cell(p, kind="new"):
        if kind == "mask":
            return Cell("·" * columns(texts.get(p, "···")), kind, "slot", f"position {p}, masked")
        nfe, token = decided[p]
        why = f", the model's next token after forward {nfe - 1}" if p in nexts else ""
        return Cell(texts[p], "next" if p in nexts else kind, f"c{nfe % 6}" if kind != "behind" else "",
                    f"forward {nfe}, position {p}, token {token}{why}", token, nfe)

    lines = []
    for s in steps:
        if s.block:                                                # sbd
            line = [cell(p, "mask" if token is None else "behind" if p >= len(tokens) else
                         "new" if (p, token) in s.revealed else "old")
                    for p, token in enumerate(s.block, s.start)]
        else:                                         # the next token, accepted drafts; then the other drafts
            n, done = len(s.final), s.row.done
            line = [cell(s.start + i) for i in range(n)]
            rest = spell(s.final + s.drafted[n - 1:], tokenizer)[n:]
            for j, (text, token) in enumerate(zip(rest, s.drafted[n - 1:]), n):
                kind, why = ("rejected",) * 2 if j == n else ("behind", "behind the rejected token")
                if done:
                    kind, why = "behind", "not checked: the text ends here" if n == 1 else "behind the end"
                line.append(Cell(text, kind, "", f"draft {j}, token {token}, {why}", token))
            if rest and not done:
                text, own = spell([s.row.next], tokenizer)[0], s.row.next
                line.append(Cell(text, "fix", "", f"the model's own token there, {own}", own))
        lines.append(line)
    return [cell(p) for p in range(len(tokens))], lines


def draw(steps, lines, mode, head=()) -> str:
    """An SVG: head, lines of text, then a line a forward: its number, how many tokens it decided, cells."""
    body, x, y, wide = [], 0, 0, 0

    def put(text, kind="dim", color="", title=""):
        nonlocal x, wide
        if not text:
            return
        left, width = MARGIN + x * EM, columns(text) * EM
        up, height = (-2, 3) if kind == "old" else (15, 20)
        if color:
            body.append(f'<rect class="{color}" x="{left + .5:.1f}" y="{y - up}" width="{width - 1:.1f}" '
                        f'height="{height}" rx="2"/>')
        title = title and f"<title>{escape(title)}</title>"
        body.append(f'<text class="{kind}" x="{left:.1f}" y="{y}" textLength="{width:.1f}" '
                    f'lengthAdjust="spacingAndGlyphs">{title}{escape(text)}</text>')
        x, wide = x + columns(text), max(wide, x + columns(text))

    for text in head:
        x, y = 0, y + LINE
        put(text, "bold" if text is head[0] else "dim")
    for s, line in zip(steps, lines):
        fresh = s.block and all(c.kind != "old" for c in line)     # the first forward of a block
        x, y = 0, y + LINE + (8 if fresh or line is lines[0] else 0)
        body.append(f'<g data-forward="{s.row.nfe}">')
        put(f"forward {s.row.nfe:3} {'+' + str(sum(c.kind in ('new', 'next') for c in line)):>4} ")
        for _, cells in itertools.groupby(line, lambda c: (c.kind, c.text if c.kind == "behind" else id(c))):
            cells = list(cells)                                    # alike only behind the end: shown once
            if x + columns(cells[0].text) > WIDTH:
                x, y = GUTTER, y + LINE
            put(" → " * (cells[0].kind == "fix"))
            put(cells[0].text, cells[0].kind, cells[0].color, "\n".join(c.title for c in cells))
            put(f"×{len(cells)} " * (len(cells) > 1))
        body.append("</g>")
    x, y = GUTTER, y + LINE + 8
    for kind, color, meaning in LEGEND[mode]:
        put("····" if kind == "mask" else "abcd", kind, color)
        put(f" {meaning}  ")
    width, height = round(2 * MARGIN + wide * EM), y + MARGIN
    return f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}">{"".join(body)}</svg>\n'


def section(steps, text, lines, title, mode) -> str:
    """One sample as HTML: the text, tokens per forward, the line of each forward."""
    nfe, made = len(steps), Counter(c.forward for c in text)
    top = max(made.values(), default=1)
    spans = []
    for before, c in zip([None, *text], text):
        shown = escape(c.text).replace("⏎", "⏎<br>")
        run = "" if before and before.forward == c.forward else " run"
        spans.append(f'<span class="{c.color} {c.kind}{run}" data-forward="{c.forward}" '
                     f'data-token="{c.token}" title="{escape(c.title)}">{shown}</span>')
    bars = "".join(f'<rect class="c{n % 6}" data-forward="{n}" x="{n - 1}" y="{top - made[n]}" width=".86" '
                   f'height="{made[n]}"><title>forward {n}: {made[n]} tokens</title></rect>'
                   for n in range(1, nfe + 1))
    return f"""<section data-nfe="{nfe}"><h2>{escape(title)}</h2><p class="text">{"".join(spans)}</p>
<svg class="bars" viewBox="0 0 {max(nfe, 24)} {top}" preserveAspectRatio="none" role="img"
 aria-label="tokens per forward">{bars}</svg>
<p class="dim">Tokens per forward, 1 to {nfe}: at most {top}, on average {len(text) / nfe:.2f}.</p>
<details{" open" if nfe <= 300 else ""}><summary>Forward by forward</summary>
<div>{draw(steps, lines, mode)}</div></details></section>
"""


HEAD = ' xmlns="http://www.w3.org/2000/svg">' + f"<style>{STYLE}</style>" + \
    '<rect class="page" width="100%" height="100%" rx="8"/>'   # what makes a drawing a file of its own


def titled(sample, options) -> str:
    """How a sample was decoded, and in how many forwards."""
    bound = options["sampler"] if options["sampler"] in options else "gamma"
    names = dict(sbd=["block_size", "sampler", bound], verified=["block_size", "hedges"], ntp=[])
    names = names[options["mode"]] + ["temperature", "top_k", "top_p", "seed"] * (options["temperature"] > 0)
    how = [options["mode"]] + [f"{name} {options[name]}" for name in names if options[name] is not None]
    n, nfe = sum(len(s.final) for s in sample), len(sample)
    return f"{', '.join(how)}: {n} tokens in {nfe} forwards, NFE speedup {n / nfe:.2f}"


def write(path, prompt, steps, tokenizer, options) -> None:
    """All samples as a page, or the first as a picture. prompt: its ids; steps: what `record` kept; options:
    decode's."""
    need(steps, "--trace: no forward was run, there is nothing to show")
    mode, asked = options["mode"], "".join(spell(prompt, tokenizer))
    samples = [[s for s in steps if s.row.index == i] for i in sorted({s.row.index for s in steps})]
    if path.suffix == ".svg":
        head = [titled(samples[0], options), *textwrap.wrap(asked.strip("⏎"), WIDTH)]
        content = draw(samples[0], read(samples[0], tokenizer)[1], mode, head).replace(">", HEAD, 1)
    else:
        names = [f"Sample {s[0].row.index + 1}: " if len(samples) > 1 else "" for s in samples]
        sections = [section(s, *read(s, tokenizer), name + titled(s, options), mode)
                    for s, name in zip(samples, names)]
        content = f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>{mode} decoding, forward by forward</title><style>{STYLE}{PAGE_STYLE}</style></head>
<body class="page ink"><p class="text dim">{escape(asked).replace("⏎", "⏎<br>")}</p>{"".join(sections)}\
<script>{REPLAY}</script></body></html>
"""
    write_whole(path, lambda temporary: temporary.write_text(content, encoding="utf-8"))
