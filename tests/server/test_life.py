"""The server's life: loading, health, stalls, draining, signals, the engine's death and its exit codes."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from waiting import PATIENCE, until

from minserve.errors import CheckpointError, ExitCode
from minserve.messages import Fatal
from minserve.server import front
from tests.server.conftest import Answer, Edge, Vocabulary

Start = Callable[..., AbstractContextManager[Edge]]


def endless(_: Any) -> Iterator[int]:
    while True:
        yield 97


def test_while_loading_requests_get_503_and_the_server_is_alive(start_edge: Start) -> None:
    with start_edge("ok", be_ready=False) as edge:
        edge.wait_for(lambda: "load, 50%" in edge.get("/ready").error["message"])
        assert edge.get("/health").json == {"status": "ok", "phase": "loading"}
        for answer in (edge.get("/ready"), edge.complete(), edge.chat(stream=True), edge.get("/v1/models"), edge.get("/metrics")):
            assert answer.status == 503
            assert int(answer.headers["Retry-After"]) > 0
            assert answer.error["code"] == "loading"
        edge.engine.become_ready()
        edge.wait_for(lambda: edge.get("/ready").status == 200)
        assert edge.complete().status == 200


def test_a_tokenizer_with_more_ids_than_the_embedding_has_rows_is_refused(start_edge: Start, vocabulary: Vocabulary) -> None:
    with start_edge("ok", be_ready=False) as edge:
        edge.engine.say(msgspec.structs.replace(edge.engine.ready, vocab_size=vocabulary.eos))
        edge.join()
        assert isinstance(edge.failure, CheckpointError)
        assert f"up to {vocabulary.eos}, but the model's embedding has {vocabulary.eos} rows" in str(edge.failure)


@pytest.fixture
def soon_ill(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second of an engine's silence makes a server ill, and the watchdog is far away."""
    monkeypatch.setattr(front, "MOST_HEALTHY_SILENCE", 1.0)


@pytest.mark.usefixtures("soon_ill")
def test_a_stuck_engine_is_not_healthy_and_says_why(start_edge: Start) -> None:
    with start_edge(endless, max_model_len=1 << 30) as edge:
        edge.wait_for(lambda: edge.get("/health").status == 200)
        edge.engine.frozen.set()
        edge.wait_for(lambda: edge.get("/health").status == 503)
        answer = edge.get("/health")
        assert "engine 0 has said nothing for" in answer.error["message"]
        assert edge.get("/ready").status == 503
        edge.engine.frozen.clear()
        edge.wait_for(lambda: edge.get("/health").status == 200)


def healthy_for(edge: Edge, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if edge.get("/health").status != 200:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.usefixtures("soon_ill")
def test_a_long_prefill_that_reports_its_steps_is_healthy(start_edge: Start) -> None:
    with start_edge(endless, max_model_len=1 << 30) as edge:
        edge.engine.running.clear()  # a pulse, but no token for anybody
        thread = threading.Thread(target=lambda: edge.complete(max_tokens=1))
        thread.start()
        edge.wait_for(lambda: edge.engine.num_live == 1)
        # More than once only where the machine itself stood still for a second and the pulse with it.
        assert any(healthy_for(edge, 1.5) for _ in range(3))
        edge.engine.running.set()
        thread.join(PATIENCE)


def test_the_watchdog_ends_the_server(start_edge: Start) -> None:
    with start_edge("ok", watchdog_timeout=1.0) as edge:
        edge.engine.frozen.set()
        edge.join()
        assert edge.exit_code == ExitCode.RANK_DIED
        edge.engine.frozen.clear()


@pytest.mark.parametrize("fatal", [None, Fatal(5, "the weights need 9 GiB and there are 8"), Fatal(99, "odd")])
def test_an_engines_death_is_told_to_clients_and_becomes_the_exit_code(start_edge: Start, fatal: Fatal | None) -> None:
    with start_edge(endless, max_model_len=1 << 30) as edge:
        answers: list[Answer] = []
        thread = threading.Thread(target=lambda: answers.append(edge.complete()))
        thread.start()
        edge.wait_for(lambda: edge.engine.num_live == 1)
        edge.engine.die(fatal)
        edge.join()
        thread.join(PATIENCE)
        expected = ExitCode.RANK_DIED if fatal is None else {5: ExitCode.MEMORY, 99: ExitCode.INTERNAL}[fatal.exit_code]
        assert edge.exit_code == expected
        assert answers[0].status == 503
        assert answers[0].error["code"] == "engine_dead"


def test_a_death_while_loading(start_edge: Start) -> None:
    with start_edge("ok", be_ready=False) as edge:
        edge.engine.die(Fatal(4, "model.safetensors is cut short"))
        edge.join()
        assert edge.exit_code == ExitCode.CHECKPOINT


def test_what_is_no_message_ends_the_server(start_edge: Start) -> None:
    with start_edge("ok") as edge:
        edge.engine._connection.sendall(b"\x05\x00\x00\x00nope!")
        edge.join()
        assert edge.exit_code == ExitCode.INTERNAL


def test_a_checkpoint_without_tokenizer_is_a_sentence(start_edge: Start, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with start_edge("ok", be_ready=False, model=str(tmp_path)) as edge:
        edge.join()
        assert isinstance(edge.failure, CheckpointError)
        assert "tokenizer.json" in str(edge.failure)


PROGRAM = """
import asyncio, logging, socket, sys, threading
from scripted_engine import ScriptedEngine
from minserve.config import Config
from minserve.messages import Ready
from minserve.server.app import serve

logging.basicConfig(level="INFO")
ours, theirs = socket.socketpair()
listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen()
ready = Ready(model_type="x", vocab_size=263, max_model_len=1 << 20, max_num_seqs=8, eos_token_ids=(), num_pages=1 << 30,
              page_size=64, startup_seconds={}, info={})
def endless(_):
    while True:
        yield 97
engine = ScriptedEngine(theirs, endless, ready=ready, be_ready=sys.argv[3] == "ready")
engine.step_seconds = 0.05
def hurry():
    if sys.stdin.readline():
        engine.step_seconds = 0.0
threading.Thread(target=hurry, daemon=True).start()
config = Config(model=sys.argv[1], drain_timeout=float(sys.argv[2]))
print(listener.getsockname()[1], flush=True)
code = asyncio.run(serve(config, [ours], listener))
print("engine told to leave:", engine.was_shut_down, flush=True)
sys.exit(code)
"""


class Child:
    """A server process of its own, for signals."""

    def __init__(self, model_dir: Path, drain_timeout: float, ready: bool = True) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(model_dir), str(drain_timeout), "ready" if ready else "loading"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": f"{Path(__file__).parent.parent}:{Path(__file__).parent.parent.parent}"},
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def get(self, path: str, method: str = "GET", body: bytes = b"") -> bytes:
        with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE) as client:
            client.sendall(f"{method} {path} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            received = b""
            while part := client.recv(65536):
                received += part
            return received

    def wait_for(self, path: str, start: bytes) -> bytes:
        answer = b""

        def has_come() -> bool:
            nonlocal answer
            answer = self.get(path)
            return answer.startswith(start)

        until(has_come, f"{path} {start!r}")
        return answer

    def hurry(self) -> None:
        """From now on the engine makes tokens as fast as it can instead of 20 a second."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, out, err


@pytest.fixture
def child(model_dir: Path) -> Iterator[Callable[..., Child]]:
    children: list[Child] = []

    def start(drain_timeout: float, ready: bool = True) -> Child:
        children.append(Child(model_dir, drain_timeout, ready))
        if ready:
            children[-1].wait_for("/ready", b"HTTP/1.0 200")
        return children[-1]

    yield start
    for one in children:
        with contextlib.suppress(ProcessLookupError):
            one.process.kill()
        one.process.wait()


def streaming(child: Child, max_tokens: int) -> tuple[threading.Thread, list[bytes]]:
    """A stream under way: its first bytes have come."""
    received: list[bytes] = []
    begun = threading.Event()

    def work() -> None:
        body = b'{"prompt":"x","stream":true,"max_tokens":%d}' % max_tokens
        with socket.create_connection(("127.0.0.1", child.port), timeout=PATIENCE) as client:
            client.sendall(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            while part := client.recv(65536):
                received.append(part)
                begun.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(PATIENCE)
    return thread, received


def test_sigterm_lets_answers_end_and_refuses_new_ones(child: Callable[..., Child]) -> None:
    server = child(PATIENCE)
    thread, received = streaming(server, max_tokens=3000)
    server.process.send_signal(signal.SIGTERM)
    answer = server.wait_for("/ready", b"HTTP/1.0 503")
    assert b"Retry-After" in answer
    refused = server.get("/v1/completions", "POST", b'{"prompt":"x"}')
    assert refused.startswith(b"HTTP/1.0 503")
    assert b"Retry-After" in refused
    assert b"draining" in refused
    assert server.get("/health").startswith(b"HTTP/1.0 200")
    server.hurry()
    thread.join(PATIENCE)
    assert b"".join(received).endswith(b"data: [DONE]\n\n")
    code, out, _ = server.end()
    assert code == ExitCode.OK
    assert "engine told to leave: True" in out


def test_a_drain_is_bounded(child: Callable[..., Child]) -> None:
    server = child(0.2)
    thread, received = streaming(server, max_tokens=10**9)
    server.process.send_signal(signal.SIGTERM)
    code, out, err = server.end()
    thread.join(PATIENCE)
    assert code == ExitCode.OK
    assert b'data: {"error":' in b"".join(received)
    assert b"[DONE]" not in b"".join(received)
    assert "engine told to leave: True" in out
    assert "Traceback" not in err


def test_a_second_signal_leaves_at_once(child: Callable[..., Child]) -> None:
    server = child(10 * PATIENCE)
    thread, received = streaming(server, max_tokens=10**9)
    server.process.send_signal(signal.SIGTERM)
    server.wait_for("/ready", b"HTTP/1.0 503")
    server.process.send_signal(signal.SIGTERM)
    code, _, err = server.end()
    thread.join(PATIENCE)
    assert code == ExitCode.OK
    assert b"[DONE]" not in b"".join(received), "neither the end of the answer nor that of the drain was waited for"
    assert "Traceback" not in err


def test_sigint_is_130(child: Callable[..., Child]) -> None:
    server = child(5.0)
    server.process.send_signal(signal.SIGINT)
    assert server.end()[0] == ExitCode.INTERRUPTED


def test_a_signal_while_loading_leaves_at_once(child: Callable[..., Child]) -> None:
    server = child(10 * PATIENCE, ready=False)
    server.wait_for("/health", b"HTTP/1.0 200")
    server.process.send_signal(signal.SIGTERM)
    assert server.end()[0] == ExitCode.OK
