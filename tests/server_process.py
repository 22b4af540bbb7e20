"""A real `minserve launch` as a child process of a test. Knows the command line and /ready, nothing inside."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from waiting import PATIENCE, until

START_SECONDS = 2 * PATIENCE
"""A cold start imports torch, and slowly when other tests run beside it."""


def _few_open_files() -> None:
    """The soft limit that a shell gives, whatever this machine's is."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))


class ServerProcess:
    """Use through `serving` or `start`, which also end it."""

    def __init__(
        self,
        arguments: list[str],
        log: Path,
        environment: dict[str, str] | None = None,
        engine_module: str | None = None,
        before: Sequence[str] = (),
    ) -> None:
        """`engine_module`: run in place of minserve.runtime. `before`: the command that starts the server's command."""
        self.log_file = log
        program = ["-m", "minserve"]
        if engine_module is not None:
            program = ["-c", f"from minserve import cli, launch; launch.ENGINE_MODULE = {engine_module!r}; cli.main()"]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*before, sys.executable, *program, "launch", "--port", "0", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
                preexec_fn=_few_open_files,
            )
        self._port: int | None = None

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    @property
    def port(self) -> int:
        """The port it listens on; waits until the log tells it."""
        if self._port is None:
            self.wait_for_log(r"listening on http://\S+:\d+")
            match = re.search(r"listening on http://\S+:(\d+)", self.log)
            assert match is not None
            self._port = int(match.group(1))
        return self._port

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_for_log(self, pattern: str, timeout: float = START_SECONDS) -> None:
        deadline = time.monotonic() + timeout
        while not re.search(pattern, self.log):
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{self.log}"
            assert time.monotonic() < deadline, f"no {pattern!r} within {timeout} s in:\n{self.log}"
            time.sleep(0.05)

    def wait_ready(self, timeout: float = START_SECONDS) -> None:
        deadline = time.monotonic() + timeout
        while self.status("/ready") != 200:
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{self.log}"
            assert time.monotonic() < deadline, f"not ready within {timeout} s:\n{self.log}"
            time.sleep(0.05)

    def engine(self) -> psutil.Process:
        """The engine process; waits until there is one."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            for child in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.Error):
                    if "minserve.runtime" in child.cmdline():
                        return child
            assert time.monotonic() < deadline, f"no engine process:\n{self.log}"
            time.sleep(0.02)

    def request(self, method: str, path: str, body: Any = None, timeout: float = PATIENCE) -> tuple[int, Any]:
        """Status and body, parsed when it is JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            payload = None if body is None else json.dumps(body).encode()
            connection.request(method, path, payload, {"Content-Type": "application/json"} if payload else {})
            response = connection.getresponse()
            text = response.read().decode()
            is_json = "json" in (response.getheader("Content-Type") or "")
            return response.status, json.loads(text) if is_json and text else text
        finally:
            connection.close()

    def status(self, path: str) -> int:
        """The status of a GET; 0 when the server cannot be reached."""
        try:
            return self.request("GET", path)[0]
        except (OSError, http.client.HTTPException):
            return 0

    def metric(self, name: str) -> float:
        """Sum of a metric's samples."""
        text = self.request("GET", "/metrics")[1]
        samples = re.findall(rf"^minserve:{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        assert samples, f"no metric {name} in:\n{text}"
        return sum(map(float, samples))

    def wait_metric(self, name: str, value: float) -> None:
        until(lambda: self.metric(name) == value, f"{name} {value:g}")

    def end(self) -> None:
        """SIGTERM, then SIGKILL; for cleaning up, not for testing the stop."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@contextlib.contextmanager
def start(*arguments: str, log: Path, environment: dict[str, str] | None = None) -> Iterator[ServerProcess]:
    """A server that may not be up yet, or never will be."""
    server = ServerProcess(list(arguments), log, environment)
    try:
        yield server
    finally:
        server.end()


@contextlib.contextmanager
def serving(*arguments: str, log: Path, environment: dict[str, str] | None = None) -> Iterator[ServerProcess]:
    """A server that is ready."""
    with start(*arguments, log=log, environment=environment) as server:
        server.wait_ready()
        yield server
