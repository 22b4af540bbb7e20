"""`minserve bench serve`: load on any OpenAI-compatible server, and what its streams look like from outside.

Knows the OpenAI API and clocks; nothing of the server behind the address.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import random
import time
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import Progress

from minserve.clients import bench_report
from minserve.clients.bench_report import Sample
from minserve.clients.openai_client import OpenAIClient
from minserve.errors import EnvironmentFault, ExitCode, UsageError

_VOCABULARY_OF_STRANGERS = 1000
"""Token ids below this are in every vocabulary worth the name."""


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """What is asked, and how fast."""

    num_prompts: int = 200
    concurrency: int | None = None
    """Requests under way at once, at most; None: no limit."""
    rate: float | None = None
    """Requests a second, at exponentially distributed distances; None: all at once."""
    input_len: int = 1024
    output_len: int = 128
    prompts: Path | None = None
    """A file instead of random prompts: a line is a JSON object with `prompt` or `messages` (and `max_tokens`), or plain text."""
    vocab_size: int | None = None
    temperature: float = 0.0
    seed: int = 0


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_event = msgspec.json.Decoder(_Event)


async def run(
    base_url: str,
    load: Load,
    model: str | None = None,
    api_key: str | None = None,
    plot: Path | None = None,
    console: Console | None = None,
) -> ExitCode:
    """Puts the load on the server, prints a table and, as the last line, JSON. ENVIRONMENT when no request succeeded.

    Raises EnvironmentFault when the server cannot be reached, UsageError for a file of prompts that says nothing.
    """
    if plot is not None:
        bench_report.check_plot(plot)
    console = console or Console(highlight=False, soft_wrap=True)
    async with OpenAIClient(base_url, api_key) as client:
        name = model or await client.first_model()
        bodies = _file_bodies(load) if load.prompts is not None else _random_bodies(load, await _vocabulary(client, load))
        # Connections and JSON are made before the clock starts: they are the load's own work, not the server's.
        await client.open_connections(min(load.concurrency or len(bodies), len(bodies)))
        requests = [_request(body, name, load) for body in bodies]
        del bodies
        gc.collect()
        gc.freeze()  # a pause of this process would look like one of the server
        began = time.monotonic()
        samples = await _send_all(client, requests, load)
        seconds = time.monotonic() - began
    report = bench_report.summarize(samples, seconds)
    settings = {"model": name, "base_url": base_url, **dataclasses.asdict(load), "prompts": load.prompts and str(load.prompts)}
    console.print(bench_report.table(name, report))
    for error, count in report.errors.items():
        console.print(f"{count} failed: {error}")
    if plot is not None:
        bench_report.draw(samples, report, plot)
        console.print(f"drawn to {plot}")
    console.print(json.dumps({**settings, **report.as_json()}))
    return ExitCode.OK if report.completed else ExitCode.ENVIRONMENT


async def _vocabulary(client: OpenAIClient, load: Load) -> int:
    """How many token ids random prompts may use."""
    if load.vocab_size is not None:
        return load.vocab_size
    try:
        info = await client.server_info()
        return int(min(rank["vocab_size"] for rank in info["ranks"]))
    except (EnvironmentFault, LookupError, TypeError, ValueError):
        return _VOCABULARY_OF_STRANGERS


def _random_bodies(load: Load, vocab_size: int) -> list[dict[str, Any]]:
    """Prompts of exactly `input_len` tokens, answers of exactly `output_len`."""
    numbers = random.Random(load.seed)
    lowest = min(10, vocab_size - 1)  # the first ids are often special
    return [
        {
            "prompt": [numbers.randrange(lowest, vocab_size) for _ in range(load.input_len)],
            "max_tokens": load.output_len,
            "ignore_eos": True,
        }
        for _ in range(load.num_prompts)
    ]


def _file_bodies(load: Load) -> list[dict[str, Any]]:
    """The file's prompts in order, again from its start when there are fewer than asked for."""
    assert load.prompts is not None
    try:
        lines = [line for line in load.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"prompts file {load.prompts}: {error}") from error
    if not lines:
        raise UsageError(f"prompts file {load.prompts} has no line")
    read = [_line_body(line, load) for line in lines]
    return [read[number % len(read)] for number in range(load.num_prompts)]


def _line_body(line: str, load: Load) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    if isinstance(value, dict) and ("prompt" in value or "messages" in value):
        return {"max_tokens": load.output_len, **value}
    return {"prompt": line, "max_tokens": load.output_len}


def _request(body: dict[str, Any], model: str, load: Load) -> tuple[str, bytes]:
    """Path and body."""
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    whole = {"model": model, "temperature": load.temperature, **body, **stream}
    return "/chat/completions" if "messages" in body else "/completions", json.dumps(whole).encode()


async def _send_all(client: OpenAIClient, requests: list[tuple[str, bytes]], load: Load) -> list[Sample]:
    """Every request at its time; the samples in their order."""
    gate = asyncio.Semaphore(load.concurrency or len(requests))
    numbers = random.Random(load.seed + 1)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("requests", total=len(requests))

        async def one(path: str, body: bytes) -> Sample:
            async with gate:
                sample = await _send(client, path, body)
            progress.advance(task)
            return sample

        async with asyncio.TaskGroup() as group:
            tasks = []
            due = time.monotonic()
            for request in requests:
                if load.rate is not None:
                    due += numbers.expovariate(load.rate)
                    await asyncio.sleep(max(0.0, due - time.monotonic()))
                tasks.append(group.create_task(one(*request)))
    return [task.result() for task in tasks]


async def _send(client: OpenAIClient, path: str, body: bytes) -> Sample:
    """One streamed request, watched."""
    sample = Sample(begun=time.monotonic())
    finished: float | None = None
    try:
        async for data in client.events(path, body):
            now = time.monotonic()
            event = _event.decode(data)
            if any(choice.finish_reason is not None for choice in event.choices):
                finished = now
            if event.error is not None:
                sample.error = f"error in the stream: {event.error}"[:200]
            if event.usage is not None:
                sample.prompt_tokens = event.usage.prompt_tokens
                sample.output_tokens = event.usage.completion_tokens
            deltas = [choice.delta or _Delta(content=choice.text) for choice in event.choices]
            if any(delta.content or delta.reasoning_content or delta.tool_calls for delta in deltas):
                sample.arrivals.append(now)
    except EnvironmentFault as error:
        sample.error = str(error)
    except msgspec.MsgspecError as error:
        sample.error = f"an event that is no JSON of a completion: {error}"
    sample.ended = time.monotonic()
    if sample.output_tokens and finished is not None and not sample.arrivals:
        sample.arrivals.append(finished)  # tokens without text, such as an end that was to be ignored: they came by then
    if sample.error is None and not sample.arrivals:
        sample.error = "the stream ended without a token"
    sample.output_tokens = sample.output_tokens or len(sample.arrivals)
    return sample
