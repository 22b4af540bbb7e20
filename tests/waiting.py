"""How tests wait: for the event itself, as long as a slow machine takes; bounds on time hold once cleanly. Knows no server."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Callable

PATIENCE = 120.0
"""Seconds after which something counts as hanging. What is sound is far quicker, on the slowest machine too."""
_OUTSIDE = range(15_000, 32_000)
"""Ports that no kernel gives by itself: Linux's own begin at 32,768."""


def until(condition: Callable[[], bool], what: str = "the condition", within: float = PATIENCE, pause: float = 0.01) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true within {within:g} s"
        time.sleep(pause)


def once_within(bound: float, scenario: Callable[[], float], tries: int = 3) -> None:
    """The scenario takes (its own word) less than `bound` seconds in one of the tries.

    A busy machine stands still now and then, and no program is quick then; a program that is slow is so every time.
    """
    taken: list[float] = []
    while not taken or taken[-1] >= bound:
        assert len(taken) < tries, f"took {taken} s, never less than {bound:g} s"
        taken.append(scenario())


def unused_port() -> int:
    """For a program that must be told a port before it starts: nobody gets this one by chance in between."""
    while True:
        port = random.SystemRandom().choice(_OUTSIDE)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def port_is_free(port: int) -> bool:
    """False while somebody listens there."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
