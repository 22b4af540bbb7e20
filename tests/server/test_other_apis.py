"""`/v1/responses` and `/v1/messages`: the same answers in other words, streamed and whole."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from waiting import PATIENCE

from tests.server.conftest import MAX_MODEL_LEN, Answer, Edge, Vocabulary

Start = Callable[..., AbstractContextManager[Edge]]

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü"}}\n</tool_call>'
SAID = "<think>\nhm\n</think>\n\nthe sum:" + CALL
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
RESPONSES_TOOL: dict[str, Any] = {"type": "function", "name": "add", "parameters": PARAMETERS}
MESSAGES_TOOL: dict[str, Any] = {"name": "add", "description": "adds", "input_schema": PARAMETERS}


@pytest.fixture(scope="module")
def thinker(start_edge: Start) -> Iterator[Edge]:
    """A server whose model thinks, speaks and calls."""
    with start_edge(SAID, tool_call_parser="hermes", reasoning_parser="qwen3") as edge:
        yield edge


@pytest.fixture
def client(thinker: Edge) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://127.0.0.1:{thinker.port}/v1", api_key="any", timeout=PATIENCE) as client:
        yield client


def named_events(answer: Answer) -> list[dict[str, Any]]:
    """The data of each event; its name must be its type."""
    blocks = answer.body.decode().split("\n\n")
    assert blocks.pop() == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def runs(types: list[str]) -> list[str]:
    """Neighbours that are equal, once."""
    return [key for key, _ in itertools.groupby(types)]


def test_a_response_of_openai_python(client: OpenAI) -> None:
    response = client.responses.create(model="tiny", input="add", instructions="be brief", tools=[RESPONSES_TOOL])  # type: ignore[list-item]
    assert response.status == "completed"
    assert response.output_text == "the sum:"
    thought, message, call = response.output
    assert thought.type == "reasoning" and thought.content is not None and thought.content[0].text == "hm"
    assert message.type == "message" and message.role == "assistant" and message.status == "completed"
    assert call.type == "function_call" and call.name == "add" and json.loads(call.arguments) == {"a": 1, "b": "ü"}
    assert call.call_id
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens == 2
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.instructions == "be brief"
    assert response.tools[0].type == "function"


RESPONSE_EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.reasoning_text.delta",
    "response.reasoning_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
    "response.completed",
]


def test_the_exact_events_of_a_streamed_response(client: OpenAI, thinker: Edge) -> None:
    whole = client.responses.create(model="tiny", input="add", tools=[RESPONSES_TOOL])  # type: ignore[list-item]
    events = list(client.responses.create(model="tiny", input="add", tools=[RESPONSES_TOOL], stream=True))  # type: ignore[list-item]
    assert runs([event.type for event in events]) == RESPONSE_EVENTS
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "the sum:"
    assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == "hm"
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert json.loads("".join(pieces)) == {"a": 1, "b": "ü"}
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == whole.output_text
    assert [item.type for item in last.response.output] == ["reasoning", "message", "function_call"]
    added = [event.item.id for event in events if event.type == "response.output_item.added"]
    assert [item.id for item in last.response.output] == added
    raw = thinker.post("/v1/responses", {"input": "add", "stream": True})
    assert raw.headers["Content-Type"] == "text/event-stream"
    assert named_events(raw)[-1]["response"]["usage"]["output_tokens"] > 0


def test_openai_python_assembles_a_streamed_response(client: OpenAI) -> None:
    with client.responses.stream(model="tiny", input="add", tools=[RESPONSES_TOOL]) as stream:  # type: ignore[list-item]
        for _ in stream:
            pass
        final = stream.get_final_response()
    assert final.output_text == "the sum:"


def test_the_items_of_an_earlier_turn_go_back_in(thinker: Edge, vocabulary: Vocabulary) -> None:
    items = [
        {"role": "developer", "content": "S"},
        {"role": "user", "content": [{"type": "input_text", "text": "add"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "the sum:", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a":1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
    ]
    assert thinker.post("/v1/responses", {"input": items}).status == 200
    prompt = vocabulary.tokenizer.decode(thinker.engine.added[-1].prompt_token_ids, skip_special_tokens=False)
    assert prompt == '<bos><system>S<user>add<assistant>the sum:[call add {"a":1}]<tool>3<assistant>'


def test_a_response_that_is_cut_short_is_incomplete(client: OpenAI) -> None:
    response = client.responses.create(model="tiny", input="add", max_output_tokens=3)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None and response.incomplete_details.reason == "max_output_tokens"
    assert [item.to_dict()["status"] for item in response.output] == ["incomplete"]
    events = list(client.responses.create(model="tiny", input="add", max_output_tokens=3, stream=True))
    assert events[-1].type == "response.incomplete"
    assert [item.to_dict()["status"] for item in events[-1].response.output] == ["incomplete"]
    done = [event.item.to_dict()["status"] for event in events if event.type == "response.output_item.done"]
    assert done == ["incomplete"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"type": "image"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input[0].role"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "temperature": 3}, "temperature"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "conversation": "conv_1"}, "conversation"),
        ({"input": "x", "prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"input": "x", "reasoning": {"effort": 3}}, "reasoning.effort"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "x" * MAX_MODEL_LEN}, "input"),
    ],
)
def test_bad_responses_name_their_field(thinker: Edge, body: dict[str, Any], param: str) -> None:
    before = len(thinker.engine.added)
    answer = thinker.post("/v1/responses", body)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert len(thinker.engine.added) == before


def ask(edge: Edge, **fields: Any) -> Answer:
    return edge.post("/v1/messages", {"messages": [{"role": "user", "content": "add"}], "max_tokens": 200, **fields})


def test_a_message(thinker: Edge) -> None:
    message = ask(thinker, tools=[MESSAGES_TOOL], system=[{"type": "text", "text": "S"}]).json
    assert message["id"].startswith("msg_")
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "tiny")
    thinking, text, call = message["content"]
    assert thinking == {"type": "thinking", "thinking": "hm", "signature": ""}
    assert text == {"type": "text", "text": "the sum:"}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "add", {"a": 1, "b": "ü"})
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    usage = message["usage"]
    assert usage["cache_read_input_tokens"] == 2
    assert usage["input_tokens"] > 2
    assert usage["output_tokens"] > 10


def test_the_exact_events_of_a_streamed_message(thinker: Edge) -> None:
    events = named_events(ask(thinker, tools=[MESSAGES_TOOL], stream=True))
    assert runs([event["type"] for event in events]) == [
        "message_start",
        *["content_block_start", "content_block_delta", "content_block_stop"] * 3,
        "message_delta",
        "message_stop",
    ]
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["cache_read_input_tokens"] == 2
    opened = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert opened[:2] == [{"type": "thinking", "thinking": "", "signature": ""}, {"type": "text", "text": ""}]
    assert (opened[2]["type"], opened[2]["name"], opened[2]["input"]) == ("tool_use", "add", {})
    deltas = [(event["index"], event["delta"]) for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta["thinking"] for index, delta in deltas if index == 0) == "hm"
    assert "".join(delta["text"] for index, delta in deltas if index == 1) == "the sum:"
    assert json.loads("".join(delta["partial_json"] for index, delta in deltas if index == 2)) == {"a": 1, "b": "ü"}
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] > 10


def test_why_a_message_stopped(start_edge: Start) -> None:
    with start_edge("hello world") as edge:
        assert ask(edge).json["stop_reason"] == "end_turn"
        assert ask(edge, max_tokens=2).json["stop_reason"] == "max_tokens"
        stopped = ask(edge, stop_sequences=["xyz", " wo"]).json
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", " wo")
        assert stopped["content"] == [{"type": "text", "text": "hello"}]


def test_a_message_that_was_begun_is_gone_on_with(thinker: Edge, vocabulary: Vocabulary) -> None:
    messages = [{"role": "user", "content": "add"}, {"role": "assistant", "content": "The sum is"}]
    assert ask(thinker, messages=messages).status == 200
    prompt = vocabulary.tokenizer.decode(thinker.engine.added[-1].prompt_token_ids, skip_special_tokens=False)
    assert prompt == "<bos><user>add<assistant>The sum is"


def test_a_message_with_a_form(thinker: Edge) -> None:
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    assert ask(thinker, output_config={"format": form}).status == 200
    grammar = thinker.engine.added[-1].sampling.grammar
    assert grammar is not None and '"integer"' in grammar.text
    refused = ask(thinker, output_config={"format": {**form, "type": "xml"}})
    assert refused.status == 400
    assert refused.error["message"].startswith('output_config.format.type is "xml"')


RESPONSE_FAULTS: list[tuple[dict[str, Any], str, str]] = [
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", '"robot"; it must be "system" or "developer" or'),
    ({"input": [{"type": "function_call", "arguments": "{}"}]}, "input[0].name", "required"),
    ({"input": [{"type": "function_call", "name": "f", "call_id": 5}]}, "input[0].call_id", "a string"),
    ({"input": [{"type": "function_call_output", "call_id": 5, "output": "x"}]}, "input[0].call_id", "a string"),
    ({"input": [{"type": "item_reference"}]}, "input[0].type", '"item_reference"; it must be "message", "function_call"'),
    ({"input": [{"role": "user", "content": [{"type": "image"}]}]}, "input[0].content[0].type", '"input_text" or'),
    ({"input": "x", "text": {"format": 5}}, "text.format", "an object"),
    ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.schema", "a JSON schema"),
    ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type", '"web_search"; it must be "function"'),
    ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name", "required"),
    ({"input": "x", "tools": [{"type": "function", "function": 5}]}, "tools[0].name", "required"),
]


@pytest.mark.parametrize(("fields", "param", "said"), RESPONSE_FAULTS)
def test_faults_of_a_response_have_its_own_names_and_places(thinker: Edge, fields: dict[str, Any], param: str, said: str) -> None:
    answer = thinker.post("/v1/responses", {"instructions": "one message more", **fields})
    assert (answer.status, answer.error["param"]) == (400, param), answer
    assert answer.error["message"].startswith(param)
    assert said in answer.error["message"]


MESSAGE_FAULTS: list[tuple[dict[str, Any], str, str]] = [
    ({"content": [{"type": "tool_use", "name": 5}]}, "messages[0].content[0].name", "a string"),
    ({"content": [{"type": "tool_use", "name": "f", "input": 5}]}, "messages[0].content[0].input", "an object"),
    (
        {"content": [{"type": "image"}]},
        "messages[0].content[0].type",
        '"image"; of the assistant it must be "text" or "tool_use"',
    ),
]


@pytest.mark.parametrize(("message", "place", "said"), MESSAGE_FAULTS)
def test_faults_of_a_message_have_its_own_names_and_places(thinker: Edge, message: dict[str, Any], place: str, said: str) -> None:
    answer = ask(thinker, messages=[{"role": "assistant", **message}], system="one message more")
    assert answer.status == 400
    assert answer.error["message"].startswith(place), answer
    assert said in answer.error["message"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tools": [{"name": "f", "input_schema": 5}]}, "tools[0].input_schema must be an object"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema is required"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            'tools[0].type is "web_search_20250305"; it must be "custom"',
        ),
        ({"tools": [{"name": "", "input_schema": {}}]}, "tools[0].name must be a string with"),
        ({"tool_choice": {"type": "any"}}, 'tool_choice "any" needs tools'),
        ({"tool_choice": {"type": "tool"}}, "tool_choice must name a function"),
        ({"output_config": {"format": 5}}, "output_config.format must be an object"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema must be a JSON schema"),
        ({"stop_sequences": [5]}, "stop_sequences[0] must be a string"),
    ],
)
def test_fields_of_messages_are_called_by_their_names(thinker: Edge, fields: dict[str, Any], said: str) -> None:
    answer = ask(thinker, **fields)
    assert (answer.status, answer.error["message"].startswith(said)) == (400, True), answer


@pytest.mark.parametrize(("thinking", "said"), [("enabled", "!"), ("disabled", "."), ("adaptive", "?")])
def test_whether_to_think_is_told_to_the_template(
    start_edge: Start, tmp_path: Path, vocabulary: Vocabulary, thinking: str, said: str
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% if enable_thinking is not defined %}?{% elif enable_thinking and thinking %}!{% else %}.{% endif %}")
    effort = {"enabled": "high", "disabled": "none", "adaptive": None}[thinking]
    with start_edge("ok", chat_template=str(template)) as edge:
        assert ask(edge, thinking={"type": thinking}).status == 200
        assert edge.post("/v1/responses", {"input": "x", "reasoning": {"effort": effort}}).status == 200
        assert edge.chat("x", reasoning_effort=effort).status == 200
        assert edge.chat("x", reasoning_effort="low", chat_template_kwargs={"thinking": False}).status == 200
        prompts = [vocabulary.tokenizer.decode(request.prompt_token_ids) for request in edge.engine.added]
    assert prompts == [said, said, said, "."]


def test_blocks_of_earlier_turns_go_back_in(thinker: Edge, vocabulary: Vocabulary) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "add"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "the sum:"},
                {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "3"}]}]},
    ]
    assert ask(thinker, messages=messages, system="S").status == 200
    prompt = vocabulary.tokenizer.decode(thinker.engine.added[-1].prompt_token_ids, skip_special_tokens=False)
    assert prompt == '<bos><system>S<user>add<assistant>the sum:[call add {"a": 1}]<tool>3<assistant>'
    count = thinker.post("/v1/messages/count_tokens", {"messages": messages, "system": "S"})
    assert count.json == {"input_tokens": len(thinker.engine.added[-1].prompt_token_ids)}


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": None},
        {"max_tokens": 0},
        {"messages": []},
        {"messages": [{"role": "system", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"tools": [{"name": "x"}]},
        {"tool_choice": {"type": "some"}},
        {"temperature": "hot"},
        {"stop_sequences": [""]},
        {"system": [5]},
    ],
)
def test_bad_messages_are_refused_in_their_own_shape(thinker: Edge, fields: dict[str, Any]) -> None:
    answer = ask(thinker, **fields)
    assert answer.status == 400
    assert answer.json["type"] == "error"
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert answer.error["type"] == "invalid_request_error"
    assert answer.error["message"]


def test_keys_and_faults_in_streams(start_edge: Start) -> None:
    with start_edge("abc" * 40, api_key=("secret",)) as edge:
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 100, "stream": True}
        refused = edge.post("/v1/messages", body)
        assert (refused.status, refused.error["type"]) == (401, "authentication_error")
        key = {"x-api-key": "secret", "anthropic-version": "2023-06-01"}
        assert edge.post("/v1/messages", body, key).status == 200
        assert edge.post("/v1/messages", {**body, "model": "nope"}, key).error["type"] == "not_found_error"
        edge.engine.script = lambda _: itertools.repeat(97)
        edge.engine.step_seconds = 0.01
        with OpenAI(base_url=f"http://127.0.0.1:{edge.port}/v1", api_key="secret", timeout=PATIENCE) as client:
            stream = iter(client.responses.create(model="tiny", input="x", stream=True))
            next(stream)
            edge.engine.fail_with = "it broke"
            last = list(stream)[-1]
            assert last.type == "error"
            assert "it broke" in last.message
        assert edge.post("/v1/messages", body, key).status == 500
