"""Which masked tokens to reveal now: Eq. 8 and Eq. 18 of the paper (B.1), and Fast-dLLM's two rules.

Everything here sees logits at the positions of a block, never a model. The mask id must be minus infinity
in them already. Every rule is monotone in the number revealed, so each row's choice is a prefix of an order.

Shapes: B batch, k block positions, V vocabulary. `masked` marks the positions still masked.
"""
import torch
import torch.nn.functional as F


def distribution(logits, temperature=0.0, top_k=None, top_p=None):
    """logits (..., V) -> probabilities (..., V), float32, or float64 if the logits are.

    Temperature, then top-k, then top-p (the smallest set of most probable tokens whose sum reaches top_p, the
    crossing one kept), then renormalised; ties go to the lower id. Temperature 0 leaves the distribution alone:
    it is the argmax that is taken from it. This is the one place that turns logits into probabilities.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature == 0:
        return logits.softmax(-1)
    p = (logits / temperature).softmax(-1)
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
    return eb_rule(distribution(logits), masked, gamma)


def eb_confidence_select(logits, masked, gamma):
    """Eq. 18 (B.1): in order of falling confidence, the largest s with sum - max of the first s entropies <= gamma."""
    return eb_confidence_rule(distribution(logits), masked, gamma)


def factor_select(logits, masked, factor):
    """Fast-dLLM's factor rule: the largest n with (n + 1)(1 - c_n) < factor, or 1. B.1 prints c_n for 1 - c_n."""
    return factor_rule(distribution(logits), masked, factor)


def threshold_select(logits, masked, threshold):
    """Fast-dLLM's threshold rule: every position with confidence >= threshold, and at least the most confident."""
    return threshold_rule(distribution(logits), masked, threshold)


# The same rules from probabilities (..., k, V), so that the decoding loop computes those once.

def eb_rule(p, masked, gamma):
    H = entropy_of(p)

    def good(order, n):   # the sum excludes the s-th: shifted, since subtracting it again would round small ones away
        return F.pad(sorted_by(H, order, masked)[..., :-1].cumsum(-1), (1, 0)) <= gamma

    return first_of_order(H.masked_fill(~masked, torch.inf), masked, good)


def eb_confidence_rule(p, masked, gamma):
    H = entropy_of(p)

    def good(order, n):
        taken = sorted_by(H, order, masked)
        return taken.cumsum(-1) - taken.cummax(-1).values <= gamma

    return first_of_order(-confidence(p, masked), masked, good)


def factor_rule(p, masked, factor):
    c = confidence(p, masked)
    return first_of_order(-c, masked, lambda order, n: (n + 1) * (1 - sorted_by(c, order, masked)) < factor)


def threshold_rule(p, masked, threshold):
    c = confidence(p, masked)
    return first_of_order(-c, masked, lambda order, n: sorted_by(c, order, masked) >= threshold)


def confidence(p, masked):
    """c = max_v p(v), below every real one where nothing is masked."""
    return p.amax(-1).masked_fill(~masked, -torch.inf)


def sorted_by(values, order, masked):
    """values in `order`, 0 where the position is not masked (those come last in every order)."""
    return values.masked_fill(~masked, 0).gather(-1, order)


def first_of_order(key, masked, good):
    """Reveal the masked positions of smallest `key` for as long as good(order, n) holds, at least one.

    key (..., k); ties go to the leftmost position; n = 1, 2, ..., k counts along the order.
    """
    order = key.sort(dim=-1, stable=True).indices
    n = torch.arange(1, key.shape[-1] + 1, device=key.device)
    keep = good(order, n).cummin(-1).values | (n == 1)      # stops at the first failure
    return torch.zeros_like(masked).scatter(-1, order, keep) & masked


SAMPLERS = {"eb": eb_rule, "eb-confidence": eb_confidence_rule, "factor": factor_rule, "threshold": threshold_rule}
