"""The whole server, launched as a person launches it, driven by the clients people use. One server for the file."""

from __future__ import annotations

import json
import resource
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from server_process import ServerProcess, serving
from waiting import PATIENCE, once_within

MODEL_NAME = "tiny"


@pytest.fixture(scope="module")
def server(tiny_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("server") / "log"
    model = str(tiny_dir("qwen3_moe"))
    with serving(model, "--served-model-name", MODEL_NAME, "--chunked-prefill-size", "128", log=log) as running:
        yield running
        assert running.process.poll() is None, "the server died during the tests"
    assert "Traceback" not in running.log


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)


def chat(text: str) -> list[Any]:
    return [{"role": "system", "content": "be brief"}, {"role": "user", "content": text}]


def test_openai_python_chat_streams_what_it_answers(client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {"model": MODEL_NAME, "messages": chat("hello"), "max_tokens": 40, "temperature": 0}
    whole = client.chat.completions.create(**arguments)
    assert whole.usage is not None
    assert whole.choices[0].finish_reason in ("stop", "length")
    chunks = list(client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason] == [
        whole.choices[0].finish_reason
    ]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_openai_python_completions_with_seed_n_and_logprobs(client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {"model": MODEL_NAME, "prompt": "once upon", "max_tokens": 12, "seed": 7, "n": 3, "logprobs": 2}
    first, second = (client.completions.create(**arguments) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in second.choices]
    assert len(set(texts)) == 3, "choices of one request have their own random numbers"
    for choice in first.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        assert all(value <= 0 for value in choice.logprobs.token_logprobs)


def test_openai_python_gets_the_error_it_expects(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL_NAME, messages=chat("x"), temperature=3)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match=MODEL_NAME):
        client.chat.completions.create(model="another", messages=chat("x"))


def test_models_list_names_the_served_model(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL_NAME]
    assert client.models.retrieve(MODEL_NAME).object == "model"


@pytest.mark.parametrize("program", [name for name in ("curl",) if shutil.which(name)])
def test_curl_n_prints_events_and_one_done(server: ServerProcess, program: str) -> None:
    body = json.dumps({"messages": chat("hi"), "max_tokens": 5, "ignore_eos": True, "stream": True})
    url = f"{server.base_url}/v1/chat/completions"
    command = [program, "-sSN", url, "-H", "Content-Type: application/json", "-d", body]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    events = [line for line in done.stdout.split("\n") if line]
    assert all(line.startswith("data: ") for line in events)
    assert events[-1] == "data: [DONE]"
    assert events.count("data: [DONE]") == 1
    assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"


def post(path: str, body: Any) -> bytes:
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    return head.encode() + payload


def test_a_raw_socket_sees_the_stream_as_it_is_written(server: ServerProcess) -> None:
    body = {"prompt": "abc", "max_tokens": 4, "ignore_eos": True, "stream": True}
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
        connection.sendall(post("/v1/completions", body))
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            part = connection.recv(65536)
            assert part, f"closed after {received!r}"
            received += part
        # The connection stays usable for a second request.
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
    head, _, stream = received.partition(b"\r\n\r\n")
    headers = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert headers[b"cache-control"] == b"no-cache"
    assert headers[b"x-accel-buffering"] == b"no"
    assert headers[b"transfer-encoding"] == b"chunked"
    assert b"content-encoding" not in headers
    assert stream.count(b"data: [DONE]\n\n") == 1


def endless(stream: bool) -> dict[str, Any]:
    return {"prompt": "abc" * 60, "max_tokens": 1500, "ignore_eos": True, "stream": stream, "n": 3}


def everything_is_free(server: ServerProcess) -> None:
    server.wait_metric("num_requests_running", 0)
    server.wait_metric("num_requests_waiting", 0)
    server.wait_metric("kv_cache_usage_perc", 0)


@pytest.mark.parametrize("reset", [False, True])
def test_a_client_that_leaves_a_stream_frees_its_pages(server: ServerProcess, reset: bool) -> None:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.sendall(post("/v1/completions", endless(stream=True)))
    assert b"data: " in connection.recv(65536) + connection.recv(65536)
    server.wait_metric("num_requests_running", 3)
    assert server.metric("kv_cache_usage_perc") > 0
    connection.close()
    everything_is_free(server)


def test_a_client_that_leaves_without_streaming_frees_its_pages_too(server: ServerProcess) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
        connection.sendall(post("/v1/completions", endless(stream=False)))
        server.wait_metric("num_requests_running", 3)
    everything_is_free(server)


def test_many_streams_cut_after_a_chunk_leave_a_server_as_new(server: ServerProcess) -> None:
    ended = server.metric("request_success_total")
    for _ in range(6):
        connections = [socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) for _ in range(25)]
        for connection in connections:
            connection.sendall(post("/v1/completions", endless(stream=True) | {"n": 1}))
        for connection in connections:
            assert connection.recv(15).startswith(b"HTTP/1.1 200 OK")
            connection.close()
    everything_is_free(server)
    assert server.metric("request_success_total") == ended
    status, answer = server.request("POST", "/v1/completions", {"prompt": "abc", "max_tokens": 3, "ignore_eos": True})
    assert (status, answer["usage"]["completion_tokens"]) == (200, 3)


def test_normal_ends_are_no_aborts(server: ServerProcess) -> None:
    before = server.metric("aborts_total")
    with ThreadPoolExecutor(8) as pool:
        bodies = [{"prompt": f"{number}", "max_tokens": 2, "stream": number % 2 == 0} for number in range(60)]
        answers = list(pool.map(lambda body: server.request("POST", "/v1/completions", body)[0], bodies))
    assert answers == [200] * 60
    assert server.metric("aborts_total") == before
    everything_is_free(server)


def test_twenty_at_once_get_what_each_gets_alone(server: ServerProcess) -> None:
    """Of all lengths, some greedy and some seeded; two share a beginning longer than a page."""
    shared = "the same beginning for two of them, which is longer than one page of sixty-four tokens is; "
    bodies: list[dict[str, Any]] = []
    for number in range(20):
        prompt = shared + str(number) if number < 2 else "".join(chr(97 + (number * 7 + i) % 26) for i in range(1 + 13 * number))
        sampling = {"temperature": 0} if number % 2 else {"temperature": 0.8, "seed": number, "top_p": 0.95}
        bodies.append({"prompt": prompt, "max_tokens": 10 + 3 * number, **sampling})

    def answer(body: dict[str, Any]) -> str:
        status, got = server.request("POST", "/v1/completions", body)
        assert status == 200, got
        return str(got["choices"][0]["text"])

    alone = []
    for body in bodies:
        assert server.request("POST", "/flush_cache", {})[0] == 200
        alone.append(answer(body))
    with ThreadPoolExecutor(20) as pool:
        for _ in range(2):  # the second time with a full prefix cache
            assert list(pool.map(answer, bodies)) == alone


def test_a_burst_beyond_the_soft_limit_of_open_files_is_answered(server: ServerProcess) -> None:
    """The server was started with `ulimit -Sn 1024`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    connections: list[socket.socket] = []
    try:
        for number in range(1500):
            connection = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
            connections.append(connection)
            connection.sendall(post("/v1/completions", {"prompt": [number % 250], "max_tokens": 1}))
        statuses = {connection.recv(12) for connection in connections}
    finally:
        for connection in connections:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert statuses == {b"HTTP/1.1 200"}, "1500 requests fit in the queue of 2048"
    everything_is_free(server)


def test_health_stays_quick_while_the_engine_computes(server: ServerProcess) -> None:
    def scenario() -> float:
        with ThreadPoolExecutor(4) as pool:
            bodies = [{"prompt": "x" * 1500, "max_tokens": 60, "ignore_eos": True, "seed": seed} for seed in range(4)]
            answers = [pool.submit(server.request, "POST", "/v1/completions", body) for body in bodies]
            slowest = 0.0
            while not all(answer.done() for answer in answers):
                asked = time.monotonic()
                assert server.status("/health") == 200
                slowest = max(slowest, time.monotonic() - asked)
                time.sleep(0.02)
        assert all(answer.result()[0] == 200 for answer in answers)
        return slowest

    once_within(0.5, scenario, tries=5)


def test_server_info_tells_the_effective_settings(server: ServerProcess) -> None:
    status, info = server.request("GET", "/server_info")
    assert status == 200
    assert "128" in json.dumps(info)
    assert server.request("GET", "/version")[0] == 200
