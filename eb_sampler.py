"""Which masked tokens to reveal now: Eq. 8 and Eq. 18 of the paper (B.1), and Fast-dLLM's two rules.

Everything here sees logits at the positions of a block, never a model. The mask id must be minus infinity
in them already. Every rule is monotone in the number revealed, so each row's choice is a prefix of an order.

Shapes: B batch, k block positions, V vocabulary. `masked` marks the positions still masked.
"""
import numpy as np
import torch


def distribution(logits, temperature=0.0, top_k=None, top_p=None):
    """logits (..., V) -> probabilities (..., V), float32, or float64 if the logits are.

    Temperature, then top-k, then top-p (the smallest set of most probable tokens whose sum reaches top_p, the
    crossing one kept), then renormalised; ties go to the lower id. Temperature 0 leaves the distribution alone:
    it is the argmax that is taken from it. This is the one place that turns logits into probabilities.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature == 0:
        return logits.softmax(-1)
    logits = logits - logits.amax(-1, keepdim=True)   # a tiny temperature must not overflow
    p = (logits / max(temperature, 1e-30)).softmax(-1)
    if top_k is None and top_p is None:
        return p
    ranked, ids = p.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        ranked[..., top_k:] = 0
        ranked = ranked / ranked.sum(-1, keepdim=True)
    if top_p is not None:
        before = ranked.cumsum(-1) - ranked            # the mass of the more probable ones
        ranked = torch.where(before < top_p, ranked, 0)
    return torch.zeros_like(p).scatter(-1, ids, ranked / ranked.sum(-1, keepdim=True))


def entropy_of(p):
    """Entropy (...,) of probabilities (..., V), nats, with 0 log 0 = 0 and never below 0."""
    return torch.special.entr(p).sum(-1).clamp(min=0)


def entropy(logits):
    """H of logits (..., V) -> (...,) nats, in float64 if the logits are float64, else in float32."""
    return entropy_of(distribution(logits))


def eb_select(logits, masked, gamma):
    """Eq. 8, the entropy-bounded choice: reveal the s most certain masked positions, s the largest with
    sum of the first s - 1 entropies <= gamma. The s-th is not in the sum: at least one is revealed.

    logits (k, V) or (B, k, V), masked (k,) or (B, k) bool, gamma nats -> bool like masked, True = reveal.
    """
    return select(eb_rule, logits, masked, gamma)


def eb_confidence_select(logits, masked, gamma):
    """Eq. 18 (B.1): in order of falling confidence, the largest s with sum - max of the first s entropies <= gamma."""
    return select(eb_confidence_rule, logits, masked, gamma)


def factor_select(logits, masked, factor):
    """Fast-dLLM's factor rule: the largest n with (n + 1)(1 - c_n) < factor, or 1. B.1 prints c_n for 1 - c_n."""
    return select(factor_rule, logits, masked, factor)


def threshold_select(logits, masked, threshold):
    """Fast-dLLM's threshold rule: every position with confidence >= threshold, and at least the most confident."""
    return select(threshold_rule, logits, masked, threshold)


@torch.no_grad()
def select(rule, logits, masked, bound):
    p = distribution(logits)
    H, c, on_host = (t.cpu().numpy() for t in (entropy_of(p), p.amax(-1), masked))
    return torch.from_numpy(rule(H, c, on_host, bound)).to(masked.device)


# The rules themselves see entropies H and confidences c, NumPy arrays (..., k): a few numbers a row that the decoding
# loop has to fetch from the device anyway, and for which a dozen kernel launches would be too many.

def eb_rule(H, c, masked, gamma):
    def good(order):   # the sum excludes the s-th: shifted, since subtracting it again would round small ones away
        total = np.cumsum(taken(H, order, masked), -1)
        return np.concatenate((np.zeros_like(total[..., :1]), total[..., :-1]), -1) <= gamma

    return first_of_order(H, masked, good)


def eb_confidence_rule(H, c, masked, gamma):
    def good(order):
        h = taken(H, order, masked)
        return np.cumsum(h, -1) - np.maximum.accumulate(h, -1) <= gamma

    return first_of_order(-c, masked, good)


def factor_rule(H, c, masked, factor):
    n = np.arange(1, c.shape[-1] + 1, dtype=c.dtype)
    return first_of_order(-c, masked, lambda order: (n + 1) * (1 - taken(c, order, masked)) < factor)


def threshold_rule(H, c, masked, threshold):
    return first_of_order(-c, masked, lambda order: taken(c, order, masked) >= threshold)


def taken(values, order, masked):
    """values in `order`, 0 where the position is not masked (those come last in every order)."""
    return np.take_along_axis(np.where(masked, values, values.dtype.type(0)), order, -1)


def first_of_order(key, masked, good):
    """Reveal the masked positions of smallest key (..., k) for as long as good(order) holds, at least one; ties go to
    the leftmost position."""
    order = np.argsort(np.where(masked, key, np.inf), -1, kind="stable")
    keep = np.logical_and.accumulate(good(order), -1)           # stops at the first failure
    keep[..., 0] = True
    reveal = np.empty_like(masked)
    np.put_along_axis(reveal, order, keep, -1)
    return reveal & masked


SAMPLERS = {"eb": eb_rule, "eb-confidence": eb_confidence_rule, "factor": factor_rule, "threshold": threshold_rule}
