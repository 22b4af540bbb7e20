"""An answer as a row of blocks - reasoning, text, calls - for APIs that stream it so. Knows nothing of their words.

`/v1/responses` and `/v1/messages` differ in names only: a block opens, grows and closes, then the next one opens.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec

from minserve.server.answer_format import CallDelta, Reasoning
from minserve.server.api_errors import ApiError
from minserve.server.generation import Generation, Piece

Kind = Literal["reasoning", "text", "call"]


@dataclasses.dataclass(slots=True)
class Block:
    """One block. `parts` joined are its text, or the arguments of its call."""

    kind: Kind
    parts: list[str] = dataclasses.field(default_factory=list)
    call_id: str = ""
    name: str = ""

    @property
    def text(self) -> str:
        return "".join(self.parts)


class BlockWriter(abc.ABC):
    """One answer of one choice, streamed or whole. Subclasses say what the client is told."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.blocks: list[Block] = []
        self._has_begun = False

    def add(self, number: int, pieces: list[Piece]) -> None:  # noqa: ARG002 - there is one choice
        """Collects, for an answer that is not streamed."""
        for piece in pieces:
            for _ in self._grow(piece):
                pass

    def render(self, outputs: list[tuple[int, list[Piece]]]) -> bytes:
        """The events of new pieces."""
        return b"".join(_event(event) for event in self._events(outputs))

    def last(self) -> bytes:
        """The events of the end."""
        return b"".join(_event(event) for event in self._ending())

    def error(self, error: ApiError) -> bytes:
        return _event(self.failed(error))

    def body(self) -> bytes:
        return msgspec.json.encode(self.whole())

    @property
    def finish_reason(self) -> str:
        return self.generation.choices[0].finish_reason or "stop"

    def _events(self, outputs: list[tuple[int, list[Piece]]]) -> Iterator[dict[str, Any]]:
        if not self._has_begun:
            self._has_begun = True
            yield from self.begun()
        for _, pieces in outputs:
            for piece in pieces:
                for block, is_new, text in self._grow(piece):
                    if is_new:
                        if len(self.blocks) > 1:
                            yield from self.closed(self.blocks[-2], len(self.blocks) - 2)
                        yield from self.opened(block, len(self.blocks) - 1)
                    if text:
                        yield self.grown(block, len(self.blocks) - 1, text)

    def _ending(self) -> Iterator[dict[str, Any]]:
        if self.blocks:
            yield from self.closed(self.blocks[-1], len(self.blocks) - 1)
        yield from self.ended()

    def _grow(self, piece: Piece) -> Iterator[tuple[Block, bool, str]]:
        """Puts a piece into its blocks; for each part the block, whether it is new, and the part's text."""
        for part in _in_order(piece):
            kind: Kind = "text" if isinstance(part, str) else "reasoning" if isinstance(part, Reasoning) else "call"
            last = self.blocks[-1] if self.blocks else None
            starts_call = isinstance(part, CallDelta) and part.name is not None
            is_new = last is None or last.kind != kind or starts_call
            if last is None or is_new:
                last = Block(kind)
                self.blocks.append(last)
            if isinstance(part, CallDelta) and starts_call:
                last.call_id, last.name = part.call_id or "", part.name or ""
            text = part if isinstance(part, str) else part.text if isinstance(part, Reasoning) else part.arguments
            last.parts.append(text)
            yield last, is_new, text

    @abc.abstractmethod
    def begun(self) -> Iterable[dict[str, Any]]:
        """Before everything else. An event is a JSON object with a `type`, which also names it."""

    @abc.abstractmethod
    def opened(self, block: Block, index: int) -> Iterable[dict[str, Any]]: ...

    @abc.abstractmethod
    def grown(self, block: Block, index: int, text: str) -> dict[str, Any]: ...

    @abc.abstractmethod
    def closed(self, block: Block, index: int) -> Iterable[dict[str, Any]]: ...

    @abc.abstractmethod
    def ended(self) -> Iterable[dict[str, Any]]: ...

    @abc.abstractmethod
    def failed(self, error: ApiError) -> dict[str, Any]: ...

    @abc.abstractmethod
    def whole(self) -> dict[str, Any]:
        """The answer that is not streamed."""


def _in_order(piece: Piece) -> Iterator[str | Reasoning | CallDelta]:
    """A piece's parts as they follow each other: reasoning, content, calls."""
    for part in piece.aside:
        if isinstance(part, Reasoning):
            yield part
    if piece.text:
        yield piece.text
    for part in piece.aside:
        if isinstance(part, CallDelta):
            yield part


def _event(event: dict[str, Any]) -> bytes:
    name: str = event["type"]
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"
