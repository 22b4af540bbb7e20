"""What a reader of tool calls yields, the driver that feeds it text, and the reading steps that formats share.

Knows no format (tool_formats.py does), and nothing of tokens, JSON schemas or HTTP.

A reader is a generator: each `yield None` in it asks for more text, and what it yields depends on the text alone, never on
how the text was cut. So it reads like the grammar of its format, top to bottom.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from typing import NamedTuple, TypeVar


class CallStart(NamedTuple):
    """A call begins. The function's name is known, of its arguments nothing."""

    name: str
    call_id: str | None = None
    """The id that the model wrote, in formats that have one."""


class CallArguments(NamedTuple):
    """The next piece of the arguments' JSON text, of the call that began last."""

    text: str


Event = str | CallStart | CallArguments
"""A `str` is content: text outside of calls, and calls too malformed to tell a name."""

LONGEST_HEADER = 512
"""Characters between the mark of a call and its arguments; names are shorter."""

T = TypeVar("T")
Reading = Generator[Event | None, None, T]

_STRUCTURE = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')
_CLOSERS = {"{": "}", "[": "]"}


class Source:
    """The text that has come and was not taken yet."""

    def __init__(self) -> None:
        self.text = ""
        self.ended = False

    def take(self, count: int) -> str:
        taken, self.text = self.text[:count], self.text[count:]
        return taken

    def put_back(self, text: str) -> None:
        self.text = text + self.text


class ToolCallParser:
    """Runs one answer's text through a reader."""

    def __init__(self, reader: Callable[[Source], Reading[None]]) -> None:
        self._source = Source()
        self._reader = reader(self._source)

    def push(self, text: str) -> list[Event]:
        """What is certain now and was not told before; no event is empty, neighbours of a kind are one."""
        self._source.text += text
        return self._read()

    def finish(self) -> list[Event]:
        """The rest, once the text is complete. A call cut off in its arguments stays as it is."""
        self._source.ended = True
        return self._read()

    def _read(self) -> list[Event]:
        events: list[Event] = []
        for event in self._reader:
            if event is None:
                break
            last = events[-1] if events else None
            if isinstance(event, str) and isinstance(last, str):
                events[-1] = last + event
            elif isinstance(event, CallArguments) and isinstance(last, CallArguments):
                events[-1] = CallArguments(last.text + event.text)
            else:
                events.append(event)
        return events


def read_content(source: Source, marks: tuple[str, ...], after_call: bool) -> Reading[tuple[str, str | None]]:
    """Yields the text before the next of `marks`. Returns the white space before the mark, which was not yielded, and the mark.

    The mark is None at the text's end. White space at the end is content, but not `after_call`.
    """
    while True:
        count, mark = before_marks(source, marks)
        text = source.text[:count]
        content = text.rstrip()
        if mark is not None:
            source.take(count + len(mark))
            if content:
                yield content
            return text[len(content) :], mark
        if source.ended:
            if text and not (after_call and not content):
                yield source.take(count)
            return "", None
        if content:
            yield source.take(len(content))
        yield None


def read_until(source: Source, marks: tuple[str, ...], limit: int) -> Reading[tuple[str, str | None]]:
    """Returns the text before the next of `marks`, and the mark; None when there is none within `limit` characters."""
    while True:
        found = first_mark(source.text, marks)
        if found is not None and found[0] <= limit:
            start, mark = found
            return source.take(start + len(mark))[:start], mark
        if found is not None or source.ended or len(source.text) > limit + max(map(len, marks)):
            return source.take(limit), None
        yield None


def skip_space(source: Source) -> Reading[str]:
    """Returns the white space that it took."""
    while True:
        rest = source.text.lstrip()
        if rest or source.ended:
            return source.take(len(source.text) - len(rest))
        yield None


def take_mark(source: Source, *marks: str) -> Reading[str]:
    """Takes the one of `marks` that comes next, if one does, and returns it; else nothing, and the empty string."""
    while True:
        for mark in marks:
            if source.text.startswith(mark):
                return source.take(len(mark))
        if source.ended or not any(mark.startswith(source.text) for mark in marks):
            return ""
        yield None


def skip_ends(source: Source, *marks: str) -> Reading[bool]:
    """Takes the marks that come next, in this order, each of which may be missing; whether the last one was there."""
    taken = ""
    for mark in marks:
        yield from skip_space(source)
        taken = yield from take_mark(source, mark)
        if source.ended and mark.startswith(source.text):
            source.take(len(source.text))  # cut off within the mark
    return bool(taken)


def read_object(source: Source, end_marks: tuple[str, ...]) -> Reading[None]:
    """Yields the JSON object that comes next as arguments, as it is written. Tags within its strings are text.

    One whose brackets do not match goes on to the next of `end_marks`, which is left where it is.
    """
    extent = JsonExtent()
    while True:
        count = extent.feed(source.text)
        if count:
            yield CallArguments(source.take(count))
        if extent.whole or source.ended:
            return
        if extent.broken:
            break
        yield None
    while True:
        count, mark = before_marks(source, end_marks)
        if count:
            yield CallArguments(source.take(count))
        if mark is not None or source.ended:
            return
        yield None


class JsonExtent:
    """Finds where a JSON object or array ends, by its brackets and strings alone."""

    def __init__(self) -> None:
        self._closers: list[str] = []
        self._in_string = False
        self._escaped = False
        self.whole = False
        """The last bracket has been closed."""
        self.broken = False
        """A bracket came that does not match."""

    def feed(self, text: str) -> int:
        """Takes in the next text, which starts with a bracket at first; how much of it belongs to the value."""
        position = 0
        while position < len(text):
            if self._escaped:
                self._escaped = False
                position += 1
                continue
            found = (_IN_STRING if self._in_string else _STRUCTURE).search(text, position)
            if found is None:
                return len(text)
            position = found.end()
            self._step(found[0])
            if self.whole:
                return position
            if self.broken:
                return position - 1
        return position

    def _step(self, character: str) -> None:
        if character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = not self._in_string
        elif character in _CLOSERS:
            self._closers.append(_CLOSERS[character])
        elif self._closers.pop() != character:
            self.broken = True
        else:
            self.whole = not self._closers


def before_marks(source: Source, marks: tuple[str, ...]) -> tuple[int, str | None]:
    """Characters that are surely none of a mark, up to the earliest one, and that mark if it has come."""
    found = first_mark(source.text, marks)
    return found or (len(source.text) - (0 if source.ended else unfinished_mark(source.text, marks)), None)


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
