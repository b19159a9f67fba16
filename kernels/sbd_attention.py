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

That is L*L + O(kL) scores a head in place of 4*L*L, and nothing of size L*L is ever stored. Of packed
documents the tiles outside a query tile's own are not visited either; one in which a document begins
evaluates the mask everywhere. `cost` counts entries, flops, bytes and tiles.

The plain version: PyTorch's attention with the dense mask, sbd_loss.sbd_attention_mask; `python
kernels/check.py` compares the two. Here are the intervals, the choice of a backend, and two backends: PyTorch
chunk by chunk, which runs anywhere, and FlexAttention. The third, Triton, is kernels/sbd_triton.py.

Shapes: B batch, H query heads, Hkv key/value heads, G = H / Hkv, L length of a half, D head dimension,
k block.
"""
import functools
import math

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from kernels.sbd_triton import INTERPRET, Triton, triton

BACKENDS = ("auto", "triton", "flex", "sdpa")
CHUNK = 64   # positions a chunk: few enough to skip most of what is masked, enough to fill the cores


def intervals(length: int, block_size: int, doc_ids=None, device=None):
    """doc_start, block_start, block_end, doc_end of every position, each (1 or B, L), int64.

    Ends are exclusive. Positions and blocks restart with each document (a run of equal doc_ids); the last
    block may be short.
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
    """low, end, own_low, own_end, each (1 or B, 2L): a row may see [low, end) and [own_low, own_end)."""
    doc_start, block_start, block_end, _ = bounds
    L = doc_start.shape[1]
    i = torch.arange(L, device=doc_start.device).expand_as(doc_start)
    none = torch.full_like(i, 2 * L), torch.zeros_like(i)      # a clean row has no second interval
    return [torch.cat(x, 1) for x in ((doc_start, doc_start), (i + 1, block_start),
                                      (none[0], L + block_start), (none[1], L + block_end))]


def cost(B: int, H: int, Hkv: int, L: int, D: int, block_size: int, element_bytes=2, POS=64, KEYS=128):
    """What one layer's attention must do, without documents, and which tiles the forward kernel visits.

    entries: pairs that may attend, a head; flops: (forward, backward), 2 and 5 products of 2 * D an entry;
    bytes: the same, each tensor read or written once; unmasked, masked: tiles a head, of 2 * POS queries and
    KEYS keys.
    """
    blocks, rest = divmod(L, block_size)
    past = block_size**2 * blocks * (blocks - 1) // 2 + rest * blocks * block_size
    own = blocks * block_size**2 + rest**2
    entries = L * (L + 1) // 2 + past + own                    # clean; noisy on clean; noisy on noisy
    q, k = (2 * B * heads * L * D * element_bytes for heads in (H, Hkv))
    lse = 2 * B * H * L * 4                                    # bytes
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

    `backend`: "triton" (CUDA, or TRITON_INTERPRET=1), "flex" (FlexAttention; on the CPU forward only), "sdpa"
    (PyTorch, any device), or "auto": triton on CUDA, else sdpa. ValueError if it cannot be had, if 2L is odd
    or block_size < 1.
    """
    if q.shape[2] % 2:
        raise ValueError(f"sbd_attention: {q.shape[2]} queries: wanted an even number, [clean | noisy]")
    return sbd_attend(q.shape[2] // 2, block_size, doc_ids, q.device, backend)(q, k, v)


def check_backend(backend: str, device, training: bool):
    """ValueError, one line, if `backend` cannot be had on `device`."""
    kind, name = torch.device(device).type, f"attention backend {backend!r}"
    if backend not in BACKENDS:
        raise ValueError(f"{name}: wanted {', '.join(BACKENDS)}")
    if backend == "triton" and triton is None:
        raise ValueError(f"{name}: triton is not installed; use auto")
    if backend == "triton" and kind != "cuda" and not INTERPRET:
        raise ValueError(f"{name} needs a CUDA device, not {kind} (or TRITON_INTERPRET=1); use auto")
    if backend == "flex" and kind == "cpu" and training:
        raise ValueError(f"{name} cannot train on the CPU: FlexAttention has no backward there; use auto")


def sbd_attend(L: int, block_size: int, doc_ids=None, device=None, backend: str = "auto"):
    """attend(q, k, v) -> sbd_attention's output: what the layers of a forward share is computed once."""
    if block_size < 1:
        raise ValueError(f"block_size {block_size}: wanted at least 1")
    device = torch.device(device or "cpu")
    check_backend(backend, device, training=False)
    bounds = intervals(L, block_size, doc_ids, device)
    block_mask = functools.cache(lambda B: flex_mask(bounds, B))
    table = functools.cache(lambda B: torch.stack([x.expand(B, -1) for x in bounds], 1).int())   # (B, 4, L)
    chunks = functools.cache(lambda: Chunks(bounds, clean=True, noisy=True))
    use_triton = triton and (backend == "triton" or backend == "auto" and device.type == "cuda")

    def attend(q, k, v):
        if backend == "flex":
            training = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
            check_backend(backend, device, training)
            flex, gqa = flex_function(q.is_cuda), q.shape[1] != k.shape[1]
            return flex(q, k, v, block_mask=block_mask(len(q)), enable_gqa=gqa)
        if use_triton and q.shape[3] <= 128 and q.dtype in (torch.bfloat16, torch.float16, torch.float32):
            return Triton.apply(q, k, v, table(len(q)))
        return Chunked.apply(q, k, v, chunks())
    return attend


def causal_attend(L: int, doc_ids=None, device=None):
    """The NTP half alone: attend(q (B, H, L, D), k, v (B, Hkv, L, D)), causal within each document."""
    if doc_ids is None:
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True,
                                                              enable_gqa=q.shape[1] != k.shape[1])
    chunks = Chunks(intervals(L, 1, doc_ids, device), clean=True, noisy=False)
    return lambda q, k, v: Chunked.apply(q, k, v, chunks)


def noisy_attend(L: int, block_size: int, doc_ids=None, device=None, backend: str = "auto"):
    """The noisy half alone: attend(q (B, H, L, D), k, v (B, Hkv, 2L, D)), keys of [clean | noisy]."""
    if torch.device(device or "cpu").type == "cuda" or backend in ("triton", "flex"):
        both = sbd_attend(L, block_size, doc_ids, device, backend)   # its clean queries: nobody looks
        return lambda q, k, v: both(torch.cat((q.detach(), q), 2), k, v)[:, :, L:]
    chunks = Chunks(intervals(L, block_size, doc_ids, device), clean=False, noisy=True)
    return lambda q, k, v: Chunked.apply(q, k, v, chunks)


# -------------------------------------------------------------------------------------- PyTorch

class Chunks:
    """Chunks of positions of the clean half, the noisy one or both: rows, keys, and the mask between them.

    A chunk needs the clean keys up to its end and the noisy keys of its own blocks. Masks are made one at a
    time.
    """
    def __init__(self, bounds, clean: bool, noisy: bool):
        self.clean, self.noisy, self.bounds, L = clean, noisy, bounds, bounds[0].shape[1]
        doc_start, block_start, block_end, _ = bounds
        self.starts = list(range(0, L, CHUNK))
        self.ends = [min(s + CHUNK, L) for s in self.starts]
        last = [e - 1 for e in self.ends]
        self.low, self.own_low, self.own_end = torch.stack((   # host integers, in one transfer
            doc_start.amin(0)[self.starts], block_start.amin(0)[self.starts],
            block_end.amax(0)[last])).tolist()

    def __iter__(self):
        """-> rows and keys, slices of [clean | noisy], and mask (1 or B, rows, keys)."""
        L = self.bounds[0].shape[1]
        key = torch.arange(L, device=self.bounds[0].device)
        for s, e, low, own_low, own_end in zip(self.starts, self.ends, self.low, self.own_low, self.own_end):
            first, middle, end = (x[:, s:e, None] for x in self.bounds[:3])
            kc, kn = key[low:e], key[own_low:own_end]
            mask = (kc >= first) & (kc <= key[s:e, None])
            if not self.noisy:
                yield [slice(s, e)], [slice(low, e)], mask
                continue
            past, own = (kc >= first) & (kc < middle), (kn >= middle) & (kn < end)
            rows, keys = [slice(s, e)], [slice(low, e), slice(L + own_low, L + own_end)]
            noisy = torch.cat((past, own), 2)
            if self.clean:
                rows, clean = [slice(s, e), slice(L + s, L + e)], torch.cat((mask, torch.zeros_like(own)), 2)
                noisy = torch.cat((clean, noisy), 1)
            yield rows, keys, noisy


def take(x, slices, heads: int):
    """Slices of the third axis of x (B, heads * G, T, D) -> (B, heads, G * n, D): the G query heads of a key
    head become rows of one problem, keys and values are never expanded."""
    return torch.cat([x[:, :, s] for s in slices], 2).reshape(x.shape[0], heads, -1, x.shape[3])


def add(out, slices, x):
    """The inverse of take, added to out."""
    parts = x.reshape(*out.shape[:2], -1, out.shape[3]).split([s.stop - s.start for s in slices], 2)
    for s, part in zip(slices, parts):
        out[:, :, s] += part


class Chunked(torch.autograd.Function):
    """SDPA, chunk by chunk. Backward runs a chunk again, so that nothing of it is kept."""

    @staticmethod
    def pieces(q, k, v, chunks):
        """Each chunk's slices, leaf tensors for q, k and v, and output."""
        for rows, keys, mask in chunks:
            leaves = [take(x, s, k.shape[1]).detach().requires_grad_(torch.is_grad_enabled())
                      for x, s in ((q, rows), (k, keys), (v, keys))]
            mask = mask.repeat(1, leaves[0].shape[2] // mask.shape[1], 1)[:, None]   # the same for each head
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
        exact = torch.promote_types(q.dtype, torch.float32)
        dq, dk, dv = (torch.zeros_like(x, dtype=exact) for x in (q, k, v))
        with torch.enable_grad():
            for rows, keys, leaves, piece in Chunked.pieces(q, k, v, ctx.chunks):
                gradients = torch.autograd.grad(piece, leaves, take(do, rows, k.shape[1]))
                for total, slices, gradient in zip((dq, dk, dv), (rows, keys, keys), gradients):
                    add(total, slices, gradient)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


# ------------------------------------------------------------------------------- FlexAttention

def flex_mask(bounds, B: int, size: int = 128):
    """The same mask as a BlockMask, its tiles from the intervals: no (2L, 2L) table is evaluated to find
    them."""
    from torch.nn.attention.flex_attention import BlockMask
    low, end, own_low, own_end = (x.expand(B, -1).contiguous() for x in row_intervals(bounds))

    def may_attend(b, h, row, key):
        own = (key >= own_low[b, row]) & (key < own_end[b, row])
        return (key >= low[b, row]) & (key < end[b, row]) | own

    T = low.shape[1]
    n = -(-T // size)
    first = size * torch.arange(n, device=low.device)          # of key tiles
    last = (first + size).clamp(max=T)
    some = whole = torch.zeros(B, n, n, dtype=torch.bool, device=low.device)
    for a, z in ((low, end), (own_low, own_end)):
        a, z = (torch.cat((x, x[:, -1:].expand(-1, n * size - T)), 1).view(B, n, 1, size) for x in (a, z))
        some = some | (a.amin(-1) < last) & (z.amax(-1) > first)
        whole = whole | (a.amax(-1) <= first) & (z.amin(-1) >= last)
    tiles = []
    for x in some & ~whole, whole:                             # how many, and which: (B, 1, n), (B, 1, n, n)
        which = x.int().argsort(dim=-1, descending=True, stable=True)
        tiles += [x.sum(-1)[:, None].int(), which[:, None].int()]
    return BlockMask.from_kv_blocks(*tiles, BLOCK_SIZE=size, mask_mod=may_attend, seq_lengths=(T, T))


@functools.cache
def flex_function(compiled: bool):
    from torch.nn.attention.flex_attention import flex_attention
    return torch.compile(flex_attention) if compiled else flex_attention   # on the CPU dense, to compare with
