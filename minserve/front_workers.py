"""Several fronts on one port: a process each, started together and ending together.

Knows processes, signals and exit codes; nothing of HTTP or engines beyond the sockets that it hands out.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import types
from collections.abc import Sequence
from multiprocessing import connection as waiting
from multiprocessing.context import ForkProcess
from pathlib import Path

from minserve.config import Config
from minserve.errors import ExitCode, ServerError
from minserve.process_ends import SIGNALS, die_with, leave_on_sigterm
from minserve.server.app import serve
from minserve.server.front import Siblings

_IN_ORDER = (ExitCode.OK, ExitCode.INTERRUPTED)
_LEAVE_WITHIN = 5.0
"""Seconds that workers get, once one has failed, before they are killed."""

log = logging.getLogger("minserve.launch")


class _Group:
    """The workers. Signals that this process gets are passed on to all of them."""

    def __init__(self) -> None:
        self.workers: list[ForkProcess] = []
        self.first_signal: int | None = None

    def pass_on(self, number: int, _frame: types.FrameType | None = None) -> None:
        self.first_signal = self.first_signal or number
        for worker in self.workers:
            if worker.pid is not None and worker.exitcode is None:
                os.kill(worker.pid, number)


def run(config: Config, connections: list[list[socket.socket]], listeners: list[socket.socket]) -> ExitCode:
    """One worker for each listener and its connections, one an engine; they are closed here. The exit code of them all.

    Whatever ends one worker ends the others: a failure at once, anything else after their drain.
    """
    group = _Group()
    before = {number: signal.signal(number, group.pass_on) for number in SIGNALS}
    # They wait until all workers are known, and in a worker, which else would take one for the supervisor, until it serves.
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        context = multiprocessing.get_context("fork")
        with tempfile.TemporaryDirectory(prefix="minserve-") as folder:
            private = [_private_listener(Path(folder) / str(number)) for number in range(len(connections))]
            for number in range(len(connections)):
                arguments = (number, config, connections, listeners, private, os.getpid())
                worker = context.Process(target=_work, args=arguments, daemon=True)
                worker.start()
                group.workers.append(worker)
            for opened in (*(connection for of_worker in connections for connection in of_worker), *listeners, *private):
                opened.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
            return _wait(group)
    finally:
        for worker in group.workers:
            worker.kill()
            worker.join()
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)


def _private_listener(path: Path) -> socket.socket:
    """Where a worker answers the others; the folder is this user's alone."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()
    return listener


def _wait(group: _Group) -> ExitCode:
    """Returns once every worker has ended."""
    codes: list[ExitCode] = []
    told = False
    """Whether they had been told to leave before the first of them did."""
    deadline: float | None = None
    while running := [worker for worker in group.workers if worker.exitcode is None]:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ended = waiting.wait([worker.sentinel for worker in running], left)
        if not ended and left is not None:
            return _together(codes, told=told) or ExitCode.INTERNAL
        told = told or (not codes and group.first_signal is not None)
        for number, worker in enumerate(group.workers):
            if worker.sentinel not in ended:
                continue
            worker.join()
            codes.append(_exit_code(worker, number))
        if _together(codes, told=told) not in _IN_ORDER and deadline is None:
            deadline = time.monotonic() + _LEAVE_WITHIN
        if group.first_signal is None:
            group.pass_on(signal.SIGTERM)
    return _together(codes, told=told)


def _together(codes: Sequence[ExitCode], *, told: bool) -> ExitCode:
    """Of workers that ended so, in that order. The first failure counts: those after it follow from it."""
    failures = [code for code in codes if code not in _IN_ORDER]
    if told and set(failures) == {ExitCode.RANK_DIED} and len(failures) < len(codes):
        failures = []  # one that left as it was told ended the engines for those that had not heard of it yet
    return next(iter(failures), ExitCode.INTERRUPTED if ExitCode.INTERRUPTED in codes else ExitCode.OK)


def _exit_code(worker: ForkProcess, number: int) -> ExitCode:
    ended = worker.exitcode or 0
    if ended < 0:
        log.error("front worker %d (pid %s) was killed by %s", number, worker.pid, signal.Signals(-ended).name)
        return ExitCode.RANK_DIED
    try:
        return ExitCode(ended)
    except ValueError:
        return ExitCode.INTERNAL


def _work(
    number: int,
    config: Config,
    connections: list[list[socket.socket]],
    listeners: list[socket.socket],
    private: list[socket.socket],
    supervisor: int,
) -> None:
    """A worker's whole life."""
    die_with(supervisor)
    os.setpgid(0, 0)  # a terminal's Ctrl-C reaches the supervisor alone, which passes it on
    leave_on_sigterm()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    others = [str(listener.getsockname()) for listener in private]
    for other in range(len(connections)):
        if other != number:  # else nobody would see the end of a worker by its sockets
            for connection in connections[other]:
                connection.close()
            listeners[other].close()
            private[other].close()
    if number > 0:  # what all of them would say is said once
        logging.getLogger("minserve").setLevel(logging.WARNING)
    try:
        siblings = Siblings(private[number], others[:number] + others[number + 1 :])
        code = asyncio.run(serve(config, connections[number], listeners[number], number, siblings))
    except ServerError as error:
        sys.stderr.write(f"minserve: error: {error}\n")
        code = error.exit_code
    except KeyboardInterrupt:
        code = ExitCode.INTERRUPTED
    sys.exit(code)
