"""Moves proven byte ranges from checkpoint files into parameter views, widening where asked. Decides nothing about names.

Positioned reads, not mappings: a file that shrinks meanwhile is a short read and a clear error, where a mapping would give zeros
or kill the process. Host memory is bounded by one staging buffer a thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from minserve.errors import CheckpointError
from minserve.kernels.four_bits import widen_int4, widen_nvfp4
from minserve.kernels.reference import widen
from minserve.models.formats import BLOCK, Format, blocks
from minserve.models.safetensors_header import StoredTensor, count_bytes

PIECE_BYTES = 16 << 20
"""Tensors are read in row ranges of about this size: unit of parallelism, of progress and of staging memory."""

TORCH_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
    """A stored tensor, the view that it fills, and its scales when it is to be widened."""

    tensor: StoredTensor
    target: Tensor
    widen_from: Format = "plain"
    scales: tuple[StoredTensor, ...] = ()

    @property
    def sources(self) -> tuple[StoredTensor, ...]:
        return (self.tensor, *self.scales)


@dataclasses.dataclass(frozen=True, slots=True)
class _Piece:
    """Rows [first, last) of a transfer; a rank that holds a part of a stacked tensor plans only that part's rows."""

    transfer: Transfer
    first: int
    last: int


class WeightReader:
    """Open files and staging buffers of one load. A context manager; not to be used after it is closed."""

    def __init__(self, files: Iterable[Path], threads: int | None = None) -> None:
        self._threads = threads or min(8, max(2, os.cpu_count() or 1))
        self._open_files = contextlib.ExitStack()
        self._descriptors = {}
        # On a GPU these become pinned buffers, returned to the queue once their copy's event has passed.
        self._staging: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for _ in range(self._threads):
            self._staging.put(torch.empty(0, dtype=torch.uint8))
        try:
            for path in files:
                descriptor = _opened(path)
                self._open_files.callback(os.close, descriptor)
                self._descriptors[path] = descriptor
        except BaseException:
            self._open_files.close()
            raise

    def __enter__(self) -> WeightReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._open_files.close()

    def run(self, transfers: Iterable[Transfer], on_bytes: Callable[[int], None]) -> None:
        """Carries all out, in the files' order; `on_bytes(count)` is called in this thread as pieces land."""
        pieces = sorted(
            _pieces(transfers), key=lambda piece: (piece.transfer.tensor.file, piece.transfer.tensor.begin, piece.first)
        )
        pool = ThreadPoolExecutor(self._threads, thread_name_prefix="weights")
        try:
            for count in pool.map(self._carry_out, pieces):
                on_bytes(count)
        finally:
            # After an error the files are closed next, so no worker may be left reading.
            pool.shutdown(wait=True, cancel_futures=True)

    def rows(self, tensor: StoredTensor, first: int = 0, last: int | None = None) -> Tensor:
        """Rows [first, last) as a new CPU tensor of the stored type; a scalar counts as one row."""
        shape = tensor.shape or (1,)
        last = shape[0] if last is None else last
        held = torch.empty((last - first) * _row_bytes(tensor), dtype=torch.uint8)
        self._read(tensor, first, held)
        return held.view(TORCH_DTYPES[tensor.dtype]).view(last - first, *shape[1:])

    @torch.inference_mode()
    def _carry_out(self, piece: _Piece) -> int:
        tensor, widened = piece.transfer.tensor, bool(piece.transfer.scales)
        target = piece.transfer.target.detach()
        target = (target if tensor.shape else target.reshape(1))[piece.first : piece.last]
        dtype = TORCH_DTYPES[tensor.dtype]
        count = (piece.last - piece.first) * _row_bytes(tensor)
        if not widened and target.dtype == dtype and target.device.type == "cpu" and target.is_contiguous():
            self._read(tensor, piece.first, target.view(-1).view(torch.uint8))
            return count
        staging = self._staging.get()
        try:
            if staging.numel() < count:
                staging = torch.empty(count, dtype=torch.uint8)
            held = staging[:count]
            self._read(tensor, piece.first, held)
            values = held.view(dtype).view(target.shape[:1] + tensor.shape[1:])
            if widened:
                values, more = self._widened(piece, values)
                count += more
            target.copy_(values)
            if target.dtype == torch.float16 and dtype != torch.float16:
                _prove_in_range(tensor, target)
        finally:
            self._staging.put(staging)
        return count

    def _widened(self, piece: _Piece, values: Tensor) -> tuple[Tensor, int]:
        """The piece's rows in fp32 [n, K], and how many bytes of scales were read for them."""
        scale, *others = piece.transfer.scales
        if piece.transfer.widen_from == "fp8_block":
            factors = self.rows(scale, piece.first // BLOCK, blocks(piece.last))
            return widen(values, factors, torch.float32), factors.nbytes
        factors = self.rows(scale, piece.first, piece.last)
        if piece.transfer.widen_from == "int4_group":
            return widen_int4(values, factors, torch.float32), factors.nbytes
        scalar = self.rows(others[0])
        once = 0 if piece.first else scalar.nbytes  # every piece reads it, one counts it
        return widen_nvfp4(values, factors, scalar, torch.float32), factors.nbytes + once

    def _read(self, tensor: StoredTensor, first_row: int, into: Tensor) -> None:
        view = memoryview(into.numpy().data)
        offset = tensor.begin + first_row * _row_bytes(tensor)
        descriptor = self._descriptors[tensor.file]
        while view.nbytes:
            try:
                count = os.preadv(descriptor, [view], offset)
            except OSError as error:
                raise CheckpointError(f"{tensor.file}: reading {tensor.name} failed: {error.strerror}") from None
            if count == 0:
                raise CheckpointError(f"{tensor.file}: {count_bytes(view.nbytes)} of {tensor.name} vanished while it was read")
            view, offset = view[count:], offset + count


def _pieces(transfers: Iterable[Transfer]) -> Iterator[_Piece]:
    for transfer in transfers:
        shape, row_bytes = transfer.tensor.shape or (1,), _row_bytes(transfer.tensor)
        if not row_bytes:
            continue
        step = max(1, PIECE_BYTES // row_bytes)
        if transfer.scales:
            # Whole blocks, and fewer rows, because widening takes several times the stored size.
            step = max(BLOCK, step // 8 // BLOCK * BLOCK)
        for first in range(0, shape[0], step):
            yield _Piece(transfer, first, min(first + step, shape[0]))


def _row_bytes(tensor: StoredTensor) -> int:
    """Bytes of one index of the first dimension; a scalar is one row."""
    rows = tensor.shape[0] if tensor.shape else 1
    return tensor.num_bytes // rows if rows else 0


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from None


def _prove_in_range(tensor: StoredTensor, target: Tensor) -> None:
    if not bool(torch.isfinite(target).all()):
        raise CheckpointError(f"{tensor}: has values that float16 cannot hold; use --dtype bfloat16 or float32")
