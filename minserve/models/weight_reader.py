"""Moves proven byte ranges from checkpoint files into parameter views, widening where asked. Decides nothing about names.

Positioned reads, not mappings: a file that shrinks meanwhile is a short read and a clear error, where a mapping would give zeros
or kill the process. A CPU's parameters are read in place. A GPU's are read into pinned buffers, each copied on a stream of its
own while the next is read, and widened over there. Host memory is bounded by the staging buffers: one a thread, two for a GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
from collections.abc import Callable, Iterable, Iterator, Sequence
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
"""Tensors are read in row ranges of about this size, or several in one go: unit of parallelism, progress and staging memory."""
_ALIGNMENT = 16
"""Of values in a staging buffer."""

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

    def reads(self) -> Iterator[tuple[StoredTensor, int, int]]:
        """What to read for it: the tensor, then its scales, each with its rows."""
        yield self.transfer.tensor, self.first, self.last
        for scale in self.transfer.scales:
            if self.transfer.widen_from == "fp8_block":
                yield scale, self.first // BLOCK, blocks(self.last)
            elif len(scale.shape) == 2:
                yield scale, self.first, self.last
            else:
                yield scale, 0, 1


class _Staging:
    """Host memory that a read goes into, and the stream that copies it to a GPU; None for a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(device))  # the parameters' memory may still be in use there
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def wait(self) -> None:
        """Until all that was copied from here has arrived."""
        if self.stream is not None:
            self.stream.synchronize()

    def clear(self, num_bytes: int) -> None:
        """Room for this much, once what was here before is copied."""
        self.wait()
        self._used = 0
        if self._buffer.numel() < num_bytes:
            self._buffer = torch.empty(max(num_bytes, PIECE_BYTES), dtype=torch.uint8, pin_memory=self.stream is not None)

    def take(self, num_bytes: int) -> Tensor:
        taken = self._buffer[self._used : self._used + num_bytes]
        self._used += _aligned(num_bytes)
        return taken


class WeightReader:
    """The open files of one load. A context manager; not to be used after it is closed."""

    def __init__(self, files: Iterable[Path], threads: int | None = None) -> None:
        self._threads = threads or min(8, max(2, os.cpu_count() or 1))
        self._open_files = contextlib.ExitStack()
        self._descriptors = {}
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

    def run(self, transfers: Sequence[Transfer], on_bytes: Callable[[int], None]) -> None:
        """Carries all out, in the files' order; `on_bytes(count)` is called in this thread as pieces land (on a GPU: are under
        way; all have landed at the end). The targets are on one device."""
        device = transfers[0].target.device if transfers else torch.device("cpu")
        stagings = [_Staging(device) for _ in range(self._threads * (2 if device.type == "cuda" else 1))]
        idle: queue.SimpleQueue[_Staging] = queue.SimpleQueue()
        for staging in stagings:
            idle.put(staging)

        def carry_out(pieces: list[_Piece]) -> int:
            staging = idle.get()
            try:
                return self._carry_out(pieces, staging)
            finally:
                idle.put(staging)

        pieces = sorted(
            _pieces(transfers), key=lambda piece: (piece.transfer.tensor.file, piece.transfer.tensor.begin, piece.first)
        )
        pool = ThreadPoolExecutor(self._threads, thread_name_prefix="weights")
        try:
            for count in pool.map(carry_out, _goes(pieces)):
                on_bytes(count)
        finally:
            # After an error the files are closed next, so no worker may be left reading.
            pool.shutdown(wait=True, cancel_futures=True)
            for staging in stagings:
                staging.wait()

    def rows(self, tensor: StoredTensor, first: int = 0, last: int | None = None) -> Tensor:
        """Rows [first, last) as a new CPU tensor of the stored type; a scalar counts as one row."""
        last = (tensor.shape or (1,))[0] if last is None else last
        held = torch.empty((last - first) * _row_bytes(tensor), dtype=torch.uint8)
        self._read(tensor, first, held)
        return _typed(held, tensor)

    @torch.inference_mode()
    def _carry_out(self, pieces: list[_Piece], staging: _Staging) -> int:
        staging.clear(sum(map(_staged_bytes, pieces)))
        with contextlib.nullcontext() if staging.stream is None else torch.cuda.stream(staging.stream):
            return sum(self._place(piece, staging) for piece in pieces)

    def _place(self, piece: _Piece, staging: _Staging) -> int:
        """Bytes read for the piece, each counted in one piece of its transfer."""
        tensor, target = piece.transfer.tensor, piece.transfer.target.detach()
        target = (target if tensor.shape else target.reshape(1))[piece.first : piece.last]
        dtype = TORCH_DTYPES[tensor.dtype]
        if not piece.transfer.scales and target.dtype == dtype and target.device.type == "cpu" and target.is_contiguous():
            landed = target.view(-1).view(torch.uint8)
            self._read(tensor, piece.first, landed)
            return landed.numel()
        count, stored = 0, []
        for source, first, last in piece.reads():
            held = staging.take((last - first) * _row_bytes(source))
            self._read(source, first, held)
            stored.append(_typed(held, source))
            repeated = piece.first and not first  # the one number of a whole tensor, which every piece reads
            count += 0 if repeated else held.numel()
        values = stored[0].view(target.shape[:1] + tensor.shape[1:])
        if piece.transfer.scales:
            values = _widened(piece.transfer.widen_from, [part.to(target.device, non_blocking=True) for part in stored])
        elif values.dtype != target.dtype:
            values = values.to(target.device, non_blocking=True)  # cast over there
        target.copy_(values, non_blocking=True)
        if target.dtype == torch.float16 and dtype != torch.float16:
            _prove_in_range(tensor, target)
        return count

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


def _goes(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces in runs of about PIECE_BYTES: what one thread does in one go."""
    go: list[_Piece] = []
    size = 0
    for piece in pieces:
        more = _staged_bytes(piece)
        if go and size + more > PIECE_BYTES:
            yield go
            go, size = [], 0
        go.append(piece)
        size += more
    if go:
        yield go


def _staged_bytes(piece: _Piece) -> int:
    return sum(_aligned((last - first) * _row_bytes(tensor)) for tensor, first, last in piece.reads())


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _typed(held: Tensor, tensor: StoredTensor) -> Tensor:
    """Bytes as rows of the stored type."""
    return held.view(TORCH_DTYPES[tensor.dtype]).view(-1, *tensor.shape[1:])


def _widened(kind: Format, stored: list[Tensor]) -> Tensor:
    """The rows in fp32 [n, K]."""
    values, scale, *others = stored
    if kind == "fp8_block":
        return widen(values, scale, torch.float32)
    if kind == "int4_group":
        return widen_int4(values, scale, torch.float32)
    return widen_nvfp4(values, scale, others[0], torch.float32)


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
