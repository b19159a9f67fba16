"""The README's table from the paper to the code points at the lines it names."""
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
LINKS = re.findall(r"\[`([\w.]+)`\]\(([\w/]+\.py)#L(\d+)\)", README)


def test_every_link_to_a_line_points_at_the_definition_it_names():
    assert len(LINKS) >= 12
    for name, file, line in LINKS:
        text = (ROOT / file).read_text(encoding="utf-8").splitlines()[int(line) - 1]
        assert re.match(rf"\s*(def|class) {re.escape(name)}\b", text), f"{file}:{line} is {text!r}, the README says {name}"


def test_every_file_that_the_readme_links_is_there():
    for target in re.findall(r"\]\((?!http|#)([^)#]+)", README):
        assert (ROOT / target).exists(), target
