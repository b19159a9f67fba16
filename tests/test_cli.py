"""The door of the commands: refusals in one line, devices, prompts, Ctrl-C and closed pipes."""
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest
import torch

import cli

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = ["generate.py", "train.py", "eval.py", "harness.py", "bench.py", "speculative.py", "roofline.py",
            "kernels/check.py", *(f"data/{name}/prepare.py" for name in ("jsonl", "stdlib", "word_problems"))]


@pytest.mark.parametrize("error, line", [
    (ValueError("two\nlines"), "two lines"),
    (ValueError("a \x1b[31mred\x00 word"), r"a \x1b[31mred\x00 word"),
    (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
    (ValueError(), "ValueError"), (ValueError("\u202ebidi\u2066"), r"\u202ebidi\u2066")])
def test_an_error_is_one_line_and_exit_code_2(error, line, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["here/generate.py"])

    def main():
        raise error

    with pytest.raises(SystemExit) as end:
        cli.run(main)
    assert end.value.code == 2 and capsys.readouterr() == ("", f"generate.py: {line}\n")


def test_ctrl_c_is_exit_code_130_without_a_word(monkeypatch, capsys):
    def main():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as end:
        cli.run(main)
    assert end.value.code == 130 and capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["hpu", "xla", "gpu", "meta", "", "cuda:99", "cpu:x", "x" * 300, "mps:7",
                                  "\n",
                                  "privateuseone"])
def test_a_device_that_is_not_there_is_named(name):
    with pytest.raises(ValueError, match="is not there: try --device=cpu"):
        cli.open_device(name)


def test_a_prompt_comes_from_a_regular_file_only(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/full"), Path("/dev/zero"), tmp_path / "none"):
        with pytest.raises(ValueError, match="prompt_file"):
            cli.read_prompt(Namespace(prompt=None, prompt_file=path))


def test_bounds_are_those_of_every_command_and_the_library():
    from generate import Options
    for bad in (dict(block_size=1025), dict(hedges=65), dict(gamma=10**400),
                dict(max_new_tokens=10**12), dict(top_k=2.5),
                dict(top_k=True), dict(seed=1.5), dict(gamma="1"), dict(mode=None), dict(attention="flex"),
                dict(temperature=float("inf"))):
        with pytest.raises(ValueError, match=next(iter(bad))):
            Options(**bad)


def test_names_no_mask_token():
    with pytest.raises(ValueError, match="names no mask token: give --mask_id"):
        cli.need_mask(Namespace(mask_id=None), "this")
    cli.need_mask(Namespace(mask_id=0), "this")


@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_while_the_imports_run_shows_no_traceback(command):
    """Interrupted at several moments before and in main."""
    for seconds in (0.25, 0.8):
        run = subprocess.Popen([sys.executable, ROOT / command, "--help"], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
        time.sleep(seconds)
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=60)
        assert run.returncode in (0, 130, -signal.SIGINT), (command, seconds, err)   # at exit
        assert "Traceback" not in err, (command, seconds, err)


@pytest.mark.parametrize("command", ["roofline.py", "generate.py --help", "train.py --help",
                                     "bench.py --help",
                                     "eval.py --help"])
def test_a_closed_pipe_ends_a_command_quietly(command):
    piped = f"{sys.executable} {ROOT}/{command} | head -c 5"
    done = subprocess.run(piped, shell=True, capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_help_of_every_option_names_its_default():
    help = [sys.executable, ROOT / "generate.py", "--help"]
    out = subprocess.run(help, capture_output=True, text=True).stdout
    from dataclasses import fields

    from generate import Options
    assert all(f"--{f.name}" in out for f in fields(Options) if f.metadata)
