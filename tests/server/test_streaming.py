"""Streams, event by event: order, stop strings, half characters, usage, several choices, errors under way."""

from __future__ import annotations

import itertools
import json
import queue
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
from waiting import PATIENCE

from minserve.request import Request
from tests.server.conftest import Edge, Say, Vocabulary

Start = Callable[..., AbstractContextManager[Edge]]


def chunks(answer: Any) -> list[Any]:
    events = answer.events
    assert events[-1] == "[DONE]"
    assert events.count("[DONE]") == 1
    return events[:-1]


def deltas(answer: Any) -> list[str]:
    """The content of each content delta."""
    found = [chunk["choices"][0]["delta"] for chunk in chunks(answer) if chunk["choices"]]
    return [delta["content"] for delta in found[1:] if "content" in delta]


def test_a_chat_stream_has_role_content_and_finish_chunks_in_this_order(edge: Edge, say: Say) -> None:
    say("the HI")
    answer = edge.chat(stream=True)
    assert answer.status == 200
    events = chunks(answer)
    assert events[0]["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert [e["choices"][0]["delta"] for e in events[1:-1]] == [{"content": "the"}, {"content": " "}, {"content": "HI"}]
    assert events[-1]["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
    assert all(e["choices"][0]["finish_reason"] is None for e in events[:-1])
    assert {(e["id"], e["created"], e["model"], e["object"]) for e in events} == {
        (events[0]["id"], events[0]["created"], "tiny", "chat.completion.chunk")
    }
    assert events[0]["id"].startswith("chatcmpl-")
    assert all("usage" not in e for e in events)


def test_stream_headers(edge: Edge) -> None:
    headers = edge.chat(stream=True).headers
    assert headers["Content-Type"] == "text/event-stream"
    assert headers["Cache-Control"] == "no-cache"
    assert headers["X-Accel-Buffering"] == "no"
    assert "Content-Encoding" not in headers


def test_a_completion_stream_is_text_chunks_and_a_finish_chunk(edge: Edge, say: Say) -> None:
    say("the HI")
    events = chunks(edge.complete(stream=True))
    assert [e["choices"][0]["text"] for e in events] == ["the", " ", "HI", ""]
    assert [e["choices"][0]["finish_reason"] for e in events] == [None, None, None, "stop"]
    assert {e["object"] for e in events} == {"text_completion"}
    assert events[0]["id"].startswith("cmpl-")


def test_finish_reason_length(edge: Edge, say: Say) -> None:
    say("abcdefgh")
    events = chunks(edge.chat(stream=True, max_tokens=3))
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert len(events) == 5


def test_no_part_of_a_stop_string_is_sent(edge: Edge, say: Say, vocabulary: Vocabulary) -> None:
    assert len(vocabulary.ids("DEFGHIJ")) == 4
    say("xDEFGHIJ" + "yz" * 90)  # the engine is far from done when the front sees the stop
    edge.engine.step_seconds = 0.02
    finished = len(edge.engine.finished)
    answer = edge.complete("ABC", temperature=0, stop=["DEFGHIJ"], stream=True)
    assert [e["choices"][0]["text"] for e in chunks(answer)] == ["x", ""]
    assert chunks(answer)[-1]["choices"][0]["finish_reason"] == "stop"
    edge.wait_for(lambda: len(edge.engine.finished) > finished)
    told = edge.engine.finished[-1]
    assert told.num_tokens == 5
    assert edge.engine.added[-1].id == told.request_id


def test_held_text_is_flushed_when_it_is_no_stop_string_after_all(edge: Edge, say: Say) -> None:
    say("DEFGHIK and DEFGHI")
    answer = edge.complete("ABC", stop=["DEFGHIJ"], stream=True)
    texts = [e["choices"][0]["text"] for e in chunks(answer)]
    assert "".join(texts) == "DEFGHIK and DEFGHI"
    assert all(texts[:-1])


def test_nothing_empty_is_sent_while_text_is_held_back(edge: Edge, say: Say) -> None:
    say("zzzabzzz")
    assert deltas(edge.chat(stop=["zzzz"], stream=True)) == ["zzza", "b", "zzz"]


@pytest.mark.parametrize("text", ["👍🏽 ok", "안녕하세요 세계", "é👩‍👩‍👧é", "日本\ufffd語"])
def test_characters_cut_over_tokens_arrive_whole(edge: Edge, say: Say, text: str) -> None:
    say(text)
    pieces = deltas(edge.chat(stream=True))
    assert "".join(pieces) == text
    assert ("\ufffd" in "".join(pieces)) == ("\ufffd" in text)
    assert len(pieces) == len(text)


def test_half_a_character_at_the_end_is_flushed_once(edge: Edge, say: Say, vocabulary: Vocabulary) -> None:
    say.tokens([*vocabulary.ids("a👍")[:-1], vocabulary.eos])
    assert deltas(edge.chat(stream=True)) == ["a", "\ufffd"]
    assert edge.chat().json["choices"][0]["message"]["content"] == "a\ufffd"


def test_usage_is_absent_for_empty_stream_options(edge: Edge) -> None:
    for options in ({}, None, {"include_usage": False, "something_else": 1}):
        assert all("usage" not in e for e in chunks(edge.chat(stream=True, stream_options=options)))


def test_include_usage_adds_one_last_chunk_without_choices(edge: Edge, say: Say) -> None:
    say("abc")
    events = chunks(edge.chat(stream=True, stream_options={"include_usage": True}))
    assert all(e["usage"] is None for e in events[:-1])
    assert events[-1]["choices"] == []
    usage = events[-1]["usage"]
    assert usage == {
        "prompt_tokens": len(edge.engine.added[-1].prompt_token_ids),
        "completion_tokens": 4,
        "total_tokens": len(edge.engine.added[-1].prompt_token_ids) + 4,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert {e["id"] for e in events} == {events[0]["id"]}


def one_by_one(edge: Edge, tokens: list[int], **fields: Any) -> list[bytes]:
    """What arrives of a stream after each token, and after the end: the next token exists only once the one before was read."""
    there: queue.Queue[int] = queue.Queue()
    edge.engine.script = lambda _: iter(there.get, -1)
    body = json.dumps({"prompt": "x", "stream": True, **fields}).encode()
    seen = []
    with socket.create_connection(("127.0.0.1", edge.port), timeout=PATIENCE) as client:
        client.sendall(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        for token in tokens:
            there.put(token)
            seen.append(client.recv(65536))
        there.put(-1)
        rest = b""
        while part := client.recv(65536):
            rest += part
    return [*seen, rest]


def test_continuous_usage_stats_put_growing_usage_on_each_chunk(start_edge: Start, vocabulary: Vocabulary) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    with start_edge("") as edge:
        parts = one_by_one(edge, vocabulary.ids("abc"), stream_options=options)
    text = b"".join(parts).partition(b"\r\n\r\n")[2].decode()
    events = [json.loads(line[6:]) for line in text.split("\n\n")[:-2]]
    assert [e["usage"]["completion_tokens"] for e in events] == [1, 2, 3, 3, 3]
    assert [bool(e["choices"]) for e in events] == [True] * 4 + [False]


def test_several_choices_each_have_their_own_role_and_finish_chunk(edge: Edge, say: Say, vocabulary: Vocabulary) -> None:
    seeds: list[int] = []

    def script(request: Request) -> list[int]:
        seeds.append(request.sampling.seed)
        return [*vocabulary.ids("ab" * len(seeds)), vocabulary.eos]

    say.by_request(script)
    events = chunks(edge.chat(n=3, seed=7, stream=True, stream_options={"include_usage": True}))
    assert seeds == [7, 8, 9]
    for index, length in enumerate((2, 4, 6)):
        mine = [e["choices"][0] for e in events if e["choices"] and e["choices"][0]["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert "".join(c["delta"].get("content", "") for c in mine) == "ab" * (length // 2)
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["stop"]
        assert sum("role" in c["delta"] for c in mine) == 1
    usage = events[-1]["usage"]
    assert usage["completion_tokens"] == 2 + 4 + 6 + 3
    assert usage["prompt_tokens"] == len(edge.engine.added[-1].prompt_token_ids)


def test_prompts_and_choices_share_one_row_of_indexes(edge: Edge, say: Say) -> None:
    say("ab")
    events = chunks(edge.complete(["x", "y"], n=2, stream=True))
    for index in range(4):
        assert "".join(e["choices"][0]["text"] for e in events if e["choices"][0]["index"] == index) == "ab"


def test_several_tokens_of_one_step_are_several_deltas(edge: Edge, say: Say) -> None:
    say("abcdef")
    edge.engine.tokens_per_step = 4
    try:
        assert deltas(edge.chat(stream=True)) == list("abcdef")
    finally:
        edge.engine.tokens_per_step = 1


def test_streamed_logprobs_and_token_ids_cover_every_token(edge: Edge, say: Say, vocabulary: Vocabulary) -> None:
    say("é the")
    events = chunks(edge.chat(stream=True, logprobs=True, top_logprobs=2, return_token_ids=True))
    assert events[0]["prompt_token_ids"] == edge.engine.added[-1].prompt_token_ids
    choices = [e["choices"][0] for e in events]
    ids = [token for choice in choices for token in choice.get("token_ids", [])]
    assert ids == [*vocabulary.ids("é the"), vocabulary.eos]
    entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert [bytes(entry["bytes"]) for entry in entries] == [b"\xc3", b"\xa9", b" ", b"the", b"<eos>"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


def test_echo_comes_before_the_first_token(edge: Edge, say: Say) -> None:
    say("yz")
    events = chunks(edge.complete("ab", echo=True, logprobs=1, stream=True))
    assert events[0]["choices"][0]["text"] == "ab"
    assert events[0]["choices"][0]["logprobs"]["tokens"] == ["<bos>", "a", "b"]
    assert [e["choices"][0]["text"] for e in events[1:]] == ["y", "z", ""]
    assert events[1]["choices"][0]["logprobs"]["text_offset"] == [2]


def test_an_error_before_the_first_token_is_an_error_response(edge: Edge) -> None:
    edge.engine.fail_with = "the row was not finite"
    try:
        answer = edge.chat(stream=True)
    finally:
        edge.engine.fail_with = None
    assert answer.status == 500
    assert answer.error["message"] == "the row was not finite"


def test_an_error_under_way_is_one_event_and_no_end_mark(start_edge: Start) -> None:
    with start_edge(lambda _: itertools.repeat(97), max_model_len=1 << 30) as edge:
        edge.engine.step_seconds = 0.01
        body = json.dumps({"prompt": "x", "stream": True, "ignore_eos": True}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", edge.port), timeout=PATIENCE) as client:
            client.sendall(head.encode() + body)
            received = client.recv(65536)
            edge.engine.fail_with = "broken"
            while part := client.recv(65536):  # the server closes: this ends
                received += part
        text = received.decode()
        assert text.startswith("HTTP/1.1 200")
        assert text.count('data: {"error":{"message":"broken"') == 1
        assert "[DONE]" not in text


def test_every_event_is_sent_as_soon_as_its_token_is_there(start_edge: Start) -> None:
    with start_edge("") as edge:
        seen = one_by_one(edge, [97, 98, 99])
    assert [part.count(b"data: ") for part in seen] == [1, 1, 1, 2]
    assert seen[0].startswith(b"HTTP/1.0 200 OK")  # in one packet with the first event
