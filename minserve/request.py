"""What a request is, in token ids and plain numbers. Knows nothing of HTTP, text or torch."""

from __future__ import annotations

import enum

import msgspec

MAX_LOGIT_BIAS = 300
"""Most entries of a request's `logit_bias`; the sampler keeps them in buffers of fixed size."""
MAX_STOP_TOKEN_IDS = 128
"""Most ids of a request's `stop_token_ids`, the model's EOS ids included; of fixed size for the same reason."""


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Grammar(msgspec.Struct, frozen=True):
    """What an output's text must match, from its first token or from the end of its reasoning on."""

    text: str
    """In llguidance's dialect of Lark."""
    starts_after: str = ""
    """The text that ends the reasoning, such as `</think>`; until then the output is free. Empty: there is no reasoning."""
    opened_by: int | None = None
    """The one token that, as the output's first, begins the reasoning; with any other the grammar holds at once. None where
    `starts_after` says that there is a reasoning: the prompt has begun it."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose the next token. Every value is already validated and resolved by the front.

    The stop set is complete here: the front has joined the model's EOS ids (unless the request ignores them) and the
    request's own ids. `seed` is always set; the front draws one for requests that gave none.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    """0 means argmax; the front maps everything under 1e-5 to 0."""
    top_k: int = 0
    """0 means off."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    """No id of `stop_token_ids` can be sampled before this many output tokens."""
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    """Number of top alternatives to report beside each sampled token; 0 reports the token alone, None nothing."""
    prompt_logprobs: int | None = None
    """The same for each prompt token but the first; such a request bypasses the prefix cache."""
    grammar: Grammar | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to continue. `n > 1` reaches the engine as several of these.

    `max_tokens == 0` (prompt log-probabilities only) is legal and samples nothing.
    """

    id: int
    """Unique for the life of the front."""
    prompt_token_ids: list[int]
    sampling: SamplingParams
    arrival_time: float
    """`time.monotonic()` of the front, seconds; the clock is shared by all processes of a host."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Natural-log probabilities at one position, from the model's unmodified logits.

    `top_ids` and `top_logprobs` are sorted from the likeliest down. Where the token itself is among them its value there
    is the same float as `logprob`.
    """

    token_id: int
    logprob: float
    rank: int
    """1 for the likeliest token."""
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """What one step produced for one request."""

    request_id: int
    token_ids: tuple[int, ...] = ()
    """New tokens in order, the final stop token included."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per new token when the request asked for them."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """One per prompt token, the first None; sent once, with or before the first token."""
    finish_reason: FinishReason | None = None
    error: str | None = None
    """A sentence for the client when `finish_reason` is ERROR."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache; told with the first output."""
    queue_seconds: float | None = None
    """From arrival to the first step that held the request; told with the first output."""
    is_bad_request: bool = False
    """With `error`: the request itself is at fault, such as by a grammar that cannot be followed."""
