"""What crosses between the front and an engine, and its framing. Knows nothing of sockets' owners, HTTP or torch.

Length-prefixed msgpack over a Unix stream socket, one message a step. EOF is the news of a death.
"""

from __future__ import annotations

import struct
from typing import Any, TypeVar

import msgspec

from minserve.request import FinishReason, Request, TokenOutput

MAX_FRAME_BYTES = 1 << 30
_HEADER = struct.Struct("<I")


class AddRequests(msgspec.Struct, frozen=True, tag=True):
    """Front to engine: start these."""

    requests: list[Request]


class AbortRequests(msgspec.Struct, frozen=True, tag=True):
    """Front to engine: the clients are gone; free everything, answer nothing."""

    request_ids: list[int]


class FinishRequest(msgspec.Struct, frozen=True, tag=True):
    """Front to engine: the front saw a stop string; the request ends after `num_tokens` output tokens."""

    request_id: int
    reason: FinishReason
    num_tokens: int


class Vocabulary(msgspec.Struct, frozen=True, tag=True):
    """Front to engine, before any request with a grammar: what the tokens stand for. A second one changes nothing."""

    pieces: list[bytes]
    """By token id; empty where the tokenizer has none."""
    special_token_ids: list[int]
    """Tokens without text."""


class Call(msgspec.Struct, frozen=True, tag=True):
    """Front to engine: a rare control call, answered by one `Reply` with the same id.

    Methods: `flush_cache`, `server_info`, `start_profile`, `stop_profile`.
    """

    call_id: int
    method: str
    arguments: dict[str, Any] = {}


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Front to engine: leave with code 0 (the front has drained already)."""


class Starting(msgspec.Struct, frozen=True, tag=True):
    """Engine to front: progress of the start, a phase name and a fraction from 0 to 1."""

    phase: str
    fraction: float


class Ready(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Engine to front: requests are welcome. The model facts that the edge needs."""

    model_type: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    eos_token_ids: tuple[int, ...]
    """EOS ids of config.json and generation_config.json; the front adds the tokenizer's."""
    num_pages: int
    page_size: int
    startup_seconds: dict[str, float]
    """Phase name to seconds, in order."""
    info: dict[str, Any]
    """For /server_info: effective config, memory, captured sizes, backends."""


class StepStats(msgspec.Struct, frozen=True, array_like=True):
    """Counters and gauges of one engine after a step; counters only grow."""

    num_running: int = 0
    num_waiting: int = 0
    used_pages: int = 0
    prefix_cache_queries: int = 0
    """Prompt tokens looked up."""
    prefix_cache_hits: int = 0
    """Prompt tokens found."""
    num_preemptions: int = 0
    steps: int = 0
    eager_decode_steps: dict[str, int] = {}
    """Reason to count; decode steps only, mixed steps are counted apart."""
    mixed_steps: int = 0
    graph_replays: dict[int, int] = {}
    """Padded batch size to count."""
    nan_rows: int = 0
    dummy_steps: int = 0
    """Steps without a request of this rank, run since other ranks had some."""


class StepOutputs(msgspec.Struct, frozen=True, tag=True):
    """Engine to front: what one step produced. An idle engine sends one with no outputs at least every second."""

    outputs: list[TokenOutput]
    stats: StepStats


class Reply(msgspec.Struct, frozen=True, tag=True):
    """Engine to front: the answer to a `Call`; `error` is set when it failed."""

    call_id: int
    result: Any = None
    error: str | None = None


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """Engine to front: the engine ends now. `message` is for a person; `exit_code` becomes the server's."""

    exit_code: int
    message: str


_Message = TypeVar("_Message")
ToEngine = AddRequests | AbortRequests | FinishRequest | Vocabulary | Call | Shutdown
ToFront = Starting | Ready | StepOutputs | Reply | Fatal

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_to_front = msgspec.msgpack.Decoder(ToFront)


class FrameError(ValueError):
    """The peer sent bytes that are no frame of this protocol."""


def encode_frame(message: ToEngine | ToFront) -> bytes:
    """One message as bytes ready to send: a little-endian uint32 length, then msgpack."""
    return frame(encode_body(message))


def encode_body(message: ToEngine | ToFront) -> bytes:
    """One message as msgpack, without its length."""
    return _encoder.encode(message)


def frame(body: bytes) -> bytes:
    """A body with its length before it. The first body an engine gets is a Config, every later one a message."""
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"a message of {len(body)} bytes is over the frame limit of {MAX_FRAME_BYTES}")
    return _HEADER.pack(len(body)) + body


class FrameReader:
    """Cuts a byte stream into message bodies. Feed it what the socket gave; it yields whole bodies in order."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def midway(self) -> bool:
        """Whether a body has begun and not ended."""
        return bool(self._buffer)

    def feed(self, data: bytes | bytearray) -> list[bytes]:
        """Raises FrameError on a length over the limit."""
        self._buffer += data
        bodies: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._buffer, start)
            if length > MAX_FRAME_BYTES:
                raise FrameError(f"a frame claims {length} bytes, over the limit of {MAX_FRAME_BYTES}")
            end = start + _HEADER.size + length
            if len(self._buffer) < end:
                break
            bodies.append(bytes(self._buffer[start + _HEADER.size : end]))
            start = end
        if start:
            del self._buffer[:start]
        return bodies


def decode_to_engine(body: bytes) -> ToEngine:
    """Raises FrameError when the body is no message for an engine."""
    return _decode(_to_engine, body)


def decode_to_front(body: bytes) -> ToFront:
    """Raises FrameError when the body is no message for the front."""
    return _decode(_to_front, body)


def _decode(decoder: msgspec.msgpack.Decoder[_Message], body: bytes) -> _Message:
    try:
        return decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise FrameError(str(error)) from error
