"""Verified decoding (method section 10): NTP's text at every temperature, and no forward that need not be."""
import itertools
import math
import random
from collections import Counter

import pytest

from brute_force import full_logits, ntp, tiny_model, token_at
from generate import decode, generate, likeliest

V, MASK = 7, 3


def most_probable_lengths(confidence, h):
    """-> the h likeliest acceptance lengths, ties to the smaller, and the gap that this choice rests on."""
    d = len(confidence)
    p = [math.prod(confidence[:a]) * (1 - confidence[a] if a < d else 1.0) for a in range(d + 1)]
    order = sorted(range(d + 1), key=lambda a: (-p[a], a))
    return order[:h], p[order[h - 1]] - p[order[h]] if h <= d else math.inf


def drafted(model, text, n, k, seed, **sampling):
    """The draft behind a `next` at position n, where `text` (with the prompt) ends: its tokens, and the
    probability of each in the distribution that it was taken from."""
    logits = full_logits(model, [*text, *[model.config.mask_id] * k], block=k)[-k + 1:].tolist()
    return list(map(list, zip(*[token_at(z, seed, n + j, **sampling) for j, z in enumerate(logits, 1)])))


def passes(model, prompt, k, h, text, seed=0, **sampling):
    """What section 10 must spend, given NTP's text: for each forward its draft and how many of it agree.

    Returns that list, and whether a choice of lengths hung on less than rounding.
    """
    n, draft, confidence, done, close = 0, [], [], [], False
    while True:
        pairs = zip(draft, text[n + 1:])
        agree = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        done.append((draft, agree))
        lengths, gap = most_probable_lengths(confidence, h)
        n += 1 + agree
        if n >= len(text):
            return done, close
        close |= 0 < gap < 1e-13                       # 0: two of probability 0, say, tie exactly
        draft, confidence = [], []
        if k > 1 and agree in lengths:
            draft, confidence = drafted(model, [*prompt, *text[:n]], n, k, seed, **sampling)


def random_request(rng, kind, case, hot):
    """Predictions of a mask and of NTP agree by chance here, more often where the text matters little."""
    head, body = rng.choice((0.15, 0.3, 0.6)), rng.choice((0.05, 0.2, 0.5))
    model = tiny_model(kind, V, MASK, seed=case, head=head, body=body)
    k, h = rng.choice((1, 2, 3, 4, 5, 8, 16, 33, 64, rng.randint(1, 64))), rng.randint(1, 6)
    limit, seed = rng.randint(1, 32), rng.choice((0, 1, case, 2**32 - 2, 2**63 - 1, -3))
    ids, rows = [i for i in range(V) if i != MASK], rng.choice((1, 1, 2, 3, 5))
    prompts = [[rng.choice(ids) for _ in range(rng.choice((1, 1, 2, 6)))] for _ in range(rows)]
    sampling = dict(temperature=0.0)
    if hot:
        sampling = dict(temperature=rng.uniform(0.3, 2), top_k=rng.choice((None, None, 1, 2, 4, 100)),
                        top_p=rng.choice((None, None, 1.0, rng.uniform(0.05, 1))))
    stop_ids = rng.sample(ids, rng.choice((0, 0, 1, 2)))
    if not stop_ids and rng.random() < 0.7:   # a stop id inside an accepted draft is rare
        text, _ = ntp(model, prompts[0], limit, seed=seed, **sampling)
        forwards, _ = passes(model, prompts[0], k, h, text, seed, **sampling)
        begins = {0, *itertools.accumulate(1 + agree for _, agree in forwards)}   # where a `next` stands
        stop_ids = [t for n, t in enumerate(text) if n not in begins and t not in text[:n]][:1]
    return model, prompts, k, h, limit, stop_ids, seed, sampling


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("hot", [False, True], ids=["temperature 0", "temperatures of 0.3 to 2"])
def test_text_is_always_ntps_and_the_forwards_are_those_it_must_spend(kind, hot):
    """150 random requests each, models never trained with SBD: text and end of brute-force NTP and of mode
    ntp with the same seed; NFE, every draft and its check of a plain reading of section 10."""
    rng, happened = random.Random(kind), Counter()
    for case in range(150):
        model, prompts, k, h, limit, stop_ids, seed, sampling = random_request(rng, kind, case, hot)
        options = dict(max_new_tokens=limit, stop_ids=stop_ids, seed=seed, **sampling)
        rows, steps = {}, [[] for _ in prompts]
        for batch in decode(model, prompts, k, mode="verified", hedges=h, **options):
            for step in batch:
                rows[step.row.index] = step.row
                steps[step.row.index].append(step)
        for i, plain in enumerate(generate(model, prompts, mode="ntp", **options)):
            text, stopped = ntp(model, prompts[i], limit, stop_ids, seed + i, **sampling)
            assert (plain.tokens, plain.stopped, plain.nfe) == (text, stopped, len(text)), (case, i)
            assert (rows[i].tokens, rows[i].stopped) == (text, stopped), (case, i)
            expected, close = passes(model, prompts[i], k, h, text, seed + i, **sampling)
            happened["too close to call"] += close
            happened["rows"] += 1
            if not close:
                assert rows[i].nfe == len(steps[i]) == len(expected), (case, i)
                assert [s.drafted for s in steps[i]] == [draft for draft, _ in expected], (case, i)
                accepted = [s.accepted for s in steps[i][:-1]]           # the last one's end with the row
                assert accepted == [agree for _, agree in expected[:-1]], (case, i)
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
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_hedge_sees_exactly_what_it_would_see_after_that_acceptance(kind, k, h, temperature):
    """block_a's logits are those of a plain forward over past + next + draft[:a] + k masks; the check's those
    of a causal forward; and the lengths with a block are the most probable ones."""
    model = tiny_model(kind, V, MASK, seed=k, head=0.3, body=0.2)
    prompts, windows, hidden, blocks = [[1], [4, 2, 6], [5, 5, 0, 1, 2, 4]], [], model.hidden, Counter()

    def recorded(tokens, positions, attend):
        windows.append((tokens, positions, hidden(tokens, positions, attend)))
        return windows[-1][2]

    model.hidden = recorded
    options = dict(max_new_tokens=14, mode="verified", hedges=h, temperature=temperature, seed=3)
    for steps in decode(model, prompts, k, **options):
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
            causal = full_logits(model, text + known, mask_out=False)
            same(model.lm_head(states[b, :1 + d]), causal[-1 - d:])
            lengths = []
            for begin in range(1 + d, 1 + d + k * min(h, d + 1), k):
                a = int(positions[b, begin] - positions[b, 0]) - 1
                lengths.append(a)
                assert tokens[b, begin:begin + k].tolist() == [MASK] * k
                plain = full_logits(model, text + known[:1 + a] + [MASK] * k, block=k, mask_out=False)
                same(model.lm_head(states[b, begin:begin + k]), plain[-k:])
            confidence = []
            if d:                                                        # it stood behind `next`, all masked
                seed = 3 + step.row.index
                draft, confidence = drafted(model, text, step.start, k, seed, temperature=temperature)
                assert draft == step.drafted
            assert lengths == most_probable_lengths(confidence, h)[0]
            blocks[len(lengths)] += 1
        model.hidden = recorded
    assert max(blocks) == min(h, k)


def same(ours, theirs):
    """To rounding in float64: a few hundred sums of numbers near 1."""
    assert (ours - theirs).abs().max() <= 1e-11 * theirs.abs().max()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_any_draft_gives_the_same_text(temperature):
    """Cut, dropped, replaced by anything, of any confidences: drafts decide how many forwards it takes."""
    rng, checked = random.Random(0), Counter()
    for case in range(40):
        model, k = tiny_model(("llama", "qwen3")[case % 2], V, MASK, seed=case, head=0.3), rng.randint(2, 9)
        prompts = [[rng.choice((0, 1, 2, 4))] for _ in range(3)]
        options = dict(max_new_tokens=20, seed=case, temperature=temperature,
                       stop_ids=rng.sample((0, 2, 5), case % 2))
        rows = {}
        for steps in decode(model, prompts, k, mode="verified", hedges=rng.randint(1, 4), **options):
            for step in steps:
                row = rows[step.row.index] = step.row
                checked["tokens"] += len(step.drafted)
                checked["accepted"] += step.accepted
                n = rng.choice((0, len(row.draft), rng.randint(0, k - 1)))
                row.draft = (row.draft + [rng.randrange(V) for _ in range(k)])[:n]
                if rng.random() < 0.3:
                    row.draft = [rng.randrange(V) for _ in range(n)]
                row.confidence = [rng.random() for _ in range(n)]
        for i, plain in enumerate(generate(model, prompts, mode="ntp", **options)):
            assert (rows[i].tokens, rows[i].stopped) == (plain.tokens, plain.stopped)
    assert checked["tokens"] > checked["accepted"] > 200


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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_k_1_and_verified_rows_count_every_pass_that_outputs_tokens(temperature):
    model = tiny_model(vocab_size=V, mask_id=MASK, seed=1)
    for limit in (1, 2, 9):
        options = dict(max_new_tokens=limit, temperature=temperature, seed=4)
        [one] = generate(model, [[1, 2]], block_size=1, mode="verified", **options)
        [plain] = generate(model, [[1, 2]], mode="ntp", **options)
        assert one.tokens == plain.tokens and one.nfe == plain.nfe == limit
