"""`minserve chat` through a pipe and in a terminal: streaming, commands, and Ctrl-C that stops an answer on the server too."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from server_process import ServerProcess, serving
from waiting import PATIENCE


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving("--mock-engine", "50", log=tmp_path_factory.mktemp("chat") / "log") as running:
        yield running


def command(server: ServerProcess, *words: str) -> list[str]:
    return [sys.executable, "-m", "minserve", "chat", "--base-url", server.base_url, *words]


def test_through_a_pipe_each_line_is_a_turn(server: ServerProcess) -> None:
    lines = "What is 1 + 2?\n\n/reset\nWhat is 3 + 4?\n/quit\nnever asked\n"
    done = subprocess.run(command(server, "--max-tokens", "12"), input=lines, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, "")
    first, second = done.stdout.splitlines()
    assert "1 + 2" in first
    assert "3 + 4" in second, "the mock engine repeats its prompt: after /reset that begins with the new question"


def test_a_server_that_is_not_there_and_a_refusal_are_sentences(server: ServerProcess) -> None:
    gone = subprocess.run(
        [sys.executable, "-m", "minserve", "chat", "--base-url", "http://127.0.0.1:9"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert gone.returncode == 3
    assert "is the server up" in gone.stderr
    refused = subprocess.run(
        command(server, "--model", "nobody"), input="hello\n", capture_output=True, text=True, timeout=PATIENCE
    )
    assert refused.returncode == 3
    assert "served: embedded" in refused.stderr
    assert "Traceback" not in gone.stderr + refused.stderr


class Terminal:
    """A program on a pseudo-terminal."""

    def __init__(self, words: list[str]) -> None:
        self.pid, self._descriptor = pty.fork()
        if self.pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell ignores it for what it starts in the background
            os.execvpe(words[0], words, {**os.environ, "TERM": "dumb"})
        self.seen = ""

    def wait_for(self, pattern: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not re.search(pattern, self.seen):
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.seen!r}"
            if not select.select([self._descriptor], [], [], 1.0)[0]:
                continue
            try:
                self.seen += os.read(self._descriptor, 4096).decode(errors="replace")
            except OSError:
                break
        assert re.search(pattern, self.seen), self.seen

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def end(self) -> int:
        _, status = os.waitpid(self.pid, 0)
        os.close(self._descriptor)
        return os.waitstatus_to_exitcode(status)


def test_ctrl_c_stops_the_answer_and_not_the_chat(server: ServerProcess) -> None:
    terminal = Terminal(command(server, "--max-tokens", "5000"))
    terminal.wait_for("> ")
    terminal.type("What is 23 + 58?\n")
    terminal.wait_for(r"\?\r\n.*2.*3")
    terminal.type("\x03")
    terminal.wait_for(r"\[stopped\]")
    server.wait_metric("num_requests_running", 0)
    server.wait_metric("aborts_total", 1)
    terminal.type("/reset\n")
    terminal.type("/quit\n")
    assert terminal.end() == 0
