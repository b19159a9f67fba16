"""What a forward must cost: the roofline, as printed and corrected (Eq. 15-17, Fig. 6, 11, Tables 3, 4).

Every operation takes max(flops / peak, bytes / bandwidth) seconds, and a forward is their sum. Decoding one
token reads all weights to use each once, so the memory side binds and a window of k tokens costs hardly more.

Two models of the same forward:
  published   Fig. 11 as printed, one layer. It gives every cell of Tables 3 and 4, two slips included.
  corrected   the config's real shapes, all layers and the output head; the default everywhere.

Shapes: B batch, W window (new tokens of one forward), k block, T = B * W. Units: seconds, bytes, flops.

    python roofline.py                                      Tables 3 and 4, both ways
    python roofline.py --model llama3.1-70b --device H200 --batch 8 --kv_len 32768
"""
from cli import check_plot, need, need_between, parser, run

import bisect
import itertools
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from hf import write_whole
from model import LlamaConfig


@dataclass(frozen=True)
class Device:
    bandwidth: float             # bytes/s
    bf16: float                  # flop/s, dense
    fp8: float | None = None     # flop/s, dense; None: 8-bit weights are widened and multiplied in bf16


# Dense rates: where a datasheet prints the rate with 2:4 sparsity, half of it.
DEVICES = {
    "H100 paper": Device(3.35 * 1024**4, 989e12, 1978e12),  # Fig. 11's constants, bandwidth 10% too high
    "H100 SXM": Device(3.35e12, 989.4e12, 1978.9e12),       # NVIDIA H100 datasheet, Hopper whitepaper
    "H200": Device(4.8e12, 989.4e12, 1978.9e12),            # NVIDIA H200 datasheet, SXM
    "A100 80G": Device(2.039e12, 312e12),                   # NVIDIA A100 80GB datasheet, SXM; it has no FP8
    "L40S": Device(864e9, 362.05e12, 733e12),               # NVIDIA L40S datasheet
    "RTX 4090": Device(1008e9, 165.2e12, 330.3e12),         # NVIDIA Ada whitepaper, FP32 accumulation
    "B200": Device(8e12, 2250e12, 4500e12),                 # NVIDIA HGX B200 datasheet, one GPU at 1000 W
}
PAPER = DEVICES["H100 paper"]
LLAMA = LlamaConfig.from_pretrained("llama3.1-8b")   # what the paper measures; FFN 14336, in Fig. 11 4 * 4096
MAX_WINDOW = 4096                # no search looks at longer windows
FREE = 1.05                      # a window is free while its slowdown is under this


@dataclass
class Part:
    """One operation of a forward, over all layers."""
    name: str
    time: float      # seconds
    bytes: float
    flops: float
    bound: str       # "memory" or "compute": the side that sets the time


def part(name, flops, nbytes, peak, bandwidth, count=1):
    compute, memory = flops / peak, nbytes / bandwidth
    return Part(name, count * max(compute, memory), count * nbytes, count * flops,
                "compute" if compute > memory else "memory")


def total(parts):
    """The sum of `parts`; it is bound by the side that binds for more of its time."""
    compute = sum(p.time for p in parts if p.bound == "compute")
    time = sum(p.time for p in parts)
    return Part("total", time, sum(p.bytes for p in parts), sum(p.flops for p in parts),
                "compute" if compute > time / 2 else "memory")


def check_window(window, kv_len, batch):
    need(window >= 1 and batch >= 1 and kv_len >= 0, "window (or block) and batch must be at least 1 and "
         f"kv_len at least 0, got {window}, {batch} and {kv_len}")


def published_parts(window, kv_len, batch):
    """Fig. 11 to the letter, one layer; all widths 1 byte."""
    check_window(window, kv_len, batch)
    hidden, heads, kv_heads, head_dim, ffn = 4096, 32, 8, 128, 4 * 4096
    T = window * batch

    def gemm(name, m, n, k):
        return part(name, 2 * m * n * k, m * k + n * k + m * n, PAPER.fp8, PAPER.bandwidth)

    moved = 2 * T * heads * head_dim + 2 * batch * kv_len * kv_heads * head_dim
    return [
        part("attention", 2 * 2 * T * kv_len * hidden, moved, PAPER.bf16, PAPER.bandwidth),
        gemm("up", T, hidden, hidden * ffn),      # slip: a layer hidden * ffn wide, not ffn
        gemm("down", T, hidden * ffn, hidden),    # the same
        gemm("q", T, hidden, hidden),
        gemm("k", T, hidden, heads * kv_heads),   # slip: heads * kv_heads columns, not kv_heads * head_dim
        gemm("v", T, hidden, heads * kv_heads),   # the same
        gemm("o", T, hidden, hidden),
    ]


def forward_parts(window, kv_len, batch, config=LLAMA, device=PAPER, weight_bytes=1, kv_bytes=1, act_bytes=1,
                  logits=None, causal=False):
    """What one forward of `window` new tokens behind `kv_len` cached ones, on `batch` rows, really does.

    logits: tokens of the window whose logits are read, default all. causal: attention skips the keys behind
    each query (prefill). Counted as fused into their neighbours: embedding, norms, rotation, SiLU, residuals.
    Not asked: whether weights and cache fit in memory. Widths are bytes an element; linear layers run at the
    FP8 rate if weights and activations have one byte and the device has FP8, else, as attention, at BF16's.
    """
    check_window(window, kv_len, batch)
    hidden, ffn, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    q_width, kv_width, T = heads * config.head_dim, kv_heads * config.head_dim, window * batch
    peak = device.fp8 if device.fp8 and max(weight_bytes, act_bytes) <= 1 else device.bf16

    def linear(name, n_in, n_out, tokens=T, out_bytes=act_bytes, count=layers):
        nbytes = tokens * n_in * act_bytes + n_in * n_out * weight_bytes + tokens * n_out * out_bytes
        return part(name, 2 * tokens * n_in * n_out, nbytes, peak, device.bandwidth, count)

    keys = kv_len + window                                # the window's own keys are read too
    seen = kv_len + (window + 1) / 2 if causal else keys  # keys multiplied, mean over the queries
    read = batch * (window if logits is None else logits)
    return [
        linear("q_proj", hidden, q_width),
        linear("k_proj", hidden, kv_width, out_bytes=kv_bytes),  # writes the cache
        linear("v_proj", hidden, kv_width, out_bytes=kv_bytes),
        part("attention", 2 * 2 * T * seen * q_width,
             2 * T * q_width * act_bytes + 2 * batch * keys * kv_width * kv_bytes,
             device.bf16, device.bandwidth, layers),
        linear("o_proj", q_width, hidden),
        linear("gate_proj", hidden, ffn),
        linear("up_proj", hidden, ffn),
        linear("down_proj", ffn, hidden),
        linear("lm_head", hidden, config.vocab_size, tokens=read, count=1),
    ]


def forward_time(window, kv_len, batch, published=False, **case):
    """Seconds of one forward. case: config, device, widths ... of forward_parts; published, there is none."""
    parts, case = (published_parts, {}) if published else (forward_parts, case)
    return sum(p.time for p in parts(window, kv_len, batch, **case))


def slowdown(block, kv_len, batch, published=False, **case):
    """Eq. 15, Table 3: time(k) / time(1), a forward of k tokens a row against one of a single token.

    The default case is Llama-3.1-8B at one byte a weight, KV element and activation with the paper's H100
    constants, so it differs from the published model by the shapes alone. kv_len is the cached tokens; the
    corrected model adds the window's own. Raises ValueError on sizes below 1 (kv_len: 0).
    """
    wide, one = (forward_time(n, kv_len, batch, published, **case) for n in (block, 1))
    return wide / one


def block_time(block, nfe_speedup, kv_len, batch, published=False, first=False, **case):
    """Eq. 16's denominator: seconds of one block in l = k / nfe_speedup forwards.

    The first of them also carries the pending block, 2k tokens, unless this is the text's first block."""
    need(0 < nfe_speedup <= block, "nfe_speedup must be above 0 and at most the block size: a block of "
                                   f"{block} takes at least one forward, got {nfe_speedup}")
    step = forward_time(block, kv_len, batch, published, **case)
    commit = step if first else forward_time(2 * block, kv_len, batch, published, **{"logits": block, **case})
    return commit + (block / nfe_speedup - 1) * step


def speedup(block, nfe_speedup, kv_len, batch, published=False, **case):
    """Eq. 16, Table 4: k time(1) / (time(2k) + (l - 1) time(k)), the wall-clock speedup over NTP decoding."""
    ntp = block * forward_time(1, kv_len, batch, published, **case)
    return ntp / block_time(block, nfe_speedup, kv_len, batch, published, **case)


def verified_window(block, hedges):
    """Longest window of verified decoding: next, k - 1 draft tokens, and one block of k for each hedge."""
    return 1 + (block - 1) + hedges * block


def verified_speedup(nfe_speedup, window, kv_len, batch, **case):
    """Verified decoding: tokens a forward * time(1) / time(W), W the mean window, any number from 1 on."""
    return nfe_speedup / slowdown(window, kv_len, batch, **case)


def last_window(holds):
    """Largest W <= MAX_WINDOW with holds(W), at least 1, of a property that holds up to some W only."""
    return 1 + bisect.bisect(range(2, MAX_WINDOW + 1), False, key=lambda window: not holds(window))


def free_window(kv_len, batch, **case):
    """Longest window whose slowdown is under 5%."""
    return last_window(lambda window: slowdown(window, kv_len, batch, **case) < FREE)


def free_hedges(block, free):
    """How many hedges verified decoding can run in a window of `free` tokens.

    A draft of k - 1 tokens has k acceptance lengths, so more than k hedges have nothing to ask."""
    return max(0, min(free // block - 1, block))


def knee(kv_len, batch, **case):
    """Longest window that is still bound by memory: beyond it tokens are paid for in flops."""
    return last_window(lambda window: total(forward_parts(window, kv_len, batch, **case)).bound == "memory")


def prefill_time(prompt_len, batch, **case):
    """Seconds to run `prompt_len` tokens a row causally into an empty cache and read the last logits."""
    return forward_time(prompt_len, 0, batch, causal=True, logits=1, **case)


def end_to_end(prompt_len, new_tokens, block, nfe_speedup, batch, **case):
    """Seconds of (prefill, NTP decoding, SBD decoding) for prompt_len prompt and new_tokens new tokens a row.

    Each block is costed at the KV length it starts from; one that is cut short is paid for by its share."""
    ntp = sbd = 0.0
    for start in range(0, new_tokens, block):
        n, kv_len = min(block, new_tokens - start), prompt_len + start
        ntp += sum(forward_time(1, kv_len + j, batch, **case) for j in range(n))
        sbd += n / block * block_time(block, nfe_speedup, kv_len, batch, first=start == 0, **case)
    return prefill_time(prompt_len, batch, **case), ntp, sbd


def print_tables():
    """Tables 3 and 4, every cell as published/corrected, and what the difference means."""
    kv_lens = (16, 256, 1024, 4096, 16384, 65536, 2**20, 2**22)

    def print_table(title, function, blocks, batches, nfes):
        print(f"{title}, published/corrected")
        print("batch  NFE       KV" + "".join(f"{f'block {k}':>14}" for k in blocks))
        for batch, nfe, kv_len in itertools.product(batches, nfes, kv_lens):
            at = (kv_len, batch) if nfe == "-" else (nfe, kv_len, batch)
            cells = [f"{function(k, *at, published=True):8.3f}/{function(k, *at):.3f}" for k in blocks]
            print(f"{batch:5} {nfe:>4} {kv_len:8}" + "".join(cells))

    print_table("Table 3: slowdown of a forward", slowdown, (1, 2, 4, 8, 16, 32, 64), (1, 4, 8, 16), ("-",))
    print_table("\nTable 4: wall-clock speedup", speedup, (8, 16, 32, 64), (1, 4, 8), (2, 4, 8))
    at_256, at_1m = ([f"{slowdown(16, kv_len, b):.3f}" for b in (1, 16)] for kv_len in (256, 2**20))
    wide = [f"{slowdown(64, 65536, 1, published=p):.3f}" for p in (False, True)]
    worth = [f"{speedup(64, 4, 65536, 1, published=p):.2f}" for p in (False, True)]
    print("\n" + textwrap.fill(f"""\
The published cells come from FFN weights 67 million columns wide, which hide the cache: they barely depend on
the KV length. With the real shapes of Llama-3.1-8B on the same device constants the conclusion stands up to
block 16: at 256 cached tokens it costs {at_256[0]} at batch 1 and {at_256[1]} at batch 16, at 1,048,576
tokens {at_1m[0]} and {at_1m[1]}. It changes for larger blocks behind long caches. Attention does 2 W H / Hkv
flops for each KV byte it reads, whatever the batch and the KV length, so compute binds it from
{PAPER.bf16 / PAPER.bandwidth / 8:.0f} tokens on: at batch 1 and 65,536 tokens block 64 costs {wide[0]}, not
{wide[1]}, and an NFE speedup of 4 is worth {worth[0]}, not {worth[1]}; with block 16 it is worth
{speedup(16, 4, 65536, 1):.2f}.""", 110))


def print_case(args, case):
    k, batch, nfe = args.block_size, args.batch, args.nfe_speedup
    at, window = (args.kv_len, batch), args.window or k
    parts = forward_parts(window, *at, **case)
    print(f"{args.model} on {args.device}: batch {batch}, {args.kv_len} cached tokens a row, "
          f"window of {window} tokens\n")
    print(f"{'part':10} {'ms':>10} {'GB':>10} {'GFLOP':>12}  bound by")
    for p in parts + [total(parts)]:
        print(f"{p.name:10} {p.time * 1e3:10.4f} {p.bytes / 1e9:10.4f} {p.flops / 1e9:12.2f}  {p.bound}")
    free, widest = free_window(*at, **case), verified_window(k, args.hedges)
    hedges = ", ".join(f"{free_hedges(b, free)} at block {b}" for b in (4, 8, 16, 32))
    prefill, ntp, sbd = end_to_end(args.prompt_len, args.new_tokens, k, nfe, batch, **case)
    print(f"""
One token takes {forward_time(1, *at, **case) * 1e3:.4f} ms; slowdown of this window: \
{slowdown(window, *at, **case):.3f}
Free (slowdown under 5%): windows of up to {free} tokens; bound by memory: up to \
{knee(*at, **case)} (searched to {MAX_WINDOW})
    SBD, whose widest forward is 2k tokens: block {free // 2 or 'none'}
    hedges of verified decoding: {hedges}
An NFE speedup of {nfe:g} at block {k} is worth in wall-clock
    SBD, Eq. 16           {speedup(k, nfe, *at, **case):.3f}
    verified, {args.hedges} hedges    {verified_speedup(nfe, widest, *at, **case):.3f}  if every window \
has all {widest} tokens
    SBD, end to end       {(prefill + ntp) / (prefill + sbd):.3f}  {args.prompt_len} prompt tokens: \
{prefill:.4g} s; {args.new_tokens} new: NTP {ntp:.4g} s, SBD {sbd:.4g} s""")


def plot(path, title, case):
    """Slowdown against block size, a panel a batch and a curve a KV length; the dot is the knee."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(13, 4), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    for axes, batch in zip(panels, (1, 4, 16)):
        for color, kv_len in zip(("C0", "C1", "C2", "C3"), (1024, 16384, 65536, 262144)):
            ks = range(1, 513)
            axes.plot(ks, [slowdown(k, kv_len, batch, **case) for k in ks], color, label=f"KV {kv_len}")
            if (k := knee(kv_len, batch, **case)) <= 512:
                axes.plot(k, slowdown(k, kv_len, batch, **case), "o", color=color)
        axes.axhline(FREE, color="gray", linestyle=":", label="free: under 5%")
        axes.set(xscale="log", yscale="log", xlabel="block size, tokens", title=f"batch {batch}")
        axes.set_xticks([2**i for i in range(10)], [2**i for i in range(10)])
        axes.set_yticks([1, 1.5, 2, 3, 5, 10], ["1", "1.5", "2", "3", "5", "10"])
        axes.minorticks_off()
    panels[0].set_ylabel("slowdown, time(k) / time(1)")
    panels[0].legend()
    figure.suptitle(f"{title}; dot: the last window bound by memory")
    write_whole(path, lambda temporary: figure.savefig(temporary, format=path.suffix[1:], dpi=120))


SIZES = dict(   # least, most, default, help
    batch=(1, 2**20, 1, "rows"),
    kv_len=(0, 2**31, 4096, "cached tokens a row"),
    block_size=(1, 4096, 16, "k, tokens decoded together"),
    window=(1, 2**20, None, "tokens a row of the forward printed part by part; None: the block size"),
    hedges=(1, 4096, 2, "blocks in a window of verified decoding"),
    prompt_len=(1, 2**31, 1024, "prompt tokens a row"),
    new_tokens=(1, 2**17, 1024, "generated tokens a row"))


def parse(argv=None):
    p = parser("What a forward must cost. Without options: Tables 3 and 4 as published and corrected.")
    a = p.add_argument
    a("--model", default="llama3.1-8b", help="preset, folder or hub id with a config.json")
    a("--device", default="H100 SXM", help=", ".join(DEVICES))
    for name, (_, _, default, text) in SIZES.items():
        a(f"--{name}", type=int, default=default, help=text)
    a("--nfe_speedup", type=float, default=3.0, help="measured tokens a forward")
    for name in ("weight", "kv", "act"):
        a(f"--{name}_bytes", type=float, choices=(0.5, 1, 2), default=1, help="bytes an element")
    a("--plot", type=Path, help="draw slowdown against block size to this .png, .pdf or .svg file")
    return p.parse_args(argv)


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    device = {name.lower(): d for name, d in DEVICES.items()}.get(args.device.lower())
    need(device, f"unknown device {args.device!r}, wanted one of: {', '.join(DEVICES)}")
    need_between(args, **{name: bounds for name, (*bounds, _, _) in SIZES.items()})
    need(0 < args.nfe_speedup <= args.block_size, f"--nfe_speedup {args.nfe_speedup:g}: wanted above 0 and "
                                                  f"at most the block size, {args.block_size}")
    check_plot(args.plot)
    if not argv:
        return print_tables()
    case = dict(config=LlamaConfig.from_pretrained(args.model), device=device, weight_bytes=args.weight_bytes,
                kv_bytes=args.kv_bytes, act_bytes=args.act_bytes)
    print_case(args, case)
    if args.plot:
        plot(args.plot, f"{args.model} on {args.device}", case)


if __name__ == "__main__":
    run(main)
