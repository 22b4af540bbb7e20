"""The clients that people use: openai-python, curl, a bare socket."""

from __future__ import annotations

import itertools
import json
import queue
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import openai
import pytest
from openai import OpenAI
from waiting import PATIENCE

from tests.server.conftest import MAX_MODEL_LEN, Edge, Say

Start = Callable[..., AbstractContextManager[Edge]]


@pytest.fixture
def client(edge: Edge) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://127.0.0.1:{edge.port}/v1", api_key="any", timeout=PATIENCE) as client:
        yield client


def test_openai_python_chat(client: OpenAI, say: Say) -> None:
    say("the HI é")
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "x"}], logprobs=True, top_logprobs=3, n=2, seed=1
    )
    assert [choice.message.content for choice in answer.choices] == ["the HI é"] * 2
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 3
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


def test_openai_python_chat_stream(client: OpenAI, say: Say) -> None:
    say("the HI é")
    stream = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "x"}], stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "the HI é"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 7


def test_openai_python_strict_stream_helper(client: OpenAI, say: Say) -> None:
    say("hello")
    with client.chat.completions.stream(model="tiny", messages=[{"role": "user", "content": "x"}]) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "hello"
    assert final.choices[0].finish_reason == "stop"


def test_openai_python_completions(client: OpenAI, say: Say) -> None:
    say("yes")
    answer = client.completions.create(model="tiny", prompt="x", echo=True, logprobs=1, max_tokens=1)
    assert answer.choices[0].text == "xy"
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == ["<bos>", "x", "y"]
    texts = [chunk.choices[0].text for chunk in client.completions.create(model="tiny", prompt=[1, 2], stream=True)]
    assert "".join(texts) == "yes"


def test_openai_python_models_and_errors(client: OpenAI, edge: Edge) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="served: tiny"):
        client.completions.create(model="nope", prompt="x")
    before = len(edge.engine.added)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt=[1] * MAX_MODEL_LEN)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "prompt"
    assert len(edge.engine.added) == before


def test_openai_python_sees_an_error_in_the_stream(start_edge: Start) -> None:
    with (
        start_edge(lambda _: itertools.repeat(97), max_model_len=1 << 30) as edge,
        OpenAI(base_url=f"http://127.0.0.1:{edge.port}/v1", api_key="any") as client,
    ):
        edge.engine.step_seconds = 0.01
        stream = client.completions.create(model="tiny", prompt="x", stream=True)
        next(iter(stream))
        edge.engine.fail_with = "it broke"
        with pytest.raises(openai.APIError, match="it broke"):
            list(stream)


def test_openai_python_waits_out_a_server_that_loads(start_edge: Start) -> None:
    with start_edge("ok", be_ready=False) as edge, OpenAI(base_url=f"http://127.0.0.1:{edge.port}/v1", api_key="any") as client:
        with pytest.raises(openai.InternalServerError) as caught:
            client.with_options(max_retries=0).completions.create(model="tiny", prompt="x")
        assert caught.value.status_code == 503
        assert caught.value.response.headers["retry-after"] == "5"


def test_curl_sees_events_as_they_come(start_edge: Start) -> None:
    tokens: queue.Queue[int] = queue.Queue()
    with start_edge(lambda _: iter(tokens.get, -1)) as edge:
        command = ["curl", "-sN", f"http://127.0.0.1:{edge.port}/v1/chat/completions", "-H", "Content-Type: application/json"]
        body = json.dumps({"messages": [{"role": "user", "content": "x"}], "stream": True})
        process = subprocess.Popen([*command, "-d", body], stdout=subprocess.PIPE)
        assert process.stdout is not None
        lines: list[str] = []
        for token in (97, 98, 99, -1):  # each is made when curl has shown the one before
            tokens.put(token)
            shown = sum(line != "" for line in lines)
            while sum(line != "" for line in lines) < shown + (2 if shown == 0 else 1):
                lines.append(process.stdout.readline().decode().strip())
        lines = [line for line in [*lines, *process.stdout.read().decode().splitlines()] if line]
        assert process.wait(PATIENCE) == 0
    assert lines[-1] == "data: [DONE]"
    contents = [json.loads(line[6:])["choices"][0]["delta"].get("content") for line in lines[:-1]]
    assert contents == ["", "a", "b", "c", None]
