"""Text that grows token by token equals the text decoded at once, and stop strings are obeyed, however tokens are cut."""

from __future__ import annotations

import time
import unicodedata
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_tokenizers import KINDS, write_tiktoken, write_tokenizer

from minserve.server.detokenizer import Detokenizer, StopChecker, TextStream
from minserve.server.encoders import AddedToken, JsonEncoder, TiktokenEncoder, read_ranks
from minserve.server.token_pieces import TokenPieces

TEXTS = st.text(
    alphabet=st.one_of(st.sampled_from("ab 안녕세계👍🏽👩\u200d👧éñ한글 \n\ufffd"), st.characters(codec="utf-8")), max_size=40
)


@cache
def encoder(kind: str) -> JsonEncoder | TiktokenEncoder:
    with TemporaryDirectory() as name:
        if kind != "tiktoken":
            return JsonEncoder(write_tokenizer(Path(name), kind) / "tokenizer.json", {})
        path = write_tiktoken(Path(name), ["안녕하세요".encode(), "👍🏽".encode(), b" world"], {}) / "tiktoken.model"
        first = len(read_ranks(path))
        return TiktokenEncoder(path, {first: AddedToken("[EOS]", special=True), first + 1: AddedToken("<think>", special=False)})


def decode_at_once(kind: str, token_ids: list[int], skip: bool) -> str:
    tool = encoder(kind)
    if isinstance(tool, JsonEncoder):
        return tool.library_decode(token_ids, skip_special_tokens=skip)
    kept = [token_id for token_id in token_ids if not (skip and token_id in tool.pieces.special)]
    return b"".join(map(tool.pieces.piece, kept)).decode("utf-8", "replace")


def deltas(pieces: TokenPieces, token_ids: list[int], skip: bool) -> list[str]:
    detokenizer = Detokenizer(pieces, skip_special_tokens=skip)
    return [*map(detokenizer.push, token_ids), detokenizer.flush()]


@pytest.mark.parametrize("kind", [*KINDS, "tiktoken"])
@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_any_ids_give_the_text_decoded_at_once(kind: str, data: st.DataObject, skip: bool) -> None:
    size = len(encoder(kind).pieces.pieces)
    token_ids = data.draw(st.lists(st.integers(0, size + 5), max_size=30))
    assert "".join(deltas(encoder(kind).pieces, token_ids, skip)) == decode_at_once(kind, token_ids, skip)


@pytest.mark.parametrize("kind", [*KINDS, "tiktoken"])
@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_deltas_of_encoded_text(kind: str, text: str) -> None:
    """Each delta is final: what is out so far is always a beginning of the whole, and nothing unreadable is put in."""
    token_ids = encoder(kind).encode(text)
    whole = decode_at_once(kind, token_ids, True)
    sent = ""
    for delta in deltas(encoder(kind).pieces, token_ids, True):
        sent += delta
        assert whole.startswith(sent)
    assert sent == whole


@pytest.mark.parametrize("kind", ["byte_level", "tiktoken"])
@given(text=TEXTS)
def test_byte_level_tokenizers_lose_nothing(kind: str, text: str) -> None:
    expected = unicodedata.normalize("NFC", text) if kind == "byte_level" else text
    assert "".join(deltas(encoder(kind).pieces, encoder(kind).encode(text), False)) == expected


@pytest.mark.parametrize("kind", ["byte_level", "tiktoken", "sentencepiece"])
@pytest.mark.parametrize("text", ["👩‍👩‍👧", "각", "값이 👍🏽!", "a🇰🇷b"])
def test_a_character_cut_over_tokens_is_sent_whole(kind: str, text: str) -> None:
    """One token a byte, the worst cut: no U+FFFD, no delta with half a character, and no character twice."""
    pieces = encoder(kind).pieces
    by_byte = {pieces.piece(i): i for i in range(len(pieces.pieces)) if len(pieces.piece(i)) == 1}
    if kind == "sentencepiece":
        by_byte = {pieces.piece(i): i for i in pieces.byte_tokens}
    out = deltas(pieces, [by_byte[bytes([byte])] for byte in text.encode()], True)
    assert "".join(out) == text
    assert all("\ufffd" not in delta for delta in out)


@pytest.mark.parametrize("kind", ["byte_level", "tiktoken", "sentencepiece"])
def test_half_a_character_at_the_end_is_flushed_once(kind: str) -> None:
    pieces = encoder(kind).pieces
    source = pieces.byte_tokens or range(len(pieces.pieces))
    by_byte = {pieces.piece(i): i for i in source if len(pieces.piece(i)) == 1}
    detokenizer = Detokenizer(pieces)
    assert [detokenizer.push(by_byte[bytes([byte])]) for byte in "👍".encode()[:3]] == ["", "", ""]
    assert set(detokenizer.flush()) == {"\ufffd"}
    assert detokenizer.flush() == ""


def test_a_real_replacement_character_passes() -> None:
    assert "".join(deltas(encoder("byte_level").pieces, encoder("byte_level").encode("a\ufffdb"), True)) == "a\ufffdb"


def test_special_tokens_are_skipped_or_shown() -> None:
    tool = encoder("byte_level")
    token_ids = tool.encode("a<|eos|><think>b")
    assert "".join(deltas(tool.pieces, token_ids, True)) == "a<think>b"
    assert "".join(deltas(tool.pieces, token_ids, False)) == "a<|eos|><think>b"


@pytest.mark.parametrize("kind", ["sentencepiece", "metaspace"])
def test_a_completion_keeps_the_space_that_a_text_start_drops(kind: str) -> None:
    token_ids = encoder(kind).encode("quick fox")
    for continues, expected in [(False, "quick fox"), (True, " quick fox")]:
        detokenizer = Detokenizer(encoder(kind).pieces, continues_text=continues)
        assert "".join([*map(detokenizer.push, token_ids), detokenizer.flush()]) == expected


def test_work_for_a_token_does_not_grow_with_the_text() -> None:
    """Counted, not timed: the only text that is ever copied is what was not sent yet."""
    tool = encoder("byte_level")
    stream = TextStream(tool.pieces, stop=["xyz" * 100])
    for _ in range(5000):
        stream.push(tool.encode("x hello"))
    assert stream._checker is not None
    assert len(stream._checker._held) <= 1
    assert len(stream._boundaries) <= 2


# Stop strings against a reading of the whole text at once.


def outcome_at_once(text: str, stops: list[str], include: bool) -> tuple[str, str | None, int]:
    """The text to send, the stop string that matched, and the match's end in characters."""
    found = [(text.find(stop), text.find(stop) + len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None, 0
    start, end, stop = min(found)
    return text[: end if include else start], stop, end


STOPS = st.lists(st.text(alphabet="aab", min_size=1, max_size=5), min_size=1, max_size=4)


@settings(max_examples=400, deadline=None)
@given(chunks=st.lists(st.text(alphabet="ab", max_size=6), max_size=12), stops=STOPS, include=st.booleans())
@example(chunks=["aaab"], stops=["aab"], include=False)
@example(chunks=["aabaabaaab"], stops=["aabaaab", "aaaa"], include=False)
def test_stop_strings_against_the_whole_text(chunks: list[str], stops: list[str], include: bool) -> None:
    text = "".join(chunks)
    expected, stop, end = outcome_at_once(text, stops, include)
    checker = StopChecker(stops, include_stop=include)
    sent = ""
    for index, chunk in enumerate(chunks):
        sent += checker.push(chunk)
        seen = "".join(chunks[: index + 1])
        if checker.match is None:
            assert len(sent) == earliest_possible_start(seen, stops)
        assert expected.startswith(sent)
    sent += checker.finish()
    assert (sent, checker.match) == (expected, stop)
    assert stop is None or checker.match_end == end
    assert checker.push("more") == checker.finish() == "" or stop is None


def earliest_possible_start(seen: str, stops: list[str]) -> int:
    """Where the earliest stop string starts that is complete or may still become so; nothing before it may be held."""
    starts = range(len(seen))
    return next((i for i in starts if any(s.startswith(seen[i:]) or seen.startswith(s, i) for s in stops)), len(seen))


@pytest.mark.parametrize("kind", ["byte_level", "tiktoken", "sentencepiece"])
@settings(max_examples=200, deadline=None)
@given(data=st.data(), text=TEXTS, include=st.booleans())
def test_streams_of_any_grouping_agree_with_the_whole_text(kind: str, data: st.DataObject, text: str, include: bool) -> None:
    token_ids = encoder(kind).encode(text)
    whole = decode_at_once(kind, token_ids, True)
    bounds = st.integers(0, len(whole))
    cuts = data.draw(st.lists(st.tuples(bounds, bounds), min_size=1, max_size=3))
    stops = [whole[min(cut) : max(cut)][:6] or "zz" for cut in cuts] + data.draw(st.lists(TEXTS.filter(bool), max_size=1))
    groups = data.draw(st.lists(st.integers(1, 4), max_size=len(token_ids)))

    stream = TextStream(encoder(kind).pieces, stop=stops, include_stop=include)
    sent, rest = "", list(token_ids)
    for size in [*groups, len(token_ids)]:
        sent += stream.push(rest[:size])
        rest = rest[size:]
    sent += stream.finish()

    expected, stop, end = outcome_at_once(whole, stops, include)
    assert sent == expected
    assert (None if stream.stopped is None else stream.stopped.stop) == stop
    if stream.stopped is not None:
        assert stream.num_tokens == stream.stopped.num_tokens == tokens_for(encoder(kind).pieces, token_ids, end)
    else:
        assert stream.num_tokens == len(token_ids)


def tokens_for(pieces: TokenPieces, token_ids: list[int], length: int) -> int:
    """After how many tokens `length` characters were certain."""
    certain = 0
    for count, delta in enumerate(deltas(pieces, token_ids, True), start=1):
        certain += len(delta)
        if certain >= length:
            return min(count, len(token_ids))
    raise AssertionError("the text is shorter")


def words(*texts: str) -> TokenPieces:
    return TokenPieces("bytes", tuple(text.encode() for text in texts), frozenset())


def test_no_part_of_a_stop_string_over_several_tokens_is_sent() -> None:
    pieces = words("x", "DEF", "G", "HI", "J", "K")
    stream = TextStream(pieces, stop=["DEFGHIJ"])
    assert [stream.push([i]) for i in [0, 1, 2, 3, 4, 5]] == ["x", "", "", "", "", ""]
    assert stream.stopped is not None
    assert (stream.stopped.stop, stream.stopped.num_tokens) == ("DEFGHIJ", 5)
    assert stream.finish() == ""


def test_held_text_is_sent_as_soon_as_it_cannot_be_a_stop_string() -> None:
    stream = TextStream(words("x", "DEF", "G", "HI", "J", "K"), stop=["DEFGHIJ"])
    assert [stream.push([i]) for i in [1, 2, 3, 5, 1]] == ["", "", "", "DEFGHIK", ""]
    assert stream.finish() == "DEF"
    assert stream.stopped is None


def test_a_stop_string_that_never_comes_delays_nothing() -> None:
    stream = TextStream(words("a", "b z", "c"), stop=["zzzz"])
    assert [stream.push([i]) for i in [0, 1, 2, 0]] == ["a", "b ", "zc", "a"]


def test_the_earliest_start_wins_over_the_earliest_end_and_over_list_order() -> None:
    for stops in (["bc", "abcd"], ["abcd", "bc"]):
        for chunks in (["abcd!"], list("abcd!"), ["ab", "cd!"]):
            checker = StopChecker(stops)
            assert ("".join(map(checker.push, chunks)) + checker.finish(), checker.match) == ("", "abcd")
    checker = StopChecker(["abcd", "bc"])
    assert [checker.push(c) for c in "abcX"] == ["", "", "", "a"]
    assert checker.match == "bc"


def test_a_pending_match_counts_when_the_text_ends() -> None:
    stream = TextStream(words("a", "b", "c"), stop=["abcd", "bc"])
    assert stream.push([0, 1, 2]) == ""
    assert stream.finish() == "a"
    assert stream.stopped is not None
    assert (stream.stopped.stop, stream.stopped.num_tokens) == ("bc", 3)


def test_the_stop_string_is_sent_when_asked_for() -> None:
    stream = TextStream(words("one", " STOP", " two"), stop=["STOP"], include_stop=True)
    assert stream.push([0, 1, 2]) == "one STOP"
    assert stream.num_tokens == 2


def test_stop_strings_are_not_looked_for_before_min_tokens() -> None:
    stream = TextStream(words("s", "t"), stop=["st"], min_tokens=3)
    assert stream.push([0, 1, 0, 1, 0, 1, 0]) == "sts" + "t"
    assert stream.num_tokens == 6


def test_long_stop_strings_of_many_choices_hold_up_nobody() -> None:
    stops = ["a" * 4000 + chr(ord("A") + index) for index in range(52)]
    began = time.thread_time()
    checkers = [StopChecker(stops) for _ in range(100)]
    assert time.thread_time() - began < 1  # with a table for each stop string of each choice it takes five
    assert [checkers[0].push(character) for character in "aab"] == ["", "", "aab"]


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopChecker(["a", ""])
