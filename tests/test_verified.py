"""Verified decoding (method section 10): NTP's text, NTP's distribution, and no forward more than it must spend."""
import functools
import itertools
import math
import random
from collections import Counter

import numpy as np
import pytest
import torch

import generate as generate_file
from brute_force import chi_squared, exact_distribution, full_logits, greedy, probabilities, tiny_model
from generate import decode, generate, likeliest

V, MASK = 7, 3


def most_probable_lengths(confidence, h):
    """-> the h likeliest acceptance lengths, ties to the smaller, and the smallest gap that this choice rests on."""
    d = len(confidence)
    p = [math.prod(confidence[:a]) * (1 - confidence[a] if a < d else 1.0) for a in range(d + 1)]
    order = sorted(range(d + 1), key=lambda a: (-p[a], a))
    return order[:h], p[order[h - 1]] - p[order[h]] if h <= d else math.inf


def passes(model, prompt, k, h, text):
    """What section 10 must spend, given NTP's greedy text: for each forward its draft and how many of it agree.

    Returns that list, and whether a choice of lengths hung on less than rounding.
    """
    n, draft, confidence, done, close = 0, [], [], [], False
    while True:
        agree = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(draft, text[n + 1:])))
        done.append((draft, agree))
        lengths, gap = most_probable_lengths(confidence, h)
        n += 1 + agree
        if n >= len(text):
            return done, close
        close |= gap < 1e-13
        draft, confidence = [], []
        if k > 1 and agree in lengths:
            for logits in full_logits(model, [*prompt, *text[:n], *[model.config.mask_id] * k], block=k)[-k + 1:].numpy():
                draft.append(int(logits.argmax()))
                confidence.append(float(probabilities(logits).max()))


def random_request(rng, kind, case):
    """Predictions of a mask and of NTP agree by chance here, more often where the text matters little."""
    model = tiny_model(kind, V, MASK, seed=case, head=rng.choice((0.15, 0.3, 0.6)), body=rng.choice((0.05, 0.2, 0.5)))
    k, h, limit = rng.choice((1, 2, 3, 4, 5, 8, 16, 33, 64, rng.randint(1, 64))), rng.randint(1, 6), rng.randint(1, 32)
    prompts = [[rng.choice((0, 1, 2, 4, 5, 6)) for _ in range(rng.choice((1, 1, 2, 6)))] for _ in range(rng.choice((1, 1, 2, 3)))]
    stop_ids = rng.sample([i for i in range(V) if i != MASK], rng.choice((0, 0, 1, 2)))
    if not stop_ids and rng.random() < 0.7:                              # a stop id inside an accepted draft is rare
        text, _ = greedy(model, prompts[0], limit)
        ends = itertools.accumulate(1 + agree for _, agree in passes(model, prompts[0], k, h, text)[0])
        begins = {0, *ends}                                              # where a `next` stands
        stop_ids = [t for n, t in enumerate(text) if n not in begins and t not in text[:n]][:1]
    return model, prompts, k, h, limit, stop_ids


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_text_is_always_ntps_and_the_forwards_are_those_it_must_spend(kind):
    """150 random requests each, models never trained with SBD: tokens, end, NFE, every draft and its check."""
    rng, happened = random.Random(kind), Counter()
    for case in range(150):
        model, prompts, k, h, limit, stop_ids = random_request(rng, kind, case)
        rows, steps = {}, [[] for _ in prompts]
        for batch in decode(model, prompts, k, max_new_tokens=limit, stop_ids=stop_ids, mode="verified", hedges=h):
            for step in batch:
                rows[step.row.index] = step.row
                steps[step.row.index].append(step)
        for i, prompt in enumerate(prompts):
            text, stopped = greedy(model, prompt, limit, stop_ids)
            assert (rows[i].tokens, rows[i].stopped) == (text, stopped), (case, i)
            expected, close = passes(model, prompt, k, h, text)
            happened["too close to call"] += close
            happened["rows"] += 1
            if not close:
                assert rows[i].nfe == len(steps[i]) == len(expected), (case, i)
                assert [s.drafted for s in steps[i]] == [draft for draft, _ in expected], (case, i)
                assert [s.accepted for s in steps[i][:-1]] == [agree for _, agree in expected[:-1]], (case, i)
            assert k > 1 or rows[i].nfe == len(text)
            for draft, agree in expected[:-1]:
                happened["no draft"] += k > 1 and not draft
                happened["rejected at once"] += bool(draft) and agree == 0
                happened["accepted some"] += 0 < agree < len(draft)
                happened["accepted all"] += 0 < agree == len(draft)
            happened["stopped inside a draft"] += stopped and expected[-1][1] > 0
            happened["limit inside a draft"] += not stopped and expected[-1][1] > 0
    assert happened.pop("too close to call") < 0.05 * happened["rows"], happened
    assert len(happened) == 7 and min(happened.values()) >= 3, happened   # else the requests were too tame


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("k, h", [(2, 1), (2, 2), (3, 2), (5, 5), (8, 3), (17, 6)])
def test_a_hedge_sees_exactly_what_it_would_see_after_that_acceptance(kind, k, h):
    """block_a's logits are those of a plain forward over past + next + draft[:a] + k masks; the check's those of a
    causal forward; and the lengths with a block are the most probable ones."""
    model = tiny_model(kind, V, MASK, seed=k, head=0.3, body=0.2)
    prompts, windows, hidden, blocks = [[1], [4, 2, 6], [5, 5, 0, 1, 2, 4]], [], model.hidden, Counter()

    def recorded(tokens, positions, attend):
        windows.append((tokens, positions, hidden(tokens, positions, attend)))
        return windows[-1][2]

    model.hidden = recorded
    for steps in decode(model, prompts, k, max_new_tokens=14, mode="verified", hedges=h):
        if not windows:                                                  # the last tokens needed no forward
            continue
        tokens, positions, states = windows[-1]
        windows.clear()
        model.hidden = hidden
        for b, step in enumerate(steps[len(steps) - len(tokens):]):
            text = prompts[step.row.index] + step.row.tokens[:step.start]
            d = len(step.drafted)
            known = tokens[b, :1 + d].tolist()
            assert known == [step.final[0], *step.drafted]
            same(model.lm_head(states[b, :1 + d]), full_logits(model, text + known, mask_out=False)[-1 - d:])
            lengths = []
            for begin in range(1 + d, 1 + d + k * min(h, d + 1), k):
                a = int(positions[b, begin] - positions[b, 0]) - 1
                lengths.append(a)
                assert tokens[b, begin:begin + k].tolist() == [MASK] * k
                plain = full_logits(model, text + known[:1 + a] + [MASK] * k, block=k, mask_out=False)
                same(model.lm_head(states[b, begin:begin + k]), plain[-k:])
            confidence = []
            if d:                                                        # the draft stood behind `next`, all masked
                drafted_from = full_logits(model, text + [MASK] * k, block=k)[-k + 1:]
                confidence = [probabilities(row).max() for row in drafted_from.numpy()]
                assert drafted_from.argmax(-1).tolist() == step.drafted
            assert lengths == most_probable_lengths(confidence, h)[0]
            blocks[len(lengths)] += 1
        model.hidden = recorded
    assert max(blocks) == min(h, k)


def same(ours, theirs):
    """To rounding in float64: a few hundred sums of numbers near 1."""
    assert (ours - theirs).abs().max() <= 1e-11 * theirs.abs().max()


def test_likeliest_lengths_by_search_and_ties_go_to_the_smaller():
    rng, ties = random.Random(0), 0
    for _ in range(2000):
        # Multiples of 1/4: products are exact, and equal ones abound.
        confidence = [rng.choice((0.0, 0.25, 0.5, 0.75, 1.0)) for _ in range(rng.randint(0, 9))]
        for h in range(1, 7):
            expected, gap = most_probable_lengths(confidence, h)
            assert likeliest(confidence, h) == expected
            ties += gap == 0
    assert ties > 1000
    assert likeliest([], 3) == [0]
    assert likeliest([0.5], 2) == [0, 1] and likeliest([0.5], 1) == [0]
    assert likeliest([1.0, 1.0], 1) == [2]
    assert likeliest([0.9, 0.1, 0.9], 2) == [1, 0]


def test_k_1_and_verified_rows_count_every_pass_that_outputs_tokens():
    model = tiny_model(vocab_size=V, mask_id=MASK, seed=1)
    for limit in (1, 2, 9):
        [one] = generate(model, [[1, 2]], block_size=1, max_new_tokens=limit, mode="verified")
        [ntp] = generate(model, [[1, 2]], max_new_tokens=limit, mode="ntp")
        assert one.tokens == ntp.tokens and one.nfe == ntp.nfe == limit


# ------------------------------------------------------------------------------------------ temperature > 0

SETTINGS = list(itertools.product((2, 4), (1.0, 0.7)))                   # k, temperature; all with top_p 0.9
PROMPT = [1, 7]


def sampler_model():
    """8 tokens and the mask id, one small layer; NTP's and the masks' distributions are broad and differ."""
    return tiny_model(vocab_size=9, mask_id=4, seed=3, head=0.25, num_hidden_layers=1, hidden_size=8, head_dim=4,
                      num_attention_heads=2, num_key_value_heads=1)


def drawn_texts(k, temperature, draws=20_000, chunk=2000, length=5, hedges=2, edit=None, **options):
    """Draw texts (draws, length). `edit(row)` may tamper with a row's draft after each forward."""
    model, texts, seen = sampler_model(), np.zeros((draws, length), dtype=int), Counter()
    for first in range(0, draws, chunk):
        for steps in decode(model, [PROMPT] * chunk, k, max_new_tokens=length, mode="verified", hedges=hedges, seed=first,
                            temperature=temperature, top_p=0.9, **options):
            for step in steps:
                seen["accepted"] += step.accepted
                seen["drafted"] += len(step.drafted)
                if step.row.done:
                    texts[first + step.row.index] = step.row.tokens
                elif edit:
                    edit(step.row)
    assert seen["drafted"] > seen["accepted"] > draws / 10
    return texts


@functools.cache
def exact_ntp(length, temperature):
    return exact_distribution(sampler_model(), PROMPT, length, temperature=temperature, top_p=0.9)


def p_values(texts, temperature):
    """Chi-squared of the first three tokens, and of the last three, against NTP's exact distribution."""
    p = exact_ntp(texts.shape[1], temperature)
    assert abs(p.sum() - 1) < 1e-12
    counts = np.zeros(p.shape, dtype=int)
    np.add.at(counts, tuple(texts.T), 1)
    last = tuple(range(3, p.ndim))
    early = tuple(range(p.ndim - 3))
    return chi_squared(counts.sum(last), p.sum(last)), chi_squared(counts.sum(early), p.sum(early))


@pytest.mark.parametrize("k, temperature", SETTINGS)
def test_sampled_text_has_exactly_ntps_distribution(k, temperature):
    assert min(p_values(drawn_texts(k, temperature), temperature)) > 0.001


def test_whether_there_is_a_draft_may_depend_on_anything_drawn_earlier():
    def drop_some(row):
        if row.next % 2:
            row.draft, row.confidence = [], []

    assert min(p_values(drawn_texts(4, 1.0, edit=drop_some), 1.0)) > 0.001


@pytest.mark.parametrize("k, temperature", SETTINGS[::3])
def test_accepting_without_the_ratio_fails_the_same_test(monkeypatch, k, temperature):
    """Coins of 0 accept every draft token that NTP could have drawn at all."""
    uniforms = generate_file.Row.uniforms

    def loaded(row, n):
        u = uniforms(row, n)
        u[k:] = 0                                                        # the checks' come last
        return u

    monkeypatch.setattr(generate_file.Row, "uniforms", loaded)
    first, last = p_values(drawn_texts(k, temperature), temperature)
    assert first < 1e-6 and last < 1e-6


@pytest.mark.parametrize("k, temperature", SETTINGS[::3])
def test_cutting_a_draft_at_its_first_improbable_token_fails_the_same_test(k, temperature):
    def cut(row):
        n = next((j for j, c in enumerate(row.confidence) if c < 0.2), len(row.draft))
        row.draft, row.confidence = row.draft[:n], row.confidence[:n]

    assert min(p_values(drawn_texts(k, temperature, edit=cut), temperature)) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("hedges", [1, 2, 4])
@pytest.mark.parametrize("k, temperature", SETTINGS)
def test_200_000_sampled_texts_have_exactly_ntps_distribution(k, temperature, hedges):
    assert min(p_values(drawn_texts(k, temperature, draws=200_000, hedges=hedges), temperature)) > 0.001
