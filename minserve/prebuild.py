"""`minserve prebuild`: compiles kernels ahead, so that a later start compiles nothing. Knows no kernel itself.

FlashInfer's modules need only a compiler. Triton's and DeepGEMM's kernels are compiled for the GPU at hand by starting each
model once with random weights, which is exactly what a start needs.
"""

from __future__ import annotations

import importlib.util
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence

from minserve import launch
from minserve.errors import EnvironmentFault, ExitCode

START_SECONDS = 1800.0


def run(models: Sequence[str], arch: str, launch_flags: Sequence[str]) -> int:
    """The exit code. `models` are what `minserve launch` takes; only their config.json is read. Raises EnvironmentFault."""
    if importlib.util.find_spec("flashinfer") is None:
        if not models:
            raise EnvironmentFault("FlashInfer is not installed, so only a model's kernels can be compiled: name a MODEL")
    elif code := launch.run_module("minserve.kernels.flashinfer_modules", ["--arch", arch]):
        return code
    for model in models:
        if code := _start_once([model, "--load-format", "dummy", *launch_flags]):
            return code
    return ExitCode.OK


def _start_once(words: Sequence[str]) -> int:
    """Starts a server, waits until it is ready, and ends it; its exit code when it ends before."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", "minserve", "launch", *words, "--host", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if (code := server.poll()) is not None:
                return code or ExitCode.INTERNAL
            if _is_ready(port):
                return ExitCode.OK
            time.sleep(0.5)
        raise EnvironmentFault(f"{words[0]}: not ready after {START_SECONDS:.0f} s")
    finally:
        if server.poll() is None:
            server.send_signal(signal.SIGTERM)
        server.wait()


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
