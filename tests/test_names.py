"""Names: other packages called `data`, `kernels`, `eval` or `model` change nothing for the commands."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = ["generate.py", "train.py", "eval.py", "harness.py", "bench.py", "speculative.py", "acceptance.py",
            "roofline.py", "kernels/check.py", "data/answers/prompts.py",
            *(f"data/{name}/prepare.py" for name in ("answers", "jsonl", "stdlib", "word_problems"))]


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """A folder of packages and modules with our names, which raise when they are imported."""
    folder = tmp_path_factory.mktemp("foreign")
    for name in ("data", "kernels", "data/word_problems", "kernels/block_decode"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"raise ImportError('a foreign {name}')\n")
    for name in ("model", "eval", "view", "hf", "cli", "tokenizer", "generate", "kv_cache"):
        (folder / f"{name}.py").write_text(f"raise ImportError('a foreign {name}')\n")
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_a_foreign_package_of_our_names_is_never_imported(command, foreign, tmp_path):
    """Before ours on the path or behind it, from another working directory that has such folders too."""
    (tmp_path / "data").mkdir()
    for path in (f"{foreign}", f"{ROOT}:{foreign}"):
        done = subprocess.run([sys.executable, ROOT / command, "--help"], cwd=foreign if path else tmp_path,
                              env=os.environ | dict(PYTHONPATH=path), capture_output=True, text=True)
        assert done.returncode == 0 and "usage" in done.stdout and not done.stderr, done.stderr


def test_the_commands_still_work_beside_them(foreign, tmp_path):
    done = subprocess.run([sys.executable, ROOT / "generate.py", "--prompt=Mia has 3", "--max_new_tokens=4"],
                          cwd=tmp_path, env=os.environ | dict(PYTHONPATH=str(foreign)), capture_output=True,
                          text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0 and done.stdout, done.stderr
    done = subprocess.run([sys.executable, ROOT / "data/word_problems/prepare.py", "--num_train=3",
                           "--num_val=2", f"--out_dir={tmp_path / 'set'}"],
                          env=os.environ | dict(PYTHONPATH=str(foreign)),
                          capture_output=True, text=True)
    assert done.returncode == 0 and (tmp_path / "set/meta.json").exists(), done.stderr
