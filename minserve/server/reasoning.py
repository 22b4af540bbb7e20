"""Tells the reasoning at the front of an answer from the answer proper. Knows nothing of tokens, tool calls or HTTP.

Whether an answer starts inside its reasoning is read off the prompt: templates differ in whether they write the opening tag
themselves. An answer that holds neither tag is all reasoning when the prompt ends inside the tags (the thinking was cut off),
and all content otherwise. Line breaks beside the tags are layout and are left out.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True, slots=True)
class ThinkTags:
    """What a family of models puts around its reasoning."""

    opening: str = "<think>"
    closing: str = "</think>"
    implied_ends: tuple[str, ...] = ()
    """Marks that end the reasoning too, where a model forgets to close it; they stay in what follows."""


class AnswerStart(enum.Enum):
    """Where an answer begins."""

    INSIDE = enum.auto()
    """The prompt opened the reasoning."""
    OPEN = enum.auto()
    """The answer may open its reasoning itself, with the tag as its first text."""
    CONTENT = enum.auto()
    """The prompt opened and closed the reasoning."""


def answer_start(prompt: str, tags: ThinkTags, continued: str | None = None) -> AnswerStart:
    """Read off the end of the prompt's text. `continued`: the message that the prompt ends in, when one is to be gone on with."""
    end = prompt.rstrip()
    if continued is not None:
        written = continued.rstrip()
        opened, closed = written.rfind(tags.opening), written.rfind(tags.closing)
        if opened != closed:  # one of the tags is there
            return AnswerStart.INSIDE if opened > closed else AnswerStart.CONTENT
        end = end.removesuffix(written).rstrip()
        return AnswerStart.INSIDE if end.endswith(tags.opening) else AnswerStart.CONTENT
    if end.endswith(tags.opening):
        return AnswerStart.INSIDE
    return AnswerStart.CONTENT if end.endswith(tags.closing) else AnswerStart.OPEN


class _Phase(enum.Enum):
    OPENING = enum.auto()
    """Nothing but white space or a part of the opening tag has come."""
    INSIDE = enum.auto()
    CLOSED = enum.auto()
    """Right behind the closing tag."""
    IMPLIED = enum.auto()
    """In the content, but the closing tag is still to come, and to be left out."""
    CONTENT = enum.auto()


class ReasoningParser:
    """Splits one answer's text. The two joined outputs depend on the text alone, never on how it was cut."""

    def __init__(self, tags: ThinkTags, start: AnswerStart) -> None:
        self._tags = tags
        self._start = start
        self._phase = _Phase.CONTENT if start is AnswerStart.CONTENT else _Phase.OPENING
        self._held = ""
        self._any_reasoning = False

    @property
    def thinking(self) -> bool:
        """Whether the next text belongs to the reasoning, as far as is known."""
        return self._phase is _Phase.INSIDE or (self._phase is _Phase.OPENING and self._start is AnswerStart.INSIDE)

    @property
    def over(self) -> bool:
        """Whether all further text is content."""
        return self._phase is _Phase.CONTENT

    def push(self, text: str) -> tuple[str, str]:
        """New reasoning and new content that are certain; either may be empty."""
        if self._phase is _Phase.CONTENT:
            return "", text
        self._held += text
        reasoning = ""
        if self._phase is _Phase.OPENING:
            self._open()
        if self._phase is _Phase.INSIDE:
            reasoning = self._think()
        return reasoning, self._content()

    def finish(self) -> tuple[str, str]:
        """What was held back, once the text is complete."""
        held, self._held = self._held, ""
        if self._phase is _Phase.CLOSED:
            return "", ""
        return (held, "") if self.thinking else ("", held)

    def _open(self) -> None:
        """Leave out an opening tag, which may also repeat the prompt's."""
        text = self._held.lstrip()
        if text.startswith(self._tags.opening):
            self._held = text[len(self._tags.opening) :]
            self._phase = _Phase.INSIDE
        elif not self._tags.opening.startswith(text):
            self._phase = _Phase.INSIDE if self._start is AnswerStart.INSIDE else _Phase.CONTENT

    def _think(self) -> str:
        if not self._any_reasoning:
            self._held = self._held.lstrip("\n")
        marks = (self._tags.closing, *self._tags.implied_ends)
        found = first_mark(self._held, marks)
        if found is None:
            certain = len(self._held) - unfinished_mark(self._held, marks)
            reasoning = self._held[:certain].rstrip("\n")
            self._held = self._held[len(reasoning) :]
        else:
            start, mark = found
            reasoning = self._held[:start].rstrip("\n")
            closed = mark == self._tags.closing
            self._held = self._held[start + len(mark) :] if closed else self._held[start:]
            self._phase = _Phase.CLOSED if closed else _Phase.IMPLIED
        self._any_reasoning = self._any_reasoning or bool(reasoning)
        return reasoning

    def _content(self) -> str:
        content = ""
        if self._phase is _Phase.IMPLIED:
            closing = self._tags.closing
            before, found, after = self._held.partition(closing)
            certain = len(before) - (0 if found else unfinished_mark(before, (closing,)))
            content, self._held = before[:certain], after if found else before[certain:]
            self._phase = _Phase.CLOSED if found else _Phase.IMPLIED
        if self._phase is _Phase.CLOSED:
            self._held = self._held.lstrip("\n")
            self._phase = _Phase.CONTENT if self._held else _Phase.CLOSED
        if self._phase is _Phase.CONTENT:
            content, self._held = content + self._held, ""
        return content


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
