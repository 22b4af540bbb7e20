"""Keeps a server busy with everything that clients do, for as long as asked, and shows that it stays as it was.

`python -m tools.soak [--minutes 30] [--plot FILE] [LAUNCH FLAGS]`: answers of every kind, streams cut short, clients that leave,
bad requests. Once a minute all is quiet for a moment: memory, open files and pages are read then. Exit code 1 if anything grew,
was answered otherwise than it should be, or was logged as an error.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import matplotlib.pyplot as plt

from tools.launched import Reading, Server, growth, serving
from tools.leak_rounds import allow_many_files

ROUND_SECONDS = 60.0
CLIENTS = 4
PAUSE_SECONDS = 0.15
"""Mean of each client's pause between two requests: a low load, so that half an hour is bearable beside other work."""
ALLOWED_GROWTH = 1.01
MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_THRESHOLD_": "65536"}
"""What is freed goes back to the system at once, so that a reading is what is held and not what was once needed."""

Session = aiohttp.ClientSession


class Surprise(Exception):
    """The server answered otherwise than it should."""


class Kind(NamedTuple):
    name: str
    weight: int
    act: Callable[[Session, random.Random], Awaitable[None]]


def expect(condition: bool, what: object) -> None:
    if not condition:
        raise Surprise(str(what)[:300])


async def post(session: Session, path: str, body: Any, status: int = 200) -> Any:
    """The answer's JSON, of this status."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with session.post(path, data=data) as response:
        text = await response.text()
        expect(response.status == status, f"{path} answered {response.status}, not {status}: {text}")
        return json.loads(text)


def chat(question: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}], **fields}


async def right_answer(session: Session, numbers: random.Random) -> None:
    one, other = numbers.randrange(10, 90), numbers.randrange(10, 90)
    answer = await post(session, "/v1/chat/completions", chat(f"What is {one} + {other}?", temperature=0))
    expect(answer["choices"][0]["message"]["content"] == str(one + other), answer)


async def several_choices(session: Session, numbers: random.Random) -> None:
    body = {
        "prompt": "7 + 8 = ",
        "n": 3,
        "max_tokens": numbers.randrange(1, 40),
        "logprobs": 2,
        "seed": numbers.randrange(1 << 30),
    }
    expect(len((await post(session, "/v1/completions", body))["choices"]) == 3, "not 3 choices")


async def held_to_a_form(session: Session, numbers: random.Random) -> None:
    schema = {"type": "object", "properties": {"sum": {"enum": [numbers.randrange(100), 7]}}, "required": ["sum"]}
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema | {"additionalProperties": False}}}
    answer = await post(session, "/v1/chat/completions", chat("What is 3 + 4?", response_format=form, max_tokens=200))
    expect("sum" in json.loads(answer["choices"][0]["message"]["content"]), answer)


async def long_prompt(session: Session, numbers: random.Random) -> None:
    text = " ".join(str(numbers.randrange(1000)) for _ in range(numbers.randrange(50, 400)))
    await post(session, "/v1/completions", {"prompt": text, "max_tokens": 4})


async def other_apis(session: Session, numbers: random.Random) -> None:
    body = {
        "model": "embedded",
        "max_tokens": 16,
        "messages": [{"role": "user", "content": f"What is 1 + {numbers.randrange(9)}?"}],
    }
    await post(session, "/v1/messages", body)
    await post(session, "/v1/responses", {"input": "What is 2 + 2?", "max_output_tokens": 16})


async def stream(session: Session, numbers: random.Random, cut: int | None = None) -> None:
    """A stream read to its end, or left after `cut` events."""
    body = {"prompt": "count", "max_tokens": numbers.randrange(20, 120), "ignore_eos": True, "stream": True}
    async with session.post("/v1/completions", data=json.dumps(body)) as response:
        expect(response.status == 200, response.status)
        last = b""
        events = 0
        async for line in response.content:
            events += line.startswith(b"data: ")
            last = line.strip() or last
            if events == cut:
                response.close()
                return
        expect(last == b"data: [DONE]", last)


async def cut_stream(session: Session, numbers: random.Random) -> None:
    await stream(session, numbers, cut=numbers.randrange(1, 15))


async def departure(session: Session, numbers: random.Random) -> None:
    """Leaves before the answer is there."""
    body = {"prompt": "count", "max_tokens": 2000, "ignore_eos": True}
    with contextlib.suppress(TimeoutError):
        async with (
            asyncio.timeout(numbers.uniform(0.01, 0.3)),
            session.post("/v1/completions", data=json.dumps(body)) as response,
        ):
            await response.read()


async def bad_request(session: Session, numbers: random.Random) -> None:
    bad = numbers.choice(
        [
            b"{",
            b"",
            b"\xff\xfe",
            {"prompt": "x", "max_tokens": "many"},
            {"prompt": "x", "temperature": 7},
            {"prompt": [1 << 20]},
            {"prompt": "x", "logit_bias": {"999999": 1}},
            {"prompt": "1 " * 9000},
            {"prompt": "x", "n": 5_000_000},
        ]
    )
    error = (await post(session, "/v1/completions", bad, 400))["error"]
    expect(bool(error["message"]), error)


async def look(session: Session, _: random.Random) -> None:
    for path in ("/health", "/ready", "/metrics", "/server_info", "/"):
        async with session.get(path) as response:
            expect(response.status == 200, f"{path} {response.status}")
            await response.read()


KINDS = (
    Kind("right answer", 6, right_answer),
    Kind("whole stream", 4, stream),
    Kind("cut stream", 4, cut_stream),
    Kind("client leaves", 3, departure),
    Kind("bad request", 4, bad_request),
    Kind("several choices", 2, several_choices),
    Kind("held to a form", 2, held_to_a_form),
    Kind("long prompt", 2, long_prompt),
    Kind("other APIs", 1, other_apis),
    Kind("health, metrics, page", 1, look),
)


async def client(port: int, seed: int, until: float, counts: collections.Counter[str], surprises: list[str]) -> None:
    numbers = random.Random(seed)
    async with Session(f"http://127.0.0.1:{port}", headers={"Content-Type": "application/json"}) as session:
        while time.monotonic() < until:
            kind = numbers.choices(KINDS, [kind.weight for kind in KINDS])[0]
            try:
                async with asyncio.timeout(60):
                    await kind.act(session, numbers)
                counts[kind.name] += 1
            except (Surprise, aiohttp.ClientError, TimeoutError, LookupError, ValueError) as fault:
                surprises.append(f"{kind.name}: {type(fault).__name__} {fault}")
            await asyncio.sleep(numbers.expovariate(1 / PAUSE_SECONDS))


async def round_of(port: int, seeds: itertools.count[int], until: float, counts: collections.Counter[str]) -> list[str]:
    """What was a surprise in one round."""
    surprises: list[str] = []
    await asyncio.gather(*(client(port, next(seeds), until, counts, surprises) for _ in range(CLIENTS)))
    return surprises


def table(readings: list[Reading], answered: list[int]) -> str:
    lines = [
        "| minute | requests | front, MB | engine, MB | open files | pages in use | running |",
        "|---|---|---|---|---|---|---|",
    ]
    for minute, (reading, count) in enumerate(zip(readings, answered, strict=True)):
        memory = f"{reading.megabytes:.1f} | {reading.engine_megabytes:.1f}"
        lines.append(f"| {minute} | {count:,} | {memory} | {reading.files} | {reading.pages:g} | {reading.running:g} |")
    return "\n".join(lines)


def draw(readings: list[Reading], file: Path) -> None:
    figure, (memory, files) = plt.subplots(2, 1, figsize=(8, 4.5), sharex=True, layout="constrained")
    minutes = range(len(readings))
    memory.plot(minutes, [reading.engine_megabytes for reading in readings], label="engine", color="#0f766e")
    memory.plot(minutes, [reading.megabytes for reading in readings], label="front", color="#b45309")
    memory.set(ylabel="resident memory, MB", ylim=(0, None))
    memory.legend()
    files.plot(minutes, [reading.files for reading in readings], label="open files", color="#0f766e")
    files.plot(minutes, [100 * reading.pages for reading in readings], label="KV pages in use, %", color="#b45309")
    files.set(xlabel="minute", ylim=(-2, None))
    files.legend()
    figure.savefig(file, dpi=110)
    plt.close(figure)


def soak(server: Server, minutes: int) -> tuple[list[Reading], list[int], collections.Counter[str], list[str]]:
    seeds = itertools.count()
    counts: collections.Counter[str] = collections.Counter()
    readings, answered, surprises = [server.settle()], [0], []
    for minute in range(minutes):
        surprises += asyncio.run(round_of(server.port, seeds, time.monotonic() + ROUND_SECONDS, counts))
        readings.append(server.settle())
        answered.append(counts.total())
        sys.stderr.write(f"minute {minute + 1}: {counts.total()} requests, {len(surprises)} surprises, {readings[-1]}\n")
    return readings, answered, counts, surprises


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=int, default=30)
    parser.add_argument("--plot", type=Path)
    arguments, flags = parser.parse_known_args()
    allow_many_files()
    os.environ.update(MALLOC)
    with serving([*flags, "--num-pages", "400"]) as server:
        readings, answered, counts, surprises = soak(server, arguments.minutes)
        found = surprises + server.errors() + growth(readings, ALLOWED_GROWTH)
    if arguments.plot is not None:
        draw(readings, arguments.plot)
    sys.stdout.write(table(readings, answered) + "\n\n" + ", ".join(f"{name} {count:,}" for name, count in counts.items()) + "\n")
    sys.stdout.write("\n".join(found or ["nothing grew, nothing failed"]) + "\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
