"""Bursts, full queues and long prompts: the server answers, keeps answering others, and holds a bounded amount."""

from __future__ import annotations

import contextlib
import http.client
import json
import resource
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from waiting import PATIENCE, once_within

from minserve.server.front import INLINE_BYTES
from minserve.server.tokenizer import Tokenizer
from tests.server.conftest import Answer, Edge
from tests.server.test_life import Child

Start = Callable[..., AbstractContextManager[Edge]]


@pytest.fixture
def many_files() -> Iterator[None]:
    """Room for both ends of a burst in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else 1 << 16, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
def test_2000_connections_at_once_get_an_answer_each(start_edge: Start) -> None:
    body = b'{"prompt":"x","max_tokens":2}'
    request = b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    with start_edge("ok", max_queued_requests=500) as edge, selectors.DefaultSelector() as selector:
        edge.engine.running.clear()  # nobody is served before all have come: the queue must overflow
        received: dict[socket.socket, bytes] = {}
        for _ in range(2000):
            client = socket.socket()
            client.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                client.connect(("127.0.0.1", edge.port))
            selector.register(client, selectors.EVENT_WRITE)
            received[client] = b""
        open_clients = len(received)
        deadline = time.monotonic() + PATIENCE
        while open_clients:
            assert time.monotonic() < deadline
            if not edge.engine.running.is_set() and edge.engine.num_live >= 564:
                edge.engine.running.set()
            for key, events in selector.select(0.1):
                client = key.fileobj
                assert isinstance(client, socket.socket)
                if events & selectors.EVENT_WRITE:
                    client.sendall(request)
                    selector.modify(client, selectors.EVENT_READ)
                    continue
                part = client.recv(65536)
                received[client] += part
                if not part:
                    selector.unregister(client)
                    client.close()
                    open_clients -= 1
        statuses = [answer[9:12] for answer in received.values()]
        assert set(statuses) == {b"200", b"429"}
        assert statuses.count(b"200") >= 564
        full = next(answer for answer in received.values() if answer[9:12] == b"429")
        assert b"Retry-After: " in full
        assert json.loads(full.partition(b"\r\n\r\n")[2])["error"]["code"] == "queue_full"
        assert edge.engine.num_live == 0
        assert edge.complete().status == 200


def test_a_full_queue_is_429_and_opens_again(start_edge: Start) -> None:
    with start_edge("ok", max_queued_requests=2, num_seqs=1) as edge:
        edge.engine.running.clear()
        answers: list[Answer] = []
        threads = [threading.Thread(target=lambda: answers.append(edge.complete())) for _ in range(3)]
        for number, thread in enumerate(threads):
            thread.start()
            edge.wait_for(lambda number=number: edge.engine.num_live == number + 1)
        refused = edge.complete(stream=True)
        assert refused.status == 429
        assert refused.error["type"] == "rate_limit_error"
        assert int(refused.headers["Retry-After"]) > 0
        assert edge.get("/health").status == 200
        edge.engine.running.set()
        for thread in threads:
            thread.join(PATIENCE)
        assert [answer.status for answer in answers] == [200, 200, 200]
        assert edge.complete(n=100).status == 200  # wider than batch and queue together, and legal


def test_too_many_large_bodies_at_once(start_edge: Start) -> None:
    with start_edge("ok", max_body_bytes=100_000, max_model_len=1 << 20) as edge:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"
        clients = [socket.create_connection(("127.0.0.1", edge.port), timeout=PATIENCE) for _ in range(4)]
        for client in clients:
            client.sendall(head + b"x" * 99_999)
        edge.wait_for(lambda: edge.post("/v1/completions", {"prompt": "y" * 50_000}).status == 429)
        for client in clients:
            client.close()
        edge.wait_for(lambda: edge.post("/v1/completions", {"prompt": "y" * 50_000}).status == 200)


@pytest.fixture(scope="module")
def servers(model_dir: Path) -> Iterator[tuple[Child, Child]]:
    """In processes of their own: the test's own work must not count as the server's. The second has nothing to do."""
    children = Child(model_dir, 1.0), Child(model_dir, 1.0)
    for child in children:
        child.wait_for("/ready", b"HTTP/1.0 200")
    yield children
    for child in children:
        child.process.kill()
        child.process.wait()


def probe(server: Child) -> float:
    """Seconds of /health."""
    began = time.monotonic()
    assert server.get("/health").startswith(b"HTTP/1.0 200")
    return time.monotonic() - began


@pytest.fixture(scope="module")
def slowness() -> float:
    """How much longer than a core of a present server this machine's takes, at least 1: for a text that is parsed in one go."""
    text = json.dumps("é" * 4_500_000).encode()
    taken = []
    for _ in range(3):
        began = time.thread_time()
        msgspec.json.decode(text)
        taken.append(time.thread_time() - began)
    return max(1.0, min(taken) / 0.04)


def longest_delay(servers: tuple[Child, Child], body: bytes, path: str) -> tuple[float, int]:
    """By how many seconds this body holds up /health at most, and its answer's status.

    What an idle server takes at the same moment is not counted, and seconds are those of a whole core: a server that gets a
    third of one takes three times as long.
    """
    server, idle = servers
    began, process = time.monotonic(), psutil.Process(server.process.pid)
    used = sum(process.cpu_times()[:2])
    statuses: list[int] = []

    def work() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        statuses.append(connection.getresponse().status)
        connection.close()

    thread = threading.Thread(target=work)
    longest = 0.0
    thread.start()
    with ThreadPoolExecutor(1) as beside:
        while thread.is_alive():
            same_moment = beside.submit(probe, idle)
            longest = max(longest, probe(server) - same_moment.result())
            time.sleep(0.02)
    share = (sum(process.cpu_times()[:2]) - used) / (time.monotonic() - began)
    return longest * min(1.0, share), statuses[0]


def test_token_ids_do_not_wait_for_texts(start_edge: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """While every thread for texts is taken, and although the body is a long one."""
    encode, may_end = Tokenizer.encode, threading.Event()

    def slow_encode(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        may_end.wait(PATIENCE)
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", slow_encode)
    spaces = b" " * INLINE_BYTES
    bodies = {
        kind: b'{"max_tokens":1,"prompt":%b%b}' % (prompt, spaces) for kind, prompt in (("text", b'"x"'), ("ids", b"[1, 2]"))
    }
    with start_edge("ok") as edge, ThreadPoolExecutor(4) as clients:
        texts = [clients.submit(edge.post, "/v1/completions", bodies["text"]) for _ in range(4)]
        try:
            assert edge.post("/v1/completions", bodies["ids"]).status == 200
            assert not any(text.done() for text in texts)
        finally:
            may_end.set()
        assert [text.result().status for text in texts] == [200] * 4


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"prompt": "hello " * (27_000_000 // 6)}, 400),
        ({"prompt": "é" * (27_000_000 // 6)}, 400),
        ({"prompt": list(range(1, 100)) * 70_000}, 400),
        ({"messages": [{"role": "user", "content": "hello " * (27_000_000 // 6)}]}, 400),
        ({"unknown": [{"a": [1, 2, 3]}] * 30_000, "prompt": "x", "max_tokens": 1}, 200),
        ({"unknown": [[{}]] * 8_000_000, "prompt": "x", "max_tokens": 1}, 400),
        ({"prompt": [[12345] * 1000] * 1000}, 400),
        ({"prompt": "hello " * 200_000}, 400),
    ],
    ids=["text", "escaped", "ids", "chat", "unknown", "structure", "lists", "tokenised"],
)
def test_a_long_prompt_does_not_hold_up_health(
    servers: tuple[Child, Child], slowness: float, fields: dict[str, Any], status: int
) -> None:
    body = json.dumps(fields, separators=(",", ":")).encode()
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"

    def scenario() -> float:
        delay, answered = longest_delay(servers, body, path)
        assert answered == status
        return delay

    once_within(0.1 * slowness, scenario, tries=8)
