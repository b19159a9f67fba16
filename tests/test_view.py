"""trace.py: the page and the picture say what `decode` reported, stand alone, and show any text as text."""
import re
import sys
import unicodedata
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

import cli
import generate
import view
from brute_force import tiny_model
from tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
MODES = ("sbd", "verified", "ntp")
OPTIONS = dict(block_size=8, gamma=2.0, max_new_tokens=44, stop_ids=(), hedges=2, temperature=0.0, top_k=None,
               top_p=None,
               seed=0, sampler="eb", factor=1.0, threshold=0.9)


class Pieces:
    """A tokenizer of 13 tokens: markup, halves of a character, bytes that are none, characters that do not
    show."""
    tokens = [b"<script>alert(1)</script>", b" & &amp;", b"\"quoted'", b"\n\n", b"\t  x ", b"<mask>",
              "é".encode()[:1], "é".encode()[1:],
              b"\xff", b"\x00\x1b[31m", "\u202e\u2028".encode(), b"", "你好".encode()]

    def decode_bytes(self, ids):
        return b"".join(self.tokens[i] for i in ids)


class Page(HTMLParser):
    """What a browser reads: the tokens of each sample's text, the titles of each forward's line, all tags,
    plain text."""

    def __init__(self, source):
        super().__init__()
        self.samples, self.lines, self.tags, self.text, self.stack = [], [], [], "", []
        self.feed(source)
        self.close()
        assert self.stack == [], "every tag is closed"

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append((tag, attributes))
        if tag not in ("meta", "br"):
            self.stack.append(tag)
        if tag == "section":
            self.samples.append([])
            self.lines.append([])
        if tag == "span":
            self.samples[-1].append([int(attributes["data-token"]), int(attributes["data-forward"]), ""])
        if tag == "g":
            self.lines[-1].append((int(attributes["data-forward"]), []))

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        self.text += data
        if "span" in self.stack:
            self.samples[-1][-1][2] += data
        if self.stack[-2:] == ["text", "title"]:
            self.lines[-1][-1][1].extend(data.split("\n"))


def traced(mode, tmp_path, prompts=1, tokenizer=Pieces(), name="out.html", prompt=(1, 0, 2), **changed):
    """Decode and write -> (source of the file, Page or None, the recorded steps by sample)."""
    options = OPTIONS | dict(mode=mode) | changed
    model = tiny_model(seed=2, head=0.3)
    recorded = [view.record(step) for steps in generate.decode(model, [list(prompt)] * prompts, **options)
                for step in steps]
    view.write(tmp_path / name, prompt, recorded, tokenizer, options)
    source = (tmp_path / name).read_text(encoding="utf-8")
    samples = [[s for s in recorded if s.row.index == i] for i in range(prompts)]
    return source, Page(source) if name.endswith("html") else None, samples


@pytest.mark.parametrize("mode", MODES)
def test_every_token_stands_once_in_order_with_the_forward_that_decided_it(mode, tmp_path):
    for case in (dict(), dict(prompts=3, temperature=0.8), dict(max_new_tokens=1),
                 dict(stop_ids=(4,), temperature=1.0, seed=3), dict(block_size=1)):
        _, page, samples = traced(mode, tmp_path, **case)
        assert len(page.samples) == len(samples)
        for shown, steps in zip(page.samples, samples):
            tokens = [token for s in steps for token in s.final]
            decided = {position: s.row.nfe for s in steps for position, _ in s.revealed}
            assert [(token, forward) for token, forward, _ in shown] == [(t, decided[p]) for p,
                                                                         t in enumerate(tokens)]


@pytest.mark.parametrize("mode", MODES)
def test_header_and_bars_count_what_was_decoded(mode, tmp_path):
    _, page, samples = traced(mode, tmp_path, prompts=2, temperature=0.8)
    for shown, steps in zip(page.samples, samples):
        n, nfe = len(shown), steps[-1].row.nfe
        assert f"{n} tokens in {nfe} forwards, NFE speedup {n / nfe:.2f}" in page.text
        for forward in range(1, nfe + 1):
            assert f"forward {forward}: {sum(f == forward for _, f, _ in shown)} tokens" in page.text
    assert f"Sample 2: {mode}, " in page.text and "temperature 0.8" in page.text


def test_blocks_fill_in_as_decode_reported(tmp_path):
    _, page, [steps] = traced("sbd", tmp_path)
    assert [forward for forward, _ in page.lines[0]] == [s.row.nfe for s in steps]
    out_of_order = 0
    for (_, titles), s in zip(page.lines[0], steps):
        assert len(titles) == len(s.block)
        for position, (token, title) in enumerate(zip(s.block, titles), s.start):
            shown = f", position {position}, token {token}"
            assert title == f"position {position}, masked" if token is None else shown in title
            assert (f"forward {s.row.nfe}," in title) == ((position, token) in s.revealed)
        known = [token is not None for token in s.block]
        out_of_order += known != sorted(known, reverse=True)
    assert out_of_order


def test_accepted_and_rejected_drafts_are_listed(tmp_path):
    seen = set()
    for case in (dict(), dict(stop_ids=(4,), temperature=1.0, seed=3),
                 dict(max_new_tokens=17, temperature=0.3)):
        _, page, [steps] = traced("verified", tmp_path, **case)
        for (_, titles), s in zip(page.lines[0], steps):
            kept = len(s.final)
            assert all(f"token {t}" in title for t, title in zip(s.final, titles))
            for j, title in enumerate(titles[kept:kept + len(s.drafted) - kept + 1], kept - 1):
                unchecked = s is steps[-1] and kept == 1
                fate = ("not checked: the text ends here" if unchecked else "behind the end" if s is steps[-1]
                        else "rejected" if j == s.accepted else "behind the rejected token")
                assert title == f"draft {j + 1}, token {s.drafted[j]}, {fate}"
                seen.add(fate)
            corrected = [title for title in titles if title.startswith("the model's own token there")]
            rejected = any("rejected" == t.split(", ")[-1] for t in titles)
            assert corrected == [f"the model's own token there, {s.row.next}"] * rejected
    assert {"rejected", "behind the rejected token"} <= seen


@pytest.mark.parametrize("mode", MODES)
def test_any_text_is_shown_as_text(mode, tmp_path):
    prompt = tuple(i for i in range(13) if i != 5)
    _, page, _ = traced(mode, tmp_path, prompt=prompt, temperature=1.5, seed=1, max_new_tokens=120)
    assert [tag for tag, _ in page.tags].count("script") == 1, "the page's own"
    known = "html head meta title style body p section h2 span br svg rect details summary div g text script"
    assert {tag for tag, _ in page.tags} <= set(known.split())
    shown = page.text[page.text.index("<script>"):]
    assert shown.startswith("<script>alert(1)</script> & &amp;\"quoted'⏎⏎⇥  x ⟨c3⟩é⟨ff⟩⟨U+0000 U+001B⟩[31m"
                            "⟨U+202E U+2028⟩⟨#11⟩你好")
    alone = {0: "<script>alert(1)</script>", 1: " & &amp;", 2: "\"quoted'", 3: "⏎⏎", 4: "⇥  x ", 8: "⟨ff⟩",
             11: "⟨#11⟩", 12: "你好"}
    texts = {token: text for token, _, text in page.samples[0]}
    assert all(texts[token] == text for token, text in alone.items() if token in texts) and len(texts) > 6


def test_a_split_character_stands_in_its_last_token():
    assert view.spell([6, 7], Pieces()) == ["⟨c3⟩", "é"]
    assert view.spell([7, 6, 8], Pieces()) == ["⟨a9⟩", "⟨c3⟩", "⟨ff⟩"]
    assert view.spell([6], Pieces()) == ["⟨c3⟩"] and view.spell([], Pieces()) == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ("out.html", "out.svg"))
def test_files_need_no_network(mode, name, tmp_path):
    source, _, _ = traced(mode, tmp_path, name=name)
    source = source.replace('xmlns="http://www.w3.org/2000/svg"', "")          # a name, never fetched
    assert not re.search(r"https?:|//\w|@import|url\(|<link|<img|src=|href=", source)
    assert "prefers-color-scheme:dark" in source


@pytest.mark.parametrize("mode", MODES)
def test_picture_is_well_formed_and_shows_every_forward(mode, tmp_path):
    source, _, [steps, _] = traced(mode, tmp_path, name="out.svg", prompts=2, temperature=1.5)
    root = ElementTree.fromstring(source)
    lines = [int(g.get("data-forward")) for g in root if g.tag.endswith("}g")]
    assert lines == [s.row.nfe for s in steps]
    assert f"{mode}, " in "".join(root.itertext())


@pytest.mark.parametrize("mode", MODES)
def test_command_line_writes_the_page_of_what_it_printed(mode, tmp_path, monkeypatch, capsys):
    tokenizer = Tokenizer.from_pretrained(ROOT / "data" / "word_problems")
    model = tiny_model(vocab_size=tokenizer.vocab_size, mask_id=tokenizer.special_ids["<|mask|>"], seed=1)
    monkeypatch.setattr(generate, "load_model", lambda args, default: (model, tokenizer))
    monkeypatch.setattr(sys, "argv", ["generate.py", "--prompt=Mia has 14 <b>apples</b> & 'pens'.",
                                      f"--mode={mode}", "--max_new_tokens=24",
                                      f"--trace={tmp_path / 'out.html'}", *["--gamma=3"] * (mode == "sbd")])
    generate.main()
    page = Page((tmp_path / "out.html").read_text(encoding="utf-8"))
    assert "Mia has 14 <b>apples</b> & 'pens'." in page.text
    printed = capsys.readouterr()
    text = tokenizer.decode([token for token, _, _ in page.samples[0]])
    assert printed.out.rstrip("\n") in text and f"in {len(page.lines[0])} forwards" in printed.err
    assert [path.name for path in tmp_path.iterdir()] == ["out.html"]


def test_a_path_that_cannot_be_written_is_refused_before_the_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "load_model", lambda args, default: pytest.fail("loaded"))
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.html").mkdir()
    for path in (tmp_path / "none" / "out.html", tmp_path / "file" / "out.html", tmp_path / "folder.html",
                 tmp_path / "out.txt",
                 Path("/dev/null"), tmp_path / ("x" * 300 + ".html")):
        monkeypatch.setattr(sys, "argv", ["generate.py", "--prompt=x", f"--trace={path}"])
        with pytest.raises(ValueError, match="--trace"):
            generate.main()


def test_an_existing_page_survives_the_check(tmp_path):
    (tmp_path / "out.html").write_text("old")
    cli.check_file("--trace", tmp_path / "out.html", (".html",))
    assert (tmp_path / "out.html").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_what_could_drive_a_terminal_is_made_visible():
    """A title change, a link, NUL, marks that turn the direction of text: nothing of them is left."""
    evil = "a\x1b]0;title\x07b\x1b]8;;http://x\x1b\\c\x00\u202e\u2066\x9b31m\td\n\x7f\r"
    shown = view.visible_text(evil)
    assert not any(unicodedata.category(c) in ("Cc", "Cf") for c in shown if c not in "\n\t")
    assert "⟨U+001B⟩" in shown and "⟨U+202E⟩" in shown and shown.count("\n") == 1 and shown.count("\t") == 1
    for harmless in ("plain ünïcode 漢字 🙂\n", "می\u200cخواهم", "👨\u200d👩\u200d👧", "\U0001fae9 \ue0b0"):
        assert view.visible_text(harmless) == harmless

    class Evil:
        def decode(self, ids):
            return evil
    for color in (True, False):
        row = generate.Row(0, 5)
        line = view.show_block(generate.Step(row, [(0, 1)], [1], 0, [1, None]), Evil(), color)
        assert "\n" not in line and "\x00" not in line and "\u202e" not in line
        assert set(re.findall(r"\x1b\[[0-9;]*m", line)) <= {"\x1b[1;32m", "\x1b[0m"}
        assert line.count("\x1b") == 2 * color
