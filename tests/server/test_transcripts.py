"""Whole conversations as openai-python sees them, event by event: nothing more, nothing less, nothing in another order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from waiting import PATIENCE

from tests.server.conftest import Edge

Start = Callable[..., AbstractContextManager[Edge]]

USER: Any = [{"role": "user", "content": "x"}]
USAGE = {
    "prompt_tokens": 19,
    "completion_tokens": 4,
    "total_tokens": 23,
    "prompt_tokens_details": {"cached_tokens": 2},
    "completion_tokens_details": {"reasoning_tokens": 0},
}


def events(stream: Iterable[Any], kind: str = "chat.completion.chunk") -> list[dict[str, Any]]:
    """What differs between the events, fields that were not sent left out; what they share is checked here."""
    made = [event.model_dump(exclude_unset=True) for event in stream]
    assert len({(event.pop("id"), event.pop("created"), event.pop("model")) for event in made}) == 1
    assert {event.pop("object") for event in made} == {kind}
    return made


@pytest.fixture(scope="module")
def edge(start_edge: Start) -> Iterator[Edge]:
    with start_edge("HIthe!") as edge:
        yield edge


@pytest.fixture
def client(edge: Edge) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://127.0.0.1:{edge.port}/v1", api_key="any", timeout=PATIENCE, max_retries=0) as client:
        yield client


def chunk(delta: dict[str, Any], reason: str | None = None, index: int = 0, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}], **more}


ROLE = {"role": "assistant", "content": ""}


def test_chat_stream(client: OpenAI) -> None:
    answer = client.chat.completions.with_raw_response.create(model="tiny", messages=USER, stream=True)
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert "content-encoding" not in answer.headers
    assert events(answer.parse()) == [
        chunk(ROLE),
        chunk({"content": "HI"}),
        chunk({"content": "the"}),
        chunk({"content": "!"}),
        chunk({}, "stop"),
    ]


def test_chat_stream_with_usage(client: OpenAI) -> None:
    options: Any = {"include_usage": True}
    stream = client.chat.completions.create(model="tiny", messages=USER, stream=True, stream_options=options)
    assert events(stream) == [
        chunk(ROLE, usage=None),
        chunk({"content": "HI"}, usage=None),
        chunk({"content": "the"}, usage=None),
        chunk({"content": "!"}, usage=None),
        chunk({}, "stop", usage=None),
        {"choices": [], "usage": USAGE},
    ]


def test_chat_stream_with_growing_usage_and_with_no_options(client: OpenAI, edge: Edge) -> None:
    edge.engine.step_seconds = 0.05  # a chunk tells what is known when it is written
    options: Any = {"include_usage": True, "continuous_usage_stats": True, "something": 1}
    stream = client.chat.completions.create(model="tiny", messages=USER, stream=True, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events(stream)]
    edge.engine.step_seconds = 0.0
    assert counts == [1, 1, 2, 3, 4, 4]
    stream = client.chat.completions.create(model="tiny", messages=USER, stream=True, stream_options={})
    assert not any("usage" in event for event in events(stream))


def test_chat_stream_cut_by_a_stop_string_and_by_length(client: OpenAI) -> None:
    stream = client.chat.completions.create(model="tiny", messages=USER, stream=True, stop=["he!"])
    assert events(stream) == [chunk(ROLE), chunk({"content": "HI"}), chunk({"content": "t"}), chunk({}, "stop")]
    stream = client.chat.completions.create(model="tiny", messages=USER, stream=True, max_tokens=1)
    assert events(stream) == [chunk(ROLE), chunk({"content": "HI"}), chunk({}, "length")]


def test_two_choices(client: OpenAI) -> None:
    made = events(client.chat.completions.create(model="tiny", messages=USER, stream=True, n=2))
    assert len(made) == 10
    for index in (0, 1):
        assert [event for event in made if event["choices"][0]["index"] == index] == [
            chunk(ROLE, index=index),
            chunk({"content": "HI"}, index=index),
            chunk({"content": "the"}, index=index),
            chunk({"content": "!"}, index=index),
            chunk({}, "stop", index=index),
        ]


def test_chat_whole(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=USER).model_dump(exclude_unset=True)
    assert answer.pop("id").startswith("chatcmpl-")
    assert isinstance(answer.pop("created"), int)
    assert answer == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "HIthe!", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": USAGE,
    }


def test_text_stream_and_whole(client: OpenAI) -> None:
    def piece(text: str, reason: str | None = None) -> dict[str, Any]:
        return {"choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": reason}]}

    stream = client.completions.create(model="tiny", prompt="x", stream=True)
    assert events(stream, "text_completion") == [piece("HI"), piece("the"), piece("!"), piece("", "stop")]
    (choice,) = client.completions.create(model="tiny", prompt="x", echo=True, logprobs=1, max_tokens=1).choices
    assert choice.text == "xHI"
    assert choice.logprobs is not None
    logprobs = choice.logprobs.model_dump()
    assert logprobs["tokens"] == ["<bos>", "x", "HI"]
    assert logprobs["text_offset"] == [0, 0, 1]
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][2]["HI"] == logprobs["token_logprobs"][2], "the very same float"


def test_a_refusal(client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=USER, temperature=3)
    assert caught.value.body == {
        "message": "temperature must be at least 0 and at most 2, not 3",
        "type": "invalid_request_error",
        "param": "temperature",
        "code": None,
    }
