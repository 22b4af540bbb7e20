"""Any body for any endpoint: never a 5xx, never HTML, never a request in the engine that is not valid."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.conftest import MAX_MODEL_LEN, Edge

Start = Callable[..., AbstractContextManager[Edge]]

EXAMPLES = int(os.environ.get("MINSERVE_FUZZ_EXAMPLES", "300"))
"""Of each test; raise it for a long run."""

anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from(
        [0, 1, -1, 2, 0.5, 10**30, "text", "function", "auto", "user", "tiny", ["x"], [1, 2], [[1]], {"type": "text"}]
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
part = st.fixed_dictionaries({}, optional={"type": anything | st.just("text"), "text": anything | st.text(max_size=9)}) | anything
call = st.fixed_dictionaries(
    {},
    optional={
        "id": anything,
        "type": anything,
        "function": st.fixed_dictionaries({}, optional={"name": anything, "arguments": anything}),
    },
)
message = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]) | anything,
        "content": st.text(max_size=20) | st.lists(part, max_size=3) | anything,
        "tool_calls": st.lists(call, max_size=2) | anything,
        "name": anything,
        "tool_call_id": anything,
        "reasoning_content": anything,
    },
)
tool = st.fixed_dictionaries(
    {},
    optional={
        "type": st.just("function") | anything,
        "function": st.fixed_dictionaries({"name": st.text(max_size=5)}) | anything,
        "name": st.text(max_size=5) | anything,
        "input_schema": st.just({"type": "object"}) | anything,
    },
)
item = message | st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning"]) | anything,
        "role": st.sampled_from(["user", "assistant"]) | anything,
        "content": st.text(max_size=20) | st.lists(part, max_size=3) | anything,
        "call_id": anything,
        "name": anything,
        "arguments": anything,
        "output": anything | st.lists(part, max_size=2),
    },
)
"""Of a conversation as /v1/responses has it."""
block = part | st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["text", "tool_use", "tool_result", "thinking"]) | anything,
        "text": anything,
        "id": anything,
        "name": anything,
        "input": anything,
        "tool_use_id": anything,
        "content": anything | st.lists(part, max_size=2),
    },
)
turn = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant"]) | anything,
        "content": st.text(max_size=9) | st.lists(block, max_size=3) | anything,
    },
)
"""Of a conversation as /v1/messages has it."""
FIELDS: dict[str, Any] = {
    "instructions": st.text(max_size=9),
    "max_output_tokens": st.integers(1, 6),
    "text": st.just({"format": {"type": "text"}}),
    "metadata": st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=1),
    "reasoning": st.fixed_dictionaries({}, optional={"effort": st.sampled_from(["none", "low"])}),
    "reasoning_effort": st.sampled_from(["none", "low"]),
    "thinking": st.fixed_dictionaries({}, optional={"type": st.sampled_from(["enabled", "disabled", "adaptive"])}),
    "output_config": st.fixed_dictionaries({}, optional={"format": anything, "effort": anything}),
    "system": st.text(max_size=9) | st.lists(part, max_size=2),
    "stop_sequences": st.lists(st.text(min_size=1, max_size=4), max_size=3),
    "model": st.just("tiny"),
    "max_tokens": st.integers(1, 6),
    "max_completion_tokens": st.integers(1, 6),
    "min_tokens": st.integers(0, 4),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(-1, 300),
    "min_p": st.floats(0, 1),
    "n": st.integers(1, 4),
    "best_of": st.integers(1, 4),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "stop": st.text(min_size=1, max_size=4) | st.lists(st.text(min_size=1, max_size=4), max_size=4),
    "stop_token_ids": st.lists(st.integers(0, 262), max_size=3),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries(
        {}, optional={"include_usage": st.booleans(), "continuous_usage_stats": st.booleans()}
    ),
    "logit_bias": st.dictionaries(st.integers(0, 262).map(str), st.floats(-200, 200), max_size=3),
    "logprobs": st.booleans() | st.integers(0, 20),
    "top_logprobs": st.integers(0, 20),
    "prompt_logprobs": st.integers(0, 20),
    "echo": st.booleans(),
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "return_token_ids": st.booleans(),
    "return_tokens_as_token_ids": st.booleans(),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.1, 2),
    "tools": st.lists(tool, max_size=2),
    "tool_choice": st.sampled_from(["auto", "none", "required"]),
    "response_format": st.just({"type": "text"}),
    "chat_template_kwargs": st.dictionaries(st.text(max_size=6), anything, max_size=2),
    "add_generation_prompt": st.booleans(),
    "continue_final_message": st.booleans(),
    "add_special_tokens": st.booleans(),
    "return_token_strs": st.booleans(),
    "request_id": st.text(max_size=5),
}
prompt = st.text(max_size=40) | st.lists(st.text(max_size=9), max_size=3) | st.lists(st.integers(0, 262), max_size=9)


def bodies(own: dict[str, Any], odd: bool) -> st.SearchStrategy[dict[str, Any]]:
    """Bodies with the endpoint's own fields and any of the known ones; odd bodies have fields of any value."""
    fields = {name: value | anything if odd else value for name, value in {**FIELDS, **own}.items()}
    required = {} if odd else {name: fields.pop(name) for name in own}
    return st.fixed_dictionaries(required, optional=fields)


ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": prompt},
    "/v1/chat/completions": {"messages": st.lists(message, max_size=3)},
    "/tokenize": {"prompt": prompt},
    "/detokenize": {"tokens": st.lists(st.integers(0, 262), max_size=9)},
    "/abort_request": {"abort_all": st.booleans()},
    "/v1/responses": {"input": st.text(max_size=20) | st.lists(item, max_size=4)},
    "/v1/messages": {"messages": st.lists(turn, max_size=4)},
    "/v1/messages/count_tokens": {"messages": st.lists(turn, max_size=4)},
}
requests = st.one_of([st.tuples(st.just(path), bodies(own, odd)) for path, own in ENDPOINTS.items() for odd in (False, True)])
relaxed = settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.fixture(scope="module")
def fuzzed(start_edge: Start) -> Iterator[Edge]:
    with start_edge("hello é HI" * 3) as edge:
        yield edge
        edge.wait_for(lambda: edge.engine.num_live == 0)
        assert edge.get("/health").status == 200
        assert edge.complete().status == 200
        assert edge.metric("num_requests_running") == 0


def check(edge: Edge, path: str, body: Any) -> None:
    before = len(edge.engine.added)
    answer = edge.post(path, body)
    assert answer.status < 500, (body, answer)
    if answer.headers["Content-Type"] == "text/event-stream":
        assert (
            answer.body.endswith((b"data: [DONE]\n\n", b'data: {"type":"message_stop"}\n\n'))
            or b"event: response." in answer.body
        )
    else:
        parsed = answer.json
        if answer.status >= 400 and path.startswith("/v1/messages"):
            assert parsed["type"] == "error"
            assert set(parsed["error"]) == {"type", "message"}
        elif answer.status >= 400:
            assert set(parsed["error"]) == {"message", "type", "param", "code"}
            assert parsed["error"]["param"] or answer.status == 499
            assert len(edge.engine.added) == before
    for request in edge.engine.added[before:]:
        sampling = request.sampling
        assert 0 < len(request.prompt_token_ids) < MAX_MODEL_LEN
        assert 0 <= sampling.max_tokens <= MAX_MODEL_LEN - len(request.prompt_token_ids)
        assert 0 <= sampling.min_tokens <= sampling.max_tokens
        assert sampling.temperature == 0 or 1e-5 <= sampling.temperature <= 2
        assert all(0 <= token < 263 for token in (*request.prompt_token_ids, *sampling.stop_token_ids, *sampling.logit_bias))
        assert 0 <= sampling.seed < 1 << 63


@relaxed
@given(requests)
def test_any_json_for_any_endpoint(fuzzed: Edge, request: tuple[str, dict[str, Any]]) -> None:
    check(fuzzed, *request)


@relaxed
@given(st.sampled_from(sorted(ENDPOINTS)), st.binary(max_size=60) | anything.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_for_any_endpoint(fuzzed: Edge, path: str, body: bytes) -> None:
    check(fuzzed, path, body)


@relaxed
@given(
    st.sampled_from(["GET", "POST", "PUT", "DELETE", "OPTIONS"]),
    st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=30),
)
def test_any_path_is_answered_in_json(fuzzed: Edge, method: str, path: str) -> None:
    answer = fuzzed.request(method, f"/{path}")
    assert answer.status < 500
    if answer.headers["Content-Type"] in ("text/plain; version=0.0.4; charset=utf-8", "text/html; charset=utf-8"):
        assert answer.status == 200, "metrics or the page"
    else:
        assert isinstance(answer.json, dict)
