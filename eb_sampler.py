"""Logits in, tokens and their order out: probabilities, draws, and which masked tokens to reveal now.

Eq. 8 and Eq. 18 of the paper (B.1), Fast-dLLM's two rules, and the noise of method section 10. Everything
here sees logits at some positions, never a model. The mask id must be minus infinity in them already.

Shapes: B batch, k block positions, V vocabulary, N rows of logits. `masked` marks the positions still masked.
"""
import functools

import numpy as np
import torch


def probabilities(logits, temperature=1.0, top_k=None, top_p=None):
    """logits (..., V) -> probabilities (..., V), float32, or float64 if the logits are.

    Temperature, then top-k, then top-p, then renormalised. This is the one place that makes probabilities of
    logits.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature != 1:  # shifted: a tiny temperature must not overflow
        logits = (logits - logits.amax(-1, keepdim=True)) / max(temperature, 1e-30)
    p = logits.softmax(-1)
    if top_k is not None and top_k < p.shape[-1]:
        p = most_probable(p, p.topk(top_k).values)
    if top_p is not None and top_p < 1:
        least = top_p * (1 - 1e-12)                                # rounding may leave a sum just below it
        n = p.shape[-1] if p.is_cuda else 128  # on the CPU a full sort costs more than a forward
        while True:
            ranked = p.topk(min(n, p.shape[-1])).values            # (..., n), falling
            before = torch.zeros_like(ranked, dtype=torch.float64)
            before[..., 1:] = ranked.double().cumsum(-1)[..., :-1]   # the mass of the more probable ones
            if n >= p.shape[-1] or bool((before[..., -1] >= least).all()):
                break
            n *= 8
        p = most_probable(p, ranked.where(before < least, torch.inf))
    return p


def most_probable(p, ranked):
    """p (..., V) cut to the ids whose probabilities, or inf, `ranked` (..., n) holds, and renormalised.

    Of equal ones the lower ids are kept."""
    least = ranked.amin(-1, keepdim=True)
    ties, equal = (ranked == least).sum(-1, keepdim=True), p == least
    p = p.where((p > least) | equal & (equal.cumsum(-1, dtype=torch.int32) <= ties), 0)
    return p / p.sum(-1, keepdim=True)


def entropy_of(p):
    """Entropy (...,) of probabilities (..., V), nats, with 0 log 0 = 0 and never below 0."""
    return torch.special.entr(p).sum(-1).clamp(min=0)


def entropy(logits):
    """H of logits (..., V) -> (...,) nats, in float64 if the logits are float64, else in float32."""
    return entropy_of(probabilities(logits))


# ------------------------------------------------------------------------------------------ draws

def mix(x):
    """A bijection of 64-bit words that scatters neighbours (the finaliser of splitmix64), x uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def noise_keys(seeds, positions):
    """What the noise of a place depends on, beside the id: seeds (B,), positions (B, n) -> int32 (B, n, 4).

    Computed on the host, where both are known before the forward; seeds modulo 2^64."""
    golden, seeds = np.uint64(0x9E3779B97F4A7C15), np.array([s % 2**64 for s in seeds], np.uint64)
    with np.errstate(over="ignore"):
        at = mix(seeds + golden)[:, None] + np.asarray(positions, np.int64).astype(np.uint64) * golden
        words = np.stack((mix(at), mix(at ^ np.uint64(0xD1B54A32D192ED03))), -1)
    return torch.from_numpy(words.view(np.int32))


@functools.lru_cache(maxsize=8)
@torch.inference_mode(False)
def scattered(V, device):
    """(V,) int32, a scattered word for each id (murmur3's finaliser), no two alike: one for all places."""
    x = np.arange(1, V + 1, dtype=np.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return torch.from_numpy(x.view(np.int32)).to(device)


def noise(keys, V):
    """Method section 10: the noise E, standard exponentials (N, V), float64, of keys (N, 4); g = -log E.

    A counter-based hash: 32 bits by multiplications and shifts, keyed by the place and applied to the id. In
    place and few, since over V ids a dozen passes count."""
    a, b, c, d = (keys[:, i, None] for i in range(4))              # (N, 1); multipliers are made odd
    x = scattered(V, keys.device) ^ a                              # (N, V), int32: arithmetic modulo 2^32
    x.mul_(b | 1)
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(c | 1)     # the masks make the shifts logical ones
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).bitwise_xor_(d).mul_(0x2C1B3C6D)
    return x.double().add_(2**31 + 0.5).mul_(-2.0**-32).log1p_().neg_()   # -log(1 - u), u in steps of 2^-32


def choose(p, keys):
    """choose(p, t) of method section 10: the ids (...,) with the largest log p + g, a draw from p (..., V).

    keys (..., 4) of each place. The largest p / E is the same id, and needs one logarithm less."""
    V = p.shape[-1]
    size = p.numel() if p.is_cuda else max(1, 2**17 // V)          # on the CPU, rows that stay in the cache
    parts = zip(p.reshape(-1, V).split(size), keys.reshape(-1, 4).split(size))
    return torch.cat([(rows / noise(k, V)).max(-1).indices for rows, k in parts]).view(p.shape[:-1])


# ------------------------------------------------------------------------------------------ what to reveal

def eb_select(logits, masked, gamma):
    """Eq. 8, the entropy-bounded choice: reveal the s most certain masked positions, s the largest with
    sum of the first s - 1 entropies <= gamma. The s-th is not in the sum: at least one is revealed.

    logits (k, V) or (B, k, V), masked (k,) or (B, k) bool, gamma nats -> bool like masked, True = reveal.
    """
    return select(eb_rule, logits, masked, gamma)


def eb_confidence_select(logits, masked, gamma):
    """Eq. 18 (B.1): by falling confidence, the largest s with sum - max of the first s entropies <= gamma."""
    return select(eb_confidence_rule, logits, masked, gamma)


def factor_select(logits, masked, factor):
    """Fast-dLLM's factor rule: the largest n with (n + 1)(1 - c_n) < factor, or 1. B.1 prints c_n."""
    return select(factor_rule, logits, masked, factor)


def threshold_select(logits, masked, threshold):
    """Fast-dLLM's threshold rule: every confidence >= threshold, and at least the most confident position."""
    return select(threshold_rule, logits, masked, threshold)


@torch.no_grad()
def select(rule, logits, masked, bound):
    p = probabilities(logits)
    H, c, on_host = (t.cpu().numpy() for t in (entropy_of(p), p.amax(-1), masked))
    return torch.from_numpy(rule(H, c, on_host, bound)).to(masked.device)


# The rules themselves see entropies H and confidences c, NumPy arrays (..., k): a few numbers a row that the
# decoding loop has to fetch from the device anyway, and for which a dozen kernel launches would be too many.
# Every rule is monotone in the number revealed, so each row's choice is a prefix of an order.

def eb_rule(H, c, masked, gamma):
    def good(order):   # the sum excludes the s-th: shifted, since subtracting it would round small ones away
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
    """Reveal the masked positions of smallest key (..., k) for as long as good(order) holds, at least one;
    ties go to the leftmost position."""
    order = np.argsort(np.where(masked, key, np.inf), -1, kind="stable")
    keep = np.logical_and.accumulate(good(order), -1)           # stops at the first failure
    keep[..., 0] = True
    reveal = np.empty_like(masked)
    np.put_along_axis(reveal, order, keep, -1)
    return reveal & masked


SAMPLERS = {"eb": eb_rule, "eb-confidence": eb_confidence_rule, "factor": factor_rule,
            "threshold": threshold_rule}
