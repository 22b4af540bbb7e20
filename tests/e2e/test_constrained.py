"""Constrained answers of a real server with a model that, left to itself, writes noise."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from server_process import ServerProcess, serving
from waiting import PATIENCE

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blau"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"enum": ["Oslo", "Köln"]}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
IMPOSSIBLE: Any = {
    "type": "json_schema",
    "json_schema": {"name": "x", "schema": {"allOf": [{"type": "string"}, {"type": "null"}]}},
}
ASK: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server(tiny_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("constrained") / "log"
    flags = ("--served-model-name", "tiny", "--reasoning-parser", "none", "--chunked-prefill-size", "128")
    with serving(str(tiny_dir("qwen3_moe")), *flags, log=log) as running:
        yield running
        assert running.process.poll() is None, "the server died during the tests"
    assert "Traceback" not in running.log


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)


def check(text: str | None) -> None:
    value = json.loads(text or "")
    assert set(value) == set(SCHEMA["required"])
    assert len(value["name"]) <= 8
    assert type(value["age"]) is int and 0 <= value["age"] <= 130
    assert set(value["tags"]) <= {"red", "green", "blau"}


def test_64_constrained_requests_beside_free_and_failing_ones(client: openai.OpenAI, server: ServerProcess) -> None:
    def one(number: int) -> str:
        if number % 8 == 1:
            free = client.chat.completions.create(model="tiny", messages=ASK, max_tokens=30, seed=number)
            assert free.usage is not None
            return f"free {free.choices[0].finish_reason}"
        if number % 8 == 2:
            with pytest.raises(openai.BadRequestError):
                client.chat.completions.create(model="tiny", messages=ASK, response_format=IMPOSSIBLE)
            return "bad"
        answer = client.chat.completions.create(model="tiny", messages=ASK, response_format=FORMAT, seed=number)
        assert answer.choices[0].finish_reason == "stop"
        check(answer.choices[0].message.content)
        return "good"

    with ThreadPoolExecutor(80) as threads:
        kinds = list(threads.map(one, range(84)))
    assert kinds.count("good") >= 60
    with urllib.request.urlopen(f"{server.base_url}/server_info") as answer:
        grammars = json.load(answer)["ranks"][0]["now"]["grammars"]
    assert grammars["masks"] > 600
    assert 0 < grammars["seconds"] < 0.1 * grammars["masks"], "a mask is far from its bound of work"


def test_a_stream_is_the_whole_answer_at_temperature_0(client: openai.OpenAI) -> None:
    form = {"guided_json": {"type": "array", "items": {"type": "integer"}, "maxItems": 3}}
    arguments: dict[str, Any] = {"model": "tiny", "messages": ASK, "temperature": 0, "max_tokens": 60, "extra_body": form}
    whole = client.chat.completions.create(**arguments).choices[0]
    chunks = client.chat.completions.create(**arguments, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
    assert (whole.message.content or "").startswith("[")


def test_choices_and_regexes(client: openai.OpenAI) -> None:
    for seed in range(4):
        options = ["yes", "no", "perhaps, näh"]
        answer = client.completions.create(model="tiny", prompt="x", seed=seed, extra_body={"guided_choice": options})
        assert answer.choices[0].text in options
        regex = r"[A-F]{2}-\d{1,4}(/x)?"
        text = client.completions.create(model="tiny", prompt="x", seed=seed, n=2, extra_body={"guided_regex": regex}).choices
        assert all(re.fullmatch(regex, choice.text) for choice in text)


@pytest.mark.parametrize("stream", [False, True])
def test_forced_calls(client: openai.OpenAI, stream: bool) -> None:
    arguments: dict[str, Any] = {"model": "tiny", "messages": ASK, "tools": TOOLS, "seed": 1, "parallel_tool_calls": False}
    for choice, reason in (("required", "tool_calls"), ({"type": "function", "function": {"name": "weather"}}, "stop")):
        if stream:
            with client.chat.completions.stream(**arguments, tool_choice=choice) as events:
                answer: Any = events.get_final_completion()
        else:
            answer = client.chat.completions.create(**arguments, tool_choice=choice)
        (call,) = answer.choices[0].message.tool_calls
        assert not answer.choices[0].message.content
        assert answer.choices[0].finish_reason == reason
        made = json.loads(call.function.arguments)
        assert made in ({"city": "Oslo"}, {"city": "Köln"}) if call.function.name == "weather" else made == {}
        assert choice == "required" or call.function.name == "weather"


def test_a_grammar_that_explodes_ends_its_own_request(client: openai.OpenAI) -> None:
    with ThreadPoolExecutor(2) as threads:
        free = threads.submit(
            client.completions.create, model="tiny", prompt="x", max_tokens=100, extra_body={"ignore_eos": True}
        )
        exploding = {"guided_regex": "((a{1,100}){1,100}){50,100}b"}
        with pytest.raises(openai.APIError, match="the grammar cannot be followed"):
            client.completions.create(model="tiny", prompt="x", max_tokens=200, extra_body=exploding)
        assert free.result().choices[0].finish_reason == "length"
    assert client.completions.create(model="tiny", prompt="x", extra_body={"guided_choice": ["ok"]}).choices[0].text == "ok"
