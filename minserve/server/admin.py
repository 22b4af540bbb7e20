"""The endpoints that do not generate: health, models, tokenising, metrics, control, and the page. Knows engines only by name."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from minserve import __version__
from minserve import config as configuration
from minserve.messages import Call, encode_body
from minserve.server import metrics, openai
from minserve.server.api_errors import ApiError, bad_request, unavailable
from minserve.server.fields import RawFields, Reader, decode_object, decode_value
from minserve.server.front import Front
from minserve.server.generation import LoadedModel
from minserve.server.http import MODELS, BodyReader, Exchange
from minserve.server.options import check_vocabulary, unknown_model
from minserve.server.prompts import render

TOKENIZED_BYTES, TOKENIZED_BYTES_PER_TOKEN = 1 << 20, 8
"""/tokenize takes texts of so many bytes, or of so many for each token of the context if that is more."""

_SCRAPE_WAITS = 1.0
"""Seconds that /metrics gives engines for what only they know."""


class _TokenizeFields(msgspec.Struct):
    prompt: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class _DetokenizeFields(msgspec.Struct):
    tokens: list[int] | None = None
    skip_special_tokens: bool = False


class _AbortFields(msgspec.Struct):
    request_id: str | None = None
    rid: str | None = None
    abort_all: bool = False


_tokenize, _detokenize, _abort = Reader(_TokenizeFields), Reader(_DetokenizeFields), Reader(_AbortFields)


class AdminEndpoints:
    def __init__(self, front: Front, bodies: BodyReader) -> None:
        self._front = front
        self._bodies = bodies

    async def health(self, exchange: Exchange) -> web.StreamResponse:
        """Alive: this process answers and no engine is stuck. A model that loads is alive."""
        self._front.check_health()
        return exchange.json({"status": "ok", "phase": self._front.phase})

    async def ready(self, exchange: Exchange) -> web.StreamResponse:
        """Requests are welcome: neither loading nor draining, and alive."""
        if self._front.phase == "draining":
            raise unavailable("The server is shutting down", "draining")
        self._front.loaded()
        self._front.check_health()
        return exchange.json({"status": "ready"})

    async def version(self, exchange: Exchange) -> web.StreamResponse:
        return exchange.json({"version": __version__})

    async def metrics(self, exchange: Exchange) -> web.StreamResponse:
        own = self._front.loaded().metrics
        page = own.page(await self._front.siblings.ask("metrics"), metrics.imbalance(await self._expert_loads()))
        return web.Response(body=page, headers={**exchange.headers, "Content-Type": metrics.CONTENT_TYPE})

    async def _expert_loads(self) -> list[dict[str, list[int]]]:
        """Of each rank, layer to counts; none where one rank has all experts, or while an engine does not answer."""
        engines = self._front.engines
        if len(engines.engines) > 1:
            with contextlib.suppress(ApiError, TimeoutError):
                async with asyncio.timeout(_SCRAPE_WAITS):
                    return [now["expert_load"] for now in await engines.call_all("server_info")]
        return []

    async def models(self, exchange: Exchange) -> web.StreamResponse:
        model = self._front.loaded()
        return exchange.json({"object": "list", "data": [_card(model, name) for name in model.facts.names]})

    async def model(self, exchange: Exchange) -> web.StreamResponse:
        model, name = self._front.loaded(), exchange.path.removeprefix(MODELS)
        if name not in model.facts.names:
            raise unknown_model(name, model.facts)
        return exchange.json(_card(model, name))

    async def server_info(self, exchange: Exchange) -> web.StreamResponse:
        """The effective settings, and of each rank what it said at its start and what it says now."""
        model = self._front.loaded()
        now = await self._front.engines.call_all("server_info")
        told = zip(model.ranks, now, strict=True)
        ranks = [{"rank": rank, **msgspec.structs.asdict(ready), "now": live} for rank, (ready, live) in enumerate(told)]
        settings = configuration.printable(self._front.config)
        answer = {"version": __version__, "phase": self._front.phase, "config": settings, "ranks": ranks}
        return exchange.json({**answer, "context_length": model.facts.context_length, "served": model.facts.names})

    async def tokenize(self, exchange: Exchange) -> web.StreamResponse:
        """`{"prompt"}` or `{"messages"}` to `{"tokens", "count", "max_model_len"}`."""

        def work(fields: RawFields, model: LoadedModel) -> dict[str, Any]:
            asked, param = _tokenize.read(fields), "messages" if "messages" in fields else "prompt"
            text = render(openai.parse_conversation(fields), model) if param == "messages" else asked.prompt
            if text is None:
                raise bad_request("prompt or messages is required", "prompt")
            _check_size(text, model, param)
            tokens = model.tokenizer.encode(text, asked.add_special_tokens)
            strings = list(map(model.tokenizer.token_text, tokens)) if asked.return_token_strs else None
            return {"tokens": tokens, "count": len(tokens), "max_model_len": model.facts.context_length, "token_strs": strings}

        return await self._worked(exchange, work)

    async def detokenize(self, exchange: Exchange) -> web.StreamResponse:
        """`{"tokens"}` to `{"prompt"}`."""

        def work(fields: RawFields, model: LoadedModel) -> dict[str, Any]:
            asked = _detokenize.read(fields)
            if asked.tokens is None:
                raise bad_request("tokens is required", "tokens")
            check_vocabulary(asked.tokens, "tokens", model.facts)
            return {"prompt": model.tokenizer.decode(asked.tokens, asked.skip_special_tokens)}

        return await self._worked(exchange, work)

    async def _worked(self, exchange: Exchange, work: Callable[[RawFields, LoadedModel], dict[str, Any]]) -> web.StreamResponse:
        """What is made of a body's fields, of a large one in a thread."""
        model = self._front.loaded()
        async with self._bodies.body(exchange.request) as body:
            return exchange.json(await self._front.worked(lambda: work(decode_object(body), model), len(body)))

    async def abort_request(self, exchange: Exchange) -> web.StreamResponse:
        """Ends answers by `request_id` (an answer's id, or the x-request-id it was asked with), or all with `abort_all`."""
        self._front.loaded()
        async with self._bodies.body(exchange.request) as body:
            asked = _abort.read(decode_object(body))
        wanted = asked.request_id or asked.rid
        if not wanted and not asked.abort_all:
            raise bad_request("request_id is required", "request_id")
        wanted = None if asked.abort_all else wanted
        elsewhere = await self._front.siblings.ask("abort", wanted)
        return exchange.json({"aborted": self._front.abort(wanted) + sum(map(int, elsewhere))})

    def control(self, method: str) -> Callable[[Exchange], Awaitable[web.StreamResponse]]:
        """Passes a control call on to every engine; its body, if any, is the arguments."""

        async def call(exchange: Exchange) -> web.StreamResponse:
            self._front.loaded()
            arguments: dict[str, Any] = {}
            if exchange.request.body_exists:
                async with self._bodies.body(exchange.request) as body:
                    if body.strip() and decode_object(body):
                        arguments = decode_value(body, "body")
            _check_sendable(method, arguments)
            return exchange.json({"success": True, "ranks": await self._front.engines.call_all(method, arguments)})

        return call


def _check_sendable(method: str, arguments: dict[str, Any]) -> None:
    """Raises ApiError for what JSON can say and a message to an engine cannot: large integers, deep nesting, half characters."""
    try:
        encode_body(Call(0, method, arguments))
    except (OverflowError, RecursionError, ValueError) as error:
        raise bad_request(f"The arguments cannot be passed on to an engine: {error}", "body") from None


def _card(model: LoadedModel, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.facts.created,
        "owned_by": "minserve",
        "root": model.facts.root,
        "max_model_len": model.facts.context_length,
    }


def _check_size(text: str, model: LoadedModel, param: str) -> None:
    """Raises ApiError for a text whose tokens would fill the memory and, as one list, hold up every other request."""
    limit = max(TOKENIZED_BYTES, TOKENIZED_BYTES_PER_TOKEN * model.facts.context_length)
    num_bytes = len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
    if num_bytes > limit:
        raise bad_request(f"{param} has {num_bytes} bytes of text; {limit} can be tokenized at once", param)


PAGE_DIRECTORY = Path(__file__).parent / "web"

_PAGE_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Page:
    """Answers without a key: the files say nothing of the server, and what they ask it needs the key."""

    def __init__(self) -> None:
        files = [file for file in PAGE_DIRECTORY.iterdir() if file.suffix in _PAGE_TYPES]
        self.files = {
            "/" if file.name == "index.html" else f"/web/{file.name}": (file.suffix, file.read_bytes()) for file in files
        }
        """By path."""

    async def file(self, exchange: Exchange) -> web.StreamResponse:
        suffix, body = self.files[exchange.path]
        tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
        headers = {**exchange.headers, **_PAGE_HEADERS, "ETag": tag}
        if exchange.request.headers.get("If-None-Match") == tag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=body, headers=headers, content_type=_PAGE_TYPES[suffix], charset="utf-8")
