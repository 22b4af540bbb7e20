"""The engine as a process: how it starts, and every way in which it ends."""

from __future__ import annotations

import errno
import logging
import random
import signal
import socket
import subprocess
import sys
import textwrap
import time

import psutil
import pytest
from runtime.front_double import EngineProcess, FrontDouble
from waiting import PATIENCE

from minserve import config as configuration
from minserve.config import Config
from minserve.messages import Fatal, Shutdown, Starting, frame
from minserve.request import FinishReason, Request, SamplingParams
from minserve.runtime import engine as engine_module
from minserve.runtime.connection import FrontConnection

QUICK = {"num_pages": 40, "max_num_seqs": 4}


def config(directory, **settings):
    return Config(**{"model": str(directory), **QUICK, **settings})


def greedy(request_id, tokens, max_tokens):
    sampling = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0)
    return Request(id=request_id, prompt_token_ids=tokens, sampling=sampling, arrival_time=time.monotonic())


def test_a_life_from_start_to_shutdown(tiny_dir):
    with EngineProcess(config(tiny_dir("qwen3_moe"))) as engine:
        ready = engine.wait_until_ready()
        phases = [message.phase for message in engine.messages if isinstance(message, Starting)]
        after_import = ["config", "stack", "checkpoint", "build", "load", "kv cache", "vocabulary"]
        assert list(dict.fromkeys(phases)) == after_import
        assert list(ready.startup_seconds) == ["import", *after_import]
        assert ready.startup_seconds["import"] > 0.1
        assert (ready.model_type, ready.vocab_size, ready.num_pages, ready.page_size) == ("qwen3_moe", 320, 40, 64)
        assert (ready.max_model_len, ready.max_num_seqs, ready.eos_token_ids) == (2048, 4, (257,))
        assert ready.info["effective"]["dtype"] == "float32"
        assert "each byte exactly once" in ready.info["load_report"]
        engine.ask(greedy(1, [5, 6, 7], 8))
        engine.process.send_signal(signal.SIGINT)  # both are the front's business
        engine.process.send_signal(signal.SIGTERM)
        engine.finish(1)
        assert engine.reason(1) is FinishReason.LENGTH
        engine.send(Shutdown())
        engine.wait_for_close()
        assert engine.exit_code() == 0
        assert b"Traceback" not in engine.process.stderr.read()


def faulty(directory, tmp_path, fault):
    """A config with one fault."""
    match fault:
        case "no such model":
            return config(tmp_path / "nowhere")
        case "a damaged shard":
            copy = tmp_path / "damaged"
            copy.mkdir()
            for file in directory.iterdir():
                data = file.read_bytes()
                (copy / file.name).write_bytes(data[:-1] if file.suffix == ".safetensors" else data)
            return config(copy)
        case "too many pages":
            return config(directory, num_pages=1 << 40)
        case "too long a context":
            return config(directory, num_pages=2, max_model_len=1000)
        case "more context than the model has":
            return config(directory, max_model_len=1 << 20)
        case "no such device":
            return config(directory, device="cuda")
        case "no such stack":
            return config(directory, stack="marble")
    raise AssertionError(fault)


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        ("no such model", 4, "no such directory"),
        ("a damaged shard", 4, ".safetensors"),
        ("too many pages", 5, "--num-pages"),
        ("too long a context", 5, "--max-model-len 1000"),
        ("more context than the model has", 2, "max_position_embeddings"),
        ("no such device", 3, "no CUDA device"),
        ("no such stack", 2, "marble"),
    ],
)
def test_what_cannot_be_ends_with_a_sentence_and_a_code(tiny_dir, tmp_path, monkeypatch, fault, code, words):
    front, returned = serve_in_thread(frame(configuration.encode(faulty(tiny_dir("qwen3_moe"), tmp_path, fault))), monkeypatch)
    assert returned == code
    last = front.messages[-1]
    assert isinstance(last, Fatal)
    assert last.exit_code == code
    assert words in last.message


def serve_in_thread(first_bytes, monkeypatch):
    """What an engine makes of these bytes, without the seconds that a process takes to start."""
    monkeypatch.setattr(logging, "raiseExceptions", True)  # put back afterwards
    ours, theirs = socket.socketpair()
    connection = FrontConnection(theirs)
    ours.sendall(first_bytes)
    code = engine_module.serve(connection)
    connection.close()
    front = FrontDouble(ours)
    front.wait_for_close()
    ours.close()
    return front, code


def test_a_first_frame_that_is_no_config_is_a_fault_of_this_program(monkeypatch):
    front, code = serve_in_thread(b"\x01\x00\x00\x00\xc1", monkeypatch)
    assert code == 1
    assert "Decode" in front.messages[-1].message


def test_a_full_disk_ends_with_a_sentence(tiny_dir, monkeypatch):
    def assemble(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(engine_module, "assemble", assemble)
    front, code = serve_in_thread(frame(configuration.encode(config(tiny_dir("qwen3_moe")))), monkeypatch)
    assert code == 3
    assert "No space left on device for a compiled kernel: make room" in front.messages[-1].message


def test_a_process_that_fails_ends_with_the_code_and_without_a_traceback(tiny_dir, tmp_path):
    with EngineProcess(faulty(tiny_dir("qwen3_moe"), tmp_path, "a damaged shard")) as engine:
        engine.wait_for_close()
        assert engine.exit_code() == 4
        assert engine.last_word.exit_code == 4
        assert b"Traceback" not in engine.process.stderr.read()


def test_without_a_socket_it_says_how_engines_are_started(monkeypatch, capsys):
    monkeypatch.delenv("MINSERVE_ENGINE_FD", raising=False)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert engine_module.main() == 2
    assert "minserve launch" in capsys.readouterr().err


def test_the_front_is_watched_from_before_the_start_to_the_end(monkeypatch):
    events = []

    class Watched:
        def leave_with_front(self):
            events.append("watch")

        def leave_alone(self):
            events.append("alone")

    monkeypatch.setattr(signal, "signal", lambda number, action: events.append((number, action)))
    monkeypatch.setattr(FrontConnection, "inherited", classmethod(lambda *_: Watched()))
    monkeypatch.setattr(engine_module, "serve", lambda *_: events.append("serve") or 5)
    assert engine_module.main() == 5
    assert events[:2] == [(signal.SIGINT, signal.SIG_IGN), (signal.SIGTERM, signal.SIG_IGN)]
    assert events[2:] == ["watch", "serve", "alone"]


def test_the_front_leaves_while_a_step_runs(tiny_dir):
    with EngineProcess(config(tiny_dir("qwen3_moe"))) as engine:
        engine.wait_until_ready()
        engine.ask(greedy(1, random.Random(0).choices(range(250), k=1900), 100))
        engine.connection.close()
        assert engine.exit_code() == 6


FRONT = """
    import os, socket, subprocess, sys, time
    from minserve import config
    from minserve.messages import AddRequests, encode_frame, frame
    from minserve.request import Request, SamplingParams
    ours, theirs = socket.socketpair()
    engine = subprocess.Popen([sys.executable, "-P", "-m", "minserve.runtime"], pass_fds=[theirs.fileno()],
        env=os.environ | {"MINSERVE_ENGINE_FD": str(theirs.fileno())}, process_group=0)
    theirs.close()
    ours.sendall(frame(config.encode(config.Config(model=sys.argv[1], num_pages=40))))
    sampling = SamplingParams(max_tokens=2000, seed=0)
    ours.sendall(encode_frame(AddRequests([Request(id=1, prompt_token_ids=[1, 2, 3], sampling=sampling, arrival_time=0.0)])))
    print(engine.pid, flush=True)
    while ours.recv(1 << 20):
        print("heard", flush=True)
"""


def test_kill_minus_nine_of_the_front_takes_a_busy_engine_with_it(tiny_dir):
    front = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(FRONT), str(tiny_dir("qwen3_moe"))], stdout=subprocess.PIPE, text=True
    )
    engine = psutil.Process(int(front.stdout.readline()))
    for _ in range(20):  # phases of the start, then steps
        assert front.stdout.readline() == "heard\n"
    front.kill()
    front.wait(PATIENCE)
    engine.wait(PATIENCE)
    front.stdout.close()


def test_a_process_busy_in_its_start_hears_that_the_front_is_gone():
    probe = """
        import socket, sys
        from minserve.runtime.connection import FrontConnection
        FrontConnection(socket.socket(fileno=int(sys.argv[1]))).leave_with_front()
        print("guarded", flush=True)
        while True:
            pass
    """
    ours, theirs = socket.socketpair()
    with theirs:
        child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(probe), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdout=subprocess.PIPE,
            text=True,
        )
    assert child.stdout.readline() == "guarded\n"
    ours.close()
    assert child.wait(PATIENCE) == 6
    child.stdout.close()


def test_an_engine_that_does_not_hear_the_socket_dies_with_the_front_too():
    """Stopped threads, a hanging driver: the kernel's own signal does not need the engine's help."""
    probe = textwrap.dedent(
        """
        import socket, sys, time
        from minserve.runtime.connection import FrontConnection
        FrontConnection(socket.socket(fileno=int(sys.argv[1]))).leave_with_front()
        print("guarded", flush=True)
        while True:
            time.sleep(60)
        """
    )
    parent = textwrap.dedent(
        f"""
        import functools, os, socket, subprocess, sys
        from minserve.process_ends import die_with
        ours, theirs = socket.socketpair()
        other = theirs.dup()  # keeps the stream open: no EOF tells the child
        child = subprocess.Popen([sys.executable, "-c", {probe!r}, str(theirs.fileno())],
            pass_fds=[theirs.fileno(), ours.fileno()], stdout=subprocess.PIPE, text=True,
            preexec_fn=functools.partial(die_with, os.getpid()))
        child.stdout.readline()
        print(child.pid, flush=True)
        child.wait()
        """
    )
    front = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(front.stdout.readline()))
    front.kill()
    front.wait(PATIENCE)
    child.wait(PATIENCE)
    front.stdout.close()
