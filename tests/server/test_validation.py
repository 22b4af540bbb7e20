"""Bad requests: a 400 with the field's name each, and nothing reaches the engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from minserve.request import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from tests.server.conftest import MAX_MODEL_LEN, Edge, Vocabulary

Start = Callable[..., AbstractContextManager[Edge]]
HUGE = 10**40

BAD_FIELDS: list[tuple[str, Any]] = [
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", "x"),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("max_completion_tokens", 0),
    ("min_tokens", -1),
    ("temperature", -0.1),
    ("temperature", 2.01),
    ("temperature", "hot"),
    ("temperature", HUGE),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_p", -1),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("repetition_penalty", 1e-300),
    ("presence_penalty", 2.1),
    ("presence_penalty", -2.1),
    ("frequency_penalty", 3),
    ("frequency_penalty", [1]),
    ("n", 0),
    ("n", 129),
    ("n", 5_000_000),
    ("n", "2"),
    ("best_of", 0),
    ("best_of", 129),
    ("seed", "x"),
    ("seed", 1.5),
    ("seed", HUGE),
    ("stop", 5),
    ("stop", [5]),
    ("stop", ["a", None]),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", ["a"] * 65),
    ("stop", {"a": 1}),
    ("stream", "yes"),
    ("stream", 1),
    ("logit_bias", {"999999": 5}),
    ("logit_bias", {"abc": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"1.0": 1}),
    ("logit_bias", {"\u0663": 1}),
    ("logit_bias", {"5": "x"}),
    ("logit_bias", {"5": None}),
    ("logit_bias", [5]),
    ("stop_token_ids", [999_999]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["a"]),
    ("stop_token_ids", 5),
    ("stop_token_ids", [True]),
    ("ignore_eos", "no"),
    ("skip_special_tokens", 0),
    ("include_stop_str_in_output", "x"),
    ("prompt_logprobs", 21),
    ("prompt_logprobs", True),
    ("return_token_ids", "x"),
    ("model", 5),
    ("response_format", "json"),
    ("guided_regex", ""),
    ("guided_choice", []),
    ("guided_json", "{"),
    ("guided_grammar", "root ::= x"),
    ("structured_outputs", []),
]
BAD_COMPLETION_FIELDS: list[tuple[str, Any]] = [
    ("logprobs", 21),
    ("logprobs", 10**9),
    ("logprobs", True),
    ("logprobs", -1),
    ("echo", "x"),
    ("suffix", "tail"),
    ("add_special_tokens", 1),
    ("prompt", []),
    ("prompt", [[]]),
    ("prompt", None),
    ("prompt", 5),
    ("prompt", {"a": 1}),
    ("prompt", [1, "a"]),
    ("prompt", [1, 2.5]),
    ("prompt", [True]),
    ("prompt", [None]),
    ("prompt", [-1]),
    ("prompt", [HUGE]),
    ("prompt", ["a"] * 3000),
]
BAD_CHAT_FIELDS: list[tuple[str, Any]] = [
    ("logprobs", 1),
    ("top_logprobs", 21),
    ("top_logprobs", 10**9),
    ("top_logprobs", -1),
    ("messages", []),
    ("messages", None),
    ("messages", "hi"),
    ("messages", {"role": "user"}),
    ("tools", {"a": 1}),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("tool_choice", "sometimes"),
    ("tool_choice", 5),
    ("chat_template_kwargs", [1]),
    ("chat_template_kwargs", {"messages": []}),
    ("chat_template_kwargs", {"self": 1}),
    ("add_generation_prompt", "x"),
]


def refused(edge: Edge, path: str, body: Any, param: str | None, status: int = 400) -> dict[str, Any]:
    before = len(edge.engine.added)
    answer = edge.post(path, body)
    assert answer.status == status, answer
    assert answer.headers["Content-Type"].startswith("application/json")
    error: dict[str, Any] = answer.error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert len(error["message"]) < 500
    assert edge.complete(max_tokens=1).status == 200
    assert len(edge.engine.added) == before + 1
    return error


@pytest.mark.parametrize(("name", "value"), BAD_FIELDS + BAD_COMPLETION_FIELDS)
def test_bad_fields_of_completions(edge: Edge, name: str, value: Any) -> None:
    refused(edge, "/v1/completions", {"prompt": "x", name: value}, name)


@pytest.mark.parametrize(("name", "value"), BAD_FIELDS + BAD_CHAT_FIELDS)
def test_bad_fields_of_chat(edge: Edge, name: str, value: Any) -> None:
    refused(edge, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], name: value}, name)


def test_messages_say_what_may_be_sent_instead(edge: Edge) -> None:
    chat, part = {"messages": [{"role": "user", "content": "x"}]}, {"type": "image_url"}
    for fields, param, said in (
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type", 'tools[0].type is "retrieval"; it must be "function"'),
        ({"tools": [{}]}, "tools[0].type", 'tools[0].type is missing; it must be "function"'),
        ({"response_format": {}}, "response_format.type", 'is missing; it must be "text", "json_object" or "json_schema"'),
        ({"response_format": {"type": 5}}, "response_format.type", 'is 5; it must be "text", "json_object" or "json_schema"'),
        ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice", "must name a function of tools"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "messages[0].role", 'is "bot"; it must be "system" or "developer" or'),
        ({"messages": [{"role": "user", "content": [part]}]}, "messages[0].content[0].type", 'reads only text, of type "text"'),
        ({"max_tokens": -1}, "max_tokens", "max_tokens must be at least 1"),
        ({"max_completion_tokens": -(10**40)}, "max_completion_tokens", "must be at least 1"),
        ({"logit_bias": {"5": None}}, "logit_bias", "a value in logit_bias must be a number, not null"),
        ({"guided_regex": "("}, "guided_regex", "unclosed group"),
    ):
        assert said in refused(edge, "/v1/chat/completions", {**chat, **fields}, param)["message"]
    deep = b'{"messages":' + b"[" * 5000 + b"]" * 5000 + b"}"
    assert "nested too deeply" in refused(edge, "/v1/chat/completions", deep, "body")["message"]
    assert "is empty" in refused(edge, "/v1/chat/completions", b"", "body")["message"]
    assert refused(edge, "/v1/chat/completions", b"[1]", "body")["message"] == "body must be an object, not an array"
    refused(edge, "/v1/completions", {"prompt": "x", "echo": True, "max_tokens": -1}, "max_tokens")


def test_missing_prompt_and_messages(edge: Edge) -> None:
    refused(edge, "/v1/completions", {}, "prompt")
    refused(edge, "/v1/chat/completions", {}, "messages")


USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("x", "messages[1]"),
        (None, "messages[1]"),
        ({"content": "x"}, "messages[1].role"),
        ({"role": "robot", "content": "x"}, "messages[1].role"),
        ({"role": 5, "content": "x"}, "messages[1].role"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "content": None}, "messages[1].content"),
        ({"role": "system", "content": None}, "messages[1].content"),
        ({"role": "tool", "content": None}, "messages[1].content"),
        ({"role": "assistant", "content": None}, "messages[1].content"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "messages[1].content"),
        ({"role": "user", "content": None, "tool_calls": [{"function": {"name": "f"}}]}, "messages[1].content"),
        ({"role": "user", "content": 5}, "messages[1].content"),
        ({"role": "user", "content": {"type": "text"}}, "messages[1].content"),
        ({"role": "user", "content": ["x"]}, "messages[1].content[0]"),
        (
            {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}]},
            "messages[1].content[1].type",
        ),
        ({"role": "user", "content": [{"text": "x"}]}, "messages[1].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": "x", "name": 5}, "messages[1].name"),
        ({"role": "assistant", "tool_calls": "x"}, "messages[1].tool_calls"),
        ({"role": "assistant", "tool_calls": ["x"]}, "messages[1].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[1].tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "messages[1].tool_calls[0].function.name"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]},
            "messages[1].tool_calls[0].function.arguments",
        ),
    ],
)
def test_bad_messages(edge: Edge, message: Any, param: str) -> None:
    error = refused(edge, "/v1/chat/completions", {"messages": [USER, message]}, param)
    assert "messages[1]" in error["message"]


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        (5, "tools[0]"),
        ({}, "tools[0].type"),
        ({"type": "retrieval"}, "tools[0].type"),
        ({"type": "function"}, "tools[0].function"),
        ({"type": "function", "function": {}}, "tools[0].function.name"),
        ({"type": "function", "function": {"name": "f", "parameters": []}}, "tools[0].function.parameters"),
    ],
)
def test_bad_tools(edge: Edge, tool: Any, param: str) -> None:
    refused(edge, "/v1/chat/completions", {"messages": [USER], "tools": [tool]}, param)


@pytest.mark.parametrize(
    "body", [b"{", b"", b"[1]", b'"x"', b"null", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 50_000, b'{"prompt":NaN}']
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/abort_request"])
def test_bodies_that_are_no_json_object(edge: Edge, path: str, body: bytes) -> None:
    refused(edge, path, body, "body")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"prompt":"x","temperature":1e999}', "temperature"),
        (b'{"prompt":"x","seed":' + b"9" * 5000 + b"}", "seed"),
        (b'{"prompt":"\xff"}', "prompt"),
        (b'{"prompt":[1e2]}', "prompt"),
        (b'{"prompt":"x","logit_bias":' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}", "body"),
    ],
)
def test_values_that_cannot_be_read(edge: Edge, body: bytes, param: str) -> None:
    refused(edge, "/v1/completions", body, param)


def test_fields_that_contradict_each_other(edge: Edge) -> None:
    chat = {"messages": [USER]}
    text = {"prompt": "x"}
    refused(edge, "/v1/completions", {**text, "n": 3, "best_of": 2}, "best_of")
    refused(edge, "/v1/completions", {**text, "best_of": 2, "stream": True}, "best_of")
    refused(edge, "/v1/completions", {**text, "prompt_logprobs": 1, "stream": True}, "prompt_logprobs")
    refused(edge, "/v1/completions", {**text, "min_tokens": 5, "max_tokens": 4}, "min_tokens")
    refused(edge, "/v1/completions", {"prompt": ["x"] * 100, "n": 100}, "prompt")
    refused(edge, "/v1/chat/completions", {**chat, "top_logprobs": 2}, "top_logprobs")
    both = {"continue_final_message": True, "add_generation_prompt": True}
    refused(edge, "/v1/chat/completions", {**chat, **both}, "continue_final_message")
    refused(edge, "/v1/chat/completions", {**chat, "echo": True, "max_tokens": 0}, "max_tokens")
    for value in ("x", {"include_usage": 1}, {"continuous_usage_stats": "x"}):
        options = {"stream": True, "stream_options": value}
        name = "stream_options" if isinstance(value, str) else f"stream_options.{next(iter(value))}"
        refused(edge, "/v1/completions", {**text, **options}, name)


def test_token_ids_must_be_in_the_vocabulary(edge: Edge, vocabulary: Vocabulary) -> None:
    assert edge.complete([vocabulary.size - 1]).status == 200
    refused(edge, "/v1/completions", {"prompt": [vocabulary.size]}, "prompt")
    refused(edge, "/v1/completions", {"prompt": [[1], [2, vocabulary.size]]}, "prompt[1]")
    refused(edge, "/detokenize", {"tokens": [vocabulary.size]}, "tokens")
    assert edge.complete(logit_bias={str(vocabulary.size - 1): 1}).status == 200
    refused(edge, "/v1/completions", {"prompt": "x", "logit_bias": {str(vocabulary.size): 1}}, "logit_bias")


@pytest.mark.parametrize("times", [1, 2, 1000])
@pytest.mark.parametrize("fields", [{}, {"max_tokens": 5}, {"stream": True}])
def test_a_prompt_without_room_is_refused_with_both_lengths(edge: Edge, times: int, fields: dict[str, Any]) -> None:
    length = MAX_MODEL_LEN * times
    error = refused(edge, "/v1/completions", {"prompt": [1] * length, **fields}, "prompt")
    assert error["code"] == "context_length_exceeded"
    assert str(MAX_MODEL_LEN) in error["message"]
    assert str(length) in error["message"]
    for path, body, param in (
        ("/v1/completions", {"prompt": "x" * length}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * length}]}, "messages"),
    ):
        error = refused(edge, path, {**body, **fields}, param)
        assert error["code"] == "context_length_exceeded"
        assert str(MAX_MODEL_LEN) in error["message"]


def test_one_prompt_too_long_among_short_ones(edge: Edge) -> None:
    error = refused(edge, "/v1/completions", {"prompt": [[1], [1] * MAX_MODEL_LEN]}, "prompt[1]")
    assert error["code"] == "context_length_exceeded"


def test_a_refusal_by_the_template_is_the_requests_fault(edge: Edge) -> None:
    odd = {"messages": [USER], "chat_template_kwargs": {"bos_token": {"a": 1}, "continue_final_message": True}}
    refused(edge, "/v1/chat/completions", odd, "messages")


def test_unknown_models_are_named_with_the_served_ones(edge: Edge) -> None:
    answer = edge.complete(model="gpt-9")
    assert answer.status == 404
    assert answer.error["param"] == "model"
    assert answer.error["code"] == "model_not_found"
    assert "tiny" in answer.error["message"]
    assert edge.complete(model="tiny").json["model"] == "tiny"
    assert edge.complete(model=None).json["model"] == "tiny"


def test_tokenize_and_detokenize_name_what_is_missing(edge: Edge) -> None:
    refused(edge, "/tokenize", {}, "prompt")
    refused(edge, "/tokenize", {"prompt": [1]}, "prompt")
    refused(edge, "/detokenize", {}, "tokens")
    refused(edge, "/detokenize", {"tokens": "abc"}, "tokens")
    refused(edge, "/abort_request", {}, "request_id")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "x"])
def test_a_wrong_content_type_is_told(edge: Edge, kind: str) -> None:
    answer = edge.post("/v1/completions", b'{"prompt":"x"}', {"Content-Type": kind})
    assert answer.status == 400
    assert answer.error["param"] == "Content-Type"


def test_json_types_are_taken(edge: Edge) -> None:
    for kind in ("application/json; charset=utf-8", "application/vnd.api+json"):
        assert edge.post("/v1/completions", b'{"prompt":"x"}', {"Content-Type": kind}).status == 200


def test_choices_of_a_long_prompt_are_bounded_in_sum(start_edge: Start) -> None:
    with start_edge("ok", max_model_len=100_000) as roomy:
        refused(roomy, "/v1/completions", {"prompt": [1] * 90_000, "n": 128}, "prompt")
        refused(roomy, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 90_000}], "n": 128}, "n")
        assert roomy.complete([1] * 90_000, n=2, max_tokens=1).status == 200


def test_what_the_sampler_has_no_room_for_is_refused(edge: Edge, vocabulary: Vocabulary) -> None:
    many = {f"{token:04d}": 1 for token in range(MAX_LOGIT_BIAS + 1)}
    error = refused(edge, "/v1/completions", {"prompt": "x", "logit_bias": many}, "logit_bias")
    assert "at most 300" in error["message"]
    assert edge.complete(logit_bias={str(token): 1 for token in range(vocabulary.size)}).status == 200
    full = list(range(MAX_STOP_TOKEN_IDS))  # with the model's EOS one too many
    error = refused(edge, "/v1/completions", {"prompt": "x", "stop_token_ids": full, "min_tokens": 1}, "stop_token_ids")
    assert "here are 129" in error["message"]
    assert edge.complete(stop_token_ids=full, min_tokens=1, ignore_eos=True).status == 200
    assert edge.complete(stop_token_ids=full[1:], min_tokens=1).status == 200
    assert edge.complete(stop_token_ids=full).status == 200


def test_bodies_that_would_take_long_to_decode_are_refused(edge: Edge) -> None:
    for body, param in (
        (b'{"unknown":[' + b"1," * (1 << 20) + b'1],"prompt":"x"}', "body"),
        (b'{"unknown":[' + b"[]," * (1 << 16) + b'1],"prompt":"x"}', "body"),
        (b'{"unknown":[' + b'"",' * (1 << 17) + b'1],"prompt":"x"}', "body"),
        (b'{"stop":[' + b"1," * (1 << 18) + b'1],"prompt":"x"}', "stop"),
        (b'{"messages":[' + b"1," * (1 << 18) + b'1],"prompt":"x"}', "messages"),
    ):
        answer = edge.post("/v1/chat/completions", body)
        assert (answer.status, answer.error["param"], answer.error["code"]) == (400, param, "body_too_complex")
    assert edge.complete([[5] * 200] * 200, max_tokens=1).status == 200
