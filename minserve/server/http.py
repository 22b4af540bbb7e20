"""HTTP itself: bodies within limits, keys, CORS, and every answer and fault as JSON. Knows nothing of what endpoints do."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler

from minserve import __version__
from minserve.config import Config
from minserve.server import messages_api
from minserve.server.api_errors import RETRY_AFTER_SECONDS, ApiError, bad_request

_LONGEST_REQUEST_ID = 256
_LONGEST_COMPLAINT = 300
"""Characters of what the HTTP parser says; it quotes what it was sent."""
_SERVER = f"minserve/{__version__}"


class Exchange:
    """A request and the headers that its answer carries in any case."""

    def __init__(self, request: web.BaseRequest, cors_origins: tuple[str, ...]) -> None:
        self.request = request
        self.path = re.sub("/{2,}", "/", request.path).rstrip("/") or "/"
        """Without the slashes that were one too many."""
        given = request.headers.get("x-request-id", "")
        usable = 0 < len(given) <= _LONGEST_REQUEST_ID and given.isprintable() and given.isascii()
        self.request_id = given if usable else uuid.uuid4().hex
        """What the client named the exchange; an own name when it gave none."""
        self.headers = {"x-request-id": self.request_id, "Server": _SERVER}
        self._is_anthropic = self.path.startswith("/v1/messages")
        if self._is_anthropic:
            self.headers["request-id"] = self.request_id
        origin = request.headers.get("Origin")
        if origin is not None and cors_origins:
            self.headers["Vary"] = "Origin"
            if "*" in cors_origins or origin in cors_origins:
                self.headers["Access-Control-Allow-Origin"] = "*" if "*" in cors_origins else origin
                self.headers["Access-Control-Expose-Headers"] = "x-request-id, Retry-After"

    def json(self, value: Any, status: int = 200) -> web.Response:
        return self.raw_json(msgspec.json.encode(value), status)

    def raw_json(self, body: bytes, status: int = 200) -> web.Response:
        return web.Response(body=body, status=status, headers=self.headers, content_type="application/json")

    def error(self, error: ApiError) -> web.Response:
        """As clients of the endpoint's API read it."""
        response = self.json(messages_api.told(error) if self._is_anthropic else error.told(), error.status)
        if error.retry_after:
            response.headers["Retry-After"] = str(error.retry_after)
        if error.status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
        return response

    def preflight(self) -> web.Response:
        """The answer to a browser that asks what it may send."""
        asked = self.request.headers.get("Access-Control-Request-Headers", "authorization, content-type")
        allowed = {"Access-Control-Allow-Methods": "GET, POST, OPTIONS", "Access-Control-Allow-Headers": asked}
        return web.Response(status=204, headers={**self.headers, **allowed, "Access-Control-Max-Age": "600"})


READ_TIMEOUT_SECONDS = 300.0
"""A body that takes longer to arrive is given up."""
BODIES_AT_ONCE = 4
"""Bodies of the largest size that may be held at the same time."""


class BodyReader:
    """Counts the bytes of all bodies from their first byte until they have become token ids."""

    def __init__(self, max_body_bytes: int) -> None:
        self._max_body = max_body_bytes
        self._max_held = BODIES_AT_ONCE * max_body_bytes
        self._held = 0

    @contextlib.asynccontextmanager
    async def body(self, request: web.BaseRequest) -> AsyncIterator[bytearray]:
        """A JSON body. Raises ApiError: 400 wrong type or broken encoding, 408 too slow, 413 too large, 429 too many at once."""
        _check_type(request)
        if (request.content_length or 0) > self._max_body:
            raise self._too_large()
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0
        body = bytearray()  # grows in place: joining parts would copy tens of megabytes at once
        try:
            try:
                async with asyncio.timeout(READ_TIMEOUT_SECONDS):
                    while part := await request.content.readany():
                        body += part
                        self._held += len(part)
                        if len(body) > self._max_body:
                            raise self._too_large()
                        if self._held > self._max_held:
                            message = "Too many large bodies at once; try again later"
                            raise ApiError(429, message, code="bodies_too_large", retry_after=RETRY_AFTER_SECONDS)
            except TimeoutError:
                raise ApiError(408, f"The body did not arrive within {READ_TIMEOUT_SECONDS:g} s") from None
            except (web.RequestPayloadError, HttpProcessingError) as error:
                raise bad_request(f"The body cannot be read: {error}", "body") from None
            yield body
        finally:
            self._held -= len(body)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The body is over the limit of {self._max_body} bytes", param="body", code="body_too_large")


def _check_type(request: web.BaseRequest) -> None:
    """Clients that name no type are believed to send JSON; any other type is not JSON."""
    kind = request.content_type
    if "Content-Type" in request.headers and kind != "application/json" and not kind.endswith("+json"):
        raise bad_request(f"Content-Type is {kind[:80]!r}; it must be application/json", "Content-Type")


log = logging.getLogger("minserve.server")

Endpoint = Callable[[Exchange], Awaitable[web.StreamResponse]]
Routes = Mapping[str, tuple[str, Endpoint]]
"""Path to method and endpoint."""
MODELS = "/v1/models/"
"""Stands for all paths below it: names of models may hold slashes."""


class HttpServer(web.Server):
    """aiohttp's low-level server with our dispatch; a client that leaves cancels the handler of its request."""

    def __init__(self, config: Config, routes: Routes, open_paths: frozenset[str]) -> None:
        """`open_paths`: asked without a key."""
        super().__init__(self._dispatch, handler_cancellation=True, access_log=None, logger=log)
        self._cors_origins = config.cors_origins
        self._keys = [key.encode() for key in config.api_key]
        self._routes = routes
        self._open_paths = open_paths

    def __call__(self) -> RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)

    async def _dispatch(self, request: web.BaseRequest) -> web.StreamResponse:
        exchange = Exchange(request, self._cors_origins)
        try:
            return await self._answer(exchange)
        except ApiError as error:
            return exchange.error(error)
        except ConnectionError:
            raise
        except Exception:
            log.exception("a request failed (x-request-id %s, %s %s)", exchange.request_id, request.method, request.path)
            return exchange.error(ApiError(500, f"Internal error; its record is under x-request-id {exchange.request_id}"))

    async def _answer(self, exchange: Exchange) -> web.StreamResponse:
        request, path = exchange.request, exchange.path
        if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers and self._cors_origins:
            return exchange.preflight()
        if self._keys and path not in self._open_paths:
            self._check_key(request)
        route = self._routes.get(path) or self._routes.get(MODELS if path.startswith(MODELS) else "")
        if route is None:
            raise ApiError(404, f"There is no endpoint {path[:200]!r}", code="unknown_path")
        method, endpoint = route
        if request.method != method and not (request.method == "HEAD" and method == "GET"):
            exchange.headers["Allow"] = method
            message = f"{path} answers {method}, not {request.method[:20]}"
            raise ApiError(405, message, code="method_not_allowed")
        return await endpoint(exchange)

    def _check_key(self, request: web.BaseRequest) -> None:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if "x-api-key" in request.headers:  # as Anthropic's clients send it
            scheme, given = "bearer", request.headers["x-api-key"]
        sent = given.strip().encode("utf-8", "replace")
        matches = [hmac.compare_digest(sent, key) for key in self._keys]  # all of them: the time must not tell which
        if scheme.lower() != "bearer" or not any(matches):
            message = "The API key is missing or wrong; send it as 'Authorization: Bearer KEY'"
            raise ApiError(401, message, code="invalid_api_key")


class _Connection(RequestHandler):
    """One connection. Bytes that are no HTTP are answered in JSON too."""

    __slots__ = ()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        if isinstance(exc, ConnectionError):
            raise exc  # the client has gone: nobody is left to be answered
        if status >= 500:
            log.error("a connection failed", exc_info=exc)
            message = "Internal error"
        if request.writer.output_size > 0:
            raise ConnectionError("an answer was begun and cannot be taken back")
        error = ApiError(status, f"The request cannot be understood: {(message or '')[:_LONGEST_COMPLAINT]}", param="http")
        response = web.Response(
            body=msgspec.json.encode(error.told()), status=status, headers={"Server": _SERVER}, content_type="application/json"
        )
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """A body that cannot be decoded fails once more when its rest is skipped; its client has been told."""
        if not isinstance(kw.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **kw)
