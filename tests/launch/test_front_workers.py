"""Several fronts on one port before one engine: they share the work, drain together, and die together."""

from __future__ import annotations

import http.client
import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from server_process import ServerProcess, serving, start
from waiting import PATIENCE, until

from minserve import front_workers, launch
from minserve.errors import EnvironmentFault, ExitCode


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with serving("--mock-engine", "200", "--front-workers", "3", log=tmp_path / "server.log") as running:
        yield running


def workers(server: ServerProcess) -> list[psutil.Process]:
    """The front workers: children that run the same command as their parent."""
    parent = psutil.Process(server.process.pid)
    return [child for child in parent.children() if child.cmdline() == parent.cmdline()]


def all_ready(server: ServerProcess) -> None:
    """The kernel chooses the worker of each connection: ask often enough to have met all."""
    until(lambda: all(server.status("/ready") == 200 for _ in range(50)), "readiness of all workers")


def gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, PATIENCE)[1]


def stream(server: ServerProcess, max_tokens: int) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    body = {"prompt": "1 + 2 = ", "max_tokens": max_tokens, "stream": True, "stream_options": {"include_usage": True}}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200
    assert response.readline().startswith(b"data: ")
    return connection, response


def test_answers_of_all_workers_are_whole_and_a_signal_drains_them(server: ServerProcess) -> None:
    all_ready(server)
    assert len(workers(server)) == 3
    engine = [child for child in psutil.Process(server.process.pid).children() if child not in workers(server)]
    assert len(engine) == 1

    tokens = server.request("POST", "/tokenize", {"prompt": "10 + 2 = "})[1]["count"]

    def ask(number: int) -> tuple[int, int]:
        body = {"prompt": f"{10 + number} + 2 = ", "max_tokens": 5 + number % 3}
        status, answer = server.request("POST", "/v1/completions", body)
        return status, answer["usage"]["completion_tokens"]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(60))) == [(200, 5 + number % 3) for number in range(60)]
    assert {server.metric("prompt_tokens_total") for _ in range(12)} == {60 * tokens}, "whichever worker is asked"
    assert {server.metric("e2e_request_latency_seconds_count") for _ in range(12)} == {60}
    streams = [stream(server, 100) for _ in range(8)]
    processes = workers(server) + engine
    server.process.send_signal(signal.SIGTERM)
    for connection, response in streams:
        rest = response.read()
        connection.close()
        assert b'"completion_tokens":100' in rest
        assert rest.endswith(b"data: [DONE]\n\n"), "a request under way is not cut off by a drain"
    assert server.process.wait(PATIENCE) == 0
    assert gone(processes)
    assert "Traceback" not in server.log
    assert server.log.count("minserve.server: ready: ") == 1, "what all workers would say is said once"


def test_an_abort_reaches_the_worker_that_has_the_answer(server: ServerProcess) -> None:
    all_ready(server)
    streams = [stream(server, 5000) for _ in range(6)]
    assert server.request("POST", "/abort_request", {"abort_all": True})[1] == {"aborted": 6}
    for connection, response in streams:
        assert b"request_aborted" in response.read()
        connection.close()
    assert server.request("POST", "/abort_request", {"request_id": "nobody"})[1] == {"aborted": 0}
    server.wait_metric("num_requests_running", 0)


def test_a_worker_that_is_killed_takes_all_along(server: ServerProcess) -> None:
    all_ready(server)
    processes = psutil.Process(server.process.pid).children()
    connection, response = stream(server, 5000)
    victim = workers(server)[1]
    victim.kill()
    assert server.process.wait(PATIENCE) == 6
    assert gone(processes)
    assert f"front worker 1 (pid {victim.pid}) was killed by SIGKILL" in server.log
    assert b"[DONE]" not in read_what_is_left(response)
    connection.close()


def read_what_is_left(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read()
    except (http.client.IncompleteRead, ConnectionError) as error:
        return getattr(error, "partial", b"")


@pytest.mark.parametrize(("born", "number", "code"), [(1, signal.SIGTERM, 0), (2, signal.SIGINT, 130), (3, signal.SIGTERM, 0)])
def test_a_signal_while_workers_are_born_reaches_all(tmp_path: Path, born: int, number: signal.Signals, code: int) -> None:
    with start("--mock-engine", "0", "--front-workers", "3", log=tmp_path / "log") as server:
        parent = psutil.Process(server.process.pid)
        until(lambda: len(parent.children()) > born, "the engine and so many workers", pause=0)
        children = parent.children()
        server.process.send_signal(number)
        assert server.process.wait(PATIENCE) == code
        assert gone(children)
        assert "Traceback" not in server.log


def test_an_interrupt_is_130_and_a_killed_supervisor_leaves_nobody(server: ServerProcess, tmp_path: Path) -> None:
    all_ready(server)
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(PATIENCE) == 130
    with serving("--mock-engine", "0", "--front-workers", "2", log=tmp_path / "second.log") as second:
        processes = psutil.Process(second.process.pid).children()
        second.process.kill()
        assert gone(processes)


def test_a_shared_port_is_busy_for_another_server() -> None:
    with launch.bind("127.0.0.1", 0, shared=True) as first:
        with launch._bind_beside(first) as second:
            assert second.getsockname() == first.getsockname()
        with pytest.raises(EnvironmentFault, match="in use"):
            launch.bind("127.0.0.1", first.getsockname()[1], shared=True)
        with pytest.raises(EnvironmentFault, match="in use"):
            launch.bind("127.0.0.1", first.getsockname()[1])


@pytest.mark.parametrize(
    ("codes", "told", "together"),
    [
        ([0, 0], True, ExitCode.OK),
        ([0, 130], True, ExitCode.INTERRUPTED),
        ([0, 6], True, ExitCode.OK),  # the first one left as it was told, and the engine with it
        ([6, 130], True, ExitCode.INTERRUPTED),
        ([6, 6], True, ExitCode.RANK_DIED),
        ([6, 0], False, ExitCode.RANK_DIED),
        ([0, 1, 6], True, ExitCode.INTERNAL),
        ([7, 0], True, ExitCode.SELF_CHECK),
    ],
)
def test_the_exit_code_of_all_workers(codes: list[int], told: bool, together: ExitCode) -> None:
    assert front_workers._together([ExitCode(code) for code in codes], told=told) == together
