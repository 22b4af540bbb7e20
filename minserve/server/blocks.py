"""An answer as a row of blocks - reasoning, text, calls - for APIs that stream it so. Knows nothing of their words.

`/v1/responses` and `/v1/messages` differ in names only: a block opens, grows and closes, then the next one opens.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec

from minserve.server.answer_format import CallDelta
from minserve.server.api_errors import ApiError
from minserve.server.generation import Generation, Piece


@dataclasses.dataclass(slots=True)
class Block:
    """One block. `parts` joined are its text, or the arguments of its call."""

    index: int
    kind: Literal["reasoning", "text", "call"]
    call_id: str = ""
    name: str = ""
    parts: list[str] = dataclasses.field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.parts)


class BlockWriter(abc.ABC):
    """One answer of one choice, streamed or whole. Subclasses say what the client is told: events are JSON objects with a `type`,
    which also names them.
    """

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.blocks: list[Block] = []
        self._has_begun = False

    def add(self, number: int, pieces: list[Piece]) -> None:  # noqa: ARG002 - there is one choice
        """Collects, for an answer that is not streamed."""
        for piece in pieces:
            for block, text in self._grow(piece):
                block.parts.append(text)

    def render(self, outputs: list[tuple[int, list[Piece]]]) -> bytes:
        """The events of new pieces."""
        return b"".join(map(_event, self._events(outputs)))

    def last(self) -> bytes:
        """The events of the end."""
        closed = self.closed(self.blocks[-1]) if self.blocks else ()
        return b"".join(map(_event, (*closed, *self.ended())))

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
        for block, text in (part for _, pieces in outputs for piece in pieces for part in self._grow(piece)):
            if not block.parts:
                if block.index > 0:
                    yield from self.closed(self.blocks[-2])
                yield from self.opened(block)
            block.parts.append(text)
            if text:
                yield self.grown(block, text)

    def _grow(self, piece: Piece) -> Iterator[tuple[Block, str]]:
        """For each part of a piece its block, which may be new and then has no parts, and the text to be added to it."""
        for part in piece.in_order():
            if isinstance(part, CallDelta):
                if part.name is not None:
                    self.blocks.append(Block(len(self.blocks), "call", part.call_id or "", part.name))
                yield self.blocks[-1], part.arguments
            else:
                kind: Literal["text", "reasoning"] = "text" if isinstance(part, str) else "reasoning"
                if not self.blocks or self.blocks[-1].kind != kind:
                    self.blocks.append(Block(len(self.blocks), kind))
                yield self.blocks[-1], part if isinstance(part, str) else part.text

    @abc.abstractmethod
    def begun(self) -> Iterable[dict[str, Any]]: ...

    @abc.abstractmethod
    def opened(self, block: Block) -> Iterable[dict[str, Any]]: ...

    @abc.abstractmethod
    def grown(self, block: Block, text: str) -> dict[str, Any]: ...

    @abc.abstractmethod
    def closed(self, block: Block) -> Iterable[dict[str, Any]]: ...

    @abc.abstractmethod
    def ended(self) -> Iterable[dict[str, Any]]: ...

    @abc.abstractmethod
    def failed(self, error: ApiError) -> dict[str, Any]: ...

    @abc.abstractmethod
    def whole(self) -> dict[str, Any]:
        """The answer that is not streamed."""


def _event(event: dict[str, Any]) -> bytes:
    name: str = event["type"]
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"
