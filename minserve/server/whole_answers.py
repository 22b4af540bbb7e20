"""The JSON of answers that are not streamed. Knows nothing of sockets or engines."""

from __future__ import annotations

from typing import Any

import msgspec

from minserve.request import TokenLogprobs
from minserve.server.answer_format import CallDelta, Reasoning
from minserve.server.choice import Choice, Piece
from minserve.server.echo import echo_logprobs, echo_text
from minserve.server.generation import Generation
from minserve.server.logprobs import LogprobFormat


class WholeAnswer:
    """Collects the pieces of every choice; the body is made at the end."""

    def __init__(self, generation: Generation, logprob_format: LogprobFormat) -> None:
        self._generation = generation
        self._logprobs = logprob_format
        count = len(generation.choices)
        self._texts: list[list[str]] = [[] for _ in range(count)]
        self._asides: list[list[Reasoning | CallDelta]] = [[] for _ in range(count)]
        self._token_ids: list[list[int]] = [[] for _ in range(count)]
        self._entries: list[list[TokenLogprobs]] = [[] for _ in range(count)]
        self._offsets: list[list[int]] = [[] for _ in range(count)]

    def add(self, number: int, pieces: list[Piece]) -> None:
        for piece in pieces:
            self._texts[number].append(piece.text)
            self._asides[number] += piece.aside
            self._token_ids[number] += piece.token_ids
            self._entries[number] += piece.logprobs
            self._offsets[number] += piece.offsets

    def body(self) -> bytes:
        generation, options = self._generation, self._generation.options
        answer: dict[str, Any] = {
            "id": generation.id,
            "object": generation.shape.whole_object,
            "created": generation.created,
            "model": options.model,
            "choices": [self._choice(index, number) for index, number in enumerate(self._best())],
            "usage": generation.usage(),
        }
        if generation.shape.is_chat:
            if options.prompt_logprobs is not None:
                answer["prompt_logprobs"] = self._prompt_logprobs(generation.choices[0])
            if options.return_token_ids:
                answer["prompt_token_ids"] = generation.prompts[0].token_ids
        return msgspec.json.encode(answer)

    def _best(self) -> list[int]:
        """The choices to show: of each prompt the `n` with the highest mean log-probability, likeliest first."""
        options, choices = self._generation.options, self._generation.choices
        shown: list[int] = []
        for start in range(0, len(choices), options.best_of):
            numbers = list(range(start, start + options.best_of))
            if options.best_of > options.n:
                numbers.sort(key=lambda number: -choices[number].sum_logprobs / max(1, choices[number].num_tokens))
            shown += numbers[: options.n]
        return shown

    def _choice(self, index: int, number: int) -> dict[str, Any]:
        options, is_chat = self._generation.options, self._generation.shape.is_chat
        choice = self._generation.choices[number]
        text = "".join(self._texts[number])
        made: dict[str, Any] = {"index": index}
        echo = ""
        if is_chat:
            made["message"] = _message(text, self._asides[number])
        else:
            echo = echo_text(self._generation, number)
            made["text"] = echo + text
        made["logprobs"] = self._shown_logprobs(number, len(echo))
        made["finish_reason"] = choice.finish_reason
        if not is_chat and options.prompt_logprobs is not None:
            made["prompt_logprobs"] = self._prompt_logprobs(choice)
        if options.return_token_ids:
            made["token_ids"] = self._token_ids[number]
            if not is_chat:
                made["prompt_token_ids"] = self._generation.prompt_of(number).token_ids
        return made

    def _shown_logprobs(self, number: int, offset: int) -> dict[str, Any] | None:
        num_top = self._generation.options.logprobs
        if num_top is None:
            return None
        if self._generation.shape.is_chat:
            return self._logprobs.chat(self._entries[number], num_top)
        offsets = [offset + characters for characters in self._offsets[number]]
        answer = self._logprobs.completion(self._entries[number], offsets, num_top)
        prompt = echo_logprobs(self._generation, self._logprobs, number)
        return answer if prompt is None else {name: prompt[name] + answer[name] for name in answer}

    def _prompt_logprobs(self, choice: Choice) -> list[dict[str, dict[str, Any]] | None]:
        return self._logprobs.prompt(choice.prompt_logprobs or (), self._generation.options.prompt_logprobs or 0)


def _message(text: str, asides: list[Reasoning | CallDelta]) -> dict[str, Any]:
    """The assistant's message. Its content is null where there is nothing but calls."""
    reasoning = "".join(part.text for part in asides if isinstance(part, Reasoning))
    calls: list[dict[str, Any]] = []
    arguments: list[list[str]] = []
    for part in asides:
        if isinstance(part, CallDelta):
            if part.name is not None:
                calls.append({"id": part.call_id, "type": "function", "function": {"name": part.name, "arguments": ""}})
                arguments.append([])
            arguments[part.number].append(part.arguments)
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
    if reasoning:
        message |= {"reasoning_content": reasoning, "reasoning": reasoning}
    if calls:
        for call, pieces in zip(calls, arguments, strict=True):
            call["function"]["arguments"] = "".join(pieces)
        message["tool_calls"] = calls
    return message
