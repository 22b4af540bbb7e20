"""How a client wants its answer made and shown: the fields that all endpoints share, checked against the model's facts.

Knows nothing of tokenizers, engines or answers.
"""

from __future__ import annotations

import dataclasses
import random

import msgspec

from minserve.request import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, SamplingParams
from minserve.server.answer_format import AnswerFormat
from minserve.server.api_errors import CONTEXT_LENGTH_EXCEEDED, bad_request
from minserve.server.fields import Fields, is_number


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
_LEAST_REPETITION_PENALTY = 0.01
"""Logits divided by less may leave the range of floats."""
_INT64 = 1 << 63
_NOT_SUPPORTED = ("guided_grammar", "suffix")
_ids_decoder = msgspec.json.Decoder(list[int])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Everything about an answer but its prompt."""

    model: str
    """The name the client used, or the default."""
    sampling: SamplingParams
    """What every choice of every prompt has in common; see `sampling_for`."""
    max_tokens: int | None
    seed: int | None
    stream: bool
    include_usage: bool
    continuous_usage: bool
    n: int
    best_of: int
    """Choices made; the `n` likeliest are shown."""
    stop: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    echo: bool
    logprobs: int | None
    """Number of top alternatives shown a token; None shows nothing."""
    prompt_logprobs: int | None
    return_token_ids: bool
    tokens_as_ids: bool
    """Name tokens in log-probabilities `token_id:N` instead of by their text."""
    answer: AnswerFormat | None = None
    """How reasoning and tool calls are read from the text; None shows all of it as it is."""

    def sampling_for(self, facts: ModelFacts, num_prompt_tokens: int, choice: int) -> SamplingParams:
        """What the engine gets for choice number `choice` of a prompt; its seed is the request's plus that number."""
        room = facts.context_length - num_prompt_tokens
        max_tokens = room if self.max_tokens is None else min(self.max_tokens, room)
        seed = random.getrandbits(63) if self.seed is None else (self.seed + choice) & SEED_MASK
        min_tokens = min(self.sampling.min_tokens, max_tokens)
        return msgspec.structs.replace(self.sampling, max_tokens=max_tokens, seed=seed, min_tokens=min_tokens)


def token_ids(raw: msgspec.Raw, param: str, facts: ModelFacts, limit: int | None = None) -> list[int]:
    """A JSON array of token ids within the vocabulary, fewer than `limit` of them.

    The length is read off the commas before anything is decoded: decoding millions of numbers would stall every thread.
    """
    if limit is not None:
        check_length(bytes(raw).count(b",") + 1, limit, param)
    try:
        ids = _ids_decoder.decode(raw)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise bad_request(f"{param} must be a string or an array of integers: {error}", param) from None
    check_vocabulary(ids, param, facts)
    return ids


def check_vocabulary(ids: list[int], param: str, facts: ModelFacts) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < facts.vocab_size):
        index, wrong = next((index, id_) for index, id_ in enumerate(ids) if not 0 <= id_ < facts.vocab_size)
        shown = wrong if abs(wrong) < _INT64 else "a very large number"
        raise bad_request(f"{param}[{index}] is {shown}; token ids are 0 to {facts.vocab_size - 1}", param)


def parse_options(fields: Fields, facts: ModelFacts, model: str, *, echo: bool, logprobs: int | None) -> Options:
    """`logprobs`: as the endpoint spells it. Raises ApiError naming the field."""
    _refuse_unsupported(fields)
    stream = fields.boolean("stream", False)
    include_usage, continuous_usage = _stream_options(fields) if stream else (False, False)
    n = fields.integer("n", 1, MAX_CHOICES) or 1
    best_of = fields.integer("best_of", 1, MAX_CHOICES) or n
    if best_of < n:
        raise bad_request(f"best_of ({best_of}) must not be below n ({n})", "best_of")
    if best_of > n and stream:
        raise bad_request("best_of above n cannot be streamed: the best is known only at the end", "best_of")
    prompt_logprobs = fields.integer("prompt_logprobs", 0, MAX_TOP_LOGPROBS)
    if prompt_logprobs is not None and stream:
        raise bad_request("prompt_logprobs cannot be streamed", "prompt_logprobs")
    older = fields.integer("max_tokens", 0 if echo else 1)
    newer = fields.integer("max_completion_tokens", 0 if echo else 1)
    max_tokens = older if newer is None else newer
    of_prompt = [number for number in (prompt_logprobs, logprobs if echo else None) if number is not None]
    return Options(
        model=model,
        sampling=msgspec.structs.replace(
            _sampling(fields, facts, max_tokens),
            logprobs=0 if logprobs is None and best_of > n else logprobs,  # to rank choices takes each token's too
            prompt_logprobs=max(of_prompt, default=None),
        ),
        max_tokens=max_tokens,
        seed=fields.integer("seed", -_INT64, _INT64 - 1),
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        n=n,
        best_of=best_of,
        stop=_stop_strings(fields),
        include_stop=fields.boolean("include_stop_str_in_output", False),
        skip_special_tokens=fields.boolean("skip_special_tokens", True),
        echo=echo,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        return_token_ids=fields.boolean("return_token_ids", False),
        tokens_as_ids=fields.boolean("return_tokens_as_token_ids", False),
    )


def _sampling(fields: Fields, facts: ModelFacts, max_tokens: int | None) -> SamplingParams:
    """Its `max_tokens` and `seed` are not settled."""
    min_tokens = fields.integer("min_tokens", 0) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise bad_request(f"min_tokens ({min_tokens}) must not be above max_tokens ({max_tokens})", "min_tokens")
    end_ids = () if fields.boolean("ignore_eos", False) else facts.stop_token_ids
    raw = fields.raw("stop_token_ids")
    stop_ids = tuple(dict.fromkeys((*end_ids, *(() if raw is None else token_ids(raw, "stop_token_ids", facts)))))
    if min_tokens > 0 and len(stop_ids) > MAX_STOP_TOKEN_IDS:
        message = (
            f"min_tokens goes with at most {MAX_STOP_TOKEN_IDS} stop ids, the model's own included; here are {len(stop_ids)}"
        )
        raise bad_request(message, "stop_token_ids")
    temperature = fields.number("temperature", 0, 2)
    top_k = fields.integer("top_k", -1) or 0
    return SamplingParams(
        max_tokens=0,
        seed=0,
        min_tokens=min_tokens,
        temperature=1.0 if temperature is None else 0.0 if temperature < _GREEDY_BELOW else temperature,
        top_k=0 if top_k == -1 or top_k >= facts.vocab_size else top_k,
        top_p=_or(fields.number("top_p", 0, 1, above_least=True), 1.0),
        min_p=_or(fields.number("min_p", 0, 1), 0.0),
        repetition_penalty=_or(fields.number("repetition_penalty", _LEAST_REPETITION_PENALTY, 10), 1.0),
        presence_penalty=_or(fields.number("presence_penalty", -2, 2), 0.0),
        frequency_penalty=_or(fields.number("frequency_penalty", -2, 2), 0.0),
        logit_bias=_logit_bias(fields, facts),
        stop_token_ids=stop_ids,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _stream_options(fields: Fields) -> tuple[bool, bool]:
    options = fields.object("stream_options")
    if options is None:
        return False, False
    return options.boolean("include_usage", False), options.boolean("continuous_usage_stats", False)


def _stop_strings(fields: Fields) -> tuple[str, ...]:
    value = fields.value("stop")
    if value is None:
        return ()
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(string, str) for string in strings):
        raise bad_request("stop must be null, a string or an array of strings", "stop")
    if not all(strings):
        raise bad_request("stop must not hold an empty string", "stop")
    if len(strings) > MAX_STOP_STRINGS or any(len(string) > MAX_STOP_LENGTH for string in strings):
        raise bad_request(f"stop holds at most {MAX_STOP_STRINGS} strings of at most {MAX_STOP_LENGTH} characters", "stop")
    return tuple(dict.fromkeys(strings))


def _logit_bias(fields: Fields, facts: ModelFacts) -> dict[int, float]:
    value = fields.value("logit_bias")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise bad_request("logit_bias must be an object of token ids and numbers", "logit_bias")
    if len(value) > MAX_LOGIT_BIAS:
        raise bad_request(f"logit_bias has {len(value)} entries; at most {MAX_LOGIT_BIAS} are possible", "logit_bias")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) < facts.vocab_size):
            message = f"logit_bias has the key {key[:40]!r}; keys are token ids as strings, 0 to {facts.vocab_size - 1}"
            raise bad_request(message, "logit_bias")
        if not is_number(bias):
            raise bad_request(f"logit_bias[{key!r}] must be a number", "logit_bias")
        biases[int(key)] = float(max(-100, min(100, bias)))
    return biases


def _refuse_unsupported(fields: Fields) -> None:
    for name in _NOT_SUPPORTED:
        if fields.has(name) and fields.value(name) != "":
            raise bad_request(f"{name} is not supported by this version", name)
