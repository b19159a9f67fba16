"""generate.py against decoding without a cache (brute_force.py), in every mode; and its command line."""
import json
import math
import random
import runpy
import shutil
import subprocess
import sys
from collections import Counter
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch

from brute_force import (chi_squared, exact_distribution, full_logits, ntp, probabilities, revealed, sbd,
                         tiny_model)
from generate import decode, generate
from model import Llama
from tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "checkpoints" / "tiny-ntp"
V, MASK = 13, 5
GAMMAS = 0.0, 0.1, 1.0, 5.0, 1e9
BOUNDS = {"eb": GAMMAS, "eb-confidence": GAMMAS, "factor": (0.0, 0.3, 1.0, 3.0),
          "threshold": (0.0, 0.3, 0.6, 1.0)}
MODES = {"sbd": dict(mode="sbd", gamma=1.0), "ntp": dict(mode="ntp"),
         "verified": dict(mode="verified", hedges=3)}
KINDS = "llama", "qwen3"


def rule(sampler, bound):
    return {"sampler": sampler, "gamma" if sampler.startswith("eb") else sampler: bound}


def some_prompts(rng, count):
    """Without the mask id: after a text of masks only, all masks' predictions tie, and rounding decides."""
    ids = [i for i in range(V) if i != MASK]
    return [[rng.choice(ids) for _ in range(rng.choice((1, 1, 2, 5, 9)))] for _ in range(count)]


def some_sampling(rng):
    return dict(temperature=rng.choice((0.3, 0.8, 1.0, 2.0)), top_k=rng.choice((None, 1, 3, 8)),
                top_p=rng.choice((None, 0.4, 0.9, 1.0)))


# ------------------------------------------------------------------------------------------ sbd

@pytest.mark.parametrize("sampler", BOUNDS)
def test_sbd_with_a_cache_is_sbd_without_one(sampler):
    """Tokens, NFE, the end, and every block after every forward: 60 random requests of 1 to 3 rows for each
    sampler, a third of them at a temperature."""
    rng, happened, texts = random.Random(sampler), Counter(), set()
    for case in range(60):
        head, body = rng.choice((0.15, 0.3, 0.6)), rng.choice((0.2, 0.5))
        model = tiny_model(rng.choice(KINDS), V, MASK, seed=case, head=head, body=body)
        k, bound, limit = rng.randint(1, 17), rng.choice(BOUNDS[sampler]), rng.randint(1, 24)
        stop_ids = set(rng.sample([i for i in range(V) if i != MASK], rng.choice((0, 1, 2))))
        sampling = some_sampling(rng) if case % 3 == 2 else dict(temperature=0.0)
        prompts = some_prompts(rng, rng.randint(1, 3))
        blocks, rows = [[] for _ in prompts], {}
        options = dict(max_new_tokens=limit, stop_ids=stop_ids, seed=case, **rule(sampler, bound), **sampling)
        for steps in decode(model, prompts, k, mode="sbd", **options):
            for step in steps:
                rows[step.row.index] = step.row
                blocks[step.row.index].append(step.block)
        for i, prompt in enumerate(prompts):
            truth = sbd(model, prompt, k, limit, stop_ids, sampler, bound, case + i, **sampling)
            tokens, nfe, stopped, trail = truth
            assert (rows[i].tokens, rows[i].nfe, rows[i].stopped) == (tokens, nfe, stopped), (case, i)
            assert blocks[i] == trail, (case, i)
            texts.add(tuple(tokens))
            count_events(happened, trail, k, limit, stop_ids)
            happened["ended by a stop id"] += stopped
            happened["ended by the limit inside a block"] += not stopped and limit % k > 0
            happened["one token of prompt"] += len(prompt) == 1
    assert len(texts) > 60
    assert len(happened) == 9 and min(happened.values()) >= 3, happened   # else the requests were too tame


def count_events(happened, trail, k, limit, stop_ids):
    start = 0                                                            # of the block, in the text
    for before, after in zip([[None] * k] + trail, trail):
        before = before if None in before else [None] * k
        new = [j for j in range(k) if before[j] is None and after[j] is not None]
        stops = [j for j in new if after[j] in stop_ids]
        happened["several at once"] += len(new) > 1
        happened["out of order"] += any(None in after[:j] for j in new)
        happened["behind the limit"] += any(start + j >= limit for j in new)
        happened["a stop id whose predecessors are masked"] += any(None in after[:j] for j in stops)
        happened["behind a revealed stop id"] += any(before[i] in stop_ids for j in new for i in range(j))
        happened["a stop id behind the limit"] += any(start + j >= limit for j in stops)
        start += k if None not in after else 0


def test_blocks_are_always_k_masks_long():
    model = tiny_model(vocab_size=V, mask_id=MASK)
    for limit in (1, 3, 7, 8, 9):
        options = dict(block_size=7, gamma=0.1, max_new_tokens=limit, mode="sbd")
        steps = [step for [step] in decode(model, [[1, 2, 3]], **options)]
        assert all(len(step.block) == 7 for step in steps)
        assert [step.start % 7 for step in steps] == [0] * len(steps)


def test_sbd_runs_no_forward_once_the_row_has_ended():
    """One prefill and nfe forwards, whatever ends the row."""
    for seed in range(6):
        model = tiny_model(vocab_size=V, mask_id=MASK, seed=seed)
        for stop_ids in ((), (0, 1, 2)):
            calls, options = count_forwards(model), dict(max_new_tokens=13, stop_ids=stop_ids)
            [row] = generate(model, [[3, 1]], block_size=5, gamma=0.5, mode="sbd", **options)
            assert calls[0] == 1 + row.nfe
            del model.hidden


def count_forwards(model):
    calls, hidden = [0], model.hidden

    def counted(*args):
        calls[0] += 1
        return hidden(*args)

    model.hidden = counted
    return calls


# ------------------------------------------------------------------------------------------ ntp

@pytest.mark.parametrize("kind", KINDS)
def test_ntp_is_next_token_decoding_with_one_forward_a_token(kind):
    rng, ends = random.Random(kind), Counter()
    for case in range(40):
        model = tiny_model(kind, V, MASK, seed=case)
        prompts, limit = some_prompts(rng, rng.randint(1, 4)), rng.randint(1, 24)
        stop_ids = rng.sample(range(V), rng.choice((0, 1, 2)))
        sampling = some_sampling(rng) if case % 2 else dict(temperature=0.0)
        options = dict(max_new_tokens=limit, stop_ids=stop_ids, seed=case, **sampling)
        for i, row in enumerate(generate(model, prompts, mode="ntp", **options)):
            truth = ntp(model, prompts[i], limit, stop_ids, case + i, **sampling)
            assert (row.tokens, row.stopped) == truth
            assert row.nfe == len(row.tokens)
            ends[row.stopped] += 1
    assert min(ends[True], ends[False]) > 5


# ------------------------------------------------------------------------------------------ all modes

@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_alone_and_in_a_batch_is_the_same(mode, temperature):
    """Row i of a batch is what it is alone with seed + i."""
    rng = random.Random(1)
    for case in range(8):
        model = tiny_model(KINDS[case % 2], V, MASK, seed=case, head=0.3)
        prompts, k = some_prompts(rng, 5), rng.choice((1, 2, 5, 8))
        options = dict(MODES[mode], block_size=k, max_new_tokens=17, stop_ids=[case % 5])
        if temperature:
            cuts = dict(top_k=rng.choice((None, 8)), top_p=rng.choice((None, 0.9)))
            options |= dict(temperature=temperature, **cuts)
        if mode == "sbd":
            options |= dict(sampler=list(BOUNDS)[case % 4])
        together = generate(model, prompts, seed=100, **options)
        for i, prompt in enumerate(prompts):
            [alone] = generate(model, [prompt], seed=100 + i, **options)
            same = [(row.tokens, row.nfe, row.stopped) for row in (alone, together[i])]
            assert same[0] == same[1]


@pytest.mark.parametrize("mode", MODES)
def test_texts_end_at_the_models_own_stop_ids_unless_others_are_given(mode):
    """stop_ids: None, the default, are those of config.json; () are none."""
    ended = Counter()
    for seed, own in enumerate((None, 9, [3], [2, 9, 11], [0, 1, 4, 6])):
        model = tiny_model(vocab_size=V, mask_id=MASK, seed=seed, head=0.3, eos_token_id=own)
        stop_ids = [own] if isinstance(own, int) else own or []
        options = dict(MODES[mode], block_size=4, max_new_tokens=40)
        prompts = [[1, 2], [6], [3, 3, 3]]
        default = generate(model, prompts, **options)
        given = generate(model, prompts, stop_ids=stop_ids, **options)
        endless = generate(model, prompts, stop_ids=(), **options)
        for row, same, whole in zip(default, given, endless):
            assert (row.tokens, row.nfe, row.stopped) == (same.tokens, same.nfe, same.stopped)
            assert len(whole.tokens) == 40 and not whole.stopped
            assert row.tokens == whole.tokens[:len(row.tokens)]
            assert row.stopped == any(t in stop_ids for t in whole.tokens)
            assert not row.stopped or row.tokens[-1] in stop_ids and not {*row.tokens[:-1]} & {*stop_ids}
            ended[row.stopped] += 1
    assert min(ended[True], ended[False]) > 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("mask_id", [0, MASK, V - 1])
def test_mask_id_is_never_emitted_even_where_its_logit_is_the_largest(mode, temperature, mask_id):
    """Its logit changes nothing at all: neither tokens nor NFE."""
    model = tiny_model(vocab_size=V, mask_id=mask_id, seed=2, head=0.3)
    options = dict(MODES[mode], block_size=6, max_new_tokens=30, temperature=temperature, seed=0)
    before = generate(model, [[1, 2], [3]], **options)
    bonus = torch.zeros(V, dtype=torch.float64)
    bonus[mask_id] = 1000.0
    model.lm_head.register_forward_hook(lambda module, args, logits: logits + bonus)
    assert (full_logits(model, [1, 2, 3], mask_out=False).argmax(-1) == mask_id).all()
    after = generate(model, [[1, 2], [3]], **options)
    assert [(r.tokens, r.nfe) for r in after] == [(r.tokens, r.nfe) for r in before]
    assert not any(mask_id in r.tokens for r in after)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equal_logits_go_to_the_lowest_id_that_is_not_the_mask(mode, dtype):
    for mask_id, lowest in ((0, 1), (7, 0)):
        model = tiny_model(vocab_size=1000, mask_id=mask_id, dtype=dtype)
        model.lm_head.weight.zero_()
        for row in generate(model, [[1, 2], [3]], block_size=6, max_new_tokens=13, **MODES[mode]):
            assert row.tokens == [lowest] * 13


@pytest.mark.parametrize("mode", MODES)
def test_no_new_tokens_cost_no_forward(mode):
    model = tiny_model(vocab_size=V, mask_id=MASK)
    calls = count_forwards(model)
    for row in generate(model, [[1], [2, 3]], max_new_tokens=0, **MODES[mode]):
        assert (row.tokens, row.nfe, row.stopped) == ([], 0, False)
    assert calls[0] <= 1                                                 # the prefill at most


@pytest.mark.parametrize("mode", MODES)
def test_text_ends_where_the_models_context_does(mode):
    """Row by row: each has its own room, and blocks may lie across the end of it."""
    model = tiny_model(vocab_size=V, mask_id=MASK, context=20)
    prompts = [[1] * 19, [2, 3], [4] * 12]
    rows = generate(model, prompts, block_size=6, max_new_tokens=1000, **MODES[mode])
    for prompt, row in zip(prompts, rows):
        room = 20 - len(prompt)
        truth = sbd(model, prompt, 6, room, bound=1.0) if mode == "sbd" else ntp(model, prompt, room)
        assert row.tokens == truth[0]


@pytest.mark.parametrize("mode", MODES)
def test_final_tokens_of_the_steps_are_the_text_in_order(mode):
    """What streaming prints; and each position is revealed exactly once."""
    model = tiny_model(vocab_size=V, mask_id=MASK, seed=4, head=0.3)
    final, found, rows = [[], []], [{}, {}], {}
    options = dict(block_size=5, max_new_tokens=23, stop_ids=[9], **MODES[mode])
    for steps in decode(model, [[1, 2], [6]], **options):
        for step in steps:
            i = step.row.index
            final[i] += step.final
            assert final[i] == step.row.tokens
            assert not found[i].keys() & dict(step.revealed).keys()
            found[i] |= dict(step.revealed)
            rows[i] = step.row
    for i in (0, 1):
        assert [found[i][n] for n in range(len(final[i]))] == final[i]
        assert rows[i].done


@pytest.mark.parametrize("mode", MODES)
def test_whoever_reads_the_steps_may_end_a_row_and_the_others_go_on_as_before(mode):
    model = tiny_model(vocab_size=V, mask_id=MASK, seed=1, head=0.3)
    prompts, options = [[1, 2], [6], [3, 3, 3]], dict(block_size=4, max_new_tokens=19, **MODES[mode])
    expected, rows, forwards = generate(model, prompts, **options), {}, Counter()
    for steps in decode(model, prompts, **options):
        for step in steps:
            rows[step.row.index] = step.row
            forwards[step.row.index] += 1
            step.row.done |= step.row.index == 1
    assert forwards[1] == 1
    assert all(rows[i].tokens == expected[i].tokens for i in (0, 2))


BAD_REQUESTS = {   # name: what is given, words of the refusal; without words: its name and value
    "no prompts": (dict(prompts=[]), "empty prompt"),
    "empty prompt": (dict(prompts=[[1], []]), "empty prompt"),
    "prompt as long as the context": (dict(prompts=[[1] * 20]), "context of 20"),
    "id too large": (dict(prompts=[[V]]), "outside the vocabulary"),
    "id below 0": (dict(prompts=[[-1]]), "outside the vocabulary"),
    "ids that are none": (dict(prompts=[[1.5]]), "token ids"), "a text": (dict(prompts=["ab"]), "token ids"),
    "prompts that are none": (dict(prompts=[1]), "token ids"),
    "one stop id": (dict(stop_ids=5), "token ids"),
    "stop ids that are none": (dict(stop_ids=["a"]), "token ids"),
    "mode": (dict(mode="fast"), "mode 'fast'"), "sampler": (dict(sampler="best"), "sampler 'best'"),
    "samplers": (dict(sampler=["eb"]), "sampler ['eb']"), "attention": (dict(attention="x"), "attention 'x'")}
BAD_NUMBERS = dict(
    block_size=(0, -1, 2.0, True, None, 10**12), hedges=(0, 1.5, True, 10**12), seed=(1.5, True, "a"),
    gamma=(-0.1, math.nan, True, "1", None), max_new_tokens=(-1, 3.5, True, None, 10**12),
    temperature=(-1.0, math.nan, math.inf, True, None), top_k=(0, -1, 2.5, True),
    top_p=(0.0, 1.5, -0.1, math.nan, True), factor=(-1.0, math.nan, True),
    threshold=(2.0, -0.1, math.nan, True))
BAD_REQUESTS |= {f"{name} {value}": ({name: value}, f"{name} {value!r}: wanted ")
                 for name, values in BAD_NUMBERS.items() for value in values}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_bad_request_is_named_in_one_line(name):
    change, words = BAD_REQUESTS[name]
    model = tiny_model(vocab_size=V, mask_id=MASK, context=20)
    with pytest.raises(ValueError) as error:
        generate(model, **dict(prompts=[[1, 2]]) | change)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_request_that_memory_has_no_room_for_is_named_in_one_line():
    """Some TiB of cache: refused before anything is allocated."""
    model = tiny_model(vocab_size=V, mask_id=MASK, context=2**24)
    with pytest.raises(ValueError, match=r"cache of 3000 rows of \d+ tokens takes .* GiB free: decode fewer"):
        generate(model, [[1]] * 3000, max_new_tokens=2**24 - 1)


def test_numbers_of_numpy_are_numbers():
    model = tiny_model(vocab_size=V, mask_id=MASK)
    options = dict(block_size=3, max_new_tokens=8, temperature=0.5, top_k=4, seed=7, stop_ids=[4])
    as_numpy = {name: np.array([4]) if name == "stop_ids" else np.array(x)[()] for name, x in options.items()}
    [ours], [wanted] = generate(model, [np.array([1, 2])], **as_numpy), generate(model, [[1, 2]], **options)
    assert (ours.tokens, ours.nfe) == (wanted.tokens, wanted.nfe)


def test_a_model_without_mask_id_decodes_ntp_only():
    model = tiny_model(vocab_size=V, mask_id=None)
    assert generate(model, [[1, 2]], mode="ntp", max_new_tokens=9)[0].tokens == ntp(model, [1, 2], 9)[0]
    for mode in ("sbd", "verified"):
        with pytest.raises(ValueError, match="mask_id"):
            generate(model, [[1, 2]], mode=mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", ["head", "one row of the head", "layer"])
def test_logits_that_are_not_finite_are_named(mode, temperature, value, place):
    model = tiny_model(vocab_size=V, mask_id=MASK)
    weight = model.model.layers[1].mlp.down_proj.weight if place == "layer" else model.lm_head.weight
    with torch.no_grad():
        weight[3 if place == "one row of the head" else slice(None)] = value
    with pytest.raises(ValueError, match="not finite in torch.float64: try --dtype=float32") as error:
        generate(model, [[1], [2, 3]], **MODES[mode], temperature=temperature)
    assert "\n" not in str(error.value)


# ------------------------------------------------------------------------------------------ temperature > 0

SAMPLINGS = {"temperature 1": dict(temperature=1.0),
             "temperature 0.7, top_p 0.9": dict(temperature=0.7, top_p=0.9),
             "temperature 1.3, top_k 3": dict(temperature=1.3, top_k=3),
             "top_k 5, top_p 0.7": dict(temperature=1.0, top_k=5, top_p=0.7)}


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("mode", ["ntp", "sbd"])
def test_drawn_continuations_have_the_models_exact_distribution(mode, name):
    """20,000 draws of three tokens, a vocabulary of 8 and the mask id. sbd with k = 1 predicts each at one
    mask behind the text."""
    model = tiny_model(vocab_size=9, mask_id=4, seed=3, head=0.25, num_hidden_layers=1, hidden_size=8,
                       head_dim=4, num_attention_heads=2, num_key_value_heads=1)
    p = exact_distribution(model, [1, 7], 3, block=int(mode == "sbd"), **SAMPLINGS[name])
    assert abs(p.sum() - 1) < 1e-12 and p.max() < 0.5
    counts, options = np.zeros(p.shape), dict(block_size=1, mode=mode, max_new_tokens=3, **SAMPLINGS[name])
    for seed in range(0, 20_000, 2000):
        rows = generate(model, [[1, 7]] * 2000, seed=seed, **options)
        np.add.at(counts, tuple(np.array([row.tokens for row in rows]).T), 1)
    assert counts.sum() == 20_000 and chi_squared(counts, p) > 0.001


def test_texts_without_a_seed_differ_and_seeds_count_modulo_2_to_the_64():
    model, texts = tiny_model(vocab_size=V, mask_id=MASK), []
    for seed in None, None, 5, 5 + 2**64, 5 + 2**32:
        [row] = generate(model, [[1]], mode="ntp", max_new_tokens=40, temperature=1.0, seed=seed)
        texts.append(row.tokens)
    assert texts[0] != texts[1] and texts[2] == texts[3] != texts[4]


@pytest.mark.parametrize("sampler", BOUNDS)
def test_what_is_revealed_depends_on_the_untempered_distributions_alone(sampler):
    """The first forward of a block of 8, against a search over all s; draws stay within top-k and top-p."""
    rng, sizes = random.Random(sampler), Counter()
    for case in range(30):
        model = tiny_model(KINDS[case % 2], V, MASK, seed=case, head=0.6)
        sampling, prompt, bound = some_sampling(rng), some_prompts(rng, 1)[0], rng.choice(BOUNDS[sampler])
        options = dict(mode="sbd", seed=case, **rule(sampler, bound), **sampling)
        [step] = next(decode(model, [prompt], 8, **options))
        logits = full_logits(model, prompt + [MASK] * 8, block=8)[-8:].tolist()
        shown = {i: t for i, t in enumerate(step.block) if t is not None}
        assert shown.keys() == revealed(sampler, {i: probabilities(z) for i, z in enumerate(logits)}, bound)
        assert all(probabilities(logits[i], **sampling)[t] > 0 for i, t in shown.items())
        sizes[len(step.revealed)] += 1
    assert len(sizes) > 2


@pytest.mark.parametrize("sampler", BOUNDS)
def test_the_limit_of_a_small_temperature_is_temperature_0(sampler):
    """Temperature 0.01 with top_k 1: tokens, NFE and every block are those of temperature 0."""
    rng, several = random.Random(sampler), 0
    for case in range(20):
        model = tiny_model(KINDS[case % 2], V, MASK, seed=case, head=0.6)
        prompts, k, bound = some_prompts(rng, 2), rng.randint(2, 9), rng.choice(BOUNDS[sampler])
        options, seen = dict(mode="sbd", max_new_tokens=20, **rule(sampler, bound)), []
        for sampling in dict(temperature=0.0), dict(temperature=0.01, top_k=1, seed=case):
            steps = [step for steps in decode(model, prompts, k, **options, **sampling) for step in steps]
            seen.append([(step.row.index, step.block, step.final) for step in steps])
            several += any(len(step.revealed) > 1 for step in steps)
        assert seen[0] == seen[1]
    assert several > 5


def test_chi_squared_merges_small_cells_and_tells_a_loaded_die():
    """p-values from tables: 1 degree of freedom, 3.841 and 6.635."""
    n = 10000
    for statistic, p_value in ((3.841, 0.05), (6.635, 0.01)):
        shift = math.sqrt(statistic * n / 4)   # counts n/2 +- shift have this statistic
        assert abs(chi_squared([n / 2 + shift, n / 2 - shift], [0.5, 0.5]) - p_value) < 1e-4
        small = np.full(10, 0.5 / n)   # ten cells of 0.5 become one of 5
        counts = np.concatenate(([n - 5], np.eye(10)[0] * 5))
        assert chi_squared(counts, np.concatenate(([1 - 5 / n], small))) > 0.99
    assert chi_squared([1, 0], [0.0, 1.0]) == 0


# ------------------------------------------------------------------------------------------ command line

@pytest.fixture
def command(monkeypatch, capsys):
    """Run generate.py as a script in this process -> (exit code, stdout, stderr)."""
    def run(*argv, stdin=None):
        monkeypatch.setattr(sys, "argv", ["generate.py", *map(str, argv)])
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", StringIO(stdin))
        try:
            runpy.run_path(str(ROOT / "generate.py"), run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return run


def script(*argv, stdin=""):
    """The same in a process of its own, with text piped in."""
    done = subprocess.run([sys.executable, str(ROOT / "generate.py"), *map(str, argv)], input=stdin,
                          capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def tiny():
    model = Llama.from_pretrained(TINY, dtype=torch.float32)
    return model, Tokenizer.from_pretrained(TINY)


def greedy_text(tiny, prompt, limit):
    model, tokenizer = tiny
    tokens, stopped = ntp(model, tokenizer.encode(prompt), limit, model.config.stop_ids)
    return tokenizer.decode(tokens[:-1] if stopped else tokens)


def is_one_line(err):
    return err.startswith("generate.py: ") and err.count("\n") == 1 and err.endswith("\n")


PROMPT = "Mia has 14 apples. "
HERE = ["--init_from", TINY, "--max_new_tokens", 12]
HUGE = "1000000000000"
BAD_COMMANDS = {   # name: what follows --prompt=a, words of the refusal
    "long prompt": (["--prompt", "7" * 2048], "context of 2048"),
    "empty prompt": (["--prompt="], "prompt is empty"),
    "two prompts": (["--prompt_file", "b"], "give one of them"),
    "mask_id": (["--mask_id=512"], "outside the vocabulary"),
    "mask_id below 0": (["--mask_id=-1"], "outside the vocabulary"),
    "preset": (["--init_from=llama9-1b"], "llama9-1b"),
    "no weights": (["--init_from=sbd-3b"], "no published weights"),
    "no model": (["--init_from", ROOT / "data"], "no config.json"),
    "a trace of nothing": (["--trace=out.html", "--max_new_tokens=0"], "--trace: --max_new_tokens=0"),
    "device": (["--device=gpu"], "--device gpu"), "attention": (["--attention=fast"], "sdpa"),
    "sampler": (["--sampler=best"], "eb-confidence"), "mode": (["--mode=fast"], "verified"),
    "unknown option": (["--gama=1"], "--gama=1")}
BAD_VALUES = dict(
    gamma=("-0.1", "nan"), block_size=("0", HUGE), top_p=("0.0", "1.5"), top_k=("0",), hedges=("0", HUGE),
    num_samples=("0", HUGE), temperature=("-1.0", "inf"), max_new_tokens=("-1", HUGE))
NO_NUMBERS = dict(block_size=("many", "1e400"), top_k=("2.5",), gamma=("low",), seed=("0.5",))
BAD_COMMANDS |= {f"{name} {value}": ([f"--{name}={value}"], f"{name} {value}: wanted ")
                 for name, values in BAD_VALUES.items() for value in values}
BAD_COMMANDS |= {f"{name} {value}": ([f"--{name}={value}"], f"--{name}: invalid ")
                 for name, values in NO_NUMBERS.items() for value in values}


@pytest.mark.parametrize("name", BAD_COMMANDS)
def test_bad_input_is_one_line_on_stderr_and_exit_code_2(command, name):
    argv, words = BAD_COMMANDS[name]
    code, out, err = command(*HERE, "--prompt=a", *argv)
    assert code == 2 and out == "" and is_one_line(err) and words in err


def test_a_missing_prompt_is_asked_for(command, tmp_path):
    for argv, words in (([], "no prompt"), (["--prompt_file", "no/such.txt"], "no/such.txt"),
                        (["--prompt_file", tmp_path], str(tmp_path))):
        code, out, err = command(*HERE, *argv)
        assert code == 2 and out == "" and is_one_line(err) and words in err


def test_an_empty_prompt_file_and_one_that_is_no_text_are_refused(command, tmp_path):
    path = tmp_path / "prompt"
    for content, words in ((b"", "prompt is empty"), (b"\xff\xfe\x00", "cannot be read")):
        path.write_bytes(content)
        code, out, err = command(*HERE, "--prompt_file", path)
        assert code == 2 and out == "" and is_one_line(err) and words in err
    code, out, err = command(*HERE, "--prompt_file", "-", stdin="")
    assert code == 2 and "prompt is empty" in err


@pytest.mark.parametrize("argv", [["--num_samples=65536", "--max_new_tokens=2000"],
                                  ["--mode=verified", "--block_size=1024", "--hedges=64"]])
def test_a_cache_that_memory_has_no_room_for_is_refused(command, monkeypatch, argv):
    """On a machine with 0.25 GiB free."""
    monkeypatch.setattr("kv_cache.free_memory", lambda device: 2.0**28)
    code, out, err = command(*HERE, "--prompt=a", *argv)
    assert code == 2 and out == "" and is_one_line(err) and "cpu has 0.2 GiB free" in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_a_device_that_is_not_there_is_refused(command):
    code, out, err = command(*HERE, "--prompt=a", "--device=cuda")
    assert code == 2 and out == "" and is_one_line(err) and "--device cuda is not there" in err


@pytest.mark.parametrize("mode", MODES)
def test_a_checkpoint_with_nan_weights_is_named_with_a_dtype_hint(command, tmp_path, tiny, mode):
    broken = Llama.from_pretrained(TINY, dtype=torch.float32)
    with torch.no_grad():
        broken.model.layers[2].mlp.up_proj.weight[0, 0] = math.nan
    broken.save_pretrained(tmp_path)
    code, out, err = command("--init_from", tmp_path, "--prompt=a", "--mode", mode, "--dtype=bfloat16")
    assert code == 2 and out == ""
    assert err == ("generate.py: the model's logits are not finite in torch.bfloat16: try --dtype=float32, "
                   "or check the weights\n")


def test_ntp_text_on_stdout_is_the_models_greedy_text(command, tiny):
    code, out, err = command(*HERE, "--mode", "ntp", "--prompt", PROMPT)
    assert code == 0 and out == greedy_text(tiny, PROMPT, 12)
    assert err.startswith("\nntp: ") and err.count("\n") == 2


def test_verified_prints_the_same_text_and_is_the_default_without_gamma(command, tiny):
    for argv, mode in (([], "verified"), (["--gamma=0.1"], "sbd"), (["--mode=sbd"], "sbd")):
        code, out, err = command(*HERE, "--prompt", PROMPT, *argv)
        assert code == 0 and err.startswith(f"\n{mode}: ")
        assert mode == "sbd" or out == greedy_text(tiny, PROMPT, 12)


def test_verified_prints_ntps_text_at_any_temperature(command):
    argv = ["--init_from", TINY, "--prompt", PROMPT, "--max_new_tokens=40", "--dtype=float64"]
    texts = set()
    for sampling in (["--temperature=0.7", "--seed=1"], ["--temperature=1.5", "--top_k=20"],
                     ["--temperature=2", "--top_p=0.9", "--seed=2"]):
        plain, verified = (command(*argv, *sampling, "--mode", mode)[1] for mode in ("ntp", "verified"))
        assert plain == verified and len(plain) > 20
        texts.add(plain)
    assert len(texts) == 3


@pytest.mark.parametrize("argv", [
    ["--mode=verified", "--gamma=0.1"], ["--sampler=factor"], ["--mode=ntp", "--hedges=3"],
    ["--mode=sbd", "--hedges=3"], ["--mode=ntp", "--block_size=3"], ["--top_k=3"]])
def test_an_option_without_effect_is_named(command, argv):
    code, out, err = command(*HERE, "--prompt", PROMPT, *argv)
    first = err.split("\n")[0]
    assert code == 0 and first.startswith(f"generate.py: {argv[-1].split('=')[0]} ") and "no effect" in first


def test_options_are_given_with_equals_sign_or_space(command):
    options = dict(init_from=TINY, prompt=PROMPT, max_new_tokens=12, mode="sbd", gamma=1e9, block_size=4)
    equals = command(*[f"--{name}={value}" for name, value in options.items()])
    space = command(*[word for name, value in options.items() for word in (f"--{name}", value)])
    assert equals[:2] == space[:2]
    assert "12 tokens in 3 forwards" in equals[2] and "12 tokens in 3 forwards" in space[2]


def test_prompt_from_a_file_and_from_standard_input(command, tmp_path, tiny):
    (tmp_path / "prompt.txt").write_text(PROMPT)
    text = greedy_text(tiny, PROMPT, 12)
    assert command(*HERE, "--prompt_file", tmp_path / "prompt.txt")[1] == text
    assert command(*HERE, "--prompt_file", "-", stdin=PROMPT)[1] == text


def test_text_piped_in_is_the_prompt_and_piped_output_is_plain(tiny):
    code, out, err = script(*HERE, "--mode=ntp", "--show", stdin=PROMPT + "\n")
    assert (code, out) == (0, greedy_text(tiny, PROMPT + "\n", 12)) and "\033" not in err


def test_bad_input_shows_no_traceback_in_a_process_of_its_own():
    code, out, err = script(*HERE, "--prompt=", "--gamma=0.1")
    assert (code, out) == (2, "") and is_one_line(err)


def test_control_characters_reach_a_pipe_raw_and_a_terminal_visible(command, monkeypatch, tmp_path):
    """A model that says id 0 for ever, and a tokenizer in which that is ESC."""
    model = Llama.from_pretrained(TINY, dtype=torch.float32)
    model.model.norm.weight.data.zero_()
    model.save_pretrained(tmp_path)
    tokenizer = json.loads((TINY / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, escape = next(token for token, id in vocab.items() if id == 0), chr(0x100 + 0x1b)
    vocab[first], vocab[escape] = vocab[escape], 0
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    argv = ["--init_from", tmp_path, "--prompt=a", "--mode=ntp", "--max_new_tokens=3"]
    assert command(*argv)[:2] == (0, "\033" * 3)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for more in [], ["--num_samples=2"]:
        code, out, err = command(*argv, *more)
        assert code == 0 and "\033" not in out and out.count("1B") == 3 * (1 + len(more))


# ------------------------------------------------------------------------------------------ stop texts

def first_stop(text, stops):
    """The text up to the stop that is complete first; at the same character, the longest."""
    ends = sorted((text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text)
    return text[:ends[0][0] + ends[0][1]] if ends else text


IDA = "Ida has 28 coins. Zoe has 4 more than Ida. How many coins do Ida and Zoe have together?\n"
VERIFIED = ["--init_from", ROOT / "checkpoints" / "tiny-verified", "--prompt", IDA, "--mode"]
IN_MODE = {"ntp": ["ntp"], "verified": ["verified", "--block_size=32"], "sbd": ["sbd", "--block_size=32"]}
STOPS = [["4 more coins t", "re"], ["re", "4 more coins t"], [" ha"], ["Zoe has 4", "4", "has 4"], ["\n"],
         ["more coins", "e coi", " coins"], ["no such text", "than Ida"]]


@pytest.mark.parametrize("stops", STOPS)
def test_a_stop_text_cuts_the_text_at_the_same_place_in_every_mode(command, stops):
    whole = command(*VERIFIED, "ntp")[1]
    assert "Zoe has 4 more coins than Ida" in whole
    for mode, argv in IN_MODE.items():
        code, out, err = command(*VERIFIED, *argv, *[word for stop in stops for word in ("--stop", stop)])
        assert code == 0 and out == first_stop(whole, stops), mode


def test_tokens_behind_a_stop_text_are_not_counted(command):
    """`Ida`, ` has`: of 32 tokens that a forward decided, two are the text's."""
    for mode, forwards, speedup in ("ntp", 2, "1.00"), ("verified", 2, "1.00"), ("sbd", 1, "2.00"):
        code, out, err = command(*VERIFIED, *IN_MODE[mode], "--stop", " ha")
        assert code == 0 and out == "Ida"
        assert err.startswith(f"\n{mode}: 2 tokens in {forwards} forwards, NFE speedup {speedup}, ")


def test_a_stop_text_ends_the_sample_and_is_not_printed(command, tiny):
    text = greedy_text(tiny, PROMPT, 40)
    stop = text[len(text) // 2:len(text) // 2 + 4]
    argv = ["--init_from", TINY, "--prompt", PROMPT, "--max_new_tokens", 40]
    for mode in ("ntp", "verified"):
        whole, cut = command(*argv, "--mode", mode), command(*argv, "--mode", mode, "--stop", stop)
        assert whole[1] == text and cut[1] == text[:text.find(stop)]
    assert command(*argv, "--mode=ntp", "--stop", "never there", "--stop", stop)[1] == text[:text.find(stop)]
    count = lambda err: int(err.split()[1])
    assert count(command(*argv, "--mode=ntp", "--stop", stop)[2]) < count(command(*argv, "--mode=ntp")[2])


# ------------------------------------------------------------------------------------------ samples and masks

@pytest.mark.parametrize("mode", MODES)
def test_sample_i_draws_with_seed_plus_i(command, mode):
    argv = [*HERE, "--prompt", PROMPT, "--mode", mode, "--temperature=2"]
    code, out, err = command(*argv, "--num_samples=2", "--seed=3")
    alone = [command(*argv, "--seed", seed)[1] for seed in (3, 4)]
    assert code == 0 and alone[0] != alone[1]
    assert out == f"\nsample 1\n{alone[0]}\n\nsample 2\n{alone[1]}\n"


def test_no_new_tokens_are_no_error(command):
    code, out, err = command(*HERE[:2], "--prompt", PROMPT, "--max_new_tokens=0")
    assert code == 0 and out.strip() == "" and "0 tokens in 0 forwards" in err


def test_mask_id_is_needed_where_the_folder_names_none(command, tmp_path, tiny):
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"mask_id": 511,', ""))
    assert "mask_id" not in (folder / "config.json").read_text()
    argv = ["--init_from", folder, "--prompt", PROMPT, "--max_new_tokens=12"]
    for mode in ("sbd", "verified"):
        code, out, err = command(*argv, "--mode", mode)
        assert code == 2 and "mask_id" in err and is_one_line(err)
    assert command(*argv, "--mode=ntp")[1] == greedy_text(tiny, PROMPT, 12)
    assert command(*argv, "--mode=verified", "--mask_id=511")[1] == greedy_text(tiny, PROMPT, 12)


def test_help_shows_every_option_with_its_default(command):
    code, out, err = command("--help")
    assert code == 0 and "(default: 16)" in out
    for name in (*BAD_NUMBERS, "mode", "sampler", "attention", "stop", "num_samples", "compile", "init_from"):
        assert f"--{name} " in out
