"""The engine's end of the socket: frames cut anywhere, waiting, and a peer that goes away."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from minserve import config as configuration
from minserve.config import Config
from minserve.messages import AbortRequests, FrameError, Shutdown, StepOutputs, StepStats, encode_frame, frame
from minserve.runtime.connection import DESCRIPTOR_VARIABLE, FrontConnection, FrontGone


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    connection = FrontConnection(theirs)
    yield ours, connection
    ours.close()
    connection.close()


def test_config_and_messages_in_one_piece(ends):
    ours, connection = ends
    ours.sendall(frame(configuration.encode(Config(model="x"))) + encode_frame(AbortRequests([1])) + encode_frame(Shutdown()))
    assert connection.receive_config().model == "x"
    assert connection.receive(0.0) == [AbortRequests([1]), Shutdown()]
    assert connection.receive(0.0) == []


def test_a_frame_may_come_byte_by_byte(ends):
    ours, connection = ends
    got = []
    for byte in encode_frame(AbortRequests([7, 8])):
        ours.sendall(bytes([byte]))
        got += connection.receive(0.0)
    assert got == [AbortRequests([7, 8])]


def test_waiting_ends_at_once_when_something_comes_and_after_the_time_otherwise(ends):
    ours, connection = ends
    began = time.monotonic()
    assert connection.receive(0.05) == []
    assert 0.04 < time.monotonic() - began < 1.0
    threading.Timer(0.05, ours.sendall, [encode_frame(Shutdown())]).start()
    began = time.monotonic()
    assert connection.receive(10.0) == [Shutdown()]
    assert time.monotonic() - began < 5.0


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
