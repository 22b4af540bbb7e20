"""The tables of docs/expert-parallel.md are what the code says today."""

from __future__ import annotations

from pathlib import Path

from tools import expert_parallel_table

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "expert-parallel.md"


def test_the_document_holds_the_tables() -> None:
    assert expert_parallel_table.tables() in DOCUMENT.read_text()
