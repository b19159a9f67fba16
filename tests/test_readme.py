"""README.md and docs/results.md say what is so: links, line numbers, commands, options and the example.

    python tests/test_readme.py      writes the lines of today's definitions into the links
"""
import ast
import functools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README, RESULTS = PAGES = ROOT / "README.md", ROOT / "docs/results.md"
LINK = re.compile(r"\[`(\w+)`\]\(([\w/.]+\.py)#L(\d+)\)")      # [`sbd_loss`](sbd_loss.py#L52)
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def read(page) -> str:
    return page.read_text(encoding="utf-8")


def line_of(name, file):
    """The line that defines that function or class, the outermost of several; None if there is none."""
    kinds = ast.FunctionDef, ast.ClassDef
    nodes = ast.walk(ast.parse(read(file))) if file.is_file() else ()      # breadth first
    return next((node.lineno for node in nodes if isinstance(node, kinds) and node.name == name), None)


def with_todays_lines(page) -> str:
    """The page's text, the line of every link brought up to date; a link to what is not there stays."""
    def link(m):
        return f"[`{m[1]}`]({m[2]}#L{line_of(m[1], page.parent / m[2]) or m[3]})"
    return LINK.sub(link, read(page))


def headings(page) -> set:
    """The anchors that GitHub makes of a page's headings."""
    return {re.sub(r"[^\w\- ]", "", line.lower()).strip().replace(" ", "-")
            for line in re.findall(r"^#+ (.*)$", read(page), re.M)}


def commands(page) -> list:
    """Every `python FILE.py ...` of a page, in a block or within a line, as lists of words."""
    text, found = re.sub(r"\\\n\s*", "", read(page)), []                   # lines that a backslash ends go on
    for code in re.findall(r"^    (.*\bpython .*)$", text, re.M) + re.findall(r"`(python [^`]*)`", text):
        words = shlex.shlex(code, posix=True, punctuation_chars=True)      # && ; | are words of their own
        words.whitespace_split = True
        command = []
        for word in [*words, ";"]:
            if not re.fullmatch("[;&|]+|do", word):
                command.append(word)
                continue
            if command[:1] == ["python"]:
                found.append(command)
            command = []
    return found


@functools.cache
def options_of(file) -> set:
    """The options that `python FILE.py --help` knows."""
    done = subprocess.run([sys.executable, file, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(re.findall(r"--\w+", done.stdout))


@each_page
def test_every_link_to_a_line_points_at_the_definition_that_it_names(page):
    gone = [m[0] for m in LINK.finditer(read(page)) if line_of(m[1], page.parent / m[2]) is None]
    assert not gone
    assert read(page) == with_todays_lines(page), "run python tests/test_readme.py"


def test_the_paper_is_mapped_to_the_code_before_the_published_errors():
    text = read(README)
    assert len(LINK.findall(text)) >= 20
    assert text.index("## The paper as code") < text.index("## Where the published material is wrong")


@each_page
def test_every_link_and_picture_is_there(page):
    for target in re.findall(r"\]\((?!http)([^)]+)\)", read(page)):
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        assert file.suffix != ".md" or not anchor or anchor in headings(file), target


@each_page
def test_every_command_is_there_and_knows_its_options(page):
    assert len(commands(page)) >= 8
    for _, file, *words in commands(page):
        assert (ROOT / file).is_file(), file
        given = {m[0] for m in (re.match(r"--\w+", word.strip("[]")) for word in words) if m}
        if given - {"--help"}:
            assert given <= options_of(file), f"python {file} {' '.join(words)}"


def test_readme_is_short_and_its_table_of_results_too():
    text = read(README)
    assert len(text.splitlines()) <= 220
    results = text.split("## What it reaches")[1].split("![")[0]
    assert 1 <= len(re.findall(r"^\| tiny-.*$", results, re.M)) <= 10


def test_the_results_in_readme_are_those_of_the_full_table():
    def rows(page):
        found = re.findall(r"^\| (tiny-.*) \|$", read(page), re.M)
        return [row.split(" | ") for row in found]
    full = {name: [accuracy, speedup, same, seconds]
            for name, accuracy, nfe, speedup, same, p, window, seconds in rows(RESULTS)}
    for name, *figures in rows(README):
        assert figures == full[name], name


def test_readme_installs_the_torch_that_is_required():
    required = re.search(r"^torch==[\d.]+$", read(ROOT / "requirements.txt"), re.M)[0]
    assert re.findall(r"torch==[\d.]+", read(README)) == [required]


def test_readme_lists_every_file_of_the_top_level():
    listed = re.findall(r"^    (\w+\.py) ", read(README).split("## Files")[1], re.M)
    assert set(listed) == {file.name for file in ROOT.glob("*.py")}


def test_the_ten_lines_of_python_run_from_another_folder(tmp_path):
    [code] = re.findall(r"```python\n(.*?)```", read(README), re.S)
    assert len([line for line in code.splitlines() if line]) <= 10
    (tmp_path / "your.py").write_text(code, encoding="utf-8")
    done = subprocess.run([sys.executable, tmp_path / "your.py"], cwd=ROOT, capture_output=True, text=True,
                          encoding="utf-8", env=os.environ | dict(PYTHONPATH=str(ROOT)))
    assert done.returncode == 0, done.stderr
    assert "The answer is 59." in done.stdout              # 54 - 8 + 13


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_todays_lines(page), encoding="utf-8")
