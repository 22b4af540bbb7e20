"""`minserve chat`: a conversation in the terminal, or line by line through a pipe. Knows the OpenAI API and the terminal.

Ctrl-C stops the answer (the server sees the connection close), `/reset` forgets the conversation, `/quit` or Ctrl-D leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Iterator
from typing import TextIO

from minserve.clients.openai_client import OpenAIClient
from minserve.errors import EnvironmentFault, ExitCode

_DIM, _PLAIN = "\033[2m", "\033[0m"
_HELP = "/reset forgets the conversation, /quit leaves; Ctrl-C stops an answer"


class Chat:
    """One conversation. Each answer is an event loop of its own, so that Ctrl-C ends the answer and nothing else."""

    def __init__(
        self, base_url: str, model: str | None, api_key: str | None, system: str | None = None, **options: float | int
    ) -> None:
        """`options`: further fields of the request, such as temperature."""
        self._base_url = base_url
        self._api_key = api_key
        self._model = model
        self._options = options
        self._beginning = [{"role": "system", "content": system}] if system is not None else []
        self.messages: list[dict[str, str]] = list(self._beginning)

    def run(self, lines: TextIO, out: TextIO) -> ExitCode:
        """Until the input ends. Raises EnvironmentFault when the server cannot be reached at the start."""
        with_person = lines.isatty() and out.isatty()
        self._model = self._model or asyncio.run(self._first_model())
        if with_person:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - importing it gives input() line editing and history
            out.write(f"{self._model} at {self._base_url}. {_HELP}\n")
        for line in _typed(out) if with_person else lines:
            words = line.strip()
            if words == "/quit":
                break
            if words == "/reset":
                self.messages = list(self._beginning)
            elif words in ("/help", "/?") and with_person:
                out.write(f"{_HELP}\n")
            elif words:
                self._ask(words, out, with_person)
        return ExitCode.OK

    def _ask(self, words: str, out: TextIO, with_person: bool) -> None:
        """One turn. A failure is told and leaves the conversation as it was."""
        said: list[str] = []
        self.messages.append({"role": "user", "content": words})
        try:
            asyncio.run(self._answer(out, with_person, said))
        except KeyboardInterrupt:
            if not with_person:
                raise
            out.write(f"{_PLAIN} [stopped]")
        except EnvironmentFault as error:
            out.flush()
            sys.stderr.write(f"minserve: error: {error}\n")
            del self.messages[-1]
            if not with_person:
                raise
            return
        out.write("\n")
        out.flush()
        self.messages.append({"role": "assistant", "content": "".join(said)})

    async def _answer(self, out: TextIO, with_person: bool, said: list[str]) -> None:
        """Writes pieces as they come; only the content is kept for the next turn."""
        body = {"model": self._model, "messages": self.messages, "stream": True, **self._options}
        dim = False
        async with OpenAIClient(self._base_url, self._api_key) as client:
            async for data in client.events("/chat/completions", body):
                event = json.loads(data)
                if event.get("error"):
                    raise EnvironmentFault(f"the answer broke off: {event['error'].get('message', event['error'])}")
                for choice in event.get("choices", ()):
                    delta = choice.get("delta") or {}
                    thought, text = delta.get("reasoning_content"), delta.get("content")
                    if thought and with_person:
                        out.write(thought if dim else _DIM + thought)
                        dim = True
                    if text:
                        out.write(f"{_PLAIN}\n{text}" if dim else text)
                        dim = False
                        said.append(text)
                out.flush()
        if dim:
            out.write(_PLAIN)

    async def _first_model(self) -> str:
        async with OpenAIClient(self._base_url, self._api_key) as client:
            return await client.first_model()


def _typed(out: TextIO) -> Iterator[str]:
    """What a person types, until Ctrl-D. Ctrl-C at an empty prompt leaves too."""
    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            out.write("\n")
            return
