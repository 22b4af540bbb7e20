"""Fills a model from a checkpoint and proves that it did, or fills it with random values. Knows no architecture.

The model says where tensors go (`destinations`) and which it does not want (`ignored`); the checkpoint is proven before
(checkpoint.py); bytes are moved by weight_reader.py.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from minserve.errors import CheckpointError
from minserve.models.checkpoint import Checkpoint, collector_paused, open_checkpoint
from minserve.models.coverage import prove_coverage
from minserve.models.destinations import Destination
from minserve.models.formats import LAYOUTS, Formats, stored_names
from minserve.models.layers.embedding import EMBEDDING, HEAD
from minserve.models.load_report import LoadReport, Skipped
from minserve.models.quantization_claim import formats_from_config
from minserve.models.safetensors_header import StoredTensor, count_bytes
from minserve.models.tensor_names import named
from minserve.models.weight_reader import PIECE_BYTES, TORCH_DTYPES, Transfer, WeightReader

__all__ = ["Checkpoint", "Formats", "LoadReport", "dummy_weights", "formats_from_config", "load_weights", "open_checkpoint"]

_FLOATS = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})
_DUMMY_STD = 0.02
_DUMMY_FP8_STD = 64.0
"""Spread of random FP8 values before their scale: well inside e4m3's normal range of 2**-6 to 448."""
_DUMMY_INT4_STD = 21.25**0.5
"""Spread of uniform values from -8 to 7."""


class LoadableModel(Protocol):
    """What the loader needs of a model."""

    def destinations(self) -> Iterable[Destination]:
        """Every checkpoint tensor that the model wants and where it goes; one tensor may have several places."""
        ...

    def ignored(self, name: str) -> str | None:
        """Why a checkpoint tensor without a destination may be left on disk, or None: then it is an error."""
        ...

    def state_dict(self) -> Mapping[str, Tensor]:
        """Parameters and persistent buffers: all that must be written. What `finish_load` derives is not among them."""
        ...


@collector_paused()
def load_weights(
    model: LoadableModel,
    checkpoint: Checkpoint,
    on_progress: Callable[[int, int], None] | None = None,
    threads: int | None = None,
) -> LoadReport:
    """Reads every tensor that the model wants into its place, casting to the parameter's type.

    Before the first byte is read it is proven that each destination has its tensor, of the same shape and of a type that fits;
    that each tensor has a destination or a reason to be skipped; and that each byte of each parameter is written exactly once.
    `on_progress(bytes so far, bytes in all)`. CheckpointError names what is wrong.
    """
    started = time.monotonic()
    done = total = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if on_progress is not None:
            on_progress(done, total)

    notes = list(checkpoint.notes)
    device = next((tensor.device for tensor in model.state_dict().values()), torch.device("cpu"))
    with torch.inference_mode(), WeightReader(checkpoint.files, device, threads) as reader:
        proof = prove_load(model, checkpoint, list(model.destinations()))
        total = sum(tensor.num_bytes for transfer in proof.transfers for tensor in transfer.sources)
        reader.run(proof.transfers, advance)
        notes += compare_tied_head(proof, checkpoint, reader)
    if done != total:
        raise CheckpointError(f"{checkpoint.directory}: {done:,} bytes were read where {total:,} were planned")
    return LoadReport(
        directory=checkpoint.directory,
        files=len({tensor.file for tensor in proof.sources.values()}),
        tensors=len(proof.sources),
        bytes_read=total,
        bytes_written=proof.bytes_written,
        formats=checkpoint.formats.count(proof.sources),
        dequantized=sum(bool(transfer.scales) for transfer in proof.transfers),
        skipped=proof.skipped,
        notes=tuple(notes),
        seconds=time.monotonic() - started,
    )


def dummy_weights(model: LoadableModel, seed: int) -> LoadReport:
    """Random values without a file: matrices normal with std 0.02, in bf16's numbers where they are fp32, norms 1, biases 0, FP8
    with scales of the same effect.

    Each tensor's values depend on its name and the seed alone, so ranks with different experts agree on the model.
    """
    started = time.monotonic()
    destinations = list(model.destinations())
    bytes_written = prove_coverage(model.state_dict(), destinations)
    with torch.inference_mode():
        generator = torch.Generator(destinations[0].target.device)
        for destination in destinations:
            _fill(destination, seed, generator)
    return LoadReport(directory=None, bytes_written=bytes_written, seconds=time.monotonic() - started)


@dataclasses.dataclass(frozen=True, slots=True)
class LoadProof:
    """What a load will read and leave, proven before it reads anything."""

    transfers: list[Transfer]
    """One a destination."""
    sources: Mapping[str, StoredTensor]
    """The tensors to be read, by canonical name."""
    skipped: Mapping[str, Skipped]
    """By reason."""
    bytes_written: int


def prove_load(model: LoadableModel, checkpoint: Checkpoint, destinations: Sequence[Destination]) -> LoadProof:
    """Works on the meta device as well. All that is missing, misshapen or unknown goes into one CheckpointError."""
    transfers, missing, misfits, unknown, missing_bytes = [], [], [], [], 0
    stored, sources = checkpoint.tensors, dict[str, StoredTensor]()
    for destination in destinations:
        name, *scales = stored_names(destination.name, destination.widen_from)
        found = [sources.setdefault(part, stored[part]) for part in (name, *scales) if part in stored]
        if name not in stored:
            missing.append(f"{name} {list(destination.target.shape)}")
            missing_bytes += destination.target.nbytes
        elif (misfit := _misfit(destination, found[0], checkpoint.formats)) is not None:
            misfits.append(misfit)
        else:
            transfers.append(Transfer(found[0], destination.target, destination.widen_from, tuple(found[1:])))
    skipped = {reason: [*tensors] for reason, tensors in checkpoint.set_aside.items()}
    for name, tensor in stored.items():
        if name not in sources:
            reason = model.ignored(name)
            if reason is None:
                unknown.append(tensor)
            else:
                skipped.setdefault(reason, []).append(tensor)
    faults = []
    if missing:
        size = f"{count_bytes(missing_bytes)} of parameters"
        faults.append(f"{len(missing):,} tensors that the model needs are missing: {named(missing)} ({size})")
    if any(text.startswith(f"{HEAD} ") for text in missing):
        faults.append(f"{HEAD} may only be absent when the config says tie_word_embeddings")
    if misfits:
        faults.append(f"{len(misfits):,} tensors do not fit the model: {named(misfits)}")
    if unknown:
        size = count_bytes(sum(tensor.num_bytes for tensor in unknown))
        faults.append(f"{len(unknown):,} tensors are unknown to the model: {named(unknown)} ({size})")
    if faults:
        faults += checkpoint.notes  # a tensor that the index forgot is named there
        raise CheckpointError(f"{checkpoint.directory}: {'. '.join(faults)}")
    left = {reason: Skipped(len(tensors), sum(t.num_bytes for t in tensors)) for reason, tensors in skipped.items()}
    return LoadProof(transfers, sources, left, prove_coverage(model.state_dict(), destinations))


def _misfit(destination: Destination, tensor: StoredTensor, formats: Formats) -> str | None:
    """Why the stored tensor cannot fill its destination; None when it can."""
    target, kind, shape = destination.target, destination.widen_from, tensor.shape
    if kind != "plain" and shape:
        shape = (*shape[:-1], shape[-1] * LAYOUTS[kind].packed)
    if target.shape != shape:
        return f"{tensor} where the model has {list(target.shape)}"
    stored = TORCH_DTYPES.get(tensor.dtype)
    if kind != "plain":
        if formats.of(destination.name) != kind:
            return f"{tensor} is to be widened but is not {LAYOUTS[kind].title}"
        fits = target.dtype in _FLOATS
    elif stored in _FLOATS:
        fits = target.dtype in _FLOATS
    else:
        fits = target.dtype == stored
    return None if fits else f"{tensor} where the model has {target.dtype}"


def compare_tied_head(proof: LoadProof, checkpoint: Checkpoint, reader: WeightReader) -> list[str]:
    """A head that is stored although the model uses the embedding for it must say the same; a note when it does not."""
    head, embedding = checkpoint.tensors.get(HEAD), proof.sources.get(EMBEDDING)
    if head is None or HEAD in proof.sources or embedding is None:
        return []
    equal = head.shape == embedding.shape and head.dtype in TORCH_DTYPES
    step = max(1, PIECE_BYTES * head.shape[0] // max(1, head.num_bytes)) if equal else 1
    first = 0
    while equal and first < head.shape[0]:
        rows = (reader.rows(tensor, first, min(first + step, head.shape[0])).float() for tensor in (head, embedding))
        equal = torch.equal(*rows)
        first += step
    if equal:
        return []
    return [
        f"WARNING: {HEAD} is stored and differs from {EMBEDDING}; the embedding serves as the head, as tie_word_embeddings says"
    ]


def _fill(destination: Destination, seed: int, generator: torch.Generator) -> None:
    name, target = destination.name, destination.target.detach()
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    leaf = name.rpartition(".")[2]
    if target.dtype == torch.int32:
        target.random_(-(2**31), 2**31 - 1, generator=generator)
    elif leaf.startswith("weight_scale"):
        spread = _DUMMY_FP8_STD if leaf == "weight_scale_inv" else _DUMMY_INT4_STD
        target.uniform_(0.5, 1.5, generator=generator).mul_(_DUMMY_STD / spread)
    elif target.dtype == torch.float8_e4m3fn:
        wide = torch.empty(target.shape, dtype=torch.float32, device=target.device)
        target.copy_(wide.normal_(0.0, _DUMMY_FP8_STD, generator=generator).clamp_(-448.0, 448.0))
    elif leaf.endswith("bias"):
        target.zero_()
    elif leaf == "weight" and target.dim() == 1:
        target.fill_(1.0)
    else:
        target.normal_(0.0, _DUMMY_STD, generator=generator)
        if target.dtype == torch.float32:
            target.copy_(target.bfloat16())  # as published checkpoints hold it
