"""Algorithms 2 and 3: decode blocks of tokens with an exact cache; and the command line.

    python generate.py --gamma 0.1                         the shipped model, a held-out word problem
    python generate.py --init_from=DIR --prompt "..."      your own

One loop, `decode`, serves every mode and yields after each forward; `generate`, streaming, the live view and stop
texts read what it yields. Next-token decoding (NTP) is verified decoding (method section 10) with blocks of one token.

Shapes: B rows, k block size, d draft length, V vocabulary, C hidden size.
"""
from cli import add_model, add_options, load_model, need, open_device, parser, read_prompt, run

import itertools
import math
import os
import sys
import time
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
import torch

import view
from eb_sampler import SAMPLERS, distribution, entropy_of
from kernels.cuda_graph import Graphs
from kv_cache import decode_kernel, lend_cache, run_window
from model import compile_layers
from tokenizer import TextStream

HERE = Path(__file__).parent


def option(default, help=None, good=None, wanted="", type=None, choices=None):
    """A field of Options: its default, what --help says, its bound and the bound in words."""
    return field(default=default, metadata=dict(good=good, wanted=wanted, type=type, choices=choices)
                 | (dict(help=help) if help else {}))


@dataclass
class Options:
    """How to decode; the one place that knows an option. Raises ValueError, one line, for what cannot be meant."""
    block_size: int = option(16, "k, tokens decoded together", lambda x: 1 <= x <= 4096, "1 to 4096", int)
    gamma: float = option(0.1, "sbd: entropy budget of one step, nats", lambda x: x >= 0, "0 nats or more", float)
    max_new_tokens: int = option(256, "most tokens a text", lambda x: 0 <= x < 2**31, "0 to 2^31 - 1", int)
    stop_ids: tuple | None = option(None)   # ids that end a text; None: the model's own
    mode: str = option("sbd", "sbd: the paper's blocks; ntp: one token a forward; verified: NTP's text from checked blocks",
                       choices=("sbd", "ntp", "verified"))
    hedges: int = option(2, "verified: blocks a window", lambda x: 1 <= x <= 4096, "1 to 4096", int)
    temperature: float = option(0.0, "0: the most probable token", lambda x: 0 <= x < math.inf, "0 or more", float)
    top_k: int | None = option(None, "draw from the k most probable tokens only", lambda x: x >= 1, "1 or more", int)
    top_p: float | None = option(None, "draw from the fewest tokens that have this probability together",
                                 lambda x: 0 < x <= 1, "more than 0 and at most 1", float)
    seed: int | None = option(None, "sample i draws with seed + i", type=int)
    sampler: str = option("eb", "sbd: which masked tokens to reveal", choices=tuple(SAMPLERS))
    factor: float = option(1.0, "--sampler=factor: its f", lambda x: x >= 0, "0 or more", float)
    threshold: float = option(0.9, "--sampler=threshold: the confidence that reveals a token", lambda x: 0 <= x <= 1,
                              "0 to 1", float)
    attention: str = option("auto", "what attends to the cache; auto: triton on cuda, else sdpa",
                            choices=("auto", "triton", "sdpa"))

    def __post_init__(self):
        for f in fields(self):
            value, bound = getattr(self, f.name), f.metadata
            if bound["choices"]:
                need(value in bound["choices"], f"{f.name} {value!r}: wanted {', '.join(bound['choices'])}")
            elif bound["type"] and not (value is None and f.default is None):
                kind = int if bound["type"] is int else int | float
                good = isinstance(value, kind) and not isinstance(value, bool) and (not bound["good"] or bound["good"](value))
                need(good, f"{f.name} {value}: wanted {bound['wanted'] or 'a whole number'}")


@dataclass
class Row:
    """One text being decoded. Whoever reads the steps may set `done` to end it."""
    index: int                                    # which prompt it continues
    limit: int                                    # most new tokens
    generator: torch.Generator | None             # at temperature 0: none
    tokens: list = field(default_factory=list)    # final ones, prompt excluded
    nfe: int = 0                                  # forwards, counted as method section 5 says
    stopped: bool = False                         # by a stop id
    done: bool = False
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

    def uniforms(self, n):
        """The row's next n random numbers in [0, 1): the same alone and in any batch."""
        return torch.rand(n, generator=self.generator, dtype=torch.float64)


@dataclass
class Step:
    """What one forward did for one row; positions count from the end of the prompt."""
    row: Row
    revealed: list                                # (position, token) decided by this forward, in any order
    final: list                                   # tokens that are final now: all before them is known
    start: int                                    # position of the block's first place, or of the first final token
    block: list                                   # sbd: the block after this forward, None = masked
    drafted: list = field(default_factory=list)   # verified: the draft that this forward checked
    accepted: int = 0                             # verified: how many of its tokens are in `final`


def draw(p, u):
    """Draw ids (...) from probabilities p (..., V) with uniforms u (...) in [0, 1), by the inverse of their sum."""
    total = p.double().cumsum(-1)
    return torch.searchsorted(total, u[..., None] * total[..., -1:], right=True)[..., 0].clamp(max=p.shape[-1] - 1)


def at(hidden, index):
    """hidden (B, W, C), index (B, n) -> (B, n, C)."""
    return hidden.gather(1, index[..., None].expand(-1, -1, hidden.shape[-1]))


@torch.inference_mode()
def decode(model, prompts, *given, **options):
    """Algorithms 2 and 3 and method section 10: a generator over forwards, each yielding one Step for every row that
    took part. Arguments as in `generate`; rows leave the batch as they end.
    """
    o = Options(*given, **options)
    block_size, gamma, max_new_tokens, mode, hedges, attention = o.block_size, o.gamma, o.max_new_tokens, o.mode, o.hedges, o.attention
    temperature, top_k, top_p, seed, sampler, factor, threshold = o.temperature, o.top_k, o.top_p, o.seed, o.sampler, o.factor, o.threshold
    stop_ids = model.config.stop_ids if o.stop_ids is None else o.stop_ids
    check_prompts(model.config, prompts, mode, block_size)
    model.fuse()
    config, weight = model.config, model.lm_head.weight
    device, k = weight.device, 1 if mode == "ntp" else block_size
    stop_ids, select_rule = frozenset(map(int, stop_ids)), SAMPLERS[sampler]
    bound = {"factor": factor, "threshold": threshold}.get(sampler, gamma)
    seed = seed if seed is not None else int.from_bytes(os.urandom(7), "big")
    rows = [Row(i, min(max_new_tokens, config.max_position_embeddings - len(p)),
                torch.Generator().manual_seed(seed + i) if temperature else None) for i, p in enumerate(prompts)]
    scratch = 2 * k if mode == "sbd" else k + k * min(hedges, k)
    cache = lend_cache(model, len(rows), max(map(len, prompts)) + max(r.limit for r in rows) + scratch, attention)

    def forward(tokens, num_causal, blocks):
        """Run one window, a list of tokens a row -> hidden states (B, W, C)."""
        return run_window(model, cache, tokens, num_causal, blocks, k)

    def logits_of(hidden):
        logits = model.lm_head(hidden)
        if config.mask_id is not None:
            logits[..., config.mask_id] = -torch.inf               # the model never emits it
        return logits

    def fetch(*tensors):
        """Tensors of B rows -> float64 array (B, ...), in one transfer: the only wait for the device in a forward."""
        values = torch.cat([t.reshape(len(rows), -1).double() for t in tensors], 1).cpu().numpy()
        if not np.isfinite(values).all():
            raise ValueError(f"the model's logits are not finite in {weight.dtype}: try --dtype=float32, or check the weights")
        return values

    def sbd_step():
        """Algorithm 2, one forward: reveal a set of each row's block."""
        tokens, num_causal, blocks, places = [], [], [], []
        for row in rows:
            if not row.block:                                      # a new block: the finished one rides along
                row.block = [None] * k
            causal, row.pending = row.pending, []
            tokens.append(causal + [config.mask_id if t is None else t for t in row.block])
            num_causal.append(len(causal))
            blocks.append([len(causal)])
            places.append([i for i, t in enumerate(row.block) if t is None])
        n = max(map(len, places))                                  # what goes to the device goes before the forward
        index = torch.tensor([[c + i for i in p] + [0] * (n - len(p)) for c, p in zip(num_causal, places)]).to(device)
        hidden = forward(tokens, num_causal, blocks)
        cache.commit(num_causal)
        logits = logits_of(at(hidden, index))                      # (B, n, V), n the most masks of a row
        p = distribution(logits, temperature, top_k, top_p)
        if temperature:
            u = [row.uniforms(k)[place] for row, place in zip(rows, places)]
            token = draw(p, torch.nn.utils.rnn.pad_sequence(u, batch_first=True).to(device))
        else:
            token = logits.max(-1).indices                         # argmax alone is slower in bfloat16 on the CPU
        token, H, c = np.split(fetch(token, entropy_of(p), p.amax(-1)), 3, -1)   # (B, n)
        masked = np.array([[True] * len(p) + [False] * (n - len(p)) for p in places])
        exact = np.float64 if p.dtype == torch.float64 else np.float32
        reveal = select_rule(H.astype(exact), c.astype(exact), masked, bound)
        for row, place, ids, shown in zip(rows, places, token.astype(int).tolist(), reveal.tolist()):
            row.nfe += 1
            start = len(row.tokens) - next((i for i, t in enumerate(row.block) if t is None), k)
            revealed = [(start + i, t) for i, t, show in zip(place, ids, shown) if show]
            for i, t in revealed:
                row.block[i - start] = t
            known = list(itertools.takewhile(lambda t: t is not None, row.block))
            block = row.block
            final = row.extend(known[len(row.tokens) - start:], stop_ids)
            if len(known) == k:
                row.pending, row.block = row.block, []
            yield Step(row, revealed, final, start, list(block))

    def verified_step(q):
        """Method section 10, one forward: check the draft, and draft behind the likeliest outcomes of the check."""
        draft_length = torch.tensor([len(row.draft) for row in rows])
        d = int(draft_length.max())
        outcomes = [likeliest(row.confidence, hedges) if k > 1 else [] for row in rows]
        width = max(map(len, outcomes))
        laid = torch.tensor([o + [-1] * (width - len(o)) for o in outcomes]).to(device)   # before the forward: no later copy waits
        draft = torch.tensor([row.draft + [-1] * (d - len(row.draft)) for row in rows], dtype=torch.int64).view(len(rows), d).to(device)
        index, draft_length = torch.minimum(torch.arange(1 + d), draft_length[:, None]).to(device), draft_length.to(device)
        hidden = forward([[row.next, *row.draft] + [config.mask_id] * (k * len(o)) for row, o in zip(rows, outcomes)],
                         [1 + len(row.draft) for row in rows], [[a + 1 for a in o] for o in outcomes])
        # Check: the NTP prediction at each of [next | draft] against the draft token behind it.
        logits = logits_of(at(hidden, index))                      # (B, 1 + d, V)
        is_draft = draft >= 0
        if temperature:
            u = torch.stack([torch.cat((row.uniforms(len(row.draft) + k), torch.zeros(d - len(row.draft), dtype=torch.float64)))
                             for row in rows]).to(device)          # for the next token, the new draft, the checks
            p, draft = distribution(logits, temperature, top_k, top_p), draft.clamp(min=0)
            p_x = p[:, :d].gather(-1, draft[..., None])[..., 0]
            q_x = q[:, :d].gather(-1, draft[..., None])[..., 0] if d else p_x
            accepts = (u[:, k:] * q_x < p_x) & is_draft
        else:
            best, token = logits.max(-1)
            accepts = (token[:, :d] == draft) & is_draft
        accepted = accepts.long().cumprod(-1).sum(-1)              # (B,)
        if temperature:
            p = p.gather(1, accepted[:, None, None].expand(-1, 1, p.shape[-1]))[:, 0]
            if d:                                                  # behind a rejection: draw from max(p - q, 0)
                rest = (p - q.gather(1, accepted.clamp(max=d - 1)[:, None, None].expand(-1, 1, p.shape[-1]))[:, 0]).clamp(min=0)
                rejected = (accepted < draft_length) & (rest.sum(-1) > 0)
                p = torch.where(rejected[:, None], rest, p)
            following, finite = draw(p, u[:, 0]), p.amax(-1)
        else:
            following, finite = token.gather(1, accepted[:, None])[:, 0], best.gather(1, accepted[:, None])
        # Draft: read it off the block that was laid out for this outcome, if there is one.
        results = [accepted, following, finite]
        if k > 1:
            hit, nth = (laid == accepted[:, None]).max(-1)         # whether there is one, and which
            index = (1 + draft_length + k * nth)[:, None] + torch.arange(1, k, device=device)
            index = index * hit[:, None]                           # else any place will do
            logits = logits_of(at(hidden, index))                  # (B, k - 1, V)
            if temperature:
                q = distribution(logits, temperature, top_k, top_p)
                token = draw(q, u[:, 1:k])
                c = q.gather(-1, token[..., None])[..., 0]
            else:
                logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
                best, token = logits.max(-1)
                c = 1 / (logits - best[..., None]).exp_().sum(-1)  # the softmax at its largest
            results += [hit, token, c]
        steps = []
        for row, (a, following, _, *new) in zip(rows, fetch(*results).tolist()):
            row.nfe += 1
            start, a = len(row.tokens), int(a)
            final = row.extend([row.next, *row.draft[:a]], stop_ids)
            steps.append(Step(row, list(enumerate(final, start)), final, start, [], row.draft, len(final) - 1))
            row.next, drafted = int(following), bool(new and new[0])
            row.draft = [int(t) for t in new[1:k]] if drafted else []
            row.confidence = new[k:] if drafted else []
        cache.commit([1 + s.accepted for s in steps])
        return q, steps

    lengths = [len(p) for p in prompts]
    hidden = forward([list(p) for p in prompts], lengths, [[] for _ in rows])    # the prefill: no NFE
    cache.commit(lengths)
    if mode != "sbd":
        logits = logits_of(at(hidden, torch.tensor(lengths)[:, None].to(device) - 1))[:, 0]
        first = draw(distribution(logits, temperature, top_k, top_p), torch.cat([r.uniforms(1) for r in rows]).to(device)) \
            if temperature else logits.argmax(-1)
        for row, (token, _) in zip(rows, fetch(first, logits.amax(-1)).tolist()):
            row.next = int(token)
    del hidden
    q = None                                                       # the drafts' distributions (B, k - 1, V)
    for row in rows:
        row.done = row.limit <= 0
    while True:
        steps = []
        if mode != "sbd":                                          # a `next` that ends its row needs no forward
            for row in rows:
                if not row.done and (row.next in stop_ids or len(row.tokens) + 1 == row.limit):
                    row.nfe += 1
                    steps.append(Step(row, [(len(row.tokens), row.next)], row.extend([row.next], stop_ids), len(row.tokens) - 1, [], row.draft))
        alive = [i for i, row in enumerate(rows) if not row.done]
        if len(alive) < len(rows) and alive:
            cache.keep(alive)
            q = q[alive] if q is not None else None
        rows = [rows[i] for i in alive]
        if rows and mode == "sbd":
            steps += sbd_step()
        elif rows:
            q, new = verified_step(q)
            steps += new
        if not steps:
            if model.graphs is not None:
                model.graphs.idle = cache
            return
        yield steps


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


def generate(model, prompts, *given, **options):
    """Continue prompts, lists of token ids -> Rows with .tokens (prompt excluded), .nfe and .stopped (by a stop id).

    options: the fields of Options. At most max_new_tokens, and never past the model's context. Raises ValueError.
    """
    rows = {}
    for steps in decode(model, prompts, *given, **options):
        rows |= {step.row.index: step.row for step in steps}
    return [rows.get(i) or Row(i, 0, None) for i in range(len(prompts))]


def check_prompts(config, prompts, mode, block_size):
    """What a model cannot continue."""
    longest = max(map(len, prompts), default=0)
    for good, message in (
        (prompts and all(map(len, prompts)), "an empty prompt: give at least one token (text, or the tokenizer's BOS)"),
        (longest < config.max_position_embeddings,
         f"a prompt of {longest} tokens leaves no room in the model's context of {config.max_position_embeddings}: shorten it"),
        (all(0 <= t < config.vocab_size for p in prompts for t in p),
         f"a prompt id is outside the vocabulary, 0 to {config.vocab_size - 1}: is this the model's tokenizer?"),
        (config.mask_id is not None or mode == "ntp" or (mode == "verified" and block_size == 1),
         "the model names no mask token: give --mask_id (mask_id), an id of its vocabulary that text never uses")):
        need(good, message)


# ------------------------------------------------------------------------------------------ command line

def parse(argv=None):
    p = parser(__doc__)
    a = p.add_argument
    a("--prompt", help="text to continue; without one, text piped in, else a held-out word problem that is also decoded with NTP")
    a("--prompt_file", type=Path, help="read the prompt from a file; - is standard input")
    a("--chat", action="store_true", help="wrap the prompt into the checkpoint's chat template")
    a("--num_samples", type=int, default=1, help="samples, decoded as one batch")
    a("--stop", action="append", default=[], help="a text that ends the sample and is not printed; may be given again")
    a("--show", action="store_true", help="show each forward's block; plain text where the output is no terminal")
    a("--trace", type=Path, help="write what each forward did: out.html, a page, or out.svg, a picture of the first sample")
    a("--compile", action="store_true", help="for cuda: torch.compile the layers and, with Triton's attention, replay each forward as one CUDA graph; slower to start")
    add_model(p, "default: the shipped tiny model", dtypes=("float32", "bfloat16", "float16", "float64"))
    add_options(p, Options, mode=None, gamma=None, seed=0)
    return p.parse_args(argv)


# The options that not every mode has a use for, and the modes that do.
USED_BY = dict(gamma=["sbd"], sampler=["sbd"], factor=["sbd"], threshold=["sbd"], hedges=["verified"], block_size=["sbd", "verified"])


def load(args):
    """The model and tokenizer that the command line asks for."""
    decode_kernel(getattr(args, "attention", "auto"), open_device(args.device), getattr(torch, args.dtype or "float32"))
    shipped = HERE / "checkpoints" / ("tiny-verified" if args.mode == "verified" and (HERE / "checkpoints/tiny-verified").exists() else "tiny-sbd")
    model, tokenizer = load_model(args, shipped)
    return compile_decoding(model) if args.compile else model, tokenizer


def compile_decoding(model):
    """--compile: both halves of every layer (any length, so that few variants are compiled); on CUDA also graphs of the forwards."""
    if model.lm_head.weight.device.type == "cuda":
        model.graphs = Graphs()
    return compile_layers(model, dynamic=True)


def main():
    args, defaults = parse(), parse([])
    args.mode = args.mode or ("verified" if args.gamma is None else "sbd")
    for name, modes in USED_BY.items():
        if args.mode not in modes and getattr(args, name) != getattr(defaults, name):
            print(f"generate.py: --{name} has no effect in --mode={args.mode}, only in {' and '.join(modes)}", file=sys.stderr)
    if args.trace and args.max_new_tokens == 0:
        raise ValueError("--trace: --max_new_tokens=0 runs no forward that could be shown, wanted at least 1")
    args.gamma = 0.1 if args.gamma is None else args.gamma
    options = vars(Options(**{f.name: getattr(args, f.name) for f in fields(Options) if f.name != "stop_ids"}))
    text = read_prompt(args)
    if args.num_samples < 1:
        raise ValueError(f"--num_samples {args.num_samples}: wanted at least 1")
    demo = text is None
    if demo and args.init_from:
        raise ValueError("no prompt: give --prompt TEXT, --prompt_file FILE or pipe a text in")
    if args.trace:
        view.check_path(args.trace)
    model, tokenizer = load(args)
    if demo:
        from data.word_problems.prepare import problems
        text = problems("val", 4)[3].prompt
    options["stop_ids"] = model.config.stop_ids
    if args.chat:
        ids = tokenizer.apply_chat_template([dict(role="user", content=text)])
    else:
        ids = ([tokenizer.bos_id] if tokenizer.bos_id is not None else []) + tokenizer.encode(text)
    color = sys.stdout.isatty()
    show = demo or (args.show and color)
    if demo:
        print(text.rstrip(), end="\n\n")
        for mode in (args.mode, "ntp"):   # the first forwards of a process are slow: keep them out of the comparison
            generate(model, [ids], **options | dict(mode=mode))
    rows, traced, texts, streams = {}, [], [""] * args.num_samples, [TextStream(tokenizer, args.stop) for _ in range(args.num_samples)]
    began = time.perf_counter()
    for steps in decode(model, [ids] * args.num_samples, **options):
        traced += map(view.record, steps if args.trace else ())
        for step in steps:
            i, row = step.row.index, step.row
            final = [t for t in step.final if t not in model.config.stop_ids]
            piece = streams[i].feed(final, row.done)
            row.done |= streams[i].found
            rows[i], texts[i] = row, texts[i] + piece
            if show:
                print(view.show_block(step, tokenizer, color), flush=True)
            elif args.num_samples == 1:
                print(piece, end="", flush=True)
    seconds = time.perf_counter() - began
    for i, sample in enumerate(texts if show or args.num_samples > 1 else ()):
        print((f"\nsample {i + 1}" if args.num_samples > 1 else "") + f"\n{sample}")
    if args.trace:
        view.write(args.trace, ids, traced, tokenizer, options)
    tokens, nfe = sum(len(r.tokens) for r in rows.values()), sum(r.nfe for r in rows.values())
    summary = f"{args.mode}: {tokens} tokens in {nfe} forwards, NFE speedup {tokens / max(nfe, 1):.2f}, {tokens / seconds:,.0f} tokens/s"
    if not demo:
        print(f"\n{summary}", file=sys.stderr)
        return
    began = time.perf_counter()
    [ntp] = generate(model, [ids], **options | dict(mode="ntp"))
    seconds_ntp = time.perf_counter() - began
    agree = "the same text" if not rows or rows[0].tokens == ntp.tokens else "different texts"
    print(f"\n{summary}; ntp: {len(ntp.tokens)} tokens in {ntp.nfe} forwards, {len(ntp.tokens) / seconds_ntp:,.0f} tokens/s; {agree}")


if __name__ == "__main__":
    run(main)
