"""The peers of verified decoding: speculative decoding with a draft model, and with prompt lookup.

Both are lossless at temperature 0, as verified decoding is: a draft is checked by the model in one forward
and its longest agreeing prefix is kept (Leviathan et al., arXiv 2211.17192; Chen et al., 2302.01318). They
differ in where the draft comes from: a smaller model of the same tokenizer, or the last place in the text
where its last tokens stood. Both run over the same Llama and KVCache as generate.py, one text at a time, so
that all can be timed in one run:

    python speculative.py --draft_from=out/tiny-draft                      on held-out word problems
    python speculative.py --dataset=stdlib --init_from=out/code --draft_from=out/code-draft --block_size=16
"""
from cli import add_model, load_model, need, parser, run

import statistics
from pathlib import Path

import numpy as np
import torch

from bench import interleaved
from data.bin import Dataset
from data.word_problems.prepare import problems
from eval import encode, need_between
from generate import Options, Row, check_prompts, generate
from kv_cache import KVCache, run_window
from model import Llama

HERE = Path(__file__).resolve().parent


@torch.inference_mode()
def extend(model, cache, tokens, read=0):
    """One causal window over `tokens` -> the NTP predictions behind tokens[read:], a list; commits
    nothing."""
    logits = model.lm_head(run_window(model, cache, [tokens], [len(tokens)], [[]], 0)[:, read:])[0]
    if model.config.mask_id is not None:
        logits[:, model.config.mask_id] = -torch.inf
    return logits.argmax(-1).tolist()


def speculate(model, prompt, propose, max_new_tokens=256, stop_ids=None) -> Row:
    """Greedy decoding of `prompt`, a list of ids, with the drafts of propose(text so far) -> list of ids.

    stop_ids: None for the model's own. nfe counts the forwards of `model` as method section 5 does; the
    draft's own cost is in the seconds only. Raises ValueError for what `generate` refuses too.
    """
    Options(mode="ntp", max_new_tokens=max_new_tokens)
    check_prompts(model.config, [prompt], "ntp", 1)
    stop_ids = model.config.stop_ids if stop_ids is None else stop_ids
    model.fuse()
    row = Row(0, min(max_new_tokens, model.config.max_position_embeddings - len(prompt)), None)
    if row.limit == 0:
        return row
    weight = model.lm_head.weight
    cache = KVCache(model.config, 1, len(prompt) + row.limit, weight.device, weight.dtype)
    following = extend(model, cache, prompt, -1)[0]
    cache.commit([len(prompt)])
    while not row.done:
        row.nfe += 1
        draft, room = [], row.limit - len(row.tokens) - 1
        if following not in stop_ids and room:                     # else this pass only outputs `following`
            draft = propose(prompt + row.tokens + [following])[:room]
            predicted = extend(model, cache, [following] + draft)
            accepted = next((j for j, token in enumerate(draft) if token != predicted[j]), len(draft))
            cache.commit([1 + accepted])
            row.extend([following] + draft[:accepted], stop_ids)
            following = predicted[accepted]
        else:
            row.extend([following], stop_ids)
    return row


def draft_model(model, length: int):
    """propose(text) -> `length` greedy tokens of a smaller model; its cache keeps what the last texts
    share."""
    model.fuse()
    weight, known = model.lm_head.weight, []
    cache = KVCache(model.config, 1, model.config.max_position_embeddings, weight.device, weight.dtype)

    def propose(text):
        nonlocal known
        differs = (i for i, (a, b) in enumerate(zip(known, text)) if a != b)
        shared = min(next(differs, min(len(known), len(text))), len(text) - 1)
        cache.lengths[:] = shared  # what was drafted and refused is overwritten
        fresh, draft = text[shared:], []
        for _ in range(min(length, cache.k.shape[3] - len(text))):
            draft.append(extend(model, cache, fresh, -1)[0])
            cache.commit([len(fresh)])
            fresh = draft[-1:]
        known = (text + draft[:-1])[:int(cache.lengths[0])]
        return draft

    return propose


def prompt_lookup(length: int, ngram: int = 3):
    """propose(text) -> the `length` tokens behind the latest earlier place of its last `ngram` or fewer
    tokens."""
    def propose(text):
        ids = np.array(text)
        for n in range(min(ngram, len(text) - 1), 0, -1):
            same = np.ones(len(text) - n, bool)  # begins the last n tokens' n-gram again here?
            for j in range(n):
                same &= ids[j:len(text) - n + j] == ids[len(text) - n + j]
            if (found := np.flatnonzero(same)).size:
                return text[found[-1] + n:found[-1] + n + length]
        return []

    return propose


def ways_to_decode(model, draft, block_size, options):
    """name -> (parameters beside the model's, function: a prompt -> Row)."""
    def by_mode(**cell):
        return 0, lambda prompt: generate(model, [prompt], **cell | options)[0]

    def by_draft(extra, propose):
        return extra, lambda prompt: speculate(model, prompt, propose, **options)

    ways = {"NTP": by_mode(mode="ntp")}
    for gamma in (0.1, 0.35):
        ways[f"SBD, block 16, gamma {gamma}"] = by_mode(gamma=gamma)
    for h in (1, 2, 4):
        cell = dict(mode="verified", block_size=block_size, hedges=h)
        ways[f"verified, block {block_size}, h = {h}"] = by_mode(**cell)
    for n in (4, 8, 16) if draft else ():
        size = sum(weight.numel() for weight in draft.parameters())
        ways[f"draft model, {n} tokens"] = by_draft(size, draft_model(draft, n))
    for n in (4, 8, 16):
        ways[f"prompt lookup, {n} tokens"] = by_draft(0, prompt_lookup(n))
    return ways


def compare(model, draft, prompts, block_size, max_new_tokens, repeats) -> list:
    """Decode the prompts, lists of ids, in every way -> (name, tokens a forward, speed over NTP: the median
    of `repeats` rounds, parameters beside the model's, share of texts that are NTP's), one a way. `draft`: a
    smaller model, or None."""
    ways, rows = ways_to_decode(model, draft, block_size, dict(max_new_tokens=max_new_tokens)), {}

    def job(name, way):
        return lambda: rows.update({name: [way(prompt) for prompt in prompts]})

    seconds = interleaved({name: job(name, way) for name, (_, way) in ways.items()}, repeats)
    baseline, table = [row.tokens for row in rows["NTP"]], []
    for name, (extra, _) in ways.items():
        texts = [row.tokens for row in rows[name]]
        longer = sum(map(len, texts)) / sum(map(len, baseline))
        speed = statistics.median(longer * ntp / s for s, ntp in zip(seconds[name], seconds["NTP"]))
        per_forward = sum(map(len, texts)) / sum(row.nfe for row in rows[name])
        table.append((name, per_forward, speed, extra, sum(map(list.__eq__, texts, baseline)) / len(texts)))
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
          f"{torch.get_num_threads()} threads, torch {torch.__version__}\n")
    print("| decoding | tokens a forward | speed over NTP | extra parameters | texts as NTP's, % |")
    print("|---|---|---|---|---|")
    for row in compare(model, draft, prompts, args.block_size, args.max_new_tokens, args.repeats):
        name, per_forward, speed, extra, same = row
        print(f"| {name} | {per_forward:.2f} | {speed:.2f} | {extra:,} | {100 * same:.0f} |")


if __name__ == "__main__":
    run(main)
