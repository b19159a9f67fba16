"""Decoding without a cache, slowly and plainly: what the tests of generate.py and eb_sampler.py trust.

Every prediction is one forward over the whole sequence with an explicit mask; every distribution is
worked out one number at a time in float64; every choice is a search. Only the noise of a place is the
project's own: it is a definition.

Shapes: B rows, T tokens, V vocabulary. `sampling` is temperature, top_k, top_p; positions count from the
end of the prompt.
"""
import functools
import itertools
import math

import numpy as np
import torch

from eb_sampler import noise, noise_keys
from model import Llama, LlamaConfig


def tiny_model(kind="llama", vocab_size=13, mask_id=5, seed=0, head=0.5, body=0.4, context=512,
               dtype=torch.float64, **shape):
    """Random weights, never trained. `head` sets how peaked the predictions are, `body` how much they
    depend on the text."""
    config = LlamaConfig(**dict(
        model_type=kind, vocab_size=vocab_size, mask_id=mask_id, hidden_size=16, intermediate_size=24,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, rope_theta=100.0,
        head_dim=6 if kind == "qwen3" else None, max_position_embeddings=context,
        tie_word_embeddings=False) | shape)
    model, generator = Llama(config).eval(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            normal = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.25 * normal if weight.dim() == 1 else
                         normal if "embed" in name else normal * (head if "lm_head" in name else body))
    return model.to(dtype).requires_grad_(False)


@torch.inference_mode()
def full_logits(model, tokens, block=0, mask_out=True):
    """tokens (T,) or (B, T) -> logits (.., T, V) of one forward without a cache, whose mask is written
    out: causal, and the last `block` tokens see each other in both directions. The mask id's logit is minus
    infinity."""
    tokens = torch.as_tensor(tokens)
    T = tokens.shape[-1]
    may = torch.ones(T, T, dtype=torch.bool).tril()
    may[T - block:, T - block:] = True

    def attend(layer, q, k, v):
        G = q.shape[1] // k.shape[1]                                          # query heads of a key head
        k, v = k.repeat_interleave(G, 1), v.repeat_interleave(G, 1)           # (B, H, T, D)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        return scores.masked_fill(~may, -torch.inf).softmax(-1) @ v

    logits = model.lm_head(model.hidden(tokens.view(-1, T), attend=attend)).view(*tokens.shape, -1)
    if mask_out and model.config.mask_id is not None:
        logits[..., model.config.mask_id] = -torch.inf
    return logits


# ------------------------------------------------------------ sections 4 and 10: distributions and draws

def probabilities(logits, temperature=1.0, top_k=None, top_p=None):
    """One position's logits, V numbers -> p, V numbers: temperature, then top-k, then top-p, then
    renormalised; ties to the lower id."""
    z = [float(x) / temperature for x in logits]
    p = [math.exp(x - max(z)) for x in z]
    kept = sorted(range(len(p)), key=lambda v: (-p[v], v))[:top_k]
    total = math.fsum(p[v] for v in kept)
    if top_p is not None and top_p < 1:
        mass = itertools.accumulate((p[v] / total for v in kept), initial=0.0)   # of the more probable ones
        kept = [v for v, before in zip(kept, mass) if before < top_p]            # the crossing one is kept
        total = math.fsum(p[v] for v in kept)
    kept = set(kept)
    return [p[v] / total if v in kept else 0.0 for v in range(len(p))]


@functools.cache
def gumbel(seed, position, V):
    """g(position, v) of section 10 for all ids v."""
    return [-math.log(E) for E in noise(noise_keys([seed], [[position]])[0], V)[0].tolist()]


def choose(p, seed, position):
    """Section 10: the id v with p(v) > 0 and the largest log p(v) + g(position, v); ties: the smaller."""
    g = gumbel(seed, position, len(p))
    score = {v: math.log(p[v]) + g[v] for v in range(len(p)) if p[v] > 0}
    return max(score, key=lambda v: (score[v], -v))


def token_at(logits, seed, position, temperature=0.0, **sampling):
    """-> the token at this position, and its probability in the distribution that it was taken from."""
    if temperature == 0:
        logits = list(map(float, logits))
        token, p = logits.index(max(logits)), probabilities(logits)
    else:
        p = probabilities(logits, temperature, **sampling)
        token = choose(p, seed, position)
    return token, p[token]


# ------------------------------------------------------------ section 4: who is revealed

def entropy(p):
    """H = -sum p log p in nats, 0 log 0 = 0."""
    return max(0.0, -math.fsum(x * math.log(x) for x in p if x > 0))


def allowed(rule, H, c, s, bound):
    """May the first s of an order be revealed? H, c: entropies and confidences in that order."""
    if rule == "eb":
        return math.fsum(H[:s - 1]) <= bound
    if rule == "eb-confidence":
        return math.fsum(H[:s]) - max(H[:s]) <= bound
    if rule == "factor":
        return (s + 1) * (1 - c[s - 1]) < bound
    return c[s - 1] >= bound


def revealed(rule, p, bound):
    """p: masked position -> untempered probabilities -> the set of positions to reveal now: the first s of
    the rule's order, s the largest of 1 .. |M| that is allowed, else 1."""
    H, c = {i: entropy(p[i]) for i in p}, {i: max(p[i]) for i in p}
    order = sorted(p, key=lambda i: (H[i] if rule == "eb" else -c[i], i))        # ties: the leftmost position
    H, c = [H[i] for i in order], [c[i] for i in order]
    return set(order[:max((s for s in range(1, len(p) + 1) if allowed(rule, H, c, s, bound)), default=1)])


# ------------------------------------------------------------ section 5: both modes

def ending(text, limit, stop_ids):
    """The known text -> (how long the output is, whether a stop id ends it), or None while it goes on."""
    for n, token in enumerate(text[:limit], 1):
        if token in stop_ids:
            return n, True
    return (limit, False) if len(text) >= limit else None


def sbd(model, prompt, k, limit, stop_ids=(), sampler="eb", bound=0.1, seed=0, **sampling):
    """Set Block Decoding -> (tokens, nfe, stopped, the blocks as they stood after each forward)."""
    text, nfe, trail = [], 0, []
    if limit == 0:
        return [], 0, False, []
    while True:
        block = [None] * k
        while None in block:
            noisy = [model.config.mask_id if t is None else t for t in block]
            logits = full_logits(model, [*prompt, *text, *noisy], block=k)[-k:].tolist()
            nfe += 1
            untempered = {i: probabilities(logits[i]) for i in range(k) if block[i] is None}
            for i in revealed(sampler, untempered, bound):
                block[i], _ = token_at(logits[i], seed, len(text) + i, **sampling)
            trail.append(list(block))
            known = text + list(itertools.takewhile(lambda t: t is not None, block))
            if end := ending(known, limit, stop_ids):
                return known[:end[0]], nfe, end[1], trail
        text += block


def ntp(model, prompt, limit, stop_ids=(), seed=0, **sampling):
    """Next-token decoding -> (tokens, stopped)."""
    text = []
    while not (end := ending(text, limit, stop_ids)):
        logits = full_logits(model, [*prompt, *text])[-1].tolist()
        text.append(token_at(logits, seed, len(text), **sampling)[0])
    return text, end[1]


# ------------------------------------------------------------ exact distributions

def exact_distribution(model, prompt, length, block=0, **sampling):
    """The probability of every continuation of `length` tokens -> array (V, ..., V), by running them all.

    block=0: next-token prediction; block=1: each token predicted at a mask in its own place (sbd, k = 1).
    """
    V = model.config.vocab_size
    p = np.ones(())
    for n in range(length):
        texts = list(itertools.product(range(V), repeat=n))
        likely = [t for t in texts if p[t] > 0]
        rows = torch.tensor([[*prompt, *t, *[model.config.mask_id] * block] for t in likely])
        logits = full_logits(model, rows, block)[:, -1]
        following = np.zeros((V,) * (n + 1))
        for t, row in zip(likely, logits.tolist()):
            following[t] = p[t] * np.array(probabilities(row, **sampling))
        p = following
    return p


def chi_squared(counts, p, expected_least=5.0):
    """p-value of observed counts against exact probabilities p, both flat. Cells of expectation under
    `expected_least` are merged into one; a count where p is 0 gives 0."""
    counts, p = np.asarray(counts, dtype=np.float64).ravel(), np.asarray(p).ravel()
    if (counts[p == 0] > 0).any():
        return 0.0
    expected, counts = p[p > 0] * counts.sum(), counts[p > 0]
    small = expected < expected_least
    cells = list(zip(expected[~small], counts[~small]))
    if small.any():
        cells.append((expected[small].sum(), counts[small].sum()))
    statistic = sum((o - e) ** 2 / e for e, o in cells)
    return torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2, dtype=torch.float64),
                                   torch.tensor(statistic / 2, dtype=torch.float64)).item()
