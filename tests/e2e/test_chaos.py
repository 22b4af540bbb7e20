"""What the world does to a server: stops its processes, fills its disk, turns its clock. Each has a stated outcome.

The outcomes stand in docs/operating.md. The death of an engine is tested with the process tree, a stuck rank with the ranks.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from server_process import ServerProcess, serving
from waiting import PATIENCE, until

FAKETIME = next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))), None)
ASK = {"messages": [{"role": "user", "content": "What is 23 + 58?"}], "temperature": 0}


def answers(server: ServerProcess) -> None:
    status, answer = server.request("POST", "/v1/chat/completions", ASK)
    assert status == 200
    assert answer["choices"][0]["message"]["content"] == "81"


@contextlib.contextmanager
def stream(server: ServerProcess, num_tokens: int) -> Iterator[http.client.HTTPResponse]:
    """An answer of that many tokens, of which the first has come."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    body = {"prompt": "1 + 2 = ", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    try:
        yield response
    finally:
        connection.close()


def family(server: ServerProcess) -> list[psutil.Process]:
    main = psutil.Process(server.process.pid)
    return [main, *main.children(recursive=True)]


def health(server: ServerProcess) -> tuple[int, Any]:
    return server.request("GET", "/health")


def test_an_engine_stopped_for_a_while_is_told_and_goes_on(tmp_path: Path) -> None:
    with serving("--watchdog-timeout", "20", log=tmp_path / "log") as server, stream(server, 300) as response:
        engine = server.engine()
        engine.send_signal(signal.SIGSTOP)
        until(lambda: health(server)[0] == 503, "an ill server", pause=0.1)
        assert "engine 0 has said nothing for" in health(server)[1]["error"]["message"]
        assert server.status("/ready") == 503
        engine.send_signal(signal.SIGCONT)
        assert response.read().endswith(b"data: [DONE]\n\n")
        until(lambda: health(server)[0] == 200, "a healthy server")


def test_an_engine_stopped_for_longer_than_the_watchdog_waits_ends_the_server(tmp_path: Path) -> None:
    with serving("--watchdog-timeout", "3", log=tmp_path / "log") as server, stream(server, 5000) as response:
        processes = family(server)
        server.engine().send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        rest = response.read()
        assert b'"error"' in rest and b"[DONE]" not in rest
        assert server.process.wait(PATIENCE) == 6
        assert time.monotonic() - stopped > 2.0
        assert "the watchdog fired: engine 0 has said nothing for" in server.log
        assert psutil.wait_procs(processes, PATIENCE)[1] == []


def test_a_machine_that_stood_still_serves_on(tmp_path: Path) -> None:
    """All processes stopped at once, as when a virtual machine is paused, for longer than the watchdog waits."""
    with serving("--watchdog-timeout", "4", log=tmp_path / "log") as server, stream(server, 300) as response:
        processes = family(server)
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        time.sleep(5)
        processes[0].send_signal(signal.SIGCONT)  # the front first: it must not believe what it last knew
        time.sleep(0.5)
        for process in processes[1:]:
            process.send_signal(signal.SIGCONT)
        assert response.read().endswith(b"data: [DONE]\n\n")
        answers(server)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own without a byte left."""
    folder = tmp_path / "full"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
    try:
        with contextlib.suppress(OSError), (folder / "ballast").open("wb", buffering=0) as ballast:
            while True:
                ballast.write(bytes(4096))
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_full_disk_of_the_cache_folder_keeps_nobody_from_serving(full_disk: Path, tmp_path: Path) -> None:
    with serving("--kernel-cache", str(full_disk), log=tmp_path / "log") as server:
        answers(server)


def test_a_profile_that_finds_the_disk_full_is_an_error_of_that_call(full_disk: Path, tmp_path: Path) -> None:
    (full_disk / "ballast").write_bytes(bytes(32 << 10))
    (full_disk / "profile").mkdir()
    with serving(log=tmp_path / "log") as server:
        assert server.request("POST", "/start_profile", {"folder": str(full_disk / "profile")})[0] == 200
        answers(server)
        status, answer = server.request("POST", "/stop_profile")
        assert status == 400
        assert "is the disk full?" in answer["error"]["message"]
        answers(server)


@pytest.mark.skipif(FAKETIME is None, reason="no libfaketime on this machine (Debian: apt-get install faketime)")
@pytest.mark.parametrize("jump", ["+1d", "-1d"])
def test_a_clock_that_jumps_changes_nothing_but_dates(jump: str, tmp_path: Path) -> None:
    offset = tmp_path / "offset"
    offset.write_text("+0")
    environment = {
        "LD_PRELOAD": str(FAKETIME),
        "FAKETIME_TIMESTAMP_FILE": str(offset),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    with serving("--watchdog-timeout", "12", log=tmp_path / "log", environment=environment) as server:
        with stream(server, 300) as response:
            offset.write_text(jump)
            assert response.read().endswith(b"data: [DONE]\n\n")
        created = server.request("POST", "/v1/chat/completions", ASK)[1]["created"]
        assert 86_000 < abs(created - time.time()) < 87_000
        time.sleep(3.5)  # more than an engine may be silent before it counts as ill
        until(lambda: health(server)[0] == 200, "a healthy server")  # a day's silence would not end so soon
        answers(server)
        assert server.metric("e2e_request_latency_seconds_sum") < 3600
        assert server.metric("last_decode_age_seconds") < 3600
