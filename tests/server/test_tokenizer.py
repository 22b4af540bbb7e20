"""Loading, encoding, BOS and EOS, and the limits, for each kind of tokenizer file."""

from __future__ import annotations

import base64
import errno
import json
import os
import threading
import time
import unicodedata
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import BOS, EOS, KINDS, THINK, write_tiktoken, write_tokenizer
from transformers import PreTrainedTokenizerFast
from waiting import once_within

from minserve.errors import CheckpointError, UsageError
from minserve.server.encoders import MAX_RUN_CHARS, bounded_parts, kimi_split_pattern
from minserve.server.tokenizer import Tokenizer

TEXTS = ["", "Hello, world", " two  spaces \n\n", "12345 你好 안녕 👩‍👩‍👧", f"a{BOS}b{EOS}{THINK}x</think>", "\u1112\u1161\u11ab"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_as_transformers_has_them(tmp_path: Path, kind: str, text: str) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, kind))
    other = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token=BOS, eos_token=EOS)
    token_ids = other(text, add_special_tokens=False).input_ids
    assert tokenizer.encode(text, add_special_tokens=False) == token_ids
    for skip in (True, False):
        assert tokenizer.decode(token_ids, skip) == other.decode(
            token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "byte_level")
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {"strategy": {"Fixed": 600}, "direction": "Right", "pad_to_multiple_of": None}
    content["padding"] |= {"pad_id": 2, "pad_type_id": 0, "pad_token": "<|pad|>"}
    plain = Tokenizer.load(tmp_path).encode("a b c d e f g h i j")
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert Tokenizer.load(tmp_path).encode("a b c d e f g h i j") == plain


def test_tokens_that_only_the_config_lists_are_added(tmp_path: Path) -> None:
    size = Tokenizer.load(write_tokenizer(tmp_path, "byte_level")).vocab_size
    named = {str(size): {"content": "<|call|>", "special": True}, str(size + 1): {"content": "<|arg|>", "special": False}}
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, "byte_level", added_tokens_decoder=named))
    assert tokenizer.encode("<|call|><|arg|>") == [size, size + 1]
    assert tokenizer.vocab_size == size + 2
    assert tokenizer.decode([size, size + 1]) == "<|arg|>"
    write_tokenizer(tmp_path, "byte_level", added_tokens_decoder={str(size + 7): {"content": "<|far|>", "special": True}})
    with pytest.raises(CheckpointError, match=r"<\|far\|>"):
        Tokenizer.load(tmp_path)


def test_random_weights_without_a_tokenizer_speak_in_numbers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 300}}))
    with pytest.raises(CheckpointError, match="neither"):
        Tokenizer.load(tmp_path)
    tokenizer = Tokenizer.load(tmp_path, dummy=True)
    assert tokenizer.vocab_size == 300
    assert tokenizer.encode(tokenizer.decode([7, 299, 0]) + "not 300 ") == [7, 299, 0]


# BOS and EOS


@pytest.mark.parametrize(
    ("kind", "config", "expected"),
    [
        ("byte_level", {}, 0),
        ("byte_level", {"add_bos_token": True}, 1),
        ("byte_level", {"add_bos_token": False}, 0),
        ("sentencepiece", {}, 1),
        ("sentencepiece", {"add_bos_token": False}, 0),
    ],
)
def test_bos_of_a_plain_prompt(tmp_path: Path, kind: str, config: dict[str, bool], expected: int) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, kind, **config))
    bos = tokenizer.bos_token_id
    assert bos is not None
    assert tokenizer.encode("hello").count(bos) == expected
    assert tokenizer.encode("").count(bos) == expected
    assert tokenizer.encode("hello", add_special_tokens=False).count(bos) == 0


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize("template", ["{{ bos_token }}", "", "{{ bos_token }}{{ bos_token }}"])
def test_exactly_one_bos_after_template_and_encode(tmp_path: Path, kind: str, template: str) -> None:
    source = template + "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, kind, add_bos_token=True, chat_template=source))
    token_ids = tokenizer.encode(tokenizer.template.render([{"role": "user", "content": "hello"}]))
    assert token_ids[0] == tokenizer.bos_token_id
    assert token_ids.count(token_ids[0]) == 1


def test_bos_in_the_users_text_is_not_doubled_and_many_are_no_burden(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, "byte_level", add_bos_token=True))
    assert tokenizer.encode(f"{BOS}hello") == tokenizer.encode("hello")
    assert tokenizer.encode(BOS * 20_000) == [tokenizer.bos_token_id]
    assert tokenizer.encode(f"hello{BOS}") == [*tokenizer.encode("hello"), tokenizer.bos_token_id]


@pytest.mark.parametrize(("listed", "expected"), [(None, (1,)), (2, (1, 2)), ([2, 1], (1, 2))])
def test_eos_ids_are_the_union_of_both_configs(tmp_path: Path, listed: int | list[int] | None, expected: tuple[int, ...]) -> None:
    write_tokenizer(tmp_path, "byte_level")
    if listed is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": listed, "temperature": 0.6}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.token_id(EOS) == 1
    assert tokenizer.eos_token_ids == expected


def test_a_tokenizer_of_another_directory(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": 9}')
    write_tokenizer(tmp_path / "other", "byte_level")
    assert Tokenizer.load(tmp_path / "model", str(tmp_path / "other")).eos_token_ids == (1, 9)
    with pytest.raises(CheckpointError, match=r"neither tokenizer\.json nor tiktoken\.model"):
        Tokenizer.load(tmp_path / "model")
    with pytest.raises(UsageError, match="not a directory"):
        Tokenizer.load(tmp_path / "model", str(tmp_path / "nowhere"))


# Pieces for log-probabilities


def test_text_and_bytes_of_single_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path / "b", "byte_level"))
    assert [tokenizer.token_text(i) for i in tokenizer.encode(" fox\n")] == [" fox", "\n"]
    first, *rest = tokenizer.encode("🧪")
    assert tokenizer.token_text(first) == "\ufffd"
    assert b"".join(map(tokenizer.token_bytes, [first, *rest])) == "🧪".encode()
    assert tokenizer.token_bytes(10**6) == b""
    sentencepiece = Tokenizer.load(write_tokenizer(tmp_path / "s", "sentencepiece"))
    token_ids = sentencepiece.encode("quick 🧪", add_special_tokens=False)
    assert b"".join(map(sentencepiece.token_bytes, token_ids)) == " quick 🧪".encode()


def test_added_tokens_by_their_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, "byte_level"))
    think = tokenizer.token_id(THINK)
    assert think is not None
    assert tokenizer.encode(THINK) == [think]
    assert tokenizer.token_id("<absent>") is None
    assert tokenizer.token_id(None) is None


# Limits


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "tiktoken"])
@settings(max_examples=100, deadline=None)
@given(
    parts=st.lists(
        st.one_of(st.sampled_from([BOS, " quick", "안녕하세요", "\u1112\u1161\u11ab" * 9, " " * 50]), st.text(max_size=9))
    )
)
def test_the_bound_on_tokens_holds(kind: str, parts: list[str]) -> None:
    tokenizer = bound_tokenizer(kind)
    text = "".join(parts)
    assert tokenizer.fewest_tokens(len(text.encode())) <= len(tokenizer.encode(text, add_special_tokens=False))


@cache
def bound_tokenizer(kind: str) -> Tokenizer:
    with TemporaryDirectory() as name:
        if kind == "tiktoken":
            return Tokenizer.load(write_tiktoken(Path(name), ["안녕하세요".encode(), b" quick"], {0: (BOS, True)}))
        return Tokenizer.load(write_tokenizer(Path(name), kind))


def test_the_bound_allows_for_composition() -> None:
    """Text that the normaliser composes has more bytes than its tokens, here more than any token has."""
    tokenizer = bound_tokenizer("byte_level")
    hangul = tokenizer.encode("안녕하세요")
    assert len(hangul) == 1
    text = unicodedata.normalize("NFD", "안녕하세요") * 9
    assert len(text.encode()) > 9 * max(map(len, tokenizer.pieces.pieces))
    assert tokenizer.encode(text) == hangul * 9
    assert tokenizer.fewest_tokens(len(text.encode())) <= 9


def test_the_bound_is_of_use_and_absent_where_text_may_vanish(tmp_path: Path) -> None:
    assert Tokenizer.load(write_tokenizer(tmp_path / "b", "byte_level")).fewest_tokens(30_000_000) > 100_000
    assert Tokenizer.load(write_tokenizer(tmp_path / "b", "byte_level")).fewest_tokens(0) == 0
    assert Tokenizer.load(write_tokenizer(tmp_path / "w", "word_level")).fewest_tokens(30_000_000) == 0
    assert Tokenizer.load(write_tokenizer(tmp_path / "m", "metaspace")).fewest_tokens(30_000_000) == 0
    content = json.loads((tmp_path / "b" / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Strip", "strip_left": True, "strip_right": True}
    (tmp_path / "b" / "tokenizer.json").write_text(json.dumps(content))
    assert Tokenizer.load(tmp_path / "b").fewest_tokens(30_000_000) == 0


@pytest.mark.parametrize("kind", ["byte_level", "tiktoken"])
def test_a_long_text_in_a_thread_leaves_the_others_running(tmp_path: Path, kind: str) -> None:
    if kind == "tiktoken":
        write_tiktoken(tmp_path, [b" quick"], {})
    else:
        write_tokenizer(tmp_path, kind)
    tokenizer = Tokenizer.load(tmp_path)

    def longest_gap() -> float:
        """As a share of the whole."""
        thread = threading.Thread(target=tokenizer.encode, args=("The quick brown fox, 123 안녕. " * 30_000,))
        began = last = time.perf_counter()
        thread.start()
        longest = 0.0
        while thread.is_alive():
            time.sleep(0.001)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        return longest / (last - began)

    once_within(1 / 3, longest_gap, tries=5)


def test_lone_surrogates_are_replaced(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, "byte_level"))
    assert tokenizer.encode("a\ud800b\udfff") == tokenizer.encode("a\ufffdb\ufffd")


# tiktoken.model


def tiktoken_dir(tmp_path: Path) -> Path:
    words = ["你好".encode(), b"Hello", b" World", b"Don't", b"123"]
    added = {
        0: ("[BOS]", True),
        1: ("[EOS]", True),
        3: ("<|im_user|>", True),
        5: ("<|tool_call_begin|>", False),
        300: ("<|far|>", True),
    }
    return write_tiktoken(tmp_path, words, added, bos_token="[BOS]", eos_token="[EOS]")


def test_tiktoken_special_tokens_have_one_id_each(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(tiktoken_dir(tmp_path))
    first = tokenizer.bos_token_id
    assert first is not None
    assert tokenizer.eos_token_ids == (first + 1,)
    text = f"[BOS]<|im_user|>你好<|reserved_token_{first + 4}|><|tool_call_begin|><|far|>"
    middle = tokenizer.encode("你好")
    assert len(middle) == 1
    assert tokenizer.encode(text) == [first, first + 3, *middle, first + 4, first + 5, first + 300]
    assert tokenizer.decode(tokenizer.encode(text)) == "你好<|tool_call_begin|>"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    assert tokenizer.vocab_size == first + 301


def test_tiktoken_reserves_256_ids_that_nobody_names(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tiktoken(tmp_path, [], {0: ("[BOS]", True)}, bos_token="[BOS]", eos_token=None))
    assert tokenizer.vocab_size == 256 + 256
    assert tokenizer.token_id("<|reserved_token_511|>") == 511
    assert tokenizer.eos_token_ids == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Hello World", ["Hello", " World"]),
        ("你好World世界", ["你好", "World", "世界"]),
        ("don't WE'LL", ["don't", " WE'LL"]),
        ("helloWorld", ["hello", "World"]),
        ("1234567", ["123", "456", "7"]),
        ("a,\n\n b", ["a", ",\n\n", " b"]),
        ("x   y", ["x", "  ", " y"]),
        ("  \n z", ["  \n", " z"]),
        ("こんにちは世", ["こんにちは", "世"]),
    ],
)
def test_kimi_cuts_text_by_script_case_and_digits(text: str, words: list[str]) -> None:
    # With every substring in the vocabulary a part becomes one token exactly as the pattern cut it.
    content = text.encode()
    parts = sorted({content[i:j] for i in range(len(content)) for j in range(i + 1, len(content) + 1)}, key=len)
    ranks = {part: rank for rank, part in enumerate(dict.fromkeys([bytes([byte]) for byte in range(256)] + parts))}
    encoding = tiktoken.Encoding("kimi", pat_str=kimi_split_pattern(), mergeable_ranks=ranks, special_tokens={})
    assert [encoding.decode([token_id]) for token_id in encoding.encode_ordinary(text)] == words


@settings(max_examples=20, deadline=None)
@given(
    runs=st.lists(
        st.tuples(st.sampled_from("a \u3000"), st.sampled_from([1, 2, 24_999, 25_000, 25_001, 80_000, 450_000])), max_size=3
    )
)
def test_long_texts_are_cut_where_the_published_tokenizer_cuts(runs: list[tuple[str, int]]) -> None:
    text = "".join(character * count for character, count in runs)
    parts = list(bounded_parts(text))
    assert "".join(parts) == text
    assert parts == cut_by_counting(text)


def cut_by_counting(text: str) -> list[str]:
    """The rule told character by character."""
    parts: list[str] = []
    for offset in range(0, len(text), 400_000):
        chunk, start, run = text[offset : offset + 400_000], 0, 0
        for index, character in enumerate(chunk):
            run = run + 1 if index and character.isspace() == chunk[index - 1].isspace() else 1
            if run > MAX_RUN_CHARS:
                parts.append(chunk[start:index])
                start, run = index, 1
        parts.append(chunk[start:])
    return parts


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["!!! 0"], "line 1"),
        (["YQ== 0", "YWI="], "line 2"),
        (["YQ== x"], "line 1"),
        (["YQ== 0", "YWI= 2"], "ranks"),
        ([], "ranks"),
        (["YQ== 0"], "single byte 0"),
    ],
)
def test_a_damaged_tiktoken_file_is_refused(tmp_path: Path, lines: list[str], message: str) -> None:
    (tmp_path / "tiktoken.model").write_text("\n".join(lines))
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"65": {"content": "[BOS]", "special": True}}, "ordinary token's"),
        ({"256": {"content": "[X]"}, "257": {"content": "[X]"}}, "one text to two"),
    ],
)
def test_contradicting_special_tokens_are_refused(tmp_path: Path, named: dict[str, dict[str, object]], message: str) -> None:
    write_tiktoken(tmp_path, [], {}, added_tokens_decoder=named)
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.load(tmp_path)


def test_tiktoken_ranks_are_the_files_and_not_a_cache_of_an_older_one(tmp_path: Path) -> None:
    write_tiktoken(tmp_path, [b"ab"], {})
    assert Tokenizer.load(tmp_path).encode("ab") == [256]
    lines = (tmp_path / "tiktoken.model").read_bytes().splitlines()
    (tmp_path / "tiktoken.model").write_bytes(b"\n".join([*lines[:256], base64.b64encode(b"cd") + b" 256"]))
    assert Tokenizer.load(tmp_path).encode("ab") == [97, 98]


# Files that are not what they should be


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_damaged_files_are_named(tmp_path: Path, name: str) -> None:
    write_tokenizer(tmp_path, "byte_level")
    (tmp_path / name).write_text("{")
    with pytest.raises(CheckpointError, match=name):
        Tokenizer.load(tmp_path)
    (tmp_path / name).write_text('{"model": ' + "[" * 100_000)
    with pytest.raises(CheckpointError, match=name):
        Tokenizer.load(tmp_path)


def test_a_template_that_is_no_text_is_named(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "byte_level")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff{{ messages }}")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja is no UTF-8 text"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"])
def test_files_without_the_right_to_read_them_are_named(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokenizer(tmp_path, "byte_level")
    (tmp_path / name).touch()
    readable = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if path.name == name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return readable(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    with pytest.raises(CheckpointError, match=rf"{name} cannot be read: Permission denied"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "CTC", "pad_token": "<|pad|>", "word_delimiter_token": "|", "cleanup": True},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 0, "stop": 1}]},
    ],
)
def test_an_unknown_decoder_is_refused(tmp_path: Path, decoder: dict[str, Any]) -> None:
    write_tokenizer(tmp_path, "byte_level")
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**content, "decoder": decoder}))
    with pytest.raises(CheckpointError, match=decoder.get("decoders", [decoder])[-1]["type"]):
        Tokenizer.load(tmp_path)
