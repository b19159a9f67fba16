"""Hostile input to every command: one line and exit code 2, or success; no traceback, no hang, no damage.

A case is a command with options and files that are mostly right, one or two of them spoilt. Each runs in this
process through the command's main(argv) and the door (cli.run), under an alarm; a few run on their own.
"""
import contextlib
import hashlib
import importlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import cli

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "checkpoints" / "tiny-ntp"
LIMIT = 20   # seconds a case may take
NUMBERS = ["-1", "0", "1", "2", "3", "-0.5", "0.5", "1e9", "nan", "inf", "-inf", "1e400", "10**3",
           str(10**12),
           str(2**63), str(-2**63 - 1), "0x10", "1_0", "٣", "", " ", "true", "None", "[1]", "1,2"]
WORDS = ["", ".", "..", "/", "/dev/null", "/dev/full", "/dev/zero", "no/such/thing", "no such\nthing",
         "\x1b[31mred", "a" * 5000, "x,y", "💥", "--help me", "-", "~", "hub/na/me", "none/such", "llama9-8b",
         "sbd-3b", "cpu", "hpu", "cuda:99", "mps", "meta", "xla", "cpu:7", "float8", "eb", "triton",
         "verified",
         "../" * 40, "FIFO", "FOLDER", "SELF"]
JSON = [None, True, False, -1, 0, 3, 0.5, 1e308, 10**12, 2**63, -2**63, "", "x", "llama", [], [None],
        [1, None],
        {}, {"a": 1}, [[[[]]]], "\x00", "\x1b[2J", float("nan"), float("inf")]


def base(home):
    """The commands with options of a short run that works: name -> argv."""
    short = ["--device=cpu", "--max_new_tokens=3"]
    return {
        "generate": [f"--init_from={home}/model", "--prompt=Mia has 3", *short],
        "eval": [f"--init_from={home}/model", f"--out_dir={home}/eval", "--limit=1", "--timed=0",
                 "--mode=ntp",
                 *short],
        "harness": [f"--init_from={home}/model", "--tasks=none", f"--out_dir={home}/tasks", *short],
        "bench": [f"--init_from={home}/model", "--mask_id=511", "--kv_lens=4", "--batches=1",
                  "--num_prompts=1",
                  "--repeats=1", "--batch_size=0", "--nfe_speedup=2", "--block_size=2", *short],
        "speculative": [f"--init_from={home}/model", "--num_prompts=1", "--repeats=1", "--max_new_tokens=2",
                        "--block_size=2"],
        "roofline": ["--model=tiny", "--new_tokens=4", "--prompt_len=4"],
        "train": [f"--init_from={home}/model", f"--dataset={home}/data", f"--out_dir={home}/run",
                  "--max_steps=1", "--seq_len=16", "--batch_size=1", "--eval_rows=1", "--sample_problems=0",
                  "--device=cpu"],
        "train --resume": ["--resume", f"--out_dir={home}/done", "--device=cpu"],
        "data.jsonl.prepare": [f"{home}/rows.jsonl", f"--tokenizer={home}/model", f"--out_dir={home}/mine"],
        "data.word_problems.prepare": ["--num_train=3", "--num_val=2", f"--out_dir={home}/words"],
    }


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """A folder with one of each thing that a command reads: model, data set, run to resume, rows, results."""
    home = tmp_path_factory.mktemp("fuzz") / "whole"
    home.mkdir()
    shutil.copytree(TINY, home / "model")
    lines = [dict(text="Mia has 3 nuts."), dict(prompt="Ben", completion=" has 4."), dict(text="Tom.")]
    (home / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, _, err = case("data.jsonl.prepare", [f"{home}/rows.jsonl", f"--tokenizer={home}/model",
                                               f"--out_dir={home}/data", "--val_fraction=0.4"])
    assert code == 0, err
    for name, out in (("train", "done"), ("eval", "eval")):
        code, _, err = case(name, [option.replace("/run", f"/{out}") for option in base(home)[name]])
        assert code == 0, err
    return home


class Hang(BaseException):
    pass


def case(name, argv):
    """Run a command in this process -> (exit code, stdout, stderr)."""
    name = name.split()[0]
    out, err, module = io.StringIO(), io.StringIO(), importlib.import_module(name)
    script = name.replace(".", "/") + ".py"

    def alarm(number, frame):
        raise Hang(f"more than {LIMIT} s: {name} {argv}")

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before, argv0, stdin = signal.signal(signal.SIGALRM, alarm), sys.argv, sys.stdin
    signal.alarm(LIMIT)
    try:
        sys.argv, sys.stdin = [script, *argv], io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.run(lambda: module.main(argv))
        code = 0
    except SystemExit as end:
        code = end.code
    finally:
        signal.alarm(0)
        sys.argv, sys.stdin = argv0, stdin
        signal.signal(signal.SIGALRM, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return code, out.getvalue(), err.getvalue()


# ------------------------------------------------------------------------------------------ spoiling

def spoil_option(rng, name, argv, home):
    """One option more, or one of those given another value; now and then two of them."""
    parser = importlib.import_module(name.split()[0])
    known = OPTIONS.setdefault(name.split()[0], options_of(parser))
    for _ in range(rng.choice((1, 1, 2))):
        option = rng.choice(known)
        word = rng.choice(rng.choice((NUMBERS, WORDS)))
        places = {"FIFO": f"{home}/fifo", "FOLDER": f"{home}/data", "SELF": f"{home}/model/config.json"}
        given = option if word == "--help me" else f"{option}={places.get(word, word)}"
        argv = [a for a in argv if not a.startswith(option + "=")] + [given]
    return argv


def options_of(module):
    """The options that a command's --help names."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        module.main(["--help"])
    found = {word.strip(",[]") for word in out.getvalue().split() if word.startswith(("--", "[--"))}
    skip = {"--help", "--compile", "--overwrite", "--train_tokenizer", "--kernels", "--against",
            "--random_weights"}
    return sorted(f for f in found if f[2:].isidentifier() and f not in skip)


OPTIONS = {}


def spoil_file(rng, path):
    """Truncate, overwrite, empty, replace by a folder or a pipe, or, of JSON, another value somewhere."""
    raw, how = path.read_bytes(), rng.randrange(8)
    if path.suffix in (".json", ".jsonl") and how < 5:
        try:
            content = json.loads(raw if path.suffix == ".json" else raw.splitlines()[0])
        except ValueError:
            content = {}
        spots = []

        def walk(node, depth=0):
            keys = list(node) if isinstance(node, dict) else range(3) if isinstance(node, list) else ()
            for key in keys if isinstance(node, dict) else keys[:len(node)] if keys else ():
                spots.append((node, key))
                if depth < 4:
                    walk(node[key], depth + 1)
        walk(content)
        if spots:
            node, key = rng.choice(sorted(spots, key=lambda s: len(str(s[0])))[:60])
            if rng.random() < 0.2:
                del node[key]
            else:
                node[key] = rng.choice(JSON)
        text = json.dumps(content)
        path.write_text(("[" * 100_000 if rng.random() < 0.03 else "") + text)
    elif how == 5:
        path.write_bytes(raw[:rng.randrange(len(raw) + 1)])
    elif how == 6:
        path.unlink()
        rng.choice((path.mkdir, lambda: os.mkfifo(path), lambda: path.symlink_to("/dev/zero"),
                    lambda: path.symlink_to(path.name), lambda: path.write_bytes(b"")))()
    else:
        data = bytearray(raw)
        for _ in range(rng.choice((1, 1, 8, 64))):
            if data:
                at = rng.randrange(min(len(data), rng.choice((64, 4096, 10**9))))
                data[at] = rng.randrange(256)
        path.write_bytes(data)


FILES = {"generate": "model", "eval": "model eval", "speculative": "model", "train": "model data",
         "bench": "model",
         "train --resume": "done", "data.jsonl.prepare": "model rows.jsonl"}


def digest(folder):
    """What may not change: the shipped checkpoints, and the sources."""
    h = hashlib.sha256()
    for path in sorted([*folder.glob("*.py"), *(folder / "checkpoints").rglob("*")]):
        h.update(path.read_bytes() if path.is_file() else b"")
    return h.hexdigest()


def spoilt(rng, whole, home):
    """-> a command and its argv; `home` is a fresh copy of `whole` in which a file may be spoilt."""
    name = rng.choice(list(base(home)))
    argv = base(home)[name]
    if name in FILES and rng.random() < 0.5:
        part = home / rng.choice(FILES[name].split())
        files = [part] if part.is_file() else sorted(p for p in part.rglob("*") if p.is_file())
        spoil_file(rng, rng.choice(files))
    else:
        argv = spoil_option(rng, name, argv, home)
    return name, argv


def run_cases(whole, tmp_path, seeds):
    """-> how many of each exit code; fails at the first that is neither refused in one line nor a success."""
    codes, before = Counter(), digest(ROOT)
    for seed in seeds:
        rng, home = random.Random(seed), tmp_path / "home"
        shutil.copytree(whole, home, symlinks=True)
        os.mkfifo(home / "fifo")
        name, argv = spoilt(rng, whole, home)
        os.chdir(home)
        code, out, err = case(name, argv)
        os.chdir(ROOT)
        told = (seed, name, argv, code, err[-2000:])
        if isinstance(code, str):   # a training whose loss is not finite: one line, exit code 1
            assert "is not finite" in code and "\n" not in code, told
            code = 1
        assert code in (0, 1, 2), told
        assert "Traceback" not in err, told
        if code == 2:
            lines = [line for line in err.splitlines() if "no effect" not in line]
            script = Path(name.split()[0].replace(".", "/") + ".py").name
            refusals = [line for line in lines if line.startswith(f"{script}: ")]
            assert len(refusals) == 1 and lines[-1] == refusals[0], told
            assert refusals[0].isprintable() and len(refusals[0]) < 7000, told
        assert (home / "done").exists() and list((home / "done").glob("*")), told
        codes[name.split()[0], code] += 1
        shutil.rmtree(home)
    assert digest(ROOT) == before
    return codes


@pytest.fixture(autouse=True)
def small(monkeypatch):
    import bench
    monkeypatch.setattr(bench, "bench", lambda args: {})   # minutes; its door is what is tried
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import huggingface_hub.constants
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def test_two_hundred_hostile_inputs(whole, tmp_path):
    codes = run_cases(whole, tmp_path, range(200))
    assert sum(n for (_, code), n in codes.items() if code == 2) > 100, codes
    assert len({name for name, _ in codes}) >= 9, codes


@pytest.mark.slow
def test_ten_thousand_hostile_inputs(whole, tmp_path):
    print(sorted(run_cases(whole, tmp_path, range(1000, 11000)).items()))


def test_twenty_hostile_inputs_to_real_commands(whole, tmp_path):
    for seed in range(20):
        rng, home = random.Random(f"real {seed}"), tmp_path / "home"
        shutil.copytree(whole, home, symlinks=True)
        os.mkfifo(home / "fifo")
        name, argv = spoilt(rng, whole, home)
        script = ROOT / (name.split()[0].replace(".", "/") + ".py")
        argv = [option for option in argv if name != "bench" or not option.startswith("--repeats")]
        argv += ["--repeats=0"] * (name == "bench")        # refused, in place of minutes
        done = subprocess.run([sys.executable, script, *argv], cwd=home, stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=3 * LIMIT,
                              env=os.environ | dict(HF_HUB_OFFLINE="1"))
        told = (seed, name, argv, done.returncode, done.stderr[-2000:])
        assert done.returncode in (0, 2) and "Traceback" not in done.stderr, told
        assert done.returncode == 0 or done.stderr.splitlines()[-1].startswith(f"{script.name}: "), told
        shutil.rmtree(home)
