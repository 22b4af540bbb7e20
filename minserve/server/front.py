"""The state that all handlers share: settings, engines, the loaded model, whether requests are welcome, and the other workers of
the port, of whom is asked what concerns all: a line of JSON on a socket in a directory that only this user can enter.

Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

from minserve import config as configuration
from minserve.config import Config
from minserve.errors import CheckpointError
from minserve.messages import Ready
from minserve.server.answer_format import ModelFormats
from minserve.server.api_errors import ApiError, unavailable
from minserve.server.engine_pool import EnginePool
from minserve.server.generation import Generation, LoadedModel
from minserve.server.metrics import Metrics
from minserve.server.options import ModelFacts
from minserve.server.tokenizer import Tokenizer

MOST_HEALTHY_SILENCE = 60.0
"""Seconds without a word from an engine, which speaks every second and after every step, before /health fails."""
INLINE_BYTES = 4096
"""Work on no more text than this is done where it is asked for: a thread would cost more than it frees."""
HEAVY_BYTES = 1 << 18
"""Work on more text than this has its own threads, so that it never stands before shorter texts."""
_THREADS = 2

T = TypeVar("T")


class Front:
    """One server process's shared state. All methods belong to the event loop's thread."""

    def __init__(self, config: Config, engines: EnginePool, siblings: Siblings | None = None) -> None:
        self.config = config
        self.engines = engines
        self.phase: Literal["loading", "ready", "draining"] = "loading"
        self.model: LoadedModel | None = None
        self.generations: dict[str, Generation] = {}
        """Answers under way, by their id."""
        self.siblings = siblings or Siblings()
        self._light = ThreadPoolExecutor(_THREADS, thread_name_prefix="minserve-text")
        self._heavy = ThreadPoolExecutor(_THREADS, thread_name_prefix="minserve-long-text")
        self._num_active = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    async def load_tokenizer(self) -> Tokenizer:
        """Raises CheckpointError or UsageError."""
        config, directory = self.config, configuration.model_directory(self.config)
        dummy = config.load_format == "dummy"
        return await self.worked(lambda: Tokenizer.load(directory, config.tokenizer, config.chat_template, dummy=dummy))

    def become_ready(self, tokenizer: Tokenizer, ranks: list[Ready]) -> LoadedModel:
        """From now on requests are served. Raises CheckpointError for a tokenizer that is not this model's."""
        config = self.config
        vocab_size = min(ready.vocab_size for ready in ranks)
        if tokenizer.vocab_size > vocab_size:
            raise CheckpointError(
                f"the tokenizer knows token ids up to {tokenizer.vocab_size - 1}, but the model's embedding has {vocab_size} rows"
            )
        end_ids = [end for ready in ranks for end in ready.eos_token_ids] + list(tokenizer.eos_token_ids)
        facts = ModelFacts(
            names=config.served_model_name or (config.model,),
            root=config.model,
            created=int(time.time()),
            vocab_size=vocab_size,
            context_length=min(min(ready.max_model_len, ready.num_pages * ready.page_size) for ready in ranks),
            stop_token_ids=tuple(end for end in dict.fromkeys(end_ids) if end < vocab_size),
        )
        pages = [ready.num_pages for ready in ranks]
        metrics = Metrics(config.metrics_prefix, facts.name, self.engines, pages, ranks[0].startup_seconds)
        parsers, source = (config.tool_call_parser, config.reasoning_parser), tokenizer.template.source
        formats = ModelFormats(*parsers, ranks[0].model_type, tokenizer.special_token_ids(), source)
        self.model = LoadedModel(tokenizer, facts, metrics, formats, tuple(ranks))
        if self.phase == "loading":
            self.phase = "ready"
        return self.model

    def loaded(self) -> LoadedModel:
        """The model. Raises ApiError 503 while it loads."""
        if self.model is None:
            starting = self.engines.engines[0].starting
            progress = f" ({starting.phase}, {starting.fraction:.0%})" if starting is not None else ""
            raise unavailable(f"The model is still loading{progress}; try again later", "loading")
        return self.model

    @contextlib.contextmanager
    def accepted(self) -> Iterator[LoadedModel]:
        """Around a request that may generate: the drain waits for it. Raises ApiError 503 when none is welcome, 429 when full."""
        if self.phase == "draining":
            raise unavailable("The server is shutting down", "draining")
        model = self.loaded()
        self.engines.admit()
        self._num_active += 1
        self._quiet.clear()
        try:
            yield model
        finally:
            self._num_active -= 1
            if self._num_active == 0:
                self._quiet.set()

    async def quiet(self) -> None:
        """Returns once no accepted request is left."""
        await self._quiet.wait()

    @contextlib.contextmanager
    def under_way(self, generation: Generation) -> Iterator[Generation]:
        """Around the writing of an answer: however it is left, nothing of it stays in the engines."""
        self.generations[generation.id] = generation
        try:
            yield generation
        except ApiError:
            generation.abort("error")
            raise
        finally:
            generation.abort("client_gone")
            del self.generations[generation.id]

    def abort(self, name: str | None) -> int:
        """Ends the answers that bear this name, their own or the client's; all of them without one. How many those were."""
        chosen = [one for one in list(self.generations.values()) if name is None or name in (one.id, one.request_id)]
        for generation in chosen:
            generation.abort("api", ApiError(499, "The request was aborted", code="request_aborted"))
        return len(chosen)

    def answers_for_siblings(self) -> dict[str, Callable[[Any], bytes]]:
        """What another worker of this port may ask."""
        return {
            "metrics": lambda _: self.model.metrics.own_part() if self.model is not None else b"",
            "abort": lambda name: b"%d" % self.abort(name),
        }

    async def worked(self, work: Callable[[], T], num_bytes: int = HEAVY_BYTES) -> T:
        """What `work` returns, run where it holds up others least; `num_bytes` of text tell how long it takes."""
        if num_bytes <= INLINE_BYTES:
            return work()
        threads = self._heavy if num_bytes > HEAVY_BYTES else self._light
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    def check_health(self) -> None:
        """Raises ApiError 503 where an engine has ended or has been silent for too long."""
        rank, silence = self.engines.silence()
        if self.engines.death.done():
            raise unavailable(f"Not healthy: engine {self.engines.death.result().rank} has ended", "unhealthy")
        if silence > min(MOST_HEALTHY_SILENCE, self.config.watchdog_timeout / 4):
            said = f"engine {rank} has said nothing for {silence:.0f} s; it speaks every second when it is well"
            raise unavailable(f"Not healthy: {said}", "unhealthy")

    def close(self) -> None:
        for threads in (self._light, self._heavy):
            threads.shutdown(wait=False, cancel_futures=True)


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
