"""eb_sampler.py against searches in float64 Python, written from the formulas of method.md section 4
(brute_force.py); and the noise of section 10 against the laws that it has to have."""
import math

import numpy as np
import pytest
import torch

from brute_force import choose as choose_by_hand, chi_squared, entropy as entropy_of_list
from brute_force import probabilities as probabilities_by_hand, revealed
from eb_sampler import (choose, eb_confidence_select, eb_rule, eb_select, entropy, entropy_of, factor_select,
                        noise, noise_keys, probabilities, threshold_select)

INF = math.inf


def entropy_by_hand(logits):
    return entropy_of_list(probabilities_by_hand(logits))


def search(rule, logits, masked, bound):
    """The set of positions to reveal."""
    p = {i: probabilities_by_hand(logits[i]) for i in range(len(masked)) if masked[i]}
    return revealed(rule, p, bound)


def is_robust(rule, logits, masked, bound, eps):
    """False where rounding of relative size eps may decide: keys or sums too close to each other or to the
    bound.

    Equal rows and rows of one finite logit are computed exactly alike, so ties between those stay in.
    """
    M = [i for i in range(len(masked)) if masked[i]]
    p = {i: probabilities_by_hand(logits[i]) for i in M}
    H, c = {i: entropy_of_list(p[i]) for i in M}, {i: max(p[i]) for i in M}
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


SELECT = {"eb": eb_select, "eb-confidence": eb_confidence_select, "factor": factor_select,
          "threshold": threshold_select}
GAMMAS = [0.0, 0.01, 0.1, 0.35, 0.6, 1.5, 100.0, INF]   # the paper's, 0 and far too large
BOUNDS = {"eb": GAMMAS, "eb-confidence": GAMMAS,        # the others at and beyond their ends
          "factor": [0.0, 0.2, 1.0, 1.5, 3.0, 100.0], "threshold": [0.0, 0.3, 0.5, 0.9, 0.99, 1.0, 1.1]}
# Sums of at most 11 terms of order 1, above unit roundoff 1e-16 and 6e-8.
EPS = {torch.float64: 1e-12, torch.float32: 2e-5}


def random_case(generator, dtype):
    """logits (k, V) and masked (k,): flat to very sharp rows, a mask id, equal rows, one-hot rows, equal
    logits."""
    def u(n):
        return int(torch.randint(n, (1,), generator=generator))
    k, V = 1 + u(9), 2 + u(10)
    sharp = 10 ** (2.5 * torch.rand(k, 1, generator=generator) - 1)           # 0.1 .. 30
    logits = sharp * torch.randn(k, V, generator=generator)
    if u(3) == 0:
        logits = logits.round()    # equal logits, equal confidences
    if u(2):
        logits[:, u(V)] = -INF    # the mask id
    for _ in range(u(3)):
        logits[u(k)] = logits[u(k)]    # equal rows
    for i in range(k):
        if u(6) == 0:
            logits[i] = -INF    # one-hot: entropy exactly 0
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
        drawn = 2 * torch.rand(1, generator=generator).item()
        bound = BOUNDS[rule][n % len(BOUNDS[rule])] if n % 2 else drawn
        rows = logits.double().tolist()
        if is_robust(rule, rows, masked.tolist(), bound, EPS[dtype]):
            shown = SELECT[rule](logits, masked, bound)
            assert shown.dtype == torch.bool and shown.shape == masked.shape
            wanted = search(rule, rows, masked.tolist(), bound)
            assert set(shown.nonzero()[:, 0].tolist()) == wanted, (n, rows, masked, bound)
            checked, several = checked + 1, several + (1 < shown.sum() < masked.sum())
    assert checked > 2000 and several > 150   # neither the skipped nor the trivial cases are most


@pytest.mark.parametrize("rule", list(SELECT))
def test_batched_equals_single(rule):
    generator = torch.Generator().manual_seed(3)
    logits = 4 * torch.randn(200, 8, 11, generator=generator)
    masked = torch.rand(200, 8, generator=generator) < torch.rand(200, 1, generator=generator)
    masked[:3] = torch.tensor([[False], [True], [False]])
    bound = {"eb": 0.35, "eb-confidence": 0.35, "factor": 1.0, "threshold": 0.8}[rule]
    shown = SELECT[rule](logits, masked, bound)
    assert shown.shape == masked.shape
    assert torch.equal(shown, torch.stack([SELECT[rule](*each, bound) for each in zip(logits, masked)]))
    assert not (shown & ~masked).any()
    assert torch.equal(shown.any(-1), masked.any(-1))   # at least one, and none where nothing is masked


@pytest.mark.parametrize("rule", list(SELECT))
@pytest.mark.parametrize("strictest", [True, False])
def test_at_least_one_and_at_most_all_are_revealed(rule, strictest):
    logits = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    masked = torch.tensor([True, False, True, True, False, True])
    bound = ({"eb": 0.0, "eb-confidence": 0.0, "factor": 0.0, "threshold": 2.0} if strictest else
             {"eb": INF, "eb-confidence": INF, "factor": 1e9, "threshold": 0.0})[rule]
    wanted = search(rule, logits.double().tolist(), masked.tolist(), bound)
    assert set(SELECT[rule](logits, masked, bound).nonzero()[:, 0].tolist()) == wanted
    assert SELECT[rule](logits, masked, bound).sum() == (1 if strictest else 4)
    assert not SELECT[rule](logits, torch.zeros(6, dtype=torch.bool), bound).any()


@pytest.mark.parametrize("rule", list(SELECT))
def test_ties_go_to_the_leftmost_position(rule):
    """Eight equal rows: only how many are revealed depends on the bound, and they are the leftmost masked
    ones."""
    logits = torch.tensor([2.0, 0.0, 0.0, -INF]).repeat(8, 1)
    masked = torch.tensor([False, True, True, False, True, True, True, True])
    H = entropy_by_hand([2.0, 0.0, 0.0])                         # 0.69 nats; c = 0.787
    by_entropy = [(0, 1), (1.5 * H, 2), (2.5 * H, 3)]
    counts = {"eb": by_entropy, "eb-confidence": by_entropy, "factor": [(0.1, 1), (0.7, 2), (0.95, 3)],
              "threshold": [(0.9, 1), (0.7, 6)]}
    for bound, count in counts[rule]:
        assert SELECT[rule](logits, masked, bound).nonzero()[:, 0].tolist() == [1, 2, 4, 5, 6, 7][:count]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gamma_0_reveals_certain_tokens_and_one_more(dtype):
    """Eq. 8: entropies that are exactly 0 cost nothing, and the s-th entropy is not in the sum."""
    logits = torch.full((5, 4), -INF, dtype=dtype)
    logits[0, 1], logits[3, 2] = 0.0, 5.0                        # one-hot: H = 0
    logits[[1, 2, 4]] = torch.tensor([[1.0, 0, 0, 0], [3.0, 0, 0, 0], [0, 0, 0, 0]], dtype=dtype)
    shown = eb_select(logits, torch.ones(5, dtype=torch.bool), 0.0)
    assert shown.tolist() == [True, False, True, True, False]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_eq_8_sums_the_entropies_before_the_last_without_it(dtype):
    """A tiny positive entropy exceeds gamma = 0, however large the next one is (a sum minus its last term
    forgets it)."""
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
    worked = {"eb": [(0.9 * log2, 2), (1.1 * log2, 3), (3.1 * log2, 4), (6.1 * log2, 5)],
              "eb-confidence": [(0.9 * log2, 2), (1.1 * log2, 3), (3.1 * log2, 4)],
              "factor": [(1.4, 1), (1.6, 2), (3.1, 3), (4.3, 3), (4.4, 4)],
              "threshold": [(0.25, 3), (0.26, 2)]}
    for rule, cases in worked.items():
        for bound, count in cases:
            shown = SELECT[rule](logits, masked, bound)
            assert shown.tolist() == [i >= 5 - count for i in range(5)], (rule, bound)


# ------------------------------------------------------------------------------------------------- entropy

@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.float32, 3e-6),
                                              (torch.bfloat16, 3e-6)])
def test_entropy_equals_its_definition(dtype, tolerance):
    """tolerance: unit roundoff 1e-16 or 6e-8 times sums of 50 terms; bfloat16 logits are taken in
    float32."""
    scale = 10 ** torch.linspace(-2, 2, 40)[:, None, None]
    logits = (scale * torch.randn(40, 5, 50, generator=torch.Generator().manual_seed(0))).to(dtype)
    logits[..., 3] = -INF
    ours = entropy(logits)
    assert ours.shape == (40, 5) and ours.dtype == torch.promote_types(dtype, torch.float32)
    wanted = torch.tensor([[entropy_by_hand(row) for row in rows] for rows in logits.tolist()],
                          dtype=torch.float64)
    torch.testing.assert_close(ours.double(), wanted, rtol=0, atol=tolerance)
    assert (ours >= 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_entropy_of_one_hot_is_exactly_0_and_never_negative(dtype):
    one_hot = torch.full((7, 7), -INF, dtype=dtype).fill_diagonal_(3.0)
    assert torch.equal(entropy(one_hot), torch.zeros(7, dtype=dtype))
    sharp = torch.randn(2000, 9, generator=torch.Generator().manual_seed(1)).to(dtype) * 40
    assert (entropy(sharp) >= 0).all()
    assert entropy(torch.zeros(4, dtype=dtype)).item() == pytest.approx(math.log(4), rel=1e-6)


# ------------------------------------------------------------------------------------------ probabilities

@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.float32, 3e-6)])
def test_probabilities_equal_slow_reference(dtype, tolerance):
    """tolerance: unit roundoff 1e-16 or 6e-8 times some tens, for softmax and sums over 13 ids with logits up
    to 60."""
    generator = torch.Generator().manual_seed(5)
    for n in range(1500):
        logits = (0.5 + 3 * torch.rand(1, generator=generator)) * torch.randn(3, 13, generator=generator)
        logits = (logits.round() if n % 3 == 0 else logits).to(dtype)            # rounded: ties
        if n % 4 == 0:
            logits[:, 5] = -INF
        temperature = (0.3, 0.7, 1.0, 1.9)[n % 4 if n % 5 else 2]
        top_k = (None, 1, 2, 5, 12, 13, 40)[n % 7]
        top_p = (None, *(torch.rand(3, generator=generator) * 0.98 + 0.01).tolist())[n // 7 % 4]
        ours = probabilities(logits, temperature, top_k, top_p)
        by_hand = [probabilities_by_hand(row, temperature, top_k, top_p) for row in logits.tolist()]
        wanted = torch.tensor(by_hand, dtype=torch.float64)
        assert ours.dtype == dtype
        assert torch.equal(ours > 0, wanted > 0), (n, logits, temperature, top_k, top_p)
        torch.testing.assert_close(ours.double(), wanted, rtol=0, atol=tolerance)


def test_probabilities_of_logits_alone_are_their_softmax():
    logits = 3 * torch.randn(4, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    wanted = torch.tensor([probabilities_by_hand(row) for row in logits.tolist()], dtype=torch.float64)
    torch.testing.assert_close(probabilities(logits), wanted, rtol=0, atol=1e-15)   # one softmax in float64
    half = probabilities(logits.bfloat16())
    assert half.dtype == torch.float32 and torch.equal(half, logits.bfloat16().float().softmax(-1))


def test_top_k_comes_before_top_p():
    """p = 4/8, 2/8, 1/8, 1/8: top-k 2 leaves 2/3, 1/3, so top-p 0.6 keeps one; top-p first would keep
    two."""
    logits = torch.tensor([1.0, 4.0, 1.0, 2.0], dtype=torch.float64).log()
    both = torch.tensor([0, 2 / 3, 0, 1 / 3], dtype=torch.float64)
    assert probabilities(logits, 1.0, 2, 0.6).tolist() == [0, 1, 0, 0]
    torch.testing.assert_close(probabilities(logits, 1.0, None, 0.6), both)
    torch.testing.assert_close(probabilities(logits, 1.0, 2, 0.7), both)


def test_temperature_comes_before_top_p():
    """p = 0.8, 0.2: top-p 0.7 keeps one; at temperature 2 p = 2/3, 1/3, so it keeps both."""
    logits = torch.tensor([4.0, 1.0], dtype=torch.float64).log()
    both = torch.tensor([2 / 3, 1 / 3], dtype=torch.float64)
    assert probabilities(logits, 1.0, None, 0.7).tolist() == [1, 0]
    torch.testing.assert_close(probabilities(logits, 2.0, None, 0.7), both)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_ties_go_to_the_lower_id_and_the_sum_may_just_reach_top_p(dtype):
    logits = torch.zeros(8, dtype=dtype)                         # 1/8 each, exact in binary
    for top_p, count in [(0.5, 4), (0.51, 5), (0.125, 1), (0.001, 1), (0.99, 8), (1.0, 8)]:
        wanted = torch.tensor([1 / count] * count + [0] * (8 - count), dtype=dtype)
        ours = probabilities(logits, 1.0, None, top_p)
        torch.testing.assert_close(ours, wanted, rtol=1e-7, atol=0)              # one division
        assert ((ours > 0) == (wanted > 0)).all()
    for top_k in 1, 3, 8:
        assert (probabilities(logits, 1.0, top_k) > 0).tolist() == [True] * top_k + [False] * (8 - top_k)
    assert (probabilities(logits, 1.0, 4, 0.5) > 0).tolist() == [True] * 2 + [False] * 6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_token_that_crosses_top_p_is_the_last(dtype):
    """.5 and .3 reach .8 together; and 0.8 is not exact in binary."""
    logits = torch.tensor([0.3, 0.1, 0.1, 0.5], dtype=dtype).log()
    assert (probabilities(logits, 1.0, None, 0.8) > 0).tolist() == [True, False, False, True]


def test_top_p_1_cuts_nothing():
    """However many small probabilities there are: 128,256 logits, where a sum in float32 reaches 1 early."""
    logits = 4 * torch.randn(2, 128_256, generator=torch.Generator().manual_seed(0))
    p = probabilities(logits, 1.0, None, 1.0)
    assert torch.equal(p, logits.softmax(-1)) and (p > 0).all()


def test_top_p_sums_in_float64_over_large_vocabularies():
    """From rows that a few tokens decide to rows of which most of the ids are kept, all in one call."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 128_256, generator=generator) * torch.tensor([20, 6, 4, 2, 0.5, 0.001])[:, None]
    whole, counts = logits.softmax(-1), set()
    for top_p in 0.2, 0.5, 0.9, 0.999:
        ours = probabilities(logits, 1.0, None, top_p)
        for row, p in zip(ours, whole.double().numpy()):
            order = np.argsort(-p, kind="stable")
            before = np.concatenate(([0.0], np.cumsum(p[order])[:-1]))
            kept = order[before < top_p]
            assert set(row.nonzero()[:, 0].tolist()) == set(kept.tolist())
            np.testing.assert_allclose(row[kept], p[kept] / p[kept].sum(), rtol=1e-4)   # float32 sums
            counts.add(len(kept))
    assert min(counts) == 1 and max(counts) > 100_000 and len(counts) > 15


def test_ties_across_the_cut_go_to_the_lower_ids():
    """1,000 equal ones, cut among the first 128 of the ranking and far behind them."""
    logits = torch.zeros(2, 1000, dtype=torch.float64)
    logits[1, 990:] = math.log(10.0)   # 10 ids of 10/1090 each in front of the others
    for top_p, count in (0.0995, 100), (0.5005, 501), (0.9005, 901):
        kept = [row.nonzero()[:, 0].tolist() for row in probabilities(logits, 1.0, None, top_p)]
        assert kept[0] == list(range(count))
        rest = math.ceil(top_p * 1090 - 100)
        assert kept[1] == [*range(rest), *range(990, 1000)]
    kept = [row.nonzero()[:, 0].tolist() for row in probabilities(logits, 1.0, 300)]
    assert kept == [list(range(300)), [*range(290), *range(990, 1000)]]


def test_top_k_larger_than_the_vocabulary_cuts_nothing():
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    for top_k in 7, 8, 10**6:
        assert torch.equal(probabilities(logits, 1.0, top_k), logits.softmax(-1))


def test_mask_id_has_no_probability():
    logits = torch.zeros(3, 6)
    logits[:, 2] = -INF
    for args in [(), (1.0,), (1.0, 6), (0.5, None, 1.0), (2.0, 5, 0.9)]:
        p = probabilities(logits, *args)
        assert (p[:, 2] == 0).all() and p.isfinite().all()
        torch.testing.assert_close(p.sum(-1), torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 5e-324])
def test_a_tiny_temperature_takes_the_largest_logits(dtype, temperature):
    logits = torch.tensor([[1e30, -1e30, 3.0, -INF], [2.0, 5.0, 5.0, -INF]], dtype=dtype)
    assert probabilities(logits, temperature).tolist() == [[1, 0, 0, 0], [0, 0.5, 0.5, 0]]


# ------------------------------------------------------------------------------------------ the noise

def gumbel(seeds, positions, V):
    """g of section 10 for all seeds, positions and ids -> array (S, T, V)."""
    keys = noise_keys(seeds, [positions] * len(seeds)).reshape(-1, 4)
    return -noise(keys, V).log().numpy().reshape(len(seeds), len(positions), V)


PLACES = {"seeds": (range(200_000), [0], 100), "positions": ([7], range(200_000), 100),
          "ids": ([7], range(100), 200_000), "all three": (range(100), range(200), 1000)}


@pytest.mark.parametrize("name", PLACES)
def test_noise_is_standard_exponential(name):
    """20 million values each, in bins that reach out to a probability of 1e-6 on both sides."""
    seeds, positions, V = PLACES[name]
    E = np.exp(-gumbel(seeds, positions, V)).ravel()
    assert len(E) == 2e7 and E.min() > 0 and np.isfinite(E).all()
    tail = np.array([1e-6, 1e-5, 1e-4, 1e-3, 1e-2])
    edges = np.concatenate(([0.0], tail, np.linspace(0.1, 0.9, 33), 1 - tail[::-1], [1.0]))   # of P(E < x)
    counts, _ = np.histogram(E, np.concatenate((-np.log1p(-edges[:-1]), [np.inf])))
    assert chi_squared(counts, np.diff(edges)) > 0.001


def independent(a, b):
    """Gumbel noise of as many places each: no correlation, and pairs fall on a grid of 10 x 10 as often as
    independent ones. 4.5 standard errors, p 1e-4: over the 60 pairs of arrays below, once in 100 choices of
    the seeds."""
    a, b = a.ravel(), b.ravel()
    r = np.corrcoef(a, b)[0, 1] * math.sqrt(len(a))
    deciles = [np.minimum((np.exp(-np.exp(-x)) * 10).astype(int), 9) for x in (a, b)]
    counts = np.bincount(10 * deciles[0] + deciles[1], minlength=100)
    return abs(r) < 4.5 and chi_squared(counts, np.full(100, 0.01)) > 1e-4


@pytest.mark.parametrize("seed", [0, 12345, 2**63 - 40])
@pytest.mark.parametrize("by", [1, 2, 3, 16, 2**16, 2**31, 2**32, 2**48, 2**63, 2**64 - 1])
def test_neighbouring_seeds_share_nothing(seed, by):
    """Row i of a batch draws with seed + i. 512,000 places and the same of other seeds."""
    seeds = range(seed, seed + 40)
    assert independent(gumbel(seeds, range(128), 100), gumbel([s + by for s in seeds], range(128), 100))


@pytest.mark.parametrize("by", [1, 2, 3, 16, 2**15, 2**31 - 4096])
def test_neighbouring_positions_share_nothing(by):
    assert independent(gumbel(range(10), range(512), 100), gumbel(range(10), range(by, 512 + by), 100))


@pytest.mark.parametrize("by", [1, 2, 3, 16, 2**8, 2**15, 2**16, 2**17 - 2**7])
def test_neighbouring_ids_share_nothing(by):
    g = gumbel([3], range(128), by + 4096)
    assert independent(g[..., :-by], g[..., by:])


DIAGONALS = [(1, 1, 0), (1, -1, 0), (2, -1, 0), (1, 0, 1), (1, 0, -1), (0, 1, 1), (0, 1, -1),
             (1, 1, 1), (1, -1, 1)]


@pytest.mark.parametrize("seed, position, id", DIAGONALS)
def test_diagonal_neighbours_share_nothing(seed, position, id):
    """What one row has at a position, the next row has not at the next one, and so on."""
    a = gumbel(range(10, 30), range(10, 266), 100)
    b = gumbel(range(10 + seed, 30 + seed), range(10 + position, 266 + position), 100)
    low, high = max(0, -id), 100 - max(0, id)
    assert independent(a[..., low:high], b[..., low + id:high + id])


def test_no_two_ids_have_noise_in_common():
    """All pairs of 200 ids over 50,000 places: none of 19,900 correlations exceeds 5.5 standard errors."""
    g = gumbel([1], range(50_000), 200)[0]
    r = np.corrcoef(g.T) - np.eye(200)
    assert abs(r).max() * math.sqrt(len(g)) < 5.5


def test_all_ids_of_a_place_have_different_noise():
    """Of two ids with the same noise everywhere the less probable one could never be drawn."""
    V = 262_144
    for key in noise_keys([0, 1], [[0], [5]]).reshape(-1, 1, 4):
        assert len(noise(key, V).unique()) == V


def test_a_seed_counts_modulo_2_to_the_64():
    positions = [range(5)]
    for seed in 0, 1, 12345, 2**40 + 3, 2**64 - 1:
        keys = noise_keys([seed], positions)
        for same in seed + 2**64, seed - 2**64, seed + 2**70:
            assert torch.equal(noise_keys([same], positions), keys)
        for other in seed + 1, seed + 2**31, seed + 2**32, seed + 2**63, seed - 2**48:
            assert not (noise_keys([other], positions) == keys).all(-1).any()


def test_a_places_noise_depends_on_nothing_else():
    """Neither on the rows, positions and ids that are asked for with it, nor on their number or order."""
    seeds, positions = [5, 2**63, 0, -1], [[3, 0, 9], [9, 9, 4], [1, 2, 3], [0, 100_000, 2**31]]
    keys = noise_keys(seeds, positions)
    assert keys.shape == (4, 3, 4)
    E = noise(keys.reshape(-1, 4), 700)
    assert E.dtype == torch.float64
    for i, (seed, row) in enumerate(zip(seeds, positions)):
        for j, position in enumerate(row):
            alone = noise_keys([seed], [[position]])
            assert torch.equal(alone[0, 0], keys[i, j])
            for n in 1, 13, 700:
                assert torch.equal(noise(alone[0], n)[0], E[3 * i + j, :n])


# ------------------------------------------------------------------------------------------ draws

@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_choose_takes_the_largest_log_p_plus_noise(dtype):
    """Written out, with distributions from flat to one-hot; ids without probability are never chosen."""
    generator = torch.Generator().manual_seed(2)
    for n in range(100):
        scale = 10 ** (2 * torch.rand(1, generator=generator) - 1)
        logits = (scale * torch.randn(3, 2, 17, generator=generator)).to(dtype)
        p = probabilities(logits, 1.0, (None, 1, 2, 5)[n % 4], (None, 0.6, 0.95)[n % 3])
        seeds, positions = [n, n + 1, 2**63 + n], [[n, n + 1], [0, 7], [1000 * n, 3]]
        ours = choose(p, noise_keys(seeds, positions))
        places = [(i, j) for i in range(3) for j in range(2)]
        assert ours.shape == (3, 2) and ours.flatten().tolist() == [
            choose_by_hand(p[i, j].tolist(), seeds[i], positions[i][j]) for i, j in places]
        assert (p.gather(-1, ours[..., None]) > 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("V", [5, 1000, 49_152, 200_000])
def test_choose_is_the_same_alone_and_among_many_rows(dtype, V):
    """Whatever number of rows is worked on at once."""
    B, n = (300, 7) if V < 49_152 else (3, 5)
    logits = torch.randn(B, n, V, generator=torch.Generator().manual_seed(V), dtype=dtype)
    p = probabilities(logits, 1.0, None, 0.9)
    keys = noise_keys(range(B), [range(i, i + n) for i in range(B)])
    together = choose(p, keys)
    for i in range(0, B, max(1, B // 40)):
        for j in range(n):
            assert choose(p[i, j], keys[i, j]) == together[i, j]
    order = torch.randperm(B, generator=torch.Generator().manual_seed(0))
    assert torch.equal(choose(p[order], keys[order]), together[order])


def test_choose_gives_ties_to_the_smaller_id(monkeypatch):
    """Equal p under noise that is the same for all ids."""
    flat = lambda keys, V: torch.full((len(keys), V), 0.7, dtype=torch.float64)
    monkeypatch.setattr("eb_sampler.noise", flat)
    for V in 2, 8, 33, 1000, 70_000:
        p = torch.zeros(3, V, dtype=torch.float64)
        p[0] = 1 / V
        p[1, V // 2:] = 1 / V
        p[2, 0], p[2, -1] = 0.25, 0.75
        assert choose(p, torch.zeros(3, 4)).tolist() == [0, V // 2, V - 1]


P = torch.tensor([0.3, 0.0, 0.02, 0.25, 0.001, 0.0, 0.129, 0.1, 0.2], dtype=torch.float64)


@pytest.mark.parametrize("name", ["seeds", "positions"])
def test_draws_follow_p_and_neighbours_are_independent(name):
    """200,000 draws over seeds, or over the positions of one text; and neighbouring ones as pairs."""
    n = 200_000
    keys = noise_keys(range(n), [[3]] * n) if name == "seeds" else noise_keys([3], [range(n)])
    drawn = choose(P.expand(n, -1), keys.reshape(n, 4)).numpy()
    assert chi_squared(np.bincount(drawn, minlength=9), P) > 0.001
    for by in 1, 2, 16:
        pairs = np.bincount(9 * drawn[:-by] + drawn[by:], minlength=81)
        assert chi_squared(pairs, P[:, None] * P) > 0.001


def test_draws_among_any_two_ids_of_a_vocabulary_follow_p():
    """Two ids of 0.5 each, 400 pairs of a vocabulary of 49,152: 1,000 draws of each pair, binomial."""
    keys = noise_keys(range(1000), [[0]] * 1000)[:, 0]
    E = noise(keys, 49_152)
    ids = torch.randperm(49_152, generator=torch.Generator().manual_seed(0))[:800]
    first = (E[:, ids[:400]] < E[:, ids[400:]]).sum(0).numpy()   # of two equal p, the smaller E wins
    z = (first - 500) / math.sqrt(250)
    assert abs(z).max() < 4.5 and 0.8 < z.std() < 1.2
