"""`minserve check`, run as a process of its own: proves a checkpoint against its model without loading it, and its checksums.

Knows files and headers; the model is built on the meta device, so neither weights nor a GPU are touched.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import io
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from minserve.errors import CheckpointError, ExitCode, ServerError
from minserve.kernels import reference
from minserve.models.checkpoint import Checkpoint, open_checkpoint
from minserve.models.load_report import gigabytes
from minserve.models.registry import build_model, load_model_config
from minserve.models.safetensors_header import read_header
from minserve.models.tensor_names import named
from minserve.models.weight_reader import WeightReader
from minserve.models.weights import LoadProof, compare_tied_head, prove_load

PIECE_BYTES = 4 << 20
"""Read at a time; with one such buffer a thread, memory is bounded."""
TOKENIZER_FILES = ("tokenizer.json", "tiktoken.model")
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


class ManifestEntry(msgspec.Struct, frozen=True):
    """One tensor of a manifest: what it is, wherever it lies."""

    dtype: str
    shape: list[int]
    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """The checksums of a checkpoint's tensors by the names that its files spell."""

    minserve_manifest: int
    tensors: dict[str, ManifestEntry]


@dataclasses.dataclass(frozen=True, slots=True)
class Checksums:
    """What one pass over the weight files gave."""

    files: Mapping[Path, str]
    """sha256 of whole files."""
    tensors: Mapping[str, ManifestEntry]


def prove(directory: Path) -> tuple[Checkpoint, LoadProof, str]:
    """The proof of load up to the first byte of data, and the architecture. CheckpointError names every gap."""
    checkpoint = open_checkpoint(directory)
    config = load_model_config(directory)
    model = build_model(config, checkpoint.formats, reference.cpu(), torch.bfloat16, torch.device("meta"))
    return checkpoint, prove_load(model, checkpoint, list(model.destinations())), config.architecture


def compute_checksums(
    files: Sequence[Path], on_bytes: Callable[[int], None], *, by_tensor: bool, threads: int | None = None
) -> Checksums:
    """Reads each file once. `on_bytes(count)` is called from several threads."""
    with ThreadPoolExecutor(threads or min(8, os.cpu_count() or 1)) as pool:
        results = list(pool.map(lambda file: _hash_file(file, on_bytes, by_tensor), files))
    whole = {file: digest for file, (digest, _) in zip(files, results, strict=True)}
    return Checksums(whole, {name: entry for _, entries in results for name, entry in entries.items()})


def compare_with_manifest(manifest: Manifest, tensors: Mapping[str, ManifestEntry]) -> None:
    """CheckpointError with names and byte counts of what is missing, extra or different."""
    missing = [f"{name} ({entry.bytes:,} bytes)" for name, entry in manifest.tensors.items() if name not in tensors]
    extra = [f"{name} ({entry.bytes:,} bytes)" for name, entry in tensors.items() if name not in manifest.tensors]
    different = [
        f"{name} ({_difference(manifest.tensors[name], entry)})"
        for name, entry in tensors.items()
        if name in manifest.tensors and entry != manifest.tensors[name]
    ]
    kinds = {"differ from the manifest": different, "of the manifest are missing": missing, "are not in the manifest": extra}
    faults = [f"{len(found):,} tensors {what}: {named(found)}" for what, found in kinds.items() if found]
    if faults:
        raise CheckpointError(". ".join(faults))


def blob_names(directory: Path) -> dict[Path, str]:
    """Files that are links into a hub cache, and the checksums that their targets' names are: sha256, or git's sha1."""
    found = {}
    for file in sorted(directory.iterdir()):
        target = Path(os.readlink(file)) if file.is_symlink() else Path()
        if target.parent.name == "blobs" and _BLOB.fullmatch(target.name):
            found[file] = target.name
    return found


def compare_with_blobs(blobs: Mapping[Path, str], files: Mapping[Path, str]) -> None:
    """CheckpointError naming each file whose content is not what the cache's name says."""
    wrong = []
    for file, blob in blobs.items():
        try:
            actual = _git_sha1(file) if len(blob) == 40 else files.get(file) or _digest(file, hashlib.sha256)
            if actual != blob:
                wrong.append(f"{file.name} ({file.stat().st_size:,} bytes) has {actual}, its blob is {blob}")
        except OSError as error:
            wrong.append(f"{file.name} cannot be read: {error.strerror}")
    if wrong:
        raise CheckpointError(f"{len(wrong)} of {len(blobs)} files are damaged: {named(wrong)}")


def read_manifest(path: Path) -> Manifest:
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except OSError as error:
        raise CheckpointError(f"manifest {path} cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path} is no manifest of minserve check: {error}") from error
    if manifest.minserve_manifest != 1:
        raise CheckpointError(f"{path}: manifest version {manifest.minserve_manifest} is not known; known: 1")
    return manifest


def write_manifest(path: Path, tensors: Mapping[str, ManifestEntry]) -> None:
    body = {"minserve_manifest": 1, "tensors": {name: msgspec.to_builtins(tensors[name]) for name in sorted(tensors)}}
    try:
        path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"manifest {path} cannot be written: {error.strerror}") from error


def check(directory: Path, manifest: Path | None, new_manifest: Path | None) -> str:
    """All of it; the page that says what was proven. ServerError for the first stage that fails."""
    expected = None if manifest is None else read_manifest(manifest)
    checkpoint, proof, architecture = prove(directory)
    with WeightReader(checkpoint.files) as reader:
        notes = [*checkpoint.notes, *compare_tied_head(proof, checkpoint, reader)]
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        notes.append(f"neither {' nor '.join(TOKENIZER_FILES)} is there: a server will need --tokenizer")
    blobs = blob_names(directory)
    by_tensor = expected is not None or new_manifest is not None
    lines = [f"checked    {directory}", f"files      {len(checkpoint.files):,}, whole to the byte"]
    size = gigabytes(sum(tensor.num_bytes for tensor in proof.sources.values()))
    lines += [f"model      {architecture}: {len(proof.sources):,} tensors, {size} fill every parameter exactly once"]
    kinds = checkpoint.formats.count(proof.sources)
    lines += [f"formats    {', '.join(f'{count:,} {kind}' for kind, count in sorted(kinds.items()))}"]
    lines += [f"skipped    {left.tensors:,} tensors, {gigabytes(left.bytes)}: {why}" for why, left in proof.skipped.items()]
    if by_tensor or blobs:
        checksums = _with_progress(checkpoint.files, by_tensor=by_tensor)
        if blobs:
            compare_with_blobs(blobs, checksums.files)
            lines.append(f"checksums  {len(blobs):,} files are what the hub cache's blob names say")
        if expected is not None:
            compare_with_manifest(expected, checksums.tensors)
            lines.append(f"checksums  {len(expected.tensors):,} tensors are what {manifest} says")
        if new_manifest is not None:
            write_manifest(new_manifest, checksums.tensors)
            lines.append(f"manifest   {len(checksums.tensors):,} tensors written to {new_manifest}")
    else:
        lines.append("checksums  not compared: no hub cache and no --manifest (--write-manifest makes one)")
    return "\n".join([*lines, *(f"note       {note}" for note in notes)])


def main() -> int:
    logging.basicConfig(level="WARNING")
    parser = argparse.ArgumentParser(prog="minserve check")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--manifest", type=Path)
    parser.add_argument("--write-manifest", type=Path)
    arguments = parser.parse_args()
    try:
        page = check(arguments.directory, arguments.manifest, arguments.write_manifest)
    except ServerError as error:
        sys.stderr.write(f"minserve: error: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    sys.stdout.write(page + "\n")
    return ExitCode.OK


def _with_progress(files: Sequence[Path], *, by_tensor: bool) -> Checksums:
    columns = TextColumn("checksums"), BarColumn(40), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    shown = Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    with shown as bar:
        task = bar.add_task("", total=sum(file.stat().st_size for file in files))
        return compute_checksums(files, lambda count: bar.advance(task, count), by_tensor=by_tensor)


def _hash_file(path: Path, on_bytes: Callable[[int], None], by_tensor: bool) -> tuple[str, dict[str, ManifestEntry]]:
    """(sha256 of the whole file, its tensors). The proven ranges follow each other without a gap, so one pass serves both."""
    tensors = read_header(path) if by_tensor else []
    whole, entries = hashlib.sha256(), {}
    buffer = memoryview(bytearray(PIECE_BYTES))
    try:
        with path.open("rb", buffering=0) as file:
            _feed([whole], file, tensors[0].begin if tensors else path.stat().st_size, buffer, on_bytes)
            for tensor in tensors:
                own = hashlib.sha256()
                if _feed([whole, own], file, tensor.num_bytes, buffer, on_bytes):
                    raise CheckpointError(f"{path}: {tensor.name} was cut short while it was read")
                entries[tensor.name] = ManifestEntry(tensor.dtype, list(tensor.shape), tensor.num_bytes, own.hexdigest())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    return whole.hexdigest(), entries


def _feed(
    digests: Sequence[hashlib._Hash], file: io.FileIO, count: int, buffer: memoryview, on_bytes: Callable[[int], None]
) -> int:
    """Feeds the next `count` bytes; how many of them were not there."""
    while count and (got := file.readinto(buffer[: min(count, len(buffer))])):
        for digest in digests:
            digest.update(buffer[:got])
        on_bytes(got)
        count -= got
    return count


def _difference(expected: ManifestEntry, actual: ManifestEntry) -> str:
    if (expected.dtype, expected.shape) != (actual.dtype, actual.shape):
        return f"{actual.dtype} {actual.shape} and not {expected.dtype} {expected.shape}"
    return f"{actual.bytes:,} bytes"


def _digest(path: Path, begin: Callable[[], hashlib._Hash]) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, begin).hexdigest()


def _git_sha1(path: Path) -> str:
    header = f"blob {path.stat().st_size}\0".encode()
    return _digest(path, lambda: hashlib.sha1(header, usedforsecurity=False))


if __name__ == "__main__":
    sys.exit(main())
