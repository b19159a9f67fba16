"""The exact cache (Algorithm 3, Fig. 2b), and the one rule of every decoding window (Fig. 3, Fig. 10).

A forward runs a window of new tokens behind the cached ones. Each window token attends to its row's cache, to the
window's causal tokens of index < `seen`, and, if it has a block, to all tokens of that block; nothing outside a
block attends to it:

    token                                          seen    block    position
    causal token j                                 j + 1   none     length + j
    place i of a block behind `a` causal tokens    a       its own  length + a + i

Keys and values of the whole window are written behind `lengths`; `commit` decides how many of the causal ones stay,
and the next forward overwrites the rest (kernels/block_decode.py writes the causal ones only). So keys computed inside a
bidirectional block are never kept.

`run_window` runs a window's forward; on CUDA, generate.py --compile makes it the replay of a CUDA graph.

Shapes: B rows, W window tokens, S cache slots, H query heads, Hkv key/value heads, G = H / Hkv, D head dimension.
"""
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F


def decode_kernel(attention: str, device, dtype):
    """What attends to the cache: the module kernels.block_decode (Triton), or None: PyTorch. "auto" takes Triton on CUDA.

    ValueError, one line, where "triton" cannot run.
    """
    if attention not in ("auto", "triton", "sdpa"):
        raise ValueError(f"attention {attention!r}: wanted auto, triton or sdpa")
    on_gpu, known = torch.device(device).type == "cuda", dtype in (torch.bfloat16, torch.float16, torch.float32)
    if attention == "sdpa" or attention == "auto" and not (on_gpu and known):
        return None
    try:
        from kernels import block_decode   # only here: a CPU has no Triton
    except ImportError:
        if attention == "auto":
            return None
        raise ValueError("attention triton: Triton is not installed (pip install triton), take sdpa") from None
    if not known:
        raise ValueError(f"attention triton: no kernel for {dtype}, take sdpa")
    if not (on_gpu or block_decode.INTERPRETED):
        raise ValueError("attention triton: needs a GPU, take sdpa (TRITON_INTERPRET=1 runs it on the CPU, slowly)")
    return block_decode


class KVCache:
    """Keys and values (layers, B, Hkv, S, D), allocated once, and `lengths` (B,) int64: the tokens each row keeps.

    S = max_len: the longest text plus one window of scratch. A window that does not fit raises ValueError.
    attention: what attends to it, as in decode_kernel.
    """

    def __init__(self, config, batch_size: int, max_len: int, device="cpu", dtype=torch.float32, attention="auto"):
        self.kernel = decode_kernel(attention, device, dtype)
        shape = (config.num_hidden_layers, batch_size, config.num_key_value_heads, max_len, config.head_dim)
        self.k = torch.zeros(shape, device=device, dtype=dtype)
        self.v = torch.zeros(shape, device=device, dtype=dtype)
        self.whole = self.k, self.v                                 # also the rows that `keep` dropped
        self.lengths = torch.zeros(batch_size, dtype=torch.int64)   # on the host, where it decides shapes
        self.group = config.num_attention_heads // config.num_key_value_heads
        self.graphs, self.pool, self.made_for = {}, torch.cuda.graph_pool_handle() if self.k.is_cuda else None, None   # below

    def commit(self, n) -> None:
        """Keep the first n (B,) causal tokens of the last window."""
        n = np.array(n.tolist() if isinstance(n, torch.Tensor) else n, np.int64)   # on the host, as `lengths` is
        lengths = self.lengths.numpy()
        if n.shape != lengths.shape or n.min(initial=0) < 0 or (lengths + n).max(initial=0) > self.k.shape[3]:
            raise ValueError(f"cannot commit {n.tolist()} tokens to rows of {lengths.tolist()} in a cache of {self.k.shape[3]}")
        self.lengths = torch.from_numpy(lengths + n)

    def keep(self, rows: list) -> None:
        """Drop all rows but these, in ascending order; one layer is copied at a time."""
        for layer in range(len(self.k)):
            self.k[layer, :len(rows)] = self.k[layer, rows]
            self.v[layer, :len(rows)] = self.v[layer, rows]
        self.k, self.v, self.lengths = self.k[:, :len(rows)], self.v[:, :len(rows)], self.lengths[rows]


@dataclass
class Window:
    positions: torch.Tensor         # (B, W)
    slots: torch.Tensor | slice     # where in the cache the tokens are written: (B, W), or one slice for all rows
    end: int                        # cache slots that any row needs
    mask: torch.Tensor | None       # (B, 1, G * W, end), 0 or -inf; None: every token sees all of them
    causal: bool                    # nothing cached and no block: plain causal attention
    rule: torch.Tensor | None       # (B, 2 + 2 W), int32: what the kernel needs in place of slots, mask and causal


def window(cache: KVCache, num_causal: list, blocks: list, block_size: int) -> Window:
    """Lay out one forward, in every mode. Row b's tokens are [causal | block | block | ...], padded on the right.

    num_causal[b]: its causal tokens; blocks[b]: for each of its blocks of block_size tokens, how many of those the
    block sees.
    """
    B, W = len(num_causal), max(c + block_size * len(a) for c, a in zip(num_causal, blocks))
    lengths = cache.lengths.numpy()[:, None]                                     # (B, 1)
    end, S = int(lengths.max()) + W, cache.k.shape[3]
    if end > S:
        raise ValueError(f"the cache holds {S} tokens a row and this window needs {end}: allocate a longer cache")
    device, dtype = cache.k.device, cache.k.dtype
    place = np.tile(np.arange(W), (B, 1))                                        # position behind `lengths`
    for row, c, sees in zip(place, num_causal, blocks):
        for n, a in enumerate(sees):
            row[c + n * block_size:c + (n + 1) * block_size] = range(a, a + block_size)
    start, ragged = int(lengths[0, 0]), bool((lengths != lengths[0]).any())
    kernel, rule = cache.kernel is not None and cache.kernel.supports(W, cache.k.shape[-1]), None
    slots = torch.from_numpy(lengths + np.arange(W)).to(device) if ragged and not kernel else slice(start, start + W)
    causal, mask = end == W and not any(blocks), None
    one_block = not any(num_causal) and all(len(sees) == 1 for sees in blocks)
    needs_mask = not kernel and not causal and (ragged or not (W == 1 or one_block))
    if kernel or needs_mask:
        seen, block = np.tile(np.arange(1, W + 1), (B, 1)), np.full((B, W), -1)  # as for causal tokens; padding too
        for b, (c, sees) in enumerate(zip(num_causal, blocks)):
            for n, a in enumerate(sees):
                seen[b, c + n * block_size:c + (n + 1) * block_size] = a
                block[b, c + n * block_size:c + (n + 1) * block_size] = n
    if kernel:
        rule = torch.from_numpy(np.hstack((lengths, np.c_[num_causal], seen, block)).astype(np.int32)).to(device, non_blocking=True)
    if needs_mask:
        key = np.arange(end) - lengths                                           # (B, end) a slot's place in the window
        owner = np.take_along_axis(block, key.clip(0, W - 1), 1)
        owner[(key < 0) | (key >= W)] = -1
        may = key[:, None] < seen[..., None]                                     # (B, W, end)
        may |= (block[..., None] >= 0) & (block[..., None] == owner[:, None])
        mask = torch.zeros(may.shape, dtype=dtype).masked_fill_(torch.from_numpy(~may), -torch.inf)
        mask = mask.to(device)[:, None].repeat(1, 1, cache.group, 1)
    return Window(torch.from_numpy(lengths + place).to(device), slots, end, mask, causal, rule)


def kernel_attend(kernel, k, v, rule, longest: int):
    """An `attend` by the kernel over k, v (layers, B, Hkv, S, D) of which no row has more than `longest` tokens."""
    layers, dtype = list(zip(k.unbind(), v.unbind())), k.dtype
    return lambda layer, *qkv: kernel.block_decode(*(x.to(dtype) for x in qkv), *layers[layer], rule, longest)


def cached_attend(cache: KVCache, w: Window):
    """The `attend` of Llama.forward for this window: write its keys and values, then attend over the cache."""
    if w.rule is not None:
        return kernel_attend(cache.kernel, cache.k, cache.v, w.rule, int(cache.lengths.max()))
    G, ragged = cache.group, isinstance(w.slots, torch.Tensor)
    K, V = cache.k[..., :w.end, :].unbind(), cache.v[..., :w.end, :].unbind()     # a layer: (B, Hkv, end, D)
    if not ragged:                                                               # where every layer writes
        new_K, new_V = cache.k[..., w.slots, :].unbind(), cache.v[..., w.slots, :].unbind()

    def attend(layer, q, k, v):
        B, H, W, D = q.shape
        if q.dtype != cache.k.dtype:                                             # autocast
            q, k, v = (x.to(cache.k.dtype) for x in (q, k, v))
        if ragged:
            at = w.slots[:, None, :, None].expand_as(k)
            K[layer].scatter_(2, at, k)
            V[layer].scatter_(2, at, v)
        else:
            new_K[layer].copy_(k)
            new_V[layer].copy_(v)
        if w.causal:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=G > 1)
        # The G query heads of a key head are rows of one problem: each cached byte is read once for all of them.
        out = F.scaled_dot_product_attention(q.reshape(B, H // G, G * W, D), K[layer], V[layer], attn_mask=w.mask)
        return out.view(B, H, W, D)

    return attend


# ------------------------------------------------------------------------------------------ CUDA graphs

def run_window(model, cache: KVCache, tokens: list, num_causal: list, sees: list, block_size: int):
    """One forward: lists of tokens, a row each -> hidden states (B, W, C), which hold until the next one. Arguments as in `window`."""
    w, W = window(cache, num_causal, sees, block_size), max(map(len, tokens))
    return replayed(model, cache, torch.tensor([[*t] + [0] * (W - len(t)) for t in tokens]).to(cache.k.device), w)


def replayed(model, cache: KVCache, tokens, w: Window):
    """One forward: tokens (B, W) -> hidden states (B, W, C), which hold until the next one; with model.graphs a replay.

    To the kernel a window is three tensors: tokens (n, W), positions (n, W) and rule (n, 2 + 2 W). A mode has two widths
    W at most (1; k, 2k; 1 + k, k + h k), and n is B's next power of two: so there are few graphs, one for each (n, W).
    They know addresses only: those of the weights, of the cache with all its rows, and of their own inputs. Prefills,
    whose lengths are many, and what the kernel does not do run as they are.
    """
    inputs = tokens, w.positions, w.rule
    if model.graphs is None or w.rule is None or w.causal:
        return model.hidden(tokens, w.positions, cached_attend(cache, w))
    (B, W), (K, V) = tokens.shape, cache.whole
    n = min(1 << (B - 1).bit_length(), K.shape[1])
    if (n, W) not in cache.graphs:
        buffers = [x.new_zeros(n, x.shape[1]) for x in inputs]                   # a rule of zeros: nothing cached or written
        kernel, rows, longest = cache.kernel, (K[:, :n], V[:, :n]), K.shape[3]   # of any length: it decides the splits

        def forward(tokens, positions, rule):
            return model.hidden(tokens, positions, kernel_attend(kernel, *rows, rule, longest))
        cache.graphs[n, W] = buffers, model.graphs.capture(forward, buffers, cache.pool)
    buffers, replay = cache.graphs[n, W]
    for buffer, x in zip(buffers, inputs):
        buffer[:B].copy_(x, non_blocking=True)
        buffer[B:].zero_()
    return replay()[:B]


def lend_cache(model, batch_size: int, max_len: int, attention="auto") -> KVCache:
    """An empty cache for one decoding: the idle one if it is large enough and no weight has moved, else a new one."""
    weight, graphs = model.lm_head.weight, model.graphs
    if graphs is None:
        return KVCache(model.config, batch_size, max_len, weight.device, weight.dtype, attention)
    made_for = weight.dtype, decode_kernel(attention, weight.device, weight.dtype), [p.data_ptr() for p in model.parameters()]
    cache, graphs.idle = graphs.idle, None
    if cache is None or cache.made_for != made_for or batch_size > cache.whole[0].shape[1] or max_len > cache.whole[0].shape[3]:
        cache = None                   # its memory first
        cache = KVCache(model.config, batch_size, max_len, weight.device, weight.dtype, attention)
        cache.made_for = made_for
    cache.k, cache.v = (x[:, :batch_size] for x in cache.whole)
    cache.lengths = torch.zeros(batch_size, dtype=torch.int64)
    return cache
