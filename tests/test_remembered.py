"""Answers of earlier starts: kept whole under their keys, and never in the way of a start."""

from __future__ import annotations

from pathlib import Path

from minserve.remembered import Remembered


def test_an_answer_is_found_under_its_key_alone(tmp_path: Path) -> None:
    memory = Remembered(tmp_path / "a" / "b")
    key = ["triton", "3.6", None]
    assert memory.recall("imports", key) is None
    memory.keep("imports", key, {"usable": True})
    assert Remembered(tmp_path / "a" / "b").recall("imports", key) == {"usable": True}
    assert memory.recall("imports", ["triton", "3.7", None]) is None
    assert memory.recall("plans", key) is None
    memory.keep("imports", key, {"usable": False})
    assert memory.recall("imports", key) == {"usable": False}
    memory.forget("imports", key)
    memory.forget("imports", key)
    assert memory.recall("imports", key) is None


def test_what_cannot_be_read_or_written_counts_as_not_known(tmp_path: Path) -> None:
    memory = Remembered(tmp_path)
    memory.keep("imports", 1, "yes")
    file = next(tmp_path.iterdir())
    for text in ("", "{", "[]", '{"key": 1}', "\x00"):
        file.write_text(text)
        assert memory.recall("imports", 1) is None
    (tmp_path / "file").write_text("in the way")
    blocked = Remembered(tmp_path / "file")
    blocked.keep("imports", 1, "yes")
    assert blocked.recall("imports", 1) is None
