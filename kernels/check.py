"""Every check and timing of the kernels, of training and of decoding.

    python kernels/check.py              the PyTorch path of training against SDPA with the dense mask: seconds and memory
    python bench.py --kernels            the Triton kernels, on a Hopper GPU
"""
import functools
import itertools
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
from bench import interleaved
from hf import need
from kernels.sbd_attention import intervals, row_intervals, sbd_attention
from kv_cache import KVCache, cached_attend, window
from model import LlamaConfig
from sbd_loss import sbd_attention_mask


# Windows of the timed decoding: W -> causal tokens, what each block sees, block size (one token, [block], [pending | block]).
KERNEL_WINDOWS = {1: (1, [], 1), 16: (0, [0], 16), 32: (16, [16], 16)}


CHECKED_WINDOWS = KERNEL_WINDOWS | {20: (5, [1, 3, 5], 5), 128: (64, [64], 64)}


# GPU, and the interpreter on the CPU: heads, key heads, D; cached tokens; L of the training checks; repeats.
ON_GPU, INTERPRETED = (32, 8, 128, 1000, 500, 20), (4, 2, 16, 70, 20, 1)


FLEX_UNTIL = 300   # seconds after which no further shape is compiled for FlexAttention


def kernel_seconds(functions: dict, repeats: int, graph: bool) -> dict:
    """name -> median seconds a call, in turn. graph: on CUDA, replayed without Python's part of it, the L2 cache flushed before."""
    if not torch.cuda.is_available():
        return {name: median(s) for name, s in interleaved(functions, repeats, 0).items()}
    flush, calls, seconds = torch.empty(2**28, dtype=torch.int8, device="cuda"), {}, {name: [] for name in functions}
    for name, function in functions.items():
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(3):
                function()
        torch.cuda.synchronize()
        calls[name] = function
        if graph:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                function()
            calls[name] = captured.replay
    for _ in range(repeats):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            start.record()
            call()
            end.record()
            end.synchronize()
            seconds[name].append(start.elapsed_time(end) / 1e3)
    return {name: median(s) for name, s in seconds.items()}


def relative_error(ours, truth):
    return ((ours.double() - truth).norm() / truth.norm()).item()


def decoding_case(shape, batch, kv_len, W, dtype, device):
    """One layer's inputs q, k, v of a window behind kv_len tokens; the rule; and a KVCache for Triton and one for SDPA, which
    share their tensors; attend[name] runs it."""
    H, Hkv, D, *_ = shape
    causal, sees, k = CHECKED_WINDOWS[W]
    config = LlamaConfig(hidden_size=H * D, num_hidden_layers=1, num_attention_heads=H, num_key_value_heads=Hkv, head_dim=D)
    caches = {name: KVCache(config, batch, size, device, dtype, name) for name, size in (("triton", kv_len + W), ("sdpa", 1))}
    caches["sdpa"].k, caches["sdpa"].v = caches["triton"].k.normal_(), caches["triton"].v.normal_()
    qkv = [torch.randn(batch, W, heads, D, device=device, dtype=dtype).transpose(1, 2) for heads in (H, Hkv, Hkv)]
    attend = {}
    for name, cache in caches.items():
        cache.commit([kv_len] * batch)
        w = window(cache, [causal] * batch, [sees] * batch, k)
        rule = w.rule if name == "triton" else rule
        attend[name] = functools.partial(cached_attend(cache, w), 0, *qkv)
    return qkv, rule, caches["triton"], attend


def flex_decoding(q, rule, cache):
    """FlexAttention with the window's rule, over the cache with the window's keys and values written behind it."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    W, length = q.shape[2], int(rule[0, 0])
    seen, block = rule[0, 2:2 + W].contiguous(), rule[0, 2 + W:].contiguous()

    def may_attend(b, h, row, key):
        own = (key - length).clamp(min=0)
        return (key - length < seen[row]) | (block[row] >= 0) & (key >= length) & (block[row] == block[own])

    mask = create_block_mask(may_attend, None, None, W, length + W, device=q.device)
    torch._dynamo.reset()   # else it stops compiling after a few shapes
    return functools.partial(torch.compile(flex_attention, dynamic=False), q, cache.k[0, :, :, :length + W], cache.v[0, :, :, :length + W],
                             block_mask=mask, enable_gqa=True)


def check_decoding(shape, W, dtype, device):
    """The decoding kernel against its float64 reference: relative errors of the output, and of the cache (0)."""
    from kernels.block_decode import reference
    qkv, rule, cache, attend = decoding_case(shape, 2, shape[3], W, dtype, device)
    exact = [x.double() for x in (*qkv, cache.k[0], cache.v[0])]
    out, truth = attend["triton"](), reference(*exact, rule)
    need(torch.equal(cache.k[0].double(), exact[3]) and torch.equal(cache.v[0].double(), exact[4]), "the cache differs")
    return dict(output=relative_error(out, truth))


def training_inputs(batch, heads, kv_heads, L, D, dtype, device):
    """q, k, v (B, H or Hkv, 2L, D) that want gradients, and the output's gradient."""
    return [torch.randn(batch, n, 2 * L, D, device=device, dtype=dtype, requires_grad=i < 3) for i, n in
            enumerate((heads, kv_heads, kv_heads, heads))]


def check_training(shape, k, dtype, device):
    """The training kernels against dense float64 attention with the mask: relative errors of the output and the gradients."""
    from kernels.sbd_attention import sbd_attention
    H, Hkv, D, _, L, _ = shape
    *qkv, g = training_inputs(1, H // 4, Hkv // 2, L, D, dtype, device)
    out = sbd_attention(*qkv, k, backend="triton")
    exact = [x.detach().double().requires_grad_() for x in qkv]
    keys, values = (x.repeat_interleave(qkv[0].shape[1] // x.shape[1], 1) for x in exact[1:])
    scores = exact[0] @ keys.transpose(2, 3) / math.sqrt(D)
    truth = scores.masked_fill(~sbd_attention_mask(L, k).to(device), -torch.inf).softmax(-1) @ values
    pairs = zip((out, *torch.autograd.grad(out, qkv, g)), (truth, *torch.autograd.grad(truth, exact, g.double())))
    return {name: relative_error(*pair) for name, pair in zip(("output", "dq", "dk", "dv"), pairs)}


def time_training(shape, batch, L, k, dtype, device, flex):
    """Forward, and forward plus backward, of Triton and compiled FlexAttention; Triton's peak memory over what must exist."""
    from kernels.sbd_attention import cost, sbd_attend
    H, Hkv, D, *_, repeats = shape
    *qkv, g = training_inputs(batch, H, Hkv, L, D, dtype, device)
    attend = {name: sbd_attend(L, k, None, device, name) for name in ["triton"] + ["flex"] * flex}
    jobs = {(name, "forward"): functools.partial(f, *qkv) for name, f in attend.items()}
    jobs |= {(name, "both"): lambda f=f: torch.autograd.grad(f(*qkv), qkv, g) for name, f in attend.items()}
    s = kernel_seconds(jobs, repeats, graph=False)
    forward, backward = cost(batch, H, Hkv, L, D, k)["flops"]
    t = s["triton", "forward"], s["triton", "both"] - s["triton", "forward"]
    row = dict(ms=1e3 * s["triton", "both"], forward_tflops=forward / t[0] / 1e12, backward_tflops=backward / t[1] / 1e12)
    if flex:
        row |= dict(over_flex=s["flex", "both"] / s["triton", "both"], forward_over_flex=s["flex", "forward"] / t[0])
    if device.type == "cuda":
        must = 2 * sum(x.nbytes for x in (*qkv, g))                  # with the gradients, and with o in g's size
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() - must // 2
        jobs["triton", "both"]()
        row["memory"] = (torch.cuda.max_memory_allocated() - before) / must
    return row


def time_decoding(shape, batch, kv_len, W, dtype, device, flex, copy):
    """One layer's attention: Triton beside SDPA and FlexAttention; its rate on the cache's bytes over `copy` bytes/s."""
    from kernels.block_decode import cost
    H, Hkv, D, *_, repeats = shape
    qkv, rule, cache, jobs = decoding_case(shape, batch, kv_len, W, dtype, device)
    if flex:
        jobs["flex"] = flex_decoding(qkv[0], rule, cache)
    s = kernel_seconds(jobs, repeats, graph=True)
    row = dict(ms=1e3 * s["triton"], tflops=cost(rule.cpu(), H, Hkv, D, 2)["flops"] / s["triton"] / 1e12,
               of_copy=2 * batch * Hkv * kv_len * D * dtype.itemsize / s["triton"] / copy)
    return row | {f"over_{name}": s[name] / s["triton"] for name in ("sdpa", "flex") if name in s}


def bench_kernels() -> list:
    """The Triton kernels on a GPU, Hopper's targets beside the figures: checked first, then timed, one row a case.

    Without a GPU, under TRITON_INTERPRET=1, a tiny case of everything. A case that fails is a row that says why.
    """
    on_gpu = torch.cuda.is_available()
    need(on_gpu or os.environ.get("TRITON_INTERPRET") == "1", "--kernels needs a GPU (TRITON_INTERPRET=1 runs tiny cases on the CPU)")
    device, shape, rows, began = torch.device("cuda" if on_gpu else "cpu"), ON_GPU if on_gpu else INTERPRETED, [], time.perf_counter()
    H, Hkv, D, kv_len, L, repeats = shape
    print(f"{torch.cuda.get_device_name() if on_gpu else 'CPU, interpreted: the seconds mean nothing'}, torch {torch.__version__}, "
          f"H={H} Hkv={Hkv} D={D}")

    def row(name, run, wanted="", **args):
        try:
            figures = run(shape, device=device, **args)
            text = "  ".join(f"{n} {x:.4g}" for n, x in figures.items())
            if run in (check_decoding, check_training):
                text += "  ok" if all(x <= float(wanted) for x in figures.values()) else "  WRONG"
        except Exception as error:   # whatever it is, the other cases are worth having
            figures = dict(failed=f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}")
            text = f"failed: {figures['failed']}"
        print(f"{name:52} {text}  {'(wanted: ' + wanted + ')' if wanted else ''}", flush=True)
        rows.append(dict(name=name, wanted=wanted, **figures))
        if on_gpu:
            torch.cuda.empty_cache()
        return figures

    for dtype, most in ((torch.float32, "1e-5"), (torch.bfloat16, "2e-2"), (torch.float16, "2e-2")):
        short = str(dtype).removeprefix("torch.")
        for W in CHECKED_WINDOWS if on_gpu else (1, 20):
            row(f"check decoding W={W} KV={kv_len} {short}", check_decoding, most, W=W, dtype=dtype)
        for k in (5, 16):
            row(f"check training L={L} k={k} {short}", check_training, most, k=k, dtype=dtype)
    source = torch.empty(2**30 if on_gpu else 2**20, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / kernel_seconds(dict(copy=lambda: target.copy_(source)), repeats, graph=on_gpu)["copy"]   # bytes/s
    del source, target
    print(f"copy bandwidth {copy / 1e9:,.0f} GB/s (bytes read plus bytes written)")
    for L in (16384, 4096) if on_gpu else (20,):
        row(f"training B=2 L={L} k=16 bfloat16", time_training, "forward 300, backward 200, over_flex 1 (better 1.3), memory 1.2"
            if L == 16384 else "", batch=2, L=L, k=16, dtype=torch.bfloat16, flex=on_gpu)
    for batch, kv_len in itertools.product((1, 8), (4096, 32768, 131072)) if on_gpu else [(1, 70)]:
        times = {}
        for W in KERNEL_WINDOWS:
            wanted = "" if batch == 1 or kv_len < 32768 else "of_copy 0.85" if W < 32 else "tflops 300"
            figures = row(f"decoding B={batch} KV={kv_len} W={W} bfloat16", time_decoding, wanted, batch=batch, kv_len=kv_len, W=W,
                          dtype=torch.bfloat16, flex=on_gpu and time.perf_counter() - began < FLEX_UNTIL, copy=copy)
            times[W] = figures.get("ms", math.nan)
        row(f"decoding B={batch} KV={kv_len}, seconds over W=1's", lambda *_, **__: {f"W={W}": t / times[1] for W, t in times.items()},
            "W=16 1.2, W=32 1.6" if (batch, kv_len) == (1, 32768) else "")
    print(f"{time.perf_counter() - began:.0f} s. over_NAME: NAME's seconds over Triton's; of_copy: KV bytes a second over the copy bandwidth; "
          "memory: peak over q, k, v, o and gradients")
    return rows


def measure(path: str, L=2048, block_size=16, H=9, Hkv=3, D=64, repeats=3):
    """Forward plus backward: median seconds, and the MB of memory it took beyond q, k, v, o and their gradients."""
    import resource
    memory = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    generator, key = torch.Generator().manual_seed(0), torch.arange(2 * L)
    q, k, v, weight = (torch.randn(1, h, 2 * L, D, generator=generator) for h in (H, Hkv, Hkv, H))
    expand = lambda x: x.repeat_interleave(H // Hkv, 1)
    if path == "dense":   # its mask is given: only what SDPA makes of it counts
        mask = torch.empty(2 * L, 2 * L, dtype=torch.bool)
        for row, low, end, own_low, own_end in zip(mask, *(x[0] for x in row_intervals(intervals(L, block_size)))):
            row.copy_((key >= low) & (key < end) | (key >= own_low) & (key < own_end))

    def run(n):
        inputs = [x[:, :, :n].requires_grad_() for x in (q.detach(), k.detach(), v.detach())]
        o = (sbd_attention(*inputs, block_size) if path == "sdpa" else
             F.scaled_dot_product_attention(inputs[0], expand(inputs[1]), expand(inputs[2]), attn_mask=mask[:n, :n]))
        return o, *torch.autograd.grad(o, inputs, weight[:, :, :n])

    run(128)   # what every run needs is loaded before the memory is read
    before, times = memory(), []
    needed = sum(x.nbytes for x in run(2 * L)) / 2**20
    after = memory()
    for _ in range(repeats):
        start = time.perf_counter()
        run(2 * L)
        times.append(time.perf_counter() - start)
    return sorted(times)[repeats // 2], after - before - needed


def main():
    if len(sys.argv) > 1:
        return print(*measure(sys.argv[1]))
    runs = {"dense": [], "sdpa": []}
    for path in list(runs) * 3:   # each in a process of its own, in turn
        done = subprocess.run([sys.executable, __file__, path], stdout=subprocess.PIPE, text=True, check=True)
        runs[path].append([float(x) for x in done.stdout.split()])
    print(f"L=2048 k=16 H=9 Hkv=3 D=64 float32, {torch.get_num_threads()} threads: forward plus backward\n"
          "path              seconds   MB beyond q, k, v, o and gradients")
    (t, m), (s, n) = (sorted(runs[path])[1] for path in runs)
    for name, *row in ("SDPA, dense mask", t, m), ("sdpa", s, n), ("ratio", t / s, n / m):
        print(f"{name:17} {row[0]:7.3f}  {row[1]:7.2f}")


if __name__ == "__main__":
    main()
