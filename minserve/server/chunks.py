"""Server-sent events of a streamed answer, put together from ready-made bytes. Knows nothing of sockets or engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from minserve.request import TokenLogprobs
from minserve.server.answer_format import CallDelta, Reasoning
from minserve.server.api_errors import ApiError
from minserve.server.choice import Piece
from minserve.server.logprobs import LogprobFormat
from minserve.server.options import Options

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerShape:
    """What tells chat answers from text completions."""

    id_prefix: str
    whole_object: str
    chunk_object: str
    text_open: bytes
    """JSON before a piece of text within a choice; `text_close` follows it."""
    text_close: bytes
    no_text: bytes
    """Stands in the choice's last chunk."""
    is_chat: bool


CHAT = AnswerShape(
    "chatcmpl-", "chat.completion", "chat.completion.chunk", b'"delta":{"content":', b"}", b'"delta":{}', is_chat=True
)
COMPLETION = AnswerShape("cmpl-", "text_completion", "text_completion", b'"text":', b"", b'"text":""', is_chat=False)


class ChunkWriter:
    """The events of one answer. `usage` is called for the counts so far when each chunk is to carry them."""

    def __init__(
        self,
        shape: AnswerShape,
        options: Options,
        logprob_format: LogprobFormat,
        answer_id: str,
        created: int,
        usage: Callable[[], bytes],
    ) -> None:
        self._shape = shape
        self._options = options
        self._logprobs = logprob_format
        self._usage = usage
        head = {"id": answer_id, "object": shape.chunk_object, "created": created, "model": options.model}
        self._head = b"data: " + _encode(head)[:-1]
        self._opens: dict[int, bytes] = {}
        self._plain = options.logprobs is None and not options.return_token_ids
        self._text_opens: dict[int, bytes] = {}
        self._text_close = shape.text_close + b',"logprobs":null,"finish_reason":null}]'
        self._text_close += b',"usage":null}\n\n' if options.include_usage else b"}\n\n"

    def opening(self, index: int, prompt_ids: list[int]) -> bytes:
        """The chat's role chunk; for completions nothing, unless there is something to say before the first token."""
        wanted = self._options.return_token_ids
        if self._shape.is_chat:
            beside = b',"prompt_token_ids":' + _encode(prompt_ids) if wanted else b""
            return self._chunk(index, b'"delta":{"role":"assistant","content":""}', b"null", b"null", b"", beside)
        if not wanted:
            return b""
        return self._chunk(index, b'"text":""', b"null", b"null", b',"token_ids":[],"prompt_token_ids":' + _encode(prompt_ids))

    def echo(self, index: int, text: str, logprobs: dict[str, Any] | None) -> bytes:
        """The prompt, given back before the answer."""
        return self._chunk(index, b'"text":' + _encode(text), _encode(logprobs), b"null", b"")

    def piece(self, index: int, piece: Piece, offset: int) -> bytes:
        """What is new and, at the end of a choice, its last chunk. `offset`: characters echoed before the answer."""
        if self._plain and piece.text and not piece.aside and piece.finish_reason is None and not self._options.continuous_usage:
            return self._text_open(index) + _encode(piece.text) + self._text_close
        made = b""
        extras = (b"null", b"") if self._plain else self._extras(piece, offset)
        contents = [_reasoning(part) for part in piece.aside if isinstance(part, Reasoning)]
        if piece.text:
            contents.append(self._shape.text_open + _encode(piece.text) + self._shape.text_close)
        contents += [_call(part) for part in piece.aside if isinstance(part, CallDelta)]
        for content in contents:
            made += self._chunk(index, content, extras[0], b"null", extras[1])
            extras = (b"null", b',"token_ids":[]' if self._options.return_token_ids else b"")
        if piece.finish_reason is None:
            return made
        return made + self._chunk(index, self._shape.no_text, extras[0], b'"' + piece.finish_reason.encode() + b'"', extras[1])

    def last(self) -> bytes:
        """After all choices: the usage chunk when it was asked for, and the end mark."""
        if not self._options.include_usage:
            return DONE
        return self._head + b',"choices":[],"usage":' + self._usage() + b"}\n\n" + DONE

    def error(self, error: ApiError) -> bytes:
        """Told in the stream, since the status has been sent; no end mark follows."""
        return b"data: " + error.body() + b"\n\n"

    def _text_open(self, index: int) -> bytes:
        """All of a chunk that comes before a piece of text."""
        opened = self._text_opens.get(index)
        if opened is None:
            opened = self._text_opens[index] = self._head + b',"choices":[{"index":%d,' % index + self._shape.text_open
        return opened

    def _chunk(
        self, index: int, content: bytes, logprobs: bytes, finish_reason: bytes, in_choice: bytes, beside: bytes = b""
    ) -> bytes:
        opened = self._opens.get(index)
        if opened is None:
            opened = self._opens[index] = self._head + b',"choices":[{"index":%d,' % index
        parts = [opened, content, b',"logprobs":', logprobs, b',"finish_reason":', finish_reason, in_choice, b"}]", beside]
        if self._options.continuous_usage:
            parts += (b',"usage":', self._usage(), b"}\n\n")
        elif self._options.include_usage:
            parts.append(b',"usage":null}\n\n')
        else:
            parts.append(b"}\n\n")
        return b"".join(parts)

    def _extras(self, piece: Piece, offset: int) -> tuple[bytes, bytes]:
        """The log-probabilities and token ids that ride on a piece."""
        ids = b',"token_ids":' + _encode(piece.token_ids) if self._options.return_token_ids else b""
        return _encode(self._shown(piece.logprobs, piece.offsets, offset)), ids

    def _shown(self, entries: Sequence[TokenLogprobs], offsets: Sequence[int], offset: int) -> dict[str, Any] | None:
        number = self._options.logprobs
        if number is None or not entries:
            return None
        if self._shape.is_chat:
            return self._logprobs.chat(entries, number)
        return self._logprobs.completion(entries, [offset + characters for characters in offsets], number)


def _reasoning(part: Reasoning) -> bytes:
    text = _encode(part.text)
    return b'"delta":{"reasoning_content":' + text + b',"reasoning":' + text + b"}"


def _call(part: CallDelta) -> bytes:
    function: dict[str, str] = {"arguments": part.arguments}
    call: dict[str, Any] = {"index": part.number, "function": function}
    if part.name is not None:
        call = {"index": part.number, "id": part.call_id, "type": "function", "function": {"name": part.name, **function}}
    return b'"delta":{"tool_calls":[' + _encode(call) + b"]}"
