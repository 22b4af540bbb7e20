"""The documents say what the code says: flags, exit codes, metrics, and names of files that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from server_process import serving

from minserve.errors import ExitCode
from tools import readme_map

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
OPERATING = (ROOT / "docs" / "operating.md").read_text()


def test_the_flags_of_operating_are_those_of_the_code() -> None:
    between = OPERATING.partition(readme_map.FLAGS_BEGIN)[2].partition(readme_map.FLAGS_END)[0]
    assert between == readme_map.flags(), "run `make map`"


def test_every_exit_code_has_its_row() -> None:
    section = OPERATING.partition("## Exit codes")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| \S.* \| \S.* \|$", section, re.MULTILINE)
    assert rows == [str(code.value) for code in sorted(ExitCode)]


def test_every_metric_has_its_row(tmp_path: Path) -> None:
    rows = re.findall(r"^\| (`.*) \| .* \|$", OPERATING.partition("| metric (")[2], re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)(?:\{\w+\})?`", row)}
    with serving(log=tmp_path / "log") as server:
        page = server.request("GET", "/metrics")[1]
    there = {name + ("_total" if kind == "counter" and not name.endswith("_total") else "") for name, kind in families(page)}
    told_by_rank = {f"rank_{name}" for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")}
    assert there - told_by_rank == named


def families(page: str) -> list[tuple[str, str]]:
    """Name and kind; the times of creation left out."""
    found = re.findall(r"^# TYPE minserve:(\w+) (\w+)$", page, re.MULTILINE)
    return [(name, kind) for name, kind in found if not name.endswith("_created")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_a_document_names_are_there(document: Path) -> None:
    text = document.read_text()
    for first, second in re.findall(r"\]\(([^)#]+)[^)]*\)|<img src=\"([^\"]+)\"", text):
        link = first or second
        if not link.startswith("http"):
            assert (document.parent / link).exists(), link
    folders, endings = "docs|configs|deploy|tools|tests|minserve", "md|toml|json|yml|yaml|py|png|svg"
    for name in re.findall(rf"\b((?:{folders})/[\w./-]*\w\.(?:{endings}))\b", text):
        assert (ROOT / name).exists(), name
