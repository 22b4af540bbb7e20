"""HTTP around the endpoints: keys, CORS, paths, sizes, names of exchanges, bytes that are no HTTP."""

from __future__ import annotations

import gzip
import json
import re
import socket
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
from waiting import PATIENCE

from tests.server.conftest import Edge

Start = Callable[..., AbstractContextManager[Edge]]


@pytest.fixture(scope="module")
def locked(start_edge: Start) -> Iterator[Edge]:
    """A server with two keys and one allowed origin."""
    with start_edge("ok", api_key=("sesame", "öffne"), cors_origins=("https://chat.example",), metrics_prefix="vllm") as edge:
        yield edge


def raw(edge: Edge, data: bytes) -> bytes:
    """The one answer that comes back for these bytes, as it was written."""
    with socket.create_connection(("127.0.0.1", edge.port), timeout=PATIENCE) as client:
        client.sendall(data)
        received = b""
        while not is_whole(received) and (part := client.recv(65536)):
            received += part
        return received


def is_whole(answer: bytes) -> bool:
    head, end, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    return bool(end) and length is not None and len(body) >= int(length[1])


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/server_info", "/v1/nothing"])
def test_without_a_key_nothing_is_told(locked: Edge, path: str) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic sesame"}, {"Authorization": "sesame"}):
        answer = locked.get(path, headers)
        assert answer.status == 401
        assert answer.error["type"] == "authentication_error"
        assert answer.error["code"] == "invalid_api_key"
        assert answer.headers["WWW-Authenticate"] == "Bearer"


def test_every_key_opens(locked: Edge) -> None:
    assert locked.get("/v1/models", {"Authorization": "Bearer sesame"}).status == 200
    assert locked.get("/v1/models", {"Authorization": "bearer " + "öffne".encode().decode("latin-1")}).status == 200
    assert locked.post("/v1/completions", {"prompt": "x"}).status == 401
    assert locked.post("/v1/completions", {"prompt": "x"}, {"Authorization": "Bearer sesame"}).status == 200


@pytest.mark.parametrize("path", ["/health", "/ready", "/version"])
def test_probes_need_no_key(locked: Edge, path: str) -> None:
    assert locked.get(path).status == 200


def test_keys_are_not_shown(locked: Edge) -> None:
    assert b"sesame" not in locked.get("/server_info", {"Authorization": "Bearer sesame"}).body


def test_the_metrics_prefix_is_a_setting(locked: Edge) -> None:
    page = locked.get("/metrics", {"Authorization": "Bearer sesame"}).body
    assert b"vllm:num_requests_running{" in page
    assert b"minserve:" not in page


def test_cors_for_an_allowed_origin(locked: Edge) -> None:
    origin = {"Origin": "https://chat.example"}
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    preflight = locked.request("OPTIONS", "/v1/chat/completions", headers={**origin, **asked})
    assert preflight.status == 204
    assert preflight.headers["Access-Control-Allow-Origin"] == "https://chat.example"
    assert preflight.headers["Access-Control-Allow-Headers"] == "authorization"
    assert "POST" in preflight.headers["Access-Control-Allow-Methods"]
    answer = locked.get("/v1/models", {**origin, "Authorization": "Bearer sesame"})
    assert answer.headers["Access-Control-Allow-Origin"] == "https://chat.example"
    assert locked.get("/v1/models", origin).headers["Access-Control-Allow-Origin"] == "https://chat.example"


def test_cors_for_others(locked: Edge, edge: Edge, start_edge: Start) -> None:
    assert "Access-Control-Allow-Origin" not in locked.get("/health", {"Origin": "https://evil.example"}).headers
    assert "Access-Control-Allow-Origin" not in edge.get("/health", {"Origin": "https://chat.example"}).headers
    assert edge.request("OPTIONS", "/v1/models", headers={"Access-Control-Request-Method": "GET"}).status == 405
    with start_edge("ok", cors_origins=("*",)) as open_edge:
        stream = open_edge.post("/v1/completions", {"prompt": "x", "stream": True}, {"Origin": "https://any.example"})
        assert stream.headers["Access-Control-Allow-Origin"] == "*"


@pytest.mark.parametrize("path", ["/v1//models", "/v1/models/", "//v1/models", "/v1//models//", "/v1/models?x=1"])
def test_slashes_are_tolerated(edge: Edge, path: str) -> None:
    answer = edge.get(path)
    assert answer.status == 200
    assert [model["id"] for model in answer.json["data"]] == ["tiny"]


def test_models(edge: Edge) -> None:
    (model,) = edge.get("/v1/models").json["data"]
    assert set(model) == {"id", "object", "created", "owned_by", "root", "max_model_len"}
    assert model["object"] == "model"
    assert model["root"] == edge.config.model
    assert edge.get("/v1/models/tiny").json == model
    assert edge.get("/v1/models/tin").status == 404


def test_several_names_and_names_with_slashes(start_edge: Start) -> None:
    with start_edge("ok", served_model_name=("org/big-model", "alias")) as edge:
        assert [model["id"] for model in edge.get("/v1/models").json["data"]] == ["org/big-model", "alias"]
        assert edge.get("/v1/models/org/big-model").json["id"] == "org/big-model"
        assert edge.get("/v1/models/org%2Fbig-model").json["id"] == "org/big-model"
        assert edge.complete(model="alias").json["model"] == "alias"
        assert edge.complete().json["model"] == "org/big-model"
    with start_edge("ok", served_model_name=()) as edge:
        assert edge.complete().json["model"] == edge.config.model


def test_unknown_paths_and_methods_are_json(edge: Edge) -> None:
    assert edge.get("/v1/nothing").status == 404
    assert edge.get("/v1/nothing").error["code"] == "unknown_path"
    answer = edge.request("DELETE", "/v1/completions")
    assert answer.status == 405
    assert answer.headers["Allow"] == "POST"
    assert answer.error["code"] == "method_not_allowed"
    assert edge.request("HEAD", "/health").status == 200


def test_the_exchanges_name_is_echoed(edge: Edge) -> None:
    named = {"x-request-id": "abc-123"}
    assert edge.get("/health", named).headers["x-request-id"] == "abc-123"
    assert edge.get("/nothing", named).headers["x-request-id"] == "abc-123"
    assert edge.post("/v1/completions", {"prompt": "x", "stream": True}, named).headers["x-request-id"] == "abc-123"
    assert edge.post("/v1/completions", {}, named).headers["x-request-id"] == "abc-123"
    own = {edge.get("/health").headers["x-request-id"] for _ in range(3)}
    assert len(own) == 3
    assert edge.get("/health", {"x-request-id": "x" * 300}).headers["x-request-id"] != "x" * 300
    before = edge.post("/v1/completions", {"prompt": "x"}, named).json["id"]
    assert before != "abc-123"


def test_bodies_over_the_limit(start_edge: Start) -> None:
    with start_edge("ok", max_body_bytes=10_000, max_model_len=100_000) as edge:
        fits = json.dumps({"prompt": "x" * 9000}).encode()
        assert edge.post("/v1/completions", fits).status == 200
        answer = edge.post("/v1/completions", json.dumps({"prompt": "x" * 10_000}).encode())
        assert answer.status == 413
        assert answer.error["code"] == "body_too_large"
        bomb = gzip.compress(json.dumps({"prompt": "x" * 1_000_000}).encode())
        assert len(bomb) < 10_000
        assert edge.post("/v1/completions", bomb, {"Content-Encoding": "gzip"}).status == 413
        assert edge.post("/v1/completions", gzip.compress(fits), {"Content-Encoding": "gzip"}).status == 200
        assert edge.post("/v1/completions", zlib.compress(fits)[:-20], {"Content-Encoding": "gzip"}).status == 400
        chunks = b"".join(b"1000\r\n" + b"x" * 4096 + b"\r\n" for _ in range(4)) + b"0\r\n\r\n"
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
        assert raw(edge, head + chunks).startswith(b"HTTP/1.1 413")


def test_a_body_that_cannot_be_decoded_leaves_no_traceback(edge: Edge, caplog: pytest.LogCaptureFixture) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 14\r\n\r\n"
    assert raw(edge, head + b'{"prompt":"x"}').startswith(b"HTTP/1.1 400")
    assert not caplog.records


def test_a_size_over_the_limit_is_refused_before_the_body_comes(start_edge: Start) -> None:
    with (
        start_edge("ok", max_body_bytes=10_000) as edge,
        socket.create_connection(("127.0.0.1", edge.port), timeout=PATIENCE) as client,
    ):
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\nExpect: 100-continue\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 413")


def test_a_body_announced_with_expect_is_asked_for(edge: Edge) -> None:
    body = b'{"prompt":"x"}'
    with socket.create_connection(("127.0.0.1", edge.port), timeout=PATIENCE) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\nExpect: 100-continue\r\n\r\n" % len(body)
        )
        assert client.recv(4096) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(body)
        assert client.recv(65536).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nbroken header\r\nAccept: text/html\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"A" * 5000 + b" / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\r\n\r\n",
    ],
)
def test_bytes_that_are_no_http_are_answered_in_json(edge: Edge, data: bytes) -> None:
    received = raw(edge, data)
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400")), received
    assert b"application/json" in head
    assert b"Server: minserve/" in head
    error = json.loads(body)["error"]
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 500
    assert b"<html" not in received.lower()
    assert b"Traceback" not in received


def test_one_connection_serves_many_requests(edge: Edge) -> None:
    body = b'{"prompt":"x","stream":true}'
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    with socket.create_connection(("127.0.0.1", edge.port), timeout=PATIENCE) as client:
        for _ in range(5):
            client.sendall(request)
            received = b""
            while not received.endswith(b"0\r\n\r\n"):
                received += client.recv(65536)
            assert received.startswith(b"HTTP/1.1 200")
            assert received.count(b"data: [DONE]\n\n") == 1


def test_control_calls_reach_the_engine(edge: Edge) -> None:
    for path in ("/flush_cache", "/stop_profile"):
        answer = edge.request("POST", path)
        assert answer.status == 200
        assert answer.json == {"success": True, "ranks": [{"called": path[1:]}]}
        assert edge.engine.calls[-1].method == path[1:]
    answer = edge.post("/start_profile", {"steps": 3})
    assert answer.status == 400
    assert "there is no start_profile" in answer.error["message"]
    assert edge.engine.calls[-1].arguments == {"steps": 3}
    assert edge.post("/flush_cache", b"{").status == 400


def test_server_info(edge: Edge) -> None:
    info = edge.get("/server_info").json
    assert info["config"]["model"] == edge.config.model
    assert info["ranks"][0]["startup_seconds"] == {"load": 0.5}
    assert info["ranks"][0]["info"] == {"backend": "script"}
    assert info["ranks"][0]["now"] == {"called": "server_info"}


def test_version(edge: Edge) -> None:
    assert edge.get("/version").json["version"]
