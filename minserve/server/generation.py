"""One client's answer under way: its prompts enter the engines, its choices grow, and it ends or is aborted. Knows no HTTP."""

from __future__ import annotations

import dataclasses
import time
import uuid

from minserve.request import FinishReason, SamplingParams
from minserve.server import usage
from minserve.server.api_errors import ApiError
from minserve.server.choice import Choice, Piece
from minserve.server.chunks import AnswerShape
from minserve.server.engine_pool import EnginePool
from minserve.server.loaded_model import LoadedModel
from minserve.server.mailbox import Mailbox
from minserve.server.metrics import ChoiceClock
from minserve.server.options import Options


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: list[int]
    text: str | None
    """What the client wrote, when it wrote text: an echo gives it back."""


class Generation:
    """Every choice of every prompt of one body. Choice number i belongs to prompt `i // best_of`."""

    def __init__(
        self,
        shape: AnswerShape,
        options: Options,
        prompts: list[Prompt],
        request_id: str,
        model: LoadedModel,
        engines: EnginePool,
    ) -> None:
        """Submits at once. Raises ApiError when the queue is full or the engine has ended.

        `request_id` is what the client calls it; several may use one name.
        """
        self.request_id = request_id
        self.id = f"{shape.id_prefix}{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.shape = shape
        self.options = options
        self.prompts = prompts
        self.model = model
        count = len(prompts) * options.best_of
        self.choices = [Choice(options, model.tokenizer.pieces) for _ in range(count)]
        self.mailbox = Mailbox(count)
        self.aborted_by: str | None = None
        self._open = count
        self._engines = engines
        arrival = time.monotonic()
        self._clocks = [ChoiceClock(model.metrics, arrival) for _ in range(count)]
        engines.admit()
        self._request_ids = engines.submit([(prompt.token_ids, self._sampling(prompt)) for prompt in prompts], self.mailbox)
        self._heard: set[int] = set()

    @property
    def open(self) -> bool:
        """Whether a choice still grows."""
        return self._open > 0

    async def advance(self) -> list[tuple[int, list[Piece]]]:
        """Wait for outputs; for each its choice's number and new pieces, perhaps none, in order.

        Raises ApiError when the answer cannot go on.
        """
        made: list[tuple[int, list[Piece]]] = []
        for number, output in await self.mailbox.take():
            choice = self.choices[number]
            if output.token_ids and choice.finish_reason is None:
                self._clocks[number].tokens(len(output.token_ids))
            if number not in self._heard:
                self._first_output(number, output.queue_seconds)
            pieces = choice.feed(output)
            made.append((number, pieces))
            if pieces and choice.finish_reason is not None:
                self._end(number, choice)
        return made

    def prompt_of(self, number: int) -> Prompt:
        return self.prompts[number // self.options.best_of]

    def usage(self) -> usage.Usage:
        """The counts so far."""
        best_of = self.options.best_of
        return usage.usage(
            prompt_tokens=sum(len(prompt.token_ids) for prompt in self.prompts),
            completion_tokens=sum(choice.num_tokens for choice in self.choices),
            cached_tokens=sum(choice.cached_tokens for choice in self.choices[::best_of]),
            reasoning_tokens=sum(choice.num_reasoning_tokens for choice in self.choices),
        )

    def abort(self, cause: str, error: ApiError | None = None) -> None:
        """Ends what still runs in the engines; with `error` the task that writes the answer is told. Safe to repeat."""
        if not self.open or self.aborted_by is not None:
            return
        self.aborted_by = cause
        self.model.metrics.abort(cause, self._engines.abort(self._request_ids))
        if error is not None:
            self.mailbox.fail(error)

    def _sampling(self, prompt: Prompt) -> list[SamplingParams]:
        options = self.options
        return [
            options.sampling.resolve(
                self.model.facts, len(prompt.token_ids), choice, options.engine_logprobs, options.engine_prompt_logprobs
            )
            for choice in range(options.best_of)
        ]

    def _first_output(self, number: int, queue_seconds: float | None) -> None:
        self._heard.add(number)
        if queue_seconds is not None:
            self.model.metrics.queue_time.observe(queue_seconds)
        if number % self.options.best_of == 0:
            self.model.metrics.prompt_tokens.inc(len(self.prompt_of(number).token_ids))

    def _end(self, number: int, choice: Choice) -> None:
        self._open -= 1
        if choice.stopped_early:
            self._engines.finish(self._request_ids[number], choice.num_tokens)
        length = choice.finish_reason == FinishReason.LENGTH
        self._clocks[number].end(FinishReason.LENGTH if length else FinishReason.STOP)
