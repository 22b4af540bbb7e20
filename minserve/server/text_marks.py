"""Finds marks such as `<think>` in text that arrives in pieces of any cut. Knows nothing of what the marks mean."""

from __future__ import annotations

from collections.abc import Iterable


def first_mark(text: str, marks: Iterable[str]) -> tuple[int, str] | None:
    """Where the earliest whole mark starts, and which one it is; of two that start together the longer one."""
    found: tuple[int, str] | None = None
    for mark in marks:
        start = text.find(mark) if found is None else text.find(mark, 0, found[0] + len(mark))
        if start >= 0 and (found is None or (start, -len(mark)) < (found[0], -len(found[1]))):
            found = (start, mark)
    return found


def unfinished_mark(text: str, marks: Iterable[str]) -> int:
    """Characters at the text's end that may become a mark once more text comes; 0 when none can."""
    longest = 0
    for mark in marks:
        start = text.find(mark[0], max(0, len(text) - len(mark) + 1))
        while start >= 0 and len(text) - start > longest:
            if mark.startswith(text[start:]):
                longest = len(text) - start
            start = text.find(mark[0], start + 1)
    return longest
