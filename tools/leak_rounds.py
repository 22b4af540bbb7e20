"""Treats a server badly, round after round, and shows that it keeps nothing: no file, no page, no memory.

`python -m tools.leak_rounds [--rounds 10] [LAUNCH FLAGS]`: bursts of connections, streams cut after one event, clients that leave
before their answer, clients that do not read. Exit code 1 if something grew.
"""

from __future__ import annotations

import argparse
import json
import resource
import selectors
import socket
import struct
import sys
import time
from typing import NamedTuple

from tools.launched import SETTLE_SECONDS, growth, serving

RSS_ALLOWANCE = 1.05
"""Growth of memory between the first rounds and the last that allocators explain."""


class Sizes(NamedTuple):
    """How often a round does each thing."""

    burst: int = 1000
    cut_streams: int = 300
    departures: int = 300
    slow_readers: int = 20


def request(*, version: bytes = b"1.1", **fields: object) -> bytes:
    body = json.dumps({"prompt": "1 + 2 = ", "ignore_eos": True, **fields}).encode()
    return b"POST /v1/completions HTTP/%s\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (version, len(body)) + body


def connect(port: int, receive_buffer: int | None = None) -> socket.socket:
    client = socket.socket()
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.settimeout(SETTLE_SECONDS)
    client.connect(("127.0.0.1", port))
    return client


def burst(port: int, count: int) -> dict[str, int]:
    """That many connections at once, each with a request; how often each status came."""
    statuses: dict[str, int] = {}
    with selectors.DefaultSelector() as selector:
        received: dict[socket.socket, bytes] = {}
        for _ in range(count):
            client = socket.socket()
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
            selector.register(client, selectors.EVENT_WRITE)
            received[client] = b""
        deadline = time.monotonic() + 4 * SETTLE_SECONDS
        while selector.get_map():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(selector.get_map())} of {count} connections got no answer")
            for key, events in selector.select(1.0):
                client = key.fileobj  # type: ignore[assignment]
                if events & selectors.EVENT_WRITE:
                    client.sendall(request(version=b"1.0", max_tokens=2))
                    selector.modify(client, selectors.EVENT_READ)
                elif part := client.recv(1 << 16):
                    received[client] += part
                else:
                    selector.unregister(client)
                    client.close()
    for answer in received.values():
        status = answer[9:12].decode()
        statuses[status] = statuses.get(status, 0) + 1
    return statuses


def round_of(port: int, sizes: Sizes) -> dict[str, int]:
    """One round; the statuses of its burst."""
    slow = [connect(port, receive_buffer=2048) for _ in range(sizes.slow_readers)]
    for client in slow:
        client.sendall(request(stream=True, max_tokens=3000, logprobs=20))
    statuses = burst(port, sizes.burst)
    cut = [connect(port) for _ in range(sizes.cut_streams)]
    for client in cut:
        client.sendall(request(stream=True, max_tokens=3000))
    for number, client in enumerate(cut):
        if not client.recv(1 << 16).startswith(b"HTTP/1.1 200"):
            raise ConnectionError("a stream did not begin")
        _leave(client, reset=number % 2 == 0)
    gone = [connect(port) for _ in range(sizes.departures)]
    for client in gone:
        client.sendall(request(max_tokens=3000))
    time.sleep(0.3)
    for number, client in enumerate(gone):
        _leave(client, reset=number % 2 == 0)
    for client in slow:
        _leave(client, reset=False)
    return statuses


def _leave(client: socket.socket, *, reset: bool) -> None:
    if reset:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def allow_many_files() -> None:
    """Both ends of a burst's connections may be open files of one machine."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1 << 16) if hard != resource.RLIM_INFINITY else 1 << 16, hard))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    arguments, flags = parser.parse_known_args()
    allow_many_files()
    readings = []
    with serving(flags) as server:
        for number in range(arguments.rounds):
            began = time.monotonic()
            statuses = round_of(server.port, Sizes())
            readings.append(server.settle())
            took = time.monotonic() - began
            sys.stdout.write(f"round {number}: {took:.1f} s, burst {statuses}, {readings[-1]}\n")
            sys.stdout.flush()
    found = growth(readings, RSS_ALLOWANCE)
    sys.stdout.write("\n".join(found or ["nothing leaks"]) + "\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
