"""The embedded model's data: what is held out stays out of training, answers are right, batches and tokens are what they say."""

from __future__ import annotations

import random
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from minserve.clients.arithmetic_reference import PromptTokens, load_reference
from minserve.config import EMBEDDED_DIRECTORY
from tools import arithmetic_tasks
from tools.arithmetic_tasks import Conversation, Sum, Turn, held_out_conversations, training_turn
from tools.embedded_tokenizer import CHAT_TEMPLATE, EOS_ID, PAD_ID, SPECIAL_TOKENS, build_tokenizer
from tools.held_out_reference import OF_EACH, SEED
from tools.training_batches import LENGTHS, CachedEncoder, TrainingBatches, answer_batch

TOKENIZER = Tokenizer.from_file(str(EMBEDDED_DIRECTORY / "tokenizer.json"))
ENCODER = CachedEncoder(TOKENIZER)
QUESTIONS = [
    re.compile(re.escape(phrasing).replace(r"\{a\}", r"(?P<a>\d+)").replace(r"\{b\}", r"(?P<b>\d+)"))
    for phrasings in arithmetic_tasks.PHRASINGS.values()
    for phrasing in phrasings
]


def sums_of(turn: Turn) -> list[tuple[Sum, int]]:
    """Every sum that the turn asks for, with the result that its answer gives."""
    if "=" in turn.assistant:
        written = re.findall(r"(\d+) ([+-]) (\d+) = (-?\d+)", turn.assistant)
        return [(Sum(int(a), operator, int(b)), int(result)) for a, operator, b, result in written]
    match = next(match for pattern in QUESTIONS if (match := pattern.fullmatch(turn.user)))
    operator = "-" if any(word in turn.user for word in (" - ", "minus", "Subtract")) else "+"
    return [(Sum(int(match["a"]), operator, int(match["b"])), int(turn.assistant))]


@given(st.integers(0, 999), st.integers(0, 999))
def test_a_held_out_pair_is_held_out_either_way_round(a: int, b: int) -> None:
    assert Sum(a, "+", b).held_out == Sum(b, "+", a).held_out
    assert Sum(a, "-", b).held_out == Sum(b, "-", a).held_out


def test_one_pair_in_sixteen_is_held_out_and_always_the_same() -> None:
    rng = random.Random(0)
    share = sum(Sum(rng.randint(0, 999), "+", rng.randint(0, 999)).held_out for _ in range(20_000)) / 20_000
    assert 0.9 / 16 < share < 1.1 / 16
    assert [b for b in range(40, 120) if Sum(23, "+", b).held_out] == [55, 62, 88, 97, 109, 116]


def test_training_never_asks_a_held_out_sum_and_answers_rightly() -> None:
    rng = random.Random(3)
    parts = set()
    for index in range(4000):
        part, turn = training_turn(rng, 96 + index % 600, first=index % 2 == 0)
        parts.add(part)
        sums = sums_of(turn)
        assert sums
        for drawn, result in sums:
            assert not drawn.held_out, turn
            assert result == drawn.result, turn
    assert parts == {"plain", "several", "recall"}


def test_named_operands_hold_what_the_answer_repeats() -> None:
    rng = random.Random(5)
    for lines in range(20):
        turn = arithmetic_tasks.recall(rng, True, lines)
        named = dict(re.findall(r"Let (\w) = (\d+)\.", turn.user))
        asked = re.search(r"What is (\w) ([+-]) (\w+)\?", turn.user)
        assert asked is not None
        a, operator, b = named[asked[1]], asked[2], named.get(asked[3], asked[3])
        assert turn.assistant.startswith(f"{a} {operator} {b} = ")
        assert turn.user.count("\n") >= lines


def test_the_eval_asks_held_out_sums_only() -> None:
    conversations = held_out_conversations(SEED, OF_EACH)
    items = load_reference().items
    assert [item.messages for item in items] == [one.messages()[:-1] for one in conversations]
    assert [item.answer for item in items] == [one.turns[-1].assistant for one in conversations]
    for one in conversations:
        for drawn, result in sums_of(one.turns[-1]):
            assert drawn.held_out
            assert drawn.result == result


def test_the_trainer_encodes_as_the_chat_template_renders() -> None:
    tokens = PromptTokens()
    for item, one in zip(load_reference().items[:60], held_out_conversations(SEED, 15), strict=True):
        assert ENCODER.conversation(one) == tokens.of(item)


def test_a_batch_depends_on_its_number_alone() -> None:
    batches = [TrainingBatches(TOKENIZER.to_str(), 1, 1500, 10) for _ in range(2)]
    late = batches[0][7]
    for index in range(7):
        batches[1][index]
    ids, learnt = batches[1][7]
    assert torch.equal(ids, late[0])
    assert torch.equal(learnt, late[1])
    assert not torch.equal(ids[0, :60], batches[1][8][0][0, :60])
    assert ids.shape[1] in LENGTHS
    assert ids.numel() <= 1500


def test_learnt_are_the_answers_and_the_ends_of_turns() -> None:
    ids, learnt = TrainingBatches(TOKENIZER.to_str(), 1, 2000, 1)[0]
    for row, marks in zip(ids.tolist(), learnt.tolist(), strict=True):
        text = TOKENIZER.decode([token for token in row if token != PAD_ID], skip_special_tokens=False)
        answers = re.findall(r"<｜Assistant｜>(.*?<｜end▁of▁sentence｜>)", text)
        marked = TOKENIZER.decode([token for token, mark in zip(row, marks, strict=True) if mark], skip_special_tokens=False)
        assert answers
        assert marked == "".join(answers)


def test_answer_batches_pad_on_the_right() -> None:
    ids, mask = answer_batch([([5, 6, 7], [8, EOS_ID]), ([9], [EOS_ID])])
    assert ids.tolist() == [[5, 6, 7, 8, EOS_ID], [9, EOS_ID, PAD_ID, PAD_ID, PAD_ID]]
    assert mask.tolist() == [[False, False, False, True, True], [False, True, False, False, False]]


def test_the_committed_tokenizer_is_the_one_that_the_script_builds() -> None:
    assert build_tokenizer(384).to_str() == TOKENIZER.to_str()
    assert TOKENIZER.get_vocab_size() % 64 == 0
    assert all(TOKENIZER.token_to_id(token) == index for index, token in enumerate(SPECIAL_TOKENS))


@given(st.text())
def test_any_text_survives_the_tokenizer(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


def test_digits_are_single_tokens() -> None:
    assert TOKENIZER.encode("1234567890", add_special_tokens=False).tokens == list("1234567890")


@pytest.mark.parametrize("text", ["Let A = 5.\nWhat is A - 17?", "  two  spaces\n\n3 ", "12 - 999 = -987; 0 + 0 = 0"])
def test_the_cached_encoder_is_the_tokenizer(text: str) -> None:
    assert ENCODER.encode(text) == TOKENIZER.encode(text, add_special_tokens=False).ids


def test_the_template_knows_four_roles_and_no_fifth() -> None:
    import jinja2

    def refuse(message: str) -> None:
        raise ValueError(message)

    template = jinja2.Environment().from_string(CHAT_TEMPLATE)
    values = {"bos_token": "[", "eos_token": "]", "raise_exception": refuse}
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": None},
        {"role": "tool", "content": "T"},
    ]
    rendered = "[S<｜User｜>U<｜Assistant｜>]<｜tool▁output▁begin｜>T<｜tool▁output▁end｜>"
    assert template.render(messages=messages, add_generation_prompt=False, **values) == rendered
    assert template.render(messages=messages, add_generation_prompt=True, **values) == rendered + "<｜Assistant｜>"
    with pytest.raises(ValueError, match="not critic"):
        template.render(messages=[{"role": "critic", "content": "C"}], **values)


def test_a_conversation_lists_its_messages_in_order() -> None:
    roles = [message["role"] for message in Conversation("plain", "S", (Turn("a", "b"), Turn("c", "d"))).messages()]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
