"""The HTTP tables' loads: what each asks of the server, which is none here."""

from __future__ import annotations

import collections
from typing import Any

import pytest

from tools import http_table


def test_no_load_asks_what_one_before_it_did(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A prompt that the prefix cache holds has its first token at once, as if the server were fast."""
    seeds: list[int] = []

    def bench(_url: str, options: dict[str, int]) -> dict[str, Any]:
        seeds.append(options.get("--seed", 0))
        return collections.defaultdict(lambda: 1.0)

    monkeypatch.setattr(http_table, "bench", bench)
    rows = http_table.measure("http://127.0.0.1:9", [*http_table.STREAMS])
    assert len(seeds) == len(set(seeds)) == 1 + len(rows)
    assert capsys.readouterr().out.count("| 1.00 / 1.00 |") == len(http_table.STREAMS)
