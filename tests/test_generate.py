"""generate.py against decoding without a cache (brute_force.py), in every mode; and its command line."""
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

from brute_force import chi_squared, choose, exact_distribution, full_logits, greedy, probabilities, sbd, tiny_model
from generate import decode, generate
from model import Llama
from tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "checkpoints" / "tiny-ntp"
V, MASK = 13, 5
BOUNDS = {"eb": (0.0, 0.1, 1.0, 5.0, 1e9), "eb-confidence": (0.0, 0.1, 1.0, 5.0, 1e9), "factor": (0.0, 0.3, 1.0, 3.0),
          "threshold": (0.0, 0.3, 0.6, 1.0)}
MODES = {"sbd": dict(mode="sbd", gamma=1.0), "ntp": dict(mode="ntp"), "verified": dict(mode="verified", hedges=3)}


def bound_as_option(sampler, bound):
    return {"gamma" if sampler.startswith("eb") else sampler: bound}


def some_prompts(rng, count):
    """Without the mask id: after a text of masks only, the predictions of all masks tie, and rounding decides."""
    return [[rng.choice([i for i in range(V) if i != MASK]) for _ in range(rng.choice((1, 1, 2, 5, 9)))] for _ in range(count)]


# ------------------------------------------------------------------------------------------ sbd

@pytest.mark.parametrize("sampler", BOUNDS)
def test_sbd_with_a_cache_is_sbd_without_one(sampler):
    """Tokens, NFE, the end, and every block after every forward: 40 random requests of 1 to 3 rows for each sampler."""
    rng, happened, texts = random.Random(sampler), Counter(), set()
    for case in range(40):
        model = tiny_model(rng.choice(("llama", "qwen3")), V, MASK, seed=case, head=rng.choice((0.15, 0.3, 0.6)), body=rng.choice((0.2, 0.5)))
        k, bound, limit = rng.randint(1, 17), rng.choice(BOUNDS[sampler]), rng.randint(1, 24)
        stop_ids = set(rng.sample([i for i in range(V) if i != MASK], rng.choice((0, 1, 2))))
        prompts = some_prompts(rng, rng.randint(1, 3))
        blocks = [[] for _ in prompts]
        rows = {}
        for steps in decode(model, prompts, k, max_new_tokens=limit, stop_ids=stop_ids, mode="sbd", sampler=sampler,
                            **bound_as_option(sampler, bound)):
            for step in steps:
                rows[step.row.index] = step.row
                blocks[step.row.index].append(step.block)
        for i, prompt in enumerate(prompts):
            tokens, nfe, stopped, trail = sbd(model, prompt, k, limit, stop_ids, sampler, bound)
            assert (rows[i].tokens, rows[i].nfe, rows[i].stopped) == (tokens, nfe, stopped), (case, i)
            assert blocks[i] == trail, (case, i)
            texts.add(tuple(tokens))
            start = 0                                                    # of the block, in the text
            for before, after in zip([[None] * k] + trail, trail):
                before = before if None in before else [None] * k
                new = [j for j in range(k) if before[j] is None and after[j] is not None]
                happened["several at once"] += len(new) > 1
                happened["out of order"] += any(None in after[:j] for j in new)
                happened["behind the limit"] += any(start + j >= limit for j in new)
                happened["a stop id whose predecessors are masked"] += any(after[j] in stop_ids and None in after[:j] for j in new)
                happened["behind a revealed stop id"] += any(before[i] in stop_ids for j in new for i in range(j))
                happened["a stop id behind the limit"] += any(after[j] in stop_ids and start + j >= limit for j in new)
                start += k if None not in after else 0
            happened["ended by a stop id"] += stopped
            happened["ended by the limit inside a block"] += not stopped and limit % k > 0
            happened["one token of prompt"] += len(prompt) == 1
    assert len(texts) > 40
    rare = [what for what in ("several at once", "out of order", "behind the limit", "a stop id whose predecessors are masked",
                              "behind a revealed stop id", "a stop id behind the limit", "ended by a stop id",
                              "ended by the limit inside a block", "one token of prompt") if happened[what] < 3]
    assert not rare, happened                                            # else the requests were too tame


def test_blocks_are_always_k_masks_long():
    model = tiny_model(vocab_size=V, mask_id=MASK)
    for limit in (1, 3, 7, 8, 9):
        steps = [step for [step] in decode(model, [[1, 2, 3]], block_size=7, gamma=0.1, max_new_tokens=limit, mode="sbd")]
        assert all(len(step.block) == 7 for step in steps)
        assert [step.start % 7 for step in steps] == [0] * len(steps)


def test_sbd_runs_no_forward_once_the_row_has_ended():
    """One prefill and nfe forwards, whatever ends the row."""
    for seed in range(6):
        model = tiny_model(vocab_size=V, mask_id=MASK, seed=seed)
        for stop_ids in ((), (0, 1, 2)):
            calls = count_forwards(model)
            [row] = generate(model, [[3, 1]], block_size=5, gamma=0.5, max_new_tokens=13, stop_ids=stop_ids, mode="sbd")
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

@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_ntp_is_greedy_decoding_with_one_forward_a_token(kind):
    rng, ends = random.Random(kind), Counter()
    for case in range(25):
        model = tiny_model(kind, V, MASK, seed=case)
        prompts, limit = some_prompts(rng, rng.randint(1, 4)), rng.randint(1, 24)
        stop_ids = rng.sample(range(V), rng.choice((0, 1, 2)))
        for prompt, row in zip(prompts, generate(model, prompts, max_new_tokens=limit, stop_ids=stop_ids, mode="ntp")):
            assert (row.tokens, row.stopped) == greedy(model, prompt, limit, stop_ids)
            assert row.nfe == len(row.tokens)
            ends[row.stopped] += 1
    assert min(ends[True], ends[False]) > 5


# ------------------------------------------------------------------------------------------ all modes

@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_alone_and_in_a_batch_is_the_same(mode, temperature):
    rng = random.Random(1)
    for case in range(8):
        model = tiny_model(("llama", "qwen3")[case % 2], V, MASK, seed=case, head=0.3)
        prompts = some_prompts(rng, 5)
        options = dict(MODES[mode], block_size=rng.choice((2, 5, 8)), max_new_tokens=17, stop_ids=[case % 5], temperature=temperature)
        if temperature:
            options |= dict(top_k=rng.choice((None, 8)), top_p=rng.choice((None, 0.9)))
        if mode == "sbd":
            options |= dict(sampler=list(BOUNDS)[case % 4])
        together = generate(model, prompts, seed=100, **options)
        for i, prompt in enumerate(prompts):
            [alone] = generate(model, [prompt], seed=100 + i, **options)
            assert (alone.tokens, alone.nfe, alone.stopped) == (together[i].tokens, together[i].nfe, together[i].stopped)


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
        assert row.tokens == (sbd(model, prompt, 6, room, bound=1.0) if mode == "sbd" else greedy(model, prompt, room))[0]


@pytest.mark.parametrize("mode", MODES)
def test_final_tokens_of_the_steps_are_the_text_in_order(mode):
    """What streaming prints; and each position is revealed exactly once."""
    model = tiny_model(vocab_size=V, mask_id=MASK, seed=4, head=0.3)
    final, revealed, rows = [[], []], [{}, {}], {}
    for steps in decode(model, [[1, 2], [6]], block_size=5, max_new_tokens=23, stop_ids=[9], **MODES[mode]):
        for step in steps:
            i = step.row.index
            final[i] += step.final
            assert final[i] == step.row.tokens
            assert not revealed[i].keys() & dict(step.revealed).keys()
            revealed[i] |= dict(step.revealed)
            rows[i] = step.row
    for i in (0, 1):
        assert [revealed[i][n] for n in range(len(final[i]))] == final[i]
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


BAD_REQUESTS = {
    "no prompts": (dict(prompts=[]), "empty prompt"), "empty prompt": (dict(prompts=[[1], []]), "empty prompt"),
    "prompt as long as the context": (dict(prompts=[[1] * 20]), "context of 20"), "id too large": (dict(prompts=[[V]]), "outside the vocabulary"),
    "id below 0": (dict(prompts=[[-1]]), "outside the vocabulary"), "block_size": (dict(block_size=0), "block_size 0"),
    "gamma": (dict(gamma=-0.1), "gamma -0.1"), "gamma nan": (dict(gamma=math.nan), "gamma nan"), "mode": (dict(mode="fast"), "mode 'fast'"),
    "hedges": (dict(mode="verified", hedges=0), "hedges 0"), "temperature": (dict(temperature=-1.0), "temperature -1"),
    "temperature nan": (dict(temperature=math.nan), "temperature nan"), "top_k": (dict(top_k=0), "top_k 0"), "top_p 0": (dict(top_p=0.0), "top_p 0"),
    "top_p 1.5": (dict(top_p=1.5), "top_p 1.5"), "sampler": (dict(sampler="best"), "sampler 'best'"), "max_new_tokens": (dict(max_new_tokens=-1), "max_new_tokens -1"),
    "factor": (dict(sampler="factor", factor=math.nan), "factor nan"), "threshold": (dict(sampler="threshold", threshold=2.0), "threshold 2"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_bad_request_is_named_in_one_line(name):
    change, words = BAD_REQUESTS[name]
    model = tiny_model(vocab_size=V, mask_id=MASK, context=20)
    with pytest.raises(ValueError) as error:
        generate(model, **dict(prompts=[[1, 2]]) | change)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_model_without_mask_id_decodes_ntp_only():
    model = tiny_model(vocab_size=V, mask_id=None)
    assert generate(model, [[1, 2]], mode="ntp", max_new_tokens=9)[0].tokens == greedy(model, [1, 2], 9)[0]
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

SAMPLINGS = {"temperature 1": dict(temperature=1.0), "temperature 0.7, top_p 0.9": dict(temperature=0.7, top_p=0.9),
             "temperature 1.3, top_k 3": dict(temperature=1.3, top_k=3), "top_k 5, top_p 0.7": dict(temperature=1.0, top_k=5, top_p=0.7)}


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("mode", ["ntp", "sbd"])
def test_drawn_continuations_have_the_models_exact_distribution(mode, name):
    """Three tokens, a vocabulary of 8 and the mask id. sbd with k = 1 predicts each at one mask behind the text."""
    model = tiny_model(vocab_size=9, mask_id=4, seed=3, head=0.25, num_hidden_layers=1, hidden_size=8, head_dim=4,
                       num_attention_heads=2, num_key_value_heads=1)
    p = exact_distribution(model, [1, 7], 3, block=int(mode == "sbd"), **SAMPLINGS[name])
    assert abs(p.sum() - 1) < 1e-12 and p.max() < 0.5
    rows = [row for chunk in range(4) for row in
            generate(model, [[1, 7]] * 2000, block_size=1, mode=mode, max_new_tokens=3, seed=2000 * chunk, **SAMPLINGS[name])]
    counts = np.zeros(p.shape)
    np.add.at(counts, tuple(np.array([row.tokens for row in rows]).T), 1)
    assert chi_squared(counts, p) > 0.001


@pytest.mark.parametrize("sampler", BOUNDS)
def test_at_a_temperature_the_sampler_ranks_the_distributions_that_are_drawn_from(sampler):
    """The first forward of a block of 8, against a search over all s; draws stay within top-k and top-p."""
    rng, sizes = random.Random(sampler), Counter()
    for case in range(20):
        model = tiny_model(("llama", "qwen3")[case % 2], V, MASK, seed=case, head=0.6)
        sampling = dict(temperature=rng.choice((0.5, 1.0, 1.7)), top_k=rng.choice((None, 3)), top_p=rng.choice((None, 0.8)))
        prompt, bound = some_prompts(rng, 1)[0], rng.choice(BOUNDS[sampler])
        [step] = next(decode(model, [prompt], 8, mode="sbd", sampler=sampler, seed=case, **sampling, **bound_as_option(sampler, bound)))
        logits = full_logits(model, prompt + [MASK] * 8, block=8)[-8:].numpy()
        p = {i: probabilities(logits[i], **sampling) for i in range(8)}
        assert {i for i, t in enumerate(step.block) if t is not None} == choose(sampler, p, range(8), bound)
        assert all(p[i][t] > 0 for i, t in enumerate(step.block) if t is not None)
        sizes[len(step.revealed)] += 1
    assert len(sizes) > 2


def test_chi_squared_merges_small_cells_and_tells_a_loaded_die():
    """p-values from tables: 1 degree of freedom, 3.841 and 6.635."""
    n = 10000
    for statistic, p_value in ((3.841, 0.05), (6.635, 0.01)):
        shift = math.sqrt(statistic * n / 4)                             # counts n/2 +- shift have this statistic
        assert abs(chi_squared([n / 2 + shift, n / 2 - shift], [0.5, 0.5]) - p_value) < 1e-4
        small = np.full(10, 0.5 / n)                                     # ten cells of expectation 0.5 become one of 5
        assert chi_squared(np.concatenate(([n - 5], np.eye(10)[0] * 5)), np.concatenate(([1 - 5 / n], small))) > 0.99
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
    done = subprocess.run([sys.executable, str(ROOT / "generate.py"), *map(str, argv)], input=stdin, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def tiny():
    model = Llama.from_pretrained(TINY, dtype=torch.float32)
    return model, Tokenizer.from_pretrained(TINY)


def greedy_text(tiny, prompt, limit):
    model, tokenizer = tiny
    tokens, stopped = greedy(model, tokenizer.encode(prompt), limit, model.config.stop_ids)
    return tokenizer.decode(tokens[:-1] if stopped else tokens)


PROMPT = "Mia has 14 apples. "
HERE = ["--init_from", TINY, "--max_new_tokens", 12]
BAD_COMMANDS = {
    "empty prompt": (["--prompt", ""], "prompt is empty"), "long prompt": (["--prompt", "7" * 2048], "context of 2048"),
    "two prompts": (["--prompt", "a", "--prompt_file", "b"], "give one of them"), "missing file": (["--prompt_file", "no/such.txt"], "no/such.txt"),
    "no prompt": ([], "no prompt"), "gamma": (["--prompt", "a", "--gamma", "-0.1"], "gamma -0.1"), "gamma nan": (["--prompt", "a", "--gamma=nan"], "gamma nan"),
    "block_size": (["--prompt", "a", "--block_size", "0"], "block_size 0"), "top_p 0": (["--prompt", "a", "--top_p=0"], "top_p 0"),
    "top_p 1.5": (["--prompt", "a", "--top_p=1.5"], "top_p 1.5"), "mask_id": (["--prompt", "a", "--mask_id=512"], "outside the vocabulary"),
    "mask_id below 0": (["--prompt", "a", "--mask_id=-1"], "outside the vocabulary"), "hedges": (["--prompt", "a", "--hedges=0"], "hedges 0"),
    "num_samples": (["--prompt", "a", "--num_samples=0"], "num_samples 0"), "temperature": (["--prompt", "a", "--temperature=-1"], "temperature -1"),
    "preset": (["--prompt", "a", "--init_from=llama9-1b"], "llama9-1b"), "no weights": (["--prompt", "a", "--init_from=sbd-3b"], "no published weights"),
    "a trace of nothing": (["--prompt", "a", "--trace=out.html", "--max_new_tokens=0"], "--trace: --max_new_tokens=0"),
    "no model": (["--prompt", "a", "--init_from", ROOT / "data"], "no config.json"), "device name": (["--prompt", "a", "--device=gpu"], "--device gpu"),
}


@pytest.mark.parametrize("name", BAD_COMMANDS)
def test_bad_input_is_one_line_on_stderr_and_exit_code_2(command, name):
    argv, words = BAD_COMMANDS[name]
    code, out, err = command(*HERE, *argv)
    assert code == 2 and out == ""
    assert err.startswith("generate.py: ") and words in err and err.count("\n") == 1 and err.endswith("\n")


def test_an_empty_prompt_file_and_one_that_is_no_text_are_refused(command, tmp_path):
    path = tmp_path / "prompt"
    for content, words in ((b"", "prompt is empty"), (b"\xff\xfe\x00", "cannot be read")):
        path.write_bytes(content)
        code, out, err = command(*HERE, "--prompt_file", path)
        assert code == 2 and out == "" and words in err and err.count("\n") == 1
    code, out, err = command(*HERE, "--prompt_file", "-", stdin="")
    assert code == 2 and "prompt is empty" in err


@pytest.mark.parametrize("argv", [["--sampler=best"], ["--mode=fast"], ["--block_size=many"], ["--gama=1"]])
def test_unknown_choices_are_refused_with_what_there_is(command, argv):
    code, out, err = command(*HERE, "--prompt=a", *argv)
    assert code == 2 and out == "" and "usage:" in err and "Traceback" not in err
    assert argv[0] != "--sampler=best" or "eb-confidence" in err.splitlines()[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_a_device_that_is_not_there_is_refused(command):
    code, out, err = command(*HERE, "--prompt=a", "--device=cuda")
    assert code == 2 and out == "" and "--device cuda is not there" in err and err.count("\n") == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_checkpoint_with_nan_weights_is_named_with_a_dtype_hint(command, tmp_path, tiny, mode):
    broken = Llama.from_pretrained(TINY, dtype=torch.float32)
    with torch.no_grad():
        broken.model.layers[2].mlp.up_proj.weight[0, 0] = math.nan
    broken.save_pretrained(tmp_path)
    code, out, err = command("--init_from", tmp_path, "--prompt=a", "--mode", mode, "--dtype=bfloat16")
    assert code == 2 and out == ""
    assert err == "generate.py: the model's logits are not finite in torch.bfloat16: try --dtype=float32, or check the weights\n"


def test_ntp_text_on_stdout_is_the_models_greedy_text(command, tiny):
    code, out, err = command(*HERE, "--mode", "ntp", "--prompt", PROMPT)
    assert code == 0 and out == greedy_text(tiny, PROMPT, 12)
    assert err.startswith("\nntp: ") and err.count("\n") == 2


def test_verified_prints_the_same_text_and_is_the_default_without_gamma(command, tiny):
    for argv, mode in (([], "verified"), (["--gamma=0.1"], "sbd"), (["--mode=sbd"], "sbd")):
        code, out, err = command(*HERE, "--prompt", PROMPT, *argv)
        assert code == 0 and err.startswith(f"\n{mode}: ")
        assert mode == "sbd" or out == greedy_text(tiny, PROMPT, 12)


@pytest.mark.parametrize("argv", [["--mode=verified", "--gamma=0.1"], ["--sampler=factor"], ["--mode=ntp", "--hedges=3"], ["--mode=sbd", "--hedges=3"]])
def test_an_option_without_effect_in_the_mode_is_named(command, argv):
    code, out, err = command(*HERE, "--prompt", PROMPT, *argv)
    assert code == 0 and err.startswith(f"generate.py: {argv[-1].split('=')[0]} has no effect in --mode=")


def test_options_are_given_with_equals_sign_or_space(command):
    equals = command(f"--init_from={TINY}", f"--prompt={PROMPT}", "--max_new_tokens=12", "--mode=sbd", "--gamma=1e9", "--block_size=4")
    space = command("--init_from", TINY, "--prompt", PROMPT, "--max_new_tokens", "12", "--mode", "sbd", "--gamma", "1e9", "--block_size", "4")
    assert equals[:2] == space[:2] and "12 tokens in 3 forwards" in equals[2] and "12 tokens in 3 forwards" in space[2]


def test_prompt_from_a_file_and_from_standard_input(command, tmp_path, tiny):
    (tmp_path / "prompt.txt").write_text(PROMPT)
    assert command(*HERE, "--prompt_file", tmp_path / "prompt.txt")[1] == greedy_text(tiny, PROMPT, 12)
    assert command(*HERE, "--prompt_file", "-", stdin=PROMPT)[1] == greedy_text(tiny, PROMPT, 12)


def test_text_piped_in_is_the_prompt_and_piped_output_is_plain(tiny):
    code, out, err = script(*HERE, "--mode=ntp", "--show", stdin=PROMPT + "\n")
    assert (code, out) == (0, greedy_text(tiny, PROMPT + "\n", 12)) and "\033" not in err


def test_bad_input_shows_no_traceback_in_a_process_of_its_own():
    code, out, err = script(*HERE, "--prompt=", "--gamma=0.1")
    assert (code, out) == (2, "") and err.startswith("generate.py: ") and err.count("\n") == 1


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
        assert code == 2 and "mask_id" in err and err.count("\n") == 1
    assert command(*argv, "--mode=ntp")[1] == greedy_text(tiny, PROMPT, 12)
    assert command(*argv, "--mode=verified", "--mask_id=511")[1] == greedy_text(tiny, PROMPT, 12)


def test_help_shows_defaults(command):
    code, out, err = command("--help")
    assert code == 0 and "(default: 16)" in out and "--hedges" in out
