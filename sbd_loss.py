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
from kernels.sbd_attention import causal_attend, intervals, sbd_attend

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
