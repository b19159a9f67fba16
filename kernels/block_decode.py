"""Decoding attention (method section 2): a window over a ragged KV cache and over itself, in one launch.

A query attends to its row's cache, to the window's causal tokens of index < `seen`, and to its own block.
Example: next, two draft tokens and a block of two places behind next alone (seen 1), another behind the whole
draft (seen 3):

            cached keys, cut into splits                 window keys
            [------ 0 ------|------ 1 ------]   n d d  a a  b b
    next    ################ ###############    #                       #  visited, no mask
    draft   ################ ###############    # #                     o  visited, masked by the rule
    draft   ################ ###############    # # #                   .  a masked place of a visited tile
    a       ################ ###############    # . .  # #
    a       ################ ###############    # . .  # #
    b       ################ ###############    # # #  . .  # #
    b       ################ ###############    # # #  . .  # #
            program 1        program 2          program 1, before its cached keys

All queries see all cached keys: of these tiles only the last one of a row is ever masked, where its length
ends. The rule is looked up for the window's own keys only, two tiles at most. The G query heads of a key head
are rows of one problem beside the W tokens: up to 128 rows fill the matrix unit together and each cached byte
is read once for all of them. That is why a window of 16 may cost what one token costs: a cached bfloat16 byte
is worth G W flops, and an H200 (989 TFLOP/s, 4.8 TB/s) computes 206 in the time one byte takes to arrive.

Few rows and a long cache would leave most of the chip idle: the cache is cut into `splits`, each split's
softmax is normalised on its own and kept with its log-sum-exp, and a second kernel joins them
(flash-decoding). Tokens are not committed here: the window's causal keys and values are written behind
`length`, and nothing else is.

The plain version: kv_cache.py's mask and PyTorch's attention (--attention=sdpa), and `reference` below.

Shapes: B rows, W window tokens (1 to 128), H query heads, Hkv key/value heads, G = H / Hkv, D head dimension
(to 128), S cache slots. Needs Triton; kv_cache.py imports it only where it runs, on CUDA or under
TRITON_INTERPRET=1.
"""
import functools
import math

import torch
import triton
import triton.language as tl

MAX_WINDOW, MAX_HEAD_DIM = 128, 128
MAX_SPLITS, SPLIT_KEYS = 128, 128   # most splits; fewest cached keys worth a program of their own
INTERPRETED = triton.knobs.runtime.interpret


@triton.jit
def multiply(a, b, acc, UPCAST: tl.constexpr):
    """acc + a b in float32; of float32 numbers by three products of the matrix unit's tf32 parts, as exact.
    Triton's interpreter multiplies bfloat16 wrongly: there the operands are cast."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="tf32x3")


@triton.jit
def attend_tile(q, k, v, may, acc, m, l, scale, SOME: tl.constexpr, UPCAST: tl.constexpr):
    """One key tile of the online softmax, in powers of two: q (M, D), k, v (N, D), may (1 or M, N) ->
    acc (M, D), maxima m, sums l (M,). SOME: there may be queries with no key yet; their weights are exactly 0
    and never NaN."""
    s = multiply(q, tl.trans(k), tl.zeros((q.shape[0], k.shape[0]), tl.float32), UPCAST)
    s = tl.where(may, s * scale, -float("inf"))
    new_m = tl.maximum(m, tl.max(s, 1))
    base = new_m
    if SOME:
        base = tl.where(new_m == -float("inf"), 0.0, new_m)
    p = tl.math.exp2(s - base[:, None])
    shrink = tl.math.exp2(m - base)
    return multiply(p.to(v.dtype), v, acc * shrink[:, None], UPCAST), new_m, l * shrink + tl.sum(p, 1)


@triton.jit(do_not_specialize=["W", "splits", "rule_b"])
def window_kernel(q, k, v, cache_k, cache_v, rule, out, lse, q_b, q_h, q_w, k_b, k_h, k_w, v_b, v_h, v_w,
                  ck_b, ck_h, ck_s, cv_b, cv_h, cv_s, rule_b, W, splits, scale, Hkv: tl.constexpr,
                  G: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, NW: tl.constexpr,
                  DP: tl.constexpr, PARTIAL: tl.constexpr, UPCAST: tl.constexpr):
    """Program (row tile, split, pair of batch row and key head): M of the pair's W * G queries over a split.

    PARTIAL: out is (B, Hkv, splits, W * G, D), float32, with lse (B, Hkv, splits, W * G) in powers of two;
    else out is (B, W, H, D) and final. DP is D padded to a power of two.
    """
    tile, split, pair = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = (pair // Hkv).to(tl.int64), pair % Hkv
    row, d, n = tile * M + tl.arange(0, M), tl.arange(0, DP), tl.arange(0, N)
    w, head = row // G, h * G + row % G                       # a token's G heads lie side by side
    real, dim = row < W * G, d < D
    elements = real[:, None] & dim
    q_tile = tl.load(q + b * q_b + head[:, None] * q_h + w[:, None] * q_w + d, mask=elements, other=0.0)
    rule += b * rule_b                                        # [length, causal tokens, seen (W), block (W)]
    length = tl.load(rule)
    ck, cv = cache_k + b * ck_b + h * ck_h + d, cache_v + b * cv_b + h * cv_h + d
    m, l = tl.full((M,), -float("inf"), tl.float32), tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, DP), tl.float32)

    # The window's own keys, by the split with the fewest cached ones: its causal ones go behind `length`.
    if split == 0:
        causal = tl.load(rule + 1)
        seen = tl.minimum(tl.load(rule + 2 + w, mask=real, other=0), causal)[:, None]
        block = tl.load(rule + 2 + W + w, mask=real, other=-1)[:, None]
        for start in range(0, W, NW):
            key = start + tl.arange(0, NW)
            key_block = tl.load(rule + 2 + W + key, mask=key < W, other=-1)
            used = ((key < causal) | (key_block >= 0))[:, None] & dim   # the rest is padding, and never read
            k_tile = tl.load(k + b * k_b + h * k_h + key[:, None] * k_w + d, mask=used, other=0.0)
            v_tile = tl.load(v + b * v_b + h * v_h + key[:, None] * v_w + d, mask=used, other=0.0)
            may = (key[None] < seen) | ((block >= 0) & (block == key_block[None]))
            acc, m, l = attend_tile(q_tile, k_tile, v_tile, may, acc, m, l, scale, True, UPCAST)
            at, keep = (length + key)[:, None], ((key < causal) & (tile == 0))[:, None] & dim
            tl.store(ck + at * ck_s, k_tile, mask=keep)
            tl.store(cv + at * cv_s, v_tile, mask=keep)

    # The cache: this split's tiles, pipelined; `length` ends inside the last one of all.
    tiles = tl.cdiv(length, N)
    end = tl.minimum(tiles * (split + 1) // splits * N, length)
    for start in range(tiles * split // splits * N, end, N):
        at, inside = start + n, start + n < end
        k_tile = tl.load(ck + at[:, None] * ck_s, mask=inside[:, None] & dim, other=0.0)
        v_tile = tl.load(cv + at[:, None] * cv_s, mask=inside[:, None] & dim, other=0.0)
        acc, m, l = attend_tile(q_tile, k_tile, v_tile, inside[None], acc, m, l, scale, False, UPCAST)

    l = tl.where(l == 0, 1.0, l)                              # no key in this split, or, for padding, none: 0
    acc = acc / l[:, None]
    if PARTIAL:
        part = (pair.to(tl.int64) * splits + split) * W * G
        tl.store(lse + part + row, m + tl.math.log2(l), mask=real)   # no key: m = -inf, weight 0
        out += part * D
        at = row
    else:
        out += b * W * Hkv * G * D
        at = w * Hkv * G + head
    tl.store(out + at[:, None] * D + d, acc, mask=elements)


@triton.jit(do_not_specialize=["W", "splits"])
def combine_kernel(part, lse, out, W, splits, Hkv: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
                   DP: tl.constexpr, N: tl.constexpr):
    """Program (row, pair): the softmax over all splits, their outputs weighted by 2^lse, N at a time."""
    row, pair = tl.program_id(0), tl.program_id(1)
    d, n = tl.arange(0, DP), tl.arange(0, N)
    part += pair.to(tl.int64) * splits * W * G * D
    lse += pair.to(tl.int64) * splits * W * G
    m, l, acc = -float("inf"), 0.0, tl.zeros((DP,), tl.float32)
    for start in range(0, splits, N):
        at = (start + n) * W * G + row
        s = tl.load(lse + at, mask=start + n < splits, other=-float("inf"))
        o = tl.load(part + at[:, None] * D + d, mask=(start + n < splits)[:, None] & (d < D), other=0.0)
        new_m = tl.maximum(m, tl.max(s, 0))
        base = tl.where(new_m == -float("inf"), 0.0, new_m)
        p, shrink = tl.math.exp2(s - base), tl.math.exp2(m - base)
        acc, l, m = acc * shrink + tl.sum(p[:, None] * o, 0), l * shrink + tl.sum(p, 0), new_m
    at = (((pair // Hkv).to(tl.int64) * W + row // G) * Hkv + pair % Hkv) * G + row % G     # of (B, W, H)
    tl.store(out + at * D + d, acc / tl.where(l == 0, 1.0, l), mask=d < D)


def tile_config(rows: int, D: int, dtype, shared: int) -> dict:
    """Rows M of a tile, cached keys N, warps, and stages of the key pipeline. The compiler's report chose
    them: no spills, and up to 64 rows two programs share a multiprocessor."""
    M = min(128, max(16, triton.next_power_of_2(rows)))
    if dtype == torch.float32:
        return dict(M=min(M, 32), N=32, num_warps=8, num_stages=2)
    if M == 128:                                              # two warp groups of 64 rows
        return dict(M=M, N=128 if shared >= 164 * 1024 else 32, num_warps=8, num_stages=2)
    return dict(M=M, N=64, num_warps=4, num_stages=3 if D > 16 else 2)


@functools.cache
def chip(device):
    """Multiprocessors, and bytes of shared memory that a program may have."""
    if device.type != "cuda":
        return 1, 227 * 1024
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, getattr(properties, "shared_memory_per_block_optin", 99 * 1024)


@functools.lru_cache(1024)
def choose_splits(problems: int, longest: int, at_once: int) -> int:
    """How many parts to cut a cache of `longest` keys into: `problems` programs a part, `at_once` together.

    The fewest whose last wave of programs leaves the chip about as full as the best number would.
    """
    counts = range(1, max(1, min(MAX_SPLITS, longest // SPLIT_KEYS)) + 1)
    filled = [problems * s / at_once / math.ceil(problems * s / at_once) for s in counts]
    return next(s for s, f in zip(counts, filled) if f >= 0.95 * max(filled))


def supports(window: int, head_dim: int) -> bool:
    return window <= MAX_WINDOW and head_dim <= MAX_HEAD_DIM


def block_decode(q, k, v, cache_k, cache_v, rule, longest: int, splits: int | None = None):
    """q (B, H, W, D), k, v (B, Hkv, W, D), cache_k, cache_v (B, Hkv, S, D), rule (B, 2 + 2 W) int32
    -> (B, H, W, D).

    rule[b] = [length, causal tokens, seen of each token, block of each token or -1]; longest: no row has a
    larger length; splits: default chosen for the device. Writes the causal keys and values behind `length`
    into the cache.
    """
    B, H, W, D = q.shape
    Hkv, G, DP = k.shape[1], H // k.shape[1], max(16, triton.next_power_of_2(D))
    processors, shared = chip(q.device)
    config = tile_config(W * G, D, q.dtype, shared)
    together = 1 if config["M"] == 128 else 2
    row_tiles = triton.cdiv(W * G, config["M"])
    splits = splits or choose_splits(row_tiles * B * Hkv, longest, together * processors)
    out = torch.empty((B, W, H, D), dtype=q.dtype, device=q.device)   # as the output projection reads it
    part = lse = out
    if splits > 1:
        part = torch.empty((B * Hkv, splits, W * G, D), dtype=torch.float32, device=q.device)
        lse = torch.empty(part.shape[:3], dtype=torch.float32, device=q.device)
    strides = [n for x in (q, k, v, cache_k, cache_v) for n in x.stride()[:3]]   # heads are contiguous inside
    scale, upcast = math.log2(math.e) / math.sqrt(D), INTERPRETED and q.dtype == torch.bfloat16
    with torch.cuda.device_of(q):                             # Triton launches on the current device
        window_kernel[row_tiles, splits, B * Hkv](
            q, k, v, cache_k, cache_v, rule, part, lse, *strides, rule.stride(0), W, splits, scale, Hkv, G, D,
            DP=DP, NW=32, PARTIAL=splits > 1, UPCAST=upcast, **config)
        if splits > 1:
            combine_kernel[W * G, B * Hkv](part, lse, out, W, splits, Hkv, G, D, DP, N=32)
    return out.transpose(1, 2)


def reference(q, k, v, cache_k, cache_v, rule):
    """The same in plain PyTorch, from the rule; what Triton's result is compared with."""
    B, H, W, D = q.shape
    slots, token = (torch.arange(n, device=q.device) for n in (cache_k.shape[2], W))
    length, causal, seen, block = rule[:, :1], rule[:, 1:2], rule[:, 2:2 + W], rule[:, 2 + W:]
    is_causal = token < causal                                                        # (B, W) of the keys
    may = is_causal[:, None] & (token < seen[..., None])                              # (B, W queries, W keys)
    may |= (block[..., None] >= 0) & (block[..., None] == block[:, None])
    may = torch.cat(((slots < length)[:, None].expand(-1, W, -1), may), -1)[:, None]  # (B, 1, W, S + W)
    G = H // k.shape[1]
    keys, values = (torch.cat(x, 2).repeat_interleave(G, 1) for x in ((cache_k, k), (cache_v, v)))
    scores = (q @ keys.transpose(-1, -2) / math.sqrt(D)).masked_fill(~may, -math.inf)
    out = scores.softmax(-1).nan_to_num(0.0) @ values         # a query without any key gives 0
    for b, (n, c) in enumerate(rule[:, :2].tolist()):
        cache_k[b, :, n:n + c], cache_v[b, :, n:n + c] = k[b, :, :c], v[b, :, :c]
    return out


def cost(rule, H: int, Hkv: int, D: int, width: int) -> dict:
    """What the rule makes necessary: its pairs' flops, 4 D a head, and bytes, `width` an element, moved once.

    read: queries, the cached keys and values, the window's own; write: the output; cache_write: the causal
    keys and values.
    """
    W = (rule.shape[1] - 2) // 2
    length, causal, seen, block = rule[:, :1], rule[:, 1:2], rule[:, 2:2 + W], rule[:, 2 + W:]
    own = ((block[..., None] >= 0) & (block[..., None] == block[:, None])).sum()
    pairs = int(W * length.sum() + torch.minimum(seen, causal).sum() + own)
    tokens, kept, cached = len(rule) * W, int(causal.sum()), int(length.sum())
    return dict(flops=4 * D * H * pairs, read=width * D * (H * tokens + 2 * Hkv * (tokens + cached)),
                write=width * D * H * tokens, cache_write=width * D * 2 * Hkv * kept)
