"""The other workers of one port: what a client asks of one of them, and concerns all, is asked of the others here.

Each worker answers questions on a socket in a directory that only this user can enter: a line of JSON, the answer, the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

ANSWER_SECONDS = 5.0
"""A sibling that takes longer is left out; one that is dead takes all of them along anyway."""

Answers = Mapping[str, Callable[[Any], bytes]]


class Siblings:
    """One worker's view of the others; none by default."""

    def __init__(self, listener: socket.socket | None = None, others: Sequence[str] = ()) -> None:
        """`listener`: this worker's own socket. `others`: paths of the others'."""
        self._listener = listener
        self._others = others

    @contextlib.asynccontextmanager
    async def answering(self, answers: Answers) -> AsyncIterator[None]:
        """Answers the others' questions for as long as it is open."""

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError, ValueError, LookupError):
                question, detail = json.loads(await reader.readline())
                writer.write(answers[question](detail))
                await writer.drain()
            writer.close()

        if self._listener is None:
            yield
            return
        async with await asyncio.start_unix_server(answer, sock=self._listener):
            yield

    async def ask(self, question: str, detail: Any = None) -> list[bytes]:
        """The answers of those that gave one."""
        answers = await asyncio.gather(*(self._ask(path, question, detail) for path in self._others))
        return [answer for answer in answers if answer]

    async def _ask(self, path: str, question: str, detail: Any) -> bytes:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                reader, writer = await asyncio.open_unix_connection(path)
                try:
                    writer.write(json.dumps([question, detail]).encode() + b"\n")
                    return await reader.read()
                finally:
                    writer.close()
        except OSError:
            return b""
