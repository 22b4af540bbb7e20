"""Text to token ids: one class for each file format that a checkpoint ships. Knows nothing of templates, BOS or streaming.

Encoding releases the GIL and may run in a thread. Special tokens written out in a text become their ids, as in other servers.
"""

from __future__ import annotations

import abc
import base64
import binascii
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tiktoken
import tokenizers

from minserve.errors import CheckpointError
from minserve.server.detokenizer import Detokenizer
from minserve.server.token_pieces import TokenPieces, byte_level_alphabet, pieces_of_decoder, steps_of

RESERVED_TOKENS = 256
"""Ids after the ranks of a tiktoken.model that exist even where tokenizer_config.json does not name them."""
MAX_PART_CHARS = 400_000
MAX_RUN_CHARS = 25_000
"""The published Kimi tokenizer cuts a text after so many characters, and after so many without a change between blank and
not blank, because tiktoken fails on longer ones; cutting elsewhere would give other ids."""


class AddedToken(msgspec.Struct):
    """An entry of tokenizer_config.json's `added_tokens_decoder`."""

    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = True


class Encoder(abc.ABC):
    """What a file format has to offer."""

    pieces: TokenPieces
    bytes_per_token = 0
    """No token stands for more bytes of text than this; 0 when there is no such limit."""
    added_tokens: Mapping[str, int]
    """Text to id of the tokens outside the ordinary vocabulary, special or not."""

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of the text alone: no BOS."""

    def leading_ids(self) -> list[int]:
        """What the format itself puts before a text."""
        return []


class JsonEncoder(Encoder):
    """A tokenizer.json, through the `tokenizers` library."""

    def __init__(self, path: Path, added_tokens: Mapping[int, AddedToken]) -> None:
        """`added_tokens`: those of tokenizer_config.json; the ones that the file lacks are added.

        Raises CheckpointError when the file is no tokenizer or needs what is not supported.
        """
        content = read_file(path)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
            sections = msgspec.json.decode(content)
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{path}: not a tokenizer that can be loaded: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._add_missing(path, added_tokens)
        added = self._tokenizer.get_added_tokens_decoder()
        self.added_tokens = {token.content: token_id for token_id, token in added.items()}
        special = frozenset(token_id for token_id, token in added.items() if token.special)
        self.pieces = pieces_of_decoder(sections.get("decoder"), self._tokenizer.get_vocab(with_added_tokens=True), special)
        self.bytes_per_token = self._longest_text(sections)
        self._prove_pieces(path)

    def encode(self, text: str) -> list[int]:
        # encode_batch_fast and not encode: it releases the GIL, so that a long text does not stop the server.
        return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def leading_ids(self) -> list[int]:
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        processed = self._tokenizer.encode("a", add_special_tokens=True).ids
        starts = range(len(processed) - len(plain) + 1)
        start = next((start for start in starts if processed[start : start + len(plain)] == plain), 0)
        return list(processed[:start])

    def library_decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """What the pieces must agree with, whole texts only."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def _prove_pieces(self, path: Path) -> None:
        """Raises CheckpointError when the library decodes a sample of the vocabulary otherwise than the pieces do."""
        size = len(self.pieces.pieces)
        sample = range(0, size, max(size // 1024, 1))
        detokenizer = Detokenizer(self.pieces, skip_special_tokens=True)
        text = "".join([*map(detokenizer.push, sample), detokenizer.flush()])
        if text != self.library_decode(sample, skip_special_tokens=True):
            raise CheckpointError(f"{path}: its decoder does not do what its steps say; this kind of tokenizer is not supported")

    def _add_missing(self, path: Path, added_tokens: Mapping[int, AddedToken]) -> None:
        for token_id, token in sorted(added_tokens.items()):
            if self._tokenizer.token_to_id(token.content) is None:
                self._tokenizer.add_tokens([tokenizers.AddedToken(**msgspec.structs.asdict(token))])
            actual = self._tokenizer.token_to_id(token.content)
            if actual != token_id:
                raise CheckpointError(
                    f"{path}: tokenizer_config.json gives {token.content!r} the id {token_id}, but here it has {actual}"
                )

    def _longest_text(self, sections: dict[str, Any]) -> int:
        """`bytes_per_token` from what is known of the file's steps; 0 as soon as one of them may drop text without limit."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        if any(token.lstrip or token.rstrip for token in added) or sections["model"]["type"] != "BPE":
            return 0
        if self.pieces.kind == "bytes":
            ordinary = self._tokenizer.get_vocab(with_added_tokens=False)
            complete = all(character in ordinary for character in byte_level_alphabet().values())
        else:
            complete = bool(sections["model"].get("byte_fallback")) and len(self.pieces.byte_tokens) == 256
        if not complete or not all(map(_keeps_text, steps_of(sections.get("pre_tokenizer"), "pretokenizers"))):
            return 0
        longest = max(map(len, self.pieces.pieces), default=0)
        for step in steps_of(sections.get("normalizer"), "normalizers"):
            longest *= _most_shrinking(step)
        return longest


class TiktokenEncoder(Encoder):
    """A tiktoken.model of Moonshot's models (Kimi, Moonlight): base64 tokens with ranks; tokenizer_config.json names specials."""

    def __init__(self, path: Path, added_tokens: Mapping[int, AddedToken]) -> None:
        """Raises CheckpointError when the file is damaged or the special tokens contradict it or each other."""
        ranks = read_ranks(path)
        end = max([len(ranks) + RESERVED_TOKENS, *(token_id + 1 for token_id in added_tokens)])
        names = {token_id: f"<|reserved_token_{token_id}|>" for token_id in range(len(ranks), end)}
        for token_id, token in added_tokens.items():
            if token_id not in names:
                raise CheckpointError(
                    f"{path}: {token.content!r} of tokenizer_config.json has an ordinary token's id, {token_id}"
                )
            names[token_id] = token.content
        self.added_tokens = {name: token_id for token_id, name in names.items()}
        if len(self.added_tokens) != len(names):
            raise CheckpointError(f"{path}: tokenizer_config.json gives one text to two special tokens")
        self._encoding = tiktoken.Encoding(
            name=path.name, pat_str=kimi_split_pattern(), mergeable_ranks=ranks, special_tokens=self.added_tokens
        )
        pieces = (*sorted(ranks, key=ranks.__getitem__), *(name.encode() for name in names.values()))
        special = frozenset(token_id for token_id in names if token_id not in added_tokens or added_tokens[token_id].special)
        self.pieces = TokenPieces("bytes", pieces, special)
        self.bytes_per_token = max(map(len, pieces))

    def encode(self, text: str) -> list[int]:
        token_ids: list[int] = []
        for part in bounded_parts(text):
            token_ids += self._encoding.encode(part, allowed_special="all")
        return token_ids


class NumberEncoder(Encoder):
    """For random weights that come without a tokenizer: a token's text is its id, and a text may hold nothing but ids."""

    def __init__(self, vocab_size: int) -> None:
        self.added_tokens = {}
        self.pieces = TokenPieces("bytes", tuple(b"%d " % token_id for token_id in range(vocab_size)), frozenset())

    def encode(self, text: str) -> list[int]:
        """Words that are no id count for nothing."""
        numbers = [int(word) for word in text.split() if word.isascii() and word.isdecimal()]
        return [number for number in numbers if number < len(self.pieces.pieces)]


def read_file(path: Path) -> bytes:
    """A file of the checkpoint. Raises CheckpointError when it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def kimi_split_pattern() -> str:
    """How Kimi's text is cut before merging: runs of Han, words by letter case, up to three digits, punctuation, blanks.

    A word may take one leading character that is no letter, digit or line end, and a trailing English contraction.
    """
    not_han = r"&&[^\p{Han}]"
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{not_han}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{not_han}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    after = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    words = [f"{before}{upper}*{lower}+{after}", f"{before}{upper}+{lower}*{after}"]
    rest = [r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"]
    return "|".join([r"[\p{Han}]+", *words, *rest])


def read_ranks(path: Path) -> dict[bytes, int]:
    """Token bytes to rank from a tiktoken file, one `base64 rank` a line. Raises CheckpointError naming the first bad line."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_file(path).splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise CheckpointError(f"{path}: line {number} is not a base64 token and its rank") from error
    if not ranks or set(ranks.values()) != set(range(len(ranks))):
        raise CheckpointError(f"{path}: the ranks of its {len(ranks)} tokens are not 0 to {len(ranks) - 1}, each once")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise CheckpointError(f"{path}: no token for the single byte {missing[0]}")
    return ranks


def bounded_parts(text: str) -> Iterator[str]:
    """The text in parts that tiktoken can encode, cut where the published tokenizer cuts."""
    for offset in range(0, len(text), MAX_PART_CHARS):
        part = text[offset : offset + MAX_PART_CHARS]
        # One C call each, so that an ordinary text costs no Python loop.
        runs = [*part.split(), *re.findall(r"\s+", part)]
        if max(map(len, runs), default=0) <= MAX_RUN_CHARS:
            yield part
            continue
        start = 0
        for run in re.finditer(r"\S+|\s+", part):
            for cut in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS):
                yield part[start:cut]
                start = cut
        yield part[start:]


def _keeps_text(pre_tokenizer: Mapping[str, Any]) -> bool:
    kind = pre_tokenizer["type"]
    return kind in ("ByteLevel", "Metaspace", "Digits") or (kind == "Split" and pre_tokenizer["behavior"] != "Removed")


def _most_shrinking(normalizer: Mapping[str, Any]) -> int:
    """How many bytes of text can become one; 0 when there is no known limit."""
    kind = normalizer["type"]
    if kind == "NFC":
        return 3  # three conjoining jamo, 9 bytes, become one syllable of 3 bytes; the grave tone mark, 3 bytes, becomes 1
    if kind == "Prepend" or (kind == "Replace" and normalizer["pattern"] == {"String": " "} and normalizer["content"]):
        return 1
    return 0
