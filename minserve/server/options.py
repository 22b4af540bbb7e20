"""How a client wants its answer made and shown: the fields that all endpoints share, checked against the model's facts.

Knows nothing of tokenizers, engines or answers.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from minserve.request import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, SamplingParams
from minserve.server.answer_format import AnswerFormat
from minserve.server.api_errors import CONTEXT_LENGTH_EXCEEDED, ApiError, bad_request
from minserve.server.fields import RawFields, Reader


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


SEED_MASK = (1 << 63) - 1
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 4096
"""Characters of one stop string."""
_GREEDY_BELOW = 1e-5
_INT64 = 1 << 63

Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
_NotSupported = Literal[""]


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The fields as clients spell them, each within its range."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    n: Choices = 1
    best_of: Choices | None = None
    """Choices made; the `n` likeliest are shown."""
    seed: Annotated[int, Meta(ge=-_INT64, le=_INT64 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = 0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10)] = 1.0
    """Logits divided by less may leave the range of floats."""
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    logit_bias: dict[str, float] = {}
    stop: _StopString | Annotated[list[_StopString], Meta(max_length=MAX_STOP_STRINGS)] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: TopLogprobs | None = None
    """Number of top alternatives shown a token; None shows nothing."""
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    """Name tokens in log-probabilities `token_id:N` instead of by their text."""
    guided_grammar: _NotSupported = ""
    suffix: _NotSupported = ""


_asked = Reader(Asked)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Everything about an answer but its prompt."""

    asked: Asked
    model: str
    """The name the client used, or the default."""
    sampling: SamplingParams
    """What every choice of every prompt has in common; see `sampling_for`."""
    max_tokens: int | None
    best_of: int
    stop: tuple[str, ...]
    echo: bool
    logprobs: int | None
    """Number of top alternatives shown a token; None shows nothing."""
    answer: AnswerFormat = dataclasses.field(default_factory=AnswerFormat)
    """How reasoning and tool calls are read from the text; by default all of it is shown as it is."""

    def sampling_for(self, facts: ModelFacts, num_prompt_tokens: int, choice: int) -> SamplingParams:
        """What the engine gets for choice number `choice` of a prompt; its seed is the request's plus that number."""
        room = facts.context_length - num_prompt_tokens
        max_tokens = room if self.max_tokens is None else min(self.max_tokens, room)
        seed = random.getrandbits(63) if self.asked.seed is None else (self.asked.seed + choice) & SEED_MASK
        min_tokens = min(self.sampling.min_tokens, max_tokens)
        return msgspec.structs.replace(self.sampling, max_tokens=max_tokens, seed=seed, min_tokens=min_tokens)


def check_vocabulary(ids: list[int], param: str, facts: ModelFacts) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < facts.vocab_size):
        index, wrong = next((index, id_) for index, id_ in enumerate(ids) if not 0 <= id_ < facts.vocab_size)
        shown = wrong if abs(wrong) < _INT64 else "a very large number"
        raise bad_request(f"{param}[{index}] is {shown}; token ids are 0 to {facts.vocab_size - 1}", param)


def parse_options(fields: RawFields, facts: ModelFacts, *, echo: bool, logprobs: int | None) -> Options:
    """`logprobs`: as the endpoint spells it. Raises ApiError naming the field."""
    asked = _asked.read(fields)
    if asked.model is not None and asked.model not in facts.names:
        raise unknown_model(asked.model, facts)
    fewest = 0 if echo else 1
    for name, count in (("max_tokens", asked.max_tokens), ("max_completion_tokens", asked.max_completion_tokens)):
        if count is not None and count < fewest:
            raise bad_request(f"{name} must be at least {fewest}", name)
    best_of = asked.best_of or asked.n
    if best_of < asked.n:
        raise bad_request(f"best_of ({best_of}) must not be below n ({asked.n})", "best_of")
    if best_of > asked.n and asked.stream:
        raise bad_request("best_of above n cannot be streamed: the best is known only at the end", "best_of")
    if asked.prompt_logprobs is not None and asked.stream:
        raise bad_request("prompt_logprobs cannot be streamed", "prompt_logprobs")
    max_tokens = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
    if max_tokens is not None and asked.min_tokens > max_tokens:
        raise bad_request(f"min_tokens ({asked.min_tokens}) must not be above max_tokens ({max_tokens})", "min_tokens")
    of_prompt = [number for number in (asked.prompt_logprobs, logprobs if echo else None) if number is not None]
    return Options(
        asked=asked,
        model=asked.model or facts.name,
        sampling=msgspec.structs.replace(
            _sampling(asked, facts),
            logprobs=0 if logprobs is None and best_of > asked.n else logprobs,  # to rank choices takes each token's too
            prompt_logprobs=max(of_prompt, default=None),
        ),
        max_tokens=max_tokens,
        best_of=best_of,
        stop=tuple(dict.fromkeys([asked.stop] if isinstance(asked.stop, str) else asked.stop)),
        echo=echo,
        logprobs=logprobs,
    )


def unknown_model(name: str, facts: ModelFacts) -> ApiError:
    message = f"The model {name[:200]!r} does not exist here; served: {', '.join(facts.names)}"
    return ApiError(404, message, param="model", code="model_not_found")


def _sampling(asked: Asked, facts: ModelFacts) -> SamplingParams:
    """Its `max_tokens` and `seed` are not settled."""
    check_vocabulary(asked.stop_token_ids, "stop_token_ids", facts)
    stop_ids = tuple(dict.fromkeys((*(() if asked.ignore_eos else facts.stop_token_ids), *asked.stop_token_ids)))
    if asked.min_tokens > 0 and len(stop_ids) > MAX_STOP_TOKEN_IDS:
        message = (
            f"min_tokens goes with at most {MAX_STOP_TOKEN_IDS} stop ids, the model's own included; here are {len(stop_ids)}"
        )
        raise bad_request(message, "stop_token_ids")
    return SamplingParams(
        max_tokens=0,
        seed=0,
        min_tokens=asked.min_tokens,
        temperature=0.0 if asked.temperature < _GREEDY_BELOW else asked.temperature,
        top_k=0 if asked.top_k == -1 or asked.top_k >= facts.vocab_size else asked.top_k,
        top_p=asked.top_p,
        min_p=asked.min_p,
        repetition_penalty=asked.repetition_penalty,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        logit_bias=_logit_bias(asked.logit_bias, facts),
        stop_token_ids=stop_ids,
    )


def _logit_bias(given: dict[str, float], facts: ModelFacts) -> dict[int, float]:
    if len(given) > MAX_LOGIT_BIAS:
        raise bad_request(f"logit_bias has {len(given)} entries; at most {MAX_LOGIT_BIAS} are possible", "logit_bias")
    for key in given:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) < facts.vocab_size):
            message = f"logit_bias has the key {key[:40]!r}; keys are token ids as strings, 0 to {facts.vocab_size - 1}"
            raise bad_request(message, "logit_bias")
    return {int(key): max(-100.0, min(100.0, bias)) for key, bias in given.items()}
