"""Opens a checkpoint directory and proves it whole before a byte of weights is read. Knows files and names, no model.

The index is the authority: what it names must be there, exactly once and exactly as long as promised; what it does not name is
left alone with a note. Names become canonical here: wrapper prefixes are stripped, parts for other modalities set aside.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from minserve.errors import CheckpointError
from minserve.models.formats import LAYOUTS, PACKED_SHAPE, Formats, formats_from_tensors, set_aside_reason
from minserve.models.quantization_claim import config_disagreements
from minserve.models.safetensors_header import StoredTensor, prove_header, read_header_bytes, refuse_repeated_keys
from minserve.models.tensor_names import OTHER_MODALITIES, canonical_name, named
from minserve.quantization import quantization_section, read_config_json

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_JSON_BYTES = 256 << 20

_HEADER_THREADS = 8


class _Index(msgspec.Struct):
    weight_map: dict[str, str]
    metadata: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """A proven checkpoint: every tensor below lies whole in its file."""

    directory: Path
    tensors: Mapping[str, StoredTensor]
    """By canonical name."""
    set_aside: Mapping[str, tuple[StoredTensor, ...]]
    """Reason to tensors that no text model wants."""
    formats: Formats
    notes: tuple[str, ...]
    """What a person should know and the load survives."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(sorted({tensor.file for tensor in self.tensors.values()}))


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Each full collection walks through all of torch's objects: a tenth of a second, several times in a load."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@collector_paused()
def open_checkpoint(model_dir: Path) -> Checkpoint:
    """Reads index and headers. CheckpointError names the file, the tensor and the bytes of any gap."""
    if not model_dir.is_dir():
        raise CheckpointError(f"{model_dir} is not a directory")
    index = _read_index(model_dir / INDEX_NAME) if os.path.lexists(model_dir / INDEX_NAME) else None
    files = _indexed_files(model_dir, index)
    notes = _stray_notes(model_dir, files, SINGLE_NAME if index is None else INDEX_NAME)
    headers = _read_headers(files)
    if index is None:
        stored = [tensor for header in headers.values() for tensor in header]
    else:
        stored, more = _prove_index(model_dir, index, headers)
        notes += more
    tensors, other = _canonical_tensors(stored)
    if not tensors:
        raise CheckpointError(f"{model_dir}: the checkpoint holds no tensor of a text model")
    formats = formats_from_tensors(tensors)
    _prove_packed_shapes(tensors)
    set_aside = {"not for text (vision)": other} if other else {}
    for name in [name for name in tensors if set_aside_reason(name)]:
        set_aside.setdefault(str(set_aside_reason(name)), []).append(tensors.pop(name))
    notes += config_disagreements(tensors, formats, read_quantization_config(model_dir))
    return Checkpoint(model_dir, tensors, {reason: tuple(found) for reason, found in set_aside.items()}, formats, tuple(notes))


def read_quantization_config(model_dir: Path) -> Mapping[str, Any] | None:
    """The quantisation section, wherever releases keep it: config.json, its text_config, or hf_quant_config.json."""
    return quantization_section(read_config_json(model_dir)) or None


def _read_index(path: Path) -> _Index:
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: {size:,} bytes are too many for a JSON file of a checkpoint")
        body = path.read_bytes()
        index = msgspec.json.decode(body, type=_Index)
        refuse_repeated_keys(body, kept=1 + len(index.weight_map) + (0 if index.metadata is None else 1 + len(index.metadata)))
    except OSError as error:
        raise CheckpointError(f"{path}: {_why_unreadable(path, error)}") from None
    except RecursionError:
        raise CheckpointError(f"{path} is not valid: nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid: {error}") from None
    if not index.weight_map:
        raise CheckpointError(f"{path}: weight_map is empty")
    for file in sorted(set(index.weight_map.values())):
        parts = PurePosixPath(file)
        if not file.endswith(".safetensors") or parts.is_absolute() or ".." in parts.parts or not file.isprintable():
            raise CheckpointError(f"{path}: weight_map names {file!r:.200}, which is not a safetensors file beside the index")
    return index


def _indexed_files(model_dir: Path, index: _Index | None) -> list[Path]:
    """The weight files, all of them there."""
    if index is None and not os.path.lexists(model_dir / SINGLE_NAME):
        raise CheckpointError(_nothing_to_load(model_dir))
    promised = Counter(index.weight_map.values() if index else [SINGLE_NAME])
    files = [model_dir / name for name in sorted(promised)]
    absent = []
    for file in files:
        try:
            file.stat()
        except OSError as error:
            holds = f", with {promised[file.name]:,} tensors" if index else ""
            absent.append(f"{file.name} {_why_unreadable(file, error)}{holds}")
    if absent:
        by_whom = INDEX_NAME if index else "the checkpoint"
        raise CheckpointError(
            f"{model_dir}: {len(absent)} of {len(files)} files that {by_whom} names cannot be read: {named(absent)}"
        )
    return files


def _read_headers(files: list[Path]) -> dict[Path, list[StoredTensor]]:
    """CheckpointError with what is wrong in each of the files."""

    headers, faults = {}, []
    with ThreadPoolExecutor(_HEADER_THREADS) as pool:
        readings = {file: pool.submit(read_header_bytes, file) for file in files}
        for file, reading in readings.items():  # proving is not for threads, which would wait for each other's Python
            try:
                headers[file] = prove_header(file, *reading.result())
            except CheckpointError as error:
                faults.append(error)
    if faults:
        raise CheckpointError(named(faults))
    return headers


def _why_unreadable(path: Path, error: OSError) -> str:
    if os.path.islink(path) and not os.path.exists(path):
        return f"is a dangling link to {os.readlink(path)} (an incomplete download?)"
    return "is not there" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"


def _nothing_to_load(model_dir: Path) -> str:
    shards = sorted(file.name for file in model_dir.glob("*.safetensors"))
    if shards:
        return f"{model_dir}: neither {INDEX_NAME} nor {SINGLE_NAME} says which of these are the model: {named(shards)}"
    pickles = [file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in sorted(model_dir.glob(pattern))]
    kind = f"; only safetensors can be loaded, not {named(pickles)}" if pickles else ""
    return f"{model_dir}: no {SINGLE_NAME} and no {INDEX_NAME}{kind}"


def _stray_notes(model_dir: Path, files: list[Path], authority: str) -> list[str]:
    strays = sorted({file.name for file in model_dir.glob("*.safetensors")} - {file.name for file in files})
    return [f"ignored, since {authority} is the whole model: {named(strays)}"] if strays else []


def _prove_index(
    model_dir: Path, index: _Index, headers: Mapping[Path, list[StoredTensor]]
) -> tuple[list[StoredTensor], list[str]]:
    """The tensors that the index names, each from its file, and notes."""
    holders: dict[str, list[StoredTensor]] = {}
    for header in headers.values():
        for tensor in header:
            holders.setdefault(tensor.name, []).append(tensor)
    twice = [f"{name} in {named(t.file.name for t in found)}" for name, found in holders.items() if len(found) > 1]
    if twice:
        raise CheckpointError(f"{model_dir}: tensors that are in more than one indexed file: {named(twice)}")
    gaps = []
    at = {path: path for path in headers}
    paths = {file: at[model_dir / file] for file in set(index.weight_map.values())}
    for name, file in index.weight_map.items():
        found = holders.get(name)
        if not found:
            gaps.append(f"{name:.200} is not in {file}")
        elif found[0].file is not paths[file]:
            gaps.append(f"{name} is not in {file} but in {found[0].file.name}")
    if gaps:
        raise CheckpointError(f"{model_dir / INDEX_NAME} disagrees with the files: {named(gaps)}")
    notes = []
    unlisted = [name for name in holders if name not in index.weight_map]
    if unlisted:
        notes.append(f"ignored, since {INDEX_NAME} does not list them: {named(unlisted)}")
    stored = [holders[name][0] for name in index.weight_map]
    actual, promised = sum(tensor.num_bytes for tensor in stored), (index.metadata or {}).get("total_size")
    if promised is not None and promised != actual:
        notes.append(f"{INDEX_NAME} says total_size {promised!s:.40}, its tensors have {actual:,} bytes")
    return stored, notes


def _canonical_tensors(stored: Iterable[StoredTensor]) -> tuple[dict[str, StoredTensor], list[StoredTensor]]:
    """Tensors of the text model by canonical name, and those of other modalities."""
    tensors: dict[str, StoredTensor] = {}
    other: list[StoredTensor] = []
    for tensor in stored:
        name = canonical_name(tensor.name)
        if name.startswith(OTHER_MODALITIES):
            other.append(tensor)
        elif name in tensors:
            raise CheckpointError(f"{tensors[name]} and {tensor} are both {name}")
        else:
            tensors[name] = tensor
    return tensors, other


def _prove_packed_shapes(tensors: Mapping[str, StoredTensor]) -> None:
    """Every `weight_shape` says the rows and columns of its packed weight. These few bytes are read here, since they are
    part of the proof and of no model."""
    shapes = [name for name in tensors if name.endswith(f".weight{PACKED_SHAPE}")]

    def said(name: str) -> tuple[int, ...]:
        tensor = tensors[name]
        with tensor.file.open("rb") as file:
            file.seek(tensor.begin)
            body = file.read(tensor.num_bytes)
        return tuple(item for (item,) in struct.iter_unpack("<q" if tensor.dtype == "I64" else "<i", body))

    with ThreadPoolExecutor(_HEADER_THREADS) as pool:
        for name, shape in zip(shapes, pool.map(said, shapes, chunksize=64), strict=True):
            packed = tensors[name.removesuffix(PACKED_SHAPE) + "_packed"]
            actual = (packed.shape[0], packed.shape[1] * LAYOUTS["int4_group"].packed)
            if shape != actual:
                raise CheckpointError(f"{tensors[name]} says {list(shape)}, but {packed} is {list(actual)}")
