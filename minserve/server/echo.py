"""The prompt given back in front of a completion, as text and as log-probabilities. Knows nothing of sockets or engines."""

from __future__ import annotations

from typing import Any

from minserve.server.generation import Generation
from minserve.server.logprobs import LogprobFormat


def echo_text(generation: Generation, number: int) -> str:
    """What an echo gives back before choice `number`; nothing without echo."""
    if not generation.options.echo:
        return ""
    prompt = generation.prompt_of(number)
    if prompt.text is not None:
        return prompt.text
    return generation.model.tokenizer.decode(prompt.token_ids, generation.options.skip_special_tokens)


def echo_logprobs(generation: Generation, logprob_format: LogprobFormat, number: int) -> dict[str, list[Any]] | None:
    """The prompt's part of the logprobs arrays; None unless the request echoes and asks for log-probabilities."""
    options, choice = generation.options, generation.choices[number]
    if not options.echo or options.logprobs is None or choice.prompt_logprobs is None:
        return None
    prompt = generation.prompt_of(number)
    return logprob_format.echoed_prompt(prompt.token_ids, choice.prompt_logprobs, options.logprobs, options.skip_special_tokens)
