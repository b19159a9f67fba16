"""The exact cache (Algorithm 3, Fig. 2b), and the one rule of every decoding window (Fig. 3, Fig. 10).

A forward runs a window of new tokens behind the cached ones. Each window token attends to its row's cache, to
the window's causal tokens of index < `seen`, and, if it has a block, to all tokens of that block; nothing
outside a block attends to it. `window_rule` says so for every mode:

    token                                          seen    block    position
    causal token j                                 j + 1   none     length + j
    place i of a block behind `a` causal tokens    a       its own  length + a + i

Keys and values of the whole window are written behind `lengths`; `commit` decides how many of the causal ones
stay, and the next forward overwrites the rest (kernels/block_decode.py writes the causal ones only). So keys
computed inside a bidirectional block are never kept.

Shapes: B rows, W window tokens, S cache slots, H query heads, Hkv key/value heads, G = H / Hkv, D head
dimension. """
import contextlib
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from hf import free_memory, need


def decode_kernel(attention: str, device, dtype):
    """What attends to the cache: the module kernels.block_decode (Triton), or None: PyTorch.

    "auto" takes Triton on CUDA. ValueError, one line, where "triton" cannot run.
    """
    need(attention in ("auto", "triton", "sdpa"), f"attention {attention!r}: wanted auto, triton or sdpa")
    on_gpu = torch.device(device).type == "cuda"
    known = dtype in (torch.bfloat16, torch.float16, torch.float32)
    if attention == "sdpa" or attention == "auto" and not (on_gpu and known):
        return None
    try:
        from kernels import block_decode   # only here: a CPU has no Triton
    except ImportError:
        need(attention == "auto", "attention triton: Triton is not installed (pip install triton), take sdpa")
        return None
    need(known, f"attention triton: no kernel for {dtype}, take sdpa")
    need(on_gpu or block_decode.INTERPRETED,
         "attention triton: needs a GPU, take sdpa (TRITON_INTERPRET=1 runs it on the CPU, slowly)")
    return block_decode


class KVCache:
    """Keys and values (layers, B, Hkv, S, D), allocated once, and `lengths` (B,): the tokens each row keeps.

    S = max_len: the longest text plus one window of scratch. A window that does not fit raises ValueError, as
    does a cache that memory has no room for. attention: what attends to it, as in decode_kernel.
    """

    def __init__(self, config, batch_size: int, max_len: int, device="cpu", dtype=torch.float32,
                 attention="auto"):
        self.kernel = decode_kernel(attention, device, dtype)
        shape = (config.num_hidden_layers, batch_size, config.num_key_value_heads, max_len, config.head_dim)
        size, free = 2 * dtype.itemsize * np.prod(shape, dtype=float), free_memory(device)   # bytes
        need(size <= free, f"a cache of {batch_size} rows of {max_len} tokens takes {size / 2**30:.1f} GiB, "
                           f"{device} has {free / 2**30:.1f} GiB free: decode fewer or shorter rows at once")
        self.k = torch.zeros(shape, device=device, dtype=dtype)
        self.v = torch.zeros(shape, device=device, dtype=dtype)
        self.whole = self.k, self.v                                 # also the rows that `keep` dropped
        self.lengths = torch.zeros(batch_size, dtype=torch.int64)   # on the host, where it decides shapes
        self.group = config.num_attention_heads // config.num_key_value_heads

    def commit(self, n) -> None:
        """Keep the first n (B,) causal tokens of the last window."""
        n = np.array(n.tolist() if isinstance(n, torch.Tensor) else n, np.int64)   # on the host, as `lengths`
        lengths, S = self.lengths.numpy(), self.k.shape[3]
        if n.shape != lengths.shape or n.min(initial=0) < 0 or (lengths + n).max(initial=0) > S:
            raise ValueError(f"cannot commit {n.tolist()} tokens to rows of {lengths.tolist()}, cache of {S}")
        self.lengths = torch.from_numpy(lengths + n)

    def keep(self, rows: list) -> None:
        """Drop all rows but these, in ascending order; one layer is copied at a time."""
        for layer in range(len(self.k)):
            self.k[layer, :len(rows)] = self.k[layer, rows]
            self.v[layer, :len(rows)] = self.v[layer, rows]
        self.k, self.v, self.lengths = self.k[:, :len(rows)], self.v[:, :len(rows)], self.lengths[rows]

    def lend(self, batch_size: int) -> "KVCache":
        """The same memory, empty, for a new batch of at most as many rows."""
        self.k, self.v = (x[:, :batch_size] for x in self.whole)
        self.lengths = torch.zeros(batch_size, dtype=torch.int64)
        return self


def lend_cache(model, batch_size: int, max_len: int, attention="auto"):
    """A context manager: an empty cache for one decoding, which goes back where it came from, also after an
    early stop."""
    weight = model.lm_head.weight
    kind = weight.device, weight.dtype, attention

    def make():
        return KVCache(model.config, batch_size, max_len, *kind)

    return contextlib.nullcontext(make()) if model.graphs is None else model.graphs.lend(
        make, batch_size, max_len, [*kind, *(p.data_ptr() for p in model.parameters())])


# -------------------------------------------------------------------------------- the rule of a window

def window_rule(num_causal: list, sees: list, block_size: int):
    """Method section 2: position behind the cache, seen, and block (-1: none) of every window token, each (B,
    W) int64.

    Row b is [causal | block | block | ...], padded on the right with causal tokens. num_causal[b]: its causal
    tokens; sees[b]: for each of its blocks of block_size tokens, how many of those the block sees.
    """
    B, W = len(num_causal), max(c + block_size * len(a) for c, a in zip(num_causal, sees))
    position, block = np.tile(np.arange(W), (B, 1)), np.full((B, W), -1)
    seen = position + 1
    for b, (c, behind) in enumerate(zip(num_causal, sees)):
        for n, a in enumerate(behind):
            places = slice(c + n * block_size, c + (n + 1) * block_size)
            position[b, places], seen[b, places], block[b, places] = range(a, a + block_size), a, n
    return position, seen, block


def may_attend(lengths, seen, block, end: int):
    """The rule as a mask (Fig. 10): lengths (B, 1), seen and block (B, W) -> bool (B, W, end) over the
    cache's slots."""
    W = seen.shape[1]
    key = np.arange(end) - lengths  # (B, end) a slot's place in the window
    owner = np.take_along_axis(block, key.clip(0, W - 1), 1)                     # the block it is in
    owner[(key < 0) | (key >= W)] = -1
    may = key[:, None] < seen[..., None]  # the cache, and causal tokens
    return may | (block[..., None] >= 0) & (block[..., None] == owner[:, None])


@dataclass
class Window:
    """The rule in the cheapest form that says it."""
    positions: torch.Tensor         # (B, W)
    slots: torch.Tensor | slice     # where in the cache tokens are written: (B, W), or one slice for all rows
    end: int                        # cache slots that any row needs
    mask: torch.Tensor | None       # (B, 1, G * W, end), 0 or -inf; None: every token sees all of them
    causal: bool                    # nothing cached and no block: plain causal attention
    rule: torch.Tensor | None  # (B, 2 + 2 W), int32: what the kernel needs in place of slots, mask and causal
    gate: torch.Tensor | None       # (B, W) bool: tokens of blocks, on the host; None: there are none


def window(cache: KVCache, num_causal: list, sees: list, block_size: int) -> Window:
    """Lay out one forward, in every mode; arguments as in `window_rule`."""
    position, seen, block = window_rule(num_causal, sees, block_size)            # (B, W) each
    lengths, (_, W), S = cache.lengths.numpy()[:, None], position.shape, cache.k.shape[3]   # (B, 1)
    end, device = int(lengths.max()) + W, cache.k.device
    need(end <= S, f"the cache holds {S} tokens a row and this window needs {end}: allocate a longer cache")
    start, ragged = int(lengths[0, 0]), bool((lengths != lengths[0]).any())
    gate = torch.from_numpy(block >= 0) if any(sees) else None
    causal, positions = end == W and not any(sees), torch.from_numpy(lengths + position).to(device)
    if cache.kernel is not None and cache.kernel.supports(W, cache.k.shape[-1]):
        rule = np.hstack((lengths, np.c_[num_causal], seen, block)).astype(np.int32)
        return Window(positions, slice(start, start + W), end, None, causal,
                      torch.from_numpy(rule).to(device, non_blocking=True), gate)
    slots, mask = slice(start, start + W), None
    if ragged:
        slots = torch.from_numpy(lengths + np.arange(W)).to(device)
    all_see_all = not ragged and (W == 1 or not any(num_causal) and all(len(a) == 1 for a in sees))
    if not causal and not all_see_all:
        hidden = torch.from_numpy(~may_attend(lengths, seen, block, end))
        mask = torch.zeros(hidden.shape, dtype=cache.k.dtype).masked_fill_(hidden, -torch.inf)
        mask = mask.to(device)[:, None].repeat(1, 1, cache.group, 1)
    return Window(positions, slots, end, mask, causal, None, gate)


# -------------------------------------------------------------------------------- attention and forward

def kernel_attend(kernel, k, v, rule, longest: int):
    """An `attend` by the kernel over k, v (layers, B, Hkv, S, D), no row of which exceeds `longest`."""
    layers, dtype = list(zip(k.unbind(), v.unbind())), k.dtype
    return lambda layer, *qkv: kernel.block_decode(*(x.to(dtype) for x in qkv), *layers[layer], rule, longest)


def cached_attend(cache: KVCache, w: Window):
    """The `attend` of Llama.forward for this window: write its keys and values, attend over the cache."""
    if w.rule is not None:
        return kernel_attend(cache.kernel, cache.k, cache.v, w.rule, int(cache.lengths.max()))
    G, ragged = cache.group, isinstance(w.slots, torch.Tensor)
    K, V = cache.k[..., :w.end, :].unbind(), cache.v[..., :w.end, :].unbind()    # a layer: (B, Hkv, end, D)
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
        # The G query heads of a key head are rows of one problem: each cached byte is read once for all of
        # them.
        q = q.reshape(B, H // G, G * W, D)
        out = F.scaled_dot_product_attention(q, K[layer], V[layer], attn_mask=w.mask)
        return out.view(B, H, W, D)

    return attend


def run_window(model, cache: KVCache, tokens: list, num_causal: list, sees: list, block_size: int):
    """One forward: a list of tokens a row -> hidden states (B, W, C), which hold until the next one.

    Other arguments as in `window_rule`. With model.graphs (generate.py --compile on CUDA) it is the replay of
    a graph.
    """
    w, W = window(cache, num_causal, sees, block_size), max(map(len, tokens))
    ids = torch.tensor([[*t] + [0] * (W - len(t)) for t in tokens]).to(cache.k.device)   # (B, W)
    if model.graphs is None or w.rule is None or w.causal:   # prefills, of many lengths, run as they are
        gated = {} if model.adapter is None or w.gate is None else dict(gate=w.gate.to(ids.device))
        return model.hidden(ids, w.positions, cached_attend(cache, w), **gated)

    def forward(ids, positions, rule):   # over rows of all memory, of any length: that decides the splits
        K, V = (x[:, :len(ids)] for x in cache.whole)
        gated = {} if model.adapter is None else dict(gate=rule[:, 2 + W:] >= 0)   # the tokens of blocks
        return model.hidden(ids, positions, kernel_attend(cache.kernel, K, V, rule, K.shape[3]), **gated)

    return model.graphs.replay(cache, forward, ids, w.positions, w.rule)
