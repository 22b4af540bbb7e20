"""Chat and text completions as OpenAI's clients read them: server-sent events, or one body. Knows no sockets and no engines."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import msgspec

from minserve.request import TokenLogprobs
from minserve.server.answer_format import CallDelta, Part, Reasoning
from minserve.server.api_errors import ApiError
from minserve.server.detokenizer import Detokenizer
from minserve.server.generation import Choice, Generation, Piece
from minserve.server.tokenizer import Tokenizer

_DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class CompletionWriter:
    """One answer. Pieces become events put together from ready-made bytes, or are collected for one body."""

    def __init__(self, generation: Generation, *, is_chat: bool) -> None:
        options = generation.options
        self._generation = generation
        self._options = options
        self._asked = options.asked
        self._is_chat = is_chat
        self._logprobs = LogprobFormat(generation.model.tokenizer, tokens_as_ids=options.asked.return_tokens_as_token_ids)
        self._collected: list[list[Piece]] = [[] for _ in generation.choices]
        self._echoed: dict[int, int] = {}  # choices that were opened, and the characters echoed before them
        self._head = {
            "id": generation.id,
            "object": "chat.completion.chunk" if is_chat else "text_completion",
            "created": generation.created,
            "model": options.model,
        }
        self._data = b"data: " + _encode(self._head)[:-1]
        self._opens = [self._data + b',"choices":[{"index":%d,' % index for index in range(len(generation.choices))]
        self._text_open, self._text_close = (b'"delta":{"content":', b"}") if is_chat else (b'"text":', b"")
        self._text_opens = [opened + self._text_open for opened in self._opens]
        self._bare_close = self._text_close + b',"logprobs":null,"finish_reason":null}]'
        self._bare_close += b',"usage":null}\n\n' if self._asked.stream_options.include_usage else b"}\n\n"
        self._bare = options.logprobs is None and not self._asked.return_token_ids  # nothing rides on a piece of text
        self._bare_chunks = self._bare and not self._asked.stream_options.continuous_usage_stats

    def render(self, outputs: list[tuple[int, list[Piece]]]) -> bytes:
        """The events of new pieces, each choice opened before its first one."""
        parts: list[bytes] = []
        for number, pieces in outputs:
            offset = self._echoed.get(number)
            if offset is None:
                wants_prompt = self._options.echo and self._options.logprobs is not None
                if wants_prompt and not pieces and self._generation.choices[number].prompt_logprobs is None:
                    continue  # the log-probabilities of the prompt come first
                offset = self._echoed[number] = self._open(number, parts)
            for piece in pieces:
                if self._bare_chunks and piece.text and not piece.aside and piece.finish_reason is None:
                    parts.append(self._text_opens[number] + _encode(piece.text) + self._bare_close)
                else:
                    self._add_chunks(number, piece, offset, parts)
        return b"".join(parts)

    def last(self) -> bytes:
        """After all choices: the usage chunk when it was asked for, and the end mark."""
        if not self._asked.stream_options.include_usage:
            return _DONE
        return self._data + b',"choices":[],"usage":' + _encode(self._generation.usage().told()) + b"}\n\n" + _DONE

    def error(self, error: ApiError) -> bytes:
        """Told in the stream, since the status has been sent; no end mark follows."""
        return b"data: " + _encode(error.told()) + b"\n\n"

    def add(self, number: int, pieces: list[Piece]) -> None:
        self._collected[number] += pieces

    def body(self) -> bytes:
        generation = self._generation
        answer: dict[str, Any] = {
            **self._head,
            "object": "chat.completion" if self._is_chat else "text_completion",
            "choices": [self._choice(index, number) for index, number in enumerate(self._best())],
            "usage": generation.usage().told(),
        }
        if self._is_chat:
            if self._asked.prompt_logprobs is not None:
                answer["prompt_logprobs"] = self._prompt_logprobs(generation.choices[0])
            if self._asked.return_token_ids:
                answer["prompt_token_ids"] = generation.prompts[0].token_ids
        return _encode(answer)

    def _open(self, number: int, parts: list[bytes]) -> int:
        """What comes before a choice's text: chat's role, the prompt's ids, the echo. Characters of the echo."""
        ids = self._generation.prompt_of(number).token_ids
        beside = b',"prompt_token_ids":' + _encode(ids) if self._asked.return_token_ids else b""
        if self._is_chat:
            parts.append(self._chunk(number, b'"delta":{"role":"assistant","content":""}', beside=beside))
        elif beside:
            parts.append(self._chunk(number, b'"text":""', in_choice=b',"token_ids":[]' + beside))
        if not self._options.echo:
            return 0
        text = self._echo_text(number)
        parts.append(self._chunk(number, b'"text":' + _encode(text), _encode(self._echo_logprobs(number))))
        return len(text)

    def _add_chunks(self, number: int, piece: Piece, offset: int, parts: list[bytes]) -> None:
        """What is new and, at the end of a choice, its last chunk. `offset`: characters echoed before the answer."""
        logprobs, ids = b"null", b""
        if not self._bare:
            logprobs = _encode(self._shown_logprobs([piece], offset) if piece.logprobs else None)
            ids = b',"token_ids":' + _encode(piece.token_ids) if self._asked.return_token_ids else b""
        for part in piece.in_order():
            parts.append(self._chunk(number, self._content(part), logprobs, in_choice=ids))
            logprobs, ids = b"null", b',"token_ids":[]' if self._asked.return_token_ids else b""
        if piece.finish_reason is not None:
            nothing = b'"delta":{}' if self._is_chat else b'"text":""'
            parts.append(self._chunk(number, nothing, logprobs, b'"%b"' % piece.finish_reason.encode(), ids))

    def _content(self, part: Part) -> bytes:
        if isinstance(part, str):
            return self._text_open + _encode(part) + self._text_close
        if isinstance(part, Reasoning):
            delta: dict[str, Any] = {"reasoning_content": part.text, "reasoning": part.text}
        elif part.name is None:
            delta = {"tool_calls": [{"index": part.number, "function": {"arguments": part.arguments}}]}
        else:
            function = {"name": part.name, "arguments": part.arguments}
            delta = {"tool_calls": [{"index": part.number, "id": part.call_id, "type": "function", "function": function}]}
        return b'"delta":' + _encode(delta)

    def _chunk(
        self,
        number: int,
        content: bytes,
        logprobs: bytes = b"null",
        finish_reason: bytes = b"null",
        in_choice: bytes = b"",
        beside: bytes = b"",
    ) -> bytes:
        usage = b""
        if self._asked.stream_options.continuous_usage_stats:
            usage = b',"usage":' + _encode(self._generation.usage().told())
        elif self._asked.stream_options.include_usage:
            usage = b',"usage":null'
        ends = (b',"logprobs":', logprobs, b',"finish_reason":', finish_reason, in_choice, b"}]", beside, usage, b"}\n\n")
        return b"".join((self._opens[number], content, *ends))

    def _best(self) -> list[int]:
        """The choices to show: of each prompt the `n` with the highest mean log-probability, likeliest first."""
        options, choices = self._options, self._generation.choices
        shown: list[int] = []
        for start in range(0, len(choices), options.best_of):
            numbers = list(range(start, start + options.best_of))
            if options.best_of > self._asked.n:
                numbers.sort(key=lambda number: -choices[number].sum_logprobs / max(1, choices[number].num_tokens))
            shown += numbers[: self._asked.n]
        return shown

    def _choice(self, index: int, number: int) -> dict[str, Any]:
        is_chat = self._is_chat
        choice, pieces = self._generation.choices[number], self._collected[number]
        text = "".join(piece.text for piece in pieces)
        echo = "" if is_chat else self._echo_text(number)
        made: dict[str, Any] = {"index": index}
        if is_chat:
            made["message"] = _message(text, [part for piece in pieces for part in piece.aside])
        else:
            made["text"] = echo + text
        made["logprobs"] = self._shown_logprobs(pieces, len(echo))
        if made["logprobs"] is not None and (prompt := self._echo_logprobs(number)) is not None:
            made["logprobs"] = {name: prompt[name] + made["logprobs"][name] for name in prompt}
        made["finish_reason"] = choice.finish_reason
        if not is_chat and self._asked.prompt_logprobs is not None:
            made["prompt_logprobs"] = self._prompt_logprobs(choice)
        if self._asked.return_token_ids:
            made["token_ids"] = [token_id for piece in pieces for token_id in piece.token_ids]
            if not is_chat:
                made["prompt_token_ids"] = self._generation.prompt_of(number).token_ids
        return made

    def _shown_logprobs(self, pieces: list[Piece], offset: int) -> dict[str, Any] | None:
        num_top = self._options.logprobs
        if num_top is None:
            return None
        entries = [entry for piece in pieces for entry in piece.logprobs]
        if self._is_chat:
            return self._logprobs.chat(entries, num_top)
        offsets = [offset + start for piece in pieces for start in piece.offsets]
        return self._logprobs.completion([entry.token_id for entry in entries], entries, offsets, num_top)

    def _prompt_logprobs(self, choice: Choice) -> list[dict[str, dict[str, Any]] | None]:
        return self._logprobs.prompt(choice.prompt_logprobs or (), self._asked.prompt_logprobs or 0)

    def _echo_text(self, number: int) -> str:
        """The prompt as it is given back before choice `number`; nothing without echo."""
        prompt = self._generation.prompt_of(number)
        if not self._options.echo:
            return ""
        if prompt.text is not None:
            return prompt.text
        return self._generation.model.tokenizer.decode(prompt.token_ids, self._asked.skip_special_tokens)

    def _echo_logprobs(self, number: int) -> dict[str, list[Any]] | None:
        """The prompt's part of the logprobs arrays; None unless the request echoes and asks for log-probabilities."""
        options, entries = self._options, self._generation.choices[number].prompt_logprobs
        if not options.echo or options.logprobs is None or entries is None:
            return None
        ids = self._generation.prompt_of(number).token_ids
        text = Detokenizer(self._generation.model.tokenizer.pieces, skip_special_tokens=self._asked.skip_special_tokens)
        ends = list(itertools.accumulate(len(text.push(token_id)) for token_id in ids))
        return self._logprobs.completion(ids, entries, [0, *ends[:-1]], options.logprobs)


def _message(text: str, asides: list[Reasoning | CallDelta]) -> dict[str, Any]:
    """The assistant's message. Its content is null where there is nothing but calls."""
    reasoning = "".join(part.text for part in asides if isinstance(part, Reasoning))
    calls: list[dict[str, Any]] = []
    deltas = [part for part in asides if isinstance(part, CallDelta)]
    for _, (first, *rest) in itertools.groupby(deltas, lambda part: part.number):
        function = {"name": first.name, "arguments": "".join(part.arguments for part in rest)}
        calls.append({"id": first.call_id, "type": "function", "function": function})
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
    if reasoning:
        message |= {"reasoning_content": reasoning, "reasoning": reasoning}
    if calls:
        message["tool_calls"] = calls
    return message


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

    def completion(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], offsets: Sequence[int], num_top: int
    ) -> dict[str, list[Any]]:
        """`tokens`, `token_logprobs`, `top_logprobs` and `text_offset`, arrays of one length. A prompt's first token has none."""
        return {
            "tokens": [self.token_name(token_id) for token_id in token_ids],
            "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in entries],
            "top_logprobs": [None if entry is None else self._top_by_name(entry, num_top) for entry in entries],
            "text_offset": list(offsets),
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
