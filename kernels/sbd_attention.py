"""The attention of SBD training (Eq. 14, Fig. 8, Fig. 9) over the layout [clean | noisy], without its mask.

Every row of the (2L, 2L) mask is one or two key intervals. For a query at position i of its half:

    clean query:  clean keys [document start, i]
    noisy query:  clean keys [document start, block start)  and  noisy keys [block start, block end)

                     clean keys      noisy keys
    clean queries    causal          -
    noisy queries    earlier blocks  own block

so a chunk of positions, taken from both halves at once, needs the clean keys up to its end and the noisy
keys of its own blocks: about L*L scores a head instead of 4*L*L, and no mask larger than a chunk.

Shapes: B batch, H query heads, Hkv key/value heads, G = H / Hkv, L length of a half, D head dimension.
"""
import torch
import torch.nn.functional as F

CHUNK = 128   # positions a chunk: small enough to skip most of what is masked, large enough to fill the cores


def intervals(length: int, block_size: int, doc_ids=None, device=None):
    """doc_start, block_start, block_end of every position, each (1 or B, L), int64. block_end is exclusive.

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
    return doc_start, block_start, torch.minimum(block_start + block_size, doc_end)


def sbd_attention(q, k, v, block_size: int, doc_ids=None, backend: str = "auto"):
    """q (B, H, 2L, D), k, v (B, Hkv, 2L, D), doc_ids (B, L) or None -> (B, H, 2L, D), differentiable.

    `backend`: "sdpa", or "auto", the best there is for the device (today: sdpa everywhere).
    """
    if backend not in ("auto", "sdpa"):
        raise ValueError(f"attention backend {backend!r}: wanted auto or sdpa")
    return chunked_attention(q, k, v, intervals(q.shape[2] // 2, block_size, doc_ids, q.device), noisy=True)


def packed_causal_attention(q, k, v, doc_ids=None):
    """The NTP half alone: q (B, H, L, D), k, v (B, Hkv, L, D); causal within each document."""
    if doc_ids is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return chunked_attention(q, k, v, intervals(q.shape[2], 1, doc_ids, q.device), noisy=False)


def chunked_attention(q, k, v, bounds, noisy: bool):
    B, H, T, D = q.shape
    Hkv = k.shape[1]
    L = bounds[0].shape[1]
    doc_start, block_start, block_end = bounds
    # First clean key that any row of a chunk can see, and the noisy keys its blocks span: host integers.
    starts = range(0, L, CHUNK)
    ends = [min(s + CHUNK, L) for s in starts]
    lo = doc_start.amin(0)[torch.tensor(starts)].tolist()
    noisy_lo, noisy_hi = block_start.amin(0)[torch.tensor(starts)].tolist(), block_end.amax(0)[torch.tensor(ends) - 1].tolist()
    clean_out, noisy_out = [], []
    key = torch.arange(L, device=q.device)
    for c, (s, e) in enumerate(zip(starts, ends)):
        kc = key[lo[c]:e]                                                        # clean keys of this chunk
        i, first, middle, last = (t[..., None] for t in (key[None, s:e], doc_start[:, s:e], block_start[:, s:e], block_end[:, s:e]))
        mask = (kc >= first) & (kc <= i)                                         # (1 or B, c, clean keys)
        rows, keys, values = [q[:, :, s:e]], [k[:, :, lo[c]:e]], [v[:, :, lo[c]:e]]
        if noisy:
            kn = key[noisy_lo[c]:noisy_hi[c]]
            own = (kn >= middle) & (kn < last)                                   # (1 or B, c, noisy keys)
            mask = torch.cat((torch.cat((mask, torch.zeros_like(own)), -1),
                              torch.cat(((kc >= first) & (kc < middle), own), -1)), -2)
            rows.append(q[:, :, L + s:L + e])
            keys.append(k[:, :, L + noisy_lo[c]:L + noisy_hi[c]])
            values.append(v[:, :, L + noisy_lo[c]:L + noisy_hi[c]])
        # The G query heads of a key head become rows of one problem: keys and values are never expanded.
        rows = torch.cat(rows, 2)                                                # (B, H, R, D)
        R = rows.shape[2]
        out = F.scaled_dot_product_attention(rows.reshape(B, Hkv, -1, D), torch.cat(keys, 2), torch.cat(values, 2),
                                             attn_mask=mask.repeat(1, H // Hkv, 1)[:, None])
        out = out.view(B, H, R, D)
        clean_out.append(out[:, :, :e - s])
        noisy_out.append(out[:, :, e - s:])
    return torch.cat(clean_out + noisy_out, 2)
