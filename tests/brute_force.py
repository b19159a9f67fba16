"""Decoding without a cache, slowly and plainly: what the tests of generate.py compare with.

Every prediction is one forward over the whole sequence with an explicit mask; every choice is a search in Python.
Shapes: B rows, T tokens, V vocabulary.
"""
import itertools
import math

import numpy as np
import torch

from model import Llama, LlamaConfig


def tiny_model(kind="llama", vocab_size=13, mask_id=5, seed=0, head=0.5, body=0.4, context=512, dtype=torch.float64, **shape):
    """Random weights, never trained. `head` sets how peaked the predictions are, `body` how much they depend on
    the text."""
    config = LlamaConfig(**dict(model_type=kind, vocab_size=vocab_size, mask_id=mask_id, hidden_size=16, intermediate_size=24,
                                num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, rope_theta=100.0,
                                head_dim=6 if kind == "qwen3" else None, max_position_embeddings=context,
                                tie_word_embeddings=False) | shape)
    model, generator = Llama(config).eval(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.25 * noise if weight.dim() == 1 else
                         noise if "embed" in name else noise * (head if "lm_head" in name else body))
    return model.to(dtype).requires_grad_(False)


@torch.inference_mode()
def full_logits(model, tokens, block=0, mask_out=True):
    """tokens (T,) or (B, T) -> logits (.., T, V) of one forward without a cache, whose mask is written out: causal,
    and the last `block` tokens see each other in both directions. The mask id's logit is minus infinity."""
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


def probabilities(logits, temperature=0.0, top_k=None, top_p=None):
    """One position's logits (V,) -> the distribution that is drawn from (V,), float64, as section 4 words it."""
    z = np.asarray(logits, dtype=np.float64) / (temperature or 1.0)
    p = np.exp(z - z.max())
    p /= p.sum()
    if temperature == 0:
        return p
    ranked = sorted(range(len(p)), key=lambda v: (-p[v], v))
    if top_k is not None:
        ranked = ranked[:top_k]
        p = np.array([p[v] if v in ranked else 0.0 for v in range(len(p))])
        p /= p.sum()
    if top_p is not None:
        kept, mass = [], 0.0
        for v in ranked:
            if mass >= top_p:
                break
            kept.append(v)
            mass += p[v]
        p = np.array([p[v] if v in kept else 0.0 for v in range(len(p))])
    return p / p.sum()


# ------------------------------------------------------------------------------------------ section 4: who is revealed

def choose(sampler, p, masked, bound):
    """p: position -> probabilities (V,), at temperature 0 -> the set of masked positions to reveal now, by trying every s."""
    H = {i: -sum(x * math.log(x) for x in p[i] if x > 0) for i in masked}      # nats
    c = {i: max(p[i]) for i in masked}
    by_entropy, by_confidence = sorted(masked, key=lambda i: (H[i], i)), sorted(masked, key=lambda i: (-c[i], i))
    sizes = range(1, len(masked) + 1)
    if sampler == "eb":
        order, good = by_entropy, lambda s: sum(H[i] for i in by_entropy[:s - 1]) <= bound
    elif sampler == "eb-confidence":
        order, good = by_confidence, lambda s: sum(H[i] for i in by_confidence[:s]) - max(H[i] for i in by_confidence[:s]) <= bound
    elif sampler == "factor":
        order, good = by_confidence, lambda s: (s + 1) * (1 - c[by_confidence[s - 1]]) < bound
    else:
        order, good = by_confidence, lambda s: c[by_confidence[s - 1]] >= bound
    return set(order[:max((s for s in sizes if good(s)), default=1)])


# ------------------------------------------------------------------------------------------ section 5: both modes

def ending(text, limit, stop_ids):
    """The known text -> (how long the output is, whether a stop id ends it), or None while it goes on."""
    for n, token in enumerate(text[:limit], 1):
        if token in stop_ids:
            return n, True
    return (limit, False) if len(text) >= limit else None


def sbd(model, prompt, k, limit, stop_ids=(), sampler="eb", bound=0.1):
    """Set Block Decoding at temperature 0 -> (tokens, nfe, stopped, the blocks as they stood after each forward)."""
    text, nfe, trail = [], 0, []
    if limit == 0:
        return [], 0, False, []
    while True:
        block = [None] * k
        while None in block:
            noisy = [model.config.mask_id if t is None else t for t in block]
            logits = full_logits(model, [*prompt, *text, *noisy], block=k)[-k:].numpy()
            nfe += 1
            masked = [i for i in range(k) if block[i] is None]
            for i in choose(sampler, {i: probabilities(logits[i]) for i in masked}, masked, bound):
                block[i] = int(logits[i].argmax())
            trail.append(list(block))
            known = text + list(itertools.takewhile(lambda t: t is not None, block))
            if end := ending(known, limit, stop_ids):
                return known[:end[0]], nfe, end[1], trail
        text += block


def greedy(model, prompt, limit, stop_ids=()):
    """Next-token decoding at temperature 0 -> (tokens, stopped)."""
    text = []
    while not (end := ending(text, limit, stop_ids)):
        text.append(int(full_logits(model, [*prompt, *text])[-1].argmax()))
    return text, end[1]


# ------------------------------------------------------------------------------------------ exact distributions

def exact_distribution(model, prompt, length, block=0, **sampling):
    """The probability of every continuation of `length` tokens -> array of shape (V, ..., V), by running them all.

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
        for t, row in zip(likely, logits.numpy()):
            following[t] = p[t] * probabilities(row, **sampling)
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
