"""The peers of verified decoding: speculative decoding with a draft model, and with prompt lookup.

Both are lossless at temperature 0, as verified decoding is: a draft is checked by the model in one forward and its
longest agreeing prefix is kept (Leviathan et al., arXiv 2211.17192; Chen et al., 2302.01318). They differ in where
the draft comes from: a smaller model of the same tokenizer, or the last place in the text where its last tokens stood.
Both run over the same Llama and KVCache as generate.py, one text at a time, so that all can be timed in one run:

    python speculative.py --draft_from=out/tiny-draft                      on held-out word problems
    python speculative.py --dataset=stdlib --init_from=out/code --draft_from=out/code-draft --block_size=16
"""
import argparse
import statistics
import sys
from pathlib import Path

import numpy as np
import torch

from bench import interleaved
from data.bin import Dataset
from eval import encode
from generate import Row, check_prompts, generate
from kv_cache import KVCache, run_window
from model import Llama
from tokenizer import Tokenizer

HERE = Path(__file__).resolve().parent


@torch.inference_mode()
def extend(model, cache, tokens, read=0):
    """One causal window over `tokens` -> the NTP predictions behind tokens[read:], a list; commits nothing."""
    logits = model.lm_head(run_window(model, cache, [tokens], [len(tokens)], [[]], 0)[:, read:])[0]
    if model.config.mask_id is not None:
        logits[:, model.config.mask_id] = -torch.inf
    return logits.argmax(-1).tolist()


def speculate(model, prompt, propose, max_new_tokens=256, stop_ids=()) -> Row:
    """Greedy decoding of `prompt`, a list of ids, with the drafts of propose(text so far) -> list of ids.

    nfe counts the forwards of `model` as method section 5 does; the draft's own cost is in the seconds only.
    """
    check_prompts(model.config, [prompt], "ntp", 1)
    model.fuse()
    row = Row(0, min(max_new_tokens, model.config.max_position_embeddings - len(prompt)), None)
    cache = KVCache(model.config, 1, len(prompt) + row.limit, model.lm_head.weight.device, model.lm_head.weight.dtype)
    following = extend(model, cache, prompt, -1)[0]
    cache.commit([len(prompt)])
    while not row.done:
        row.nfe += 1
        draft = []
        if following not in stop_ids and len(row.tokens) + 1 < row.limit:   # else this pass only outputs `following`
            draft = propose(prompt + row.tokens + [following])[:row.limit - len(row.tokens) - 1]
            predicted = extend(model, cache, [following] + draft)
            accepted = next((j for j, token in enumerate(draft) if token != predicted[j]), len(draft))
            cache.commit([1 + accepted])
            row.extend([following] + draft[:accepted], stop_ids)
            following = predicted[accepted]
        else:
            row.extend([following], stop_ids)
    return row


def draft_model(model, length: int):
    """propose(text) -> `length` greedy tokens of a smaller model; its cache keeps what the last texts share."""
    model.fuse()
    weight, known = model.lm_head.weight, []
    cache = KVCache(model.config, 1, model.config.max_position_embeddings, weight.device, weight.dtype)

    def propose(text):
        nonlocal known
        shared = next((i for i, (a, b) in enumerate(zip(known, text)) if a != b), min(len(known), len(text)))
        shared = min(shared, len(text) - 1)
        cache.lengths[:] = shared                                  # what was drafted and refused is overwritten
        fresh, draft = text[shared:], []
        for _ in range(min(length, cache.k.shape[3] - len(text))):
            draft.append(extend(model, cache, fresh, -1)[0])
            cache.commit([len(fresh)])
            fresh = draft[-1:]
        known = (text + draft[:-1])[:int(cache.lengths[0])]
        return draft

    return propose


def prompt_lookup(length: int, ngram: int = 3):
    """propose(text) -> the `length` tokens behind the latest earlier place of its last `ngram` (or fewer) tokens."""
    def propose(text):
        ids = np.array(text)
        for n in range(min(ngram, len(text) - 1), 0, -1):
            same = np.ones(len(text) - n, bool)                # begins the last n tokens' n-gram again here?
            for j in range(n):
                same &= ids[j:len(text) - n + j] == ids[len(text) - n + j]
            if (found := np.flatnonzero(same)).size:
                return text[found[-1] + n:found[-1] + n + length]
        return []

    return propose


def compare(model, draft, prompts, block_size, max_new_tokens, repeats) -> list:
    """Decode the prompts, lists of ids, in every way -> (name, tokens a forward, speed over NTP: the median of `repeats`
    rounds, parameters beside the model's, share of texts that are NTP's), one a way. `draft`: a smaller model, or None."""
    options = dict(max_new_tokens=max_new_tokens, stop_ids=model.config.stop_ids)
    ways = {"NTP": (0, lambda p: generate(model, [p], mode="ntp", **options)[0])}
    for gamma in (0.1, 0.35):
        ways[f"SBD, block 16, gamma {gamma}"] = 0, lambda p, gamma=gamma: generate(model, [p], gamma=gamma, **options)[0]
    for h in (1, 2, 4):
        ways[f"verified, block {block_size}, h = {h}"] = 0, lambda p, h=h: generate(
            model, [p], mode="verified", block_size=block_size, hedges=h, **options)[0]
    size = sum(w.numel() for w in draft.parameters()) if draft else 0
    for n in (4, 8, 16):
        if draft:
            ways[f"draft model, {n} tokens"] = size, lambda p, propose=draft_model(draft, n): speculate(model, p, propose, **options)
    for n in (4, 8, 16):
        ways[f"prompt lookup, {n} tokens"] = 0, lambda p, propose=prompt_lookup(n): speculate(model, p, propose, **options)

    rows = {}

    def job(name, way):
        def all_prompts():
            rows[name] = [way(p) for p in prompts]
        return all_prompts

    seconds = interleaved({name: job(name, way) for name, (_, way) in ways.items()}, repeats)
    baseline, table = [row.tokens for row in rows["NTP"]], []
    for name, (extra, _) in ways.items():
        tokens = sum(len(row.tokens) for row in rows[name])
        rates = [tokens / s / (sum(map(len, baseline)) / ntp) for s, ntp in zip(seconds[name], seconds["NTP"])]
        table.append((name, tokens / sum(row.nfe for row in rows[name]), statistics.median(rates), extra,
                      sum(row.tokens == text for row, text in zip(rows[name], baseline)) / len(prompts)))
    return table


def main(argv=None):
    p = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter, description=__doc__.split("\n")[0])
    a = p.add_argument
    a("--init_from", default=str(HERE / "checkpoints/tiny-verified"), help="an SBD model: folder, hub id or preset")
    a("--draft_from", help="a smaller model of the same tokenizer; default: the draft-model rows are left out")
    a("--dataset", choices=("word_problems", "stdlib"), default="word_problems", help="held-out prompts of data/NAME")
    a("--block_size", type=int, default=32, help="block of verified decoding")
    a("--num_prompts", type=int, default=100, help="texts")
    a("--max_new_tokens", type=int, default=128, help="most tokens a text")
    a("--repeats", type=int, default=3, help="timed rounds")
    a("--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and cache")
    args = p.parse_args(argv)
    for name in ("block_size", "num_prompts", "max_new_tokens", "repeats"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)}: wanted at least 1")
    dtype, device = getattr(torch, args.dtype), "cuda" if torch.cuda.is_available() else "cpu"
    model = Llama.from_pretrained(args.init_from, device, dtype)
    draft = Llama.from_pretrained(args.draft_from, device, dtype) if args.draft_from else None
    if draft and draft.config.vocab_size != model.config.vocab_size:
        raise ValueError(f"--draft_from {args.draft_from} has {draft.config.vocab_size} token ids, {args.init_from} has "
                         f"{model.config.vocab_size}: a draft model needs the same tokenizer")
    if args.dataset == "word_problems":
        from data.word_problems.prepare import problems
        prompts = encode(Tokenizer.from_pretrained(model.folder), problems("val", args.num_prompts))
    else:                                                                  # 256 tokens from the middle of held-out files
        val = Dataset(HERE / "data/stdlib", "val")
        long = val.lengths >= 1024
        middles = (val.starts + val.lengths // 2)[long]
        prompts = [val.tokens[i:i + 256].tolist() for i in middles][:args.num_prompts]
    print(f"{len(prompts)} prompts, batch 1, {device} {args.dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}\n")
    print("| decoding | tokens a forward | speed over NTP | extra parameters | texts as NTP's, % |\n|---|---|---|---|---|")
    for name, per_forward, speed, extra, same in compare(model, draft, prompts, args.block_size, args.max_new_tokens, args.repeats):
        print(f"| {name} | {per_forward:.2f} | {speed:.2f} | {extra:,} | {100 * same:.0f} |")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        print(f"speculative.py: {error}", file=sys.stderr)
        sys.exit(2)
