"""Clients that leave, that stop reading, that are aborted by others: the engine is told once, and nothing stays behind."""

from __future__ import annotations

import itertools
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest
from waiting import PATIENCE

from minserve.server import app, engine_pool
from minserve.server.generate import SlowReaders
from tests.server.conftest import Answer, Edge

Start = Callable[..., AbstractContextManager[Edge]]


@pytest.fixture
def endless(start_edge: Start) -> Iterator[Edge]:
    """A server whose requests never end by themselves."""

    def script(_: Any) -> Iterator[int]:
        while True:
            yield 97

    with start_edge(script, max_model_len=1 << 40, num_seqs=1024) as edge:
        edge.engine.step_seconds = 0.002
        yield edge


def request_bytes(**fields: Any) -> bytes:
    body = json.dumps({"prompt": "x", **fields}).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def connect(edge: Edge, receive_buffer: int | None = None) -> socket.socket:
    client = socket.socket()
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.settimeout(PATIENCE)
    client.connect(("127.0.0.1", edge.port))
    return client


def read_to_the_end(client: socket.socket) -> None:
    while client.recv(1 << 20):
        pass


def test_300_streams_cut_after_one_chunk(endless: Edge) -> None:
    clients = [connect(endless) for _ in range(300)]
    for client in clients:
        client.sendall(request_bytes(stream=True, n=2))
    for number, client in enumerate(clients):
        assert client.recv(4096).startswith(b"HTTP/1.1 200")
        if number % 2:  # half of them with a reset
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
    endless.wait_for(lambda: endless.engine.num_live == 0)
    assert sorted(endless.engine.aborted) == sorted(request.id for request in endless.engine.added)
    assert endless.metric("aborts_total", cause="client_gone") == 600
    assert endless.complete(max_tokens=2).status == 200


def test_clients_that_leave_before_a_whole_answer(endless: Edge) -> None:
    clients = [connect(endless) for _ in range(50)]
    for client in clients:
        client.sendall(request_bytes())
    endless.wait_for(lambda: endless.engine.num_live == 50)
    for client in clients:
        client.close()
    endless.wait_for(lambda: endless.engine.num_live == 0)
    assert len(endless.engine.aborted) == 50


def test_a_client_that_leaves_while_it_waits_in_the_queue(endless: Edge) -> None:
    endless.engine.running.clear()
    client = connect(endless)
    client.sendall(request_bytes(stream=True))
    endless.wait_for(lambda: endless.engine.num_live == 1)
    client.close()
    endless.wait_for(lambda: endless.engine.num_live == 0)


def test_a_client_that_leaves_in_the_middle_of_its_body(endless: Edge) -> None:
    client = connect(endless)
    client.sendall(request_bytes()[:-5])
    client.close()
    assert endless.complete(max_tokens=2).status == 200
    assert len(endless.engine.added) == 1


def test_normal_ends_send_no_aborts(start_edge: Start) -> None:
    with start_edge("hello world") as edge:

        def one(number: int) -> Answer:
            return edge.complete(stream=number % 2 == 0, stop="wor" if number % 3 == 0 else None, n=1 + number % 2)

        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(one, range(300)))
        assert {answer.status for answer in answers} == {200}
        assert edge.engine.aborted == []
        assert edge.engine.num_live == 0
        assert edge.metric("aborts_total") == 0
        assert edge.metric("request_success_total", finished_reason="stop") == 450


def test_a_reader_that_stops_is_cut_off_and_holds_nobody_up(endless: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_pool, "MAX_UNREAD_TOKENS", 500)
    endless.engine.tokens_per_step = 20
    slow = connect(endless, receive_buffer=2048)
    slow.sendall(request_bytes(stream=True, logprobs=20))
    assert slow.recv(100).startswith(b"HTTP/1.1 200")
    assert endless.complete(max_tokens=100).status == 200
    endless.wait_for(lambda: endless.engine.num_live == 0)
    assert endless.metric("aborts_total", cause="slow_reader") == 1
    assert endless.metric("aborts_total") == 1
    with pytest.raises(ConnectionError):
        read_to_the_end(slow)
    slow.close()


def test_what_a_reader_that_stops_can_pile_up_is_bounded(start_edge: Start) -> None:
    """The limits as they are: the kernel's buffers on both ends, the writer's, and the unread tokens of one answer."""
    made = itertools.count()

    def script(_: Any) -> Iterator[int]:
        while next(made) < 100_000:
            yield 97

    with start_edge(script, max_model_len=1 << 40) as edge:
        edge.engine.step_seconds, edge.engine.tokens_per_step = 0.001, 20
        # What the engine runs ahead of a front that gets no time to read is in this buffer: a step or two.
        edge.engine._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        slow = connect(edge, receive_buffer=2048)
        slow.sendall(request_bytes(stream=True))
        assert slow.recv(100).startswith(b"HTTP/1.1 200")
        edge.wait_for(lambda: edge.engine.num_live == 0)
        assert edge.metric("aborts_total", cause="slow_reader") == 1
        buffered = app.UNSENT_BYTES + (1 << 17) + (1 << 16)  # a little is read at the client's end, the writer holds 64 KiB
        assert next(made) < engine_pool.MAX_UNREAD_TOKENS + 64 + buffered / 150 + 500
        with pytest.raises(ConnectionError):
            read_to_the_end(slow)
        slow.close()


def test_a_reader_that_stops_at_the_end_is_swept_away() -> None:
    class Generation:
        aborted_by = ""

        class mailbox:  # noqa: N801
            on_overflow = None

        def abort(self, cause: str) -> None:
            self.aborted_by = cause

    class Transport:
        aborted = False

        def abort(self) -> None:
            self.aborted = True

        def get_extra_info(self, name: str) -> socket.socket:
            assert name == "socket"
            return connection

    class Request:
        transport = Transport()

    generation, request, readers = Generation(), Request(), SlowReaders()
    with socket.socket() as connection, readers.watch(request, generation) as watch:  # type: ignore[arg-type]
        watch.blocked_since = time.monotonic()
        readers.sweep()
        assert not request.transport.aborted
        watch.blocked_since -= 61
        readers.sweep()
        assert request.transport.aborted
        assert generation.aborted_by == "slow_reader"


def test_abort_request_ends_answers_by_either_name(endless: Edge) -> None:
    results: dict[str, Answer] = {}

    def run(name: str, stream: bool) -> threading.Thread:
        def work() -> None:
            results[name] = endless.post("/v1/completions", {"prompt": "x", "stream": stream}, {"x-request-id": name})

        thread = threading.Thread(target=work)
        thread.start()
        return thread

    threads = [run("whole", False), run("stream", True), run("third", False)]
    endless.wait_for(lambda: endless.engine.num_live == 3 and endless.engine.steps > 10)
    assert endless.post("/abort_request", {"request_id": "nobody"}).json == {"aborted": 0}
    assert endless.post("/abort_request", {"request_id": "whole"}).json == {"aborted": 1}
    assert endless.post("/abort_request", {"rid": "stream"}).json == {"aborted": 1}
    assert endless.post("/abort_request", {"abort_all": True}).json == {"aborted": 1}
    for thread in threads:
        thread.join(PATIENCE)
    assert results["whole"].status == 499
    assert results["whole"].error["code"] == "request_aborted"
    assert results["stream"].status == 200
    assert results["stream"].events[-1]["error"]["code"] == "request_aborted"
    endless.wait_for(lambda: endless.engine.num_live == 0)
    assert endless.metric("aborts_total", cause="api") == 3


def test_one_choice_that_fails_ends_the_others(endless: Edge) -> None:
    endless.engine.fail_with = "no"
    assert endless.complete(n=3).status == 500
    endless.engine.fail_with = None
    endless.wait_for(lambda: endless.engine.num_live == 0)
    assert endless.complete(max_tokens=2).status == 200
