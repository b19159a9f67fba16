"""eb_sampler.py against a search over all s, written from the formulas of method.md section 4 in float64 Python."""
import math
import sys
from pathlib import Path

import pytest
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from eb_sampler import (distribution, eb_confidence_select, eb_select, entropy, entropy_of, eb_rule,   # noqa: E402
                        factor_select, threshold_select)

INF = math.inf


# ----------------------------------------------------------------------- the formulas, one number at a time

def softmax(logits):
    """Probabilities of a list of logits."""
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    total = math.fsum(weights)
    return [w / total for w in weights]


def entropy_by_hand(logits):
    """H = -sum p log p in nats, 0 log 0 = 0."""
    return max(0.0, -math.fsum(p * math.log(p) for p in softmax(logits) if p > 0))


def allowed(rule, H, c, s, bound):
    """May the first s of the order be revealed? H, c: entropies and confidences in that order."""
    if rule == "eb":
        return math.fsum(H[:s - 1]) <= bound
    if rule == "eb-confidence":
        return math.fsum(H[:s]) - max(H[:s]) <= bound
    if rule == "factor":
        return (s + 1) * (1 - c[s - 1]) < bound
    return c[s - 1] >= bound


def search(rule, logits, masked, bound):
    """The largest s of 1 .. |M| that is allowed, else 1 -> the set of positions to reveal."""
    M = [i for i in range(len(masked)) if masked[i]]
    H, c = {i: entropy_by_hand(logits[i]) for i in M}, {i: max(softmax(logits[i])) for i in M}
    order = sorted(M, key=lambda i: (H[i] if rule == "eb" else -c[i], i))     # ties: the leftmost position
    good = [s for s in range(1, len(M) + 1) if allowed(rule, [H[i] for i in order], [c[i] for i in order], s, bound)]
    return set(order[:max(good, default=1)])


def is_robust(rule, logits, masked, bound, eps):
    """False where rounding of relative size eps may decide: keys or sums too close to each other or to the bound.

    Equal rows and rows of one finite logit are computed exactly alike, so ties between those stay in.
    """
    M = [i for i in range(len(masked)) if masked[i]]
    H, c = {i: entropy_by_hand(logits[i]) for i in M}, {i: max(softmax(logits[i])) for i in M}
    key = H if rule == "eb" else {i: -c[i] for i in M}
    one_hot = {i: sum(x > -INF for x in logits[i]) == 1 for i in M}
    order = sorted(M, key=lambda i: (key[i], i))
    if any(abs(key[a] - key[b]) < eps and logits[a] != logits[b] and not (one_hot[a] and one_hot[b])
           for a, b in zip(order, order[1:])):
        return False
    for s in range(1, len(M) + 1):
        first = order[:s]
        if rule == "eb":
            value, exact = math.fsum(H[i] for i in first[:-1]), all(one_hot[i] for i in first[:-1])
        elif rule == "eb-confidence":
            value = math.fsum(H[i] for i in first) - max(H[i] for i in first)
            exact = s == 1 or all(one_hot[i] for i in first)
        elif rule == "factor":
            value, exact = (s + 1) * (1 - c[first[-1]]), one_hot[first[-1]]
        else:
            value, exact = c[first[-1]], one_hot[first[-1]]
        if abs(value - bound) < eps and not exact:
            return False
    return True


SELECT = {"eb": eb_select, "eb-confidence": eb_confidence_select, "factor": factor_select, "threshold": threshold_select}
BOUNDS = {   # gamma of the paper, 0 and far too large; factor and threshold at and beyond their ends
    "eb": [0.0, 0.01, 0.1, 0.35, 0.6, 1.5, 100.0, INF], "eb-confidence": [0.0, 0.01, 0.1, 0.35, 0.6, 1.5, 100.0, INF],
    "factor": [0.0, 0.2, 1.0, 1.5, 3.0, 100.0], "threshold": [0.0, 0.3, 0.5, 0.9, 0.99, 1.0, 1.1]}
EPS = {torch.float64: 1e-12, torch.float32: 2e-5}   # sums of at most 11 terms of order 1, above unit roundoff 1e-16 and 6e-8


def random_case(generator, dtype):
    """logits (k, V) and masked (k,): flat to very sharp rows, a mask id, equal rows, one-hot rows, equal logits."""
    def u(n):
        return int(torch.randint(n, (1,), generator=generator))
    k, V = 1 + u(9), 2 + u(10)
    sharp = 10 ** (2.5 * torch.rand(k, 1, generator=generator) - 1)           # 0.1 .. 30
    logits = sharp * torch.randn(k, V, generator=generator)
    if u(3) == 0:
        logits = logits.round()                                               # equal logits, equal confidences
    if u(2):
        logits[:, u(V)] = -INF                                                # the mask id
    for _ in range(u(3)):
        logits[u(k)] = logits[u(k)]                                           # equal rows
    for i in range(k):
        if u(6) == 0:
            logits[i] = -INF                                                  # one-hot: entropy exactly 0
            logits[i, u(V)] = u(7) - 3
    masked = torch.rand(k, generator=generator) < (0.0, 0.3, 0.7, 1.0)[u(4)]
    return logits.to(dtype), masked


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("rule", list(SELECT))
def test_rule_equals_search_over_all_s(rule, dtype):
    generator = torch.Generator().manual_seed(7)
    checked = several = 0
    for n in range(2500):
        logits, masked = random_case(generator, dtype)
        bound = BOUNDS[rule][n % len(BOUNDS[rule])] if n % 2 else 2 * torch.rand(1, generator=generator).item()
        rows = logits.double().tolist()
        if is_robust(rule, rows, masked.tolist(), bound, EPS[dtype]):
            shown = SELECT[rule](logits, masked, bound)
            assert shown.dtype == torch.bool and shown.shape == masked.shape
            assert set(shown.nonzero()[:, 0].tolist()) == search(rule, rows, masked.tolist(), bound), (n, rows, masked, bound)
            checked, several = checked + 1, several + (1 < shown.sum() < masked.sum())
    assert checked > 2000 and several > 150          # neither the skipped nor the trivial cases are most of them


@pytest.mark.parametrize("rule", list(SELECT))
def test_batched_equals_single(rule):
    generator = torch.Generator().manual_seed(3)
    logits = 4 * torch.randn(200, 8, 11, generator=generator)
    masked = torch.rand(200, 8, generator=generator) < torch.rand(200, 1, generator=generator)
    masked[:3] = torch.tensor([[False], [True], [False]])
    bound = {"eb": 0.35, "eb-confidence": 0.35, "factor": 1.0, "threshold": 0.8}[rule]
    shown = SELECT[rule](logits, masked, bound)
    assert shown.shape == masked.shape
    assert torch.equal(shown, torch.stack([SELECT[rule](a, b, bound) for a, b in zip(logits, masked)]))
    assert not (shown & ~masked).any()
    assert torch.equal(shown.any(-1), masked.any(-1))            # at least one, and none where nothing is masked


@pytest.mark.parametrize("rule", list(SELECT))
@pytest.mark.parametrize("strictest", [True, False])
def test_at_least_one_and_at_most_all_are_revealed(rule, strictest):
    logits = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    masked = torch.tensor([True, False, True, True, False, True])
    bound = ({"eb": 0.0, "eb-confidence": 0.0, "factor": 0.0, "threshold": 2.0} if strictest else
             {"eb": INF, "eb-confidence": INF, "factor": 1e9, "threshold": 0.0})[rule]
    assert SELECT[rule](logits, masked, bound).tolist() == (
        [i in search(rule, logits.double().tolist(), masked.tolist(), bound) for i in range(6)] if strictest else masked.tolist())
    assert SELECT[rule](logits, masked, bound).sum() == (1 if strictest else 4)
    assert not SELECT[rule](logits, torch.zeros(6, dtype=torch.bool), bound).any()


@pytest.mark.parametrize("rule", list(SELECT))
def test_ties_go_to_the_leftmost_position(rule):
    """Eight equal rows: only how many are revealed depends on the bound, and they are the leftmost masked ones."""
    logits = torch.tensor([2.0, 0.0, 0.0, -INF]).repeat(8, 1)
    masked = torch.tensor([False, True, True, False, True, True, True, True])
    H = entropy_by_hand([2.0, 0.0, 0.0])                         # 0.69 nats; c = 0.787
    for bound, count in {"eb": [(0, 1), (1.5 * H, 2), (2.5 * H, 3)], "eb-confidence": [(0, 1), (1.5 * H, 2), (2.5 * H, 3)],
                         "factor": [(0.1, 1), (0.7, 2), (0.95, 3)], "threshold": [(0.9, 1), (0.7, 6)]}[rule]:
        assert SELECT[rule](logits, masked, bound).nonzero()[:, 0].tolist() == [1, 2, 4, 5, 6, 7][:count]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gamma_0_reveals_certain_tokens_and_one_more(dtype):
    """Eq. 8: entropies that are exactly 0 cost nothing, and the s-th entropy is not in the sum."""
    logits = torch.full((5, 4), -INF, dtype=dtype)
    logits[0, 1], logits[3, 2] = 0.0, 5.0                        # one-hot: H = 0
    logits[1], logits[2], logits[4] = torch.tensor([1.0, 0, 0, 0]), torch.tensor([3.0, 0, 0, 0]), torch.zeros(4)
    assert eb_select(logits, torch.ones(5, dtype=torch.bool), 0.0).tolist() == [True, False, True, True, False]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_eq_8_sums_the_entropies_before_the_last_without_it(dtype):
    """A tiny positive entropy exceeds gamma = 0, however large the next one is (a sum minus its last term forgets it)."""
    p = torch.tensor([[1.0, 1e-20], [0.5, 0.5], [0.5, 0.5]], dtype=dtype)      # H = 4.6e-19, log 2, log 2
    assert 0 < entropy_of(p)[0] < 1e-18
    H, c, everything = entropy_of(p).numpy(), p.amax(-1).numpy(), np.ones(3, bool)
    assert eb_rule(H, c, everything, 0.0).tolist() == [True, False, False]
    assert eb_rule(H, c, everything, 1e-18).tolist() == [True, True, False]


def test_worked_example():
    """Uniform rows over 1, 2, 4, 8 and 16 ids: H = n log 2, c = 2^-n, n = 0 .. 4."""
    logits = torch.full((5, 16), -INF, dtype=torch.float64)
    for n in range(5):
        logits[4 - n, :2 ** n] = 1.0
    masked, log2 = torch.ones(5, dtype=torch.bool), math.log(2)
    for rule, bound, count in [("eb", 0.9 * log2, 2), ("eb", 1.1 * log2, 3), ("eb", 3.1 * log2, 4), ("eb", 6.1 * log2, 5),
                               ("eb-confidence", 0.9 * log2, 2), ("eb-confidence", 1.1 * log2, 3),
                               ("eb-confidence", 3.1 * log2, 4), ("factor", 1.4, 1), ("factor", 1.6, 2),
                               ("factor", 3.1, 3), ("factor", 4.3, 3), ("factor", 4.4, 4), ("threshold", 0.25, 3),
                               ("threshold", 0.26, 2)]:
        assert SELECT[rule](logits, masked, bound).tolist() == [i >= 5 - count for i in range(5)], (rule, bound)


# ------------------------------------------------------------------------------------------------- entropy

@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.float32, 3e-6), (torch.bfloat16, 3e-6)])
def test_entropy_equals_its_definition(dtype, tolerance):
    """tolerance: unit roundoff 1e-16 or 6e-8 times sums of 50 terms; bfloat16 logits are taken in float32."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(40, 5, 50, generator=generator) * 10 ** torch.linspace(-2, 2, 40)[:, None, None]).to(dtype)
    logits[..., 3] = -INF
    ours = entropy(logits)
    assert ours.shape == (40, 5) and ours.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    wanted = torch.tensor([[entropy_by_hand(row) for row in rows] for rows in logits.double().tolist()], dtype=torch.float64)
    torch.testing.assert_close(ours.double(), wanted, rtol=0, atol=tolerance)
    assert (ours >= 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_entropy_of_one_hot_is_exactly_0_and_never_negative(dtype):
    one_hot = torch.full((7, 7), -INF, dtype=dtype).fill_diagonal_(3.0)
    assert torch.equal(entropy(one_hot), torch.zeros(7, dtype=dtype))
    sharp = torch.randn(2000, 9, generator=torch.Generator().manual_seed(1)).to(dtype) * 40
    assert (entropy(sharp) >= 0).all() and entropy(torch.zeros(4, dtype=dtype)).item() == pytest.approx(math.log(4), rel=1e-6)


# -------------------------------------------------------------------------------------------- distribution

def distribution_by_hand(logits, temperature, top_k, top_p):
    """Temperature, then top-k, then top-p, then renormalised; ties to the lower id. One row of logits -> probabilities."""
    p = softmax([x / temperature for x in logits])
    kept = sorted(range(len(p)), key=lambda v: (-p[v], v))
    if top_k is not None:
        kept = kept[:top_k]
    if top_p is not None:
        total, mass, smallest = math.fsum(p[v] for v in kept), 0.0, []
        for v in kept:
            if mass >= top_p:
                break
            smallest.append(v)                                   # the crossing one is kept
            mass = math.fsum(p[v] / total for v in smallest)
        kept = smallest
    total = math.fsum(p[v] for v in kept)
    return [p[v] / total if v in kept else 0.0 for v in range(len(p))]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.float32, 3e-6)])
def test_distribution_equals_slow_reference(dtype, tolerance):
    """tolerance: unit roundoff 1e-16 or 6e-8 times some tens, for softmax and sums over 13 ids with logits up to 60."""
    generator = torch.Generator().manual_seed(5)
    for n in range(1500):
        logits = (0.5 + 3 * torch.rand(1, generator=generator)) * torch.randn(3, 13, generator=generator)
        logits = (logits.round() if n % 3 == 0 else logits).to(dtype)            # rounded: ties
        if n % 4 == 0:
            logits[:, 5] = -INF
        temperature = (0.3, 0.7, 1.0, 1.9)[n % 4 if n % 5 else 2]
        top_k = (None, 1, 2, 5, 12, 13, 40)[n % 7]
        top_p = (None, *(torch.rand(3, generator=generator) * 0.98 + 0.01).tolist())[n // 7 % 4]
        ours = distribution(logits, temperature, top_k, top_p)
        wanted = torch.tensor([distribution_by_hand(row, temperature, top_k, top_p) for row in logits.double().tolist()],
                              dtype=torch.float64)
        assert ours.dtype == dtype
        assert torch.equal(ours > 0, wanted > 0), (n, logits, temperature, top_k, top_p)
        torch.testing.assert_close(ours.double(), wanted, rtol=0, atol=tolerance)


def test_top_k_comes_before_top_p():
    """p = 4/8, 2/8, 1/8, 1/8: top-k 2 leaves 2/3, 1/3, so top-p 0.6 keeps one; top-p first would keep two."""
    logits = torch.tensor([1.0, 4.0, 1.0, 2.0], dtype=torch.float64).log()
    assert distribution(logits, 1.0, 2, 0.6).tolist() == [0, 1, 0, 0]
    torch.testing.assert_close(distribution(logits, 1.0, None, 0.6), torch.tensor([0, 2 / 3, 0, 1 / 3], dtype=torch.float64))
    torch.testing.assert_close(distribution(logits, 1.0, 2, 0.7), torch.tensor([0, 2 / 3, 0, 1 / 3], dtype=torch.float64))


def test_temperature_comes_before_top_p():
    """p = 0.8, 0.2: top-p 0.7 keeps one; at temperature 2 p = 2/3, 1/3, so it keeps both."""
    logits = torch.tensor([4.0, 1.0], dtype=torch.float64).log()
    assert distribution(logits, 1.0, None, 0.7).tolist() == [1, 0]
    torch.testing.assert_close(distribution(logits, 2.0, None, 0.7), torch.tensor([2 / 3, 1 / 3], dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_ties_go_to_the_lower_id_and_the_sum_may_just_reach_top_p(dtype):
    logits = torch.zeros(8, dtype=dtype)                         # 1/8 each, exact in binary
    for top_p, count in [(0.5, 4), (0.51, 5), (0.125, 1), (0.001, 1), (0.99, 8), (1.0, 8)]:
        wanted = torch.tensor([1 / count] * count + [0] * (8 - count), dtype=dtype)
        torch.testing.assert_close(distribution(logits, 1.0, None, top_p), wanted, rtol=1e-7, atol=0)   # one division
        assert ((distribution(logits, 1.0, None, top_p) > 0) == (wanted > 0)).all()
    for top_k in 1, 3, 8:
        assert (distribution(logits, 1.0, top_k) > 0).tolist() == [True] * top_k + [False] * (8 - top_k)
    assert (distribution(logits, 1.0, 4, 0.5) > 0).tolist() == [True] * 2 + [False] * 6


def test_temperature_0_leaves_the_distribution_alone():
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    wanted = torch.tensor([softmax(row) for row in logits.tolist()], dtype=torch.float64)
    torch.testing.assert_close(distribution(logits, 0.0, 2, 0.1), wanted, rtol=0, atol=1e-15)   # one softmax in float64


def test_mask_id_has_no_probability():
    logits = torch.zeros(3, 6)
    logits[:, 2] = -INF
    for args in [(0.0,), (1.0,), (1.0, 6), (0.5, None, 1.0), (2.0, 5, 0.9)]:
        p = distribution(logits, *args)
        assert (p[:, 2] == 0).all() and p.isfinite().all()
        torch.testing.assert_close(p.sum(-1), torch.ones(3))
