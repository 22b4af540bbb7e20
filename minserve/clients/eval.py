"""`minserve eval arithmetic`: exact-match accuracy and log-probability drift of the embedded model, through HTTP alone.

Knows a reference file of held-out conversations and the OpenAI API; nothing of the server behind the address.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from minserve.clients.arithmetic_reference import Item, PromptTokens, Reference, load_reference
from minserve.clients.openai_client import OpenAIClient, RequestRefused
from minserve.errors import ExitCode, UsageError

T = TypeVar("T")
R = TypeVar("R")

LEAST_ACCURACY = 0.97
MAX_TOKENS = 128
"""Half as many again as the longest right answer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What the server generated for one item."""

    exact: bool
    log_probability: float | None
    """Of the generated tokens; None when the server did not give them."""
    expected: float
    """The float32 value of as many tokens of the right answer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pass:
    """All items asked at one concurrency."""

    concurrency: int
    seconds: float
    answers: list[Answer]

    @property
    def accuracy(self) -> float:
        return sum(answer.exact for answer in self.answers) / len(self.answers)


@dataclasses.dataclass(frozen=True, slots=True)
class Drift:
    """A mean log-probability beside its stored float32 value, in nats."""

    name: str
    measured: float
    expected: float
    bound: float

    @property
    def size(self) -> float:
        return abs(self.measured - self.expected)

    @property
    def outside(self) -> bool:
        """Also of a NaN, which is less than nothing."""
        return not self.size <= self.bound

    def __str__(self) -> str:
        verdict = " OUTSIDE" if self.outside else ""
        return (
            f"{self.name} {self.measured:.4f} (float32 {self.expected:.4f}, drift {self.size:.4f}, bound {self.bound:g}){verdict}"
        )


async def run_arithmetic(
    base_url: str,
    concurrency: int = 16,
    limit: int | None = None,
    model: str | None = None,
    api_key: str | None = None,
    console: Console | None = None,
) -> ExitCode:
    """Ask every held-out item one at a time and `concurrency` at a time, print the findings, end with `accuracy 0.987`.

    `base_url` is the server's root or its /v1. `limit` takes only the first items (all kinds alike). OK means that the
    accuracy and every drift that could be measured are within their bounds; SELF_CHECK that one is not.
    Raises EnvironmentFault when the server cannot be reached or refuses, UsageError on a number below 1.
    """
    for flag, value in (("--concurrency", concurrency), ("--limit", limit)):
        if value is not None and value < 1:
            raise UsageError(f"{flag} must be at least 1, not {value}")
    reference = load_reference()
    items = reference.items[:limit]
    console = console or Console(highlight=False, soft_wrap=True)
    async with OpenAIClient(base_url, api_key) as client:
        name = model or await client.first_model()
        with Progress(console=Console(stderr=True), transient=True) as progress:
            passes = [await _ask_all(client, name, items, many, progress) for many in dict.fromkeys((1, concurrency))]
            echoes = await _echo_all(client, name, items, concurrency, reference, progress)
    console.print(_table(name, items, passes))
    findings = [*(drift for one in passes for drift in _generated_drift(one, reference)), *echoes]
    for finding in findings:
        console.print(str(finding))
    accuracy = min(one.accuracy for one in passes)
    console.print(f"accuracy {accuracy:.3f}")
    sound = accuracy >= LEAST_ACCURACY and not any(isinstance(finding, Drift) and finding.outside for finding in findings)
    return ExitCode.OK if sound else ExitCode.SELF_CHECK


async def _ask_all(client: OpenAIClient, model: str, items: list[Item], concurrency: int, progress: Progress) -> Pass:
    begun = time.monotonic()
    task = progress.add_task(f"chat, {concurrency} at a time", total=len(items))
    answers = await _at_most(concurrency, lambda item: _ask(client, model, item), items, lambda: progress.advance(task))
    return Pass(concurrency, time.monotonic() - begun, answers)


async def _ask(client: OpenAIClient, model: str, item: Item) -> Answer:
    """One greedy chat completion with the log-probabilities of its tokens."""
    body = {"model": model, "messages": item.messages, "temperature": 0, "max_tokens": MAX_TOKENS, "logprobs": True}
    choice = (await client.post("/chat/completions", body))["choices"][0]
    exact = choice["message"]["content"] == item.answer and choice["finish_reason"] == "stop"
    content = (choice.get("logprobs") or {}).get("content")
    if not content:
        return Answer(exact, None, 0.0)
    # Some servers count the end of the turn among the tokens, some don't: compare as many as came.
    expected = sum(item.log_probabilities[: len(content)])
    return Answer(exact, sum(token["logprob"] for token in content), expected)


async def _echo_all(
    client: OpenAIClient, model: str, items: list[Item], concurrency: int, reference: Reference, progress: Progress
) -> Sequence[Drift | str]:
    """Drift of prompts and of right answers, whatever the server would have answered; or a sentence why there is none."""
    tokens = PromptTokens()
    task = progress.add_task("log-probabilities of right answers", total=len(items))

    async def echo(item: Item) -> tuple[float, float, int]:
        prompt, answer = tokens.of(item)
        values = await _echo(client, model, prompt + answer)
        return sum(values[: len(prompt) - 1]), sum(values[len(prompt) - 1 :]), len(prompt) - 1

    try:
        measured = await _at_most(concurrency, echo, items, lambda: progress.advance(task))
    except RequestRefused as refusal:
        return [
            f"no log-probabilities of prompts and right answers: /v1/completions with echo and logprobs was refused: {refusal}"
        ]
    except LookupError:
        return [
            "no log-probabilities of prompts and right answers: /v1/completions took echo and logprobs but gave no such arrays"
        ]
    prompts, answers, positions = (sum(column) for column in zip(*measured, strict=True))
    of_prompts = sum(item.prompt_log_probability for item in items)
    of_answers = sum(sum(item.log_probabilities) for item in items)
    return [
        Drift("prompt log-probability a token", prompts / positions, of_prompts / positions, reference.prompt_bound),
        Drift("mean log-probability", answers / len(items), of_answers / len(items), reference.answer_bound),
    ]


async def _echo(client: OpenAIClient, model: str, token_ids: list[int]) -> list[float]:
    """Log-probability of each token but the first. LookupError when the answer lacks them."""
    body = {"model": model, "prompt": token_ids, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    choice = (await client.post("/completions", body))["choices"][0]
    values = (choice.get("logprobs") or {}).get("token_logprobs") or []
    echoed = values[1 : len(token_ids)]
    if len(echoed) != len(token_ids) - 1 or None in echoed:
        raise LookupError("token_logprobs")
    return [float(value) for value in echoed]


async def _at_most(
    concurrency: int, ask: Callable[[T], Awaitable[R]], items: Sequence[T], answered: Callable[[], None]
) -> list[R]:
    """`ask` of every item, in order of the items, never more than `concurrency` at once; the first failure ends the rest."""
    gate = asyncio.Semaphore(concurrency)

    async def one(item: T) -> R:
        async with gate:
            answer = await ask(item)
        answered()
        return answer

    tasks = [asyncio.ensure_future(one(item)) for item in items]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _generated_drift(asked: Pass, reference: Reference) -> Iterator[Drift]:
    """Over the exact answers, whose tokens are those of the reference: what the decode steps computed. None without any."""
    pairs = [
        (answer.log_probability, answer.expected)
        for answer in asked.answers
        if answer.exact and answer.log_probability is not None
    ]
    if pairs:
        measured, expected = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
        yield Drift(f"generated log-probability, {asked.concurrency} at a time", measured, expected, reference.answer_bound)


def _table(model: str, items: list[Item], passes: list[Pass]) -> Table:
    table = Table(title=f"Exact answers of {model}", title_justify="left")
    table.add_column("part")
    table.add_column("questions", justify="right")
    for one in passes:
        table.add_column(f"{one.concurrency} at a time", justify="right")
    for part in (*dict.fromkeys(item.part for item in items), "all"):
        chosen = [index for index, item in enumerate(items) if part in (item.part, "all")]
        shares = (sum(one.answers[index].exact for index in chosen) / len(chosen) for one in passes)
        table.add_row(part, str(len(chosen)), *(f"{share:.3f}" for share in shares))
    table.add_row("seconds", "", *(f"{one.seconds:.1f}" for one in passes))
    return table
