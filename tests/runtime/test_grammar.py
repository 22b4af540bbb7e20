"""Grammars: what masks allow, where outputs end, reasoning before them, and that a bad one harms nobody else."""

from __future__ import annotations

import json
import random
import time

import numpy as np
import pytest
from waiting import PATIENCE

from minserve.request import FinishReason, Grammar, Request, SamplingParams, TokenOutput
from minserve.runtime import grammar
from minserve.runtime.grammar import Grammars
from minserve.runtime.step import ScheduledRow, ScheduledStep

WORDS = ["yes", "no", "maybe", '{"', '":', "</thi", "nk>", "</think>", "abc", "12", "}\n", ">\n\n"]
PIECES = [bytes([byte]) for byte in range(256)] + [word.encode() for word in WORDS] + [b"<think>", b"<call>", b"<eos>", b"<end>"]
THINK, CALL, EOS, END = range(256 + len(WORDS), len(PIECES))
SPECIAL = (THINK, CALL, EOS, END)
VOCAB = 300  # larger than the tokenizer's
OBJECT = (
    'start: %json {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false}'
)


def lark(text):
    return '%llguidance {"no_forcing": true}\n' + text


def asked(request_id, text, stop=(EOS,), **reasoning):
    sampling = SamplingParams(max_tokens=100, seed=0, stop_token_ids=stop, grammar=Grammar(lark(text), **reasoning))
    return Request(id=request_id, prompt_token_ids=[1], sampling=sampling, arrival_time=0.0)


def ids(text):
    """Tokens of a text: words where they fit."""
    found = []
    data = text.encode()
    while data:
        best = max((piece for piece in PIECES[: len(PIECES) - 4] if data.startswith(piece)), key=len)
        found.append(PIECES.index(best))
        data = data[len(best) :]
    return found


def text_of(token_ids):
    return b"".join(PIECES[token] for token in token_ids).decode()


class Rows:
    """Grammars with requests under way; every sampled token goes through them as in an engine."""

    def __init__(self, *requests, vocab=VOCAB, pieces=PIECES, special=SPECIAL):
        self.grammars = Grammars(vocab)
        self.grammars.set_vocabulary(pieces, special)
        self.vocab = vocab
        self.failed = {}
        self.begin(*requests)

    def begin(self, *requests):
        for request in requests:
            self.grammars.compile(request)
        deadline = time.monotonic() + PATIENCE
        ready = []
        while self.grammars.compiling:
            assert time.monotonic() < deadline
            more, failed = self.grammars.settled()
            ready += more
            self.failed |= {output.request_id: output for output in failed}
            time.sleep(0.001)
        assert {r.id for r in ready} | set(self.failed) >= {r.id for r in requests}
        return ready

    def step(self, *request_ids):
        rows = tuple(ScheduledRow(request_id=i, slot=0, start=0, num_tokens=1, samples=i >= 0) for i in request_ids)
        return ScheduledStep(number=1, rows=rows, num_decode_rows=len(rows), num_tokens=len(rows))

    def allowed(self, *request_ids):
        """For each request the ids that may come, or None when all may."""
        masks = self.grammars.masks(self.step(*request_ids))
        self.failed |= {output.request_id: output for output in self.grammars.failures()}
        found = [None] * len(request_ids)
        if masks is not None:
            bits = np.unpackbits(masks.bits.numpy().view(np.uint8), axis=1, bitorder="little")
            assert not bits[:, self.vocab :].any()
            for place, row in zip(masks.rows, bits, strict=True):
                found[place] = set(np.flatnonzero(row).tolist())
        return found

    def push(self, request_id, *tokens, reason=None):
        return self.grammars.advance([TokenOutput(request_id=request_id, token_ids=tokens, finish_reason=reason)])


def test_a_choice_allows_every_token_that_leads_to_it_and_no_other():
    rows = Rows(asked(1, 'start: "yes" | "yesno" | "maybe"'))
    reached = b""
    for token in ids("y") + ids("es"):
        ways = [w.encode() for w in ("yes", "yesno", "maybe")]
        expected = {i for i, p in enumerate(PIECES[:-4]) if p and any(w.startswith(reached + p) for w in ways)}
        if reached in ways:
            expected.add(EOS)
        assert rows.allowed(1) == [expected]
        assert rows.push(1, token)[-1].finish_reason is None
        reached += PIECES[token]
    assert rows.allowed(1) == [{EOS, ord("n"), PIECES.index(b"no")}]


def test_a_text_that_nothing_can_follow_ends_with_its_last_token():
    rows = Rows(asked(1, 'start: "yes" | "maybe"'))
    assert rows.push(1, *ids("yes")) == [
        TokenOutput(request_id=1, token_ids=tuple(ids("yes"))),
        TokenOutput(request_id=1, finish_reason=FinishReason.STOP),
    ]
    assert rows.allowed(1) == [None]  # it is gone


def test_a_stop_token_ends_it_where_the_text_may_end_and_is_not_read_as_text():
    rows = Rows(asked(1, "start: /a+/", stop=(EOS, ord("b"), 10**6)), asked(2, "start: /a+/", stop=()))
    assert rows.allowed(1, 2) == [{ord("a")}, {ord("a")}]
    rows.push(1, ord("a"))
    rows.push(2, ord("a"))
    assert rows.allowed(1, 2) == [{ord("a"), EOS, ord("b")}, {ord("a")}]
    last = TokenOutput(request_id=1, token_ids=(EOS,), finish_reason=FinishReason.STOP)
    assert rows.grammars.advance([last]) == [last]
    assert rows.allowed(1, 2) == [None, {ord("a")}]


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["yes", "no", "é"]}, "maxItems": 3},
        "inner": {
            "anyOf": [
                {"type": "null"},
                {"type": "object", "properties": {"b": {"type": "boolean"}}, "additionalProperties": False},
            ]
        },
    },
    "required": ["name", "age", "tags", "inner"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


@pytest.mark.parametrize("seed", range(30))
def test_any_walk_through_the_masks_is_an_instance_of_the_schema(seed):
    rows = Rows(asked(1, f"start: %json {json.dumps(SCHEMA)}"))
    choose = random.Random(seed)
    tokens = []
    while True:
        token = choose.choice(sorted(rows.allowed(1)[0]))
        tokens.append(token)
        if rows.push(1, token)[-1].finish_reason is not None:
            break
        assert len(tokens) < 400
    value = json.loads(text_of(tokens))
    assert list(value) == ["name", "age", "tags", "inner"]
    assert len(value["name"]) <= 12
    assert type(value["age"]) is int and 0 <= value["age"] <= 120
    assert set(value["tags"]) <= {"yes", "no", "é"}
    assert value["inner"] is None or isinstance(value["inner"], dict)


def test_special_tokens_are_no_text_but_can_be_named():
    rows = Rows(asked(1, f'start: <[{CALL}]> "no"'), asked(2, "start: /(.|\\n)*/"))
    named, anything = rows.allowed(1, 2)
    assert named == {CALL}
    assert not anything & {THINK, CALL, END}
    assert EOS in anything


def test_reasoning_that_the_prompt_began_is_free_until_its_end():
    for end in (["</think>"], ["</thi", "nk>"], ["x</", "think", ">\n\n"]):
        rows = Rows(asked(1, OBJECT, starts_after="</think>"))
        for piece in ["abc", '{"', "</thin", "k", *end]:
            assert rows.allowed(1) == [None]
            rows.push(1, *ids(piece))
        assert rows.allowed(1) == [{ord("{"), PIECES.index(b'{"')}]


def test_reasoning_may_be_opened_by_the_first_token_alone():
    first = {ord("{"), PIECES.index(b'{"'), THINK}
    rows = Rows(
        asked(1, OBJECT, starts_after="</think>", opened_by=THINK), asked(2, OBJECT, starts_after="</think>", opened_by=THINK)
    )
    assert rows.allowed(1, 2) == [first, first]
    rows.push(1, THINK)
    rows.push(2, ord("{"))
    assert rows.allowed(1)[0] is None
    assert rows.allowed(2)[0] is not None
    assert THINK not in rows.allowed(2)[0]
    rows.push(1, *ids("hm</think>"))
    assert rows.allowed(1) == [first - {THINK}]


def test_rows_that_do_not_sample_and_requests_without_grammars_have_no_masks():
    rows = Rows(asked(3, 'start: "no"'))
    masks = rows.grammars.masks(rows.step(-1, 7, 3))
    assert masks.rows == [1]  # the second of the rows that sample
    assert rows.grammars.masks(rows.step(7)) is None
    plain = [TokenOutput(request_id=7, token_ids=(1,))]
    assert rows.grammars.advance(plain) == plain


@pytest.mark.parametrize("vocab", [len(PIECES) - 1, len(PIECES), 287, 288, 289, 319, 320])
def test_vocabularies_of_any_size(vocab):
    """The model's may be smaller or larger than the tokenizer's, and end anywhere in a word of the mask."""
    rows = Rows(asked(1, 'start: "no" | "n"'), vocab=vocab)
    assert rows.allowed(1) == [{ord("n"), PIECES.index(b"no")}]
    rows.push(1, ord("n"))
    assert rows.allowed(1) == [{ord("o"), EOS} if vocab > EOS else {ord("o")}]


BAD = {
    "no grammar at all": "start: (",
    "impossible": "start: %json false",
    "impossible by combination": 'start: %json {"allOf": [{"type": "string"}, {"type": "integer"}]}',
    "unknown rule": "start: other",
    "endless": 'start: %json {"$ref": "#"}',
    "broken pattern": 'start: %json {"type": "string", "pattern": "("}',
    "no such token": "start: <[100000]>",
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_a_bad_grammar_is_its_own_requests_end(text):
    rows = Rows(asked(1, text), asked(2, 'start: "no"'))
    (failure,) = rows.failed.values()
    assert (failure.request_id, failure.finish_reason, failure.is_bad_request) == (1, FinishReason.ERROR, True)
    assert failure.error.startswith("the grammar cannot be followed: ")
    assert "\n" not in failure.error and len(failure.error) < 400
    assert rows.allowed(1, 2) == [None, {ord("n"), PIECES.index(b"no")}]


def test_a_grammar_that_explodes_on_the_way_ends_its_own_request():
    rows = Rows(asked(1, "start: /((a{1,100}){1,100}){1,100}b/"), asked(2, "start: /[ab]*/"))
    for _ in range(100):
        rows.push(1, ord("a"))
        rows.push(2, ord("a"))
        mine, other = rows.allowed(1, 2)
        assert other == {ord("a"), ord("b"), EOS}
        if mine is None:
            break
    assert rows.failed[1].is_bad_request
    assert set(rows.failed) == {1}


def test_a_grammar_that_takes_too_long_to_compile_is_given_up(monkeypatch):
    rows = Rows(asked(2, 'start: "no"'))
    monkeypatch.setattr(grammar, "COMPILE_SECONDS", 0.1)
    rows.begin(asked(1, 'start: %json {"type": "integer", "multipleOf": 99991}'))
    assert "too long" in rows.failed[1].error
    assert rows.allowed(1, 2) == [None, {ord("n"), PIECES.index(b"no")}]


def test_a_dead_end_ends_the_request():
    """No token of this vocabulary spells what the grammar demands."""
    pieces = [b"" if piece == b"z" else piece for piece in PIECES]
    rows = Rows(asked(1, 'start: "az"'), asked(2, 'start: "ab"'), pieces=pieces)
    rows.push(1, ord("a"))
    rows.push(2, ord("a"))
    assert rows.allowed(1, 2) == [None, {ord("b")}]
    assert rows.failed[1].is_bad_request
    assert rows.allowed(1, 2) == [None, {ord("b")}]


def test_a_token_that_the_mask_forbade_ends_the_request():
    rows = Rows(asked(1, 'start: "no"'))
    (output,) = rows.push(1, ord("x"))
    assert (output.finish_reason, output.is_bad_request, output.token_ids) == (FinishReason.ERROR, True, ())
    assert rows.allowed(1) == [None]


def test_requests_can_be_forgotten_at_any_time():
    rows = Rows(asked(1, 'start: "no"'))
    rows.grammars.forget([1, 99])
    assert rows.allowed(1) == [None]
    rows.grammars.compile(asked(2, 'start: "no"'))
    rows.grammars.forget([2])
    assert not rows.grammars.compiling
    assert rows.grammars.settled() == ([], [])


def test_without_a_vocabulary_a_request_fails():
    grammars = Grammars(VOCAB)
    grammars.compile(asked(1, 'start: "no"'))
    while grammars.compiling:
        ready, failed = grammars.settled()
        assert not ready
    assert failed[0].finish_reason is FinishReason.ERROR


def test_requests_with_one_grammar_go_their_own_ways():
    rows = Rows(*(asked(i, 'start: "yes" | "no"') for i in range(5)))
    rows.push(0, ord("y"))
    rows.push(3, ord("n"))
    start = {ord("y"), ord("n"), PIECES.index(b"yes"), PIECES.index(b"no")}
    assert rows.allowed(*range(5)) == [{ord("e")}, start, start, {ord("o")}, start]


def test_grammars_beyond_the_number_that_is_kept_still_work():
    rows = Rows(*(asked(i, f'start: "{i} yes"') for i in range(80)))
    assert rows.allowed(0, 79) == [{ord("0")}, {ord("7")}]
    rows.begin(asked(100, 'start: "0 yes"'))
    assert rows.allowed(100) == [{ord("0")}]


def test_the_time_of_masks_is_counted():
    rows = Rows(asked(1, OBJECT), asked(2, OBJECT))
    rows.allowed(1, 2)
    assert rows.grammars.num_masks == 2
    assert 0 < rows.grammars.mask_seconds < PATIENCE
