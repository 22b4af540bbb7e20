"""The endpoints that generate: a body in, one answer out, streamed or whole. Knows HTTP, and engines only by name."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from minserve.server import usage
from minserve.server.api_errors import ApiError
from minserve.server.bodies import BodyReader
from minserve.server.choice import Piece
from minserve.server.chunks import CHAT, COMPLETION, AnswerShape, ChunkWriter
from minserve.server.echo import echo_logprobs, echo_text
from minserve.server.exchange import Exchange
from minserve.server.front import Front
from minserve.server.generation import Generation, Prompt
from minserve.server.loaded_model import LoadedModel
from minserve.server.logprobs import LogprobFormat
from minserve.server.options import Options
from minserve.server.prompts import prepare_chat, prepare_completion
from minserve.server.slow_readers import SlowReaders
from minserve.server.whole_answers import WholeAnswer

INLINE_BYTES = 4096
"""Bodies up to here are decoded and tokenised where they are: a thread would cost more than it frees."""
_STREAM_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

Prepare = Callable[[bytes | bytearray, LoadedModel], tuple[Options, list[Prompt]]]


class GenerateEndpoints:
    """Chat and text completions."""

    def __init__(self, front: Front, bodies: BodyReader, slow_readers: SlowReaders) -> None:
        self._front = front
        self._bodies = bodies
        self._slow_readers = slow_readers

    async def chat_completions(self, exchange: Exchange) -> web.StreamResponse:
        return await self._answer(exchange, CHAT, prepare_chat)

    async def completions(self, exchange: Exchange) -> web.StreamResponse:
        return await self._answer(exchange, COMPLETION, prepare_completion)

    async def _answer(self, exchange: Exchange, shape: AnswerShape, prepare: Prepare) -> web.StreamResponse:
        with self._front.accepted() as model:
            options, prompts = await self._prepared(exchange, prepare, model)
            generation = Generation(shape, options, prompts, exchange.request_id, model, self._front.engines)
            with self._front.under_way(generation):
                if options.stream:
                    return await self._stream(exchange, generation)
                return await self._whole(exchange, generation)

    async def _prepared(self, exchange: Exchange, prepare: Prepare, model: LoadedModel) -> tuple[Options, list[Prompt]]:
        async with self._bodies.body(exchange.request) as body:
            if len(body) <= INLINE_BYTES:
                return prepare(body, model)
            return await self._front.off_loop(lambda: prepare(body, model), len(body))

    async def _whole(self, exchange: Exchange, generation: Generation) -> web.StreamResponse:
        answer = WholeAnswer(generation, _logprob_format(generation))
        while generation.open:
            for number, pieces in await generation.advance():
                answer.add(number, pieces)
        if generation.options.logprobs is None and generation.options.prompt_logprobs is None:
            return exchange.raw_json(answer.body())
        return exchange.raw_json(await self._front.off_loop(answer.body))

    async def _stream(self, exchange: Exchange, generation: Generation) -> web.StreamResponse:
        """The status is sent with the first piece: until then an error still is an error response."""
        response = _EventStream(headers={**exchange.headers, **_STREAM_HEADERS})
        events = _Events(generation)
        with self._slow_readers.watch(exchange.request, generation) as watch:
            try:
                while True:
                    data = events.render(await generation.advance())
                    if not response.prepared and (data or not generation.open):
                        await response.prepare(exchange.request)
                    watch.begin()
                    if not generation.open:
                        await response.write_eof(data + events.writer.last())
                        return response
                    if data:
                        await response.write(data)
                    watch.end()
            except ApiError as error:
                generation.abort("error")
                if not response.prepared:
                    raise
                response.force_close()
                await response.write_eof(events.writer.error(error))
                return response


class _EventStream(web.StreamResponse):
    _send_headers_immediately = False  # they go out with the first event, in one packet


class _Events:
    """Pieces of a generation as events, each choice opened before its first one."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._format = _logprob_format(generation)
        self.writer = ChunkWriter(
            generation.shape,
            generation.options,
            self._format,
            generation.id,
            generation.created,
            lambda: usage.encoded(generation.usage()),
        )
        self._echoed: dict[int, int] = {}  # choices that were opened, and the characters echoed before them

    def render(self, outputs: list[tuple[int, list[Piece]]]) -> bytes:
        parts: list[bytes] = []
        for number, pieces in outputs:
            offset = self._echoed.get(number)
            if offset is None:
                if not pieces and self._prompt_is_unread(number):
                    continue
                offset = self._echoed[number] = self._open(number, parts)
            for piece in pieces:
                parts.append(self.writer.piece(number, piece, offset))
        return b"".join(parts)

    def _prompt_is_unread(self, number: int) -> bool:
        """An echo with log-probabilities cannot be written before those of the prompt are there."""
        options = self._generation.options
        wanted = options.echo and options.logprobs is not None
        return wanted and self._generation.choices[number].prompt_logprobs is None

    def _open(self, number: int, parts: list[bytes]) -> int:
        generation = self._generation
        parts.append(self.writer.opening(number, generation.prompt_of(number).token_ids))
        if not generation.options.echo:
            return 0
        text = echo_text(generation, number)
        parts.append(self.writer.echo(number, text, echo_logprobs(generation, self._format, number)))
        return len(text)


def _logprob_format(generation: Generation) -> LogprobFormat:
    return LogprobFormat(generation.model.tokenizer, tokens_as_ids=generation.options.tokens_as_ids)
