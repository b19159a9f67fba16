"""The training mask against a hand-drawn picture and section 3's four rules; sbd_attention against that mask.

The Triton kernels run in Triton's interpreter (conftest.py sets TRITON_INTERPRET).
"""
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import sbd_triton
from kernels.sbd_attention import causal_attend, cost, flex_mask, intervals, sbd_attention
from model import Llama, LlamaConfig
from roofline import forward_parts
from sbd_loss import sbd_attention_mask, sbd_loss

ROOT = Path(__file__).resolve().parent.parent
# inside the interpreter
pytestmark = [pytest.mark.filterwarnings("ignore:Conversion of an array with ndim"),
              pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")]
needs_triton = pytest.mark.skipif(sbd_triton.triton is None, reason="needs triton")
BLOCK_SIZES = (1, 2, 3, 5, 7, 8, 11, 16, 32, 64)
LENGTHS = (1, 17, 63, 64, 65, 130, 257)   # around the sizes at which a chunk, a block or a cache line ends

L6_K2 = """
    x.....|......
    xx....|......
    xxx...|......
    xxxx..|......
    xxxxx.|......
    xxxxxx|......
    -------------
    ......|xx....
    ......|xx....
    xx....|..xx..
    xx....|..xx..
    xxxx..|....xx
    xxxx..|....xx
"""
L5_K3 = """
    x....|.....
    xx...|.....
    xxx..|.....
    xxxx.|.....
    xxxxx|.....
    -----------
    .....|xxx..
    .....|xxx..
    .....|xxx..
    xxx..|...xx
    xxx..|...xx
"""


def picture(drawn):
    rows = [line.strip().replace("|", "") for line in drawn.split("\n") if "x" in line]
    return torch.tensor([[c == "x" for c in row] for row in rows])


def may_attend(q_noisy, q, key_noisy, key, block_size):
    """Section 3, step 4: the four rules, one pair of positions."""
    if not q_noisy and not key_noisy:
        return key <= q
    if q_noisy and not key_noisy:
        return key // block_size < q // block_size
    if q_noisy and key_noisy:
        return key // block_size == q // block_size
    return False


def places(doc_ids):
    """(document, place within it) of each position of a row."""
    out, start = [], 0
    for i, doc in enumerate(doc_ids):
        start = i if i and doc != doc_ids[i - 1] else start
        out.append((start, i - start))
    return out


def dense_mask(L, block_size, doc_ids=None):
    """bool (B, 2L, 2L): the four rules on places within a document, and no pair across documents."""
    masks = []
    for row in [[0] * L] if doc_ids is None else doc_ids.tolist():
        doc, place = (torch.tensor(x) for x in zip(*places(row)))
        q, key = place[:, None], place[None]
        same = doc[:, None] == doc[None]
        top = torch.cat((same & (key <= q), torch.zeros(L, L, dtype=torch.bool)), 1)
        earlier, own = key // block_size < q // block_size, key // block_size == q // block_size
        bottom = torch.cat((same & earlier, same & own), 1)
        masks.append(torch.cat((top, bottom)))
    return torch.stack(masks)


def dense_attention(q, k, v, mask):
    """SDPA with the whole mask, (B, T, T) bool, and every key head repeated."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])


def packed(B, L, generator):
    """doc_ids (B, L): documents of random lengths, other ones in every row; ids need not rise."""
    ids = torch.zeros(B, L, dtype=torch.long)
    for b in range(B):
        cuts = torch.rand(L, generator=generator) < (0.04 if b else 0.2)
        ids[b] = cuts.cumsum(0) * (1 if b else -3)
    return ids


def qkv(L, G, dtype, generator, Hkv=2, B=2, D=4):
    shapes = (B, G * Hkv, 2 * L, D), (B, Hkv, 2 * L, D), (B, Hkv, 2 * L, D)
    normal = lambda shape: 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
    return [normal(shape).to(dtype).requires_grad_() for shape in shapes]


def values_and_gradients(attend, inputs, weight):
    out = attend(*inputs)
    return (out, *torch.autograd.grad(out, inputs, weight.to(out.dtype)))


# ------------------------------------------------------------------------------------------ the mask

@pytest.mark.parametrize("drawn, L, block_size", [(L6_K2, 6, 2), (L5_K3, 5, 3)])
def test_mask_equals_the_drawn_one(drawn, L, block_size):
    assert torch.equal(sbd_attention_mask(L, block_size), picture(drawn))
    assert torch.equal(dense_mask(L, block_size)[0], picture(drawn))


@pytest.mark.parametrize("L", [1, 2, 7, 16, 19])
@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 7, 16, 30])
def test_mask_equals_the_four_rules_pair_by_pair(L, block_size):
    wanted = [[may_attend(q >= L, q % L, key >= L, key % L, block_size) for key in range(2 * L)]
              for q in range(2 * L)]
    assert sbd_attention_mask(L, block_size).tolist() == wanted
    assert dense_mask(L, block_size)[0].tolist() == wanted


@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 40])
def test_intervals_are_the_rows_of_the_mask(block_size):
    """Section 3: clean [document start, q]; noisy: clean [document start, block start), noisy [block start,
    block end)."""
    doc_ids = packed(3, 37, torch.Generator().manual_seed(1))
    mask = dense_mask(37, block_size, doc_ids)
    for b in range(3):
        rows = zip(*(x[b].tolist() for x in intervals(37, block_size, doc_ids)))
        for i, (doc_start, block_start, block_end, doc_end) in enumerate(rows):
            assert mask[b, i].nonzero()[:, 0].tolist() == list(range(doc_start, i + 1))
            assert mask[b, 37 + i].nonzero()[:, 0].tolist() == [*range(doc_start, block_start),
                                                                *range(37 + block_start, 37 + block_end)]
            assert doc_end == 37 or doc_ids[b, doc_end] != doc_ids[b, i] == doc_ids[b, doc_end - 1]


# ------------------------------------------------------------------------------------ the attention

@pytest.mark.parametrize("L", LENGTHS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_attention_equals_dense_mask(L, block_size):
    generator = torch.Generator().manual_seed(1000 * L + block_size)
    for n, doc_ids in enumerate((None, packed(2, L, generator))):
        G = (1, 2, 4, 7)[(BLOCK_SIZES.index(block_size) + LENGTHS.index(L) + n) % 4]
        inputs = qkv(L, G, torch.float64, generator)
        weight = torch.randn(inputs[0].shape, generator=generator, dtype=torch.float64)
        mask = dense_mask(L, block_size, doc_ids).expand(2, -1, -1)
        ours = values_and_gradients(lambda *x: sbd_attention(*x, block_size, doc_ids), inputs, weight)
        truth = values_and_gradients(lambda *x: dense_attention(*x, mask), inputs, weight)
        for a, b in zip(ours, truth):
            assert a.shape == b.shape and not a.isnan().any()
            # float64: both sum the same few hundred terms of order 1 in another order
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12 * max(1, b.abs().max().item()))


@pytest.mark.parametrize("G", [1, 2, 4, 7])
@pytest.mark.parametrize("L, block_size", [(17, 5), (130, 16), (257, 11)])
def test_attention_in_float32_equals_dense_mask_in_float64(L, block_size, G):
    generator = torch.Generator().manual_seed(G)
    for doc_ids in None, packed(2, L, generator):
        inputs = qkv(L, G, torch.float32, generator)
        weight = torch.randn(inputs[0].shape, generator=generator, dtype=torch.float64)
        mask = dense_mask(L, block_size, doc_ids).expand(2, -1, -1)
        ours = values_and_gradients(lambda *x: sbd_attention(*x, block_size, doc_ids), inputs, weight)
        truth = values_and_gradients(lambda *x: dense_attention(*x, mask),
                                     [x.detach().double().requires_grad_() for x in inputs], weight)
        for a, b in zip(ours, truth):
            assert a.dtype == torch.float32
            # float32: unit roundoff 6e-8, scores up to about 30, sums of up to G * 2L terms
            torch.testing.assert_close(a.double(), b, rtol=0, atol=2e-5 * max(1, b.abs().max().item()))


@pytest.mark.parametrize("G", [1, 3])
@pytest.mark.parametrize("L", [1, 17, 130, 257])
def test_causal_attention_is_the_clean_half(L, G):
    generator = torch.Generator().manual_seed(L)
    for doc_ids in None, packed(2, L, generator):
        inputs = qkv(L, G, torch.float64, generator)
        inputs = [x[:, :, :L].detach().requires_grad_() for x in inputs]
        weight = torch.randn(inputs[0].shape, generator=generator, dtype=torch.float64)
        mask = dense_mask(L, 1, doc_ids)[:, :L, :L].expand(2, -1, -1)
        ours = values_and_gradients(causal_attend(L, doc_ids), inputs, weight)
        truth = values_and_gradients(lambda *x: dense_attention(*x, mask), inputs, weight)
        for a, b in zip(ours, truth):
            # float64, see above
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12 * max(1, b.abs().max().item()))


def test_first_block_of_a_document_needs_no_past():
    """Its clean interval is empty: no NaN, and the output is the mean of its block's values where queries are
    zero."""
    generator = torch.Generator().manual_seed(0)
    doc_ids = torch.tensor([[0] * 5 + [1] + [2] * 4])
    q, k, v = (x.detach() for x in qkv(10, 2, torch.float64, generator, B=1))
    out = sbd_attention(torch.zeros_like(q), k, v, 4, doc_ids)
    assert out.isfinite().all()
    for first, last in ((0, 4), (5, 6), (6, 10)):       # the first block of each document; (4, 5) has a past
        mean = v[:, :, 10 + first:10 + last].mean(2, keepdim=True).repeat_interleave(2, 1)
        torch.testing.assert_close(out[:, :, 10 + first:10 + last], mean.expand(-1, -1, last - first, -1),
                                   rtol=0, atol=1e-14)  # a mean of at most four values in float64


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_keys_outside_the_mask_have_no_influence(block_size):
    """Perturb one key and value: exactly the queries that may attend to it change; bit for bit, none of the
    others."""
    L, generator = 150, torch.Generator().manual_seed(block_size)
    doc_ids = packed(1, L, generator)
    mask = dense_mask(L, block_size, doc_ids)[0]
    q, k, v = (x.detach() for x in qkv(L, 2, torch.float64, generator, B=1))
    before = sbd_attention(q, k, v, block_size, doc_ids)
    others = torch.randint(0, 2 * L, (12,), generator=generator).tolist()
    for at in [0, 1, 63, 127, 128, 149, *others, 150, 299]:
        k2, v2 = k.clone(), v.clone()
        k2[:, :, at] += 1
        v2[:, :, at] -= 1
        changed = (sbd_attention(q, k2, v2, block_size, doc_ids) != before).any(-1)[0]              # (H, 2L)
        assert not changed[:, ~mask[:, at]].any()
        assert changed[:, mask[:, at]].all()


class Largest(TorchDispatchMode):
    """Remembers the largest tensor, in elements, that any operation returned, and the shape of each."""
    def __init__(self):
        super().__init__()
        self.numel, self.shapes = 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
                self.shapes.add(tuple(x.shape))
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_mask_over_all_pairs_is_ever_built(dtype):
    """Forward and backward: nothing as large as (2L, 2L), and what is largest grows with L, not with L
    squared."""
    largest = []
    for L in 768, 1536:
        inputs = qkv(L, 2, dtype, torch.Generator().manual_seed(0), Hkv=1, B=1)
        doc_ids = torch.zeros(1, L, dtype=torch.long)
        with Largest() as seen:
            sbd_attention(*inputs, 16, doc_ids).sum().backward()
        assert seen.numel < (2 * L) ** 2 / 2
        largest.append(seen.numel)
    assert largest[1] < 2.2 * largest[0]


# ---------------------------------------------------------------------------------- Triton, interpreted

def case(n):
    """Every block size, length, group, head dimension and type in turn; at most 8 query heads, rows of the
    batch together."""
    G, Hkv = ((1, 2), (2, 2), (4, 1), (7, 1))[n % 4]
    dtypes = torch.float32, torch.bfloat16, torch.float32, torch.bfloat16, torch.float16
    return dict(block_size=BLOCK_SIZES[n % 10], L=LENGTHS[n % 7], G=G, Hkv=Hkv,
                D=(16, 32, 48, 64, 128)[n % 5], dtype=dtypes[n // 2 % 5],
                documents=n % 8 in (1, 2, 4), token_major=n % 3 == 1)


class Guarded:
    """Tensors with the given shape and strides inside larger ones: NaN before, behind and, until written,
    within."""
    PAD = 192

    def __init__(self):
        self.buffers = []

    def empty_strided(self, shape, stride, dtype, device="cpu"):
        buffer = torch.full((math.prod(shape) + 2 * self.PAD,), math.nan, dtype=dtype)
        self.buffers.append(buffer)
        return buffer.as_strided(shape, stride, self.PAD)

    def copy(self, x):
        return self.empty_strided(x.shape, x.stride(), x.dtype).copy_(x)

    def check(self):
        for buffer in self.buffers:
            assert buffer[:self.PAD].isnan().all() and buffer[-self.PAD:].isnan().all()
            assert not buffer[self.PAD:-self.PAD].isnan().any()


@needs_triton
@pytest.mark.parametrize("n", range(36))
def test_kernels_equal_dense_mask(n, monkeypatch):
    """Forward and backward, in poisoned memory: every element is written, nothing outside is read or
    touched."""
    c = case(n)
    L, block_size, dtype = c["L"], c["block_size"], c["dtype"]
    generator = torch.Generator().manual_seed(n)
    B = 2 if c["G"] * c["Hkv"] <= 4 and L < 257 else 1
    inputs = [x.detach() / 2 for x in qkv(L, c["G"], dtype, generator, c["Hkv"], B, c["D"])]
    if c["token_major"]:   # as model.py has them: (B, T, H, D) in memory
        inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    doc_ids = packed(B, L, generator) if c["documents"] else None
    weight = torch.randn(inputs[0].shape, generator=generator).to(dtype)
    mask = dense_mask(L, block_size, doc_ids).expand(B, -1, -1)
    exact = [x.double().requires_grad_() for x in inputs]
    truth = values_and_gradients(lambda *x: dense_attention(*x, mask), exact, weight)

    guarded = Guarded()
    inputs = [guarded.copy(x).requires_grad_() for x in inputs]
    monkeypatch.setattr(torch, "empty_strided", guarded.empty_strided)
    ours = values_and_gradients(lambda *x: sbd_attention(*x, block_size, doc_ids, "triton"), inputs, weight)
    guarded.check()
    assert len(guarded.buffers) >= 3 + 2 + 4   # inputs; o, lse; dq, dk, dv, delta
    for a, b in zip(ours, truth):
        assert a.dtype == dtype
        # with one key the gradients of q and k are 0: no relative error there
        size = b.norm() if L > 1 else weight.norm()
        assert (a.double() - b).norm() <= (1e-5 if dtype == torch.float32 else 2e-2) * size


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_first_block_needs_no_past_in_triton(dtype):
    """Zero queries: the first block's output is the mean of its own values, exactly no weight on anything
    before it."""
    generator = torch.Generator().manual_seed(0)
    doc_ids = torch.tensor([[0] * 70 + [1] * 60])
    q, k, v = (x.detach() for x in qkv(130, 2, dtype, generator, 1, 1, 16))
    v[:, :, 64:70] = 1e30   # the document before: any weight on it would be seen
    out = sbd_attention(torch.zeros_like(q), k, v, 8, doc_ids, "triton")[:, :, 130 + 70:130 + 78]
    mean = v[:, :, 200:208].double().mean(2, keepdim=True).expand(-1, 2, 8, -1)
    # roundoff of the type
    torch.testing.assert_close(out.double(), mean, rtol=0, atol=1e-6 if dtype == torch.float32 else 2e-2)


@needs_triton
@pytest.mark.parametrize("L, block_size", [(17, 5), (130, 16), (257, 11)])
def test_kernel_visits_the_tiles_that_cost_counts(L, block_size, monkeypatch):
    """Counted while the forward kernel runs, and from the mask itself: no tile with a true entry is left
    out."""
    visited, step = [], sbd_triton.softmax_step
    counting = lambda *args: visited.append(args[6] is None) or step(*args)
    monkeypatch.setattr(sbd_triton, "softmax_step", counting)
    q, k, v = (x.detach() for x in qkv(L, 1, torch.float32, torch.Generator().manual_seed(0), 1, 1, 16))
    sbd_attention(q, k, v, block_size, backend="triton")
    POS, KEYS = sbd_triton.CONFIGS["forward"]["float32"][:2]
    counted = cost(1, 1, 1, L, 16, block_size, POS=POS, KEYS=KEYS)
    assert (sum(visited), len(visited) - sum(visited)) == (counted["unmasked"], counted["masked"])
    assert len(visited) * 2 * POS * KEYS >= counted["entries"]
    assert len(visited) * 2 * POS * KEYS <= L * L + 4 * L * (KEYS + POS + block_size) + 4 * POS * KEYS


@pytest.mark.parametrize("L, block_size", [(1, 1), (6, 2), (17, 5), (64, 16), (65, 64), (130, 11)])
def test_cost_counts_the_mask_and_agrees_with_the_roofline(L, block_size):
    B, H, Hkv, D = 2, 6, 2, 16
    counted = cost(B, H, Hkv, L, D, block_size)
    assert counted["entries"] == sbd_attention_mask(L, block_size).sum()
    config = LlamaConfig(num_attention_heads=H, num_key_value_heads=Hkv, head_dim=D, num_hidden_layers=1)

    def attention(window, kv_len, **more):
        parts = forward_parts(window, kv_len, B, config, weight_bytes=2, kv_bytes=2, act_bytes=2, **more)
        return next(part for part in parts if part.name == "attention")

    # The roofline's forwards that decode the same text: one causal prefill, and each block behind its past.
    blocks = [(min(block_size, L - start), start) for start in range(0, L, block_size)]
    in_blocks = sum(attention(*x).flops for x in blocks)
    assert counted["flops"][0] == attention(L, 0, causal=True).flops + in_blocks
    assert counted["flops"][1] == 2.5 * counted["flops"][0]
    lse = 4 * B * H * 2 * L
    assert counted["bytes"][0] == attention(2 * L, 0).bytes + lse                 # q, k, v, o of 2L tokens
    assert counted["bytes"][1] == 2 * attention(2 * L, 0).bytes + lse             # and their gradients


# ----------------------------------------------------------------------------- every backend, one dispatch

@pytest.mark.parametrize("L, block_size, documents", [(1, 1, False), (65, 16, True), (130, 11, False),
                                                      (257, 64, True)])
def test_flex_has_the_same_mask(L, block_size, documents):
    generator = torch.Generator().manual_seed(L)
    doc_ids = packed(2, L, generator) if documents else None
    q, k, v = (x.detach() for x in qkv(L, 2, torch.float32, generator, 2, 2, 16))
    ours, theirs = (sbd_attention(q, k, v, block_size, doc_ids, backend) for backend in ("sdpa", "flex"))
    # float32, sums of up to L terms
    torch.testing.assert_close(theirs, ours, rtol=0, atol=2e-5 * v.abs().max().item())


@pytest.mark.parametrize("L, block_size, documents", [(130, 16, False), (257, 11, True), (300, 64, False)])
def test_tiles_given_to_flex_are_those_of_the_mask(L, block_size, documents):
    """A tile is left out only if nothing in it may attend, and called whole only if everything may."""
    doc_ids = packed(2, L, torch.Generator().manual_seed(L)) if documents else None
    tiles = flex_mask(intervals(L, block_size, doc_ids), 2, size=32)
    n = -(-2 * L // 32)
    rest = 32 * n - 2 * L
    mask = F.pad(dense_mask(L, block_size, doc_ids).expand(2, -1, -1), (0, rest, 0, rest))
    mask = mask.view(2, n, 32, n, 32).transpose(2, 3).flatten(3)

    def listed(number, index):
        found = torch.zeros(2, n, n, dtype=torch.bool)
        for b in range(2):
            for i in range(n):
                found[b, i, index[b, 0, i, :number[b, 0, i]].long()] = True
        return found

    partial = listed(tiles.kv_num_blocks, tiles.kv_indices)
    whole = listed(tiles.full_kv_num_blocks, tiles.full_kv_indices)
    assert not (partial & whole).any()
    assert not (mask.any(-1) & ~(partial | whole)).any()
    inside = slice(0, 2 * L // 32)   # tiles at the end count as whole with the rows and keys that are there
    assert mask.all(-1)[:, inside, inside][whole[:, inside, inside]].all()
    assert (partial | whole).sum() <= 1.5 * mask.any(-1).sum() + 4 * n


def small_model():
    torch.manual_seed(0)
    return Llama(LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                             num_attention_heads=4, num_key_value_heads=2, mask_id=63))


def seeded(n):
    return torch.Generator().manual_seed(n)


@needs_triton
def test_losses_are_the_same_with_every_backend():
    """One dispatch, from sbd_loss down; interpreted Triton trains, FlexAttention on the CPU only computes."""
    model = small_model()
    tokens, doc_ids = torch.randint(0, 60, (2, 70)), packed(2, 70, seeded(3))
    found = {}
    for backend in "sdpa", "auto", "triton", "flex":
        with torch.set_grad_enabled(backend != "flex"):
            result = sbd_loss(model, tokens, 7, doc_ids=doc_ids, generator=seeded(1), backend=backend)
        gradients = torch.autograd.grad(result.loss, list(model.parameters())) if backend != "flex" else []
        found[backend] = result.loss.detach(), gradients
    for backend in "auto", "triton", "flex":
        # float32 through two layers
        torch.testing.assert_close(found[backend][0], found["sdpa"][0], rtol=1e-5, atol=0)
        for a, b in zip(found[backend][1], found["sdpa"][1]):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * b.abs().max().item())


@needs_triton
def test_autocast_and_gradient_checkpointing_reach_the_kernels():
    model = small_model().train()
    k_proj = model.model.layers[0].self_attn.k_proj
    tokens, found = torch.randint(0, 60, (1, 40)), []
    for backend, model.grad_checkpoint in ("sdpa", False), ("triton", False), ("triton", True):
        with torch.autocast("cpu", torch.bfloat16):
            loss = sbd_loss(model, tokens, 4, generator=seeded(1), backend=backend).loss
        found.append((loss.detach(), torch.autograd.grad(loss, k_proj.weight)[0]))
    for loss, gradient in found[1:]:
        torch.testing.assert_close(loss, found[0][0], rtol=1e-2, atol=0)   # bfloat16: 8 bits
        assert (gradient - found[0][1]).norm() <= 0.05 * found[0][1].norm()


@needs_triton
@pytest.mark.parametrize("dtype, D", [(torch.float64, 16), (torch.float32, 160)])
def test_what_has_no_kernel_takes_the_pytorch_path(dtype, D):
    q, k, v = (x.detach() for x in qkv(20, 2, dtype, torch.Generator().manual_seed(0), 1, 1, D))
    assert torch.equal(sbd_attention(q, k, v, 3, backend="triton"), sbd_attention(q, k, v, 3, backend="sdpa"))


def test_what_cannot_be_had_is_refused_in_one_line():
    q, k, v = qkv(4, 1, torch.float32, torch.Generator().manual_seed(0))
    for error, arguments in (("backend 'cudnn'", (2, None, "cudnn")), ("block_size 0", (0,)),
                             ("cannot train on the CPU", (2, None, "flex"))):
        with pytest.raises(ValueError, match=error) as refused:
            sbd_attention(q, k, v, *arguments)
        assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match="7 queries"):
        sbd_attention(q[:, :, 1:], k[:, :, 1:], v[:, :, 1:], 2)


def test_train_refuses_at_the_door():
    """Before a model or data is loaded; triton on the CPU only if it is interpreted."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    train = [sys.executable, ROOT / "train.py", "--device=cpu", "--out_dir=nowhere"]
    for backend, wanted in ("flex", "cannot train on the CPU"), ("triton", "needs a CUDA device"):
        done = subprocess.run([*train, f"--attention={backend}"], env=env, capture_output=True, text=True)
        assert done.returncode == 2 and wanted in done.stderr and done.stderr.count("\n") == 1


# --------------------------------------------------------------------------------- python kernels/check.py

@pytest.mark.parametrize("arguments, code, wanted", [(["--path=sdpa"], 0, r"^\d+\.\d+ -?\d+\.\d+\n$"),
                                                     (["--path=fast"], 2, "^check.py: .*--path.*\n$")])
def test_check_runs_as_a_script_from_any_folder(arguments, code, wanted, tmp_path):
    """Its own folder is not on the path, and another package of the name stands in the way in vain."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/__init__.py").write_text("raise SystemExit('the wrong kernels')")
    command = [sys.executable, ROOT / "kernels/check.py", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path,
                          env=os.environ | dict(PYTHONPATH=str(tmp_path)))
    assert done.returncode == code and re.match(wanted, done.stdout + done.stderr)
