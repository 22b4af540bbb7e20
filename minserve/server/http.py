"""HTTP itself: paths to endpoints, keys, CORS, and every fault as JSON. Knows nothing of what endpoints do."""

from __future__ import annotations

import functools
import hmac
import logging
import re
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from minserve.server import messages_api
from minserve.server.admin import AdminEndpoints
from minserve.server.api_errors import ApiError
from minserve.server.exchange import BodyReader, Exchange, open_exchange, preflight
from minserve.server.front import Front
from minserve.server.generate import ANSWERS, GenerateEndpoints, SlowReaders
from minserve.server.page import Page

log = logging.getLogger("minserve.server")

_OPEN_PATHS = frozenset({"/health", "/ready", "/version"})
"""Asked without a key, by probes and balancers."""
_SLASHES = re.compile("/{2,}")

Endpoint = Callable[[Exchange], Awaitable[web.StreamResponse]]


class HttpServer(web.Server):
    """aiohttp's low-level server with our dispatch; a client that leaves cancels the handler of its request."""

    def __init__(self, front: Front, slow_readers: SlowReaders) -> None:
        super().__init__(self._dispatch, handler_cancellation=True, access_log=None, logger=log)
        self._cors_origins = front.config.cors_origins
        self._keys = [key.encode() for key in front.config.api_key]
        bodies = BodyReader(front.config.max_body_bytes)
        self._admin = AdminEndpoints(front, bodies)
        self._page = Page()
        self._open_paths = _OPEN_PATHS | self._page.paths
        self._routes = _routes(GenerateEndpoints(front, bodies, slow_readers), self._admin)

    def __call__(self) -> RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)

    async def _dispatch(self, request: web.BaseRequest) -> web.StreamResponse:
        path = _SLASHES.sub("/", request.path).rstrip("/") or "/"
        is_anthropic = path.startswith("/v1/messages")
        exchange = open_exchange(request, self._cors_origins, messages_api.error_body if is_anthropic else ApiError.body)
        if is_anthropic:
            exchange.headers["request-id"] = exchange.request_id
        try:
            return await self._answer(exchange, path)
        except ApiError as error:
            return exchange.error(error)
        except ConnectionError:
            raise
        except Exception:
            log.exception("a request failed (x-request-id %s, %s %s)", exchange.request_id, request.method, request.path)
            return exchange.error(ApiError(500, f"Internal error; its record is under x-request-id {exchange.request_id}"))

    async def _answer(self, exchange: Exchange, path: str) -> web.StreamResponse:
        request = exchange.request
        if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers and self._cors_origins:
            return preflight(exchange)
        if self._keys and path not in self._open_paths:
            self._check_key(request)
        method, endpoint = self._routes.get(path, ("GET", None))
        if path.startswith("/v1/models/"):
            endpoint = functools.partial(self._admin.model, name=path.removeprefix("/v1/models/"))
        elif path in self._page.paths:
            endpoint = functools.partial(self._page.file, path=path)
        if endpoint is None:
            raise ApiError(404, f"There is no endpoint {path[:200]!r}", code="unknown_path")
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
        error = ApiError(status, f"The request cannot be understood: {message}", param="http")
        response = web.Response(body=error.body(), status=status, content_type="application/json")
        response.force_close()
        return response


def _routes(generate: GenerateEndpoints, admin: AdminEndpoints) -> dict[str, tuple[str, Endpoint]]:
    """Path to method and endpoint."""
    return {
        "/health": ("GET", admin.health),
        "/ready": ("GET", admin.ready),
        "/version": ("GET", admin.version),
        "/metrics": ("GET", admin.metrics),
        "/server_info": ("GET", admin.server_info),
        "/v1/models": ("GET", admin.models),
        **{path: ("POST", generate.answering(prepare)) for path, prepare in ANSWERS.items()},
        "/v1/messages/count_tokens": ("POST", generate.count_tokens),
        "/tokenize": ("POST", admin.tokenize),
        "/detokenize": ("POST", admin.detokenize),
        "/abort_request": ("POST", admin.abort_request),
        **{f"/{name}": ("POST", admin.control(name)) for name in ("flush_cache", "start_profile", "stop_profile")},
    }
