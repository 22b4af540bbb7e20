"""Counts an answer's tokens the way OpenAI's `usage` shows them. Knows nothing of where the counts come from."""

from __future__ import annotations

import msgspec

_encoder = msgspec.json.Encoder()


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int = 0


class Usage(msgspec.Struct):
    """Prompts are counted once however many choices they have; tokens of all choices are summed."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int, reasoning_tokens: int = 0) -> Usage:
    return Usage(
        prompt_tokens,
        completion_tokens,
        prompt_tokens + completion_tokens,
        PromptTokensDetails(cached_tokens),
        CompletionTokensDetails(reasoning_tokens),
    )


def encoded(counts: Usage) -> bytes:
    """The `usage` object as JSON."""
    return _encoder.encode(counts)
