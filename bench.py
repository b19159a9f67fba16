"""Seconds: what forwards, decoding and training cost on this machine; the only place with timing helpers.

    python bench.py                                           the shipped tiny model
    python bench.py --init_from=DIR --against=transformers    any model, beside transformers
    python bench.py --random_weights --init_from=llama3.1-8b --nfe_speedup=4    a shape without its weights
    python bench.py --kernels                                 the Triton kernels, on a Hopper GPU

The machine's own ceilings come first and make a roofline; then everything is timed in the same process and
printed beside it. What is compared runs in turn, A B A B, after a warm-up. Figures are medians over the
rounds, and a ratio is the median of the rounds' ratios: what to quote are the ratios.

Shapes: k block size, W window tokens, B rows.
"""
from cli import (add_model, add_options, check_file, check_plot, load_model, need, need_between, need_mask,
                 need_package, open_device, parser, run)

import dataclasses
import itertools
import json
import math
import time
from pathlib import Path
from statistics import mean, median

import torch
import torch.nn.functional as F

import adapter
import generate as decoding
import roofline
from eb_sampler import SAMPLERS
from hf import free_memory, write_whole
from kernels.packed_linear import pack, packed_linear, together
from kv_cache import KVCache, run_window
from model import Llama, LlamaConfig
from sbd_loss import adapter_loss, ntp_loss, sbd_loss

HERE = Path(__file__).resolve().parent
WINDOWS = (1, 2, 4, 8, 16, 32, 64)
BIG, SIDE = 2**29, 2048   # bytes that no cache holds; rows of a large matrix


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def interleaved(functions: dict, repeats: int, least: float = 0.03) -> dict:
    """name -> [seconds a call, ...], one for each of `repeats` rounds that call every function in turn.

    Within a round a function runs for at least `least` seconds in a row, at most 200 times, as decoding runs
    forwards: the first one finds the caches filled by another. Two calls of each come before, to warm up.
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
    in_a_row = {name: max(1, min(200, math.ceil(least / timed(f, 1)))) for name, f in functions.items()}
    rounds = [{name: timed(f, in_a_row[name]) for name, f in functions.items()} for _ in range(repeats)]
    return {name: [r[name] for r in rounds] for name in functions}


def ratio(a, b):
    """Median over the rounds of a / b, two lists of seconds."""
    return median(x / y for x, y in zip(a, b))


def spread(seconds):
    return f"{1e3 * median(seconds):9.3f} ms {f'({1e3 * min(seconds):.3f} to {1e3 * max(seconds):.3f})':22}"


@torch.inference_mode()
def ceilings(nbytes, dtype, device, repeats) -> tuple:
    """What this machine reaches -> (roofline.Device, figures).

    Copies and matrix-vector products run over BIG bytes and, where all weights of the model (nbytes) are
    fewer, over that many too: the caches may hold them, and then theirs is the bandwidth to compare with. The
    larger of the two rates counts.
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
        products = [(F.linear, m) if p is None else (packed_linear, p)   # as decoding reads them
                    for m, p in zip(matrices, map(pack, matrices))]
        jobs = dict(copy=lambda: halves[1].copy_(halves[0]), matvec=lambda: [f(x, m) for f, m in products])
        seconds = interleaved(jobs, repeats)
        copy, matvec = size / median(seconds["copy"]), matrices.nbytes / median(seconds["matvec"])
        memory[size] = dict(copy=copy, matvec=matvec)
        print(f"  over {size / 1e6:,.1f} MB: copy {copy / 1e9:.1f} GB/s, read and written; "
              f"matrix-vector products {matvec / 1e9:.1f} GB/s, {matvec / copy:.2f} of it")
    bandwidth = max(copy, matvec)
    print(f"  roofline: {flops / 1e9:,.0f} GFLOP/s and {bandwidth / 1e9:.1f} GB/s, that over "
          f"{size / 1e6:,.1f} MB" + ", all weights of this model" * (size < BIG))
    return roofline.Device(bandwidth, flops), dict(matmul_flops=flops, bandwidth=bandwidth, memory=memory)


def filled_cache(model, batch, kv_len, scratch):
    weight = model.lm_head.weight
    with torch.inference_mode():
        cache = KVCache(model.config, batch, kv_len + scratch, weight.device, weight.dtype)
        cache.k.normal_(), cache.v.normal_()
    cache.commit([kv_len] * batch)
    return cache


def forward_job(model, cache, block_size, num_causal, num_blocks, read):
    """A function that runs one window, [causal | block | block ...] on every row of `cache`, and fetches the
    argmax of its last `read` positions' logits."""
    B, W = len(cache.lengths), num_causal + num_blocks * block_size
    tokens = torch.randint(model.config.vocab_size, (B, W)).tolist()
    layout = [num_causal] * B, [[num_causal] * num_blocks] * B, block_size

    @torch.inference_mode()
    def run():
        hidden = run_window(model, cache, tokens, *layout)
        return model.lm_head(hidden[:, W - read:]).argmax(-1).tolist()
    return run


def linears_job(model, batch, torch_own=False):
    """The linear layers of a one-token forward alone, in its order: each weight is read after all others.

    As decoding runs them (q, k, v are one product, gate and up another), or each as PyTorch's own nn.Linear.
    """
    c, weight = model.config, model.lm_head.weight
    x, heads, ffn = (torch.randn(batch, n, device=weight.device).to(weight.dtype)
                     for n in (c.hidden_size, c.num_attention_heads * c.head_dim, c.intermediate_size))
    groups = []   # an input and the linears that share it
    for layer in model.model.layers:
        a, mlp = layer.self_attn, layer.mlp
        groups += [(x, a.q_proj, a.k_proj, a.v_proj), (heads, a.o_proj), (x, mlp.gate_proj, mlp.up_proj),
                   (ffn, mlp.down_proj)]
    groups.append((x, model.lm_head))

    @torch.inference_mode()
    def run():
        for x, *linears in groups:
            if torch_own:
                [F.linear(x, linear.weight) for linear in linears]
            elif len(linears) > 1:
                together(x, *linears)
            else:
                linears[0](x)
    return run


def bench_forwards(model, case, kv_lens, batches, repeats) -> list:
    """Prefill and windows of every width, measured over roofline; a one-token forward over its linears."""
    nbytes = sum(m.weight.nbytes for m in model.modules() if isinstance(m, torch.nn.Linear))
    figures = []
    for batch, kv_len in itertools.product(batches, kv_lens):
        at = dict(batch=batch, kv_len=kv_len)
        cache = filled_cache(model, batch, kv_len, max(WINDOWS))
        empty = filled_cache(model, batch, 0, kv_len)
        jobs = {W: forward_job(model, cache, W, int(W == 1), int(W > 1), W) for W in WINDOWS}
        jobs |= dict(prefill=forward_job(model, empty, 1, kv_len, 0, 1), linears=linears_job(model, batch))
        jobs["torch's linears"] = linears_job(model, batch, torch_own=True)
        seconds = interleaved(jobs, repeats)
        least = {W: roofline.total(roofline.forward_parts(W, kv_len, batch, **case)) for W in WINDOWS}
        prefill = roofline.forward_parts(kv_len, 0, batch, causal=True, logits=1, **case)
        least["prefill"] = roofline.total(prefill)
        title = f"batch {batch}, {kv_len} cached tokens a row"
        print(f"\n{title:51}{'roofline':>15}{'over it':>9}{'over one token (roofline)':>27}")
        for name, cost in least.items():
            s, slow = seconds[name], ratio(seconds[name], seconds[1])
            over = median(s) / cost.time
            figures.append(dict(window=name, **at, seconds=s, roofline=vars(cost), over_roofline=over,
                                slowdown=slow))
            label = f"window {name}" if name in WINDOWS else f"prefill of {kv_len}"
            print(f"  {label:16}{spread(s)}{1e3 * cost.time:10.3f} ms{over:9.2f}"
                  + f"{slow:19.2f} ({cost.time / least[1].time:.2f})" * (name in WINDOWS))
        for name in ("linears", "torch's linears"):
            s, over = seconds[name], ratio(seconds[1], seconds[name])
            rate = nbytes / median(s)
            figures.append(dict(window=name, **at, seconds=s, bandwidth=rate, forward_over=over))
            print(f"  {name:16}{spread(s)}  {rate / 1e9:.1f} GB/s; the window of 1 takes {over:.3f} of it")
    return figures


def equation_16(t1, tk, t2k, k, nfe_speedup):
    """Eq. 16: k t(1) / (t(2k) + (l - 1) t(k)), with l = k / nfe_speedup forwards a block."""
    return k * t1 / (t2k + (k / nfe_speedup - 1) * tk)


def schedule(k, nfe_speedup):
    """How many tokens each forward reveals, without end: blocks take k / nfe_speedup forwards on average, and
    their forwards share them evenly."""
    spent = lambda blocks: math.floor(blocks * k / nfe_speedup + 1e-9)
    for b in itertools.count():
        forwards = spent(b + 1) - spent(b)
        for i in range(forwards):
            yield k * (i + 1) // forwards - k * i // forwards


def replay(k, nfe_speedup):
    """A rule of eb_sampler for one row: it follows the schedule from left to right, whatever is predicted."""
    reveals = schedule(k, nfe_speedup)
    return lambda H, c, masked, bound: masked & (masked.cumsum(-1) <= next(reveals))


def layout(mode, W, k, hedges):
    """What a decoding forward of W tokens holds: causal tokens, blocks of k, and logits read at its end."""
    if mode == "ntp":
        return 1, 0, 1
    if mode == "sbd":
        return W - k, 1, k
    blocks = min(hedges, (W - 1) // k)   # verified: [next, draft | blocks], the draft of at most k - 1
    return W - blocks * k, blocks, W - blocks * k + (k - 1 if blocks else 0)


def forwards_of(model, run) -> list:
    """(cached tokens, W) of every decoding forward of run(), one row each; prefills are left out."""
    hidden, graphs, seen = model.hidden, model.graphs, []

    def watched(tokens, positions, *other, **named):
        seen.append((int(positions[0, 0]), tokens.shape[1]))
        return hidden(tokens, positions, *other, **named)

    model.hidden, model.graphs = watched, None   # a replayed graph would call nothing
    try:
        run()
    finally:
        model.graphs = graphs
        del model.hidden
    return [forward for forward in seen if forward[0]]


def peak_memory(device, run):
    """Peak bytes during run(): of CUDA's allocator, else of the process; None where the system is silent."""
    clear, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        run()
        return torch.cuda.max_memory_allocated(device)
    if clear.exists():
        clear.write_text("5")   # Linux: forget the old peak
    run()
    return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024 if status.exists() else None


@dataclasses.dataclass
class Decoding:
    """A job, decoding every prompt in one mode, one at a time, and what it leaves behind."""
    model: Llama
    prompts: list
    options: dict                                              # of `decode`
    nfe_speedup: float | None                                  # of the sampler "replay"
    rows: list = dataclasses.field(default_factory=list)       # of the last round
    first: list = dataclasses.field(default_factory=list)      # seconds to the first token, of all rounds
    forwards: list = dataclasses.field(default_factory=list)   # (cached tokens, W) of each decoding forward
    peak: int | None = None                                    # bytes

    def __call__(self):
        self.rows = []
        for prompt in self.prompts:   # the schedule begins anew with each text
            SAMPLERS["replay"] = replay(self.options["block_size"], self.nfe_speedup or 1)
            began, row = time.perf_counter(), None
            for steps in decoding.decode(self.model, [prompt], **self.options):
                if row is None and steps[0].final:
                    row = steps[0].row
                    self.first.append(time.perf_counter() - began)
            self.rows.append(row)

    @property
    def window(self):
        return mean(W for _, W in self.forwards)               # tokens


def decoding_jobs(model, prompts, modes, args):
    """What bench_decoding times: the decoding of each mode, prefills, forwards; and the mean of the cached
    tokens. Names: a mode; "prefill MODE"; "MODE W", a forward of that width behind the mean cache."""
    k, S, jobs, prefills = args.block_size, args.nfe_speedup, {}, {}
    ends = S is not None or modes == ["ntp"]                # texts that mean nothing end at the limit
    options = {name: getattr(args, name) for name in OPTIONS} | dict(stop_ids=() if ends else None)
    for mode in modes:
        each = options | dict(mode=mode, sampler="replay" if S and mode == "sbd" else "eb")
        d = jobs[mode] = Decoding(model, prompts, each, S)
        prefills[f"prefill {mode}"] = Decoding(model, prompts, each | dict(max_new_tokens=0), S)
        once = lambda: d.forwards.extend(forwards_of(model, d))   # untimed: which forwards it runs
        d.peak = peak_memory(model.lm_head.weight.device, once)
        need(d.forwards, "no prompt needs a forward behind its prefill: the model ends every text at once; "
                         "try --nfe_speedup")
    kv_len = round(mean(n for d in jobs.values() for n, _ in d.forwards))
    wanted = {(mode, W) for mode, d in jobs.items() for _, W in d.forwards}
    if "sbd" in modes:
        wanted |= {("sbd", k), ("sbd", 2 * k)}              # of Eq. 16
    if "verified" in modes:
        wanted.add(("verified", round(jobs["verified"].window)))
    cache = filled_cache(model, 1, kv_len, max(W for _, W in wanted))
    forwards = {f"{mode} {W}": forward_job(model, cache, k, *layout(mode, W, k, args.hedges))
                for mode, W in sorted(wanted)}
    return jobs, prefills, forwards, kv_len


def decoding_figures(mode, d, seconds, ntp, k, kv_len, case) -> dict:
    """One mode's figures; ntp: those of NTP, None for NTP itself. Predicted: the speedup over NTP that the
    times of the forwards predict, one a round, and the roofline's."""
    tokens, nfe = sum(len(row.tokens) for row in d.rows), sum(row.nfe for row in d.rows)
    made = tokens - (mode != "sbd") * len(d.rows)           # the prefill made the first token of the others
    behind = [s - p for s, p in zip(seconds[mode], seconds[f"prefill {mode}"])]
    alone = list(map(sum, zip(*(seconds[f"{mode} {W}"] for _, W in d.forwards))))
    f = dict(tokens=tokens, nfe=nfe, nfe_speedup=tokens / nfe, forwards=len(d.forwards),
             mean_window=d.window, tokens_per_s=tokens / median(seconds[mode]),
             decode_tokens_per_s=[made / s for s in behind], first_token_s=median(d.first), peak_bytes=d.peak,
             in_forwards=ratio(alone, behind))
    if mode == "ntp":
        return f
    per_forward, one = made / len(d.forwards), seconds["ntp 1"]
    if mode == "sbd":
        times = zip(one, seconds[f"sbd {k}"], seconds[f"sbd {2 * k}"])
        predicted = [equation_16(*t, k, per_forward) for t in times]
        ideal = roofline.speedup(k, per_forward, kv_len, 1, **case)
    else:
        predicted = [per_forward * a / b for a, b in zip(one, seconds[f"verified {round(d.window)}"])]
        ideal = roofline.verified_speedup(per_forward, d.window, kv_len, 1, **case)
    wall = [a / b for a, b in zip(f["decode_tokens_per_s"], ntp["decode_tokens_per_s"])]
    share = ratio(wall, predicted)
    return f | dict(wall_clock=wall, predicted=predicted, share=share, roofline_speedup=ideal)


def print_decoding(figures):
    print("  mode      tokens   NFE  a NFE  window  tokens/s  decode/s  first ms  peak MB  in fwds"
          "   wall clock (min to max)  predicted  share  roofline")
    for mode, f in figures.items():
        line = (f"  {mode:9}{f['tokens']:7}{f['nfe']:6}{f['nfe_speedup']:7.2f}{f['mean_window']:8.1f}"
                f"{f['tokens_per_s']:10.1f}{median(f['decode_tokens_per_s']):10.1f}"
                f"{1e3 * f['first_token_s']:10.2f}{(f['peak_bytes'] or math.nan) / 1e6:9.0f}"
                f"{f['in_forwards']:9.3f}")
        if mode != "ntp":
            wall = f["wall_clock"]
            line += (f"{median(wall):11.2f} {f'({min(wall):.2f} to {max(wall):.2f})':>15}"
                     f"{median(f['predicted']):11.2f}{f['share']:7.3f}{f['roofline_speedup']:10.2f}")
        print(line)
    print("""\
  window: mean tokens a forward runs. decode/s: behind the prefill, which makes the first token of ntp and
  verified. in fwds: the share of that time that the forwards take alone. wall clock: decode/s over ntp's.
  predicted: from the forwards timed above, sbd by Eq. 16, verified by tokens a forward * t(1) / t(mean
  window, rounded). share: wall clock over predicted. roofline: predicted from its times.""")


def bench_decoding(model, case, prompts, modes, args) -> dict:
    """Every mode on the same prompts, one at a time: rates, and the wall-clock speedup over NTP beside the
    one that the times of the mode's forwards, measured in the same rounds, predict.

    The prefill makes the first token of ntp and verified: the speedups leave that one out.
    """
    k, S, lengths = args.block_size, args.nfe_speedup, sorted(map(len, prompts))
    reveals = f"sbd REPLAYING {S:g} tokens a forward" if S else f"gamma {args.gamma}"
    print(f"\ndecoding {len(prompts)} prompts of {lengths[0]} to {lengths[-1]} tokens, batch 1, block {k}, "
          f"{args.hedges} hedges, {reveals}")
    try:
        jobs, prefills, forwards, kv_len = decoding_jobs(model, prompts, modes, args)
        # The least: a forward runs about as long as the decoding that it explains.
        seconds = interleaved(jobs | prefills | forwards, args.repeats, 0.2)
    finally:
        SAMPLERS.pop("replay", None)
    for mode, W in map(str.split, forwards):
        print(f"  {mode:8} forward, {W:>3} tokens behind {kv_len}  {spread(seconds[f'{mode} {W}'])}")
    figures = {}
    for mode, d in jobs.items():
        figures[mode] = decoding_figures(mode, d, seconds, figures.get("ntp"), k, kv_len, case)
    print_decoding(figures)
    return figures | dict(kv_len=kv_len, replayed=S, forward_s={name: seconds[name] for name in forwards})


def bench_training(model, case, args) -> dict:
    """An SBD step against an NTP step of the same B and L: forward and backward (in flops, two forwards); and
    an adapter's, of rank 16, which the base's weights get no gradients in."""
    B, L, k = args.batch_size, args.seq_len, args.block_size
    tokens = torch.randint(model.config.vocab_size, (B, L), device=model.lm_head.weight.device)
    adapter.detach(model)
    weights = list(model.parameters())
    adapter.attach(model, 16)

    def step(loss, *more, train=True, **options):
        for weight in weights:
            weight.requires_grad_(train)
        loss(model, tokens, *more, **options).loss.backward()
        model.zero_grad()

    jobs = dict(ntp=lambda: step(ntp_loss), sbd=lambda: step(sbd_loss, k),
                adapter=lambda: step(adapter_loss, k, eta=1.0, train=False))
    seconds = interleaved(jobs, args.repeats)
    adapter.detach(model)
    # An SBD step is two NTP ones: 2L tokens, and about L * L scores a head where causal attention has half.
    # An adapter's: L clean tokens forward, L noisy ones forward and backward, without the weights' gradients.
    least = {name: 3 * roofline.forward_time(L, 0, rows, causal=True, **case)
             for name, rows in (("ntp", B), ("sbd", 2 * B), ("adapter", B))}
    print(f"\ntraining step, {B} x {L} tokens, block {k}, without the optimizer")
    for name, s in seconds.items():
        print(f"  {name:8}{spread(s)}, {median(s) / least[name]:.2f} times the roofline's "
              f"{1e3 * least[name]:.1f} ms")
    slow = ratio(seconds["sbd"], seconds["ntp"])
    print(f"  an SBD step costs {slow:.2f} NTP steps, an adapter's "
          f"{ratio(seconds['adapter'], seconds['sbd']):.2f} SBD steps")
    return dict(seconds=seconds, roofline=least, ratio=slow)


def bench_transformers(model, prompt, new_tokens, repeats) -> dict:
    """Greedy NTP decoding, ours and transformers' generate, on the same folder, prompt, dtype and threads."""
    from transformers import AutoModelForCausalLM
    dtype, device = model.lm_head.weight.dtype, model.lm_head.weight.device
    theirs = AutoModelForCausalLM.from_pretrained(model.folder, dtype=dtype).to(device).eval()
    theirs.generation_config.eos_token_id = None   # both decode exactly new_tokens
    ids, texts = torch.tensor([prompt], device=device), {}

    def ours():
        [row] = decoding.generate(model, [prompt], mode="ntp", max_new_tokens=new_tokens, stop_ids=())
        texts["ours"] = row.tokens

    def transformers():
        [row] = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens,
                                do_sample=False, pad_token_id=0)
        texts["transformers"] = row[len(prompt):].tolist()

    print(f"\nNTP decoding of {new_tokens} tokens behind {len(prompt)}, batch 1")
    seconds = interleaved(dict(ours=ours, transformers=transformers), repeats)
    for name, s in seconds.items():
        print(f"  {name:13}{spread(s)}, {new_tokens / median(s):.1f} tokens/s")
    same = next((i for i, (a, b) in enumerate(zip(*texts.values())) if a != b), new_tokens)
    speed = ratio(seconds["transformers"], seconds["ours"])
    print(f"  {speed:.2f} times transformers' tokens/s; the texts agree on {same} of {new_tokens} tokens")
    return dict(ratio=speed, seconds=seconds, agree=same)


@torch.no_grad()
def random_model(config, device, dtype) -> Llama:
    """A model of this shape, made in `dtype` on `device`: a million random weights over and over, as drawing
    8B takes minutes."""
    with torch.device("meta"):
        model = Llama(config).to(dtype)
    model.to_empty(device=device).tie_weights()
    chunk = (0.02 * torch.randn(2**20 + 1, device=device)).to(dtype)   # odd: no two rows begin alike
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
    lines = {}   # (batch, kv_len): points (flops a byte, GFLOP/s), the prefill's last
    for f in figures["forwards"]:
        if cost := f.get("roofline"):
            point = cost["flops"] / cost["bytes"], cost["flops"] / median(f["seconds"]) / 1e9
            lines.setdefault((f["batch"], f["kv_len"]), []).append(point)
    all_x = [x for points in lines.values() for x, _ in points]
    line = sorted((min(all_x) / 2, peak / bandwidth, 2 * max(all_x)))
    axes.plot(line, [min(peak, bandwidth * x) / 1e9 for x in line], "k",
              label=f"{bandwidth / 1e9:,.0f} GB/s, {peak / 1e9:,.0f} GFLOP/s")
    for i, ((batch, kv_len), points) in enumerate(lines.items()):
        label = f"windows of {WINDOWS[0]} to {WINDOWS[-1]}, batch {batch}, KV {kv_len}"
        axes.plot(*zip(*points[:-1]), f"C{i}o-", label=label)
        axes.plot(*points[-1], f"C{i}s")
    axes.set(xscale="log", yscale="log", xlabel="flops a byte", ylabel="GFLOP/s")
    axes.set_title(f"{title}; squares: prefill")
    axes.legend(fontsize="small")
    write_whole(path, lambda temporary: figure.savefig(temporary, format=path.suffix[1:], dpi=120))


# ------------------------------------------------------------------------------------------ command line

def sizes(text):
    return [int(n) for n in text.split(",")]


OPTIONS = "block_size", "gamma", "hedges", "max_new_tokens"   # those of generate.py that are taken here
COUNTS = dict(num_prompts=(1, 2**16), batch_size=(0, 2**16), seq_len=(2, 2**20), repeats=(1, 1000))


def parse(argv=None):
    p = parser(__doc__)
    a = p.add_argument
    a("--random_weights", action="store_true", help="only --init_from's shape; SBD needs --nfe_speedup then")
    a("--against", choices=("transformers",), help="time NTP decoding beside this one's, and nothing else")
    a("--compile", action="store_true", help="compile the model as generate.py --compile does")
    a("--kv_lens", type=sizes, default="128,1024", help="cached tokens of the windows; lengths of prefills")
    a("--batches", type=sizes, default="1,4", help="rows of the timed forwards")
    a("--nfe_speedup", type=float, help="SBD reveals this many tokens a forward, whatever the model predicts")
    a("--num_prompts", type=int, default=16,
      help="held-out word problems to decode; --random_weights: 128 random ids each")
    a("--batch_size", type=int, default=8, help="rows of a training step; 0: none is timed")
    a("--seq_len", type=int, default=512, help="tokens a row of it")
    a("--repeats", type=int, default=7, help="timed rounds of everything")
    a("--kernels", action="store_true", help="check and time the Triton kernels, nothing else; for Hopper")
    a("--json", type=Path, help="write all figures to this file")
    a("--plot", type=Path, help="draw the timed forwards on the roofline to this .png, .pdf or .svg file")
    add_options(p, decoding.Options, names=OPTIONS, max_new_tokens=128)
    add_model(p, default=str(HERE / "checkpoints/tiny-sbd"))
    return p.parse_args(argv)


def check(args):
    """Refuse what cannot be timed before anything of the model is read."""
    decoding.Options(**{name: getattr(args, name) for name in OPTIONS})
    need_between(args, **COUNTS, max_new_tokens=(2, 2**31))
    for name in ("kv_lens", "batches"):
        need(all(1 <= n < 2**31 for n in getattr(args, name)), f"--{name}: wanted numbers of 1 to 2^31 - 1")
    need(args.nfe_speedup is None or 1 <= args.nfe_speedup <= args.block_size,
         f"--nfe_speedup {args.nfe_speedup}: wanted 1 to the block size, {args.block_size}, tokens a forward")
    for lone in ("against", "kernels"):
        others = {"against", "random_weights", "nfe_speedup", "plot"} - {lone}
        idle = ", ".join(f"--{name}" for name in sorted(others) if getattr(args, name))
        need(not getattr(args, lone) or not idle, f"--{lone} times nothing but that: leave out {idle}")
    if args.random_weights or args.against:
        args.batch_size = 0                                    # no training step is timed
    check_file("--json", args.json)
    check_plot(args.plot)
    need_package(args.against, "--against", "transformers", "transformers")


def shape(args, device, dtype):
    """The config to time and how many parameters it has, refused where lengths or memory do not fit."""
    config = LlamaConfig.from_pretrained(args.init_from)
    ids = [args.mask_id, config.mask_id, 0 if args.random_weights else None]
    config = dataclasses.replace(config, mask_id=next((i for i in ids if i is not None), None))
    if not args.against:
        need_mask(config, args.init_from)
    context, most = config.max_position_embeddings, max(args.kv_lens)
    trained = args.seq_len * bool(args.batch_size)
    for name, given, room in (("kv_lens", most, context - max(WINDOWS)), ("seq_len", trained, context),
                              ("max_new_tokens", args.max_new_tokens, context)):
        need(given <= room, f"--{name} {given}: the context of {context} tokens has room for {room}")
    with torch.device("meta"):
        count = sum(p.numel() for p in Llama(config).parameters())
    slots = max(args.batches) * (2 * most + max(WINDOWS))      # bench_forwards' two caches
    kv = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * slots
    # What a training step keeps for its backward, at least: each layer's inputs of 2 L tokens a row.
    kept = 2 * args.batch_size * trained * config.num_hidden_layers * config.hidden_size
    total, free = (count + max(kv, kept)) * dtype.itemsize, free_memory(device)
    need(total <= free, f"weights, and caches or a training step, take {total / 2**30:.1f} GiB, {device} has "
                        f"{free / 2**30:.1f} GiB free: use a smaller model or dtype, fewer --batches, "
                        "shorter --kv_lens or a smaller --batch_size")
    return config, count


def load(args, config, device, dtype):
    """The model, ready to decode, and the prompts, lists of ids."""
    if args.random_weights:
        model = random_model(config, device, dtype)
        prompts = torch.randint(config.vocab_size, (args.num_prompts, 128)).tolist()
    else:
        from data.word_problems.prepare import problems
        tasks = problems("val", args.num_prompts)   # refuses more than there are, before weights are read
        model, tokenizer = load_model(args)
        prompts = [tokenizer.encode(task.prompt) for task in tasks]
    model.fuse()
    return decoding.compile_decoding(model) if args.compile else model, prompts


def bench(args) -> dict:
    """All figures of the model that args name."""
    device = open_device(args.device)
    need(device.type in ("cpu", "cuda"), f"--device {args.device}: wanted cpu or cuda")
    dtype = getattr(torch, args.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    config, count = shape(args, device, dtype)
    model, prompts = load(args, config, device, dtype)
    machine = (torch.cuda.get_device_name(device) if device.type == "cuda" else
               f"CPU, {torch.get_num_threads()} threads")
    how = ["random weights"] * args.random_weights + ["compiled"] * args.compile
    title = ", ".join([Path(args.init_from).name, *how, str(dtype).removeprefix("torch."), machine])
    print(f"{title}: {count / 1e6:,.1f}M parameters, torch {torch.__version__}")
    figures = dict(title=title, torch=torch.__version__, parameters=count)
    if args.against:
        timed = bench_transformers(model, prompts[0], args.max_new_tokens, args.repeats)
        return figures | dict(transformers=timed)
    limits, figures["ceilings"] = ceilings(count * dtype.itemsize, dtype, device, args.repeats)
    width = dtype.itemsize
    case = dict(config=config, device=limits, weight_bytes=width, kv_bytes=width, act_bytes=width)
    figures["forwards"] = bench_forwards(model, case, args.kv_lens, args.batches, args.repeats)
    modes = ["ntp", "sbd", "verified"]
    if args.random_weights:   # what they predict means nothing
        modes = ["ntp"] + ["sbd"] * bool(args.nfe_speedup)
    figures["decoding"] = bench_decoding(model, case, prompts, modes, args)
    if args.batch_size:
        figures["training"] = bench_training(model, case, args)
    return figures


def main(argv=None):
    args = parse(argv)
    check(args)
    if args.kernels:
        from kernels.check import bench_kernels   # only here: it compiles for minutes, and needs a GPU
        figures = bench_kernels()
    else:
        figures = bench(args)
    if args.json:
        write_whole(args.json, lambda path: path.write_text(json.dumps(figures, indent=1) + "\n"))
    if args.plot:
        plot(args.plot, figures, figures["title"])


if __name__ == "__main__":
    run(main)
