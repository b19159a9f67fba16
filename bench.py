"""Seconds: what forwards, decoding and training cost on this machine; the only place with timing helpers.

    python bench.py                                            the shipped tiny model
    python bench.py --init_from=DIR --against=transformers     any model, beside transformers' generate

Everything is timed in one process, interleaved A B A B after a warm-up, and reported as medians; what to quote
are the ratios. Eq. 16 predicts the wall-clock speedup of SBD from three forward times of the same run.

Shapes: k block size, W window tokens.
"""
import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch

import generate as decoding
from kv_cache import KVCache, cached_attend, window
from model import Llama, write_whole
from sbd_loss import ntp_loss, sbd_loss
from tokenizer import Tokenizer

HERE = Path(__file__).parent


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def interleaved(functions: dict, repeats: int, warmup: int = 2) -> dict:
    """name -> [seconds, ...] of calling each function in turn, `repeats` times after `warmup` rounds."""
    seconds = {name: [] for name in functions}
    for i in range(warmup + repeats):
        for name, function in functions.items():
            synchronize()
            began = time.perf_counter()
            function()
            synchronize()
            if i >= warmup:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def show(name, seconds, note=""):
    middle = statistics.median(seconds)
    print(f"  {name:34s} {1e3 * middle:9.2f} ms  ({1e3 * min(seconds):.2f} to {1e3 * max(seconds):.2f})  {note}")
    return middle


@torch.inference_mode()
def forward_times(model, widths, kv_len, repeats):
    """Median seconds of a forward over W tokens behind kv_len cached ones, the logits of all of them read.

    1 token is NTP's window; k a block on its own; 2 k a block behind k pending tokens (method section 5).
    """
    c = model.config
    device, dtype = model.lm_head.weight.device, model.lm_head.weight.dtype
    cache = KVCache(c, 1, kv_len + max(widths), device, dtype)
    cache.k.normal_(), cache.v.normal_()
    cache.commit([kv_len])

    def forward(W, pending, read):
        tokens = torch.randint(c.vocab_size, (1, W), device=device)
        block = W - pending

        def run():
            w = window(cache, [pending], [[pending]] if block else [[]], block)
            model.lm_head(model.hidden(tokens, w.positions, cached_attend(cache, w))[:, W - read:]).argmax(-1).tolist()
        return run

    seconds = interleaved({W: forward(W, *layout) for W, layout in widths.items()}, repeats)
    return {W: show(f"forward, window {W}, KV {kv_len}", s) for W, s in seconds.items()}


def equation_16(t1, tk, t2k, k, nfe_speedup):
    """Eq. 16: k t(1) / (t(2k) + (l - 1) t(k)), with l = k / nfe_speedup forwards a block."""
    return k * t1 / (t2k + (k / nfe_speedup - 1) * tk)


def bench_decoding(model, prompts, block_size, gamma, max_new_tokens, repeats) -> dict:
    """NTP against SBD, one prompt at a time; wall-clock and NFE speedup beside Eq. 16."""
    options = dict(max_new_tokens=max_new_tokens, stop_ids=model.config.stop_ids, block_size=block_size, gamma=gamma)
    runs = {}

    def run(mode):
        def all_prompts():
            runs[mode] = [decoding.generate(model, [p], mode=mode, **options)[0] for p in prompts]
        return all_prompts

    print(f"decoding {len(prompts)} prompts, batch 1, block {block_size}, gamma {gamma}")
    k, kv_len = block_size, int(statistics.mean(map(len, prompts))) + 32
    times = forward_times(model, {1: (1, 1), k: (0, k), 2 * k: (k, k)}, kv_len, 10 * repeats)
    seconds = {mode: statistics.median(s) for mode, s in interleaved({m: run(m) for m in ("ntp", "sbd")}, repeats, 1).items()}
    tokens, nfe = {m: sum(len(r.tokens) for r in runs[m]) for m in runs}, {m: sum(r.nfe for r in runs[m]) for m in runs}
    for mode in runs:
        print(f"  {mode:8s} {tokens[mode] / seconds[mode]:9.1f} tokens/s  {tokens[mode]} tokens in {nfe[mode]} forwards")
    nfe_speedup = tokens["sbd"] / nfe["sbd"]
    wall = (tokens["sbd"] / seconds["sbd"]) / (tokens["ntp"] / seconds["ntp"])
    predicted = equation_16(times[1], times[k], times[2 * k], k, nfe_speedup)
    print(f"  NFE speedup {nfe_speedup:.2f}, wall-clock speedup {wall:.2f}, Eq. 16 predicts {predicted:.2f}: {wall / predicted:.2f} of it")
    return dict(nfe_speedup=nfe_speedup, wall_clock=wall, eq16=predicted, tokens_per_s={m: tokens[m] / seconds[m] for m in runs}, forward_s=times)


def bench_training(model, batch_size, seq_len, block_size, repeats) -> dict:
    """One SBD step against one NTP step of the same B and L, forward and backward."""
    tokens = torch.randint(model.config.vocab_size, (batch_size, seq_len), device=model.lm_head.weight.device)

    def step(loss):
        def run():
            loss().loss.backward()
            model.zero_grad()
        return run

    print(f"training step, {batch_size} x {seq_len} tokens, block {block_size}")
    seconds = interleaved({"ntp": step(lambda: ntp_loss(model, tokens)), "sbd": step(lambda: sbd_loss(model, tokens, block_size))}, repeats)
    ntp, sbd = (show(f"{name} step", seconds[name]) for name in ("ntp", "sbd"))
    print(f"  an SBD step costs {sbd / ntp:.2f} NTP steps")
    return dict(ntp_s=ntp, sbd_s=sbd, ratio=sbd / ntp)


def bench_transformers(model, folder, prompt, new_tokens, repeats) -> dict:
    """Greedy next-token decoding, ours and transformers' generate, on the same folder, prompt, dtype and threads."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise ValueError("--against=transformers needs it: pip install transformers") from None
    dtype, device = model.lm_head.weight.dtype, model.lm_head.weight.device
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    theirs.generation_config.eos_token_id = None   # both decode exactly new_tokens
    ids, texts = torch.tensor([prompt], device=device), {}

    def ours():
        texts["ours"] = decoding.generate(model, [prompt], mode="ntp", max_new_tokens=new_tokens)[0].tokens

    def transformers():
        texts["transformers"] = theirs.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens,
                                                pad_token_id=0)[0, len(prompt):].tolist()

    print(f"NTP decoding of {new_tokens} tokens, batch 1, {dtype}")
    seconds = interleaved({"ours": ours, "transformers": transformers}, repeats, 1)
    mine, other = (show(name, seconds[name], f"{new_tokens / statistics.median(seconds[name]):.1f} tokens/s") for name in seconds)
    same = next((i for i, (a, b) in enumerate(zip(*texts.values())) if a != b), new_tokens)
    print(f"  {other / mine:.2f} times transformers' tokens/s; the texts agree on the first {same} of {new_tokens} tokens")
    return dict(ratio=other / mine, ours_s=mine, transformers_s=other, agree=same)


def main():
    p = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter, description=__doc__.split("\n")[0])
    a = p.add_argument
    a("--init_from", default=str(HERE / "checkpoints/tiny-sbd"), help="folder, hub id or preset")
    a("--against", choices=("transformers",), help="also time this one's generate")
    a("--block_size", type=int, default=16, help="k")
    a("--gamma", type=float, default=0.1, help="entropy budget of a step, nats")
    a("--max_new_tokens", type=int, default=128, help="most tokens a prompt")
    a("--num_prompts", type=int, default=16, help="held-out word problems that the tiny model decodes")
    a("--batch_size", type=int, default=8, help="rows of a training step; 0: none is timed")
    a("--seq_len", type=int, default=512, help="tokens a row of it")
    a("--repeats", type=int, default=7, help="timed repeats of everything")
    a("--mask_id", type=int, help="the mask token, where the model's config names none")
    a("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    a("--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and cache")
    a("--json", type=Path, help="write the figures there")
    args = p.parse_args()
    if args.repeats < 1 or args.num_prompts < 1 or args.block_size < 1 or args.max_new_tokens < 1:
        raise ValueError("--repeats, --num_prompts, --block_size and --max_new_tokens: wanted at least 1")
    model = Llama.from_pretrained(args.init_from, args.device, getattr(torch, args.dtype), args.mask_id)
    tokenizer = Tokenizer.from_pretrained(model.folder)
    print(f"{args.init_from}, {args.device} {args.dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    figures = {}
    from data.word_problems.prepare import problems
    prompts = [tokenizer.encode(problem.prompt) for problem in problems("val", args.num_prompts)]
    if args.against:
        figures["transformers"] = bench_transformers(model, model.folder, prompts[0], args.max_new_tokens, args.repeats)
    elif model.config.mask_id is None:
        raise ValueError(f"{args.init_from} names no mask token: give --mask_id, an id of its vocabulary that text never uses")
    else:
        figures["decoding"] = bench_decoding(model, prompts, args.block_size, args.gamma, args.max_new_tokens, args.repeats)
        if args.batch_size:
            figures["training"] = bench_training(model, args.batch_size, args.seq_len, args.block_size, args.repeats)
    if args.json:
        write_whole(args.json, lambda path: path.write_text(json.dumps(figures, indent=1) + "\n"))


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        print(f"bench.py: {error}", file=sys.stderr)
        sys.exit(2)
