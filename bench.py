"""Seconds: what forwards, decoding and training cost on this machine; the only place with timing helpers.

    python bench.py                                            the shipped tiny model
    python bench.py --init_from=DIR --against=transformers     any model, beside transformers' generate

Everything is timed in one process, interleaved A B A B after a warm-up, and reported as medians; what to quote
are the ratios. Eq. 16 predicts the wall-clock speedup of SBD from three forward times of the same run.

Shapes: k block size, W window tokens.
"""
import argparse
import json
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
IN_A_ROW = 50   # forwards of one width in a row, as decoding runs them: the first finds the caches filled by another


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


def forward_jobs(model, widths, kv_len) -> dict:
    """W -> a function that runs IN_A_ROW forwards over W tokens behind kv_len cached ones and reads their logits.

    widths: W -> how many of its tokens are causal, the rest being a block. 1 causal token is NTP's window, a block
    alone or behind a pending one are those of SBD (method section 5), which reads the block's logits only.
    """
    c, weight = model.config, model.lm_head.weight
    with torch.inference_mode():
        cache = KVCache(c, 1, kv_len + max(widths), weight.device, weight.dtype)
        cache.k.normal_(), cache.v.normal_()
    cache.commit([kv_len])

    def forward(W, pending):
        tokens = torch.randint(c.vocab_size, (1, W), device=weight.device)

        @torch.inference_mode()
        def run():
            for _ in range(IN_A_ROW):
                w = window(cache, [pending], [[pending]] if W > pending else [[]], W - pending)
                model.lm_head(model.hidden(tokens, w.positions, cached_attend(cache, w))[:, pending % W:]).argmax(-1).tolist()
        return run

    return {W: forward(W, pending) for W, pending in widths.items()}


def equation_16(t1, tk, t2k, k, nfe_speedup):
    """Eq. 16: k t(1) / (t(2k) + (l - 1) t(k)), with l = k / nfe_speedup forwards a block."""
    return k * t1 / (t2k + (k / nfe_speedup - 1) * tk)


def bench_decoding(model, prompts, block_size, gamma, max_new_tokens, repeats) -> dict:
    """NTP against SBD, one prompt at a time; wall-clock and NFE speedup beside Eq. 16."""
    options = dict(max_new_tokens=max_new_tokens, stop_ids=model.config.stop_ids, block_size=block_size, gamma=gamma)
    runs = {}

    def run(name, **more):
        def all_prompts():
            runs[name] = [decoding.generate(model, [p], **options | more)[0] for p in prompts]
        return all_prompts

    print(f"decoding {len(prompts)} prompts, batch 1, block {block_size}, gamma {gamma}")
    k, kv_len = block_size, int(statistics.mean(map(len, prompts))) + 32
    jobs = dict(ntp=run("ntp", mode="ntp"), sbd=run("sbd"), prefill=run("prefill", max_new_tokens=0))
    seconds = interleaved(jobs | forward_jobs(model, {1: 1, k: 0, 2 * k: k}, kv_len), repeats, 1)
    prefill = seconds["prefill"]   # Eq. 16 is about what follows it
    tokens, nfe = {m: sum(len(r.tokens) for r in runs[m]) for m in jobs}, {m: sum(r.nfe for r in runs[m]) for m in jobs}
    show("prefill of all prompts", prefill)
    for W in (1, k, 2 * k):
        show(f"forward, window {W}, KV {kv_len}", [s / IN_A_ROW for s in seconds[W]])
    rates = {m: [tokens[m] / (s - p) for s, p in zip(seconds[m], prefill)] for m in ("ntp", "sbd")}   # tokens/s, a round each
    for mode, rate in rates.items():
        print(f"  {mode:8s} {statistics.median(rate):9.1f} tokens/s behind the prefill, {tokens[mode]} tokens in {nfe[mode]} forwards")
    nfe_speedup = tokens["sbd"] / nfe["sbd"]
    wall = [s / n for s, n in zip(rates["sbd"], rates["ntp"])]
    predicted = [equation_16(*t, k, nfe_speedup) for t in zip(seconds[1], seconds[k], seconds[2 * k])]
    share = statistics.median(w / p for w, p in zip(wall, predicted))
    print(f"  NFE speedup {nfe_speedup:.2f}, wall-clock speedup {statistics.median(wall):.2f}, Eq. 16 predicts "
          f"{statistics.median(predicted):.2f}: {share:.2f} of it (medians over rounds)")
    return dict(nfe_speedup=nfe_speedup, wall_clock=statistics.median(wall), eq16=statistics.median(predicted), share=share,
                tokens_per_s={m: statistics.median(r) for m, r in rates.items()})


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
