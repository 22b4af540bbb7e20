"""What tests of the engine's parts share."""

from __future__ import annotations

import socket

import pytest

from minserve.runtime.connection import FrontConnection


@pytest.fixture
def ends():
    """The front's socket, and the engine's end of the connection."""
    ours, theirs = socket.socketpair()
    connection = FrontConnection(theirs)
    yield ours, connection
    ours.close()
    connection.close()
