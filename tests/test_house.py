"""How the code is laid out: lengths, nesting, who imports whom, and names that nothing else has."""
import ast
import functools
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TRACKED = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True).stdout.split()
FILES = [name for name in TRACKED or map(str, (p.relative_to(ROOT) for p in ROOT.glob("[!.]*/**/*.py")))
         if (ROOT / name).exists()]
OURS = [name for name in FILES if not name.startswith("tests/")]
COMMANDS = {"train", "generate", "eval", "harness", "bench", "speculative", "acceptance",
            "kernels.check"}
CONCEPTS = {"model", "hf", "adapter", "sbd_loss", "eb_sampler", "kv_cache", "roofline", "tokenizer",
            "data.bin", "view"}
ALGORITHMS = ("Eq.", "Fig.", "Algorithm", "Method section", "Table")   # how the docstring of one begins


@functools.cache
def tree(name):
    return ast.parse((ROOT / name).read_text(encoding="utf-8"))


def functions(node):
    return [f for f in ast.walk(node) if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef))]


def length(function):
    return function.end_lineno - function.lineno + 1


def module(name):
    return name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


@functools.cache
def imports(name):
    """The project's own modules that a file imports, anywhere in it."""
    found, known = set(), {module(other) for other in FILES}
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found & known - {"kernels", "data"}                          # packages with nothing in them


def test_functions_are_short():
    long = [(name, f.name, length(f)) for name in OURS for f in functions(tree(name))
            if length(f) > (80 if name.startswith("kernels/") else 60)]
    assert not long


def test_algorithms_fit_forty_lines_and_say_what_they_implement():
    found = {(name, f.name): length(f) for name in OURS for f in functions(tree(name))
             if (ast.get_docstring(f) or "").startswith(ALGORITHMS)}
    assert not {where: n for where, n in found.items() if n > 40}
    for name, wanted in {"generate.py": {"decode", "sbd_step", "verified_step"}, "train.py": {"train"},
                         "sbd_loss.py": {"mask_tokens", "sbd_attention_mask", "sbd_loss", "adapter_loss"},
                         "eb_sampler.py": {"eb_select", "eb_confidence_select"},
                         "kv_cache.py": {"window_rule"}, "roofline.py": {"slowdown", "speedup"}}.items():
        assert wanted <= {f for file, f in found if file == name}, name


def test_no_function_holds_a_function_that_holds_a_function():
    deep = [(name, f.name) for name in OURS for f in functions(tree(name))
            for inner in functions(f)[1:] if len(functions(inner)) > 1]
    assert not deep


def test_imports_run_in_no_circle():
    state = {}

    def visit(name, path):
        assert state.get(name) != "open", " -> ".join([*path, name])
        if name not in state:
            state[name] = "open"
            file = next(f for f in FILES if module(f) == name)
            for other in sorted(imports(file)):
                visit(other, [*path, name])
            state[name] = "closed"

    for name in OURS:
        visit(module(name), [])


def test_imports_point_one_way():
    """Commands use concepts, concepts use kernels; the model knows its weights' format and products."""
    of = {module(name): imports(name) for name in OURS}
    assert of["model"] <= {"hf", "adapter", "kernels.packed_linear"}
    assert "model" not in of.get("adapter", ())
    assert not of["hf"]
    for name in CONCEPTS:
        assert not of[name] & COMMANDS, name
    for name in of:
        if name.startswith("kernels.") and name not in COMMANDS:
            assert all(other.startswith("kernels.") for other in of[name]), name


def test_no_name_is_that_of_a_module_of_python_or_of_a_dependency():
    ours = {Path(name).parts[0].removesuffix(".py") for name in OURS}
    theirs = set(sys.stdlib_module_names)
    for line in (ROOT / "requirements-dev.txt").read_text().splitlines() + \
            (ROOT / "requirements.txt").read_text().splitlines():
        if match := re.match(r"[\w-]+", line):
            try:
                files = importlib.metadata.files(match[0]) or ()
            except importlib.metadata.PackageNotFoundError:
                continue
            tops = {Path(f).parts[0] for f in files if Path(f).suffix in (".py", ".so", ".pyi")}
            theirs |= {top.split(".")[0] for top in tops}
    assert {"torch", "pytest", "numpy"} <= theirs
    assert not ours & theirs


def test_there_is_one_helper_of_each_kind():
    """One refusal, one exit-code tail, one device check, one "names no mask token"."""
    defined = [(name, f.name) for name in OURS for f in functions(tree(name))]
    home = {"need": "hf.py", "run": "cli.py", "open_device": "cli.py", "need_mask": "cli.py"}
    for helper in home:
        assert {name for name, f in defined if f == helper and name in home.values()} == {home[helper]}
    text = {name: (ROOT / name).read_text(encoding="utf-8") for name in OURS}
    assert [name for name in OURS if "names no mask token" in text[name]] == ["cli.py"]
    assert [name for name in OURS if "is not there: try --device=cpu" in text[name]] == ["cli.py"]
    for name in OURS:
        assert "sys.exit(2)" not in text[name] or name == "cli.py", name
        assert "ArgumentParser(" not in text[name] or name == "cli.py", name


@pytest.mark.parametrize("name", [name for name in OURS if 'if __name__ == "__main__":' in
                                  (ROOT / name).read_text(encoding="utf-8") and name != "chat_template.py"])
def test_every_command_goes_through_the_door(name):
    """Its first import is cli's, which makes Ctrl-C quiet while torch loads; it ends in run(main)."""
    body = (ROOT / name).read_text(encoding="utf-8")
    assert re.search(r'if __name__ == "__main__":\n    run\(main(, note=".*")?\)\s*\Z', body)
    found = [node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
             for node in tree(name).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert [name for name in found if name not in ("sys", "pathlib")][0] == "cli"
