"""eval.py: its statistics against scipy, its sweep and its likelihoods against slow references."""
import contextlib
import csv
import functools
import importlib.util
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
    """A random model with the shipped tokenizer: its NTP and its masked-token predictions are equally
    untrained."""
    torch.manual_seed(seed)
    model = Llama(LlamaConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                              num_attention_heads=2, num_key_value_heads=1,
                              eos_token_id=510, mask_id=511)).double().eval()
    for weight in model.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight.data, std=0.3)
    return model, tiny()[1]


def result(right, outputs, nfes, cell=NTP, **other):
    tokens = sum(map(len, outputs))
    return dict(cell=cell, accuracy=sum(right) / len(right), tokens=tokens, nfe=sum(nfes),
                speedup=tokens / sum(nfes), window=None,
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
    theirs = reference((tokens, nfes), lambda a, b, axis=-1: a.sum(axis) / b.sum(axis), paired=True,
                       vectorized=True, n_resamples=2000,
                       method="percentile", rng=np.random.default_rng(2)).confidence_interval
    width = theirs.high - theirs.low
    assert ours == pytest.approx(tuple(theirs), abs=0.1 * width)  # two draws of 2000: ends vary by about 4%
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
    assert label(SBD) == "eb k=4 gamma=0.1"
    assert "| eb k=4 gamma=0.1 | 25.0 [4.6, 69.9] | 1.0 [1.0, 1.0] | 1.50 [" in text
    two = summary([ntp | dict(model="a"), other | dict(model="a"), other | dict(cell=NTP, model="b")])
    assert [row["p"] for row in two] == [1, 0.5, 1] and two[1]["decoding"] == "a: eb k=4 gamma=0.1"
    assert "as_ntp" not in summary([other])[0] and "| - | - | - |" in table([other])


# ------------------------------------------------------------------------------------------ the sweep

def test_sweep_counts_what_generate_gives():
    model, tokenizer = tiny()
    tasks = problems("val", 4)
    found = sweep(model, tokenizer, tasks, [NTP, SBD, VERIFIED], batch_size=3, max_new_tokens=70)
    for r in found:
        rows = [generate(model, [tokenizer.encode(p.prompt)], max_new_tokens=70,
                         stop_ids=model.config.stop_ids, **r["cell"])[0] for p in tasks]
        assert r["outputs"] == [row.tokens for row in rows] and r["nfes"] == [row.nfe for row in rows]
        assert r["right"] == [grade(p, tokenizer.decode(row.tokens)) for p, row in zip(tasks, rows)]
        assert r["speedup"] == sum(len(row.tokens) for row in rows) / sum(row.nfe for row in rows)
    assert found[0]["accuracy"] > 0 and found[0]["speedup"] == 1
    assert found[2]["outputs"] == found[0]["outputs"]
    assert found[0]["window"] is None and 1 + 4 <= found[2]["window"] <= 1 + 3 + 2 * 4


@pytest.mark.parametrize("cell", [NTP, SBD, VERIFIED, dict(SBD, sampler="factor", factor=1.0)], ids=label)
def test_batch_size_changes_nothing_in_float64(cell):
    model, tokenizer = random_model()
    alone, together = (sweep(model, tokenizer, problems("val", 8), [cell], batch_size=size,
                             max_new_tokens=24) for size in (1, 8))
    assert alone == together


# ------------------------------------------------------------------------------------------ the command

@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Run evaluate.py in this process on 6 problems, three cells and 40 tokens -> (its output, the cells it
    decoded)."""
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
            evaluate.main([f"--init_from={TINY}", "--device=cpu", "--limit=6", "--max_new_tokens=40",
                           "--timed=0", f"--out_dir={tmp_path}", *options])
        return capsys.readouterr().out, decoded

    return run


def test_interrupted_sweep_goes_on_to_the_same_table(command, tmp_path):
    _, first = command(stop_before=2)
    assert first == ["ntp", "verified k=4 h=2"]
    assert [r["cell"] for r in json.loads((tmp_path / "results.json").read_text())["results"]] == [NTP,
                                                                                                   VERIFIED]
    resumed, rest = command()
    assert rest == ["eb k=4 gamma=0.1"]
    again, nothing = command()
    assert nothing == [] and again == resumed
    anew, everything = command("--overwrite")
    assert len(everything) == 3 and anew == resumed
    rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert [row["decoding"] for row in rows] == everything and float(rows[1]["as_ntp"]) == 1
    stored = json.loads((tmp_path / "results.json").read_text())["summary"]
    assert float(rows[0]["accuracy_high"]) == stored[0]["accuracy_high"]


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
        patch.setattr(evaluate.hashlib, "sha256", lambda data=b"",
                      real=evaluate.hashlib.sha256: real(data + b" "))
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
    assert decoded == ["ntp"] and "has no mask token" in output


def test_the_shipped_sbd_model_is_no_stranger_to_masks():
    assert "UNTRAINED" not in note("tiny-sbd", *tiny("tiny-sbd", torch.float32), problems("val", 16), 0)


@pytest.mark.slow
def test_smollm2_as_published_is_evaluated_and_called_untrained(tmp_path, capsys):
    evaluate.main([f"--init_from={smollm2_or_skip()}", "--mask_id=4", "--gamma=0.1", "--limit=2",
                   "--max_new_tokens=8", "--timed=1",
                   "--device=cpu", f"--out_dir={tmp_path}"])
    output = capsys.readouterr().out
    assert "UNTRAINED" in output and "| eb k=16 gamma=0.1 |" in output


@pytest.mark.parametrize("options, words", [
    (["--limit=0"], "--limit 0"), (["--limit=2001"], "2001 held-out problems"), (["--batch_size=0"],
                                                                                 "--batch_size 0"),
    (["--dataset="], "--dataset is empty"), (["--dataset=nowhere"], "no data set in"), (["--gamma=-1"],
                                                                                        "gamma -1.0"),
    (["--init_from=nowhere"], "nowhere"), (["--device=quantum"], "quantum"), (["--dataset=y", "--plot"],
                                                                              "--plot"),
    (["--batch_size=1000000000000"], "--batch_size"), (["--limit=9223372036854775808"], "--limit"),
    (["--out_dir=/proc/none"], "cannot be written")])
def test_bad_input_is_one_line(options, words, tmp_path):
    with pytest.raises((ValueError, OSError)) as error:
        evaluate.main([f"--init_from={TINY}", f"--out_dir={tmp_path}", "--device=cpu", "--limit=3", *options])
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_missing_package_is_asked_for_by_name(monkeypatch, tmp_path):
    real = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "matplotlib" else real(name))
    with pytest.raises(ValueError, match="pip install matplotlib"):
        evaluate.main([f"--init_from={TINY}", f"--out_dir={tmp_path}", "--plot"])


def test_the_command_exits_with_2_and_no_traceback(tmp_path):
    run = subprocess.run([sys.executable, ROOT / "eval.py", "--limit=0"], capture_output=True, text=True,
                         cwd=tmp_path)
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr.startswith("eval.py: --limit 0: wanted 1 to") and run.stderr.count("\n") == 1


def damages(rng, content):
    """One spoilt value somewhere in the stored cells."""
    cell = rng.choice(content["results"])
    key = rng.choice([key for key in cell if key not in ("model", "cell")] + ["model", "cell"])
    bad = rng.choice([None, "x", True, -1, 7, 1e9, [], {}, [None], ["x"], [[]], [1] * 6, [True] * 5,
                      [[True]] * 6])
    if rng.random() < 0.3:
        del cell[key]
    else:
        cell[key] = bad
    return key, bad


def test_a_damaged_results_file_gives_one_line_or_the_same_table(tmp_path, monkeypatch, capsys):
    """Whatever is spoilt: refused, decoded again, or made good from the other values; never a wrong table."""
    import random
    monkeypatch.setattr(evaluate, "CELLS", [NTP, SBD])
    argv = [f"--init_from={TINY}", "--device=cpu", "--limit=6", "--max_new_tokens=40", "--timed=0",
            f"--out_dir={tmp_path}"]
    evaluate.main(argv)
    table, raw, refused = capsys.readouterr().out, (tmp_path / "results.json").read_text(), 0
    for seed in range(28):
        rng, content = random.Random(seed), json.loads(raw)
        what = damages(rng, content) if seed > 8 else None
        text = json.dumps(content) if what else raw[:seed * len(raw) // 9]
        (tmp_path / "results.json").write_text(text)
        try:
            evaluate.main(argv)
            assert capsys.readouterr().out == table, (seed, what)
        except ValueError as error:
            refused += 1
            assert "\n" not in str(error) and "results.json" in str(error), (seed, what)
            capsys.readouterr()
    assert refused > 10


def test_a_full_disk_is_one_line_and_leaves_earlier_results_as_they_were(command, tmp_path):
    pytest.importorskip("resource", reason="no limits on files here")
    command("--mode=ntp")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    code = ("import resource, cli, eval; resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024));"
            "cli.run(eval.main)")                                      # files end at 1024 bytes
    assert len(before["results.json"]) > 1024
    run = subprocess.run([sys.executable, "-c", code, f"--init_from={TINY}", "--device=cpu", "--limit=6",
                          "--max_new_tokens=40", "--timed=0", "--gamma=0.1", f"--out_dir={tmp_path}"],
                         capture_output=True, text=True, cwd=ROOT)
    last = run.stderr.splitlines()[-1]
    assert run.returncode == 2 and "Traceback" not in run.stderr and "File too large" in last
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


# ------------------------------------------------------------------------------------------ likelihoods

@pytest.fixture
def data(tmp_path):
    """12 short documents of word problems, the solutions their targets."""
    tokenizer = tiny()[1]
    texts = [(tokenizer.encode(p.prompt)[:9], tokenizer.encode(p.solution)[:n] + [tokenizer.eos_id]) for n,
             p in enumerate(problems("val", 12), 3)]
    documents = [(p + s, [False] * len(p) + [True] * len(s)) for p, s in texts]
    write_set(tmp_path / "set", {"val": documents}, [tokenizer.eos_id], tokenizer.vocab_size,
              tokenizer="here", tokenizer_hash=tokenizer.hash)
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
    assert found == pytest.approx([sum(terms) / len(terms)] * len(found),
                                  rel=1e-6)     # each batch's mean is rounded to float64 or 32


@pytest.mark.parametrize("k", [1, 2, 5])
@torch.no_grad()
def test_matp_loss_of_hidden_blocks_is_block_by_block_prediction(data, k):
    """All masked: each block in a forward of its own, behind the clean text before it and as long as the text
    goes on."""
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
            sdpa = torch.nn.functional.scaled_dot_product_attention
            attend = lambda layer, q, key, v: sdpa(q, key, v, attn_mask=may, enable_gqa=True)
            logp = model(tokens, attend=attend)[0].log_softmax(-1)
            terms += [-float(logp[i, ids[i]]) for i in range(start, min(start + k, len(ids))) if is_target[i]]
    assert losses(model, [batch(rows, range(len(rows)))], k, 1.0)[1] == pytest.approx(sum(terms) / len(terms),
                                                                                      rel=1e-6)


def test_likelihood_command_prints_and_writes_the_table(data, tmp_path, capsys):
    folder, _ = data
    options = [f"--init_from={TINY}", "--device=cpu", f"--dataset={folder}", "--seq_len=64",
               f"--out_dir={tmp_path / 'out'}", "--limit=2"]
    evaluate.main(options)
    output = capsys.readouterr().out
    assert "NTP loss" in output and "UNTRAINED" in output and output.count("\n| ") == 6
    rows = json.loads((tmp_path / "out/likelihood.json").read_text())["results"]
    assert len(rows) == 25 and all(row["ntp"] < row["matp"] for row in rows)
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | dict(tokenizer_hash="x")))
    with pytest.raises(ValueError, match="another vocabulary"):
        evaluate.main(options)
