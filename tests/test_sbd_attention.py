"""The training mask against a hand-drawn picture and section 3's four rules; sbd_attention against that mask, dense."""
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from kernels.sbd_attention import intervals, packed_causal_attention, sbd_attention   # noqa: E402
from sbd_loss import sbd_attention_mask                                              # noqa: E402

BLOCK_SIZES = (1, 2, 3, 5, 7, 8, 11, 16, 32, 64)
LENGTHS = (1, 17, 63, 64, 65, 130, 257)        # around the sizes at which a chunk, a block or a cache line ends

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
        bottom = torch.cat((same & (key // block_size < q // block_size), same & (key // block_size == q // block_size)), 1)
        masks.append(torch.cat((top, bottom)))
    return torch.stack(masks)


def dense_attention(q, k, v, mask):
    """SDPA with the whole mask, (B, T, T) bool, and every key head repeated."""
    G = q.shape[1] // k.shape[1]
    return F.scaled_dot_product_attention(q, k.repeat_interleave(G, 1), v.repeat_interleave(G, 1), attn_mask=mask[:, None])


def packed(B, L, generator):
    """doc_ids (B, L): documents of random lengths, other ones in every row; ids need not rise."""
    ids = torch.zeros(B, L, dtype=torch.long)
    for b in range(B):
        cuts = torch.rand(L, generator=generator) < (0.04 if b else 0.2)
        ids[b] = cuts.cumsum(0) * (1 if b else -3)
    return ids


def qkv(L, G, dtype, generator, Hkv=2, B=2, D=4):
    shapes = (B, G * Hkv, 2 * L, D), (B, Hkv, 2 * L, D), (B, Hkv, 2 * L, D)
    return [(2 * torch.randn(s, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_() for s in shapes]


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
    wanted = [[may_attend(q >= L, q % L, key >= L, key % L, block_size) for key in range(2 * L)] for q in range(2 * L)]
    assert sbd_attention_mask(L, block_size).tolist() == wanted
    assert dense_mask(L, block_size)[0].tolist() == wanted


@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 40])
def test_intervals_are_the_rows_of_the_mask(block_size):
    """Section 3: clean [document start, q]; noisy: clean [document start, block start), noisy [block start, block end)."""
    doc_ids = packed(3, 37, torch.Generator().manual_seed(1))
    mask = dense_mask(37, block_size, doc_ids)
    for b in range(3):
        for i, (doc_start, block_start, block_end) in enumerate(zip(*(x[b].tolist() for x in intervals(37, block_size, doc_ids)))):
            assert mask[b, i].nonzero()[:, 0].tolist() == list(range(doc_start, i + 1))
            assert mask[b, 37 + i].nonzero()[:, 0].tolist() == [*range(doc_start, block_start),
                                                                *range(37 + block_start, 37 + block_end)]


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
def test_packed_causal_attention_is_the_clean_half(L, G):
    generator = torch.Generator().manual_seed(L)
    for doc_ids in None, packed(2, L, generator):
        inputs = qkv(L, G, torch.float64, generator)
        inputs = [x[:, :, :L].detach().requires_grad_() for x in inputs]
        weight = torch.randn(inputs[0].shape, generator=generator, dtype=torch.float64)
        mask = dense_mask(L, 1, doc_ids)[:, :L, :L].expand(2, -1, -1)
        ours = values_and_gradients(lambda *x: packed_causal_attention(*x, doc_ids), inputs, weight)
        truth = values_and_gradients(lambda *x: dense_attention(*x, mask), inputs, weight)
        for a, b in zip(ours, truth):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12 * max(1, b.abs().max().item()))   # float64, see above


def test_first_block_of_a_document_needs_no_past():
    """Its clean interval is empty: no NaN, and the output is the mean of its block's values where queries are zero."""
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
    """Perturb one key and value: exactly the queries that may attend to it change; bit for bit, none of the others."""
    L, generator = 150, torch.Generator().manual_seed(block_size)
    doc_ids = packed(1, L, generator)
    mask = dense_mask(L, block_size, doc_ids)[0]
    q, k, v = (x.detach() for x in qkv(L, 2, torch.float64, generator, B=1))
    before = sbd_attention(q, k, v, block_size, doc_ids)
    for at in [0, 1, 63, 127, 128, 149, *torch.randint(0, 2 * L, (12,), generator=generator).tolist(), 150, 299]:
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
    """Forward and backward: nothing as large as (2L, 2L), and what is largest grows with L, not with L squared."""
    largest = []
    for L in 768, 1536:
        inputs = qkv(L, 2, dtype, torch.Generator().manual_seed(0), Hkv=1, B=1)
        doc_ids = torch.zeros(1, L, dtype=torch.long)
        with Largest() as seen:
            sbd_attention(*inputs, 16, doc_ids).sum().backward()
        assert seen.numel < (2 * L) ** 2 / 2
        largest.append(seen.numel)
    assert largest[1] < 2.2 * largest[0]


def test_unknown_backend_is_refused():
    q, k, v = qkv(4, 1, torch.float32, torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="backend 'cudnn'"):
        sbd_attention(q, k, v, 2, backend="cudnn")
