"""How a client wants its answer made and shown, and the facts of the model that this is checked against. Knows no JSON."""

from __future__ import annotations

import dataclasses
import random

from minserve.request import Grammar, SamplingParams
from minserve.server.answer_format import AnswerFormat
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


SEED_MASK = (1 << 63) - 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Sampling as asked for, each value within its range; `resolve` adds what depends on the prompt and the model."""

    max_tokens: int | None
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    logit_bias: dict[int, float]
    ignore_eos: bool
    stop_token_ids: tuple[int, ...]
    grammar: Grammar | None = None

    def resolve(
        self, facts: ModelFacts, num_prompt_tokens: int, choice: int, logprobs: int | None, prompt_logprobs: int | None
    ) -> SamplingParams:
        """What the engine gets for choice number `choice` of a prompt; its seed is the request's plus that number."""
        room = facts.context_length - num_prompt_tokens
        max_tokens = room if self.max_tokens is None else min(self.max_tokens, room)
        seed = random.getrandbits(63) if self.seed is None else (self.seed + choice) & SEED_MASK
        end_ids = () if self.ignore_eos else facts.stop_token_ids
        return SamplingParams(
            max_tokens=max_tokens,
            seed=seed,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            min_tokens=min(self.min_tokens, max_tokens),
            stop_token_ids=tuple(dict.fromkeys((*end_ids, *self.stop_token_ids))),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=self.grammar,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Everything about an answer but its prompt."""

    model: str
    """The name the client used, or the default."""
    sampling: SamplingOptions
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

    @property
    def engine_logprobs(self) -> int | None:
        """What the engine is asked for: ranking choices needs each token's log-probability too."""
        return 0 if self.logprobs is None and self.best_of > self.n else self.logprobs

    @property
    def engine_prompt_logprobs(self) -> int | None:
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((number for number in wanted if number is not None), default=None)
