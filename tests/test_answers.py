"""data/answers: a model's own answers as a training set; acceptance.py: decoding replayed from one text."""
import gzip
import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import acceptance
import data.answers.prepare as answers
import data.answers.prompts as prompts
from data.bin import Dataset
from generate import decode, generate
from model import Llama
from tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
BASE = ROOT / "checkpoints/tiny-ntp"


@pytest.fixture
def asked(tmp_path):
    rng = random.Random(0)
    text = "Eva has {} pens. She buys {} more. How many?\n"
    lines = [dict(prompt=text.format(rng.randint(2, 99), rng.randint(2, 99))) for _ in range(23)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def options(asked, out, **more):
    more = dict(init_from=BASE, prompts=asked, out_dir=out, batch_size=5, max_new_tokens=40) | more
    return [f"--{name}={value}" for name, value in more.items()]


@pytest.mark.parametrize("temperature", (0.0, 0.8))
def test_the_set_holds_each_answer_as_generate_gives_it_alone(asked, tmp_path, temperature):
    answers.main(options(asked, tmp_path / "out", temperature=temperature, seed=7, val_fraction=0.2))
    model, tokenizer = Llama.from_pretrained(BASE, dtype=torch.float32), Tokenizer.from_pretrained(BASE)
    want, targets = [], 0
    for i, line in enumerate(asked.read_text().splitlines()):
        prompt = answers.prompt_ids(json.loads(line), tokenizer, False)
        [row] = generate(model, [prompt], mode="ntp", max_new_tokens=40, temperature=temperature, seed=7 + i)
        want.append(prompt + row.tokens)
        targets += len(row.tokens)
    found, marked = [], 0
    for split in ("train", "val"):
        data = Dataset(tmp_path / "out", split)
        found += [data.tokens[a:a + n].tolist() for a, n in zip(data.starts, data.lengths)]
        marked += int(data.mask.sum())
        assert [int(data.tokens[a + n - 1]) == 510 for a, n in zip(data.starts, data.lengths)] \
            == data.stops.astype(bool).tolist()
    assert sorted(found) == sorted(want) and marked == targets


def test_a_killed_run_goes_on_without_repeating(asked, tmp_path):
    """Killed behind the second batch, the third line torn: the same set as a run that nothing stopped."""
    answers.main(options(asked, tmp_path / "whole"))
    code = f"""
import os, signal, data.answers.prepare as answers
original, calls = answers.generate, []
def counted(model, prompts, **more):
    calls.append(prompts)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(model, prompts, **more)
answers.generate = counted
answers.main({options(asked, tmp_path / "out")!r})"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    path = tmp_path / "out/answers.jsonl"
    assert len(path.read_text().splitlines()) == 11 and not (tmp_path / "out/meta.json").exists()
    path.write_bytes(path.read_bytes()[:-20])   # torn
    seen = []
    original = answers.generate
    try:
        answers.generate = lambda model, batch, **kw: seen.append(len(batch)) or original(model, batch, **kw)
        answers.main(options(asked, tmp_path / "out"))
    finally:
        answers.generate = original
    assert sum(seen) == 23 - 9
    for name in ("train.bin", "train.mask.bin", "train.docs.bin", "val.bin", "meta.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize("change, words", [
    (dict(temperature=0.5), "another model, prompts or options"), (dict(batch_size=0), "batch_size"),
    (dict(max_new_tokens=0), "max_new_tokens"), (dict(val_fraction=1.1), "val_fraction"),
    (dict(prompts="nowhere.jsonl"), "nowhere.jsonl"), (dict(temperature=-1), "temperature")])
def test_what_is_refused(asked, tmp_path, change, words):
    answers.main(options(asked, tmp_path / "out"))
    before = (tmp_path / "out/answers.jsonl").read_bytes()
    with pytest.raises(ValueError, match=words) as error:
        answers.main(options(asked, tmp_path / "out", **change))
    assert "\n" not in str(error.value) and (tmp_path / "out/answers.jsonl").read_bytes() == before


@pytest.mark.parametrize("line", ('{"prompt": ""}', '{"prompt": 3}', "[1]", "{", '{"messages": []}', "{}",
                                  '{"messages": [{"role": "assistant", "content": "a"}]}',
                                  '{"prompt": "\\ud800"}', '{"messages": [{"role": "user"}]}'))
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{line}\n')
    with pytest.raises(ValueError, match="bad.jsonl:2"):
        answers.main(options(path, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_prompts_are_many_different_ones_and_the_same_again(tmp_path):
    for name, num in (("a", 300), ("b", 300), ("c", 200)):
        prompts.main(["--out", str(tmp_path / f"{name}.jsonl"), f"--num={num}"])
    a, b, c = ((tmp_path / f"{name}.jsonl").read_text().splitlines() for name in "abc")
    assert a == b and a[:len(c)] == c and len(set(a)) == len(a) > 250
    for line in a:
        answers.check(json.loads(line))


@pytest.mark.parametrize("k", (2, 5, 12))
def test_one_recorded_text_tells_what_decoding_does(k):
    """The accepted drafts and the forwards of real verified decoding, for every number of hedges."""
    model = Llama.from_pretrained(ROOT / "checkpoints/tiny-sbd", dtype=torch.float64)
    tokenizer = Tokenizer.from_pretrained(ROOT / "checkpoints/tiny-sbd")
    rng = random.Random(k)
    for text in ("Eva has 54 pens. She sells 8 and buys 13 more. How many pens does she have?\n", "Ben has"):
        ids = tokenizer.encode(text)
        for limit in (1, 2, rng.randint(3, 30), 60):
            [ntp] = generate(model, [ids], mode="ntp", max_new_tokens=limit)
            laid = acceptance.drafts(model, ids, ntp.tokens, k)
            for h in (1, 2, 4):
                accepted, _ = acceptance.forwards(ntp.tokens, *laid, h)
                steps = decode(model, [ids], mode="verified", block_size=k, hedges=h, max_new_tokens=limit)
                steps = [step for [step] in steps]
                assert [step.accepted for step in steps] == accepted
                assert steps[-1].row.tokens == ntp.tokens and steps[-1].row.nfe == len(accepted)


def test_rows_that_would_all_be_held_out_are_refused_before_they_are_answered(asked, tmp_path):
    with pytest.raises(ValueError, match="holds out 23"):
        answers.main(options(asked, tmp_path / "out", val_fraction=0.99))
    assert not (tmp_path / "out").exists()


def test_acceptance_command(asked, tmp_path, capsys):
    path = tmp_path / "prompts.jsonl.gz"
    path.write_bytes(gzip.compress(asked.read_bytes()))
    acceptance.main([f"--init_from={ROOT}/checkpoints/tiny-verified", f"--prompts={path}", "--num=3",
                     "--decode", "--block_sizes=4,8", "--hedges=1,2", "--max_new_tokens=30"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("3 texts") and len(lines) == 3 + 4 + 1
    assert lines[-1].startswith("decoded, k=8 h=2, 3 texts") and "3 texts are NTP's" in lines[-1]
    for bad in ("--block_sizes=1", "--block_sizes=4,4,4,2000", "--hedges=0",
                "--hedges=x", "--num=0", "--max_new_tokens=1"):
        with pytest.raises(ValueError):
            acceptance.main([f"--init_from={BASE}", f"--prompts={path}", bad])
