"""Reasoning told from the answer: where an answer starts, what its tags mean, and that cuts never matter."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minserve.server.reasoning import AnswerStart, ReasoningParser, ThinkTags, answer_start

INSIDE, OPEN, CONTENT = AnswerStart.INSIDE, AnswerStart.OPEN, AnswerStart.CONTENT
TAGS = ThinkTags()
KIMI = ThinkTags(implied_ends=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"))


def split(start: AnswerStart, pieces: Iterable[str], tags: ThinkTags = TAGS) -> tuple[str, str]:
    parser = ReasoningParser(tags, start)
    outputs = [parser.push(piece) for piece in pieces]
    outputs.append(parser.finish())
    return "".join(reasoning for reasoning, _ in outputs), "".join(content for _, content in outputs)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("<｜User｜>hi<｜Assistant｜><think>\n", INSIDE),
        ("<｜User｜>hi<｜Assistant｜><think>", INSIDE),
        ("<｜User｜>hi<｜Assistant｜></think>", CONTENT),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", CONTENT),
        ("<|im_start|>assistant\n", OPEN),
        ("<|im_user|>user<|im_middle|>what is <think>?<|im_end|><|im_assistant|>assistant<|im_middle|>", OPEN),
        ("", OPEN),
    ],
)
def test_start_of_a_new_answer(prompt: str, expected: AnswerStart) -> None:
    assert answer_start(prompt, TAGS) is expected


@pytest.mark.parametrize(
    ("before", "continued", "expected"),
    [
        ("<think>\n", "Let me", INSIDE),
        ("assistant\n", "<think>Let me", INSIDE),
        ("assistant\n", "<think>Let me</think>\nSo", CONTENT),
        ("<think>\n", "Let me</think>\nSo ", CONTENT),
        ("what is <think>? assistant\n", "A tag", CONTENT),
    ],
)
def test_start_of_a_continued_answer(before: str, continued: str, expected: AnswerStart) -> None:
    assert answer_start(before + continued, TAGS, continued) is expected


TEXTS = [
    # the prompt opened the reasoning
    (INSIDE, "why\n</think>\n\nbecause", "why", "because"),
    (INSIDE, "\n\nwhy\n\nnot</think>because\n", "why\n\nnot", "because\n"),
    (INSIDE, "<think>\nwhy</think>because", "why", "because"),
    (INSIDE, "no tag, cut off", "no tag, cut off", ""),
    (INSIDE, "why</thi", "why</thi", ""),
    (INSIDE, "</think>because", "", "because"),
    (INSIDE, "a</think>b</think><think>c", "a", "b</think><think>c"),
    (INSIDE, "  a <think> b</think>c", "  a <think> b", "c"),
    (INSIDE, "", "", ""),
    (INSIDE, " \n", " \n", ""),
    # the answer opens it itself, or not
    (OPEN, "<think>\nwhy\n</think>\n\nbecause", "why", "because"),
    (OPEN, " \n<think>why</think>because", "why", "because"),
    (OPEN, "because", "", "because"),
    (OPEN, " <thinking> because", "", " <thinking> because"),
    (OPEN, "only a closing</think> tag", "", "only a closing</think> tag"),
    (OPEN, "<think>cut", "cut", ""),
    (OPEN, "<thi", "", "<thi"),
    (OPEN, "so <think>no</think>", "", "so <think>no</think>"),
    (OPEN, "<think>\n\n</think>\n\n", "", ""),
    # the prompt closed it
    (CONTENT, "<think>no</think>", "", "<think>no</think>"),
]


@pytest.mark.parametrize(("start", "text", "reasoning", "content"), TEXTS)
def test_every_pair_of_cuts(start: AnswerStart, text: str, reasoning: str, content: str) -> None:
    assert split(start, [text]) == (reasoning, content)
    assert split(start, text) == (reasoning, content)
    for first, second in itertools.combinations(range(len(text) + 1), 2):
        assert split(start, [text[:first], text[first:second], text[second:]]) == (reasoning, content)


CALL = "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}"
FORGOTTEN = [
    ("hm\n" + CALL, "hm", CALL),
    ("hm <|tool_calls " + CALL + "</think>\nok", "hm <|tool_calls ", CALL + "ok"),
    ("hm " + CALL + " so</thin", "hm ", CALL + " so</thin"),
    ("hm</think>\n" + CALL + "</think>", "hm", CALL + "</think>"),
    (CALL, "", CALL),
]


@pytest.mark.parametrize(("text", "reasoning", "content"), FORGOTTEN)
def test_a_call_ends_reasoning_that_was_not_closed(text: str, reasoning: str, content: str) -> None:
    for first, second in itertools.combinations(range(len(text) + 1), 2):
        assert split(INSIDE, [text[:first], text[first:second], text[second:]], KIMI) == (reasoning, content)


PARTS = st.sampled_from(["<think>", "</think>", "<thi", "</", "\n", " ", "ab", "<|tool_call_begin|>", "é你👍"])


@given(
    st.lists(PARTS, max_size=12), st.lists(st.integers(0, 100)), st.sampled_from(list(AnswerStart)), st.sampled_from([TAGS, KIMI])
)
@settings(max_examples=400, deadline=None)
def test_any_text_and_any_cuts(parts: list[str], cuts: list[int], start: AnswerStart, tags: ThinkTags) -> None:
    text = "".join(parts)
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    whole = split(start, [text], tags)
    assert split(start, pieces, tags) == whole
    assert split(start, text, tags) == whole


@given(st.lists(PARTS, max_size=12))
@settings(max_examples=200, deadline=None)
def test_nothing_is_lost_but_tags_and_white_space(parts: list[str]) -> None:
    text = "".join(parts)
    for start in AnswerStart:
        assert bare("".join(split(start, [text]))) == bare(text)


def bare(text: str) -> str:
    return re.sub(r"</?think>|\s", "", text)


def test_text_comes_as_soon_as_it_is_certain() -> None:
    parser = ReasoningParser(TAGS, INSIDE)
    pieces = ["why", " not", "\n", "then", "</", "b", "</think>", "\n", "yes", "\n"]
    outputs = [
        ("why", ""),
        (" not", ""),
        ("", ""),
        ("\nthen", ""),
        ("", ""),
        ("</b", ""),
        ("", ""),
        ("", ""),
        ("", "yes"),
        ("", "\n"),
    ]
    assert [parser.push(piece) for piece in pieces] == outputs
