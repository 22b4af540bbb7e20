"""What the edge knows about the model that it serves, once an engine is ready, and the one rule of prompt lengths."""

from __future__ import annotations

import dataclasses

from minserve.server.api_errors import CONTEXT_LENGTH_EXCEEDED, bad_request


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The numbers and names that requests are checked against."""

    names: tuple[str, ...]
    """Served names; the first is the default."""
    root: str
    """What `--model` said."""
    created: int
    """Unix seconds."""
    vocab_size: int
    context_length: int
    """Most tokens of a prompt and its answer together."""
    stop_token_ids: tuple[int, ...]
    """The union of the EOS ids of config, generation_config and tokenizer."""

    @property
    def name(self) -> str:
        return self.names[0]


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
