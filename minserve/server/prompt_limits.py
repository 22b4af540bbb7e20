"""The one rule of prompt lengths and its error. Knows nothing of how tokens are counted."""

from __future__ import annotations

from minserve.server.api_errors import CONTEXT_LENGTH_EXCEEDED, bad_request


def check_length(num_tokens: int, context_length: int, param: str, *, at_least: bool = False) -> None:
    """Raises ApiError for a prompt that leaves no room for one answer token; `at_least` says that the count is a bound."""
    if num_tokens < context_length:
        return
    counted = f"at least {num_tokens}" if at_least else f"{num_tokens}"
    message = (
        f"This model's context length is {context_length} tokens; the prompt has {counted} tokens "
        f"and must leave room for at least one more. Please shorten the prompt."
    )
    raise bad_request(message, param, CONTEXT_LENGTH_EXCEEDED)
