"""How many tokens a forward verified decoding takes, for many block sizes and hedges at once.

    python acceptance.py --init_from=ADAPTER_OR_SBD_MODEL --prompts my.jsonl

The text of verified decoding is that of NTP, and what a block of masks drafts depends on the text before it
alone. So an NTP text with a block laid behind each of its places tells what decoding does for any number of
hedges: which drafts it checks, which lengths it accepts, how many forwards it runs. `--decode` runs the best
cell for real, by the clock beside NTP. Rows of the .jsonl file (or .jsonl.gz, such as HumanEval's) are those
of data/answers/prepare.py: {"prompt": ...} or {"messages": [...]}.

Shapes: n tokens of a text, k block size, d = k - 1 draft length.
"""
from cli import add_model, load_model, need, need_between, need_mask, parser, run

import itertools
import time
from pathlib import Path

import numpy as np
import torch

from data.answers.prepare import check, prompt_ids
from data.jsonl.prepare import rows
from eval import bootstrap
from generate import Options, drafted, generate, likeliest, logits_at
from kv_cache import KVCache, run_window

CHUNK = 32   # places of a text whose blocks share a forward


@torch.inference_mode()
def drafts(model, prompt: list, text: list, k: int):
    """What a block of k masks drafts behind prompt + text[:p], for each p in 1 .. n - 1.

    -> tokens and confidences, (n, k - 1) each; row 0 is empty: the first draft stands behind text[0].
    """
    n, o = len(text), Options(mode="verified", block_size=k)
    weight = model.lm_head.weight
    cache = KVCache(model.config, 1, len(prompt) + n + CHUNK * k, weight.device, weight.dtype)
    run_window(model, cache, [prompt], [len(prompt)], [[]], k)
    cache.commit([len(prompt)])
    token, c = np.full((n, k - 1), -1), np.zeros((n, k - 1))
    for start in range(1, n, CHUNK):
        places = range(start, min(start + CHUNK, n))
        causal = text[start - 1:places[-1]]                    # block p sees the text up to p - 1
        window = causal + [model.config.mask_id] * (k * len(places))
        hidden = run_window(model, cache, [window], [len(causal)], [[1 + i for i in range(len(places))]], k)
        at = len(causal) + k * torch.arange(len(places))[:, None] + torch.arange(1, k)   # (places, k - 1)
        found = drafted(logits_at(model, hidden, at.view(1, -1).to(hidden.device)), None, None, o)
        token[places], c[places] = (x.double().cpu().numpy().reshape(at.shape) for x in found)
        cache.commit([len(causal)])
    return token, c


def forwards(text: list, token, c, hedges: int):
    """Method section 10, replayed: accepted draft tokens and window tokens of each forward, two lists."""
    n, k, p, draft = len(text), token.shape[1] + 1, 0, -1      # `next` is text[p]; draft: -1, none, or p
    accepted, windows = [], []
    while p < n:
        d = 0 if draft < 0 else k - 1
        laid = likeliest(c[p] if d else [], hedges)
        a = leading(token[p, :n - p - 1], text[p + 1:]) if d else 0
        accepted.append(a)
        windows.append(1 + d + k * len(laid) if p + 1 < n else 0)   # a `next` that ends its text: no forward
        p += a + 1
        draft = p if a in laid else -1
    return accepted, windows


def leading(draft, text) -> int:
    """How many leading tokens agree."""
    same = [int(x) == y for x, y in zip(draft, text)]
    return (same + [False]).index(False)


def interval(a, b):
    """sum(a) / sum(b) over all texts, with its 95% interval, in words."""
    return "{:.2f} [{:.2f}, {:.2f}]".format(sum(a) / sum(b), *bootstrap(a, b))


def numbers(text):
    """"4,6,8" -> [4, 6, 8]."""
    return list(map(int, text.split(",")))


def parse(argv=None):
    p = parser(__doc__)
    a = p.add_argument
    a("--prompts", required=True, nargs="+", type=Path, help=".jsonl files of prompts, or .jsonl.gz")
    a("--chat", action="store_true", help='wrap each "prompt" into the checkpoint\'s chat template')
    a("--num", type=int, default=40, help="the first prompts")
    a("--block_sizes", type=numbers, default=[4, 6, 8, 12], help="k, several with commas")
    a("--hedges", type=numbers, default=[1, 2, 4], help="h, several with commas")
    a("--max_new_tokens", type=int, default=128, help="most tokens a text")
    a("--batch_size", type=int, default=20, help="texts recorded at once")
    a("--decode", action="store_true", help="then decode in the best cell, batch 1, beside NTP, by the clock")
    add_model(p, "an adapter, or a model fine-tuned with SBD")
    args = p.parse_args(argv)
    need(args.init_from, "no model: give --init_from")
    need_between(args, num=(1, 10**6), max_new_tokens=(2, 2**20), batch_size=(1, 2**16))
    for k, h in itertools.product(args.block_sizes, args.hedges):
        Options(block_size=k, hedges=h)
    need(min(args.block_sizes) > 1, "--block_sizes: wanted 2 or more, a block of one drafts nothing")
    return args


def grid(model, prompts, texts, args):
    """Print the table -> k and h of the cell with the most tokens a forward."""
    best, tokens = (), list(map(len, texts))
    print("| k | h | tokens a forward [95%] | drafts accepted | tokens a window |\n|---|---|---|---|---|")
    for k in args.block_sizes:
        laid = [drafts(model, prompt, text, k) for prompt, text in zip(prompts, texts)]
        for h in args.hedges:
            each = [forwards(text, *draft, h) for text, draft in zip(texts, laid)]
            nfe = [len(accepted) for accepted, _ in each]
            accepted = sum(sum(a) for a, _ in each) / sum(nfe)
            window = sum(sum(w) for _, w in each) / sum(sum(map(bool, w)) for _, w in each)
            print(f"| {k} | {h} | {interval(tokens, nfe)} | {accepted:.2f} | {window:.1f} |", flush=True)
            best = max(best, (-sum(nfe), -k, h))
    return -best[1], best[2]


def clock(model, prompts, k, h, args):
    """Decode every prompt alone, NTP and verified in turn; print speed, forwards and how many texts agree."""
    seconds, nfe, same = np.zeros((2, len(prompts))), [], 0
    for i, prompt in enumerate(prompts):
        rows = [0, 0]
        for j in (0, 1) if i % 2 else (1, 0):
            began = time.perf_counter()
            [rows[j]] = generate(model, [prompt], block_size=k, hedges=h, max_new_tokens=args.max_new_tokens,
                                 mode=("ntp", "verified")[j])
            seconds[j, i] = time.perf_counter() - began
        same += rows[0].tokens == rows[1].tokens
        nfe.append((len(rows[1].tokens), rows[1].nfe))
    tokens, nfe = zip(*nfe)
    print(f"decoded, k={k} h={h}, {len(prompts)} texts: {interval(tokens, nfe)} tokens a forward, "
          f"{interval(*seconds)} times NTP's speed ({sum(tokens) / seconds[0].sum():.1f} tokens/s), "
          f"{same} texts are NTP's")


def main(argv=None):
    args = parse(argv)
    lines = [row for _, row in itertools.islice(rows(args.prompts, check), args.num)]
    need(lines, f"{', '.join(map(str, args.prompts))}: no prompt in there")
    model, tokenizer = load_model(args)
    need_mask(model.config, args.init_from)
    prompts = [prompt_ids(row, tokenizer, args.chat) for row in lines]
    texts = []
    for at in range(0, len(prompts), args.batch_size):
        some = prompts[at:at + args.batch_size]
        texts += [row.tokens for row in generate(model, some, mode="ntp", max_new_tokens=args.max_new_tokens)]
    print(f"{len(texts)} texts, {sum(map(len, texts))} tokens")
    best = grid(model, prompts, texts, args)
    if args.decode:
        clock(model, prompts, *best, args)


if __name__ == "__main__":
    run(main)
