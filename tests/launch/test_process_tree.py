"""How a real server starts, fails, is told to stop, and dies: exit codes, sentences, and that no process is left behind."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from server_process import START_SECONDS, ServerProcess, serving, start
from waiting import PATIENCE, once_within, port_is_free, until, unused_port

Checkpoint = Callable[[str], Path]


@pytest.fixture
def model(tiny_dir: Checkpoint) -> str:
    return str(tiny_dir("qwen3_moe"))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "server.log"


def run(*arguments: str) -> tuple[int, str]:
    """Exit code and stderr of a launch that ends by itself."""
    command = [sys.executable, "-m", "minserve", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stderr


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def gone(process: psutil.Process) -> None:
    until(lambda: is_gone(process), f"the end of process {process.pid}")


Streaming = tuple[ServerProcess, Future[bytes]]


@contextlib.contextmanager
def streaming(model: str, log: Path, *flags: str) -> Iterator[Streaming]:
    """A server in the middle of a stream that would take very long to end by itself, and what is still to come of that."""
    with serving(model, "--max-model-len", "2048", *flags, log=log) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
        body = {"prompt": "abc", "max_tokens": 2000, "ignore_eos": True, "stream": True, "n": 24}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200
        assert response.readline().startswith(b"data: ")
        with ThreadPoolExecutor(1) as reader:  # a client that does not read would be cut off
            yield server, reader.submit(response.read)
            server.end()
        connection.close()


def test_an_unknown_flag_exits_2_with_the_nearest_match() -> None:
    code, said = run("launch", "--max-modell-len", "5")
    assert code == 2
    assert said == "minserve: error: --max-modell-len is no setting of minserve; did you mean --max-model-len?\n"


def test_a_busy_port_exits_3_and_is_named(model: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, said = run("launch", model, "--port", str(port))
    assert code == 3
    assert f"port {port} on 127.0.0.1 is in use" in said


def test_a_missing_checkpoint_exits_4(tmp_path: Path) -> None:
    code, said = run("launch", str(tmp_path / "nothing"), "--port", "0")
    assert code == 4
    assert "no such directory" in said


def test_a_damaged_checkpoint_exits_4_with_the_file_that_is_damaged(model: str, tmp_path: Path) -> None:
    damaged = shutil.copytree(model, tmp_path / "damaged")
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    code, said = run("launch", str(damaged), "--port", "0")
    assert code == 4
    assert "model.safetensors" in said
    assert "missing" in said


def test_an_unsupported_architecture_exits_4_and_names_it(model: str, tmp_path: Path) -> None:
    foreign = shutil.copytree(model, tmp_path / "foreign")
    settings = json.loads((Path(model) / "config.json").read_text()) | {
        "architectures": ["MambaForCausalLM"],
        "model_type": "mamba",
    }
    (foreign / "config.json").write_text(json.dumps(settings))
    code, said = run("launch", str(foreign), "--port", "0")
    assert code == 4
    assert "MambaForCausalLM" in said


def test_a_checkpoint_without_tokenizer_exits_4_while_the_engine_still_starts(model: str, tmp_path: Path) -> None:
    silent = shutil.copytree(model, tmp_path / "silent")
    (silent / "tokenizer.json").unlink()
    code, said = run("launch", str(silent), "--port", "0")
    assert code == 4
    assert "tokenizer.json" in said


def test_a_context_that_cannot_fit_exits_5(model: str) -> None:
    code, said = run("launch", model, "--port", "0", "--max-model-len", "2048", "--cpu-kv-cache-bytes", "1000000")
    assert code == 5
    assert "--max-model-len" in said


def test_kill_9_of_the_engine_exits_6_within_two_seconds(model: str, log: Path) -> None:
    def scenario() -> float:
        with streaming(model, log) as (server, rest):
            engine = server.engine()
            killed = time.monotonic()
            engine.kill()
            assert server.process.wait(PATIENCE) == 6
            took = time.monotonic() - killed
            assert f"engine 0 (pid {engine.pid}) was killed by SIGKILL" in server.log
            assert "Traceback" not in server.log
            assert b'"error"' in rest.result()
            assert b"[DONE]" not in rest.result()
        return took

    once_within(2.0, scenario)


def test_kill_9_of_the_front_takes_the_engine_along_and_frees_the_port(model: str, log: Path) -> None:
    with streaming(model, log) as (server, _):
        engine, port = server.engine(), server.port
        server.process.kill()
        gone(engine)
        server.process.wait(PATIENCE)
        until(lambda: port_is_free(port), "a free port")


def test_kill_9_of_the_front_while_the_engine_starts(model: str, log: Path) -> None:
    with start(model, log=log) as server:
        engine = server.engine()
        server.process.kill()
        gone(engine)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_drains_and_leaves(model: str, log: Path, number: signal.Signals, code: int) -> None:
    with serving(model, log=log) as server:
        engine = server.engine()
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
        body = {"prompt": "abc", "max_tokens": 100, "ignore_eos": True, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.readline().startswith(b"data: ")
        server.process.send_signal(number)
        rest = response.read()
        connection.close()
        assert rest.rstrip().endswith(b"data: [DONE]"), "a request under way is not cut off by a drain"
        assert server.process.wait(PATIENCE) == code
        assert is_gone(engine), "the server waits for its engines"
        assert "Traceback" not in server.log


def test_the_drain_is_bounded(model: str, log: Path) -> None:
    with streaming(model, log, "--drain-timeout", "0.2") as (server, rest):
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 0
        assert b'"error"' in rest.result() and b"[DONE]" not in rest.result()


def test_a_second_signal_leaves_at_once(model: str, log: Path) -> None:
    """Waiting neither for the end of the answer nor for that of the drain."""
    with streaming(model, log, "--drain-timeout", str(10 * PATIENCE)) as (server, rest):
        engine = server.engine()
        server.process.send_signal(signal.SIGINT)
        server.wait_for_log("draining")
        assert server.status("/ready") == 503
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(PATIENCE) == 130
        assert b"[DONE]" not in rest.result()
        assert is_gone(engine), "the server waits for its engines"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_while_loading_leaves_in_order(model: str, log: Path, number: signal.Signals, code: int) -> None:
    with start(model, log=log) as server:
        engine = server.engine()
        server.wait_for_log("listening on")
        server.process.send_signal(number)
        assert server.process.wait(PATIENCE) == code
        assert is_gone(engine), "the server waits for its engines"
        assert "Traceback" not in server.log


@contextlib.contextmanager
def stopping(server: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Ends a server that was started by hand, in order if the test got so far."""
    try:
        yield server
        server.terminate()
        assert server.wait(PATIENCE) == 0
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()


def test_closed_standard_streams_do_not_matter(model: str, tmp_path: Path) -> None:
    port = unused_port()
    shell = f"exec {sys.executable} -m minserve launch {model} --port {port} <&- >&- 2>&-"
    with stopping(subprocess.Popen(["sh", "-c", shell], cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"})) as server:
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert server.poll() is None
            assert time.monotonic() < deadline
            try:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
                connection.request("POST", "/v1/completions", json.dumps({"prompt": "a", "max_tokens": 3}))
                answer = connection.getresponse()
                answer.read()
                connection.close()
                if answer.status == 200:
                    break
            except OSError:
                pass
            time.sleep(0.1)


def test_a_reader_of_the_log_that_leaves_does_not_end_the_server(model: str) -> None:
    command = [sys.executable, "-m", "minserve", "launch", model, "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with stopping(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)) as server:
        assert server.stderr is not None
        port = 0
        while not port:
            line = server.stderr.readline().decode()
            assert line, "the server ended"
            if "listening on http://" in line:
                port = int(line.split("listening on http://")[1].split(";")[0].rsplit(":", 1)[1])
        server.stderr.close()
        deadline = time.monotonic() + START_SECONDS
        status = 0
        while status != 200:
            assert server.poll() is None, f"ended with {server.returncode}"
            assert time.monotonic() < deadline
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
            connection.request("GET", "/ready")
            status = connection.getresponse().status
            connection.close()
            time.sleep(0.05)


def test_too_little_memory_to_load_torch_exits_5_with_a_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "minserve", "launch", "--port", "0"]
    limit = 340_000 * 1024
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd=tmp_path,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert done.returncode == 5, done.stderr
    assert "not enough memory to load torch" in done.stderr
    assert "Traceback" not in done.stderr
