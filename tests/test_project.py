"""The README's map is the package's true table of contents, and each file keeps the house's first rule: say what it is for."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from minserve import __version__

ROOT = Path(__file__).parent.parent
SOURCES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "minserve").rglob("*.py"))
_NEEDS_NO_LINE = re.compile(r".*/__init__\.py")


def mapped(document: Path) -> dict[str, str]:
    """File to its one line, from the lines `- path: what it is for` of a document."""
    found = re.findall(r"^- `(minserve/[\w/.-]+\.py)`: (\S.*)$", document.read_text(), re.MULTILINE)
    assert len(found) == len(dict(found)), f"{document.name} lists a file twice"
    return dict(found)


def test_the_readme_maps_every_file_with_one_line() -> None:
    expected = {path for path in SOURCES if not _NEEDS_NO_LINE.fullmatch(path)}
    listed = set(mapped(ROOT / "README.md"))
    assert sorted(expected - listed) == [], "files that the README's map lacks"
    assert sorted(listed - expected) == [], "lines of the README's map without a file"


def test_the_life_of_a_request_names_real_files_in_at_most_60_lines() -> None:
    text = (ROOT / "docs" / "request-life.md").read_text()
    assert len(text.splitlines()) <= 60
    named = set(re.findall(r"`(minserve/[\w/.-]+|[\w/-]+\.py)`", text))
    assert len(named) > 10
    for name in named:
        path = ROOT / name if name.startswith("minserve/") else ROOT / "minserve" / name
        assert path.exists(), f"request-life.md names {name}, which is not there"


@pytest.mark.parametrize("path", SOURCES)
def test_a_file_says_what_it_is_for(path: str) -> None:
    docstring = ast.get_docstring(ast.parse((ROOT / path).read_text()))
    assert docstring, f"{path} has no module docstring"
    assert docstring.split("\n\n")[0].rstrip().endswith((".", ":")), f"{path}: the docstring's first paragraph is no sentence"


def test_every_package_is_installed() -> None:
    """setuptools lists packages by name; a room that is forgotten there works here and is missing after `pip install`."""
    text = (ROOT / "pyproject.toml").read_text()
    match = re.search(r"^packages = \[(.*)\]$", text, re.MULTILINE)
    assert match is not None
    listed = set(re.findall(r'"([\w.]+)"', match.group(1)))
    there = {path.removesuffix("/__init__.py").replace("/", ".") for path in SOURCES if path.endswith("/__init__.py")}
    assert listed == there


def test_the_changelog_knows_this_version() -> None:
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_container_pins_what_the_makefile_pins() -> None:
    makefile, dockerfile = (ROOT / "Makefile").read_text(), (ROOT / "Dockerfile").read_text()
    pinned = re.search(r"^TORCH \?= (\S+)$", makefile, re.MULTILINE)
    assert pinned is not None
    assert f"ARG CPU_TORCH={pinned.group(1)}\n" in dockerfile
