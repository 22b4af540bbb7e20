"""The one error that clients see, and its JSON body. Knows nothing of sockets or of what went wrong inside."""

from __future__ import annotations

from typing import Any

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
RETRY_AFTER_SECONDS = 5
"""What clients are told to wait while the server loads, drains or is full."""

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    499: "request_aborted",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """A fault told to the client: an HTTP status and a sentence; `param` names the field that is wrong."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after: int = 0):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after
        """Seconds for the Retry-After header; 0 sends none."""

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "server_error")

    def told(self) -> dict[str, Any]:
        """The JSON body."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None, code: str | None = None) -> ApiError:
    """Input that can never succeed: status 400, which clients do not retry."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, code: str) -> ApiError:
    """A server that cannot serve now but may soon: status 503 with Retry-After."""
    return ApiError(503, message, code=code, retry_after=RETRY_AFTER_SECONDS)
