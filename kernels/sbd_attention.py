"""The attention of SBD training (Eq. 14, Fig. 8, Fig. 9) over the layout [clean | noisy], without its mask.

Every row of the (2L, 2L) mask is one or two key intervals. For a query at position i of its half:

    clean query:  clean keys [document start, i]
    noisy query:  clean keys [document start, block start)  and  noisy keys [block start, block end)

So of the mask's tiles, here 4 x 4 a quarter, these are visited:

                   clean keys     noisy keys
    clean queries  m . . .        . . . .       #  all may attend: no mask is evaluated
                   # m . .        . . . .       m  on a diagonal: a mask is evaluated
                   # # m .        . . . .       .  none may attend: never visited
                   # # # m        . . . .
    noisy queries  m . . .        m . . .       A clean and a noisy row of tiles at the same positions read
                   # m . .        . m . .       the same clean keys: one program computes both, and each key
                   # # m .        . . m .       tile is loaded once for the two.
                   # # # m        . . . m

That is L*L + O(kL) scores a head in place of 4*L*L, and nothing of size L*L is ever stored. Of packed documents the
tiles outside a query tile's own are not visited either; one in which a document begins evaluates the mask everywhere.
`cost` counts entries, flops, bytes and tiles: forward 2 products of 2*D flops an entry, backward 5. The kernels do
7: probabilities are computed for dq and again for dk, dv, so that one program makes each sum, always in one order.

Shapes: B batch, H query heads, Hkv key/value heads, G = H / Hkv, L length of a half, D head dimension, k block.

    python kernels/sbd_attention.py      the PyTorch path against SDPA with the dense mask: seconds and memory
"""
from __future__ import annotations   # triton's names in signatures, also where there is no triton

import functools
import math
import os
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

try:
    import triton
    import triton.language as tl
    jit = functools.partial(triton.jit, do_not_specialize=["L"])   # one compilation for every L; k is no argument at all
except ImportError:   # PyTorch for the CPU comes without it
    triton, jit = None, lambda function: function

BACKENDS = ("auto", "triton", "flex", "sdpa")
INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"   # Triton then runs on the CPU, in Python
CHUNK = 64   # positions a chunk of the PyTorch path: small enough to skip most of what is masked, large enough to fill the cores


def intervals(length: int, block_size: int, doc_ids=None, device=None):
    """doc_start, block_start, block_end, doc_end of every position, each (1 or B, L), int64. Ends are exclusive.

    Positions and blocks restart with each document (a run of equal doc_ids); the last block may be short.
    """
    i = torch.arange(length, device=device)[None]                               # (1, L)
    if doc_ids is None:
        doc_start, doc_end = torch.zeros_like(i), torch.full_like(i, length)
    else:
        first = torch.ones_like(doc_ids, dtype=torch.bool)
        first[:, 1:] = doc_ids[:, 1:] != doc_ids[:, :-1]
        doc_start = torch.where(first, i, 0).cummax(1).values
        last = first.roll(-1, 1)
        last[:, -1] = True
        doc_end = torch.where(last, i + 1, length).flip(1).cummin(1).values.flip(1)
    block_start = i - (i - doc_start) % block_size
    return doc_start, block_start, torch.minimum(block_start + block_size, doc_end), doc_end


def row_intervals(bounds):
    """low, end, own_low, own_end, each (1 or B, 2L): row r may attend to keys [low, end) and [own_low, own_end) of 2L."""
    doc_start, block_start, block_end, _ = bounds
    L = doc_start.shape[1]
    i = torch.arange(L, device=doc_start.device).expand_as(doc_start)
    return [torch.cat(x, 1) for x in ((doc_start, doc_start), (i + 1, block_start),
                                      (torch.full_like(i, 2 * L), L + block_start), (torch.zeros_like(i), L + block_end))]


def cost(B: int, H: int, Hkv: int, L: int, D: int, block_size: int, element_bytes=2, POS=64, KEYS=128):
    """What one layer's attention must do, without documents, and which tiles the forward kernel visits.

    entries: pairs that may attend, a head; flops, bytes: (forward, backward), each tensor read or written once;
    unmasked, masked: tiles a head, of 2 * POS queries and KEYS keys.
    """
    blocks, rest = divmod(L, block_size)
    past = block_size**2 * blocks * (blocks - 1) // 2 + rest * blocks * block_size
    entries = L * (L + 1) // 2 + past + blocks * block_size**2 + rest**2      # clean; noisy on clean; noisy on noisy
    q, k, lse = 2 * B * H * L * D * element_bytes, 2 * B * Hkv * L * D * element_bytes, 2 * B * H * L * 4   # bytes
    unmasked = masked = 0
    for start in range(0, L, POS):
        near, stop = start - start % block_size, min(start + POS, L)
        block_end = min((stop - 1) // block_size * block_size + block_size, L)
        unmasked += near // KEYS
        masked += math.ceil((stop - near // KEYS * KEYS) / KEYS) + math.ceil((block_end - near) / KEYS)
    return dict(entries=entries, flops=(4 * D * B * H * entries, 10 * D * B * H * entries),
                bytes=(2 * q + 2 * k + lse, 4 * q + 4 * k + lse), unmasked=unmasked, masked=masked)


# ------------------------------------------------------------------------------------- dispatch

def sbd_attention(q, k, v, block_size: int, doc_ids=None, backend: str = "auto"):
    """q (B, H, 2L, D), k, v (B, Hkv, 2L, D), doc_ids (B, L) or None -> (B, H, 2L, D), differentiable.

    `backend`: "triton" (CUDA, or TRITON_INTERPRET=1), "flex" (FlexAttention; on the CPU forward only), "sdpa" (PyTorch,
    any device), or "auto": triton on CUDA, else sdpa. ValueError if it cannot be had, if 2L is odd or block_size < 1.
    """
    if q.shape[2] % 2:
        raise ValueError(f"sbd_attention: {q.shape[2]} queries: wanted an even number, [clean | noisy]")
    return sbd_attend(q.shape[2] // 2, block_size, doc_ids, q.device, backend)(q, k, v)


def check_backend(backend: str, device, training: bool):
    """ValueError, one line, if `backend` cannot be had on `device`."""
    kind = torch.device(device).type
    if backend not in BACKENDS:
        raise ValueError(f"attention backend {backend!r}: wanted {', '.join(BACKENDS)}")
    if backend == "triton" and triton is None:
        raise ValueError("attention backend 'triton': triton is not installed; use auto")
    if backend == "triton" and kind != "cuda" and not INTERPRET:
        raise ValueError(f"attention backend 'triton' needs a CUDA device, not {kind} (or TRITON_INTERPRET=1); use auto")
    if backend == "flex" and kind == "cpu" and training:
        raise ValueError("attention backend 'flex' cannot train on the CPU: FlexAttention has no backward there; use auto")


def sbd_attend(L: int, block_size: int, doc_ids=None, device=None, backend: str = "auto"):
    """attend(q, k, v) -> sbd_attention's output, for all layers of a forward: what they share is computed once."""
    if block_size < 1:
        raise ValueError(f"block_size {block_size}: wanted at least 1")
    device = torch.device(device or "cpu")
    check_backend(backend, device, training=False)
    bounds = intervals(L, block_size, doc_ids, device)
    block_mask = functools.cache(lambda B: flex_mask(bounds, B))
    table = functools.cache(lambda B: torch.stack([x.expand(B, -1) for x in bounds], 1).int())   # (B, 4, L)
    chunks = functools.cache(lambda: Chunks(bounds, noisy=True))
    use_triton = triton and (backend == "triton" or backend == "auto" and device.type == "cuda")

    def attend(q, k, v):
        if backend == "flex":
            check_backend(backend, device, torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)))
            return flex_function(q.is_cuda)(q, k, v, block_mask=block_mask(len(q)), enable_gqa=q.shape[1] != k.shape[1])
        if use_triton and q.shape[3] <= 128 and q.dtype in (torch.bfloat16, torch.float16, torch.float32):
            return Triton.apply(q, k, v, table(len(q)))
        return Chunked.apply(q, k, v, chunks())
    return attend


def causal_attend(L: int, doc_ids=None, device=None):
    """The NTP half alone: attend(q (B, H, L, D), k, v (B, Hkv, L, D)), causal within each document."""
    if doc_ids is None:
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    chunks = Chunks(intervals(L, 1, doc_ids, device), noisy=False)
    return lambda q, k, v: Chunked.apply(q, k, v, chunks)


# -------------------------------------------------------------------------------------- PyTorch

class Chunks:
    """Chunks of positions, of both halves if `noisy`: which rows, which keys, and the mask between them.

    A chunk needs the clean keys up to its end and the noisy keys of its own blocks. Masks are made one at a time.
    """
    def __init__(self, bounds, noisy: bool):
        self.noisy, self.bounds, L = noisy, bounds, bounds[0].shape[1]
        doc_start, block_start, block_end, _ = bounds
        self.starts = list(range(0, L, CHUNK))
        self.ends = [min(s + CHUNK, L) for s in self.starts]
        last = [e - 1 for e in self.ends]
        self.low, self.own_low, self.own_end = torch.stack((                  # host integers, in one transfer
            doc_start.amin(0)[self.starts], block_start.amin(0)[self.starts], block_end.amax(0)[last])).tolist()

    def __iter__(self):
        """-> rows and keys, slices of [clean | noisy], and mask (1 or B, rows, keys)."""
        L, key = self.bounds[0].shape[1], torch.arange(self.bounds[0].shape[1], device=self.bounds[0].device)
        for s, e, low, own_low, own_end in zip(self.starts, self.ends, self.low, self.own_low, self.own_end):
            first, middle, end = (x[:, s:e, None] for x in self.bounds[:3])
            kc, kn = key[low:e], key[own_low:own_end]
            mask = (kc >= first) & (kc <= key[s:e, None])
            if not self.noisy:
                yield [slice(s, e)], [slice(low, e)], mask
                continue
            own = (kn >= middle) & (kn < end)
            mask = torch.cat((torch.cat((mask, torch.zeros_like(own)), 2), torch.cat(((kc >= first) & (kc < middle), own), 2)), 1)
            yield [slice(s, e), slice(L + s, L + e)], [slice(low, e), slice(L + own_low, L + own_end)], mask


def take(x, slices, heads: int):
    """Slices of the third axis of x (B, heads * G, T, D) -> (B, heads, G * n, D): the G query heads of a key head become
    rows of one problem, keys and values are never expanded."""
    return torch.cat([x[:, :, s] for s in slices], 2).reshape(x.shape[0], heads, -1, x.shape[3])


def add(out, slices, x):
    """The inverse of take, added to out."""
    parts = x.reshape(*out.shape[:2], -1, out.shape[3]).split([s.stop - s.start for s in slices], 2)
    for s, part in zip(slices, parts):
        out[:, :, s] += part


class Chunked(torch.autograd.Function):
    """The reference: SDPA, chunk by chunk. Backward runs a chunk again, so that nothing of it is kept."""

    @staticmethod
    def pieces(q, k, v, chunks):
        """Each chunk's slices, leaf tensors for q, k and v, and output."""
        for rows, keys, mask in chunks:
            leaves = [take(x, s, k.shape[1]).detach().requires_grad_(torch.is_grad_enabled())
                      for x, s in ((q, rows), (k, keys), (v, keys))]
            mask = mask.repeat(1, leaves[0].shape[2] // mask.shape[1], 1)[:, None]       # the same for each head
            yield rows, keys, leaves, F.scaled_dot_product_attention(*leaves, attn_mask=mask)

    @staticmethod
    def forward(ctx, q, k, v, chunks):
        ctx.save_for_backward(q, k, v)
        ctx.chunks, out = chunks, torch.zeros_like(q)
        with torch.autocast(q.device.type, enabled=False):
            for rows, _, _, piece in Chunked.pieces(q, k, v, chunks):
                add(out, rows, piece)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, v = ctx.saved_tensors
        dq, dk, dv = (torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
        with torch.enable_grad():
            for rows, keys, leaves, piece in Chunked.pieces(q, k, v, ctx.chunks):
                gradients = torch.autograd.grad(piece, leaves, take(do, rows, k.shape[1]))
                for total, slices, gradient in zip((dq, dk, dv), (rows, keys, keys), gradients):
                    add(total, slices, gradient)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


# ------------------------------------------------------------------------------- FlexAttention

def flex_mask(bounds, B: int, size: int = 128):
    """The same mask as a BlockMask, its tiles from the intervals: no (2L, 2L) table is evaluated to find them."""
    from torch.nn.attention.flex_attention import BlockMask
    low, end, own_low, own_end = (x.expand(B, -1).contiguous() for x in row_intervals(bounds))

    def may_attend(b, h, row, key):
        return (key >= low[b, row]) & (key < end[b, row]) | (key >= own_low[b, row]) & (key < own_end[b, row])

    T = low.shape[1]
    n = -(-T // size)
    first = size * torch.arange(n, device=low.device)                                                 # of key tiles
    last = (first + size).clamp(max=T)
    some = whole = torch.zeros(B, n, n, dtype=torch.bool, device=low.device)
    for a, z in ((low, end), (own_low, own_end)):
        a, z = (torch.cat((x, x[:, -1:].expand(-1, n * size - T)), 1).view(B, n, 1, size) for x in (a, z))
        some = some | (a.amin(-1) < last) & (z.amax(-1) > first)
        whole = whole | (a.amax(-1) <= first) & (z.amin(-1) >= last)
    tiles = [f(x)[:, None].int() for x in (some & ~whole, whole)                                      # (B, 1, n), (B, 1, n, n)
             for f in (lambda x: x.sum(-1), lambda x: x.int().argsort(dim=-1, descending=True, stable=True))]
    return BlockMask.from_kv_blocks(*tiles, BLOCK_SIZE=size, mask_mod=may_attend, seq_lengths=(T, T))


@functools.cache
def flex_function(compiled: bool):
    from torch.nn.attention.flex_attention import flex_attention
    return torch.compile(flex_attention) if compiled else flex_attention   # on the CPU a dense one, to compare with


# --------------------------------------------------------------------------------------- Triton

# Positions (a program has twice as many query rows) and keys of a tile, warps, stages of the pipeline. `hopper`, for 16 bits,
# is chosen by the compiler's report (tests/test_kernels_compile.py): no spills; the others fit 99 KB of shared memory.
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
    tl.store(base + (row[:, None] * stride + col[None]), tile.to(base.dtype.element_ty), mask=keep[:, None] & (col < D)[None])


@jit
def dot(a, b, WIDEN):
    if WIDEN:   # the interpreter multiplies bfloat16 wrongly
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="tf32x3")


@jit
def query_tile(BOUNDS, start, L, POS, KEYS):
    """The 2 * POS query rows of the positions from `start` on in both halves, and which key tiles they see."""
    r = tl.arange(0, 2 * POS)
    is_noisy, keep = r >= POS, start + r % POS < L
    pos = tl.minimum(start + r % POS, L - 1)             # a row behind the end repeats the last one, and is not stored
    row = pos + tl.where(is_noisy, L, 0)
    last = tl.minimum(start + POS, L) - 1
    low, middle = tl.load(BOUNDS + pos), tl.load(BOUNDS + L + pos)
    end = tl.where(is_noisy, middle, pos + 1)                                 # clean keys [low, end)
    own_end = tl.where(is_noisy, tl.load(BOUNDS + 2 * L + pos), 0)            # noisy keys [middle, own_end), if any
    first, near = tl.load(BOUNDS + start), tl.load(BOUNDS + L + start)
    one_document = tl.load(BOUNDS + last) == first
    edge = first + tl.where(one_document, (near - first) // KEYS * KEYS, 0)   # all see the clean keys [first, edge)
    clean_tiles = tl.cdiv(last + 1 - edge, KEYS)
    tiles = clean_tiles + tl.cdiv(tl.load(BOUNDS + 2 * L + last) - near, KEYS)
    return row, keep, first, edge, tiles, (low, middle, end, own_end, near, clean_tiles)


@jit
def edge_tile(t, edge, ends, L, KEYS):
    """Masked tile t, of the clean keys from `edge` on and then of the noisy ones: rows of K, may attend (2 * POS, KEYS)."""
    low, middle, end, own_end, near, clean_tiles = ends
    own = t >= clean_tiles
    key = tl.where(own, near + (t - clean_tiles) * KEYS, edge + t * KEYS) + tl.arange(0, KEYS)
    see = (key[None] >= tl.where(own, middle, low)[:, None]) & (key[None] < tl.where(own, own_end, end)[:, None])
    return tl.minimum(key, L - 1) + tl.where(own, L, 0), see


@jit
def softmax_step(q, k, v, acc, m, total, see, scale, WIDEN):
    """One key tile of the running softmax, base 2: m is the largest score so far, total the sum of 2^(score - m)."""
    s = dot(q, tl.trans(k), WIDEN)
    if see is not None:
        s = tl.where(see, s, -float("inf"))
    new_m = tl.maximum(m, tl.max(s, 1) * scale)
    p = tl.exp2(s * scale - new_m[:, None])
    alpha = tl.exp2(m - new_m)
    return acc * alpha[:, None] + dot(p.to(v.dtype), v, WIDEN), new_m, total * alpha + tl.sum(p, 1)


@jit
def forward_kernel(Q, K, V, O, LSE, BOUNDS, scale, L, H, G, q_b, q_h, q_t, k_b, k_h, k_t,
                   D: tl.constexpr, BLOCK_D: tl.constexpr, POS: tl.constexpr, KEYS: tl.constexpr, WIDEN: tl.constexpr):
    """A program: POS positions, clean and noisy, of one query head. O, and LSE = log2 sum of 2^score."""
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * POS                 # the longest rows first
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    K += b * k_b + h // G * k_h
    V += b * k_b + h // G * k_h
    row, keep, first, edge, tiles, ends = query_tile(BOUNDS + b * 4 * L, start, L, POS, KEYS)
    q = load_rows(Q + b * q_b + h * q_h, row, q_t, D, BLOCK_D)
    m = tl.full((2 * POS,), -3e38, tl.float32)                                # finite: no key seen yet gives 0, not NaN
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
              D: tl.constexpr, BLOCK_D: tl.constexpr, POS: tl.constexpr, KEYS: tl.constexpr, WIDEN: tl.constexpr):
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
    store_rows(DQ + at, row, q_t, acc * (scale * 0.6931471805599453), D, BLOCK_D, keep)   # scale has log2(e): times ln 2


@jit
def dkdv_step(Q, DO, LSE, DELTA, BOUNDS, i, stop, key, own, k, v, dk, dv, scale, L, q_t, D, BLOCK_D, POS, MASKED, WIDEN):
    """What the queries at the positions [i, i + POS) of both halves add to a tile of keys. Scores are (KEYS, 2 * POS)."""
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
                D: tl.constexpr, BLOCK_D: tl.constexpr, POS: tl.constexpr, KEYS: tl.constexpr, WIDEN: tl.constexpr):
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
    # Positions [start, stop) hold all queries that see any of these keys; those of [clear, edge) see all of them.
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
            dk, dv = dkdv_step(Q + q_at, DO + q_at, LSE + stat, DELTA + stat, BOUNDS, i, stop, key, own, k, v, dk, dv,
                               scale, L, q_t, D, BLOCK_D, POS, False, WIDEN)
        for t in tl.range(tiles, num_stages=1, disable_licm=True):
            i = tl.where(t < near_tiles, start + t * POS, edge)
            dk, dv = dkdv_step(Q + q_at, DO + q_at, LSE + stat, DELTA + stat, BOUNDS, i, stop, key, own, k, v, dk, dv,
                               scale, L, q_t, D, BLOCK_D, POS, True, WIDEN)
    store_rows(DK + at, row, k_t, dk * (scale * 0.6931471805599453), D, BLOCK_D, keep)
    store_rows(DV + at, row, k_t, dv, D, BLOCK_D, keep)


def launch(kernel, name, q, k, *tensors):
    """One kernel over query tiles and query heads, or for dk and dv over both halves' key tiles and the key heads."""
    (B, H, T, D), Hkv = q.shape, k.shape[1]
    other = q.is_cuda and torch.cuda.get_device_capability(q.device)[0] not in (9, 10)
    pos, keys, warps, stages = CONFIGS[name]["float32" if q.dtype == torch.float32 else "other" if other else "hopper"]
    grid = (2 * triton.cdiv(T // 2, keys), B * Hkv) if name == "dkdv" else (triton.cdiv(T // 2, pos), B * H)
    with torch.cuda.device_of(q):
        kernel[grid](q, k, *tensors, D ** -0.5 * math.log2(math.e), T // 2, H, H // Hkv, *q.stride()[:3], *k.stride()[:3],
                     D=D, BLOCK_D=max(16, triton.next_power_of_2(D)), POS=pos, KEYS=keys, WIDEN=INTERPRET,
                     num_warps=warps, num_stages=stages)


def like(x, ref=None):
    """An empty tensor with the strides of x, or `ref` itself where it has them already, else a copy that does."""
    if ref is not None and ref.stride() == x.stride():
        return ref
    out = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return out if ref is None else out.copy_(ref)


def dense(x):
    """x, or a copy, such that `like` leaves no holes and row offsets fit 32 bits; (B, T, H, D) in memory is fine."""
    return x if (x.is_contiguous() or x.transpose(1, 2).is_contiguous()) and x.shape[2] * x.stride(2) < 2**31 else x.contiguous()


class Triton(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, bounds):
        """bounds (B, 4, L) int32: the intervals."""
        q, k = dense(q), dense(k)
        v = like(k, v)
        o = like(q)
        lse = torch.empty_strided(q.shape[:3], (q.shape[1] * q.shape[2], q.shape[2], 1), dtype=torch.float32, device=q.device)
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


# ------------------------------------------------------------------------- `python kernels/sbd_attention.py`

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
