"""The peers of verified decoding: speculative decoding with a draft model, and with prompt lookup.

Both are lossless at temperature 0, as verified decoding is: a draft is checked by the model in one forward
and its longest agreeing prefix is kept (Leviathan et al., arXiv 2211.17192; Chen et al., 2302.01318). They
differ in where the draft comes from: a smaller model of the same tokenizer, or the last place in the text
where its last tokens stood. Both run over the same Llama and KVCache as generate.py, one text at a time, so
that all can be timed in one run:

    python speculative.py --draft_from=out/tiny-draft                      on held-out word problems
    python speculative.py --dataset=stdlib --init_from=out/code --draft_from=out/code-draft --block_size=16
"""
from cli import add_model, load_model, need, need_between, parser, run

from functools import partial
from pathlib import Path

import numpy as np
import torch

from bench import interleaved, ratio
from data.bin import Dataset
from data.word_problems.prepare import problems
from eval import encode
from generate import Options, Row, check_prompts, generate, prefill, verified_step
from kv_cache import KVCache, lend_cache
from model import Llama

HERE = Path(__file__).resolve().parent


@torch.inference_mode()
def speculate(model, prompt, propose, max_new_tokens=256, stop_ids=None) -> Row:
    """Greedy decoding of `prompt`, a list of ids, with the drafts of propose(text so far) -> list of ids.

    stop_ids: None for the model's own. nfe counts the forwards of `model` as method section 5 does; the
    draft's own cost is in the seconds only. Raises ValueError for what `generate` refuses too.
    """
    stop_ids = model.config.stop_ids if stop_ids is None else stop_ids
    o = Options(mode="ntp", max_new_tokens=max_new_tokens, stop_ids=stop_ids)
    check_prompts(model.config, [prompt], o.mode, o.k)
    model.fuse()
    row = Row(0, min(max_new_tokens, model.config.max_position_embeddings - len(prompt)))
    with lend_cache(model, 1, len(prompt) + row.limit) as cache:
        prefill(model, cache, [prompt], [row], o)
        while not row.done and not row.ends_with_next(stop_ids):
            row.draft = propose(prompt + row.tokens + [row.next])[:row.limit - len(row.tokens) - 1]
            verified_step(model, cache, [row], o)  # with blocks of one token it lays out none
        if not row.done:  # a `next` that ends its row needs no forward
            row.accept(0, stop_ids)
    return row


def draft_model(model, length: int):
    """propose(text) -> `length` greedy tokens of a smaller model; its cache keeps what the last texts
    share."""
    model.fuse()
    weight, known, row, o = model.lm_head.weight, [], Row(0, length), Options(mode="ntp")
    cache = KVCache(model.config, 1, model.config.max_position_embeddings, weight.device, weight.dtype)

    def propose(text):
        nonlocal known
        differs = (i for i, (a, b) in enumerate(zip(known, text)) if a != b)
        shared = min(next(differs, min(len(known), len(text))), len(text) - 1)
        cache.lengths[:] = shared  # what was drafted and refused is overwritten
        fresh, draft = text[shared:], []
        for _ in range(min(length, cache.k.shape[3] - len(text))):
            prefill(model, cache, [fresh], [row], o)
            fresh = [row.next]
            draft += fresh
        known = (text + draft)[:int(cache.lengths[0])]
        return draft

    return propose


def prompt_lookup(length: int, ngram: int = 3):
    """propose(text) -> the `length` tokens behind the latest earlier place of its last `ngram` or fewer
    tokens."""
    def propose(text):
        ids = np.array(text)
        for n in range(min(ngram, len(text) - 1), 0, -1):
            # begins the last n tokens' n-gram again here?
            same = np.all([ids[j:j - n] == ids[j - n] for j in range(n)], 0)
            if (found := np.flatnonzero(same)).size:
                return text[found[-1] + n:found[-1] + n + length]
        return []

    return propose


def ways_to_decode(model, draft, block_size, options):
    """name -> (parameters beside the model's, function: a prompt -> Row)."""
    ours = lambda prompt, **cell: generate(model, [prompt], **cell, **options)[0]
    peers = partial(speculate, model, **options)
    ways = {"NTP": (0, partial(ours, mode="ntp"))}
    for gamma in (0.1, 0.35):
        ways[f"SBD, block 16, gamma {gamma}"] = 0, partial(ours, gamma=gamma)
    for h in (1, 2, 4):
        cell = dict(mode="verified", block_size=block_size, hedges=h)
        ways[f"verified, block {block_size}, h = {h}"] = 0, partial(ours, **cell)
    for n in (4, 8, 16) if draft else ():
        size = sum(weight.numel() for weight in draft.parameters())
        ways[f"draft model, {n} tokens"] = size, partial(peers, propose=draft_model(draft, n))
    for n in (4, 8, 16):
        ways[f"prompt lookup, {n} tokens"] = 0, partial(peers, propose=prompt_lookup(n))
    return ways


def compare(model, draft, prompts, block_size, max_new_tokens, repeats) -> list:
    """Decode the prompts, lists of ids, in every way -> (name, tokens a forward, speed over NTP: the median
    of `repeats` rounds, parameters beside the model's, share of texts that are NTP's), one a way. `draft`: a
    smaller model, or None."""
    ways, rows = ways_to_decode(model, draft, block_size, dict(max_new_tokens=max_new_tokens)), {}

    def decode(name, way):
        rows[name] = [way(prompt) for prompt in prompts]

    seconds = interleaved({name: partial(decode, name, way) for name, (_, way) in ways.items()}, repeats)
    ntp, table = [row.tokens for row in rows["NTP"]], []
    for name, (extra, _) in ways.items():
        texts = [row.tokens for row in rows[name]]
        tokens = sum(map(len, texts))
        speed = ratio(seconds["NTP"], seconds[name]) * tokens / sum(map(len, ntp))
        same = sum(map(list.__eq__, texts, ntp)) / len(texts)
        table.append((name, tokens / sum(row.nfe for row in rows[name]), speed, extra, same))
    return table


def read_prompts(args, tokenizer):
    """Held-out prompts, lists of ids: word problems, or 256 tokens from the middle of source files."""
    if args.dataset == "word_problems":
        return encode(tokenizer, problems("val", args.num_prompts))
    val = Dataset(HERE / "data/stdlib", "val")
    middles = (val.starts + val.lengths // 2)[val.lengths >= 1024]
    need(len(middles), f"{val.dir} has no held-out file of 1024 tokens: prepare it again")
    return [val.tokens[i:i + 256].tolist() for i in middles[:args.num_prompts]]


def main(argv=None):
    p = parser(__doc__)
    a = p.add_argument
    a("--draft_from", help="a smaller model of the same tokenizer; default: no rows of a draft model")
    a("--dataset", choices=("word_problems", "stdlib"), default="word_problems", help="prompts of data/NAME")
    a("--block_size", type=int, default=32, help="block of verified decoding")
    a("--num_prompts", type=int, default=100, help="texts")
    a("--max_new_tokens", type=int, default=128, help="most tokens a text")
    a("--repeats", type=int, default=3, help="timed rounds")
    add_model(p, "an SBD model", str(HERE / "checkpoints/tiny-verified"))
    args = p.parse_args(argv)
    need_between(args, num_prompts=(1, 2000), max_new_tokens=(1, 10**6), repeats=(1, 1000))
    Options(block_size=args.block_size)
    model, tokenizer = load_model(args)
    weight, draft = model.lm_head.weight, None
    if args.draft_from:
        draft = Llama.from_pretrained(args.draft_from, weight.device, weight.dtype)
        sizes = draft.config.vocab_size, model.config.vocab_size
        need(sizes[0] == sizes[1], f"--draft_from {args.draft_from} has {sizes[0]} token ids, the model has "
             f"{sizes[1]}: a draft model needs the same tokenizer")
    prompts = read_prompts(args, tokenizer)
    print(f"{len(prompts)} prompts, batch 1, {weight.device} {weight.dtype}, "
          f"{torch.get_num_threads()} threads, torch {torch.__version__}\n\n"
          "| decoding | tokens a forward | speed over NTP | extra parameters | texts as NTP's, % |\n"
          "|---|---|---|---|---|")
    for *row, same in compare(model, draft, prompts, args.block_size, args.max_new_tokens, args.repeats):
        print("| {} | {:.2f} | {:.2f} | {:,} | {:.0f} |".format(*row, 100 * same))


if __name__ == "__main__":
    run(main)
