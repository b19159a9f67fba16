"""The joint loss of Eq. 14 against its definition, one target at a time in float64, packed rows included."""
import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import sbd_loss as sbd_loss_file
from data.bin import Dataset, batch, num_ntp_targets, pack, targets, write_set
from model import Llama, LlamaConfig
from sbd_loss import mask_tokens, ntp_loss, sbd_loss

V, MASK, STOP = 31, 30, 7
# Float64: both sides sum the same terms of order 1 in another order; roundoff 1e-16 times hundreds of them.
ROUNDING = 1e-12


def tiny_model(seed=0, dtype=torch.float64, **changes):
    """Random weights, large enough that attention is far from uniform."""
    shape = dict(vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=2, mask_id=MASK,
                 num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)
    model = Llama(LlamaConfig(**shape | changes))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for w in model.parameters():
            w.copy_(torch.randn(w.shape, generator=generator) * 0.3 + (1.0 if w.dim() == 1 else 0.0))
    return model.to(dtype)


def some_tokens(B, L, seed=0):
    return torch.randint(0, MASK, (B, L), generator=torch.Generator().manual_seed(seed))


def dense(may):
    """The `attend` of an explicit mask, (T, T) or (B, T, T) bool: softmax over all pairs."""
    def attend(layer, q, k, v):
        G = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(G, 1), v.repeat_interleave(G, 1)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        return scores.masked_fill(~may.reshape(-1, 1, *may.shape[-2:]), -torch.inf).softmax(-1) @ v
    return attend


def documents(doc_ids, L):
    """[start, end) of each document of a row; doc_ids a list or None."""
    cuts = [0] + [i for i in range(1, L) if doc_ids is not None and doc_ids[i] != doc_ids[i - 1]] + [L]
    return list(zip(cuts, cuts[1:]))


def cross_entropy_at_end(model, ids, at, target, may):
    """-log p(target) at place `at` of one forward over `ids` with an explicit mask, positions 0, 1, 2, ..."""
    logits = model(torch.tensor([ids]), torch.arange(len(ids)), dense(may))[0, at]
    return logits.logsumexp(-1) - logits[target]


def one_by_one(model, tokens, noisy, is_masked, block_size, doc_ids=None):
    """Eq. 14, every possible target by a forward of its own -> {(b, i): nats} of NTP and of MATP.

    NTP, key (b, i + 1), the token predicted: causal over x[document start .. i]. MATP, key (b, i): over
    [clean tokens before i's block | noisy block], causal left of it and bidirectional right of it.
    """
    ntp, matp = {}, {}
    for b, (x, xh, masked) in enumerate(zip(tokens.tolist(), noisy.tolist(), is_masked.tolist())):
        for start, end in documents(None if doc_ids is None else doc_ids[b].tolist(), len(x)):
            for i in range(start, end - 1):
                n = i + 1 - start
                ntp[b, i + 1] = cross_entropy_at_end(model, x[start:i + 1], n - 1, x[i + 1],
                                                     torch.ones(n, n).tril().bool())
            for i in range(start, end):
                if masked[i]:
                    block = i - (i - start) % block_size
                    ids = x[start:block] + xh[block:min(block + block_size, end)]
                    may = torch.ones(len(ids), len(ids)).tril().bool()
                    may[block - start:] = True
                    matp[b, i] = cross_entropy_at_end(model, ids, i - start, x[i], may)
    return ntp, matp


def joint(ntp, matp, loss_mask, ntp_mask, num_targets, ntp_weight, matp_weight):
    """Section 3, step 6, from the tables of one_by_one -> loss, mean NTP, mean MATP; masks are lists of lists
    or None."""
    ntp_mask = loss_mask if ntp_mask is None else ntp_mask
    ntp = [nats for (b, i), nats in ntp.items() if ntp_mask is None or ntp_mask[b][i]]
    matp = [nats for (b, i), nats in matp.items() if loss_mask is None or loss_mask[b][i]]
    over = max(len(ntp) if num_targets is None else num_targets, 1)
    loss = (ntp_weight * sum(ntp) + matp_weight * sum(matp)) / over
    return loss, sum(ntp) / max(len(ntp), 1), sum(matp) / max(len(matp), 1)


def assert_equal(ours, truth, tolerance=ROUNDING):
    for name, wanted in zip(("loss", "ntp", "matp"), truth):
        wanted = torch.as_tensor(wanted).item()
        assert getattr(ours, name).item() == pytest.approx(wanted, rel=tolerance, abs=tolerance), name


def gradients(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()))


def assert_same_gradients(ours, truth, tolerance=ROUNDING):
    for a, b in zip(ours, truth):
        assert (a - b).abs().max() <= tolerance * max(1, b.abs().max())


def fix_noise(monkeypatch, is_masked):
    """Let sbd_loss mask exactly these positions; is_masked (B, L)."""
    monkeypatch.setattr(sbd_loss_file, "mask_tokens", lambda tokens, mask_id, eta, generator: (
        torch.where(is_masked, mask_id, tokens), is_masked))


# ------------------------------------------------------------------------------------- the loss itself

L = 11
PACKED = torch.tensor([[0] * 4 + [1] * 1 + [2] * 6, [5] * 9 + [3] * 2])      # ids need not rise
ETAS = {"drawn": None, "0": 0.0, "1": torch.ones(2, 1), "mixed": torch.tensor([[0.2], [0.8]])}


@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 11, 16])   # divides L, leaves a short block, is longer
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("eta", list(ETAS))
def test_loss_equals_definition_one_target_at_a_time(block_size, is_packed, eta):
    """In every combination of masks, weights and num_targets."""
    model, tokens, doc_ids = tiny_model(), some_tokens(2, L), PACKED if is_packed else None
    def seeded():
        return torch.Generator().manual_seed(block_size)
    noisy, is_masked = mask_tokens(tokens, MASK, ETAS[eta], seeded())
    count = int(is_masked.sum())
    assert count == 2 * L if eta == "1" else count == 0 if eta == "0" else 0 < count < 2 * L
    masks = [None, *(torch.rand(2, 2, L, generator=torch.Generator().manual_seed(1)) < 0.6)]
    with torch.no_grad():
        tables = one_by_one(model, tokens, noisy, is_masked, block_size, doc_ids)
        weights = itertools.cycle([(1.0, 1.0), (0.0, 1.0), (1.0, 0.0), (0.3, 2.5)])
        for loss_mask, ntp_mask, num_targets in itertools.product(masks[:2], masks[::2], (None, 37)):
            alpha, beta = next(weights)
            ours = sbd_loss(model, tokens, block_size, loss_mask, ntp_mask, doc_ids, num_targets, alpha, beta,
                            ETAS[eta], seeded())
            assert_equal(ours, joint(*tables, *(m if m is None else m.tolist()
                                                for m in (loss_mask, ntp_mask)), num_targets,
                                     alpha, beta))


def test_the_weights_are_1_and_1_by_default():
    model, tokens = tiny_model(), some_tokens(2, L)
    ours = sbd_loss(model, tokens, 4, eta=1.0)
    wanted = float(ours.ntp + ours.matp * L / (L - 1))  # 2L MATP targets over 2(L - 1) NTP targets
    assert ours.loss.item() == pytest.approx(wanted, rel=ROUNDING)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("changes", [{}, dict(tie_word_embeddings=True),
                                     dict(model_type="qwen3", num_key_value_heads=4)])
def test_gradients_equal_those_of_the_definition(is_packed, changes):
    model, tokens, doc_ids = tiny_model(**changes), some_tokens(2, L), PACKED if is_packed else None
    loss_mask, ntp_mask = torch.rand(2, 2, L, generator=torch.Generator().manual_seed(2)) < 0.6
    noisy, is_masked = mask_tokens(tokens, MASK, None, torch.Generator().manual_seed(3))
    tables = one_by_one(model, tokens, noisy, is_masked, 3, doc_ids)
    wanted, *_ = joint(*tables, loss_mask.tolist(), ntp_mask.tolist(), 17, 0.7, 1.3)
    ours = sbd_loss(model, tokens, 3, loss_mask, ntp_mask, doc_ids, 17, 0.7, 1.3, None,
                    torch.Generator().manual_seed(3))
    assert not ours.ntp.requires_grad and not ours.matp.requires_grad
    assert_same_gradients(gradients(model, ours.loss), gradients(model, wanted))


def dense_loss(model, tokens, noisy, is_masked, block_size, doc_ids):
    """Algorithm 1 as printed, corrected: one forward over [x | x_hat] with its (2L, 2L) mask and all logits
    -> Eq. 14 summed."""
    B, L = tokens.shape
    i = torch.arange(L)
    doc_ids = torch.zeros_like(tokens) if doc_ids is None else doc_ids
    start = torch.tensor([[next(s for s, e in documents(row, L) if s <= n < e) for n in range(L)]
                          for row in doc_ids.tolist()])
    place, same = i - start, start[:, :, None] == start[:, None]                # (B, L), (B, L, L)
    q, key = place[:, :, None], place[:, None]
    q_block, key_block = q // block_size, key // block_size
    may = torch.cat((torch.cat((same & (key <= q), torch.zeros_like(same)), 2),
                     torch.cat((same & (key_block < q_block), same & (key_block == q_block)), 2)), 1)
    logits = model(torch.cat((tokens, noisy), 1), torch.cat((place, place), 1), dense(may))
    ntp = F.cross_entropy(logits[:, :L - 1].transpose(1, 2), tokens[:, 1:],
                          reduction="none")[same[:, i[1:], i[:-1]]]
    matp = F.cross_entropy(logits[:, L:].transpose(1, 2), tokens, reduction="none")[is_masked]
    return ntp.sum() + matp.sum(), ntp.mean(), matp.mean()


@pytest.mark.parametrize("length, block_size", [(130, 16), (257, 7), (64, 64)])
def test_loss_and_gradients_of_long_rows_equal_dense_formulation(length, block_size):
    """Rows longer than what the attention handles at a time."""
    model, tokens = tiny_model(), some_tokens(2, length)
    cuts = torch.rand(2, length, generator=torch.Generator().manual_seed(0)) < torch.tensor([[0.02], [0.15]])
    for doc_ids in None, cuts.cumsum(1):
        noisy, is_masked = mask_tokens(tokens, MASK, None, torch.Generator().manual_seed(5))
        total, ntp, matp = dense_loss(model, tokens, noisy, is_masked, block_size, doc_ids)
        ours = sbd_loss(model, tokens, block_size, doc_ids=doc_ids, num_targets=500,
                        generator=torch.Generator().manual_seed(5))
        assert_equal(ours, (total / 500, ntp, matp))
        assert_same_gradients(gradients(model, ours.loss), gradients(model, total / 500))


def test_loss_in_float32_equals_float64():
    tokens = some_tokens(2, 40)
    exact, ours = (sbd_loss(tiny_model(dtype=dtype), tokens, 5, generator=torch.Generator().manual_seed(0))
                   for dtype in (torch.float64, torch.float32))
    assert ours.loss.dtype == torch.float32
    truth = exact.loss, exact.ntp, exact.matp
    assert_equal(ours, truth, 1e-5)                  # float32: roundoff 6e-8, sums over two layers


def test_without_targets_the_loss_is_0_and_so_are_the_gradients():
    model, tokens = tiny_model(), some_tokens(2, L)
    nothing, everything = torch.zeros(2, L, dtype=torch.bool), torch.ones(2, L, dtype=torch.bool)
    for doc_ids, num_targets in itertools.product((None, PACKED), (None, 0, 5)):
        for ours in (sbd_loss(model, tokens, 3, nothing, doc_ids=doc_ids, num_targets=num_targets),
                     sbd_loss(model, tokens, 3, everything, nothing, doc_ids, num_targets, eta=0.0),
                     ntp_loss(model, tokens, nothing, doc_ids, num_targets)):
            assert (ours.loss.item(), ours.ntp.item(), ours.matp.item()) == (0, 0, 0)
            assert not any(g.any() for g in torch.autograd.grad(ours.loss, model.parameters(),
                                                                materialize_grads=True,
                                                                allow_unused=True))


def test_matp_alone_is_divided_by_at_least_1():
    """No NTP target at all (every document one token): Eq. 14's sum over max(0, 1)."""
    model, tokens = tiny_model(), some_tokens(1, 4)
    ours = sbd_loss(model, tokens, 3, doc_ids=torch.arange(4)[None], eta=1.0)
    with torch.no_grad():
        wanted = [cross_entropy_at_end(model, [MASK], 0, x, torch.ones(1, 1).bool())
                  for x in tokens[0].tolist()]
    assert_equal(ours, (sum(wanted), 0, sum(wanted) / 4))
    one = sbd_loss(model, tokens[:, :1], 3, eta=1.0)                          # L = 1: nothing to predict from
    assert_equal(one, (wanted[0], 0, wanted[0]))


@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.0, 1.0), (1.0, 0.0), (0.0, 0.0), (0.2, 3.0)])
def test_means_are_reported_whatever_the_weights(weights):
    model, tokens = tiny_model(), some_tokens(2, L)
    plain, weighted = (sbd_loss(model, tokens, 3, num_targets=n, ntp_weight=a, matp_weight=b,
                                generator=torch.Generator().manual_seed(0))
                       for n, (a, b) in ((None, (1.0, 1.0)), (99, weights)))
    assert float(weighted.ntp) == float(plain.ntp) > 0 and float(weighted.matp) == float(plain.matp) > 0


@pytest.mark.parametrize("is_packed", [False, True])
def test_means_and_numbers_of_targets_give_back_the_sums(is_packed):
    """So that the mean over several calls is one over their targets, not a mean of means."""
    model, tokens, doc_ids = tiny_model(), some_tokens(2, L), PACKED if is_packed else None
    loss_mask, ntp_mask = torch.rand(2, 2, L, generator=torch.Generator().manual_seed(2)) < 0.6
    is_masked = mask_tokens(tokens, MASK, None, torch.Generator().manual_seed(0))[1]
    given = torch.zeros(2, L - 1, dtype=torch.bool) if doc_ids is None else doc_ids[:, 1:] != doc_ids[:, :-1]
    num_ntp, num_matp = int((ntp_mask[:, 1:] & ~given).sum()), int((is_masked & loss_mask).sum())
    for ours, n, m in ((sbd_loss(model, tokens, 3, loss_mask, ntp_mask, doc_ids, 1, 0.7, 1.3,
                                 generator=torch.Generator().manual_seed(0)), num_ntp, num_matp),
                       (ntp_loss(model, tokens, ntp_mask, doc_ids, 1), num_ntp, 0)):
        assert (int(ours.num_ntp), int(ours.num_matp)) == (n, m) and n > 0
        alpha, beta = (0.7, 1.3) if m else (1.0, 0.0)
        sums = float(alpha * ours.ntp * n + beta * ours.matp * m)
        assert ours.loss.item() == pytest.approx(sums, rel=ROUNDING)


def test_model_without_mask_id_is_refused():
    with pytest.raises(ValueError, match="mask_id"):
        sbd_loss(tiny_model(mask_id=None), some_tokens(1, 4), 2)


# ---------------------------------------------------------------------------------------- packed rows

@pytest.fixture(scope="module")
def packed_batch(tmp_path_factory):
    """Rows of 16 that hold documents with stop copies, one cut by the row's end, and padding."""
    rng, docs = np.random.default_rng(3), []
    for length in (3, 6, 1, 40, 5, 9, 2, 7, 4, 11):
        ids, mask = rng.integers(8, MASK, length), rng.random(length) < 0.7
        ids[-1], mask[-1] = (STOP, True) if length % 3 else (ids[-1], mask[-1])
        docs.append((ids, mask))
    folder = tmp_path_factory.mktemp("set")
    write_set(folder, {"train": docs}, [STOP], V)
    rows = pack(Dataset(folder, "train"), 16, copies=4)
    return batch(rows, range(len(rows)))


@pytest.mark.parametrize("block_size", [2, 3, 5])
def test_packed_documents_with_stop_copies_equal_the_documents_one_by_one(packed_batch, block_size):
    """Section 3: NTP targets are real targets but a document's first; MATP targets are those and, behind a
    last token that is a target, the copies in its block. A document sees its copies, as clean past and in its
    noisy blocks."""
    model, p = tiny_model(), packed_batch
    noisy, is_masked = mask_tokens(p.tokens, MASK, None, torch.Generator().manual_seed(block_size))
    is_ntp, is_matp = ([[False] * 16 for _ in p.tokens] for _ in range(2))
    for b, (doc_ids, copy, real) in enumerate(zip(p.doc_ids.tolist(), p.is_copy.tolist(),
                                                  p.loss_mask.tolist())):
        for start, end in documents(doc_ids, 16):
            last = max(i for i in range(start, end) if not copy[i])
            for i in range(start, end):
                same_block = (i - start) // block_size == (last - start) // block_size
                is_ntp[b][i] = real[i] and i > start
                is_matp[b][i] = real[i] or copy[i] and same_block and real[last]
    assert any(c and m for copy, matp in zip(p.is_copy.tolist(), is_matp) for c, m in zip(copy, matp))
    loss_mask, ntp_mask = targets(p, block_size)
    with torch.no_grad():
        tables = one_by_one(model, p.tokens, noisy, is_masked, block_size, p.doc_ids)
        for num_targets in None, 123:
            ours = sbd_loss(model, p.tokens, block_size, loss_mask, ntp_mask, p.doc_ids, num_targets,
                            generator=torch.Generator().manual_seed(block_size))
            assert_equal(ours, joint(*tables, is_matp, is_ntp, num_targets, 1.0, 1.0))
        assert_equal(ntp_loss(model, p.tokens, ntp_mask, p.doc_ids),
                     (*joint(*tables, is_matp, is_ntp, None, 1.0, 0.0)[:2], 0.0))
    assert num_ntp_targets(p) == sum(map(sum, is_ntp))                         # copies are not counted


def test_positions_restart_with_each_document_in_both_halves(monkeypatch):
    """Rotary angles are relative, so no loss shows it but by rounding: what the model is given says so."""
    model, seen = tiny_model(), []
    monkeypatch.setattr(model, "hidden", lambda tokens, positions, attend:
                        seen.append(positions.expand_as(tokens).tolist()) or Llama.hidden(model, tokens,
                                                                                          positions, attend))
    sbd_loss(model, some_tokens(2, L), 3, doc_ids=PACKED)
    ntp_loss(model, some_tokens(2, L), doc_ids=PACKED)
    sbd_loss(model, some_tokens(1, L), 3)
    ids = [[0, 1, 2, 3, 0, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1]]
    assert seen == [[row + row for row in ids], ids, [[*range(L), *range(L)]]]


@pytest.mark.parametrize("is_packed", [False, True])
def test_ntp_loss_and_gradients_equal_definition(is_packed):
    model, tokens, doc_ids = tiny_model(), some_tokens(2, L), PACKED if is_packed else None
    loss_mask = torch.rand(2, L, generator=torch.Generator().manual_seed(2)) < 0.6
    nothing = torch.zeros(2, L, dtype=torch.bool)
    ntp, _ = one_by_one(model, tokens, tokens, nothing, 1, doc_ids)
    for mask, num_targets in itertools.product((None, loss_mask), (None, 17)):
        wanted, mean, _ = joint(ntp, {}, mask if mask is None else mask.tolist(), None, num_targets, 1.0, 1.0)
        ours = ntp_loss(model, tokens, mask, doc_ids, num_targets)
        assert_equal(ours, (wanted, mean, 0.0))
        assert_same_gradients(gradients(model, ours.loss),
                              torch.autograd.grad(wanted, model.parameters(), retain_graph=True))


def test_ntp_loss_of_long_packed_rows_equals_dense_formulation():
    model, tokens = tiny_model(), some_tokens(2, 300)
    nothing = torch.zeros(2, 300, dtype=torch.bool)
    for doc_ids in None, (torch.rand(2, 300, generator=torch.Generator().manual_seed(0)) < 0.02).cumsum(1):
        total, ntp, _ = dense_loss(model, tokens, tokens, nothing, 1, doc_ids)
        ours = ntp_loss(model, tokens, None, doc_ids, 700)
        assert_equal(ours, (total / 700, ntp, 0.0))
        assert_same_gradients(gradients(model, ours.loss), gradients(model, total / 700))


@pytest.mark.parametrize("is_packed", [False, True])
def test_gradient_accumulation_equals_the_large_batch(monkeypatch, is_packed):
    """Micro-batches divided by the NTP targets of the whole step, however unevenly those lie (section 3, step
    6)."""
    model, tokens = tiny_model(), some_tokens(6, L)
    shares = torch.tensor([0.1, 0.9, 0.5, 0.0, 1.0, 0.3])[:, None]
    loss_mask = torch.rand(6, L, generator=torch.Generator().manual_seed(2)) < shares
    is_masked = torch.rand(6, L, generator=torch.Generator().manual_seed(3)) < 0.5
    doc_ids = PACKED.repeat(3, 1) if is_packed else None

    def loss(rows, num_targets):
        fix_noise(monkeypatch, is_masked[rows])
        return sbd_loss(model, tokens[rows], 3, loss_mask[rows],
                        doc_ids=None if doc_ids is None else doc_ids[rows],
                        num_targets=num_targets).loss

    large = loss(slice(0, 6), None)
    crosses = doc_ids is not None and doc_ids[:, 1:] != doc_ids[:, :-1]
    num_targets = int((loss_mask[:, 1:] & ~torch.as_tensor(crosses)).sum())
    for cuts in (0, 2, 4, 6), (0, 1, 6), (0, 3, 4, 6):
        micro = [loss(slice(a, b), num_targets) for a, b in zip(cuts, cuts[1:])]
        assert sum(micro).item() == pytest.approx(large.item(), rel=ROUNDING)
        accumulated = [sum(g) for g in zip(*(torch.autograd.grad(m, model.parameters(), retain_graph=True)
                                             for m in micro))]
        assert_same_gradients(accumulated, torch.autograd.grad(large, model.parameters(), retain_graph=True))


# ------------------------------------------------------------------------------ what may not reach what

def hidden_states(model, monkeypatch, tokens, is_masked, block_size, doc_ids=None):
    """Clean and noisy hidden states before the head, each (B, L, C), of one sbd_loss call with that noise."""
    fix_noise(monkeypatch, is_masked)
    seen = []
    monkeypatch.setattr(model, "hidden", lambda *args: seen.append(Llama.hidden(model, *args)) or seen[0])
    with torch.no_grad():
        sbd_loss(model, tokens, block_size, doc_ids=doc_ids)
    return seen[0].chunk(2, 1)


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("is_packed", [False, True])
def test_what_may_see_a_token_does_and_nothing_else(monkeypatch, block_size, is_packed):
    """Perturb token i, then its mask: bit for bit, only clean tokens from i on, later blocks, and i's own
    block where i is shown there, may change; all within i's document. So a masked token's target never
    reaches its own logits nor its block's, the noisy half never reaches the clean half, later clean tokens
    never reach earlier blocks, and documents never meet."""
    model, length = tiny_model(), 14
    tokens, doc_ids = some_tokens(1, length), torch.tensor([[0] * 5 + [1] * 9]) if is_packed else None
    is_masked = torch.rand(1, length, generator=torch.Generator().manual_seed(4)) < 0.5
    assert is_masked.any() and not is_masked.all()
    clean, noisy = hidden_states(model, monkeypatch, tokens, is_masked, block_size, doc_ids)
    for i in range(length):
        start, end = next((s, e) for s, e in documents(doc_ids[0].tolist() if is_packed else None, length)
                          if s <= i < e)
        block = {j: (j - start) // block_size for j in range(start, end)}

        other = tokens.clone()
        other[0, i] = (other[0, i] + 1) % MASK
        clean2, noisy2 = hidden_states(model, monkeypatch, other, is_masked, block_size, doc_ids)
        assert (clean != clean2).any(-1)[0].tolist() == [i <= j < end for j in range(length)]
        assert (noisy != noisy2).any(-1)[0].tolist() == [
            j in block and (block[j] > block[i] or block[j] == block[i]
                            and not is_masked[0, i].item()) for j in range(length)]

        flipped = is_masked.clone()
        flipped[0, i] = ~flipped[0, i]
        clean2, noisy2 = hidden_states(model, monkeypatch, tokens, flipped, block_size, doc_ids)
        assert torch.equal(clean, clean2)
        assert (noisy != noisy2).any(-1)[0].tolist() == [block.get(j) == block[i] for j in range(length)]


def test_rows_of_a_batch_never_meet(monkeypatch):
    model, tokens = tiny_model(), some_tokens(3, L)
    is_masked = torch.rand(3, L, generator=torch.Generator().manual_seed(4)) < 0.5
    other = tokens.clone()
    other[1] = (other[1] + 1) % MASK
    for before, after in zip(*(hidden_states(model, monkeypatch, x, is_masked, 3) for x in (tokens, other))):
        assert torch.equal(before[::2], after[::2]) and not torch.equal(before[1], after[1])


# ------------------------------------------------------------------------------------ what is never built

@pytest.mark.parametrize("most", [5 * V, 16 * V + 3, 1])
def test_head_runs_on_targets_alone_and_on_few_of_them_at_a_time(monkeypatch, most):
    """Forward and recomputed in backward: no logits of unmasked noisy positions, nor more than LOGITS at a
    time (one row at least); the loss and the gradients do not depend on it."""
    model, tokens = tiny_model(), some_tokens(2, 25)
    loss_mask = torch.rand(2, 25, generator=torch.Generator().manual_seed(2)) < 0.8
    is_masked = torch.rand(2, 25, generator=torch.Generator().manual_seed(3)) < 0.3
    fix_noise(monkeypatch, is_masked)
    whole = sbd_loss(model, tokens, 4, loss_mask)
    monkeypatch.setattr(sbd_loss_file, "LOGITS", most)
    rows = []
    hook = model.lm_head.register_forward_hook(lambda module, args, out: rows.append(out.numel() // V))
    chunked = sbd_loss(model, tokens, 4, loss_mask)
    assert sum(rows) == int(loss_mask[:, 1:].sum() + (is_masked & loss_mask).sum())
    assert max(rows) == max(1, most // V)
    n = len(rows)
    ours = gradients(model, chunked.loss)
    assert sorted(rows[n:]) == sorted(rows[:n])
    hook.remove()
    assert chunked.loss.item() == pytest.approx(whole.loss.item(), rel=ROUNDING)
    assert_same_gradients(ours, gradients(model, whole.loss))


def test_at_most_256_megabytes_of_logits_in_float32():
    assert sbd_loss_file.LOGITS * 4 <= 256 * 2 ** 20


class Shapes(TorchDispatchMode):
    """The shapes of all tensors that any operation returned."""
    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.shapes |= {tuple(x.shape) for x in (out if isinstance(out, (tuple, list)) else (out,))
                        if isinstance(x, torch.Tensor)}
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_mask_per_pair_and_no_logits_of_all_positions_are_built(monkeypatch, dtype):
    """Forward and backward of a row of 1024: the largest tensor is smaller than one head's (2L, 2L), and the
    only tensors as wide as the vocabulary are the head's weight and chunks of at most LOGITS elements."""
    model, length, vocab = tiny_model(dtype=dtype, vocab_size=997, mask_id=996), 1024, 997
    monkeypatch.setattr(sbd_loss_file, "LOGITS", 100 * vocab)
    with Shapes() as seen:
        sbd_loss(model, some_tokens(1, length), 16, doc_ids=torch.zeros(1, length, dtype=torch.long),
                 eta=0.5).loss.backward()
    assert max(map(math.prod, seen.shapes)) < (2 * length) ** 2 / 2
    wide = {s for s in seen.shapes if vocab in s and s not in [(vocab,), (vocab, 16), (16, vocab)]}
    assert wide and max(map(math.prod, wide)) <= 100 * vocab


# ----------------------------------------------------------------------------------------------- the noise

def test_masked_tokens_are_the_mask_id_and_the_others_untouched():
    tokens = some_tokens(50, 40)
    tokens[0, :5] = MASK                                                       # in the text itself: not noise
    noisy, is_masked = mask_tokens(tokens, MASK, 0.5, torch.Generator().manual_seed(0))
    assert is_masked.dtype == torch.bool and noisy.dtype == tokens.dtype
    assert noisy.shape == is_masked.shape == tokens.shape
    assert (noisy[is_masked] == MASK).all() and torch.equal(noisy[~is_masked], tokens[~is_masked])
    assert not is_masked[0, :5].all()
    assert not mask_tokens(tokens, MASK, 0.0)[1].any() and mask_tokens(tokens, MASK, 1.0)[1].all()
    assert torch.equal(mask_tokens(tokens, MASK, is_masked.float())[1], is_masked)   # certain


def test_each_token_is_masked_with_its_rows_probability():
    """Within 4.5 standard deviations of the binomial, once in 150,000 by chance; and independently of its
    neighbour."""
    eta = torch.tensor([[0.0], [0.05], [0.3], [0.7], [1.0]])
    n = 40_000
    _, is_masked = mask_tokens(torch.zeros(5, n, dtype=torch.long), MASK, eta,
                               torch.Generator().manual_seed(0))
    for p, row in zip(eta[:, 0].tolist(), is_masked.double()):
        assert abs(row.mean().item() - p) <= 4.5 * math.sqrt(p * (1 - p) / n)
        assert abs((row[1:] * row[:-1]).mean().item() - p * p) <= 4.5 * math.sqrt(3 * p * p * (1 - p * p) / n)


def test_eta_is_uniform_and_drawn_once_a_row():
    """Kolmogorov-Smirnov on each row's share of masks, 1.95 / sqrt(rows): once in 1000 by chance; each share
    itself is known to 0.5 / sqrt(4000) = 0.008. One eta a row: both halves of a row agree to their binomial
    noise."""
    rows, n = 2000, 4000
    _, is_masked = mask_tokens(torch.zeros(rows, n, dtype=torch.long), MASK, None,
                               torch.Generator().manual_seed(0))
    share = is_masked.double().mean(1).sort().values
    assert (share - (torch.arange(rows) + 0.5) / rows).abs().max() < 1.95 / math.sqrt(rows) + 0.008
    first, second = is_masked.double().view(rows, 2, n // 2).mean(2).unbind(1)
    assert (first - second).abs().max() < 6 * math.sqrt(2 * 0.25 / (n // 2))   # 6 deviations, of 2000 rows


def test_noise_follows_its_generator_alone():
    tokens = some_tokens(4, 60)
    def draw(seed, eta=None):
        return mask_tokens(tokens, MASK, eta, torch.Generator().manual_seed(seed))[1]
    model, state = tiny_model(), torch.get_rng_state()
    assert torch.equal(draw(1), draw(1)) and torch.equal(draw(1, 0.4), draw(1, 0.4))
    assert not torch.equal(draw(1), draw(2))
    a, b, c = (sbd_loss(model, tokens, 4, generator=torch.Generator().manual_seed(seed)).loss.item()
               for seed in (1, 1, 2))
    assert a == b != c
    assert torch.equal(torch.get_rng_state(), state)  # the global generator was not touched
