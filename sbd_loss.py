"""The loss of Set Block Decoding: the noise (Eq. 13), the training mask (Fig. 8, 9) and the joint loss
(Eq. 14, Algorithm 1).

One forward runs over [x | x_hat], 2L tokens: the clean half learns next-token prediction (NTP), the noisy
half masked-token prediction (MATP) given the clean past of each block.

Shapes: B batch, L length, k block size, V vocabulary, C hidden size, N targets.
"""
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from hf import need
from kernels.sbd_attention import causal_attend, intervals, noisy_attend, sbd_attend

LOGITS = 2 ** 26   # logits alive at a time: 256 MB in float32


@dataclass
class SBDLoss:
    loss: torch.Tensor       # Eq. 14 over num_targets, differentiable
    ntp: torch.Tensor        # mean cross-entropy of the NTP targets, nats, no gradient
    matp: torch.Tensor       # mean cross-entropy of the MATP targets, nats, no gradient
    num_ntp: torch.Tensor    # the NTP targets of this call
    num_matp: torch.Tensor   # its MATP targets


def mask_tokens(tokens, mask_id: int, eta=None, generator=None):
    """Eq. 13: each token becomes `mask_id` with its row's probability eta.

    tokens (B, L); eta: a number, (B, 1), by default U(0, 1) a row, or (B, L) -> noisy, is_masked (B, L).
    """
    if eta is None:
        eta = torch.rand(tokens.shape[0], 1, generator=generator, device=tokens.device)
    is_masked = torch.rand(tokens.shape, generator=generator, device=tokens.device) < eta
    return torch.where(is_masked, mask_id, tokens), is_masked


def sbd_attention_mask(seq_len: int, block_size: int):
    """Fig. 8, Fig. 9: bool (2L, 2L) over [clean | noisy], True = may attend. For reading and for tests."""
    q, key = torch.arange(seq_len)[:, None], torch.arange(seq_len)[None]
    clean_clean = key <= q
    noisy_clean = key // block_size < q // block_size
    noisy_noisy = key // block_size == q // block_size
    clean = torch.cat((clean_clean, torch.zeros_like(clean_clean)), 1)
    return torch.cat((clean, torch.cat((noisy_clean, noisy_noisy), 1)))


def ntp_targets(tokens, mask=None, doc_ids=None):
    """bool (B, L - 1): position i predicts token i + 1, if that is a target and in the same document."""
    is_target = torch.ones_like(tokens[:, 1:], dtype=torch.bool) if mask is None else mask[:, 1:].bool()
    return is_target if doc_ids is None else is_target & (doc_ids[:, 1:] == doc_ids[:, :-1])


def sbd_loss(model, tokens, block_size: int, loss_mask=None, ntp_mask=None, doc_ids=None, num_targets=None,
             ntp_weight=1.0, matp_weight=1.0, eta=None, generator=None, backend="auto") -> SBDLoss:
    """Eq. 14, Algorithm 1: one step's loss, (ntp_weight * NTP + matp_weight * MATP) / num_targets, of sums.

    tokens (B, L); loss_mask (B, L) bool: the targets of both terms, default all; ntp_mask: those of NTP where
    they differ; doc_ids (B, L): packed documents; num_targets: the NTP targets of the whole optimizer step,
    default this call's, at least 1. The noise is mask_tokens(tokens, model.config.mask_id, eta, generator).
    """
    need(model.config.mask_id is not None,
         "the model's config has no mask_id: set it to an id of the vocabulary that text never uses")
    B, L = tokens.shape
    attend = sbd_attend(L, block_size, doc_ids, tokens.device, backend)   # one mask for all layers
    noisy, is_masked = mask_tokens(tokens, model.config.mask_id, eta, generator)
    positions = torch.arange(L, device=tokens.device) - intervals(L, block_size, doc_ids, tokens.device)[0]
    hidden = model.hidden(torch.cat((tokens, noisy), 1), torch.cat((positions, positions), 1),
                          lambda layer, q, k, v: attend(q, k, v))
    ntp_at = ntp_targets(tokens, loss_mask if ntp_mask is None else ntp_mask, doc_ids)
    matp_at = is_masked if loss_mask is None else is_masked & loss_mask.bool()     # same position: no shift
    loss = row_losses(model, torch.cat((hidden[:, :L - 1][ntp_at], hidden[:, L:][matp_at])),
                      torch.cat((tokens[:, 1:][ntp_at], tokens[matp_at])))        # (N,)
    n = ntp_at.sum()
    is_ntp = torch.arange(len(loss), device=loss.device) < n
    ntp, matp = torch.where(is_ntp, loss, 0).sum(), torch.where(is_ntp, 0, loss).sum()
    over = n.clamp(min=1) if num_targets is None else max(num_targets, 1)
    return SBDLoss((ntp_weight * ntp + matp_weight * matp) / over, ntp.detach() / n.clamp(min=1),
                   matp.detach() / (len(loss) - n).clamp(min=1), n, len(loss) - n)


def ntp_loss(model, tokens, loss_mask=None, doc_ids=None, num_targets=None) -> SBDLoss:
    """Next-token prediction alone, with the same arguments: the baseline, and what SBD starts from."""
    L = tokens.shape[1]
    positions = torch.arange(L, device=tokens.device) - intervals(L, 1, doc_ids, tokens.device)[0]
    attend = causal_attend(L, doc_ids, tokens.device)
    hidden = model.hidden(tokens, positions, lambda layer, q, k, v: attend(q, k, v))
    at = ntp_targets(tokens, loss_mask, doc_ids)
    ntp, n = row_losses(model, hidden[:, :-1][at], tokens[:, 1:][at]).sum(), at.sum()
    over = n.clamp(min=1) if num_targets is None else max(num_targets, 1)
    return SBDLoss(ntp / over, ntp.detach() / n.clamp(min=1), torch.zeros_like(ntp.detach()), n,
                   torch.zeros_like(n))


def adapter_loss(model, tokens, block_size: int, loss_mask=None, doc_ids=None, num_targets=None,
                 targets="self", place0=False, eta=None, generator=None, backend="auto") -> SBDLoss:
    """Method section 11: the MATP term alone, through the model's adapter; the clean half has no gradients.

    targets: "data", the masked tokens, or "self", the base's own predictions of them, read off the clean
    half (of a document's first token there is none). place0: whether a block's first place is a target.
    Other arguments as in sbd_loss; stop copies are targets where loss_mask has them.
    """
    need(targets in ("self", "data"), f"targets {targets!r}: wanted self or data")
    need(model.adapter is not None, "the model has no adapter: adapter.attach(model, rank) gives it one")
    L, device, mask_id = tokens.shape[1], tokens.device, model.config.mask_id
    need(mask_id is not None, "the model's config has no mask_id: set it to an id that text never uses")
    noisy, is_masked = mask_tokens(tokens, mask_id, eta, generator)
    doc_start, block_start, *_ = intervals(L, block_size, doc_ids, device)
    index, past = torch.arange(L, device=device), []
    causal, attend = causal_attend(L, doc_ids, device), noisy_attend(L, block_size, doc_ids, device, backend)

    def clean_half(layer, q, k, v):
        past.append((k, v))
        return causal(q, k, v)

    with torch.no_grad():
        clean = model.hidden(tokens, index - doc_start, clean_half)
    hidden = model.hidden(noisy, index - doc_start, lambda layer, q, k, v: attend(
        q, *(torch.cat(pair, 2) for pair in zip(past[layer], (k, v)))), gate=True)
    at = is_masked if loss_mask is None else is_masked & loss_mask.bool()
    at = at if place0 else at & (index > block_start)
    at = at if targets == "data" else at & (index > doc_start)
    wanted = tokens[at] if targets == "data" else clean.roll(1, 1)[at]
    loss = FrozenHead.apply(hidden[at], wanted, model.lm_head.weight).sum()
    n = at.sum()
    over = ntp_targets(tokens, loss_mask, doc_ids).sum() if num_targets is None else num_targets
    return SBDLoss(loss / max(over, 1), torch.zeros_like(loss.detach()), loss.detach() / n.clamp(min=1),
                   torch.zeros_like(n), n)


class FrozenHead(torch.autograd.Function):
    """Cross-entropies (N,), nats, of a head that is not trained: hidden (N, C) against ids (N,), or against
    the head's own distribution behind other states (N, C).

    The gradient, (q - p) W a row, is taken along in chunks of rows: no logits are kept, or computed twice.
    """

    @staticmethod
    def forward(ctx, hidden, wanted, weight):
        exact, size = torch.promote_types(hidden.dtype, torch.float32), max(1, LOGITS // 16 // len(weight))
        losses, gradients = [], []
        for rows, target in zip(hidden.split(size), wanted.split(size)):
            log_q = F.linear(rows, weight).to(exact).log_softmax(-1)              # (n, V)
            if target.dim() == 1:
                losses.append(-log_q.gather(1, target[:, None])[:, 0])
                difference = log_q.exp_()
                difference.scatter_add_(1, target[:, None], -difference.new_ones(len(target), 1))
            else:
                p = F.linear(target, weight).to(exact).softmax(-1)
                losses.append(-(p * log_q).sum(-1))
                difference = log_q.exp_().sub_(p)
            gradients.append((difference.to(rows.dtype) @ weight.to(rows.dtype)).to(rows.dtype))
        ctx.save_for_backward(torch.cat(gradients) if gradients else hidden)
        return torch.cat(losses) if losses else hidden.new_zeros(0)

    @staticmethod
    def backward(ctx, out):
        gradient, = ctx.saved_tensors
        return out[:, None].to(gradient.dtype) * gradient, None, None


def row_losses(model, hidden, targets):
    """Cross-entropies (N,) in nats of hidden (N, C) against targets (N,), float32 at least.

    The head runs on chunks of rows that backward computes again: the (N, V) logits, 25 GB for a 128k
    vocabulary at 32k context, never exist at once.
    """
    def losses(rows, target):
        logits = model.lm_head(rows)                                              # (n, V)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, target, reduction="none")

    size = max(1, LOGITS // model.config.vocab_size)
    return torch.cat([checkpoint(losses, rows, target, use_reentrant=False)
                      for rows, target in zip(hidden.split(size), targets.split(size))])
