"""Seconds: what forwards, decoding and training cost on this machine; the only place with timing helpers.

    python bench.py                                                             the shipped tiny model
    python bench.py --init_from=DIR --against=transformers                      any model, beside transformers' generate
    python bench.py --random_weights --init_from=llama3.1-8b --nfe_speedup=4    a shape without its weights
    python bench.py --kernels                                                   the Triton kernels, on a Hopper GPU

The machine's own ceilings come first and make a roofline; then everything is timed in the same process and printed beside it.
What is compared runs in turn, A B A B, after a warm-up. Figures are medians over the rounds, and a ratio is the median of the
rounds' ratios: what to quote are the ratios.

Shapes: k block size, W window tokens, B rows.
"""
import argparse
import importlib.util
import itertools
import json
import math
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import mean, median

import torch
import torch.nn.functional as F

import generate as decoding
import roofline
from kv_cache import KVCache, run_window
from hf import free_memory, need, write_whole
from kernels.packed_linear import pack, packed_linear
from model import Llama, LlamaConfig
from sbd_loss import ntp_loss, sbd_loss
from tokenizer import Tokenizer

HERE = Path(__file__).parent
WINDOWS = (1, 2, 4, 8, 16, 32, 64)
BIG, SIDE = 2**29, 2048   # bytes that no cache holds; rows of a large matrix


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def interleaved(functions: dict, repeats: int, least: float = 0.03) -> dict:
    """name -> [seconds a call, ...], one for each of `repeats` rounds that call every function in turn.

    Within a round a function runs for at least `least` seconds in a row, at most 200 times, as decoding runs forwards:
    the first one finds the caches filled by another. Two calls of each come before, to warm up.
    """
    def timed(function, n):
        synchronize()
        began = time.perf_counter()
        for _ in range(n):
            function()
        synchronize()
        return (time.perf_counter() - began) / n

    for function in functions.values():
        function()
    in_a_row = {name: max(1, min(200, math.ceil(least / timed(function, 1)))) for name, function in functions.items()}
    rounds = [{name: timed(function, in_a_row[name]) for name, function in functions.items()} for _ in range(repeats)]
    return {name: [r[name] for r in rounds] for name in functions}


def ratio(a, b):
    """Median over the rounds of a / b, two lists of seconds."""
    return median(x / y for x, y in zip(a, b))


def spread(seconds):
    return f"{1e3 * median(seconds):9.3f} ms {f'({1e3 * min(seconds):.3f} to {1e3 * max(seconds):.3f})':22}"


@torch.inference_mode()
def ceilings(nbytes, dtype, device, repeats) -> tuple:
    """What this machine reaches -> (roofline.Device, figures).

    Copies and matrix-vector products run over BIG bytes and, where all weights of the model (nbytes) are fewer, over that
    many too: the caches may hold them, and then theirs is the bandwidth to compare with. The larger of the two rates counts.
    """
    side = SIDE * (4 if device.type == "cuda" else 1)
    square = torch.randn(side, side, device=device).to(dtype)
    out = torch.empty_like(square)
    [seconds] = interleaved(dict(matmul=lambda: torch.mm(square, square, out=out)), repeats).values()
    flops, memory = 2 * side**3 / median(seconds), {}
    print(f"\nceilings\n  matmul {side} x {side}: {flops / 1e9:,.0f} GFLOP/s")
    for size in sorted({BIG, min(BIG, nbytes)}, reverse=True):
        halves = torch.ones(2, size // dtype.itemsize // 2, dtype=dtype, device=device)
        side = min(2 * SIDE, math.isqrt(halves.numel()))
        x, count = torch.ones(1, side, dtype=dtype, device=device), halves.numel() // side**2
        matrices = halves.view(-1)[:count * side**2].view(count, side, side)
        packed = [pack(matrix) for matrix in matrices]                     # as decoding reads them
        jobs = dict(copy=lambda: halves[1].copy_(halves[0]),
                    matvec=lambda: [F.linear(x, m) if p is None else packed_linear(x, p) for m, p in zip(matrices, packed)])
        seconds = interleaved(jobs, repeats)
        copy, matvec = size / median(seconds["copy"]), matrices.nbytes / median(seconds["matvec"])
        memory[size] = dict(copy=copy, matvec=matvec)
        print(f"  over {size / 1e6:,.1f} MB: copy {copy / 1e9:.1f} GB/s, read and written; "
              f"matrix-vector products {matvec / 1e9:.1f} GB/s, {matvec / copy:.2f} of it")
    bandwidth = max(copy, matvec)
    print(f"  roofline: {flops / 1e9:,.0f} GFLOP/s and {bandwidth / 1e9:.1f} GB/s, that over {size / 1e6:,.1f} MB"
          + ", all weights of this model" * (size < BIG))
    return roofline.Device(bandwidth, flops), dict(matmul_flops=flops, bandwidth=bandwidth, memory=memory)


def filled_cache(model, batch, kv_len, scratch):
    weight = model.lm_head.weight
    with torch.inference_mode():
        cache = KVCache(model.config, batch, kv_len + scratch, weight.device, weight.dtype)
        cache.k.normal_(), cache.v.normal_()
    cache.commit([kv_len] * batch)
    return cache


def forward_job(model, cache, block_size, num_causal, num_blocks, read):
    """A function that runs one window, [causal | block | block ...] on every row of `cache`, and fetches the argmax of
    its last `read` positions' logits."""
    B, W = len(cache.lengths), num_causal + num_blocks * block_size
    tokens = torch.randint(model.config.vocab_size, (B, W)).tolist()

    @torch.inference_mode()
    def run():
        hidden = run_window(model, cache, tokens, [num_causal] * B, [[num_causal] * num_blocks] * B, block_size)
        return model.lm_head(hidden[:, W - read:]).argmax(-1).tolist()
    return run


def linears_job(model, batch, torch_own=False):
    """The linear layers of a one-token forward alone, in its order: each weight is read once, after all the others.

    As decoding runs them (q, k, v are one product, gate and up another), or each as PyTorch's own nn.Linear would be.
    """
    c, weight = model.config, model.lm_head.weight
    x, heads, ffn = (torch.randn(batch, n, device=weight.device).to(weight.dtype)
                     for n in (c.hidden_size, c.num_attention_heads * c.head_dim, c.intermediate_size))
    inputs = dict(o_proj=heads, down_proj=ffn)
    each = [(inputs.get(name.split(".")[-1], x), m.weight) for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)]

    @torch.inference_mode()
    def run():
        if torch_own:
            return [F.linear(*one) for one in each]
        for layer in model.model.layers:
            layer.self_attn.together(x)
            layer.self_attn.o_proj(heads)
            layer.mlp.together(x)
            layer.mlp.down_proj(ffn)
        return model.lm_head(x)
    return run


def bench_forwards(model, case, kv_lens, batches, repeats) -> list:
    """Prefill and windows of every width, measured over roofline; a one-token forward over its linear layers."""
    weights = [layer.weight for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    figures = []
    for batch, kv_len in itertools.product(batches, kv_lens):
        cache, empty = filled_cache(model, batch, kv_len, max(WINDOWS)), filled_cache(model, batch, 0, kv_len)
        jobs = {W: forward_job(model, cache, W, int(W == 1), int(W > 1), W) for W in WINDOWS}
        jobs |= dict(prefill=forward_job(model, empty, 1, kv_len, 0, 1), linears=linears_job(model, batch))
        jobs["torch's linears"] = linears_job(model, batch, torch_own=True)
        seconds = interleaved(jobs, repeats)
        least = {W: roofline.total(roofline.forward_parts(W, kv_len, batch, **case)) for W in WINDOWS}
        least["prefill"] = roofline.total(roofline.forward_parts(kv_len, 0, batch, causal=True, logits=1, **case))
        title = f"batch {batch}, {kv_len} cached tokens a row"
        print(f"\n{title:51}{'roofline':>15}{'over it':>9}{'over one token (roofline)':>27}")
        for name, cost in least.items():
            f = dict(window=name, batch=batch, kv_len=kv_len, seconds=seconds[name], roofline=vars(cost),
                     over_roofline=median(seconds[name]) / cost.time, slowdown=ratio(seconds[name], seconds[1]))
            label = f"window {name}" if name in WINDOWS else f"prefill of {kv_len}"
            slow = f"{f['slowdown']:19.2f} ({cost.time / least[1].time:.2f})" if name in WINDOWS else ""
            print(f"  {label:16}{spread(seconds[name])}{1e3 * cost.time:10.3f} ms{f['over_roofline']:9.2f}{slow}")
            figures.append(f)
        for name in ("linears", "torch's linears"):
            s, over = seconds[name], ratio(seconds[1], seconds[name])
            bandwidth = sum(w.numel() * w.itemsize for w in weights) / median(s)
            print(f"  {name:16}{spread(s)}  {bandwidth / 1e9:.1f} GB/s; the window of 1 takes {over:.3f} of it")
            figures.append(dict(window=name, batch=batch, kv_len=kv_len, seconds=s, bandwidth=bandwidth, forward_over=over))
    return figures


def equation_16(t1, tk, t2k, k, nfe_speedup):
    """Eq. 16: k t(1) / (t(2k) + (l - 1) t(k)), with l = k / nfe_speedup forwards a block."""
    return k * t1 / (t2k + (k / nfe_speedup - 1) * tk)


def schedule(k, nfe_speedup):
    """How many tokens each forward reveals, without end: blocks take k / nfe_speedup forwards on average, which share
    their block evenly."""
    for b in itertools.count():
        forwards = math.floor((b + 1) * k / nfe_speedup + 1e-9) - math.floor(b * k / nfe_speedup + 1e-9)
        for i in range(forwards):
            yield k * (i + 1) // forwards - k * i // forwards


def replay(k, nfe_speedup):
    """A rule of eb_sampler for one row that follows the schedule from left to right, whatever the model predicts."""
    reveals = schedule(k, nfe_speedup)
    return lambda H, c, masked, bound: masked & (masked.cumsum(-1) <= next(reveals))


def layout(mode, W, k, hedges):
    """What a decoding forward of W tokens holds: causal tokens, blocks of k, and how many logits at its end are read."""
    if mode == "ntp":
        return 1, 0, 1
    if mode == "sbd":
        return W - k, 1, k
    blocks = min(hedges, (W - 1) // k)   # verified: [next, draft | blocks], the draft of at most k - 1
    return W - blocks * k, blocks, W - blocks * k + (k - 1 if blocks else 0)


def forwards_of(model, run) -> list:
    """(cached tokens, W) of every decoding forward of run(), one row each; prefills are left out."""
    hidden, graphs, seen = model.hidden, model.graphs, []

    def watched(tokens, positions, attend):
        seen.append((int(positions[0, 0]), tokens.shape[1]))
        return hidden(tokens, positions, attend)

    model.hidden, model.graphs = watched, None   # a replayed graph would call nothing
    try:
        run()
    finally:
        model.graphs = graphs
        del model.hidden
    return [forward for forward in seen if forward[0]]


def peak_memory(device, run):
    """Peak bytes during run(): CUDA's allocator, elsewhere the whole process; None where the system does not say."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")   # Linux: forget the old peak
    run()
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024 if status.exists() else None


def bench_decoding(model, case, prompts, modes, k, gamma, hedges, nfe_speedup, max_new_tokens, repeats) -> dict:
    """Every mode on the same prompts, one at a time: rates, and the wall-clock speedup over NTP beside the one that the
    times of the mode's forwards, measured in the same rounds, predict.

    The prefill makes the first token of ntp and verified: what is `made` behind it, and the speedups, leave that one out.
    """
    replayed = modes == ["ntp"] or nfe_speedup is not None   # texts that mean nothing end at the limit
    options = dict(max_new_tokens=max_new_tokens, block_size=k, gamma=gamma, hedges=hedges,
                   stop_ids=() if replayed else model.config.stop_ids)
    runs, first, peak, widths, kv_lens = {}, {}, {}, {}, []

    def job(mode, **more):
        def all_prompts():
            runs[mode], sampler = [], "replay" if nfe_speedup and mode == "sbd" else "eb"
            for prompt in prompts:
                decoding.SAMPLERS["replay"] = replay(k, nfe_speedup)
                began, row = time.perf_counter(), None
                for steps in decoding.decode(model, [prompt], mode=mode, sampler=sampler, **options | more):
                    if row is None and steps[0].final:
                        row = steps[0].row
                        first.setdefault(mode, []).append(time.perf_counter() - began)
                runs[mode].append(row)
        return all_prompts

    jobs = {mode: job(mode) for mode in modes}
    lengths = sorted(map(len, prompts))
    print(f"\ndecoding {len(prompts)} prompts of {lengths[0]} to {lengths[-1]} tokens, batch 1, block {k}, {hedges} hedges, "
          + (f"sbd REPLAYING {nfe_speedup:g} tokens a forward" if nfe_speedup else f"gamma {gamma}"))
    for mode, run in jobs.items():   # once untimed: which forwards it runs
        seen = []
        peak[mode] = peak_memory(model.lm_head.weight.device, lambda: seen.extend(forwards_of(model, run)))
        need(seen, "no prompt needs a forward behind its prefill: the model ends every text at once; try --nfe_speedup")
        widths[mode] = Counter(W for _, W in seen)
        kv_lens += [kv_len for kv_len, _ in seen]
    kv_len, windows = round(mean(kv_lens)), {m: mean(widths[m].elements()) for m in modes}
    wanted = {(m, W) for m in modes for W in widths[m]} | {(m, round(windows[m])) for m in modes if m == "verified"}
    wanted |= {("sbd", k), ("sbd", 2 * k)} if "sbd" in modes else set()
    cache = filled_cache(model, 1, kv_len, max(W for _, W in wanted))
    jobs |= {(m, W): forward_job(model, cache, k, *layout(m, W, k, hedges)) for m, W in sorted(wanted)}
    rows = {m: runs[m] for m in modes}
    jobs |= {("prefill", m): job(m, max_new_tokens=0) for m in modes}
    seconds = interleaved(jobs, repeats, 0.2)   # forwards are timed about as long as the decoding that they explain
    for m, W in sorted(wanted):
        print(f"  {m:8} forward, {W:3} tokens behind {kv_len}  {spread(seconds[m, W])}")
    decoding.SAMPLERS.pop("replay")
    print("  mode      tokens   NFE  a NFE  window  tokens/s  decode/s  first ms  peak MB  in fwds"
          "   wall clock (min to max)  predicted  share  roofline")
    figures, t1 = {}, seconds["ntp", 1]
    for m in modes:
        tokens, nfe = sum(len(r.tokens) for r in rows[m]), sum(r.nfe for r in rows[m])
        made, forwards = tokens - (m != "sbd") * len(prompts), widths[m].total()
        behind = [s - p for s, p in zip(seconds[m], seconds["prefill", m])]
        alone = [sum(n * seconds[m, W][i] for W, n in widths[m].items()) for i in range(repeats)]
        figures[m] = f = dict(tokens=tokens, nfe=nfe, nfe_speedup=tokens / nfe, forwards=forwards, mean_window=windows[m],
                              tokens_per_s=tokens / median(seconds[m]), decode_tokens_per_s=[made / s for s in behind],
                              first_token_s=median(first[m]), peak_bytes=peak[m], in_forwards=ratio(alone, behind))
        line = (f"  {m:9}{tokens:7}{nfe:6}{tokens / nfe:7.2f}{windows[m]:8.1f}{f['tokens_per_s']:10.1f}"
                f"{median(f['decode_tokens_per_s']):10.1f}{1e3 * f['first_token_s']:10.2f}{(peak[m] or math.nan) / 1e6:9.0f}"
                f"{f['in_forwards']:9.3f}")
        if m != "ntp":
            if m == "sbd":
                predicted = [equation_16(*t, k, made / forwards) for t in zip(t1, seconds[m, k], seconds[m, 2 * k])]
                ideal = roofline.speedup(k, made / forwards, kv_len, 1, **case)
            else:
                predicted = [made / forwards * a / b for a, b in zip(t1, seconds[m, round(windows[m])])]
                ideal = roofline.verified_speedup(made / forwards, windows[m], kv_len, 1, **case)
            wall = [a / b for a, b in zip(f["decode_tokens_per_s"], figures["ntp"]["decode_tokens_per_s"])]
            f |= dict(wall_clock=wall, predicted=predicted, share=ratio(wall, predicted), roofline_speedup=ideal)
            line += (f"{median(wall):11.2f} {f'({min(wall):.2f} to {max(wall):.2f})':>15}"
                     f"{median(predicted):11.2f}{f['share']:7.3f}{ideal:10.2f}")
        print(line)
    print("  window: mean tokens a forward runs. decode/s: behind the prefill, which makes the first token of ntp and verified.\n"
          "  in fwds: the share of that time that the forwards take alone. wall clock: decode/s over ntp's. predicted: from\n"
          "  the forwards timed above, sbd by Eq. 16, verified by tokens a forward * t(1) / t(mean window, rounded).\n"
          "  share: wall clock over predicted. roofline: predicted from its times.")
    return figures | dict(kv_len=kv_len, replayed=nfe_speedup, forward_s={f"{m} {W}": seconds[m, W] for m, W in sorted(wanted)})


def bench_training(model, case, batch_size, seq_len, block_size, repeats) -> dict:
    """One SBD step against one NTP step of the same B and L, forward and backward (two more forwards in flops)."""
    tokens = torch.randint(model.config.vocab_size, (batch_size, seq_len), device=model.lm_head.weight.device)

    def step(loss):
        def run():
            loss().loss.backward()
            model.zero_grad()
        return run

    losses = dict(ntp=lambda: ntp_loss(model, tokens), sbd=lambda: sbd_loss(model, tokens, block_size))
    seconds = interleaved({name: step(loss) for name, loss in losses.items()}, repeats)
    # An SBD step is two NTP ones: 2L tokens, and about L * L scores a head where causal attention has L * L / 2.
    least = {name: 3 * roofline.forward_time(seq_len, 0, rows, causal=True, **case)
             for name, rows in (("ntp", batch_size), ("sbd", 2 * batch_size))}
    print(f"\ntraining step, {batch_size} x {seq_len} tokens, block {block_size}, without the optimizer")
    for name, s in seconds.items():
        print(f"  {name:5}{spread(s)}, {median(s) / least[name]:.2f} times the roofline's {1e3 * least[name]:.1f} ms")
    print(f"  an SBD step costs {ratio(seconds['sbd'], seconds['ntp']):.2f} NTP steps")
    return dict(seconds=seconds, roofline=least, ratio=ratio(seconds["sbd"], seconds["ntp"]))


def bench_transformers(model, prompt, new_tokens, repeats) -> dict:
    """Greedy next-token decoding, ours and transformers' generate, on the same folder, prompt, dtype and threads."""
    from transformers import AutoModelForCausalLM
    dtype, device = model.lm_head.weight.dtype, model.lm_head.weight.device
    theirs = AutoModelForCausalLM.from_pretrained(model.folder, dtype=dtype).to(device).eval()
    theirs.generation_config.eos_token_id = None   # both decode exactly new_tokens
    ids, texts = torch.tensor([prompt], device=device), {}

    def ours():
        texts["ours"] = decoding.generate(model, [prompt], mode="ntp", max_new_tokens=new_tokens)[0].tokens

    def transformers():
        texts["transformers"] = theirs.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0,
                                                max_new_tokens=new_tokens)[0, len(prompt):].tolist()

    print(f"\nNTP decoding of {new_tokens} tokens behind {len(prompt)}, batch 1")
    seconds = interleaved(dict(ours=ours, transformers=transformers), repeats)
    for name, s in seconds.items():
        print(f"  {name:13}{spread(s)}, {new_tokens / median(s):.1f} tokens/s")
    same = next((i for i, (a, b) in enumerate(zip(*texts.values())) if a != b), new_tokens)
    speed = ratio(seconds["transformers"], seconds["ours"])
    print(f"  {speed:.2f} times transformers' tokens/s; the texts agree on the first {same} of {new_tokens} tokens")
    return dict(ratio=speed, seconds=seconds, agree=same)


@torch.no_grad()
def random_model(config, device, dtype) -> Llama:
    """A model of this shape, made in `dtype` on `device`: a million random weights over and over (drawing 8B takes minutes)."""
    with torch.device("meta"):
        model = Llama(config).to(dtype)
    model.to_empty(device=device).tie_weights()
    chunk = (0.02 * torch.randn(2**20 + 1, device=device)).to(dtype)   # an odd number: no two rows begin alike
    for weight in model.parameters():
        for part in weight.view(-1).split(len(chunk)):
            part.copy_(chunk[:len(part)]) if weight.dim() == 2 else part.fill_(1)
    return model.eval()


def plot(path, figures, title):
    """Every timed forward on the roofline: flop/s reached against flops a byte."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    bandwidth, peak = figures["ceilings"]["bandwidth"], figures["ceilings"]["matmul_flops"]
    points = [(f["roofline"]["flops"] / f["roofline"]["bytes"], f["roofline"]["flops"] / median(f["seconds"]) / 1e9, f)
              for f in figures["forwards"] if "roofline" in f]
    line = sorted((min(x for x, _, _ in points) / 2, peak / bandwidth, 2 * max(x for x, _, _ in points)))
    axes.plot(line, [min(peak, bandwidth * x) / 1e9 for x in line], "k",
              label=f"{bandwidth / 1e9:,.0f} GB/s, {peak / 1e9:,.0f} GFLOP/s")
    for i, key in enumerate(dict.fromkeys((f["batch"], f["kv_len"]) for _, _, f in points)):
        xs, ys, _ = zip(*(p for p in points if (p[2]["batch"], p[2]["kv_len"]) == key))
        axes.plot(xs[:-1], ys[:-1], f"C{i}o-", label=f"windows of {WINDOWS[0]} to {WINDOWS[-1]}, batch {key[0]}, KV {key[1]}")
        axes.plot(xs[-1], ys[-1], f"C{i}s")
    axes.set(xscale="log", yscale="log", xlabel="flops a byte", ylabel="GFLOP/s", title=title + "; squares: prefill")
    axes.legend(fontsize="small")
    write_whole(path, lambda temporary: figure.savefig(temporary, format=path.suffix[1:], dpi=120))


def sizes(text):
    return [int(n) for n in text.split(",")]


def parse(argv=None):
    p = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter, description=__doc__.split("\n")[0],
                                allow_abbrev=False)
    p.error, a = lambda message: need(False, message), p.add_argument
    a("--init_from", default=str(HERE / "checkpoints/tiny-sbd"), help="folder, hub id or preset")
    a("--random_weights", action="store_true", help="take only the shape of --init_from; SBD needs --nfe_speedup then")
    a("--mask_id", type=int, help="the mask token, where the model's config names none")
    a("--against", choices=("transformers",), help="time next-token decoding beside this one's generate, and nothing else")
    a("--compile", action="store_true", help="compile the model as generate.py --compile does")
    a("--kv_lens", type=sizes, default="128,1024", help="cached tokens a row of the timed windows, prompt tokens of the prefills")
    a("--batches", type=sizes, default="1,4", help="rows of the timed forwards")
    a("--block_size", type=int, default=16, help="k")
    a("--gamma", type=float, default=0.1, help="entropy budget of a step, nats")
    a("--hedges", type=int, default=2, help="verified: blocks a window")
    a("--nfe_speedup", type=float, help="SBD reveals this many tokens a forward, whatever the model predicts")
    a("--num_prompts", type=int, default=16, help="held-out word problems to decode; --random_weights: 128 random tokens each")
    a("--max_new_tokens", type=int, default=128, help="most tokens a prompt")
    a("--batch_size", type=int, default=8, help="rows of a training step; 0: none is timed")
    a("--seq_len", type=int, default=512, help="tokens a row of it")
    a("--repeats", type=int, default=7, help="timed rounds of everything")
    a("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    a("--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and cache")
    a("--kernels", action="store_true", help="check and time the Triton kernels, and nothing else; made for Hopper")
    a("--json", type=Path, help="write all figures to this file")
    a("--plot", type=Path, help="draw the timed forwards on the roofline to this .png, .pdf or .svg file")
    return p.parse_args(argv)


def check(args) -> LlamaConfig:
    """Refuse what cannot be timed before any weight is read; returns the shape of the model."""
    for name, least in dict(block_size=1, hedges=1, num_prompts=1, max_new_tokens=2, batch_size=0, seq_len=2, repeats=1).items():
        need(getattr(args, name) >= least, f"--{name} {getattr(args, name)}: wanted at least {least}")
    need(min(args.kv_lens + args.batches) >= 1, "--kv_lens and --batches: wanted numbers of at least 1")
    need(0 <= args.gamma < math.inf, f"--gamma {args.gamma}: wanted an entropy of 0 nats or more")
    need(args.nfe_speedup is None or 1 <= args.nfe_speedup <= args.block_size,
         f"--nfe_speedup {args.nfe_speedup}: wanted 1 to the block size, {args.block_size}, tokens a forward")
    for lone in ("against", "kernels"):
        others = {"against", "random_weights", "nfe_speedup", "plot"} - {lone}
        idle = [f"--{name}" for name in sorted(others) if getattr(args, name)]
        need(not (getattr(args, lone) and idle), f"--{lone} times nothing but that: leave out {', '.join(idle)}")
    for path, suffixes in ((args.json, None), (args.plot, (".png", ".pdf", ".svg"))):
        need(path is None or path.parent.is_dir() and not path.is_dir() and (suffixes is None or path.suffix in suffixes),
             f"{path}: wanted a {' or '.join(suffixes or ('.json',))} file in a folder that exists")
    for module, asked in (("matplotlib", args.plot), ("transformers", args.against)):
        need(not asked or importlib.util.find_spec(module), f"{module} is not here: pip install {module}")
    try:
        need(torch.empty(1, device=args.device).device.type in ("cpu", "cuda"), f"--device {args.device}: wanted cpu or cuda")
    except (RuntimeError, AssertionError):
        raise ValueError(f"--device {args.device} is not there: try --device=cpu") from None
    config = LlamaConfig.from_pretrained(args.init_from)
    most = config.max_position_embeddings - max(WINDOWS)
    need(max(args.kv_lens) <= most, f"--kv_lens {max(args.kv_lens)}: the context holds {most} before a window of {WINDOWS[-1]}")
    ids = [args.mask_id, config.mask_id, 0 if args.random_weights else None]
    config.mask_id = next((i for i in ids if i is not None), None)
    need(args.against or config.mask_id is not None,
         f"{args.init_from} names no mask token: give --mask_id, an id of its vocabulary that text never uses")
    need(0 <= (config.mask_id or 0) < config.vocab_size, f"--mask_id {config.mask_id}: wanted 0 to {config.vocab_size - 1}")
    return config


def main(argv=None):
    args = parse(argv)
    config, device, dtype = check(args), torch.device(args.device), getattr(torch, args.dtype)
    if args.kernels:
        from kernels.check import bench_kernels   # only here: it needs Triton
        figures = bench_kernels()
        if args.json:
            write_whole(args.json, lambda path: path.write_text(json.dumps(figures, indent=1) + "\n"))
        return
    with torch.device("meta"):
        count = sum(p.numel() for p in Llama(config).parameters())
    slots = max(args.batches) * (2 * max(args.kv_lens) + max(WINDOWS))   # bench_forwards' two caches
    count_kv = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * slots
    total, free = (count + count_kv) * dtype.itemsize, free_memory(device)
    need(total <= free, f"weights and caches take {total / 2**30:.1f} GiB, {device} has {free / 2**30:.1f} GiB free: "
                        "use a smaller model or dtype, fewer --batches or shorter --kv_lens")
    if args.random_weights:
        model, prompts = random_model(config, device, dtype), torch.randint(config.vocab_size, (args.num_prompts, 128)).tolist()
    else:
        from data.word_problems.prepare import problems
        model = Llama.from_pretrained(args.init_from, device, dtype, args.mask_id)
        tokenizer = Tokenizer.from_pretrained(model.folder)
        prompts = [tokenizer.encode(problem.prompt) for problem in problems("val", args.num_prompts)]
    model.fuse()
    if args.compile:
        decoding.compile_decoding(model)
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    how = ["random weights"] * args.random_weights + ["compiled"] * args.compile
    title = ", ".join([Path(args.init_from).name, *how, args.dtype, machine])
    print(f"{title}: {count / 1e6:,.1f}M parameters, torch {torch.__version__}")
    figures = dict(title=title, torch=torch.__version__, parameters=count)
    if args.against:
        figures["transformers"] = bench_transformers(model, prompts[0], args.max_new_tokens, args.repeats)
    else:
        limits, figures["ceilings"] = ceilings(count * dtype.itemsize, dtype, device, args.repeats)
        case = dict(config=config, device=limits, weight_bytes=dtype.itemsize, kv_bytes=dtype.itemsize, act_bytes=dtype.itemsize)
        figures["forwards"] = bench_forwards(model, case, args.kv_lens, args.batches, args.repeats)
        modes = ["ntp"] + ["sbd"] * (bool(args.nfe_speedup) or not args.random_weights) + ["verified"] * (not args.random_weights)
        figures["decoding"] = bench_decoding(model, case, prompts, modes, args.block_size, args.gamma, args.hedges,
                                             args.nfe_speedup, args.max_new_tokens, args.repeats)
        if args.batch_size and not args.random_weights:
            figures["training"] = bench_training(model, case, args.batch_size, args.seq_len, args.block_size, args.repeats)
    if args.json:
        write_whole(args.json, lambda path: path.write_text(json.dumps(figures, indent=1) + "\n"))
    if args.plot:
        plot(args.plot, figures, title)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        print(f"bench.py: {error}", file=sys.stderr)
        sys.exit(2)
