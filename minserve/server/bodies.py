"""Reads request bodies within limits: of one body, and of all bodies that are held at once. Knows nothing of what they say."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from minserve.server.api_errors import RETRY_AFTER_SECONDS, ApiError, bad_request

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
