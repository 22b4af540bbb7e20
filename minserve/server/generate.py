"""The endpoints that generate: a body in, one answer out, streamed or whole. Knows HTTP, and engines only by name.

Clients of streams that stop reading are cut off, so that they hold neither memory nor engine.
"""

from __future__ import annotations

import contextlib
import functools
import re
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import NamedTuple

from aiohttp import web

from minserve.server import messages_api, responses
from minserve.server.api_errors import ApiError
from minserve.server.blocks import BlockWriter
from minserve.server.completions import CompletionWriter
from minserve.server.front import HEAVY_BYTES, INLINE_BYTES, Front
from minserve.server.generation import Generation, LoadedModel, Prompt
from minserve.server.http import BodyReader, Exchange
from minserve.server.messages_api import MessageWriter
from minserve.server.options import Options
from minserve.server.prompts import asks_for_grammar, holds_token_ids, prepare_chat, prepare_completion
from minserve.server.responses import ResponseWriter

MAX_BLOCKED_SECONDS = 60.0
"""A client that takes no byte for so long, with its socket's buffers full, is cut off."""


GRAMMAR_WEIGHT = 16
"""A byte of a body that asks for a grammar may take as long as so many bytes of text."""
IDS_PER_TEXT = 16
"""So many bytes of token ids are read in the time in which a byte of text becomes one. A prompt of some thousand ids is no work
for a thread, from which it would come back after all the other bodies of a burst."""
_STREAM_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


Writer = CompletionWriter | BlockWriter
"""One answer in the words of its API: either `add` and `body`, or `render` and `last`."""


class Asked(NamedTuple):
    """A checked request, and what will write its answer."""

    options: Options
    prompts: list[Prompt]
    id_prefix: str
    writer: Callable[[Generation], Writer]


Prepare = Callable[[bytes | bytearray, LoadedModel], Asked]


class GenerateEndpoints:
    """Chat and text completions, and the other APIs that ask for the same."""

    def __init__(self, front: Front, bodies: BodyReader, slow_readers: SlowReaders) -> None:
        self._front = front
        self._bodies = bodies
        self._slow_readers = slow_readers

    def answering(self, prepare: Prepare) -> Callable[[Exchange], Awaitable[web.StreamResponse]]:
        """The endpoint that answers what `prepare` makes of a body."""

        async def answer(exchange: Exchange) -> web.StreamResponse:
            with self._front.accepted() as model:
                options, prompts, id_prefix, writer = await self._prepared(exchange, prepare, model)
                generation = Generation(id_prefix, options, prompts, exchange.request_id, model, self._front.engines)
                write = self._stream if options.asked.stream else self._whole
                with self._front.under_way(generation):
                    return await write(exchange, generation, writer(generation))

        return answer

    async def count_tokens(self, exchange: Exchange) -> web.StreamResponse:
        """`{"input_tokens": n}` for a body of /v1/messages."""
        model = self._front.loaded()
        asked = await self._prepared(exchange, functools.partial(_message, counts_only=True), model)
        return exchange.json({"input_tokens": len(asked.prompts[0].token_ids)})

    async def _prepared(self, exchange: Exchange, prepare: Prepare, model: LoadedModel) -> Asked:
        async with self._bodies.body(exchange.request) as body:
            return await self._front.worked(lambda: prepare(body, model), _weight(body))

    async def _whole(self, exchange: Exchange, generation: Generation, writer: Writer) -> web.StreamResponse:
        while generation.open:
            for number, pieces in await generation.advance():
                writer.add(number, pieces)
        if generation.options.logprobs is None and generation.options.asked.prompt_logprobs is None:
            return exchange.raw_json(writer.body())
        return exchange.raw_json(await self._front.worked(writer.body))

    async def _stream(self, exchange: Exchange, generation: Generation, writer: Writer) -> web.StreamResponse:
        """The status is sent with the first piece: until then an error still is an error response."""
        response = _EventStream(headers={**exchange.headers, **_STREAM_HEADERS})
        with self._slow_readers.watch(exchange.request, generation) as watch:
            try:
                while True:
                    data = writer.render(await generation.advance())
                    if not response.prepared and (data or not generation.open):
                        await response.prepare(exchange.request)
                    watch.blocked_since = time.monotonic()
                    if not generation.open:
                        await response.write_eof(data + writer.last())
                        return response
                    if data:
                        await response.write(data)
                    watch.blocked_since = None
            except ApiError as error:
                generation.abort("error")
                if not response.prepared:
                    raise
                response.force_close()
                await response.write_eof(writer.error(error))
                return response


def _weight(body: bytearray) -> int:
    """The bytes of text that take as long as this body."""
    if len(body) <= HEAVY_BYTES and asks_for_grammar(body):
        return INLINE_BYTES + GRAMMAR_WEIGHT * len(body)
    if len(body) <= HEAVY_BYTES and holds_token_ids(body):
        return len(body) // IDS_PER_TEXT
    return len(body)


def _chat(body: bytes | bytearray, model: LoadedModel) -> Asked:
    return Asked(*prepare_chat(body, model), "chatcmpl-", lambda made: CompletionWriter(made, is_chat=True))


def _completion(body: bytes | bytearray, model: LoadedModel) -> Asked:
    return Asked(*prepare_completion(body, model), "cmpl-", lambda made: CompletionWriter(made, is_chat=False))


def _response(body: bytes | bytearray, model: LoadedModel) -> Asked:
    chat, asked = responses.chat_body(body)
    with _renamed(responses.RENAMED):
        options, prompts = prepare_chat(chat, model)
    return Asked(options, prompts, "resp_", lambda made: ResponseWriter(made, asked))


def _message(body: bytes | bytearray, model: LoadedModel, *, counts_only: bool = False) -> Asked:
    chat = messages_api.chat_body(body, counts_only=counts_only)
    with _renamed(messages_api.RENAMED):
        options, prompts = prepare_chat(chat, model)
    return Asked(options, prompts, "msg_", MessageWriter)


ANSWERS: Mapping[str, Prepare] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/v1/responses": _response,
    "/v1/messages": _message,
}


@contextlib.contextmanager
def _renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Errors name the field as the client wrote it."""
    try:
        yield
    except ApiError as error:
        error.message = _renamed_start(error.message, names)
        error.param = _renamed_start(error.param or "", names) or None
        raise


def _renamed_start(text: str, names: Mapping[str, str]) -> str:
    for ours, theirs in names.items():
        if found := re.match(rf"{ours}(?![a-z_])", text):
            return found.expand(theirs) + text[found.end() :]
    return text


class Watch:
    """One stream: since when its writer waits for the client."""

    def __init__(self, request: web.BaseRequest, generation: Generation) -> None:
        self._request = request
        self._generation = generation
        self.blocked_since: float | None = None

    def cut(self) -> None:
        """Resets the connection, so that the kernel drops what is unsent too; the task that writes is cancelled by that."""
        self._generation.abort("slow_reader")
        transport = self._request.transport
        if transport is not None:
            connection = transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            transport.abort()


class SlowReaders:
    """All streams under way. `sweep` is called every few seconds; an overflowing mailbox cuts at once."""

    def __init__(self) -> None:
        self._watches: set[Watch] = set()

    @contextlib.contextmanager
    def watch(self, request: web.BaseRequest, generation: Generation) -> Iterator[Watch]:
        watch = Watch(request, generation)
        generation.mailbox.on_overflow = watch.cut
        self._watches.add(watch)
        try:
            yield watch
        finally:
            generation.mailbox.on_overflow = None
            self._watches.discard(watch)

    def sweep(self) -> None:
        limit = time.monotonic() - MAX_BLOCKED_SECONDS
        for watch in [watch for watch in self._watches if watch.blocked_since is not None and watch.blocked_since < limit]:
            watch.cut()


class _EventStream(web.StreamResponse):
    _send_headers_immediately = False  # they go out with the first event, in one packet
