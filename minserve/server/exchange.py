"""One HTTP request: its body read within limits, and how it is answered: JSON, errors, headers. Knows no endpoints."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from minserve import __version__
from minserve.server.api_errors import RETRY_AFTER_SECONDS, ApiError, bad_request

_LONGEST_REQUEST_ID = 256


@dataclasses.dataclass(frozen=True, slots=True)
class Exchange:
    """A request and the headers that its answer carries in any case."""

    request: web.BaseRequest
    request_id: str
    """What the client named the exchange; an own name when it gave none."""
    headers: dict[str, str]
    error_body: Callable[[ApiError], bytes] = ApiError.body
    """An error as clients of the endpoint's API read it."""

    def json(self, value: Any, status: int = 200) -> web.Response:
        return self.raw_json(msgspec.json.encode(value), status)

    def raw_json(self, body: bytes, status: int = 200) -> web.Response:
        return web.Response(body=body, status=status, headers=self.headers, content_type="application/json")

    def error(self, error: ApiError) -> web.Response:
        response = self.raw_json(self.error_body(error), error.status)
        if error.retry_after:
            response.headers["Retry-After"] = str(error.retry_after)
        if error.status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
        return response


def open_exchange(
    request: web.BaseRequest, cors_origins: tuple[str, ...], error_body: Callable[[ApiError], bytes] = ApiError.body
) -> Exchange:
    """Names the exchange and settles the headers of its answer."""
    given = request.headers.get("x-request-id", "")
    usable = 0 < len(given) <= _LONGEST_REQUEST_ID and given.isprintable() and given.isascii()
    request_id = given if usable else uuid.uuid4().hex
    headers = {"x-request-id": request_id, "Server": f"minserve/{__version__}"}
    origin = request.headers.get("Origin")
    if origin is not None and cors_origins:
        headers["Vary"] = "Origin"
        if "*" in cors_origins or origin in cors_origins:
            headers["Access-Control-Allow-Origin"] = "*" if "*" in cors_origins else origin
            headers["Access-Control-Expose-Headers"] = "x-request-id, Retry-After"
    return Exchange(request, request_id, headers, error_body)


def preflight(exchange: Exchange) -> web.Response:
    """The answer to a browser that asks what it may send."""
    asked = exchange.request.headers.get("Access-Control-Request-Headers", "authorization, content-type")
    allowed = {"Access-Control-Allow-Methods": "GET, POST, OPTIONS", "Access-Control-Allow-Headers": asked}
    return web.Response(status=204, headers={**exchange.headers, **allowed, "Access-Control-Max-Age": "600"})


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
        held = 0
        try:
            body = bytearray()  # grows in place: joining parts would copy tens of megabytes at once
            try:
                async with asyncio.timeout(READ_TIMEOUT_SECONDS):
                    while part := await request.content.readany():
                        held += len(part)
                        self._held += len(part)
                        if held > self._max_body:
                            raise self._too_large()
                        if self._held > self._max_held:
                            raise _too_many()
                        body += part
            except TimeoutError:
                raise ApiError(408, f"The body did not arrive within {READ_TIMEOUT_SECONDS:g} s") from None
            except (web.RequestPayloadError, HttpProcessingError) as error:
                raise bad_request(f"The body cannot be read: {error}", "body") from None
            yield body
        finally:
            self._held -= held

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The body is over the limit of {self._max_body} bytes", param="body", code="body_too_large")


def _too_many() -> ApiError:
    message = "Too many large bodies at once; try again later"
    return ApiError(429, message, code="bodies_too_large", retry_after=RETRY_AFTER_SECONDS)


def _check_type(request: web.BaseRequest) -> None:
    """Clients that name no type are believed to send JSON; any other type is not JSON."""
    if "Content-Type" not in request.headers:
        return
    kind = request.content_type
    if kind != "application/json" and not kind.endswith("+json"):
        raise bad_request(f"Content-Type is {kind[:80]!r}; it must be application/json", "Content-Type")
