"""Bodies of the endpoints that generate nothing: what cannot be passed on or would be too much is refused in a sentence."""

from __future__ import annotations

import pytest

from tests.server.conftest import MAX_MODEL_LEN, Edge


@pytest.mark.parametrize("method", ["flush_cache", "start_profile", "stop_profile"])
@pytest.mark.parametrize(
    "body",
    [
        b'{"x": 18446744073709551616}',
        b'{"x": -9223372036854775809}',
        b'{"x": [[{"y": 1' + b"0" * 300 + b"}]]}",
        b'{"x": "\\ud800"}',
        b'{"x": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)
def test_arguments_that_no_engine_can_be_told_are_refused(edge: Edge, method: str, body: bytes) -> None:
    before = len(edge.engine.calls)
    answer = edge.post(f"/{method}", body)
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"
    assert len(edge.engine.calls) == before


def test_arguments_that_can_be_told_reach_the_engine(edge: Edge) -> None:
    assert edge.post("/flush_cache", {"x": [1, {"y": "é"}], "z": 18446744073709551615}).status == 200
    assert edge.engine.calls[-1].method == "flush_cache"
    assert edge.engine.calls[-1].arguments == {"x": [1, {"y": "é"}], "z": 18446744073709551615}


@pytest.mark.parametrize("body", [{"prompt": "é" * (1 << 20)}, {"messages": [{"role": "user", "content": "a" * (3 << 20)}]}])
def test_a_text_far_beyond_any_answer_is_not_tokenized(edge: Edge, body: dict[str, object]) -> None:
    answer = edge.post("/tokenize", body)
    assert answer.status == 400
    assert answer.error["param"] == next(iter(body))
    assert "bytes" in answer.error["message"]


def test_a_text_longer_than_the_context_is_tokenized(edge: Edge) -> None:
    answer = edge.post("/tokenize", {"prompt": "ab" * 100_000})
    assert answer.status == 200
    assert answer.json["count"] > 100 * MAX_MODEL_LEN
