"""One HTTP request and how it is answered: JSON, errors, headers that every answer carries. Knows no endpoints."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from minserve import __version__
from minserve.server.api_errors import ApiError

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
