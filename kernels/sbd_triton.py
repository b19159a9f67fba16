"""SBD's training attention in Triton, forward and backward: the tiles that kernels/sbd_attention.py draws.

A program of `forward_kernel` or `dq_kernel` holds the queries of POS positions, clean and noisy, and walks
over the keys they see: first the clean tiles that all of them see whole, without a mask, then those on a
diagonal. A program of `dkdv_kernel` holds KEYS keys and walks over the queries that see them.
Probabilities are computed for dq and again for dk and dv, which makes 7 products an entry backward and not 5:
one program makes each sum, always in one order.

The plain version: kernels/sbd_attention.py's Chunked, the same function in PyTorch, which the CPU and types
without a kernel take. `python bench.py --kernels` compares the kernels with dense attention in float64.

Softmax is in powers of two, `scale` has log2(e) in it. BOUNDS (B, 4, L) are the intervals of each position.
Shapes: B batch, H query heads, G of them a key head, L length of a half, D head dimension, BLOCK_D the next
power of two.
"""
from __future__ import annotations   # triton's names in signatures, also where there is no triton

import functools
import math
import os

import torch
from torch.autograd.function import once_differentiable

try:
    import triton
    import triton.language as tl
    jit = functools.partial(triton.jit, do_not_specialize=["L"])   # one compilation for every L and k
except ImportError:   # PyTorch for the CPU comes without it
    triton, jit = None, lambda function: function

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"   # Triton then runs on the CPU, in Python

# Positions (a program has twice as many query rows) and keys of a tile, warps, stages of the pipeline.
# `hopper`, for 16 bits, is chosen by the compiler's report (tests/test_kernels_compile.py): no spills; the
# others fit 99 KB of shared memory.
CONFIGS = {"forward": dict(hopper=(64, 128, 8, 2), other=(32, 32, 4, 2), float32=(16, 32, 4, 2)),
           "dq": dict(hopper=(64, 64, 8, 2), other=(32, 32, 4, 2), float32=(16, 32, 4, 2)),
           "dkdv": dict(hopper=(32, 128, 8, 2), other=(16, 32, 4, 2), float32=(16, 32, 4, 2))}


@jit
def load_rows(base, row, stride, D, BLOCK_D):
    """Rows `row` of a matrix with D columns -> (rows, BLOCK_D), zeros from column D on."""
    col = tl.arange(0, BLOCK_D)
    at = base + (row[:, None] * stride + col[None])
    if D == BLOCK_D:
        tile = tl.load(at)
    else:
        tile = tl.load(at, mask=(col < D)[None], other=0.0)
    return tile


@jit
def store_rows(base, row, stride, tile, D, BLOCK_D, keep):
    col = tl.arange(0, BLOCK_D)
    mask = keep[:, None] & (col < D)[None]
    tl.store(base + (row[:, None] * stride + col[None]), tile.to(base.dtype.element_ty), mask=mask)


@jit
def dot(a, b, WIDEN):
    if WIDEN:   # the interpreter multiplies bfloat16 wrongly
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="tf32x3")


@jit
def query_tile(BOUNDS, start, L, POS, KEYS):
    """The 2 * POS query rows of the positions from `start` on in both halves, and the key tiles they see."""
    r = tl.arange(0, 2 * POS)
    is_noisy, keep = r >= POS, start + r % POS < L
    pos = tl.minimum(start + r % POS, L - 1)             # a row behind the end repeats the last, unstored
    row = pos + tl.where(is_noisy, L, 0)
    last = tl.minimum(start + POS, L) - 1
    low, middle = tl.load(BOUNDS + pos), tl.load(BOUNDS + L + pos)
    end = tl.where(is_noisy, middle, pos + 1)            # clean keys [low, end)
    own_end = tl.where(is_noisy, tl.load(BOUNDS + 2 * L + pos), 0)   # noisy keys [middle, own_end), if any
    first, near = tl.load(BOUNDS + start), tl.load(BOUNDS + L + start)
    one_document = tl.load(BOUNDS + last) == first
    edge = first + tl.where(one_document, (near - first) // KEYS * KEYS, 0)   # all see clean [first, edge)
    clean_tiles = tl.cdiv(last + 1 - edge, KEYS)
    tiles = clean_tiles + tl.cdiv(tl.load(BOUNDS + 2 * L + last) - near, KEYS)
    return row, keep, first, edge, tiles, (low, middle, end, own_end, near, clean_tiles)


@jit
def edge_tile(t, edge, ends, L, KEYS):
    """Masked tile t, of the clean keys from `edge` on and then of the noisy ones: rows of K, and which
    queries see them (2 * POS, KEYS)."""
    low, middle, end, own_end, near, clean_tiles = ends
    own = t >= clean_tiles
    key = tl.where(own, near + (t - clean_tiles) * KEYS, edge + t * KEYS) + tl.arange(0, KEYS)
    see = key[None] >= tl.where(own, middle, low)[:, None]
    see &= key[None] < tl.where(own, own_end, end)[:, None]
    return tl.minimum(key, L - 1) + tl.where(own, L, 0), see


@jit
def softmax_step(q, k, v, acc, m, total, see, scale, WIDEN):
    """One key tile of the running softmax: m is the largest score so far, total the sum of 2^(score - m)."""
    s = dot(q, tl.trans(k), WIDEN)
    if see is not None:
        s = tl.where(see, s, -float("inf"))
    new_m = tl.maximum(m, tl.max(s, 1) * scale)
    p = tl.exp2(s * scale - new_m[:, None])
    alpha = tl.exp2(m - new_m)
    return acc * alpha[:, None] + dot(p.to(v.dtype), v, WIDEN), new_m, total * alpha + tl.sum(p, 1)


@jit
def forward_kernel(Q, K, V, O, LSE, BOUNDS, scale, L, H, G, q_b, q_h, q_t, k_b, k_h, k_t, D: tl.constexpr,
                   BLOCK_D: tl.constexpr, POS: tl.constexpr, KEYS: tl.constexpr, WIDEN: tl.constexpr):
    """A program: POS positions, clean and noisy, of one query head. O, and LSE = log2 sum of 2^score."""
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * POS   # the longest rows first
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    K += b * k_b + h // G * k_h
    V += b * k_b + h // G * k_h
    row, keep, first, edge, tiles, ends = query_tile(BOUNDS + b * 4 * L, start, L, POS, KEYS)
    q = load_rows(Q + b * q_b + h * q_h, row, q_t, D, BLOCK_D)
    m = tl.full((2 * POS,), -3e38, tl.float32)                  # finite: no key seen yet gives 0, not NaN
    total, acc = tl.zeros((2 * POS,), tl.float32), tl.zeros((2 * POS, BLOCK_D), tl.float32)
    for n in tl.range(first, edge, KEYS, disable_licm=True):
        key = n + tl.arange(0, KEYS)
        k, v = load_rows(K, key, k_t, D, BLOCK_D), load_rows(V, key, k_t, D, BLOCK_D)
        acc, m, total = softmax_step(q, k, v, acc, m, total, None, scale, WIDEN)
    for t in tl.range(tiles, disable_licm=True):
        key, see = edge_tile(t, edge, ends, L, KEYS)
        k, v = load_rows(K, key, k_t, D, BLOCK_D), load_rows(V, key, k_t, D, BLOCK_D)
        acc, m, total = softmax_step(q, k, v, acc, m, total, see, scale, WIDEN)
    store_rows(O + b * q_b + h * q_h, row, q_t, acc / total[:, None], D, BLOCK_D, keep)
    tl.store(LSE + (b * H + h) * 2 * L + row, m + tl.log2(total), mask=keep)


@jit
def dq_step(q, k, v, do, lse, delta, see, scale, WIDEN):
    p = tl.exp2(dot(q, tl.trans(k), WIDEN) * scale - lse[:, None])
    if see is not None:
        p = tl.where(see, p, 0.0)
    ds = p * (dot(do, tl.trans(v), WIDEN) - delta[:, None])
    return dot(ds.to(k.dtype), k, WIDEN)


@jit
def dq_kernel(Q, K, V, O, DO, DQ, LSE, DELTA, BOUNDS, scale, L, H, G, q_b, q_h, q_t, k_b, k_h, k_t,
              D: tl.constexpr, BLOCK_D: tl.constexpr, POS: tl.constexpr, KEYS: tl.constexpr,
              WIDEN: tl.constexpr):
    """The same tiles as forward: DQ, and DELTA = rowsum(DO * O) for dkdv_kernel, which runs next."""
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * POS
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    K += b * k_b + h // G * k_h
    V += b * k_b + h // G * k_h
    at, stat = b * q_b + h * q_h, (b * H + h) * 2 * L
    row, keep, first, edge, tiles, ends = query_tile(BOUNDS + b * 4 * L, start, L, POS, KEYS)
    do = load_rows(DO + at, row, q_t, D, BLOCK_D)
    delta = tl.sum(do.to(tl.float32) * load_rows(O + at, row, q_t, D, BLOCK_D).to(tl.float32), 1)
    tl.store(DELTA + stat + row, delta, mask=keep)
    q, lse = load_rows(Q + at, row, q_t, D, BLOCK_D), tl.load(LSE + stat + row)
    acc = tl.zeros((2 * POS, BLOCK_D), tl.float32)
    for n in tl.range(first, edge, KEYS, disable_licm=True):
        key = n + tl.arange(0, KEYS)
        k, v = load_rows(K, key, k_t, D, BLOCK_D), load_rows(V, key, k_t, D, BLOCK_D)
        acc += dq_step(q, k, v, do, lse, delta, None, scale, WIDEN)
    for t in tl.range(tiles, disable_licm=True):
        key, see = edge_tile(t, edge, ends, L, KEYS)
        k, v = load_rows(K, key, k_t, D, BLOCK_D), load_rows(V, key, k_t, D, BLOCK_D)
        acc += dq_step(q, k, v, do, lse, delta, see, scale, WIDEN)
    store_rows(DQ + at, row, q_t, acc * (scale * 0.6931471805599453), D, BLOCK_D, keep)   # times ln 2


@jit
def dkdv_step(Q, DO, LSE, DELTA, BOUNDS, i, stop, key, own, k, v, dk, dv, scale, L, q_t, D, BLOCK_D, POS,
              MASKED, WIDEN):
    """What the queries at the positions [i, i + POS) of both halves add to a tile of keys. Scores are
    (KEYS, 2 * POS)."""
    r = tl.arange(0, 2 * POS)
    is_noisy, pos = r >= POS, i + r % POS
    if MASKED:
        pos = tl.minimum(pos, stop - 1)
    row = pos + tl.where(is_noisy, L, 0)
    q, do = load_rows(Q, row, q_t, D, BLOCK_D), load_rows(DO, row, q_t, D, BLOCK_D)
    p = tl.exp2(dot(k, tl.trans(q), WIDEN) * scale - tl.load(LSE + row)[None])
    if MASKED:
        middle = tl.load(BOUNDS + L + pos)
        low = tl.where(own, middle, tl.load(BOUNDS + pos))
        own_end = tl.where(is_noisy, tl.load(BOUNDS + 2 * L + pos), 0)
        end = tl.where(i + r % POS < stop, tl.where(own, own_end, tl.where(is_noisy, middle, pos + 1)), 0)
        p = tl.where((key[:, None] >= low[None]) & (key[:, None] < end[None]), p, 0.0)
    dv += dot(p.to(do.dtype), do, WIDEN)
    ds = p * (dot(v, tl.trans(do), WIDEN) - tl.load(DELTA + row)[None])
    dk += dot(ds.to(q.dtype), q, WIDEN)
    return dk, dv


@jit
def dkdv_kernel(Q, K, V, DO, DK, DV, LSE, DELTA, BOUNDS, scale, L, H, G, q_b, q_h, q_t, k_b, k_h, k_t,
                D: tl.constexpr, BLOCK_D: tl.constexpr, POS: tl.constexpr, KEYS: tl.constexpr,
                WIDEN: tl.constexpr):
    """A program: KEYS keys of one half and of one key head, against the queries of its G heads, in order."""
    half, Hkv = tl.num_programs(0) // 2, H // G
    own = tl.program_id(0) >= half                        # noisy keys, which few queries see, come last
    first = tl.program_id(0) % half * KEYS
    b, h = (tl.program_id(1) // Hkv).to(tl.int64), (tl.program_id(1) % Hkv).to(tl.int64)
    at = b * k_b + h * k_h
    BOUNDS += b * 4 * L
    key = first + tl.arange(0, KEYS)
    row, keep = tl.minimum(key, L - 1) + tl.where(own, L, 0), key < L
    k, v = load_rows(K + at, row, k_t, D, BLOCK_D), load_rows(V + at, row, k_t, D, BLOCK_D)
    dk, dv = tl.zeros((KEYS, BLOCK_D), tl.float32), tl.zeros((KEYS, BLOCK_D), tl.float32)
    # Positions [start, stop) hold all queries that see any of these keys; those of [clear, edge) see all of
    # them.
    last = tl.minimum(first + KEYS, L) - 1
    near = tl.load(BOUNDS + 2 * L + last)
    start = tl.where(own, tl.load(BOUNDS + L + first), first)
    stop = tl.where(own, near, tl.load(BOUNDS + 3 * L + last))
    split = own | (tl.load(BOUNDS + last) != tl.load(BOUNDS + first))
    clear = tl.minimum(start + tl.cdiv(tl.where(split, stop, near) - start, POS) * POS, stop)
    edge = clear + (stop - clear) // POS * POS
    near_tiles = tl.cdiv(clear - start, POS)
    tiles = near_tiles + tl.cdiv(stop - edge, POS)
    for g in tl.range(G, disable_licm=True):   # no invariants kept in registers, which are full
        q_at, stat = b * q_b + (h * G + g) * q_h, (b * H + h * G + g) * 2 * L
        for i in tl.range(clear, edge, POS, disable_licm=True):
            dk, dv = dkdv_step(Q + q_at, DO + q_at, LSE + stat, DELTA + stat, BOUNDS, i, stop, key, own,
                               k, v, dk, dv, scale, L, q_t, D, BLOCK_D, POS, False, WIDEN)
        for t in tl.range(tiles, num_stages=1, disable_licm=True):
            i = tl.where(t < near_tiles, start + t * POS, edge)
            dk, dv = dkdv_step(Q + q_at, DO + q_at, LSE + stat, DELTA + stat, BOUNDS, i, stop, key, own,
                               k, v, dk, dv, scale, L, q_t, D, BLOCK_D, POS, True, WIDEN)
    store_rows(DK + at, row, k_t, dk * (scale * 0.6931471805599453), D, BLOCK_D, keep)
    store_rows(DV + at, row, k_t, dv, D, BLOCK_D, keep)


def launch(kernel, name, q, k, *tensors):
    """One kernel over query tiles and query heads, or for dk and dv over key tiles and key heads."""
    (B, H, T, D), Hkv = q.shape, k.shape[1]
    other = q.is_cuda and torch.cuda.get_device_capability(q.device)[0] not in (9, 10)
    machine = "float32" if q.dtype == torch.float32 else "other" if other else "hopper"
    pos, keys, warps, stages = CONFIGS[name][machine]
    grid = (2 * triton.cdiv(T // 2, keys), B * Hkv) if name == "dkdv" else (triton.cdiv(T // 2, pos), B * H)
    with torch.cuda.device_of(q):
        kernel[grid](q, k, *tensors, D ** -0.5 * math.log2(math.e), T // 2, H, H // Hkv, *q.stride()[:3],
                     *k.stride()[:3], D=D, BLOCK_D=max(16, triton.next_power_of_2(D)), POS=pos, KEYS=keys,
                     WIDEN=INTERPRET, num_warps=warps, num_stages=stages)


def like(x, ref=None):
    """An empty tensor with the strides of x; of `ref` a copy, or itself where it has them already."""
    if ref is not None and ref.stride() == x.stride():
        return ref
    out = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return out if ref is None else out.copy_(ref)


def dense(x):
    """x, or a copy, such that `like` leaves no holes and row offsets fit 32 bits; (B, T, H, D) in memory will
    do."""
    no_holes = x.is_contiguous() or x.transpose(1, 2).is_contiguous()
    return x if no_holes and x.shape[2] * x.stride(2) < 2**31 else x.contiguous()


class Triton(torch.autograd.Function):
    """The kernels as one differentiable function; bounds (B, 4, L) int32: the intervals."""

    @staticmethod
    def forward(ctx, q, k, v, bounds):
        q, k = dense(q), dense(k)
        v = like(k, v)
        o = like(q)
        H, T = q.shape[1:3]
        lse = torch.empty_strided(q.shape[:3], (H * T, T, 1), dtype=torch.float32, device=q.device)
        launch(forward_kernel, "forward", q, k, v, o, lse, bounds)
        ctx.save_for_backward(q, k, v, o, lse, bounds)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, v, o, lse, bounds = ctx.saved_tensors
        do, dq, dk, dv, delta = like(q, do), like(q), like(k), like(k), like(lse)
        launch(dq_kernel, "dq", q, k, v, o, do, dq, lse, delta, bounds)
        launch(dkdv_kernel, "dkdv", q, k, v, do, dk, dv, lse, delta, bounds)
        return dq, dk, dv, None
