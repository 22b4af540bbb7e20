"""Tells the reasoning at the front of an answer from the answer proper. Knows nothing of tokens, tool calls or HTTP.

Whether an answer starts inside its reasoning is read off the prompt: templates differ in whether they write the opening tag
themselves. An answer that holds neither tag is all reasoning when the prompt ends inside the tags (the thinking was cut off),
and all content otherwise. Line breaks beside the tags are layout and are left out.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Generator, Iterator

from minserve.server.tool_calls import Source, before_marks


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


class ReasoningParser:
    """Splits one answer's text. The two joined outputs depend on the text alone, never on how it was cut."""

    def __init__(self, tags: ThinkTags, start: AnswerStart) -> None:
        self._tags = tags
        self.thinking = start is AnswerStart.INSIDE
        """Whether the next text belongs to the reasoning, as far as is known."""
        self.over = start is AnswerStart.CONTENT
        """Whether all further text is content."""
        self._source = Source()
        self._reader: Iterator[tuple[str, str] | None] = iter(()) if self.over else self._read(self._source)

    def push(self, text: str) -> tuple[str, str]:
        """New reasoning and new content that are certain; either may be empty."""
        if self.over:
            return "", text
        self._source.text += text
        return self._parts()

    def finish(self) -> tuple[str, str]:
        """What was held back, once the text is complete."""
        self._source.ended = True
        return ("", "") if self.over else self._parts()

    def _parts(self) -> tuple[str, str]:
        reasoning = content = ""
        for part in self._reader:
            if part is None:
                break
            reasoning, content = reasoning + part[0], content + part[1]
        return reasoning, content

    def _read(self, source: Source) -> Iterator[tuple[str, str] | None]:
        """Yields what `push` returns, and None where more text is needed. The opening tag may also repeat the prompt's."""
        opening, closing = self._tags.opening, self._tags.closing
        while len(text := source.text.lstrip()) < len(opening) and opening.startswith(text) and not source.ended:
            yield None
        if text.startswith(opening):
            source.text, self.thinking = text[len(opening) :], True
        if self.thinking:
            mark: str | None = yield from self._think(source)
            self.thinking = False
            while mark != closing:  # in the content, but the closing tag is still to come, and to be left out
                count, mark = before_marks(source, (closing,))
                yield "", source.take(count)
                if mark is None:
                    yield None
                source.take(len(mark or ""))
            while not (text := source.text.lstrip("\n")):
                yield None
            source.text = text
        self.over = True
        yield "", source.take(len(source.text))

    def _think(self, source: Source) -> Generator[tuple[str, str] | None, None, str]:
        """The reasoning. Returns the mark that ends it, which is taken only if it is the closing tag."""
        marks = (self._tags.closing, *self._tags.implied_ends)
        any_reasoning = False
        while True:
            if not any_reasoning:
                source.text = source.text.lstrip("\n")
            count, mark = before_marks(source, marks)
            reasoning = source.text[:count]
            if mark is not None or not source.ended:
                reasoning = reasoning.rstrip("\n")
            yield reasoning, ""
            any_reasoning = any_reasoning or bool(reasoning)
            if mark is not None:
                source.take(count + (len(mark) if mark == self._tags.closing else 0))
                return mark
            source.take(len(reasoning))
            yield None
