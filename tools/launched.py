"""Starts a server for a tool, waits until it is ready, and reads what its processes hold. Knows no requests."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

READY_SECONDS = 300.0
SETTLE_SECONDS = 60.0
"""Most time until an answer whose client left has left too."""
WARM_UP = 1 / 3
"""Share of the readings in which caches and pools may still fill."""


class Reading(NamedTuple):
    """What the server's processes hold while nobody asks for anything."""

    files: int
    megabytes: float
    """The front's, and below the engines': their KV cache takes memory page by page, so give them few pages (--num-pages)."""
    engine_megabytes: float
    pages: float
    """Share of KV pages in use."""
    running: float


class Server:
    """A process group that serves on a port, under observation."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._main = psutil.Process(process.pid)
        self._log = log
        self._fewest_files = sys.maxsize

    def log_lines(self, pattern: str) -> list[str]:
        """Those of its log in which the pattern is."""
        return [line for line in self._log.read_text(errors="replace").splitlines() if re.search(pattern, line)]

    def errors(self) -> list[str]:
        return self.log_lines(r" (ERROR|CRITICAL) |^Traceback")

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=SETTLE_SECONDS) as answer:
            text = answer.read().decode()
        return sum(map(float, re.findall(rf"^minserve:{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)))

    def processes(self) -> tuple[list[psutil.Process], list[psutil.Process]]:
        """Those that speak HTTP, and the engines."""
        children = self._main.children(recursive=True)
        engines = [child for child in children if any("minserve.runtime" in word for word in child.cmdline())]
        return [self._main, *(child for child in children if child not in engines)], engines

    def settle(self) -> Reading:
        """Waits until nothing runs."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            running = self.metric("num_requests_running") + self.metric("num_requests_waiting")
            pages = self.metric("kv_cache_usage_perc")
            if (running == 0 and pages == 0) or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        files = self._files_that_stay()
        fronts, engines = self.processes()
        front, engine = (sum(process.memory_info().rss for process in group) / 1e6 for group in (fronts, engines))
        return Reading(files, round(front, 1), round(engine, 1), pages, running)

    def _files_that_stay(self) -> int:
        """Closed connections are still being let go: no more than ever before, or what a second of answers does not change."""
        files, since = self._open_files(), time.monotonic()
        while files > self._fewest_files and time.monotonic() - since < 1.0:
            self.metric("num_requests_running")
            if (now := self._open_files()) != files:
                files, since = now, time.monotonic()
        self._fewest_files = min(self._fewest_files, files)
        return files

    def _open_files(self) -> int:
        fronts, engines = self.processes()
        return sum(process.num_fds() for process in (*fronts, *engines))


@contextlib.contextmanager
def serving(flags: list[str]) -> Iterator[Server]:
    """`minserve launch` on a free port, ready. Raises ChildProcessError, with its log, when it does not become so."""
    with started(["-m", "minserve", "launch", *flags, "--port", "0"], r"listening on http://\S+:(\d+)", "(: ready: )") as server:
        yield server


@contextlib.contextmanager
def started(words: list[str], port: str, ready: str) -> Iterator[Server]:
    """A Python process, once its log shows its port and that it is ready. The log is a file, which never fills up as a pipe
    would."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1"}
    with tempfile.NamedTemporaryFile(prefix="minserve-", suffix=".log") as file:
        process = subprocess.Popen([sys.executable, *words], stdout=file, stderr=subprocess.STDOUT, env=environment)
        try:
            log = Path(file.name)
            number = int(_await(port, process, log))
            _await(ready, process, log)
            yield Server(process, number, log)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def _await(pattern: str, process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + READY_SECONDS
    while (found := re.search(pattern, text := log.read_text(errors="replace"))) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            raise ChildProcessError(f"the server did not become ready; exit code {process.poll()}\n{text}")
        time.sleep(0.05)
    return found[1]


def growth(readings: list[Reading], allowed: float) -> list[str]:
    """What grew between the readings after the warm-up and the last ones: open files at all, memory beyond `allowed` times."""
    later = readings[int(len(readings) * WARM_UP) :]
    part = max(1, len(later) // 3)
    found = [f"reading {n}: something still runs or holds pages: {r}" for n, r in enumerate(readings) if r.running or r.pages]
    for name, most in {"files": 1.0, "megabytes": allowed, "engine_megabytes": allowed}.items():
        first, last = (statistics.median(getattr(reading, name) for reading in some) for some in (later[:part], later[-part:]))
        if last > first * most:
            found.append(f"{name} grew from {first:.1f} to {last:.1f}")
    return found
