"""The exact cache (Algorithm 3, Fig. 2b), and the one rule of every decoding window (Fig. 3, Fig. 10).

A forward runs a window of new tokens behind the cached ones. Each window token attends to its row's cache, to the
window's causal tokens of index < `seen`, and, if it has a block, to all tokens of that block; nothing outside a
block attends to it:

    token                                          seen    block    position
    causal token j                                 j + 1   none     length + j
    place i of a block behind `a` causal tokens    a       its own  length + a + i

Keys and values of the whole window are written behind `lengths`; `commit` decides how many of the causal ones stay,
and the next forward overwrites the rest. So keys computed inside a bidirectional block are never kept.

Shapes: B rows, W window tokens, S cache slots, H query heads, Hkv key/value heads, G = H / Hkv, D head dimension.
"""
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F


class KVCache:
    """Keys and values (layers, B, Hkv, S, D), allocated once, and `lengths` (B,) int64: the tokens each row keeps.

    S = max_len: the longest text plus one window of scratch. A window that does not fit raises ValueError.
    """

    def __init__(self, config, batch_size: int, max_len: int, device="cpu", dtype=torch.float32):
        shape = (config.num_hidden_layers, batch_size, config.num_key_value_heads, max_len, config.head_dim)
        self.k = torch.zeros(shape, device=device, dtype=dtype)
        self.v = torch.zeros(shape, device=device, dtype=dtype)
        self.lengths = torch.zeros(batch_size, dtype=torch.int64)   # on the host, where it decides shapes
        self.group = config.num_attention_heads // config.num_key_value_heads

    def commit(self, n) -> None:
        """Keep the first n (B,) causal tokens of the last window."""
        n = torch.as_tensor(n, dtype=torch.int64, device="cpu")
        if n.shape != self.lengths.shape or (n < 0).any() or (self.lengths + n > self.k.shape[3]).any():
            raise ValueError(f"cannot commit {n.tolist()} tokens to rows of {self.lengths.tolist()} in a cache of {self.k.shape[3]}")
        self.lengths = self.lengths + n

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
    slots = torch.from_numpy(lengths + np.arange(W)).to(device) if ragged else slice(start, start + W)
    causal, mask = end == W and not any(blocks), None
    one_block = not any(num_causal) and all(len(sees) == 1 for sees in blocks)
    if not causal and (ragged or not (W == 1 or one_block)):
        seen, block = np.tile(np.arange(1, W + 1), (B, 1)), np.full((B, W), -1)  # as for causal tokens; padding too
        for b, (c, sees) in enumerate(zip(num_causal, blocks)):
            for n, a in enumerate(sees):
                seen[b, c + n * block_size:c + (n + 1) * block_size] = a
                block[b, c + n * block_size:c + (n + 1) * block_size] = n
        key = np.arange(end) - lengths                                           # (B, end) a slot's place in the window
        owner = np.take_along_axis(block, key.clip(0, W - 1), 1)
        owner[(key < 0) | (key >= W)] = -1
        may = key[:, None] < seen[..., None]                                     # (B, W, end)
        may |= (block[..., None] >= 0) & (block[..., None] == owner[:, None])
        mask = torch.zeros(may.shape, dtype=dtype).masked_fill_(torch.from_numpy(~may), -torch.inf)
        mask = mask.to(device)[:, None].repeat(1, 1, cache.group, 1)
    return Window(torch.from_numpy(lengths + place).to(device), slots, end, mask, causal)


def cached_attend(cache: KVCache, w: Window):
    """The `attend` of Llama.forward for this window: write its keys and values, then attend over the cache."""
    G, ragged = cache.group, isinstance(w.slots, torch.Tensor)
    K, V = cache.k[..., :w.end, :].unbind(), cache.v[..., :w.end, :].unbind()     # a layer: (B, Hkv, end, D)
    if not ragged:                                                               # where every layer writes
        new_K, new_V = cache.k[..., w.slots, :].unbind(), cache.v[..., w.slots, :].unbind()

    def attend(layer, q, k, v):
        B, H, W, D = q.shape
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
