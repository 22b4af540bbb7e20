"""The engine's end of the socket: frames cut anywhere, waiting, and a peer that goes away."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from waiting import PATIENCE

from minserve import config as configuration
from minserve.config import Config
from minserve.messages import (
    AbortRequests,
    FrameError,
    FrameReader,
    Reply,
    Shutdown,
    Starting,
    StepOutputs,
    StepStats,
    ToFront,
    decode_to_front,
    encode_frame,
    frame,
)
from minserve.request import TokenOutput
from minserve.runtime import connection as connection_module
from minserve.runtime.connection import FrontConnection, FrontGone
from minserve.seat import DESCRIPTOR_VARIABLE


def test_config_and_messages_in_one_piece(ends):
    ours, connection = ends
    ours.sendall(frame(configuration.encode(Config(model="x"))) + encode_frame(AbortRequests([1])) + encode_frame(Shutdown()))
    assert connection.receive_config().model == "x"
    assert connection.receive(0.0) == [AbortRequests([1]), Shutdown()]
    assert connection.receive(0.0) == []


def test_a_frame_may_come_byte_by_byte(ends):
    ours, connection = ends
    got = []
    assert not connection.midway
    for byte in encode_frame(AbortRequests([7, 8])):
        ours.sendall(bytes([byte]))
        got += connection.receive(0.0)
        assert connection.midway == (not got)
    assert got == [AbortRequests([7, 8])]


def test_waiting_ends_at_once_when_something_comes_and_after_the_time_otherwise(ends):
    ours, connection = ends
    began = time.monotonic()
    assert connection.receive(0.05) == []
    assert time.monotonic() - began > 0.04
    threading.Timer(0.05, ours.sendall, [encode_frame(Shutdown())]).start()
    began = time.monotonic()
    assert connection.receive(2 * PATIENCE) == [Shutdown()]
    assert time.monotonic() - began < PATIENCE


def test_a_closed_front_is_gone_for_reading_and_writing(ends):
    ours, connection = ends
    ours.close()
    with pytest.raises(FrontGone):
        connection.receive(0.0)
    with pytest.raises(FrontGone):
        connection.receive_config()
    with pytest.raises(FrontGone):
        connection.send(StepOutputs([], StepStats()))


def test_bytes_that_are_no_message_are_refused(ends):
    ours, connection = ends
    ours.sendall(frame(b"\xc1"))
    with pytest.raises(FrameError):
        connection.receive(0.1)


def test_the_socket_is_inherited_by_number(monkeypatch):
    ours, theirs = socket.socketpair()
    monkeypatch.setenv(DESCRIPTOR_VARIABLE, str(theirs.detach()))
    connection = FrontConnection.inherited()
    connection.send(StepOutputs([], StepStats()))
    assert ours.recv(100)
    connection.close()
    ours.close()


@pytest.fixture
def two_workers() -> Iterator[tuple[list[socket.socket], FrontConnection]]:
    pairs = [socket.socketpair() for _ in range(2)]
    connection = FrontConnection(*(theirs for _, theirs in pairs))
    yield [ours for ours, _ in pairs], connection
    for ours, _ in pairs:
        ours.close()
    connection.close()


def heard(worker: socket.socket) -> list[ToFront]:
    """What has arrived at a worker by now."""
    worker.settimeout(0.05)
    try:
        return [decode_to_front(body) for body in FrameReader().feed(worker.recv(1 << 20))]
    except TimeoutError:
        return []


def test_workers_of_one_front_hear_what_is_theirs(two_workers: tuple[list[socket.socket], FrontConnection]) -> None:
    workers, connection = two_workers
    workers[1].sendall(encode_frame(AbortRequests([3])))
    workers[0].sendall(encode_frame(AbortRequests([2])))
    assert connection.receive(1.0) == [AbortRequests([2]), AbortRequests([3])]
    outputs = [TokenOutput(request_id=number, token_ids=(number,)) for number in (2, 3, 5)]
    connection.send(StepOutputs(outputs, StepStats(steps=1)))
    assert [heard(worker) for worker in workers] == [
        [StepOutputs(outputs[:1], StepStats(steps=1))],
        [StepOutputs(outputs[1:], StepStats(steps=1))],
    ]
    connection.send(StepOutputs(outputs[:1], StepStats()))
    connection.send(Reply(7, "yes"))
    assert [heard(worker) for worker in workers] == [[StepOutputs(outputs[:1], StepStats())], [Reply(7, "yes")]]
    connection.send(Starting("load", 0.5))
    assert [heard(worker) for worker in workers] == [[Starting("load", 0.5)]] * 2


def test_a_worker_without_requests_still_feels_the_pulse(
    two_workers: tuple[list[socket.socket], FrontConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    workers, connection = two_workers
    monkeypatch.setattr(connection_module, "_PULSE_SECONDS", 0.2)
    began = time.monotonic()
    beats = 0
    while beats < 4:
        assert time.monotonic() - began < PATIENCE
        connection.send(StepOutputs([TokenOutput(request_id=2)], StepStats(steps=7)))
        heard(workers[0])
        beats += len(heard(workers[1]))
    assert time.monotonic() - began > 3 * 0.2


def test_the_engine_leaves_when_all_workers_have_said_so(two_workers: tuple[list[socket.socket], FrontConnection]) -> None:
    workers, connection = two_workers
    workers[0].sendall(encode_frame(AbortRequests([2])) + encode_frame(Shutdown()))
    assert connection.receive(1.0) == [AbortRequests([2])]
    assert workers[0].recv(1) == b"", "a worker that is done is let go at once"
    connection.send(StepOutputs([TokenOutput(request_id=3)], StepStats()))
    assert len(heard(workers[1])) == 1
    workers[1].sendall(encode_frame(Shutdown()))
    assert connection.receive(1.0) == [Shutdown()]


def test_the_death_of_one_worker_is_the_death_of_the_front(two_workers: tuple[list[socket.socket], FrontConnection]) -> None:
    workers, connection = two_workers
    workers[1].close()
    with pytest.raises(FrontGone):
        connection.receive(1.0)
