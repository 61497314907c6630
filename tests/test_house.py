"""The house itself: its floors, its types, its style, its signposts."""

import pathlib
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT


@pytest.mark.parametrize(
    "command",
    ["ruff check .", "ruff format --check .", "pyrefly check", "lint-imports --no-logo"],
)
def test_the_code_passes(command):
    tool, *arguments = command.split()
    beside_python = str(pathlib.Path(sys.executable).parent / tool)
    result = subprocess.run([beside_python, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def anchors(page):
    """The names that GitHub gives the headings of a page. What repeats a name is numbered."""
    names = []
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)  # no comments of a shell
    for heading in re.findall(r"^#+ +(.*?)[ #]*$", text, re.MULTILINE):
        shown = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading)
        names.append(re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-"))
    return {f"{name}-{names[:n].count(name)}".removesuffix("-0") for n, name in enumerate(names)}


@pytest.mark.parametrize(
    "file", [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")], ids=lambda file: str(file.relative_to(ROOT))
)
def test_every_link_leads_somewhere(file):
    for place, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", file.read_text()):
        target = file.parent / place if place else file
        assert target.exists(), place
        assert not anchor or anchor in anchors(target), f"{place}#{anchor}"


def defines(file, name):
    return re.search(rf"^ *((def|class) {name}\b|{name}(:.*)? = )", (ROOT / file).read_text(), re.MULTILINE)


def test_the_answers_of_the_quiz_are_still_right():
    answers = re.findall(r"^ {3,4}`([\w/]+\.py)`, `(\w+)`\.", (ROOT / "docs/quiz.md").read_text(), re.MULTILINE)
    assert len(answers) == 20
    for file, name in answers:
        assert defines(file, name), name


def test_the_walkthrough_names_files_and_functions_that_exist():
    text = (ROOT / "docs/walkthrough.md").read_text()
    files = re.findall(r"`([\w/]+\.py)`", text)
    assert len(files) > 20
    for file in files:
        assert (ROOT / "transformer_flax" / file).exists(), file
    places = re.findall(r"`(?:\w+\.)?(\w+)` in `([\w/]+\.py)`", text)
    assert len(places) > 10
    for name, file in places:
        assert defines(pathlib.Path("transformer_flax") / file, name), name
