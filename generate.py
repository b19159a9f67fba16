"""Algorithms 2 and 3: decode blocks of tokens with an exact cache; and the command line.

    python generate.py --gamma 0.1                         the shipped model, a held-out word problem
    python generate.py --init_from=DIR --prompt "..."      your own

One loop, `decode`, serves every mode and yields after each forward; `generate`, streaming, the live view and
stop texts read what it yields. Next-token decoding (NTP) is verified decoding (method section 10) with blocks
of one token.

Shapes: B rows, k block size, d draft length, n places whose logits are read, V vocabulary, C hidden size, W
window. """
from cli import (add_model, add_options, check_file, load_model, need, need_mask, open_device, parser,
                 read_prompt, run)

import argparse
import itertools
import math
import numbers
import operator
import os
import sys
import time
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import numpy as np
import torch

import view
from eb_sampler import SAMPLERS, choose, entropy_of, noise_keys, probabilities
from kernels.cuda_graph import Graphs
from kv_cache import decode_kernel, lend_cache, run_window
from model import compile_layers
from tokenizer import TextStream

HERE = Path(__file__).resolve().parent


def option(default, help=None, good=None, wanted="", type=None, choices=None):
    """A field of Options: its default, what --help says, its bound and the bound in words."""
    metadata = dict(help=help, good=good, wanted=wanted or "a whole number", type=type, choices=choices)
    return field(default=default, metadata=metadata if help else {})


@dataclass
class Options:
    """How to decode; the one place that knows an option. ValueError, one line, for what cannot be meant."""
    block_size: int = option(16, "k, tokens decoded together", lambda x: 1 <= x <= 1024, "1 to 1024", int)
    gamma: float = option(0.1, "sbd: entropy budget of a step, nats", lambda x: x >= 0, "0 or more", float)
    max_new_tokens: int = option(256, "most tokens a text", lambda x: 0 <= x < 2**31, "0 to 2^31 - 1", int)
    stop_ids: tuple | None = option(None)   # ids that end a text; None: the model's own, (): none
    mode: str = option("sbd", "sbd: the paper's blocks; ntp: one token a forward; verified: ntp's text from "
                              "checked blocks", choices=("sbd", "ntp", "verified"))
    hedges: int = option(2, "verified: blocks a window", lambda x: 1 <= x <= 64, "1 to 64", int)
    temperature: float = option(0.0, "0: the most probable token", lambda x: 0 <= x < math.inf, "0 or more",
                                float)
    top_k: int | None = option(None, "draw from the k most probable ids", lambda x: x >= 1, "1 or more", int)
    top_p: float | None = option(None, "draw from the fewest tokens that have this probability together",
                                 lambda x: 0 < x <= 1, "more than 0 and at most 1", float)
    seed: int | None = option(None, "sample i draws with seed + i", type=int)
    numbers: tuple | None = option(None)    # of the prompts in a larger file, where they are a part of it
    sampler: str = option("eb", "sbd: which masked tokens to reveal", choices=SAMPLERS)
    factor: float = option(1.0, "--sampler=factor: its f", lambda x: x >= 0, "0 or more", float)
    threshold: float = option(0.9, "--sampler=threshold: the confidence that reveals a token",
                              lambda x: 0 <= x <= 1, "0 to 1", float)
    attention: str = option("auto", "what attends to the cache; auto: triton on cuda, else sdpa",
                            choices=("auto", "triton", "sdpa"))

    def __post_init__(self):
        for f in (f for f in fields(self) if f.metadata):
            value, (good, wanted, kind, choices) = getattr(self, f.name), list(f.metadata.values())[1:]
            if choices:
                need(value in tuple(choices), f"{f.name} {value!r}: wanted {', '.join(choices)}")
            elif not (value is None and f.default is None):
                kind = numbers.Integral if kind is int else numbers.Real
                is_number = isinstance(value, kind) and not isinstance(value, bool)
                good_number = is_number and (not good or good(value)) and not 2**1000 < value < math.inf
                need(good_number, f"{f.name} {value!r}: wanted {wanted}")

    @property
    def k(self) -> int:
        return 1 if self.mode == "ntp" else self.block_size

    @property
    def bound(self) -> float:
        """What the sampler's rule compares with."""
        return {"factor": self.factor, "threshold": self.threshold}.get(self.sampler, self.gamma)


@dataclass
class Row:
    """One text being decoded. Whoever reads the steps may set `done` to end it."""
    index: int                                    # which prompt it continues
    limit: int                                    # most new tokens
    seed: int = 0                                 # of its noise by position and id (method section 10)
    tokens: list = field(default_factory=list)    # final ones, prompt excluded
    nfe: int = 0                                  # forwards, counted as method section 5 says
    stopped: bool = False                         # by a stop id
    done: bool = False
    start: int = 0  # sbd: position of the block's first place, from the prompt's end
    block: list = field(default_factory=list)     # sbd: tokens by place, None = masked
    pending: list = field(default_factory=list)   # sbd: the finished block on its way into the cache
    next: int = -1                                # verified: decided, not yet in the cache
    draft: list = field(default_factory=list)     # verified: proposed behind `next`
    confidence: list = field(default_factory=list)  # verified: q_j(draft token j), float64

    def extend(self, tokens, stop_ids) -> list:
        """Make tokens final up to the first stop id or the limit, where the row ends; returns those kept."""
        start = len(self.tokens)
        for token in tokens:
            self.tokens.append(token)
            self.stopped = token in stop_ids
            self.done = self.stopped or len(self.tokens) == self.limit
            if self.done:
                break
        return self.tokens[start:]

    def open_block(self, k):
        """sbd: a finished block becomes `pending`, for one forward, and k masks follow it."""
        self.pending = []
        if None not in self.block:
            self.pending, self.block, self.start = self.block, [None] * k, len(self.tokens)

    def reveal(self, found, stop_ids) -> "Step":
        """sbd: fill places of the block, [(place, token)]; what no mask precedes is final."""
        for place, token in found:
            self.block[place] = token
        known = list(itertools.takewhile(lambda token: token is not None, self.block))
        final = self.extend(known[len(self.tokens) - self.start:], stop_ids)
        self.nfe += 1
        found = [(self.start + place, token) for place, token in found]
        return Step(self, found, final, self.start, list(self.block))

    def ends_with_next(self, stop_ids) -> bool:
        return not self.done and (self.next in stop_ids or len(self.tokens) + 1 == self.limit)

    def accept(self, a, stop_ids) -> "Step":
        """verified: `next` and the first a draft tokens are final."""
        start = len(self.tokens)
        final = self.extend([self.next, *self.draft[:a]], stop_ids)
        self.nfe += 1
        return Step(self, list(enumerate(final, start)), final, start, [], self.draft, len(final) - 1)


@dataclass
class Step:
    """What one forward did for one row; positions count from the end of the prompt."""
    row: Row
    revealed: list                                # (position, token) decided by this forward, in any order
    final: list                                   # tokens that are final now: all before them is known
    start: int  # position of the block's first place, or of the first final token
    block: list                                   # sbd: the block after this forward, None = masked
    drafted: list = field(default_factory=list)   # verified: the draft that this forward checked
    accepted: int = 0                             # verified: how many of its tokens are in `final`


# -------------------------------------------------------------------------------- the loop and its steps

@torch.inference_mode()
def decode(model, prompts, *given, **options):
    """Algorithm 3 and method section 10: after each forward, a Step for every row in it. See `generate`."""
    o = Options(*given, **options)
    prompts = [token_ids(p, "a prompt") for p in prompts]
    check_prompts(model.config, prompts, o.mode, o.block_size)
    stop_ids = token_ids(model.config.stop_ids if o.stop_ids is None else o.stop_ids, "stop_ids")
    o = replace(o, seed=int.from_bytes(os.urandom(7), "big") if o.seed is None else int(o.seed),
                stop_ids=frozenset(stop_ids))
    room = [model.config.max_position_embeddings - len(p) for p in prompts]
    rows = [Row(i, min(o.max_new_tokens, n), o.seed + (o.numbers or range(len(room)))[i])
            for i, n in enumerate(room)]
    scratch = 2 * o.k if o.mode == "sbd" else o.k + o.k * min(o.hedges, o.k)
    longest = max(map(len, prompts)) + max(row.limit for row in rows) + scratch   # tokens
    step = sbd_step if o.mode == "sbd" else verified_step
    model.fuse()
    with lend_cache(model, len(rows), longest, o.attention) as cache:
        prefill(model, cache, prompts, rows, o)
        while True:
            steps = []
            if o.mode != "sbd":  # a `next` that ends its row needs no forward
                steps = [row.accept(0, o.stop_ids) for row in rows if row.ends_with_next(o.stop_ids)]
            rows = leave(cache, rows)
            if rows:
                steps += step(model, cache, rows, o)
            if not steps:
                return
            yield steps


def leave(cache, rows) -> list:
    """The rows that go on; those that are done leave the batch and the cache."""
    alive = [i for i, row in enumerate(rows) if not row.done]
    if 0 < len(alive) < len(rows):
        cache.keep(alive)
    return [rows[i] for i in alive]


def prefill(model, cache, prompts, rows, o):
    """Run the prompts causally into the cache: no NFE. It decides each row's `next`."""
    lengths = [len(p) for p in prompts]
    hidden = run_window(model, cache, prompts, lengths, [[] for _ in rows], o.k)
    cache.commit(lengths)
    for row in rows:
        row.done = row.limit <= 0
    if o.mode != "sbd":
        last, zero = torch.tensor(lengths)[:, None] - 1, torch.zeros(len(rows), 1, dtype=torch.int64)
        logits = logits_at(model, hidden, last.to(hidden.device))  # (B, 1, V)
        keys = keys_of(rows, [0] * len(rows), 1, o).to(hidden.device)
        token, score = pick(logits, keys, zero.to(hidden.device), o)
        for row, (token, _) in zip(rows, fetch(model, token, score).tolist()):
            row.next = int(token)


def sbd_step(model, cache, rows, o) -> list:
    """Algorithm 2, one forward: reveal a set of each row's block. A finished block rides along (Fig. 2b)."""
    for row in rows:
        row.open_block(o.k)
    mask_id, device = model.config.mask_id, cache.k.device
    pending = [len(row.pending) for row in rows]
    masked = [[i for i, token in enumerate(row.block) if token is None] for row in rows]
    windows = [row.pending + [mask_id if token is None else token for token in row.block] for row in rows]
    n = max(map(len, masked))  # what goes to the device goes before the forward
    places = table([[c + i for i in m] for c, m in zip(pending, masked)], n, 0).to(device)      # (B, n)
    keys = keys_of(rows, [row.start - c for row, c in zip(rows, pending)], 2 * o.k, o).to(device)
    hidden = run_window(model, cache, windows, pending, [[c] for c in pending], o.k)
    cache.commit(pending)                                          # the block's own keys are never kept
    logits = logits_at(model, hidden, places)                      # (B, n, V)
    token, _ = pick(logits, keys, places, o)
    p = probabilities(logits)                                      # untempered: so are entropy and confidence
    token, H, c = np.split(fetch(model, token, entropy_of(p), p.amax(-1)), 3, -1)   # (B, n) each
    exact = np.float64 if p.dtype == torch.float64 else np.float32
    is_masked = np.arange(n) < np.array([len(m) for m in masked])[:, None]
    reveal = SAMPLERS[o.sampler](H.astype(exact), c.astype(exact), is_masked, o.bound)   # Eq. 8 and its peers
    found = [[(i, t) for i, t, show in zip(*each) if show]
             for each in zip(masked, token.astype(int).tolist(), reveal.tolist())]
    return [row.reveal(new, o.stop_ids) for row, new in zip(rows, found)]


def verified_step(model, cache, rows, o) -> list:
    """Method section 10, one forward: check the draft, and draft behind the check's likeliest outcomes."""
    k, mask_id, device = o.k, model.config.mask_id, cache.k.device
    lengths = [len(row.draft) for row in rows]
    outcomes = [likeliest(row.confidence, o.hedges) if k > 1 else [] for row in rows]   # a block for each
    windows = [[row.next, *row.draft] + [mask_id] * (k * len(a)) for row, a in zip(rows, outcomes)]
    d, first = max(lengths), [len(row.tokens) + 1 for row in rows]   # the first position not decided yet
    draft = table([row.draft for row in rows], d, -1).to(device)   # goes to the device before the forward
    laid, length = table(outcomes, max(map(len, outcomes)), -1).to(device), torch.tensor(lengths).to(device)
    keys = keys_of(rows, first, d + k, o).to(device)
    sees = [[1 + a for a in each] for each in outcomes]
    hidden = run_window(model, cache, windows, [1 + n for n in lengths], sees, k)
    # Check: the NTP prediction at each of [next | draft] against the draft token behind it.
    places = torch.minimum(torch.arange(1 + d, device=device), length[:, None])
    token, score = pick(logits_at(model, hidden, places), keys, places, o)       # (B, 1 + d)
    accepted = (token[:, :d] == draft).long().cumprod(-1).sum(-1)[:, None]       # (B, 1)
    found = [accepted, token.gather(1, accepted), score.gather(1, accepted)]
    if k > 1:   # Draft: read it off the block that was laid out for this outcome, if there is one.
        hit, nth = (laid == accepted).max(-1, keepdim=True)        # whether there is one, and which
        i = torch.arange(1, k, device=device)                      # place 0 is the new `next`, known already
        places = (1 + length[:, None] + k * nth + i) * hit         # else any place will do
        found += [hit, *drafted(logits_at(model, hidden, places), keys, accepted + i, o)]
    steps = []
    for row, (a, token, _, *new) in zip(rows, fetch(model, *found).tolist()):
        steps.append(row.accept(int(a), o.stop_ids))
        row.next, hit = int(token), bool(new and new[0])
        row.draft, row.confidence = [int(t) for t in new[1:k] if hit], new[k:] if hit else []
    cache.commit([1 + step.accepted for step in steps])
    return steps


def drafted(logits, keys, places, o):
    """logits (B, n, V) -> draft tokens and their probabilities in the draft's distribution, (B, n) each."""
    token, c = pick(logits, keys, places, o)
    if not o.temperature:                                          # the softmax at its largest
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        c = 1 / (logits - c[..., None]).exp_().sum(-1)
    return token, c


def likeliest(confidence, hedges):
    """The `hedges` most probable acceptance lengths of a draft with these confidences, ties to the smaller.

    Length a has probability c_1 ... c_a (1 - c_{a+1}), the whole draft c_1 ... c_d.
    """
    reached, p = 1.0, []
    for c in confidence:
        p.append(reached * (1 - c))
        reached *= c
    p.append(reached)                                              # d + 1 of them
    return sorted(range(len(p)), key=lambda a: -p[a])[:hedges]     # stable


def pick(logits, keys, places, o):
    """logits (B, n, V) -> tokens (B, n): the argmax, at a temperature choose(p, t) with the noise of
    keys[places] (method section 10); and its logit, or its probability in p."""
    if not o.temperature:
        best, token = logits.max(-1)  # argmax alone is slower in bfloat16 on the CPU
        return token, best
    p = probabilities(logits, o.temperature, o.top_k, o.top_p)
    token = choose(p, at(keys, places))
    return token, p.gather(-1, token[..., None])[..., 0]


def keys_of(rows, first, n, o):
    """The keys of the noise at n positions from first (B,) on, (B, n, 4); at temperature 0 empty."""
    if not o.temperature:
        return torch.empty(len(rows), n, 0)
    return noise_keys([row.seed for row in rows], np.add.outer(first, np.arange(n)))


def logits_at(model, hidden, places):
    """hidden (B, W, C), places (B, n) -> logits (B, n, V), minus infinity at the mask id: the model never
    emits it."""
    logits = model.lm_head(at(hidden, places))
    if model.config.mask_id is not None:
        logits[..., model.config.mask_id] = -torch.inf
    return logits


def at(x, places):
    """x (B, W, C), places (B, n) -> (B, n, C)."""
    return x.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))


def table(lists, width, fill):
    """Lists of at most `width` numbers -> (B, width) int64, filled on the right."""
    rows = [[*each] + [fill] * (width - len(each)) for each in lists]
    return torch.tensor(rows, dtype=torch.int64).view(len(rows), width)


def fetch(model, *tensors):
    """Tensors of B rows -> float64 array (B, ...), in one transfer: a forward's only wait for the device."""
    values = torch.cat([t.reshape(len(t), -1).double() for t in tensors], 1).cpu().numpy()
    if not np.isfinite(values).all():
        raise ValueError(f"the model's logits are not finite in {model.lm_head.weight.dtype}: "
                         "try --dtype=float32, or check the weights")
    return values


def generate(model, prompts, *given, **options):
    """Continue prompts, lists of token ids -> Rows with .tokens (prompt excluded), .nfe and .stopped (by a
    stop id).

    mode: "sbd" decodes blocks of `block_size` with entropy budget `gamma` (nats); "ntp" one token a forward;
    "verified" drafts blocks, checks them and gives NTP's text, with `hedges` blocks a window. All arguments,
    in this order too: the fields of Options. At most max_new_tokens, and never past the model's context.
    Raises ValueError.
    """
    rows = {}
    for steps in decode(model, prompts, *given, **options):
        rows |= {step.row.index: step.row for step in steps}
    return [rows.get(i) or Row(i, 0) for i in range(len(prompts))]


def token_ids(values, name) -> list:
    """Any whole numbers, as ints; ValueError where they are none."""
    try:
        return [operator.index(value) for value in values]
    except TypeError:
        raise ValueError(f"{name}: wanted a list of token ids, whole numbers, given {values!r}") from None


def check_prompts(config, prompts, mode, block_size):
    """What a model cannot continue."""
    longest, context = max(map(len, prompts), default=0), config.max_position_embeddings
    need(prompts and all(map(len, prompts)),
         "an empty prompt: give at least one token (text, or the tokenizer's BOS)")
    need(longest < context,
         f"a prompt of {longest} tokens leaves no room in the model's context of {context}: shorten it")
    need(all(0 <= t < config.vocab_size for p in prompts for t in p),
         f"a prompt id is outside the vocabulary, 0 to {config.vocab_size - 1}: is it the model's tokenizer?")
    if mode == "sbd" or mode == "verified" and block_size > 1:
        need_mask(config, "the model")


# -------------------------------------------------------------------------------- command line

def parse(argv=None):
    p = parser(__doc__)
    a = p.add_argument
    a("--prompt", help="text to continue; without one, text piped in, else a held-out word problem, "
                       "which is also decoded with ntp")
    a("--prompt_file", type=Path, help="read the prompt from a file; - is standard input")
    a("--chat", action="store_true", help="wrap the prompt into the checkpoint's chat template")
    a("--num_samples", type=int, default=1, help="samples, decoded as one batch")
    a("--stop", action="append", default=[],
      help="a text that ends the sample and is not printed; may be given again")
    a("--show", action="store_true", help="show each forward's block, where stdout is a terminal")
    a("--trace", type=Path, help="write what each forward did: out.html, a page, or out.svg, of sample 1")
    a("--compile", action="store_true",
      help="for cuda: torch.compile the layers and, with Triton's attention, replay each forward as one CUDA "
           "graph; slower to start")
    add_model(p, "default: the shipped tiny model", dtypes=("float32", "bfloat16", "float16", "float64"))
    add_options(p, Options, mode=None, gamma=None, seed=0)
    return p.parse_args(argv, argparse.Namespace(block_size=None))   # None: not given, an adapter has its own


# The options that not every mode has a use for, and the modes that do.
USED_BY = dict(gamma=["sbd"], sampler=["sbd"], factor=["sbd"], threshold=["sbd"], hedges=["verified"],
               block_size=["sbd", "verified"])


def check(args):
    """Refuse what can be refused before a model is loaded -> decoding options, the prompt's text or None."""
    defaults = parse([])
    args.mode = args.mode or ("verified" if args.gamma is None else "sbd")
    options = {f.name: getattr(args, f.name) for f in fields(Options) if f.metadata}
    for name in ("gamma", "block_size"):
        options[name] = getattr(Options if options[name] is None else args, name)
    Options(**options)
    need(1 <= args.num_samples <= 2**16, f"--num_samples {args.num_samples}: wanted 1 to {2**16}")
    need(not args.trace or args.max_new_tokens,
         "--trace: --max_new_tokens=0 runs no forward that could be shown, wanted at least 1")
    text = read_prompt(args)
    need(text is not None or not args.init_from,
         "no prompt: give --prompt TEXT, --prompt_file FILE or pipe a text in")
    check_file("--trace", args.trace, (".html", ".svg"))
    decode_kernel(args.attention, open_device(args.device), getattr(torch, args.dtype or "float32"))
    for name, modes in USED_BY.items():
        if args.mode not in modes and getattr(args, name) != getattr(defaults, name):
            print(f"generate.py: --{name} has no effect in --mode={args.mode}, only in {' and '.join(modes)}",
                  file=sys.stderr)
    if not args.temperature and (args.top_k or args.top_p):
        print("generate.py: --top_k and --top_p have no effect at --temperature=0", file=sys.stderr)
    return options, text


def compile_decoding(model):
    """--compile: both halves of every layer, for any length, so few variants; on CUDA also graphs."""
    if model.lm_head.weight.device.type == "cuda":
        model.graphs = Graphs()
    return compile_layers(model, dynamic=True)


def run_samples(model, tokenizer, ids, args, options, show):
    """Decode and print --num_samples texts as they come -> (tokens, forwards) of each, steps for --trace."""
    n, color = args.num_samples, sys.stdout.isatty()
    skip = {*model.config.stop_ids, *tokenizer.special_ids.values()}
    streams = [TextStream(tokenizer, args.stop, skip) for _ in range(n)]
    texts, kept, nfe = [""] * n, [], [0] * n
    for steps in decode(model, [ids] * n, **options):
        kept += map(view.record, steps if args.trace else ())
        for step in steps:
            i, row = step.row.index, step.row
            piece = streams[i].feed(step.final, row.done)
            row.done |= streams[i].found
            texts[i], nfe[i] = texts[i] + piece, row.nfe
            if show:
                print(view.show_block(step, tokenizer, color), flush=True)
            elif n == 1:
                print(view.visible_text(piece) if color else piece, end="", flush=True)
    for i, text in enumerate(texts if show or n > 1 else ()):
        print((f"\nsample {i + 1}" if n > 1 else "") + f"\n{view.visible_text(text) if color else text}")
    return [(stream.tokens, spent) for stream, spent in zip(streams, nfe)], kept


def main(argv=None):
    args = parse(argv)
    options, text = check(args)
    shipped = HERE / "checkpoints" / ("tiny-verified" if args.mode == "verified" else "tiny-sbd")
    model, tokenizer = load_model(args, shipped)
    if model.adapter and args.block_size is None:   # half the longest one of its training
        options["block_size"] = max(2, model.adapter.get("block_size_max", 2 * Options.block_size) // 2)
    if args.compile:
        compile_decoding(model)
    demo = text is None
    if demo:
        from data.word_problems.prepare import problems
        text = problems("val", 4)[3].prompt
    if args.chat:
        ids = tokenizer.apply_chat_template([dict(role="user", content=text)])
    else:
        ids = ([tokenizer.bos_id] if tokenizer.bos_id is not None else []) + tokenizer.encode(text)
    if demo:
        print(text.rstrip(), end="\n\n")
        for mode in (args.mode, "ntp"):   # the first forwards of a process are slow: out of the comparison
            generate(model, [ids], **options | dict(mode=mode))
    began = time.perf_counter()
    show = demo or args.show and sys.stdout.isatty()
    counts, steps = run_samples(model, tokenizer, ids, args, options, show)
    seconds = time.perf_counter() - began
    if args.trace:
        view.write(args.trace, ids, steps, tokenizer, options)
    tokens, nfe = map(sum, zip(*counts))
    summary = (f"{args.mode}: {tokens} tokens in {nfe} forwards, NFE speedup {tokens / max(nfe, 1):.2f}, "
               f"{tokens / max(seconds, 1e-9):,.0f} tokens/s")
    if not demo:
        print(f"\n{summary}", file=sys.stderr)
        return
    began = time.perf_counter()
    [ntp] = generate(model, [ids], **options | dict(mode="ntp"))
    seconds = max(time.perf_counter() - began, 1e-9)
    [row] = generate(model, [ids], **options)
    agree = "the same text" if row.tokens == ntp.tokens else "different texts"
    print(f"\n{summary}; ntp: {len(ntp.tokens)} tokens in {ntp.nfe} forwards, "
          f"{len(ntp.tokens) / seconds:,.0f} tokens/s; {agree}")


if __name__ == "__main__":
    run(main)
