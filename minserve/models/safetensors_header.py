"""Reads one safetensors file's header and proves it: names, types, shapes, byte ranges. Reads no data, knows no model.

Format: 8 bytes little-endian header length, a JSON object padded with spaces, then the data, densely covered by the tensors'
ranges (github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from minserve.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit; a larger length is damage, and nothing is allocated for it."""
MAX_DIMENSIONS = 8
MAX_NAME_LENGTH = 1024

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
"""Bits an element; sub-byte types are packed."""

_LFS_POINTER = b"version https://git-lfs"
_KEY_END = re.compile(rb'"\s*:')
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class StoredTensor(msgspec.Struct, frozen=True):
    """One tensor as it lies in a file. `begin` and `end` are absolute byte offsets.

    A struct, since there are a hundred thousand of them and a dataclass takes several times as long to make.
    """

    name: str
    """As the file spells it."""
    file: Path
    dtype: str
    """As the file spells it: `BF16`, `F8_E4M3`."""
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} {list(self.shape)} in {self.file.name}"


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    data_offsets: tuple[_Count, _Count]


_decode_header = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_entry = msgspec.json.Decoder(_Entry).decode
_decode_metadata = msgspec.json.Decoder(dict[str, str]).decode


class _RepeatedKey(Exception):
    pass


def read_header(path: Path) -> list[StoredTensor]:
    """The file's tensors by rising offset. CheckpointError, with byte counts, on anything short of a dense and exact file."""
    return prove_header(path, *read_header_bytes(path))


def prove_header(path: Path, size: int, raw: bytes) -> list[StoredTensor]:
    """The same from the header's bytes and the whole file's size."""
    data_start = 8 + len(raw)
    tensors = [_prove_entry(path, name, entry, data_start) for name, entry in _parse(path, raw).items()]
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    _prove_layout(path, tensors, data_start, size)
    return tensors


def count_bytes(count: int) -> str:
    return f"{count:,} byte{'' if count == 1 else 's'}"


def refuse_repeated_keys(body: bytes, kept: int) -> None:
    """ValueError when an object of this valid JSON has a key twice.

    `kept` is the number of keys, different ones within each object, that were decoded from it. Every key of the text is a quote
    before a colon: if there are no more of these than keys were kept, nothing was repeated. Else all is decoded once more.
    """
    if len(_KEY_END.findall(body)) == kept:
        return
    try:
        json.loads(body, object_pairs_hook=_refuse_repeats)
    except _RepeatedKey as error:
        raise ValueError(f"the key {error.args[0]!r:.200} is there twice") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse_repeats(pairs: Sequence[tuple[str, object]]) -> None:
    """Returns nothing, so that no second copy of the document is built."""
    if len({name for name, _ in pairs}) == len(pairs):
        return
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise _RepeatedKey(name)
        seen.add(name)


def read_header_bytes(path: Path) -> tuple[int, bytes]:
    """(file size, header without its length word); refuses before reading what the file cannot hold."""
    try:
        # Asked before opening, since opening a pipe would wait for ever.
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(f"{path} is not a regular file")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            first = file.read(8)
            if len(first) < 8:
                raise CheckpointError(f"{path}: {count_bytes(size)} are too few for a safetensors file; it is cut short")
            (length,) = struct.unpack("<Q", first)
            if _LFS_POINTER.startswith(first):
                raise CheckpointError(f"{path} is a Git LFS pointer and not the weights; fetch them with `git lfs pull`")
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path}: a header of {length:,} bytes is announced, at most {MAX_HEADER_BYTES:,} are allowed"
                )
            if 8 + length > size:
                raise CheckpointError(
                    f"{path}: the file ends inside its header: {count_bytes(8 + length - size)} missing "
                    f"(header of {length:,} bytes, file of {size:,})"
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    if len(raw) < length:
        raise CheckpointError(f"{path}: {count_bytes(length - len(raw))} of the header vanished while it was read")
    return size, raw


def _parse(path: Path, raw: bytes) -> dict[str, _Entry]:
    if not raw.startswith(b"{"):
        raise CheckpointError(f"{path}: the header does not begin with '{{'; this is not a safetensors file")
    try:
        members: dict[str, msgspec.Raw] = _decode_header(raw)
    except RecursionError:
        raise CheckpointError(f"{path}: the header is not valid: nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: the header is not valid: {error}") from None
    entries, keys = {}, len(members)
    for name, body in members.items():
        try:
            if name == "__metadata__":
                keys += len(_decode_metadata(body))
            else:
                entries[name] = _decode_entry(body)
        except ValueError as error:
            raise CheckpointError(f"{path}: the header's entry {name!r:.200} is not valid: {error}") from None
    try:
        refuse_repeated_keys(raw, keys + len(entries) * len(_Entry.__struct_fields__))
    except ValueError as error:
        raise CheckpointError(f"{path}: the header is not valid: {error}") from None
    return entries


def _prove_entry(path: Path, name: str, entry: _Entry, data_start: int) -> StoredTensor:
    if not name or len(name) > MAX_NAME_LENGTH or not name.isprintable():
        raise CheckpointError(f"{path}: {name!r:.200} is not a possible tensor name")
    bits = DTYPE_BITS.get(entry.dtype)
    if bits is None:
        raise CheckpointError(f"{path}: {name} has the unknown dtype {entry.dtype!r:.200}")
    begin, end = entry.data_offsets
    if begin > end:
        raise CheckpointError(f"{path}: {name} ends (at {end:,}) before it begins (at {begin:,})")
    expected_bits = math.prod(entry.shape) * bits
    if expected_bits % 8 or expected_bits // 8 != end - begin:
        form = f"{entry.dtype} {list(entry.shape)}"
        raise CheckpointError(f"{path}: {name} has {count_bytes(end - begin)}, but {form} takes {expected_bits / 8:,.10g}")
    return StoredTensor(name, path, entry.dtype, entry.shape, data_start + begin, data_start + end)


def _prove_layout(path: Path, tensors: list[StoredTensor], data_start: int, size: int) -> None:
    """Ranges follow each other without overlap or hole, from the header's end to the file's end."""
    position, before = data_start, "the header"
    for tensor in tensors:
        if tensor.begin < position:
            raise CheckpointError(f"{path}: {tensor.name} overlaps {before} by {count_bytes(position - tensor.begin)}")
        if tensor.begin > position:
            raise CheckpointError(
                f"{path}: {count_bytes(tensor.begin - position)} between {before} and {tensor.name} belong to no tensor"
            )
        position, before = tensor.end, tensor.name
    if size < position:
        raise CheckpointError(
            f"{path}: {count_bytes(position - size)} missing (the header needs {position:,}, the file has {size:,})"
        )
    if size > position:
        raise CheckpointError(
            f"{path}: {count_bytes(size - position)} too many (the header needs {position:,}, the file has {size:,})"
        )
