"""The header parser against damaged, hostile and random files."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from minserve.errors import CheckpointError
from minserve.models.safetensors_header import MAX_HEADER_BYTES, StoredTensor, read_header


def file_bytes(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


GOOD = {"a": entry("BF16", [2, 3], 0, 12), "b": entry("F32", [], 12, 16), "__metadata__": {"format": "pt"}}


def read(directory: Path, content: bytes) -> list[StoredTensor]:
    path = directory / "x.safetensors"
    path.write_bytes(content)
    return read_header(path)


def refusal(directory: Path, content: bytes) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(directory, content)
    assert "x.safetensors" in str(caught.value)
    return str(caught.value)


def test_a_good_file_is_read_as_the_library_reads_it(tmp_path: Path) -> None:
    tensors = {"b": torch.randn(3, 5), "a.c": torch.zeros(0, 4).bfloat16(), "d": torch.tensor(7), "e": torch.ones(3).bool()}
    save_file(tensors, tmp_path / "good.safetensors", metadata={"format": "pt"})
    found = {tensor.name: tensor for tensor in read_header(tmp_path / "good.safetensors")}
    assert {name: tensor.shape for name, tensor in found.items()} == {name: tuple(t.shape) for name, t in tensors.items()}
    body = (tmp_path / "good.safetensors").read_bytes()
    for name, tensor in tensors.items():
        assert body[found[name].begin : found[name].end] == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_trailing_spaces_of_the_header_are_padding(tmp_path: Path) -> None:
    padded = json.dumps(GOOD).encode() + b"   "
    assert [t.name for t in read(tmp_path, file_bytes(padded, bytes(16)))] == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes are too few"),
        (b"\x02\0\0", "3 bytes are too few"),
        (file_bytes(GOOD, bytes(15)), "1 byte missing"),
        (file_bytes(GOOD, bytes(8)), "8 bytes missing"),
        (file_bytes(GOOD, bytes(17)), "1 byte too many"),
        (file_bytes(GOOD)[:-20], "20 bytes missing"),
        (file_bytes(GOOD, length=MAX_HEADER_BYTES + 1), "at most 100,000,000 are allowed"),
        (file_bytes(GOOD, length=2**63 + 5), "are allowed"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "Git LFS pointer"),
        (file_bytes(b"[]"), "does not begin with"),
        (file_bytes(b'{"a": {}}'), "entry 'a' is not valid"),
        (file_bytes(b'{"a": 5}'), "entry 'a' is not valid"),
        (file_bytes(b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]'), "header is not valid"),
        (file_bytes(b'{"a": NaN}'), "header is not valid"),
        (file_bytes(b'{"a": ' * 50_000), "nested too deeply"),
        (file_bytes(b'{"\xff": 1}'), "header is not valid"),
        (file_bytes({"__metadata__": {"format": 1}}), "'__metadata__' is not valid"),
        (file_bytes({"a": entry("U8", [1], 0, 1) | {"more": 1}}, b"1"), "entry 'a' is not valid"),
        (file_bytes({"a": entry("U8", [-1], 0, 1)}, b"1"), "entry 'a' is not valid"),
        (file_bytes({"a": entry("U8", [1] * 9, 0, 1)}, b"1"), "entry 'a' is not valid"),
        (file_bytes({"a": {"dtype": "U8", "shape": [1.0], "data_offsets": [0, 1]}}, b"1"), "entry 'a' is not valid"),
        (file_bytes({"a": {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}}, b"1"), "entry 'a' is not valid"),
        (file_bytes({"a": entry("Q4", [1], 0, 1)}, b"1"), "a has the unknown dtype 'Q4'"),
        (file_bytes({"a": entry("F32", [2], 0, 4)}, bytes(4)), "a has 4 bytes, but F32 [2] takes 8"),
        (file_bytes({"a": entry("F4", [3], 0, 1)}, b"1"), "takes 1.5"),
        (file_bytes({"a": entry("U8", [2**61, 2**61, 2**61], 0, 1)}, b"1"), "a has 1 byte,"),
        (file_bytes({"a": entry("U8", [1], 1, 0)}, b"1"), "ends (at 0) before it begins (at 1)"),
        (file_bytes({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, bytes(3)), "b overlaps a by 1 byte"),
        (file_bytes({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 0, 2)}, bytes(2)), "b overlaps a by 2 bytes"),
        (file_bytes({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 5, 7)}, bytes(7)), "3 bytes between a and b"),
        (file_bytes({"a": entry("U8", [2], 4, 6)}, bytes(6)), "4 bytes between the header and a"),
        (file_bytes({"": entry("U8", [1], 0, 1)}, b"1"), "not a possible tensor name"),
        (file_bytes({"a\n": entry("U8", [1], 0, 1)}, b"1"), "not a possible tensor name"),
        (file_bytes({"n" * 1025: entry("U8", [1], 0, 1)}, b"1"), "not a possible tensor name"),
        (file_bytes(b'{"\\ud800": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}', b"1"), "not"),
    ],
)
def test_each_kind_of_damage_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    assert message in refusal(tmp_path, content)


ONE = '{"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}'


@pytest.mark.parametrize(
    "header",
    [
        f'{{"a": {ONE}, "a": {ONE}}}',
        f'{{"a" \n: {ONE}, "a"\t:{ONE}}}',
        f'{{"a": {ONE}, "\\u0061": {ONE}}}',
        f'{{"a": {ONE}, "__metadata__": {{"b": "", "b": "x\\":"}}}}',
        f'{{"__metadata__": {{"b": ""}}, "a": {ONE}, "__metadata__": {{"b": "", "c": ""}}}}',
        '{"a": {"dtype": "U8", "dtype": "I8", "shape": [1], "data_offsets": [0, 1]}}',
    ],
)
def test_a_repeated_key_is_refused(tmp_path: Path, header: str) -> None:
    assert "is there twice" in refusal(tmp_path, file_bytes(header.encode(), b"1"))


@pytest.mark.parametrize("text", ['":', '": ":', "a\nb"])
def test_what_only_looks_like_a_key_is_none(tmp_path: Path, text: str) -> None:
    metadata = {text: "", "b": text, "c": text}
    assert len(read(tmp_path, file_bytes(GOOD | {"__metadata__": metadata}, bytes(16)))) == 2


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    whole = file_bytes(GOOD, bytes(16))
    for size in range(len(whole)):
        refusal(tmp_path, whole[:size])


def test_a_huge_announced_header_allocates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 99_000_000))
        file.truncate(4096)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="bytes missing"):
            read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(CheckpointError, match="not a regular file"):
            read_header(tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header(tmp_path / "absent.safetensors")


def accepts_only_what_the_library_accepts(path: Path, content: bytes) -> bool:
    """True when we accept; then the reference parser must, with the same names and shapes."""
    path.write_bytes(content)
    try:
        found = {tensor.name: tensor.shape for tensor in read_header(path)}
    except CheckpointError:
        return False
    try:
        with safe_open(path, "pt") as file:
            assert {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()} == found  # noqa: SIM118
    except SafetensorError as error:
        raise AssertionError(f"accepted although the library says {error}") from error
    return True


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "x.safetensors"


@given(content=st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_fuzz_arbitrary_bytes(scratch: Path, content: bytes) -> None:
    accepts_only_what_the_library_accepts(scratch, content)


@given(
    cut=st.integers(0, 250),
    edits=st.lists(st.tuples(st.integers(0, 250), st.integers(0, 255)), max_size=4),
    insertion=st.tuples(st.integers(0, 250), st.binary(max_size=4)),
)
@settings(max_examples=500, deadline=None)
def test_fuzz_edits_of_a_good_file(scratch: Path, cut: int, edits: list[tuple[int, int]], insertion: tuple[int, bytes]) -> None:
    content = bytearray(file_bytes(GOOD, bytes(16)))
    for position, value in edits:
        content[position % len(content)] = value
    position, extra = insertion
    content[position:position] = extra
    accepts_only_what_the_library_accepts(scratch, bytes(content[: len(content) - cut if cut < len(content) - 100 else None]))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)
small = st.integers(0, 6)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "F4", "BF16", "F32", "X"]),
        "shape": st.lists(small, max_size=3),
        "data_offsets": st.tuples(small, small).map(list),
    }
)


@given(
    header=st.dictionaries(st.text(max_size=6) | st.just("__metadata__"), entries | json_values, max_size=4),
    data=st.binary(max_size=12),
)
@settings(max_examples=500, deadline=None)
def test_fuzz_structured_headers(scratch: Path, header: dict[str, Any], data: bytes) -> None:
    accepts_only_what_the_library_accepts(scratch, file_bytes(header, data))


@given(shapes=st.lists(st.lists(small, max_size=3), max_size=4))
@settings(max_examples=100, deadline=None)
def test_every_dense_file_is_accepted(scratch: Path, shapes: list[list[int]]) -> None:
    tensors = {f"t{index}": torch.zeros(shape, dtype=torch.bfloat16) for index, shape in enumerate(shapes)}
    save_file(tensors, scratch)
    assert accepts_only_what_the_library_accepts(scratch, scratch.read_bytes())
