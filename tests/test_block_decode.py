"""The decoding kernel, interpreted on the CPU, against one softmax a query in float64; its cost; its code.
"""
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
import aot
import generate as command
from brute_force import tiny_model
from generate import generate
from kernels import block_decode as kernels
from kernels.block_decode import block_decode, choose_splits, cost, reference
from kv_cache import KVCache, window
from model import LlamaConfig
from roofline import forward_parts

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim")   # inside the interpreter
HKV = 2
# Relative norms. float32: sums of some hundred terms of roundoff 6e-8. float16, bfloat16: the weights of the
# softmax and the output are rounded to 11 and 8 bits.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
DTYPES = list(TOLERANCE)
DIMS = (16, 32, 48, 64, 128)


def shapes():
    """(name, k, rows of (causal tokens, what each block sees)): the windows of every mode, B = 2 or 3, up to
    128 tokens."""
    for W in (1, 2, 31, 64, 65, 128):
        yield f"causal-{W}", 1, [(W, []), (max(1, W // 2), [])]
    for k in (1, 2, 3, 5, 7, 8, 11, 16, 32, 64):
        yield f"sbd-{k}", k, [(k, [k]), (0, [0])]                 # [pending | block] beside [block]
        n = max(1, min(3, 128 // k - 1))                          # as many hedges as fit
        hedges = [(k, sorted(random.Random(k).sample(range(1, k + 1), min(n, k)))), (1, [1])]
        yield f"hedged-{k}", k, hedges + [(0, [])] * (k < 16)   # the last row has nothing to do: padding only


def sees(row, k):
    """Section 2's rule for a row: for each token of its window, the set of window tokens it attends to."""
    causal, blocks = row
    places = [(n, range(causal + n * k, causal + (n + 1) * k)) for n in range(len(blocks))]
    inside = [set(range(blocks[n])) | set(own) for n, own in places for _ in own]
    return [set(range(j + 1)) for j in range(causal)] + inside


def make_rule(rows, k, lengths):
    """The rule as the kernel takes it; padding is marked as causal tokens are, but lies behind their
    number."""
    W = max(c + k * len(a) for c, a in rows)
    rule = [[n, c, *range(1, W + 1), *[-1] * W] for n, (c, _) in zip(lengths, rows)]
    rule = torch.tensor(rule, dtype=torch.int32)
    for r, (c, a) in zip(rule, rows):
        for n, first in enumerate(a):
            r[2 + c + n * k:2 + c + (n + 1) * k] = first
            r[2 + W + c + n * k:2 + W + c + (n + 1) * k] = n
    return rule, W


def truth(q, k, v, cache_k, cache_v, lengths, rows, size):
    """One query at a time, in float64, over the keys it may see and no others -> {(b, w): (H, D)}."""
    out, (H, D) = {}, (q.shape[1], q.shape[3])
    for b, (length, row) in enumerate(zip(lengths, rows)):
        for w, seen in enumerate(sees(row, size)):
            at = sorted(seen)
            keys, values = (torch.cat((old[b, :, :length], new[b, :, at]), 1).double()
                            for old, new in ((cache_k, k), (cache_v, v)))
            query = q[b, :, w].double().view(HKV, H // HKV, D)
            out[b, w] = (query @ keys.transpose(1, 2) / D ** 0.5).softmax(-1).matmul(values).view(H, D)
    return out


def relative(ours, wanted):
    """Norm of the difference over that of the truth, of all real tokens; fails on anything not finite."""
    ours = torch.stack([ours[b, :, w] for b, w in wanted]).double()
    wanted = torch.stack(list(wanted.values()))
    return ((ours - wanted).norm() / wanted.norm()).item()


class Guarded:
    """torch.empty for a while: what it returns is full of NaN, between two guards that nobody may write
    to."""
    def __init__(self, monkeypatch):
        self.buffers = []
        monkeypatch.setattr(torch, "empty", self)

    def __call__(self, shape, dtype, device):
        n = torch.Size(shape).numel()
        buffer = torch.full((n + 256,), 7.0, dtype=dtype)
        buffer[128:n + 128] = torch.nan
        self.buffers.append(buffer)
        return buffer[128:n + 128].view(shape)

    def check(self):
        assert self.buffers
        for buffer in self.buffers:
            assert (buffer[:128] == 7).all() and (buffer[-128:] == 7).all()
            assert not buffer[128:-128].isnan().any()


def inputs(rows, size, lengths, G, D, dtype, seed, spare=2):
    """Random q, k, v and a cache whose last slot the longest row may fill, poisoned wherever nobody may
    read."""
    generator = torch.Generator().manual_seed(seed)
    rule, W = make_rule(rows, size, lengths)
    B, S = len(rows), max(n + c for n, (c, _) in zip(lengths, rows))

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    q, k, v = (normal(B, W, heads, D).transpose(1, 2) for heads in (G * HKV, HKV, HKV))
    around = normal(B + 2, HKV, S + spare, D), normal(B + 2, HKV, S + spare, D)
    caches = [x[1:-1, :, :S] for x in around]   # the tensor around it is what must not be touched
    for b, (c, blocks) in enumerate(rows):
        for x in (k, v):
            x[b, :, c + size * len(blocks):] = torch.nan          # padding
        for x in caches:
            x[b, :, lengths[b]:] = torch.nan
    return q, k, v, *caches, rule, around


def lengths_of(name, rows, n, rng):
    """Ragged: 0, what fills the cache, and between; n counts the cases."""
    longest = (70, 130, 200, 300)[n % 4]
    return [(0, longest, rng.randint(1, longest))[(n + b) % 3] for b in range(len(rows))]


CASES = list(enumerate(shapes()))


@pytest.mark.parametrize("n, case", CASES, ids=[name for _, (name, _, _) in CASES])
def test_every_window_equals_one_softmax_a_query(monkeypatch, n, case):
    """Output, cache and guards, with one split and with many (also more than there are keys), in every dtype
    in turn."""
    name, size, rows = case
    rng = random.Random(n)
    lengths, G, D = lengths_of(name, rows, n, rng), (1, 2, 4, 7)[n % 4], DIMS[n % 5]
    W = max(c + size * len(a) for c, a in rows)
    if G * W > 130:
        G = 1 + n % 2                                             # the next test has many row tiles
    for splits in (1, rng.choice((2, 3, 5, 7))):
        # tiles of float32 are small, and many
        dtypes = DTYPES if G * W <= 40 or name == "causal-65" else DTYPES[1:]
        dtype = dtypes[(n + (splits > 1)) % len(dtypes)]
        *tensors, rule, around = inputs(rows, size, lengths, G, D, dtype, n)
        wanted, before = truth(*tensors, lengths, rows, size), [x.clone() for x in around]
        guarded = Guarded(monkeypatch)
        out = block_decode(*tensors, rule, max(lengths), splits)
        monkeypatch.undo()
        guarded.check()
        assert out.isfinite().all()                               # padding too
        assert relative(out, wanted) < TOLERANCE[dtype]
        for x, old, new in zip(around, before, tensors[1:3]):
            for b, (length, (c, _)) in enumerate(zip(lengths, rows)):
                old[1 + b, :, length:length + c] = new[b, :, :c]
            # the causal ones are there, all else is as it was
            assert torch.equal(x.nan_to_num(1e4), old.nan_to_num(1e4))


@pytest.mark.parametrize("W, G", [(128, 7), (20, 7)])
def test_more_query_rows_than_a_tile(W, G):
    """W * G up to 896: several row tiles, the last one partly empty."""
    rows, lengths = [(W // 2, [W // 2])], [40]
    *tensors, rule, _ = inputs(rows, W - W // 2, lengths, G, 16, torch.float16, W)
    wanted = truth(*tensors, lengths, rows, W - W // 2)
    assert relative(block_decode(*tensors, rule, 40, 1 + W % 3), wanted) < TOLERANCE[torch.float16]


def test_split_without_keys_weighs_nothing():
    """Scores of -1e4 everywhere: any weight that is not exactly 0 would outshine them. 40 keys in 7 splits,
    and none."""
    rows, lengths = [(1, []), (1, [])], [40, 0]
    q, k, v, cache_k, cache_v, rule, _ = inputs(rows, 1, lengths, 2, 16, torch.float32, 0)
    q, k, cache_k[:] = torch.ones_like(q), torch.full_like(k, -2500.0), -2500.0
    wanted = truth(q, k, v, cache_k, cache_v, lengths, rows, 1)
    assert relative(block_decode(q, k, v, cache_k, cache_v, rule, 40, 7), wanted) < TOLERANCE[torch.float32]


def test_the_same_bits_every_time():
    rows, lengths = [(5, [2, 5])], [150]
    *tensors, rule, _ = inputs(rows, 5, lengths, 2, 32, torch.float32, 0)
    assert torch.equal(block_decode(*tensors, rule, 150, 3), block_decode(*tensors, rule, 150, 3))


def test_reference_follows_the_rule():
    rows, lengths = [(4, [1, 3, 4]), (2, [0]), (0, [])], [9, 0, 0]
    *tensors, rule, _ = inputs(rows, 3, lengths, 2, 16, torch.float64, 0)
    tensors = [x.nan_to_num(0.5) for x in tensors]                # it multiplies what it masks
    wanted = truth(*tensors, lengths, rows, 3)
    assert relative(reference(*tensors, rule), wanted) < 1e-14    # float64
    assert torch.equal(tensors[3][0, :, 9:13], tensors[1][0, :, :4])
    assert torch.equal(tensors[4][1, :, :2], tensors[2][1, :, :2])


# ------------------------------------------------------------------------------------------ splits and cost

@pytest.mark.parametrize("problems, longest", [(8, 4096), (8, 32768), (64, 32768), (300, 131072), (1, 131072),
                                               (8, 100), (8, 0)])
def test_splits_fill_the_chip(problems, longest):
    at_once = 264
    splits = choose_splits(problems, longest, at_once)
    most = max(1, min(kernels.MAX_SPLITS, longest // kernels.SPLIT_KEYS))
    assert 1 <= splits <= most

    def filled(s):
        return problems * s / (-(-problems * s // at_once) * at_once)
    assert filled(splits) >= 0.95 * max(map(filled, range(1, most + 1)))


def test_cost_counts_the_pairs_of_the_rule():
    """Every pair multiplies twice D numbers and adds them: 4 D flops for scores and outputs; every element
    moves once."""
    H, D, width = 4, 16, 2
    for n, (_, k, rows) in enumerate(shapes()):
        rows = rows[:2]
        lengths = [3 * n, 5]
        rule, W = make_rule(rows, k, lengths)
        real = [c + k * len(a) for c, a in rows]
        pairs = sum(length + len(seen) for length, row in zip(lengths, rows) for seen in sees(row, k))
        # padding: all causal
        pairs += sum(length + c for length, (c, _), r in zip(lengths, rows, real) for _ in range(W - r))
        c = cost(rule, H, HKV, D, width)
        assert c["flops"] == pairs * H * 4 * D
        one = torch.zeros(D, dtype=torch.bfloat16).nbytes
        tokens = 2 * W
        assert c["read"] == one * (H * tokens + 2 * HKV * (tokens + sum(lengths)))
        assert c["write"] == one * H * tokens
        assert c["cache_write"] == one * 2 * HKV * sum(c for c, _ in rows)


@pytest.mark.parametrize("W, kv_len, batch", [(1, 1000, 1), (16, 4096, 3), (64, 100, 2)])
def test_cost_is_the_rooflines_attention(W, kv_len, batch):
    """A block alone: the roofline multiplies every query with every key, and so does the rule."""
    c = LlamaConfig(hidden_size=256, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2,
                    head_dim=32)
    parts = forward_parts(W, kv_len, batch, c, kv_bytes=2, act_bytes=2)
    [attention] = [p for p in parts if p.name == "attention"]
    rule, _ = make_rule([(0, [0])] * batch, W, [kv_len] * batch)
    ours = cost(rule, 8, 2, 32, 2)
    assert 3 * ours["flops"] == attention.flops and not ours["cache_write"]
    assert 3 * (ours["read"] + ours["write"]) == attention.bytes


# ------------------------------------------------------------------------------------------ the dispatch

@pytest.mark.parametrize("ragged", [False, True])
def test_window_hands_the_rule_over_and_builds_no_mask(ragged):
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1)
    cache = KVCache(config, 2, 300, attention="triton")
    cache.commit([7, 3] if ragged else [7, 7])
    for k, rows in ((1, [(1, []), (1, [])]), (4, [(4, [4]), (0, [0])]), (3, [(3, [1, 2, 3]), (1, [1])])):
        w = window(cache, [c for c, _ in rows], [a for _, a in rows], k)
        assert w.mask is None and torch.equal(w.rule, make_rule(rows, k, cache.lengths.tolist())[0])
    # longer than the kernel's windows: the PyTorch path
    assert window(cache, [129, 5], [[], []], 1).rule is None
    assert window(KVCache(config, 2, 300), [1, 1], [[], []], 1).rule is None


@pytest.mark.parametrize("mode, kind", [("sbd", "llama"), ("ntp", "qwen3"), ("verified", "qwen3"),
                                        ("verified", "llama")])
def test_every_backend_decodes_the_same_tokens_in_as_many_forwards(mode, kind):
    model = tiny_model(kind, dtype=torch.float32, seed=3)
    prompts = [[1, 2, 3, 4, 6, 7, 8], [9]]
    options = dict(gamma=1.0, max_new_tokens=9, stop_ids=(0,), mode=mode)
    runs = [generate(model, prompts, 4, **options, attention=attention)
            for attention in ("auto", "sdpa", "triton")]
    first, *others = [[(row.tokens, row.nfe, row.stopped) for row in run] for run in runs]
    assert all(other == first for other in others) and all(tokens for tokens, _, _ in first)


def test_what_cannot_run_is_named():
    config = LlamaConfig(num_hidden_layers=1)
    with pytest.raises(ValueError, match="no kernel for torch.float64"):
        KVCache(config, 1, 8, dtype=torch.float64, attention="triton")
    with pytest.raises(ValueError, match="attention 'flex': wanted auto, triton or sdpa"):
        KVCache(config, 1, 8, attention="flex")
    assert KVCache(config, 1, 8).kernel is None
    assert KVCache(config, 1, 8, attention="triton").kernel is kernels


def test_without_a_gpu_the_command_refuses_triton_before_it_loads_a_model(monkeypatch):
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    monkeypatch.setattr(command, "load_model", lambda *a: pytest.fail("loaded"))
    message = "^attention triton: needs a GPU, take sdpa .TRITON_INTERPRET=1 [^\n]*$"
    with pytest.raises(ValueError, match=message):
        command.main(["--prompt=a", "--attention=triton", "--device=cpu"])


# ------------------------------------------------------------------------------- compilation for Hopper

def launch(W, D, dtype, splits, S=4096, length=4096):
    """One launch of Llama-3's 32 heads over 8, laid out as the model and its cache do; aot.py compiles and
    does not run it."""
    q, k, v = (torch.empty(1, W, heads, D, dtype=dtype).transpose(1, 2) for heads in (32, 8, 8))
    cache = torch.empty(2, 1, 8, S, D, dtype=dtype)
    block_decode(q, k, v, *cache, torch.zeros(1, 2 + 2 * W, dtype=torch.int32), length, splits)


def launches():
    """Each row tile (16, 32, 64, 128) of the common shape, with one split and more; W, length and splits
    never recompile."""
    for splits in (1, 4):
        for W in (1, 8, 16, 32):
            launch(W, 128, torch.bfloat16, splits)
        for W in (16, 32):
            launch(W, 128, torch.float16, splits)
    launch(32, 64, torch.bfloat16, 4)
    launch(16, 128, torch.float32, 4)
    for W, splits, S, length in ((17, 5, 4096, 77), (32, 16, 640, 600), (31, 3, 131072, 131000)):
        launch(W, 128, torch.bfloat16, splits, S, length)
    compiled = [cache for cache, *_ in kernels.window_kernel.device_caches.values()]
    assert sum(map(len, compiled)) == 14, "a run-time argument was compiled in"


def all_launches():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for D in (16, 32, 64, 128):
            for W in (1, 8, 16, 32):
                for splits in (1, 4):
                    launch(W, D, dtype, splits)


@pytest.mark.parametrize("what", ["launches", pytest.param("all_launches", marks=pytest.mark.slow)])
def test_hopper_code_spills_nothing_and_uses_wgmma(what, capsys):
    rows = aot.report(f"test_block_decode:{what}")
    with capsys.disabled():
        print()
        aot.show(rows)
    for r in rows:
        assert r["shared"] <= aot.SHARED_LIMIT, r
        if r["dtype"] != "fp32":
            assert r["local"] == r["stack"] == 0, r
        if r["kernel"] == "window_kernel" and r["dtype"] != "fp32" and r["constants"]["M"] >= 64:
            assert r["wgmma"] > 0, r


# ------------------------------------------------------------------------------- bench.py --kernels

@pytest.mark.skipif(torch.cuda.is_available(), reason="would time the GPU")
def test_bench_kernels_runs_interpreted_and_refuses_a_machine_without_gpu(tmp_path):
    script = Path(__file__).parent.parent / "bench.py"
    bench = [sys.executable, script, "--kernels", f"--json={tmp_path}/rows.json"]

    def run(interpret):
        env = os.environ | dict(TRITON_INTERPRET=interpret, OMP_NUM_THREADS="1")
        return subprocess.run(bench, capture_output=True, text=True, env=env)

    done = run("1")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert len(rows) == 17 and not any("failed" in row for row in rows) and "WRONG" not in done.stdout
    assert all(row["output"] <= float(row["wanted"]) for row in rows if row["name"].startswith("check"))
    done = run("0")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "--kernels needs a GPU" in done.stderr
