"""Tool calls and reasoning over HTTP: a real edge, a scripted engine, marks that are special tokens."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from scripted_engine import Script
from server.tool_texts import STYLES, Call, Style, kimi_k2, tool
from tokenizers import AddedToken, Tokenizer
from waiting import until

from minserve.config import Config
from minserve.messages import Ready
from minserve.server.tool_formats import TOOL_FORMATS
from tests.server.conftest import BOS, EOS, Answer, Edge, Vocabulary

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined %}{{ '<think>\n' if enable_thinking else '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
TOOLS = [tool("f", a="string", n="integer"), tool("get_weather", city="string")]
PARSERS = {"deepseek": "deepseek_v3", "kimi_k2": "kimi_k2", "qwen": "hermes"}
ASK = {"messages": [{"role": "user", "content": "hello"}]}
LENGTH = 1 << 17

Start = Callable[..., AbstractContextManager[Edge]]


@pytest.fixture(scope="module")
def models(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By tool format, the test model with that format's marks as special tokens."""
    return {name: marked_model(model_dir, tmp_path_factory.mktemp(name), form.marks) for name, form in TOOL_FORMATS.items()}


def marked_model(model_dir: Path, directory: Path, marks: tuple[str, ...]) -> Path:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in ("<think>", "</think>", *marks)])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": BOS, "eos_token": EOS, "add_bos_token": True, "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "config.json").write_text("{}")
    return directory


@pytest.fixture(scope="module")
def words(models: dict[str, Path]) -> Vocabulary:
    """Qwen's."""
    return Vocabulary(models["qwen"])


@pytest.fixture(scope="module")
def start(models: dict[str, Path]) -> Start:
    """`with start(model_type="qwen3_moe", **config) as edge`: a model with the marks of `marks`."""

    @contextlib.contextmanager
    def start(*, model_type: str = "scripted", marks: str = "qwen", **settings: Any) -> Iterator[Edge]:
        words = Vocabulary(models[marks])
        ready = Ready(
            model_type=model_type,
            vocab_size=words.size,
            max_model_len=LENGTH,
            max_num_seqs=64,
            eos_token_ids=(),
            num_pages=1 << 20,
            page_size=64,
            startup_seconds={},
            info={},
        )
        config = Config(model=str(models[marks]), served_model_name=("tiny",), **settings)
        edge = Edge(config, lambda _: [words.eos], ready, be_ready=True)
        try:
            yield edge
        finally:
            edge.stop()

    return start


@pytest.fixture(scope="module", params=STYLES)
def styled(request: pytest.FixtureRequest, models: dict[str, Path], start: Start) -> Iterator[tuple[Edge, Style, Vocabulary]]:
    style = STYLES[request.param]
    with start(tool_call_parser=PARSERS[style.format], marks=style.format) as edge:
        yield edge, style, Vocabulary(models[style.format])


@pytest.fixture(scope="module")
def thinker(start: Start) -> Iterator[Edge]:
    """Reasons and calls like a Qwen model."""
    with start(model_type="qwen3_moe") as edge:
        yield edge


def says(words: Vocabulary, text: str) -> Script:
    tokens = [*words.ids(text), words.eos]
    return lambda _: tokens


def chunks(answer: Answer) -> list[Any]:
    assert answer.status == 200, answer.body
    events = answer.events
    assert events.pop() == "[DONE]"
    return events


def gathered(events: list[Any], index: int = 0) -> dict[str, Any]:
    """A stream's choice as the message of an answer that is not streamed; checks the form of every delta."""
    message: dict[str, Any] = {"role": None, "content": ""}
    calls: list[dict[str, Any]] = []
    choices = [choice for chunk in events for choice in chunk["choices"] if choice["index"] == index]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert choices[-1]["delta"] == {}
    message["role"] = "assistant"
    for choice in choices[1:-1]:
        delta = choice["delta"]
        assert choice["finish_reason"] is None
        assert all(delta.values()), delta
        if "tool_calls" in delta:
            assert set(delta) == {"tool_calls"}
            (call,) = delta["tool_calls"]
            if call["index"] == len(calls):
                assert set(call) == {"index", "id", "type", "function"}
                assert (call["type"], call["function"]["arguments"]) == ("function", "")
                assert call["function"]["name"]
                calls.append({"id": call["id"], "type": "function", "function": dict(call["function"])})
            else:
                assert set(call) == {"index", "function"}
                assert call["index"] == len(calls) - 1
                assert set(call["function"]) == {"arguments"}
                assert call["function"]["arguments"]
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        elif "reasoning_content" in delta:
            assert delta["reasoning"] == delta["reasoning_content"]
            for name, value in delta.items():
                message[name] = message.get(name, "") + value
        else:
            assert set(delta) == {"content"}
            message["content"] += delta["content"]
    if calls:
        message |= {"tool_calls": calls, "content": message["content"] or None}
    message["finish_reason"] = choices[-1]["finish_reason"]
    return message


def whole(answer: Answer, index: int = 0) -> dict[str, Any]:
    assert answer.status == 200, answer.body
    choice = answer.json["choices"][index]
    assert choice["message"].pop("refusal") is None
    return {**choice["message"], "finish_reason": choice["finish_reason"]}


def both(edge: Edge, **fields: Any) -> dict[str, Any]:
    """The message, which must be the same streamed and not, ids of calls aside."""
    messages = [
        gathered(chunks(edge.post("/v1/chat/completions", {**ASK, **fields, "stream": True}))),
        whole(edge.post("/v1/chat/completions", {**ASK, **fields})),
    ]
    ids = [[call["id"] for call in message.get("tool_calls", ())] for message in messages]
    assert all(len(set(own)) == len(own) for own in ids)
    if any(call_id.startswith("call_") for call_id in ids[0]):
        for message in messages:
            for call in message["tool_calls"]:
                assert len(call.pop("id")) == len("call_") + 24
    assert messages[0] == messages[1]
    return messages[0]


def called(message: dict[str, Any]) -> list[Call]:
    calls = message.get("tool_calls", [])
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


CALLS: list[Call] = [
    ("f", {"a": 'ü 你好 👍 </tool_call> <｜tool▁call▁end｜> <|tool_call_end|> "\\', "n": -3}),
    ("get_weather", {}),
]


@pytest.mark.parametrize("step", [1, 7])
def test_calls(styled: tuple[Edge, Style, Vocabulary], step: int) -> None:
    edge, style, words = styled
    edge.engine.tokens_per_step = step
    edge.engine.script = says(words, "I look.\n" + style.write(CALLS))
    message = both(edge, tools=TOOLS)
    assert (message["content"], called(message), message["finish_reason"]) == ("I look.", CALLS, "tool_calls")
    if style.ids:
        assert [call["id"] for call in message["tool_calls"]] == ["functions.f:0", "functions.get_weather:1"]
    edge.engine.script = says(words, style.write(CALLS[1:]))
    message = both(edge, tools=TOOLS)
    assert (message["content"], called(message), message["finish_reason"]) == (None, CALLS[1:], "tool_calls")
    edge.engine.script = says(words, "no call < <tool")
    message = both(edge, tools=TOOLS)
    assert (message["content"], called(message), message["finish_reason"]) == ("no call < <tool", [], "stop")


def test_without_tools_nothing_is_a_call(styled: tuple[Edge, Style, Vocabulary]) -> None:
    edge, style, words = styled
    edge.engine.script = says(words, style.write(CALLS))
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        message = both(edge, **fields)
        assert (called(message), message["finish_reason"]) == ([], "stop")
        assert "f" in message["content"]
        assert not any(mark in message["content"] for mark in TOOL_FORMATS[style.format].marks)


def test_14_streams_at_once_with_long_arguments(start: Start, models: dict[str, Path]) -> None:
    """Each gets its own calls whole, in steady pieces, while the others run."""

    def calls_of(number: int) -> list[Call]:
        text = 'Zeile „é“ 你好 👍🏽 "\\ <|tool_call_end|>\n'
        return [("f", {"a": f"{number}: {text}" + "the DEFtheHI" * 850}), ("get_weather", {"city": str(number)})]

    words = Vocabulary(models["kimi_k2"])
    tokens = {number: [*words.ids(kimi_k2(calls_of(number))), words.eos] for number in range(14)}
    with start(model_type="kimi_k2", marks="kimi_k2") as edge, ThreadPoolExecutor(14) as threads:
        edge.engine.script = lambda request: tokens[request.sampling.seed]
        edge.engine.tokens_per_step = 3
        body = {**ASK, "tools": TOOLS, "stream": True}
        answers = list(threads.map(lambda n: edge.post("/v1/chat/completions", {**body, "seed": n}), range(14)))
        plain = whole(edge.post("/v1/chat/completions", {**body, "seed": 5, "stream": False}))
    for number, answer in enumerate(answers):
        events = chunks(answer)
        message = gathered(events)
        assert called(message) == calls_of(number)
        assert [call["id"] for call in message["tool_calls"]] == ["functions.f:0", "functions.get_weather:1"]
        assert message["finish_reason"] == "tool_calls"
        pieces = [c["choices"][0]["delta"]["tool_calls"][0] for c in events if "tool_calls" in c["choices"][0]["delta"]]
        assert max(len(piece["function"]["arguments"]) for piece in pieces) <= len("<|tool_call_end|>")
        assert len(pieces) > 3000
    assert plain == gathered(chunks(answers[5]))


def test_no_events_pile_up_before_the_end(start: Start, models: dict[str, Path]) -> None:
    """The name is sent before the engine has made the arguments, and the first arguments before the last."""
    words = Vocabulary(models["kimi_k2"])
    tokens = [*words.ids(kimi_k2([("f", {"a": "x" * 50})])), words.eos]
    behind = len(tokens) - 50 + 10  # what stands around the x's, and a little that may be held back
    events: list[Any] = []

    def script(request: Any) -> Iterator[int]:  # noqa: ARG001
        for number, token in enumerate(tokens):
            until(lambda number=number: len(events) >= number - behind, "the event of an earlier token")
            yield token

    with (
        start(model_type="kimi_k2", marks="kimi_k2") as edge,
        OpenAI(base_url=f"http://127.0.0.1:{edge.port}/v1", api_key="x") as client,
    ):
        edge.engine.script = script
        stream = client.chat.completions.create(model="tiny", messages=ASK["messages"], tools=TOOLS, stream=True)  # type: ignore[call-overload]
        for chunk in stream:
            events += chunk.choices[0].delta.tool_calls or []
    assert len(events) > 50


def test_openai_python_reads_calls_and_reasoning(thinker: Edge, words: Vocabulary) -> None:
    style = STYLES["hermes"]
    thinker.engine.script = says(words, "<think>\nhm\n</think>\n\n" + style.write(CALLS))
    with OpenAI(base_url=f"http://127.0.0.1:{thinker.port}/v1", api_key="x") as client:
        with client.chat.completions.stream(model="tiny", messages=ASK["messages"], tools=TOOLS) as stream:  # type: ignore[arg-type]
            for _ in stream:
                pass
            final = stream.get_final_completion().choices[0]
        assert final.finish_reason == "tool_calls"
        assert final.message.tool_calls is not None
        assert [(call.function.name, json.loads(call.function.arguments)) for call in final.message.tool_calls] == CALLS
        answer = client.chat.completions.create(model="tiny", messages=ASK["messages"], tools=TOOLS)  # type: ignore[call-overload]
        assert answer.choices[0].message.reasoning_content == "hm"
        assert answer.usage.completion_tokens_details.reasoning_tokens == 6  # both tags, h, m and two line breaks


CHOICES = [
    # tool_choice, what the model says, calls, finish reason
    ("auto", True, "tool_calls"),
    ("auto", False, "stop"),
    ("required", True, "tool_calls"),
    ("required", False, "stop"),
    ({"type": "function", "function": {"name": "f"}}, True, "stop"),
    ({"type": "function", "function": {"name": "f"}}, False, "stop"),
]


@pytest.mark.parametrize(("choice", "calls", "reason"), CHOICES)
def test_finish_reasons(thinker: Edge, words: Vocabulary, choice: Any, calls: bool, reason: str) -> None:
    thinker.engine.script = says(words, STYLES["hermes"].write(CALLS[:1]) if calls else "no")
    message = both(thinker, tools=TOOLS, tool_choice=choice)
    assert (called(message), message["finish_reason"]) == (CALLS[:1] if calls else [], reason)


def test_a_call_cut_off_by_length(thinker: Edge, words: Vocabulary) -> None:
    text = STYLES["hermes"].write([("f", {"a": "x" * 40})])
    thinker.engine.script = says(words, text)
    message = both(thinker, tools=TOOLS, max_tokens=60)
    assert message["finish_reason"] == "length"
    arguments = message["tool_calls"][0]["function"]["arguments"]
    assert arguments.startswith('{"a": "xx')
    assert ('{"a": "' + "x" * 40).startswith(arguments)


@pytest.mark.parametrize("choice", ["auto", {"type": "function", "function": {"name": "f"}}])
def test_no_second_call_where_one_was_asked_for(thinker: Edge, words: Vocabulary, choice: Any) -> None:
    one = STYLES["hermes"].write(CALLS[:1])
    thinker.engine.script = says(words, one + STYLES["hermes"].write(CALLS[1:] * 50))
    finished = len(thinker.engine.finished)
    message = both(thinker, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    assert called(message) == CALLS[:1]
    assert message["finish_reason"] == ("tool_calls" if choice == "auto" else "stop")
    thinker.wait_for(lambda: len(thinker.engine.finished) == finished + 2)
    assert len(words.ids(one)) < thinker.engine.finished[-1].num_tokens < len(words.ids(one)) + 60


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {}}, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"function": {"name": "f"}}, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": ["f"], "tools": TOOLS}, "tool_choice"),
        ({"parallel_tool_calls": "no", "tools": TOOLS}, "parallel_tool_calls"),
    ],
)
def test_bad_choices(thinker: Edge, fields: dict[str, Any], param: str) -> None:
    answer = thinker.post("/v1/chat/completions", {**ASK, **fields})
    assert (answer.status, answer.error["param"]) == (400, param)


def test_a_call_cannot_be_forced_where_the_format_is_unknown(start: Start) -> None:
    with start() as edge:
        answer = edge.post("/v1/chat/completions", {**ASK, "tools": TOOLS, "tool_choice": "required"})
        assert (answer.status, answer.error["param"]) == (400, "tool_choice")
        assert "--tool-call-parser" in answer.error["message"]


THOUGHTS = [
    # enable_thinking (None: the template says nothing), what the model says, reasoning, content
    (True, "why\n</think>\n\nbecause", "why", "because"),
    (True, "<think>why</think>because", "why", "because"),
    (True, "never closed", "never closed", ""),
    (False, "because", None, "because"),
    (False, "<think>because", None, "<think>because"),
    (None, "<think>\nwhy\n</think>\n\nbecause", "why", "because"),
    (None, "because", None, "because"),
    (None, "because</think>", None, "because</think>"),
]


@pytest.mark.parametrize(("enable", "text", "reasoning", "content"), THOUGHTS)
def test_reasoning(thinker: Edge, words: Vocabulary, enable: bool | None, text: str, reasoning: str | None, content: str) -> None:
    thinker.engine.script = says(words, text)
    fields = {} if enable is None else {"chat_template_kwargs": {"enable_thinking": enable}}
    message = both(thinker, **fields)
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)
    assert message.get("reasoning") == reasoning
    usage = thinker.post("/v1/chat/completions", {**ASK, **fields}).json["usage"]
    closed = text.partition("</think>")[0] + ("</think>" if "</think>" in text else "")
    assert usage["completion_tokens_details"]["reasoning_tokens"] == (0 if reasoning is None else len(words.ids(closed)))
    assert usage["completion_tokens"] == len(words.ids(text)) + 1


def test_reasoning_tokens_grow_in_continuous_usage(thinker: Edge, words: Vocabulary) -> None:
    thinker.engine.script = says(words, "<think>ab</think>cd")
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = chunks(thinker.post("/v1/chat/completions", {**ASK, "stream": True, "stream_options": options}))
    counts = [event["usage"]["completion_tokens_details"]["reasoning_tokens"] for event in events]
    assert counts == sorted(counts)
    assert (counts[0] > 0, counts[-1]) == (True, 4)


def test_reasoning_of_a_continued_message(thinker: Edge, words: Vocabulary) -> None:
    thinker.engine.script = says(words, " b</think>c")
    messages = [*ASK["messages"], {"role": "assistant", "content": "<think>a"}]
    message = both(thinker, messages=messages, add_generation_prompt=False, continue_final_message=True)
    assert (message["reasoning"], message["content"]) == (" b", "c")


def test_other_special_tokens_stay_hidden(thinker: Edge, words: Vocabulary) -> None:
    text = f"a{BOS}b<think>c" + STYLES["hermes"].write([("f", {})])
    thinker.engine.script = says(words, text)
    assert both(thinker)["content"] == 'ab<think>c\n{"name": "f", "arguments": {}}\n'
    assert both(thinker, skip_special_tokens=False)["content"] == text


def test_stop_strings_see_the_content_alone(thinker: Edge, words: Vocabulary) -> None:
    call = STYLES["hermes"].write([("f", {"a": "STOP"})])
    thinker.engine.script = says(words, f"<think>STOP</think>abST{call} STOP more")
    message = both(thinker, tools=TOOLS, stop=["STOP", "OP<tool"])
    assert (message["reasoning"], message["content"], called(message)) == ("STOP", "abST ", [("f", {"a": "STOP"})])
    assert message["finish_reason"] == "tool_calls"
    thinker.engine.script = says(words, f"<think>STOP</think>ab STOP{call}")
    message = both(thinker, tools=TOOLS, stop=["STOP"])
    assert (message["content"], called(message), message["finish_reason"]) == ("ab ", [], "stop")


def test_a_stop_string_that_is_pending_when_a_call_begins(thinker: Edge, words: Vocabulary) -> None:
    """`bc` is complete, but `abcd`, which starts earlier, may still come, until the call settles it."""
    thinker.engine.script = says(words, "xabc" + STYLES["hermes"].write([("f", {})]))
    message = both(thinker, tools=TOOLS, stop=["abcd", "bc"])
    assert (message["content"], called(message), message["finish_reason"]) == ("xa", [], "stop")


def test_several_choices(thinker: Edge, words: Vocabulary) -> None:
    texts = ["<think>a</think>b", STYLES["hermes"].write(CALLS[:1]), "c"]
    thinker.engine.script = lambda request: [*words.ids(texts[request.sampling.seed]), words.eos]
    body = {**ASK, "n": 3, "seed": 0, "tools": TOOLS}
    events = chunks(thinker.post("/v1/chat/completions", {**body, "stream": True}))
    plain = thinker.post("/v1/chat/completions", body)
    for index, (reasoning, content, reason) in enumerate([("a", "b", "stop"), (None, None, "tool_calls"), (None, "c", "stop")]):
        for message in (gathered(events, index), whole(plain, index)):
            assert (message.get("reasoning"), message["content"], message["finish_reason"]) == (reasoning, content, reason)
            assert called(message) == (CALLS[:1] if index == 1 else [])


def test_logprobs_and_token_ids_ride_on_every_kind_of_delta(thinker: Edge, words: Vocabulary) -> None:
    text = "<think>ab</think>cd" + STYLES["hermes"].write(CALLS[:1])
    thinker.engine.script = says(words, text)
    fields = {"tools": TOOLS, "logprobs": True, "return_token_ids": True}
    choices = [c["choices"][0] for c in chunks(thinker.post("/v1/chat/completions", {**ASK, **fields, "stream": True}))]
    ids = [*words.ids(text), words.eos]
    assert [token for choice in choices for token in choice.get("token_ids", ())] == ids
    entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    plain = thinker.post("/v1/chat/completions", {**ASK, **fields}).json["choices"][0]
    assert plain["token_ids"] == ids
    assert plain["logprobs"]["content"] == entries
    assert len(entries) == len(ids)


@pytest.mark.parametrize(
    ("settings", "reasoning", "calls"),
    [
        ({"model_type": "deepseek_v3"}, True, True),
        ({"model_type": "deepseek_v3", "reasoning_parser": "none"}, False, True),
        ({"model_type": "deepseek_v3", "tool_call_parser": "none"}, True, False),
        ({"tool_call_parser": "deepseek_v31"}, False, True),
        ({"reasoning_parser": "qwen3"}, True, False),
        ({}, False, False),
    ],
)
def test_the_parsers_come_from_the_model_type_or_the_flags(
    start: Start, models: dict[str, Path], settings: dict[str, Any], reasoning: bool, calls: bool
) -> None:
    with start(**settings, marks="deepseek") as edge:
        edge.engine.script = says(
            Vocabulary(models["deepseek"]), "<think>a</think>" + STYLES["deepseek_v31"].write([("f", {"n": 1})])
        )
        message = both(edge, tools=TOOLS)
        assert message.get("reasoning") == ("a" if reasoning else None)
        assert called(message) == ([("f", {"n": 1})] if calls else [])
