"""The text that each token id stands for, and the rule that joins such pieces. Knows nothing of encoding or templates.

A tokenizer's decoder is read as data once, so that text can be grown token by token without decoding anything twice.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from minserve.errors import CheckpointError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclasses.dataclass(frozen=True, slots=True)
class TokenPieces:
    """Every id's bytes and how they become text.

    `kind` is "bytes" when the concatenated pieces are UTF-8 that may break anywhere (byte-level BPE, tiktoken), or "text"
    when each piece is whole text but for single-byte fallback tokens (SentencePiece style).
    """

    kind: Literal["bytes", "text"]
    pieces: tuple[bytes, ...]
    """By token id; empty for ids that the tokenizer does not have."""
    special: frozenset[int]
    """What `skip_special_tokens` leaves out."""
    byte_tokens: frozenset[int] = frozenset()
    """Kind "text" only: tokens that are one raw byte each. A run of them that is not UTF-8 becomes one U+FFFD a byte."""
    separator: str = ""
    """Put between two tokens."""
    first_pieces: tuple[bytes, ...] | None = None
    """Used in place of `pieces` for the first token of a text (Metaspace drops its marker there)."""
    text_start_strip: tuple[str, int] = ("", 0)
    """A character, and how many of it are taken from the front of a text (Strip)."""

    def piece(self, token_id: int) -> bytes:
        """The bytes of one token on its own, nothing stripped; empty for an unknown id."""
        return self.pieces[token_id] if 0 <= token_id < len(self.pieces) else b""


def pieces_of_decoder(decoder: Mapping[str, Any] | None, vocabulary: Mapping[str, int], special: frozenset[int]) -> TokenPieces:
    """Pieces for the `decoder` section of a tokenizer.json; `vocabulary` is token to id, added tokens included.

    Raises CheckpointError for a decoder step that is unknown here or that looks at later tokens.
    """
    steps = steps_of(decoder, "decoders")
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return TokenPieces("bytes", _by_id(vocabulary, _byte_level_piece()), special)
    if not steps:
        return TokenPieces("text", _by_id(vocabulary, str.encode), special, separator=" ")
    if [step["type"] for step in steps] == ["Metaspace"]:
        return _metaspace(steps[0], vocabulary, special)
    return _sentencepiece(steps, vocabulary, special)


def byte_level_alphabet() -> dict[int, str]:
    """The printable character that stands for each byte in byte-level BPE (the table published with GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in table]
    table.update({byte: chr(256 + offset) for offset, byte in enumerate(others)})
    return table


def steps_of(section: Mapping[str, Any] | None, children: str) -> list[Mapping[str, Any]]:
    """A section of a tokenizer.json as the steps that it is made of; `children`: what a sequence calls them."""
    if section is None:
        return []
    if section["type"] == "Sequence":
        return [step for child in section[children] for step in steps_of(child, children)]
    return [section]


def _by_id(vocabulary: Mapping[str, int], to_piece: Callable[[str], bytes]) -> tuple[bytes, ...]:
    pieces = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        pieces[token_id] = to_piece(token)
    return tuple(pieces)


def _byte_level_piece() -> Callable[[str], bytes]:
    """A function from token to bytes: the alphabet's bytes, or plain UTF-8 when any character is outside the alphabet."""
    to_byte = {ord(character): byte for byte, character in byte_level_alphabet().items()}
    # Latin-1 characters outside the alphabet (space, controls) must fail the encoding below, so they leave its range.
    to_byte.update({code: 0xFFFD for code in range(256) if code not in to_byte})

    def piece(token: str) -> bytes:
        try:
            return token.translate(to_byte).encode("latin-1")
        except UnicodeEncodeError:
            return token.encode()

    return piece


def _metaspace(step: Mapping[str, Any], vocabulary: Mapping[str, int], special: frozenset[int]) -> TokenPieces:
    marker = step["replacement"]
    pieces = _by_id(vocabulary, lambda token: token.replace(marker, " ").encode())
    first = None
    if step.get("prepend_scheme", "always") != "never":
        first = _by_id(vocabulary, lambda token: token.replace(marker, "").encode())
    return TokenPieces("text", pieces, special, first_pieces=first)


def _sentencepiece(steps: list[Mapping[str, Any]], vocabulary: Mapping[str, int], special: frozenset[int]) -> TokenPieces:
    """Replace, ByteFallback, Fuse and then Strip: steps that act on each token alone or on the text's start."""
    replacements: list[tuple[str, str]] = []
    byte_fallback = fused = False
    strip = ("", 0)
    for step in steps:
        kind = step["type"]
        if kind == "Replace" and "String" in step["pattern"] and not byte_fallback and not fused:
            replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "ByteFallback" and not fused:
            byte_fallback = True
        elif kind == "Fuse":
            fused = True
        elif kind == "Strip" and fused and step["stop"] == 0 and not strip[1]:
            strip = (step["content"], step["start"])
        else:
            raise CheckpointError(f"tokenizer.json: decoder step {kind} of {[s['type'] for s in steps]} is not supported")

    def as_byte(token: str) -> re.Match[str] | None:
        return _BYTE_TOKEN.fullmatch(token) if byte_fallback else None

    def piece(token: str) -> bytes:
        if match := as_byte(token):
            return bytes([int(match[1], 16)])
        for old, new in replacements:
            token = token.replace(old, new)
        return token.encode()

    byte_tokens = frozenset(token_id for token, token_id in vocabulary.items() if as_byte(token))
    return TokenPieces("text", _by_id(vocabulary, piece), special, byte_tokens, text_start_strip=strip)
