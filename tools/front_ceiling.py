"""How much of HTTP's own speed the front keeps: streamed tokens beside a bare aiohttp handler that writes the same bytes.

`python -m tools.front_ceiling [--workers 1 2 4]` starts the server with its mock engine, the bare handler as a process of its
own, and reads streams from both with plain sockets. Costs are CPU time of the serving processes, which other work on the machine
hardly changes; wall-clock rates are given beside them. Last, how long /health takes while streams are sent as fast as they go,
asked by a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import selectors
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

from aiohttp import web

from tools.launched import Server, serving, started

PROMPT = {"messages": [{"role": "user", "content": "What is 23 + 58?"}], "stream": True, "ignore_eos": True}
STREAMS = {1: 6000, 64: 1000, 256: 250}
"""Streams at once, and tokens of each."""
PROBED_STREAMS, PROBED_TOKENS, PROBE_SECONDS = (60, 200), 2000, 4.0
PACED_STREAMS, PACED_RATE, PACED_TOKENS = 256, 50.0, 150
LEAST_TOKENS = 30_000
FIRST_BYTES = 200
REPEATS = 3
END = b"0\r\n\r\n"
"""The last chunk of an HTTP body."""


class Cost(NamedTuple):
    """Of one way of serving at one number of streams."""

    cpu_seconds: float
    """Per token, of the processes that speak HTTP."""
    tokens_per_second: float

    @property
    def per_core(self) -> float:
        """Tokens that one whole core would stream in a second."""
        return 1.0 / self.cpu_seconds


def cpu_seconds(server: Server) -> float:
    """Of all its processes but the engine."""
    return sum(float(times.user + times.system) for times in (process.cpu_times() for process in server.processes()[0]))


def request(port: int, max_tokens: int, **more: object) -> bytes:
    body = json.dumps({**PROMPT, "max_tokens": max_tokens, **more}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: application/json\r\n" % port
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def connect(port: int) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), timeout=60)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client


def stream(server: Server, num_streams: int, max_tokens: int, **more: object) -> Cost:
    """Reads that many streams to their ends; few streams several times, since CPU time is told in hundredths of a second."""
    costs = [
        _stream_once(server, num_streams, max_tokens, **more) for _ in range(max(1, LEAST_TOKENS // (num_streams * max_tokens)))
    ]
    return Cost(statistics.fmean(cost.cpu_seconds for cost in costs), statistics.fmean(cost.tokens_per_second for cost in costs))


def _stream_once(server: Server, num_streams: int, max_tokens: int, **more: object) -> Cost:
    clients = [connect(server.port) for _ in range(num_streams)]
    with selectors.DefaultSelector() as selector:
        spent, began = cpu_seconds(server), time.monotonic()
        for client in clients:
            client.sendall(request(server.port, max_tokens, **more))
            selector.register(client, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                data = connection.recv(1 << 18)
                if not data:
                    raise ConnectionError("a stream ended too early")
                if data.endswith(END):
                    selector.unregister(connection)
        seconds, spent = time.monotonic() - began, cpu_seconds(server) - spent
    for client in clients:
        client.close()
    tokens = num_streams * max_tokens
    return Cost(spent / tokens, tokens / seconds)


def answer(client: socket.socket, port: int, max_tokens: int) -> tuple[bytes, float]:
    """A whole answer, and the seconds from sending the request to its first byte."""
    began = time.perf_counter()
    client.sendall(request(port, max_tokens))
    data = client.recv(1 << 16)
    first = time.perf_counter() - began
    while not data.endswith(END):
        data += client.recv(1 << 16)
    return data, first


def first_byte_seconds(port: int) -> float:
    """Median, on one connection."""
    with connect(port) as client:
        return statistics.median(answer(client, port, 1)[1] for _ in range(FIRST_BYTES))


def probe(port: int) -> None:
    """Asks /health again and again, and says how long that took."""
    times: list[float] = []
    end = time.monotonic() + PROBE_SECONDS
    with connect(port) as client:
        while (began := time.monotonic()) < end:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            if b" 200 " not in client.recv(1 << 12):
                raise ConnectionError("the server is not healthy")
            times.append(1e3 * (time.monotonic() - began))
            time.sleep(0.02)
    times.sort()
    median, tail = times[len(times) // 2], times[len(times) * 9 // 10]
    sys.stdout.write(f"/health median {median:.0f} ms, p90 {tail:.0f} ms, worst {times[-1]:.0f} ms ({len(times)} times)\n")


def health(server: Server, num_streams: int, **more: object) -> str:
    """What `probe` says while that many streams are read."""
    words = [sys.executable, "-m", "tools.front_ceiling", "--probe", str(server.port)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as probing:
        seen = 0.0
        while probing.poll() is None:
            seen = stream(server, num_streams, PROBED_TOKENS, **more).tokens_per_second
        said = probing.communicate()[0]
    return f" {num_streams} streams at {seen:.0f} tokens/s: {said}"


@contextlib.contextmanager
def minserve(workers: int, rate: float, max_num_seqs: int) -> Iterator[Server]:
    words = ["--mock-engine", str(rate), "--front-workers", str(workers), "--max-num-seqs", str(max_num_seqs)]
    with serving(words) as server:
        ready_in_a_row = 0
        while ready_in_a_row < 10 * workers:  # each connection may meet another worker
            with connect(server.port) as client:
                client.sendall(b"GET /ready HTTP/1.0\r\n\r\n")
                ready_in_a_row = ready_in_a_row + 1 if b" 200 " in client.recv(100) else 0
        yield server


def bare(event: bytes, rate: float) -> contextlib.AbstractContextManager[Server]:
    port = r"port (\d+)"
    return started(["-m", "tools.front_ceiling", "--bare", event.hex(), "--rate", str(rate)], port, port)


async def serve_bare(event: bytes, rate: float) -> None:
    """Writes a ready-made event for each token, as fast as the client takes them, or at the pace of a common step."""
    step: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def handle(incoming: web.BaseRequest) -> web.StreamResponse:
        tokens = int(json.loads(await incoming.read())["max_tokens"])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(incoming)
        for _ in range(tokens):
            if rate:
                await asyncio.shield(step)
            await response.write(event)
        await response.write_eof()
        return response

    runner = web.ServerRunner(web.Server(handle))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
    await site.start()
    sys.stdout.write(f"port {runner.addresses[0][1]}\n")
    while True:
        await asyncio.sleep(1 / rate if rate else 3600)
        reached, step = step, asyncio.get_running_loop().create_future()
        reached.set_result(None)


def best(server: Server, num_streams: int, max_tokens: int) -> Cost:
    """The median of some repeats, after one to warm up."""
    stream(server, num_streams, max(1, max_tokens // 10))
    costs = [stream(server, num_streams, max_tokens) for _ in range(REPEATS)]
    return sorted(costs)[REPEATS // 2]


def line(name: str, ours: Cost, theirs: Cost) -> str:
    def told(cost: Cost) -> str:
        return f"{cost.cpu_seconds * 1e6:5.1f} us a token, {cost.per_core:7.0f}/s a core ({cost.tokens_per_second:7.0f}/s seen)"

    ratio = theirs.cpu_seconds / ours.cpu_seconds
    return f"  {name:26} front {told(ours)}   bare {told(theirs)}   ratio {ratio:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[1])
    parser.add_argument("--bare", help=argparse.SUPPRESS)
    parser.add_argument("--rate", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--probe", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.probe is not None:
        probe(arguments.probe)
        return
    if arguments.bare is not None:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(serve_bare(bytes.fromhex(arguments.bare), arguments.rate))
        return
    with minserve(1, 0, 8) as server:
        with connect(server.port) as client:
            found = re.search(rb'data: [^\n]*"content":"[^"]+"[^\n]*\n\n', answer(client, server.port, 8)[0])
        assert found is not None
        event = found[0]
        ours_first = first_byte_seconds(server.port)
    with bare(event, 0) as server:
        theirs_first = first_byte_seconds(server.port)
        free = {number: best(server, number, tokens) for number, tokens in STREAMS.items()}
    with bare(event, PACED_RATE) as server:
        paced = best(server, PACED_STREAMS, PACED_TOKENS)
    say = sys.stdout.write
    say(f"time to first byte, median: front {ours_first * 1e3:.2f} ms, bare {theirs_first * 1e3:.2f} ms\n")
    for workers in arguments.workers:
        say(f"{workers} front worker{'s' if workers > 1 else ''}; an event has {len(event)} bytes\n")
        with minserve(workers, 0, max(STREAMS)) as server:
            for number, tokens in STREAMS.items():
                say(line(f"{number} streams", best(server, number, tokens), free[number]) + "\n")
        with minserve(workers, PACED_RATE, PACED_STREAMS) as server:
            name = f"{PACED_STREAMS} streams, {1000 / PACED_RATE:.0f} ms steps"
            say(line(name, best(server, PACED_STREAMS, PACED_TOKENS), paced) + "\n")
    with minserve(1, 0, max(PROBED_STREAMS)) as server:
        for number in PROBED_STREAMS:
            say("plain," + health(server, number))
            say("20 log-probabilities," + health(server, number, logprobs=True, top_logprobs=20))


if __name__ == "__main__":
    main()
