"""Answers that come whole: their shapes, log-probabilities, echo, choices, and what reaches the engine and the template."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import logprobs_of

from minserve.request import Request
from minserve.server.completions import LogprobFormat
from minserve.server.tokenizer import Tokenizer
from tests.server.conftest import MAX_MODEL_LEN, Edge, Say, Vocabulary


def prompt_text(edge: Edge, vocabulary: Vocabulary) -> str:
    """What the last prompt said, special tokens included."""
    return vocabulary.tokenizer.decode(edge.engine.added[-1].prompt_token_ids, skip_special_tokens=False)


def test_a_chat_answer(edge: Edge, say: Say) -> None:
    say("the HI")
    answer = edge.chat("what?")
    assert answer.status == 200
    assert answer.headers["Content-Type"].startswith("application/json")
    body = answer.json
    assert body["object"] == "chat.completion"
    assert body["model"] == "tiny"
    assert body["id"].startswith("chatcmpl-")
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == "the HI"
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None
    assert body["usage"]["completion_tokens"] == 4
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + 4


def test_a_completion_answer(edge: Edge, say: Say) -> None:
    say("the HI")
    body = edge.complete("abc").json
    assert body["object"] == "text_completion"
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"], choice["index"]) == ("the HI", "stop", 0)
    assert body["usage"]["prompt_tokens"] == 4  # BOS and three bytes
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 2


@pytest.mark.parametrize("prompt", ["ab", ["ab"], [97, 98], [[97, 98]]])
def test_the_four_forms_of_prompt(edge: Edge, vocabulary: Vocabulary, prompt: Any) -> None:
    assert edge.complete(prompt).status == 200
    bos = [vocabulary.bos] if isinstance(prompt, str) or isinstance(prompt[0], str) else []
    assert edge.engine.added[-1].prompt_token_ids == [*bos, 97, 98]


def test_an_empty_text_runs_on_the_start_token(edge: Edge, vocabulary: Vocabulary) -> None:
    for prompt in ("", [""]):
        assert edge.complete(prompt).status == 200
        assert edge.engine.added[-1].prompt_token_ids == [vocabulary.bos]


def test_without_a_start_token_an_empty_text_is_refused(
    start_edge: Callable[..., AbstractContextManager[Edge]], model_dir: Path, tmp_path: Path
) -> None:
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(model_dir / name, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    with start_edge("hello", model=str(tmp_path)) as edge:
        for answer in (edge.complete(""), edge.complete([""]), edge.complete(["a", ""]), edge.chat("")):
            assert answer.status == 400
            assert "empty" in answer.json["error"]["message"]
        assert edge.engine.added == []
        assert edge.complete("a").status == 200


def test_sampling_reaches_the_engine_as_asked(edge: Edge, vocabulary: Vocabulary) -> None:
    fields = {
        "max_tokens": 7,
        "min_tokens": 3,
        "temperature": 0.5,
        "top_k": 11,
        "top_p": 0.75,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": -1,
        "frequency_penalty": 2,
        "seed": 1234,
        "logit_bias": {"5": 1.5, "6": -1000, "7": 400},
        "stop_token_ids": [65, 66, 65],
    }
    assert edge.complete(**fields).status == 200
    sampling = edge.engine.added[-1].sampling
    for name in ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"):
        assert getattr(sampling, name) == fields[name]
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-1.0, 2.0)
    assert sampling.logit_bias == {5: 1.5, 6: -100.0, 7: 100.0}
    assert sampling.stop_token_ids == (vocabulary.eos, 65, 66)
    assert sampling.logprobs is None
    assert sampling.prompt_logprobs is None


def test_defaults(edge: Edge, vocabulary: Vocabulary) -> None:
    assert edge.complete([1, 2, 3]).status == 200
    sampling = edge.engine.added[-1].sampling
    assert sampling.max_tokens == MAX_MODEL_LEN - 3
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    assert sampling.stop_token_ids == (vocabulary.eos,)


def test_ignore_eos_turns_off_the_models_stops_and_none_of_the_users(edge: Edge) -> None:
    edge.complete(ignore_eos=True, stop_token_ids=[65], max_tokens=3)
    assert edge.engine.added[-1].sampling.stop_token_ids == (65,)


def test_a_temperature_near_zero_is_argmax(edge: Edge) -> None:
    edge.complete(temperature=9e-6)
    assert edge.engine.added[-1].sampling.greedy
    edge.complete(temperature=1e-4)
    assert not edge.engine.added[-1].sampling.greedy


def test_top_k_off_in_all_spellings(edge: Edge) -> None:
    for value in (-1, 0, 10**9, None):
        assert edge.complete(top_k=value).status == 200
        assert edge.engine.added[-1].sampling.top_k == 0


def test_unseeded_requests_differ_and_seeded_ones_do_not(edge: Edge) -> None:
    for seed in (None, None, 5, 5, -1):
        assert edge.complete(seed=seed).status == 200
    first, second, third, fourth, negative = (request.sampling.seed for request in edge.engine.added[-5:])
    assert first != second
    assert third == fourth == 5
    assert negative >= 0


def test_each_choice_of_a_seeded_request_has_a_seed_of_its_own(edge: Edge) -> None:
    assert edge.complete(["x", "y"], n=3, seed=7, temperature=1).status == 200
    assert [request.sampling.seed for request in edge.engine.added[-6:]] == [7, 8, 9, 7, 8, 9]


def test_max_completion_tokens_is_the_newer_name(edge: Edge) -> None:
    edge.chat(max_completion_tokens=5, max_tokens=9)
    assert edge.engine.added[-1].sampling.max_tokens == 5


def test_an_answer_is_cut_to_what_is_left_of_the_context(edge: Edge, say: Say) -> None:
    say("a" * 400)
    body = edge.complete([1] * (MAX_MODEL_LEN - 1), max_tokens=10**30).json
    assert body["usage"]["completion_tokens"] == 1
    assert body["choices"][0]["finish_reason"] == "length"


def test_stop_strings_end_the_text_and_count_their_tokens(edge: Edge, say: Say) -> None:
    say("abc DEFGHIJ rest")
    body = edge.complete(stop=["HIJ", "FG"]).json
    assert body["choices"][0]["text"] == "abc DE"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 6
    included = edge.complete(stop="FG", include_stop_str_in_output=True).json
    assert included["choices"][0]["text"] == "abc DEFG"


def test_stop_strings_are_not_looked_for_before_min_tokens(edge: Edge, say: Say) -> None:
    say("x.y.z")
    assert edge.complete(stop=".", min_tokens=2).json["choices"][0]["text"] == "x.y"


def test_a_users_stop_token_is_not_shown_unless_asked(edge: Edge, say: Say) -> None:
    say("abXcd")
    assert edge.complete(stop_token_ids=[ord("X")]).json["choices"][0]["text"] == "ab"
    shown = edge.complete(stop_token_ids=[ord("X")], include_stop_str_in_output=True)
    assert shown.json["choices"][0]["text"] == "abX"


def test_special_tokens_are_shown_on_request(edge: Edge, say: Say, vocabulary: Vocabulary) -> None:
    say.tokens([97, vocabulary.bos, 98, vocabulary.eos])
    assert edge.complete().json["choices"][0]["text"] == "ab"
    assert edge.complete(skip_special_tokens=False).json["choices"][0]["text"] == "a<bos>b"


def test_chat_logprobs(edge: Edge, say: Say) -> None:
    say("é!")
    content = edge.chat(logprobs=True, top_logprobs=2).json["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["bytes:\\xc3", "bytes:\\xa9", "!", "<eos>"]
    assert content[2]["bytes"] == [33]
    assert content[2]["logprob"] == pytest.approx(logprobs_of(33, 2).logprob)
    assert [top["token"] for top in content[2]["top_logprobs"]] == ['"', "!"]
    bare = edge.chat(logprobs=True).json["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in bare] == [[]] * 4


def test_ids_that_only_the_model_has_are_named_by_number(model_dir: Path) -> None:
    names = LogprobFormat(Tokenizer.load(model_dir), tokens_as_ids=False)
    assert [names.token_name(token) for token in (97, 5000, 0xE2)] == ["a", "token_id:5000", "bytes:\\xe2"]


def test_completion_logprobs_hold_the_chosen_tokens_very_own_float(edge: Edge, say: Say) -> None:
    say("the x")
    logprobs = edge.complete(logprobs=1).json["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["the", " ", "x", "<eos>"]
    assert logprobs["text_offset"] == [0, 3, 4, 5]
    for token, value, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert top[token] == value
        assert len(top) == 2


@pytest.mark.parametrize("prompt", ["a\nb \n", [97, 10, 98, 32, 10]])
def test_echo_with_logprobs_covers_prompt_and_output(edge: Edge, say: Say, prompt: Any) -> None:
    say("zz")
    choice = edge.complete(prompt, echo=True, logprobs=1, max_tokens=1, seed=1234).json["choices"][0]
    logprobs = choice["logprobs"]
    bos = ["<bos>"] if isinstance(prompt, str) else []
    assert choice["text"] == "a\nb \nz"
    assert logprobs["tokens"] == [*bos, "a", "\n", "b", " ", "\n", "z"]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(isinstance(value, float) for value in logprobs["token_logprobs"][1:])
    assert {len(array) for array in logprobs.values()} == {len(logprobs["tokens"])}
    assert logprobs["text_offset"] == [*([0] if bos else []), 0, 1, 2, 3, 4, 5]
    assert edge.engine.added[-1].sampling.prompt_logprobs == 1


def test_echo_without_a_new_token(edge: Edge) -> None:
    body = edge.complete("ab", echo=True, logprobs=0, max_tokens=0).json
    assert body["choices"][0]["text"] == "ab"
    assert body["choices"][0]["logprobs"]["tokens"] == ["<bos>", "a", "b"]
    assert body["usage"]["completion_tokens"] == 0


def test_prompt_logprobs(edge: Edge) -> None:
    body = edge.complete([97, 98], prompt_logprobs=2, max_tokens=1).json
    first, second = body["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second["98"]["rank"] == 2
    assert second["98"]["decoded_token"] == "b"
    assert second["99"]["rank"] == 1
    assert len(edge.chat(prompt_logprobs=0, max_tokens=1).json["prompt_logprobs"]) == len(edge.engine.added[-1].prompt_token_ids)


def test_token_ids_are_returned_on_request(edge: Edge, say: Say, vocabulary: Vocabulary) -> None:
    say("ab")
    chat = edge.chat(return_token_ids=True).json
    assert chat["prompt_token_ids"] == edge.engine.added[-1].prompt_token_ids
    assert chat["choices"][0]["token_ids"] == [97, 98, vocabulary.eos]
    assert edge.complete([5], return_token_ids=True).json["choices"][0]["prompt_token_ids"] == [5]
    named = edge.complete(logprobs=1, return_tokens_as_token_ids=True).json["choices"][0]["logprobs"]
    assert named["tokens"] == ["token_id:97", "token_id:98", f"token_id:{vocabulary.eos}"]


def test_several_choices(edge: Edge, say: Say, vocabulary: Vocabulary) -> None:
    counter = itertools.count(1)
    say.by_request(lambda _: [*vocabulary.ids("a" * next(counter)), vocabulary.eos])
    body = edge.complete(["x", "yy"], n=2).json
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "a"), (1, "aa"), (2, "aaa"), (3, "aaaa")]
    assert body["usage"]["completion_tokens"] == 1 + 2 + 3 + 4 + 4
    assert body["usage"]["prompt_tokens"] == 2 + 3
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 4


def test_best_of_shows_the_likeliest(edge: Edge, say: Say, vocabulary: Vocabulary) -> None:
    texts = itertools.cycle(["zz", "aa", "mm", "bb"])  # the scripted engine's log-probability falls with the id
    say.by_request(lambda _: [*vocabulary.ids(next(texts)), vocabulary.eos])
    body = edge.complete(best_of=4, n=2).json
    assert sorted(c["text"] for c in body["choices"]) == sorted(expected_best(vocabulary, ["zz", "aa", "mm", "bb"], 2))
    assert body["choices"][0]["logprobs"] is None
    assert body["usage"]["completion_tokens"] == 12
    assert edge.complete(best_of=1).status == 200


def expected_best(vocabulary: Vocabulary, texts: list[str], count: int) -> list[str]:
    def mean(text: str) -> float:
        ids = [*vocabulary.ids(text), vocabulary.eos]
        return sum(logprobs_of(token, 0).logprob for token in ids) / len(ids)

    return sorted(texts, key=mean, reverse=True)[:count]


def test_more_choices_than_the_batch_holds_queue(edge: Edge, say: Say) -> None:
    say("ab")
    edge.engine.max_batch = 4
    try:
        assert len(edge.complete(n=128).json["choices"]) == 128
    finally:
        edge.engine.max_batch = 64


def test_text_parts_are_joined_and_developer_is_system(edge: Edge, vocabulary: Vocabulary) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "system", "content": "really"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": " you"}]},
    ]
    assert edge.post("/v1/chat/completions", {"messages": messages}).status == 200
    assert prompt_text(edge, vocabulary) == "<bos><system>be brief<system>really<user>hi you<assistant>"


@pytest.mark.parametrize("content", [{"content": None}, {}])
@pytest.mark.parametrize("arguments", ['{"x": 1}', {"x": 1}])
def test_the_template_sees_tool_calls_without_content(
    edge: Edge, vocabulary: Vocabulary, content: dict[str, Any], arguments: Any
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", **content, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]
    answer = edge.post("/v1/chat/completions", {"messages": messages, "stream": True})
    assert answer.status == 200
    assert answer.events[-1] == "[DONE]"
    assert prompt_text(edge, vocabulary) == '<bos><user>1+1?<assistant>[call add {"x": 1}]<tool>2<assistant>'


def test_the_template_sees_tools_unless_none_may_be_called(edge: Edge, vocabulary: Vocabulary) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    edge.chat("x", tools=tools)
    assert prompt_text(edge, vocabulary).startswith("<bos>[tools:add;]")
    edge.chat("x", tools=tools, tool_choice="auto")
    assert prompt_text(edge, vocabulary).startswith("<bos>[tools:add;]")
    edge.chat("x", tools=tools, tool_choice="none")
    assert prompt_text(edge, vocabulary) == "<bos><user>x<assistant>"


def test_template_arguments_and_generation_prompt(edge: Edge, vocabulary: Vocabulary) -> None:
    edge.chat("x", chat_template_kwargs={"shout": True, "text": 2})
    assert prompt_text(edge, vocabulary) == "<bos><user>x<assistant>!"
    edge.chat("x", add_generation_prompt=False)
    assert prompt_text(edge, vocabulary) == "<bos><user>x"
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "so far"}]
    edge.post("/v1/chat/completions", {"messages": messages, "continue_final_message": True})
    assert prompt_text(edge, vocabulary) == "<bos><user>x<assistant>so far"


def test_unknown_and_null_fields_are_ignored(edge: Edge) -> None:
    fields = dict.fromkeys(("stop", "stream", "logprobs", "n", "best_of", "seed", "user", "max_tokens", "tools", "logit_bias"))
    assert edge.chat(**fields, frobnicate={"a": [1]}, store=True, response_format={"type": "text"}).status == 200


def test_tokenize_and_detokenize(edge: Edge, vocabulary: Vocabulary) -> None:
    assert edge.post("/tokenize", {"prompt": "the é"}).json == {
        "tokens": [vocabulary.bos, *vocabulary.ids("the é")],
        "count": 5,
        "max_model_len": MAX_MODEL_LEN,
        "token_strs": None,
    }
    plain = edge.post("/tokenize", {"prompt": "HI", "add_special_tokens": False, "return_token_strs": True}).json
    assert (plain["tokens"], plain["token_strs"]) == (vocabulary.ids("HI"), ["HI"])
    chat = edge.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]}).json
    assert edge.post("/detokenize", {"tokens": chat["tokens"]}).json == {"prompt": "<bos><user>x<assistant>"}
    assert edge.post("/tokenize", {"prompt": "z" * 10_000}).json["count"] == 10_001
    assert edge.post("/detokenize", {"tokens": [97] * 10_000}).json["prompt"] == "a" * 10_000


def test_a_long_prompt_becomes_the_same_ids_as_a_short_one(start_edge: Any, vocabulary: Vocabulary) -> None:
    with start_edge("ok", max_model_len=100_000) as roomy:
        assert roomy.complete("ab" * 20_000).status == 200
        assert roomy.engine.added[-1].prompt_token_ids == [vocabulary.bos, *vocabulary.ids("ab" * 20_000)]


def test_the_scripts_see_each_choice_as_its_own_request(edge: Edge) -> None:
    before = len(edge.engine.added)
    edge.complete(n=3)
    added: list[Request] = edge.engine.added[before:]
    assert len({request.id for request in added}) == 3
