"""Every check and timing of the kernels, of training and of decoding, against their plain versions.

    python kernels/check.py       training's PyTorch path against SDPA with the dense mask: seconds and memory
    python bench.py --kernels     the Triton kernels, on a Hopper GPU

Shapes: B batch, H query heads, Hkv key heads, L length of a half, D head dimension, k block, W window tokens.
"""
import sys
from pathlib import Path

if __name__ == "__main__":   # the project's modules are those of the folder above
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
from cli import need, parser, run

import itertools
import math
import os
import subprocess
import time
import timeit
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F

from kernels.cuda_graph import cuda_graph
from kernels.sbd_attention import cost, intervals, row_intervals, sbd_attend, sbd_attention
from kv_cache import KVCache, cached_attend, window
from model import LlamaConfig
from sbd_loss import sbd_attention_mask

# Windows of the timed decoding: W -> causal tokens, what each block sees, block size.
KERNEL_WINDOWS = {1: (1, [], 1), 16: (0, [0], 16), 32: (16, [16], 16)}
CHECKED_WINDOWS = KERNEL_WINDOWS | {20: (5, [1, 3, 5], 5), 128: (64, [64], 64)}
GPU = torch.cuda.is_available()   # else the interpreter on the CPU, and tiny shapes
DEVICE = torch.device("cuda" if GPU else "cpu")
H, HKV, D, KV_LEN, CHECKED_L, REPEATS = (32, 8, 128, 1000, 500, 20) if GPU else (4, 2, 16, 70, 20, 1)
FLEX_UNTIL = 300   # seconds after which no further shape is compiled for FlexAttention


def kernel_seconds(functions: dict, graph: bool) -> dict:
    """name -> median seconds a call, in turn. graph: on CUDA, replayed without Python's part of it."""
    if not GPU:   # the figures only have to be there
        return {name: timeit.timeit(f, number=REPEATS) / REPEATS for name, f in functions.items()}
    flush = torch.empty(2**28, dtype=torch.int8, device=DEVICE)   # fills the L2 cache before each call
    if graph:
        functions = {name: cuda_graph(lambda _, f=f: f(), [flush], None) for name, f in functions.items()}
    seconds = {name: [] for name in functions}
    for _ in range(3 + REPEATS):   # the first three warm up
        for name, call in functions.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            start.record()
            call()
            end.record()
            end.synchronize()
            seconds[name].append(start.elapsed_time(end) / 1e3)
    return {name: median(s[3:]) for name, s in seconds.items()}


def relative_error(ours, truth):
    return ((ours.double() - truth).norm() / truth.norm()).item()


# -------------------------------------------------------------------------------------- decoding

def decoding_case(batch, kv_len, W, dtype):
    """One layer's inputs q, k, v of a window behind kv_len tokens; the kernel's rule; the KVCache;
    attend[name] runs it, by SDPA or by the kernel."""
    causal, sees, k = CHECKED_WINDOWS[W]
    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=H, num_key_value_heads=HKV, head_dim=D)
    cache = KVCache(config, batch, kv_len + W, DEVICE, dtype, "triton")
    cache.k.normal_(), cache.v.normal_()
    cache.commit([kv_len] * batch)
    qkv = [torch.randn(batch, W, n, D, device=DEVICE, dtype=dtype).transpose(1, 2) for n in (H, HKV, HKV)]
    attend = {}
    for name, kernel in dict(sdpa=None, triton=cache.kernel).items():
        cache.kernel = kernel
        w = window(cache, [causal] * batch, [sees] * batch, k)
        attend[name] = partial(cached_attend(cache, w), 0, *qkv)
    return qkv, w.rule, cache, attend


def flex_decoding(q, rule, cache):
    """FlexAttention with the window's rule, over the cache with the window's keys and values behind it."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    W, length = q.shape[2], int(rule[0, 0])
    seen, block = rule[0, 2:2 + W].contiguous(), rule[0, 2 + W:].contiguous()

    def may_attend(b, h, row, key):
        own = (key - length).clamp(min=0)   # place in the window
        return (key - length < seen[row]) | (block[row] >= 0) & (block[row] == block[own])

    mask = create_block_mask(may_attend, None, None, W, length + W, device=q.device)
    torch._dynamo.reset()   # else it stops compiling after a few shapes
    keys, values = (x[0, :, :, :length + W] for x in (cache.k, cache.v))
    return partial(torch.compile(flex_attention, dynamic=False), q, keys, values, block_mask=mask,
                   enable_gqa=True)


def check_decoding(W, dtype):
    """The decoding kernel against its float64 reference: relative error; the cache must be equal."""
    from kernels.block_decode import reference   # here: a CPU may have no Triton
    qkv, rule, cache, attend = decoding_case(2, KV_LEN, W, dtype)
    exact = [x.double() for x in (*qkv, cache.k[0], cache.v[0])]
    out, truth = attend["triton"](), reference(*exact, rule)
    need(torch.equal(cache.k[0].double(), exact[3]) and torch.equal(cache.v[0].double(), exact[4]),
         "the cache differs")
    return dict(output=relative_error(out, truth))


def time_decoding(batch, kv_len, W, flex, copy):
    """One layer's attention: Triton beside SDPA and FlexAttention; the cache's bytes a second over `copy`."""
    from kernels.block_decode import cost
    qkv, rule, cache, jobs = decoding_case(batch, kv_len, W, torch.bfloat16)
    if flex:
        jobs["flex"] = flex_decoding(qkv[0], rule, cache)
    s = kernel_seconds(jobs, graph=True)
    ours, flops = s.pop("triton"), cost(rule.cpu(), H, HKV, D, 2)["flops"]
    row = dict(ms=1e3 * ours, tflops=flops / ours / 1e12,
               of_copy=2 * batch * HKV * kv_len * D * cache.k.itemsize / ours / copy)
    return row | {f"over_{name}": theirs / ours for name, theirs in s.items()}


# -------------------------------------------------------------------------------------- training

def training_inputs(batch, heads, kv_heads, L, dim, dtype, device):
    """q, k, v (B, H or Hkv, 2L, D) that want gradients, and the output's gradient."""
    return [torch.randn(batch, n, 2 * L, dim, device=device, dtype=dtype, requires_grad=i < 3) for i, n in
            enumerate((heads, kv_heads, kv_heads, heads))]


def check_training(L, k, dtype):
    """The training kernels against dense float64 attention with the mask: relative errors."""
    *qkv, g = training_inputs(1, H // 4, HKV // 2, L, D, dtype, DEVICE)
    out = sbd_attention(*qkv, k, backend="triton")
    exact = [x.detach().double().requires_grad_() for x in qkv]
    mask = sbd_attention_mask(L, k).to(DEVICE)
    truth = F.scaled_dot_product_attention(*exact, attn_mask=mask, enable_gqa=True)
    ours, theirs = torch.autograd.grad(out, qkv, g), torch.autograd.grad(truth, exact, g.double())
    return dict(zip(("output", "dq", "dk", "dv"), map(relative_error, (out, *ours), (truth, *theirs))))


def time_training(batch, L, k):
    """Triton and, on a GPU, compiled FlexAttention, forward and both; Triton's peak memory over what must
    exist."""
    *qkv, g = training_inputs(batch, H, HKV, L, D, torch.bfloat16, DEVICE)
    attend = {name: sbd_attend(L, k, None, DEVICE, name) for name in ["triton"] + ["flex"] * GPU}
    jobs = {(name, "forward"): partial(f, *qkv) for name, f in attend.items()}
    jobs |= {(name, "both"): lambda f=f: torch.autograd.grad(f(*qkv), qkv, g) for name, f in attend.items()}
    s = kernel_seconds(jobs, graph=False)
    forward, both, flops = s["triton", "forward"], s["triton", "both"], cost(batch, H, HKV, L, D, k)["flops"]
    row = dict(ms=1e3 * both, forward_tflops=flops[0] / forward / 1e12,
               backward_tflops=flops[1] / (both - forward) / 1e12)
    if GPU:
        row |= dict(over_flex=s["flex", "both"] / both, forward_over_flex=s["flex", "forward"] / forward)
        must = 2 * sum(x.nbytes for x in (*qkv, g))            # with the gradients, and with o in g's size
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() - must // 2
        jobs["triton", "both"]()
        row["memory"] = (torch.cuda.max_memory_allocated() - before) / must
    return row


# -------------------------------------------------------------------------------------- bench.py --kernels

def cases(figures):
    """What is checked, then what is timed: name, figures wanted, function, its arguments.

    figures: those of the cases so far, by name. A check wants relative errors of at most that.
    """
    for dtype, most in ((torch.float32, "1e-5"), (torch.bfloat16, "2e-2"), (torch.float16, "2e-2")):
        short = str(dtype).removeprefix("torch.")
        for W in CHECKED_WINDOWS if GPU else (1, 20):
            yield f"check decoding W={W} KV={KV_LEN} {short}", most, check_decoding, W, dtype
        for k in (5, 16):
            yield f"check training L={CHECKED_L} k={k} {short}", most, check_training, CHECKED_L, k, dtype
    began, source = time.perf_counter(), torch.empty(2**30 if GPU else 2**20, dtype=torch.int8, device=DEVICE)
    job = partial(torch.empty_like(source).copy_, source)
    copy = 2 * source.nbytes / kernel_seconds(dict(copy=job), graph=GPU)["copy"]   # bytes/s
    del source, job
    print(f"copy bandwidth {copy / 1e9:,.0f} GB/s (bytes read plus bytes written)")
    for L in (16384, 4096) if GPU else (20,):
        wanted = "forward 300, backward 200, over_flex 1 (better 1.3), memory 1.2" if L == 16384 else ""
        yield f"training B=2 L={L} k=16 bfloat16", wanted, time_training, 2, L, 16
    for batch, kv_len in itertools.product((1, 8), (4096, 32768, 131072)) if GPU else [(1, 70)]:
        title, ms = f"decoding B={batch} KV={kv_len}", {}
        for W in KERNEL_WINDOWS:
            wanted = "" if batch == 1 or kv_len < 32768 else "of_copy 0.85" if W < 32 else "tflops 300"
            name, flex = f"{title} W={W} bfloat16", GPU and time.perf_counter() - began < FLEX_UNTIL
            yield name, wanted, time_decoding, batch, kv_len, W, flex, copy
            ms[W] = figures[name].get("ms", math.nan)
        wanted = "W=16 1.2, W=32 1.6" if (batch, kv_len) == (1, 32768) else ""
        yield f"{title}, seconds over W=1's", wanted, dict, {f"W={W}": t / ms[1] for W, t in ms.items()}


def run_case(name, wanted, function, *args) -> dict:
    """A case's figures, printed; of one that fails, why."""
    try:
        figures = function(*args)
        text = "  ".join(f"{n} {x:.4g}" for n, x in figures.items())
        if name.startswith("check"):
            text += "  ok" if all(x <= float(wanted) for x in figures.values()) else "  WRONG"
    except Exception as error:   # whatever it is, the other cases are worth having
        figures = dict(failed=f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}")
        text = f"failed: {figures['failed']}"
    print(f"{name:52} {text}" + f"  (wanted: {wanted})" * bool(wanted), flush=True)
    torch.cuda.empty_cache()
    return dict(name=name, wanted=wanted, **figures)


def bench_kernels() -> list:
    """The Triton kernels on a GPU, checked and then timed, a row a case, Hopper's targets beside the figures.

    Without a GPU, under TRITON_INTERPRET=1, a tiny case of each. A case that fails is a row that says why.
    """
    began, rows = time.perf_counter(), {}
    need(GPU or os.environ.get("TRITON_INTERPRET") == "1",
         "--kernels needs a GPU (TRITON_INTERPRET=1 runs tiny cases on the CPU)")
    machine = torch.cuda.get_device_name() if GPU else "CPU, interpreted: the seconds mean nothing"
    print(f"{machine}, torch {torch.__version__}, H={H} Hkv={HKV} D={D}")
    for name, *case in cases(rows):
        rows[name] = run_case(name, *case)
    print(f"{time.perf_counter() - began:.0f} s. over_NAME: NAME's seconds over Triton's; of_copy: KV bytes "
          "a second over copy bandwidth; memory: peak over q, k, v, o and gradients")
    return list(rows.values())


# -------------------------------------------------------------------------------------- the PyTorch path

def measure(path: str, L=2048, k=16, heads=9, kv_heads=3):
    """Forward plus backward: median seconds, and the MB of memory it took beyond q, k, v, o and gradients."""
    import resource
    unit = 2**20 if sys.platform == "darwin" else 2**10
    memory = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    *qkv, g = training_inputs(1, heads, kv_heads, L, 64, torch.float32, "cpu")
    if path == "dense":   # its mask is given, made a row at a time: only what SDPA makes of it counts
        mask, key = torch.empty(2 * L, 2 * L, dtype=torch.bool), torch.arange(2 * L)
        bounds = (x[0] for x in row_intervals(intervals(L, k)))
        for row, low, end, own_low, own_end in zip(mask, *bounds):
            row.copy_((key >= low) & (key < end) | (key >= own_low) & (key < own_end))

    def attend(n):
        q, *kv = inputs = [x[:, :, :n].detach().requires_grad_() for x in qkv]
        if path == "dense":
            expanded = (x.repeat_interleave(heads // kv_heads, 1) for x in kv)
            o = F.scaled_dot_product_attention(q, *expanded, attn_mask=mask[:n, :n])
        else:
            o = sbd_attention(q, *kv, k)
        return o, *torch.autograd.grad(o, inputs, g[:, :, :n])

    attend(128)   # what every run needs is loaded before the memory is read
    before = memory()
    needed = sum(x.nbytes for x in attend(2 * L)) / 2**20
    after = memory()
    return median(timeit.repeat(lambda: attend(2 * L), number=1, repeat=3)), after - before - needed


def main(argv=None):
    p = parser(__doc__)
    p.add_argument("--path", choices=("dense", "sdpa"), help="measure this one alone: seconds and MB")
    args = p.parse_args(argv)
    if args.path:
        return print(*measure(args.path))
    runs = {"dense": [], "sdpa": []}
    for path in list(runs) * 3:   # each in a process of its own, in turn
        command = [sys.executable, __file__, f"--path={path}"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        need(done.returncode == 0, f"--path={path} ended with exit code {done.returncode}")
        runs[path].append([float(x) for x in done.stdout.split()])
    print(f"L=2048 k=16 H=9 Hkv=3 D=64 float32, {torch.get_num_threads()} threads: forward and backward\n"
          "path              seconds   MB beyond q, k, v, o and gradients")
    (t, m), (s, n) = (sorted(runs[path])[1] for path in runs)
    for name, *row in ("SDPA, dense mask", t, m), ("sdpa", s, n), ("ratio", t / s, n / m):
        print(f"{name:17} {row[0]:7.3f}  {row[1]:7.2f}")


if __name__ == "__main__":
    run(main)
