"""Log-probabilities in the two shapes of OpenAI's API, and prompt log-probabilities in vLLM's. Knows no HTTP and no engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from minserve.request import TokenLogprobs
from minserve.server.detokenizer import Detokenizer
from minserve.server.tokenizer import Tokenizer

_LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


class LogprobFormat:
    """Names tokens and lays their log-probabilities out."""

    def __init__(self, tokenizer: Tokenizer, *, tokens_as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._tokens_as_ids = tokens_as_ids

    def token_name(self, token_id: int) -> str:
        r"""The token's text. Names stay apart: a part of a character is named by its bytes, `bytes:\xe2\x82`, and an id that
        only the model has by its number.
        """
        piece = self._tokenizer.token_bytes(token_id)
        if self._tokens_as_ids or not piece:
            return f"token_id:{token_id}"
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    def chat(self, entries: Sequence[TokenLogprobs], num_top: int) -> dict[str, Any]:
        """`{"content": [{token, logprob, bytes, top_logprobs}]}`, one for each token."""
        content = []
        for entry in entries:
            top = [self._chat_token(*pair) for pair in _top(entry, num_top)]
            content.append({**self._chat_token(entry.token_id, entry.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def completion(self, entries: Sequence[TokenLogprobs], offsets: Sequence[int], num_top: int) -> dict[str, list[Any]]:
        """`tokens`, `token_logprobs`, `top_logprobs` and `text_offset`, arrays of one length."""
        return {
            "tokens": [self.token_name(entry.token_id) for entry in entries],
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": [self._top_by_name(entry, num_top) for entry in entries],
            "text_offset": list(offsets),
        }

    def echoed_prompt(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], num_top: int, skip_special_tokens: bool
    ) -> dict[str, list[Any]]:
        """The completion shape for a prompt: the first token has no log-probability."""
        text = Detokenizer(self._tokenizer.pieces, skip_special_tokens=skip_special_tokens)
        offsets = []
        length = 0
        for token_id in token_ids:
            offsets.append(length)
            length += len(text.push(token_id))
        return {
            "tokens": [self.token_name(token_id) for token_id in token_ids],
            "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in entries],
            "top_logprobs": [None if entry is None else self._top_by_name(entry, num_top) for entry in entries],
            "text_offset": offsets,
        }

    def prompt(self, entries: Sequence[TokenLogprobs | None], num_top: int) -> list[dict[str, dict[str, Any]] | None]:
        """vLLM's `prompt_logprobs`: for each token but the first, token id to its log-probability, rank and text."""
        return [None if entry is None else self._by_id(entry, num_top) for entry in entries]

    def _by_id(self, entry: TokenLogprobs, num_top: int) -> dict[str, dict[str, Any]]:
        ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(_top(entry, num_top), 1)]
        ranked.append((entry.token_id, entry.logprob, entry.rank))
        return {
            str(token_id): {"logprob": _finite(logprob), "rank": rank, "decoded_token": self.token_name(token_id)}
            for token_id, logprob, rank in ranked
        }

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        piece = self._tokenizer.token_bytes(token_id)
        return {"token": self.token_name(token_id), "logprob": _finite(logprob), "bytes": list(piece)}

    def _top_by_name(self, entry: TokenLogprobs, num_top: int) -> dict[str, float]:
        """The likeliest tokens and the chosen one. Of two tokens with one name the likelier is shown, the chosen one always."""
        top: dict[str, float] = {}
        for token_id, logprob in _top(entry, num_top):
            top.setdefault(self.token_name(token_id), _finite(logprob))
        top[self.token_name(entry.token_id)] = _finite(entry.logprob)
        return top


def _top(entry: TokenLogprobs, num_top: int) -> list[tuple[int, float]]:
    return list(zip(entry.top_ids, entry.top_logprobs, strict=True))[:num_top]


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST
