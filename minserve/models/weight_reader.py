"""Moves proven byte ranges from checkpoint files into parameter views, widening where asked. Decides nothing about names.

Positioned reads, not mappings: a file that shrinks meanwhile is a short read and a clear error, where a mapping would give zeros
or kill the process. A CPU's parameters are read in place, by several threads. For a GPU the threads read into pinned buffers,
and the calling thread alone copies from there, on a stream of its own, and widens over there: threads that all talk to CUDA
would wait for each other more than for the files. They call nothing of torch either: each of its calls gives the interpreter's
lock away and waits to have it back. Host memory is bounded by the staging buffers.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor

from minserve.errors import CheckpointError
from minserve.kernels.four_bits import widen_int4, widen_nvfp4
from minserve.kernels.reference import widen
from minserve.models.formats import BLOCK, Format, blocks
from minserve.models.safetensors_header import StoredTensor, count_bytes

CPU = torch.device("cpu")
SPARE_BUFFERS, COPYING_BUFFERS = 4, 2
"""Beside one a reader, since a copy takes a tenth of the time of a read; and how many of them are left to the copies."""
CPU_THREADS, GPU_THREADS = 8, 12
"""Readers at most: what a page cache's bandwidth needs, more of them where copies to a GPU ask for as much again."""
PIECE_BYTES = 8 << 20
"""Tensors are read in row ranges of about this size, or several in one go: unit of parallelism, progress and staging memory."""

TORCH_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip


class Transfer(NamedTuple):
    """A stored tensor, the view that it fills, and its scales when it is to be widened."""

    tensor: StoredTensor
    target: Tensor
    widen_from: Format = "plain"
    scales: tuple[StoredTensor, ...] = ()

    @property
    def sources(self) -> tuple[StoredTensor, ...]:
        return (self.tensor, *self.scales)


class _Read(NamedTuple):
    """Rows [first, last) of a stored tensor, and where they lie in its file."""

    tensor: StoredTensor
    first: int
    last: int
    begin: int
    num_bytes: int

    def typed(self, held: Tensor) -> Tensor:
        """These bytes, wherever they are, as rows of the stored type."""
        return held.view(TORCH_DTYPES[self.tensor.dtype]).view(self.last - self.first, *self.tensor.shape[1:])


class _Piece(NamedTuple):
    """Rows of a transfer, [first, last) of its tensor and what belongs to them of its scales."""

    transfer: Transfer
    reads: tuple[_Read, ...]
    num_bytes: int
    place: Tensor | None
    """The rows' place as one run of bytes, where they only need to be moved; None where they are widened, cast or spread."""

    @property
    def target(self) -> Tensor:
        target = self.transfer.target.detach()
        return (target if self.transfer.tensor.shape else target.reshape(1))[self.reads[0].first : self.reads[0].last]

    @property
    def counted_bytes(self) -> int:
        """Bytes read, the one number of a whole tensor in its first piece only."""
        if len(self.reads) == 1:
            return self.num_bytes
        repeated = sum(read.num_bytes for read in self.reads if self.reads[0].first and not read.first)
        return self.num_bytes - repeated

    def convert(self, held: Tensor) -> None:
        """From its reads' bytes, one after the other and on the target's device, into the target."""
        target, values = self.target, self.reads[0].tensor
        parts = held.split([read.num_bytes for read in self.reads])
        # A part may begin at an odd place, where no wider type can be viewed.
        typed = [
            read.typed(part if part.data_ptr() % 8 == 0 else part.clone()) for read, part in zip(self.reads, parts, strict=True)
        ]
        wide = _widened(self.transfer.widen_from, typed) if len(typed) > 1 else typed[0]
        target.copy_(wide.view(target.shape))
        if target.dtype == torch.float16 and values.dtype != "F16":
            _prove_in_range(values, target)


class _Staging:
    """Host memory that reads go into; pinned for a GPU, and then in use until what was copied from it has arrived."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._arrived = torch.cuda.Event() if pinned else None
        self._reserve(PIECE_BYTES)

    def _reserve(self, num_bytes: int) -> None:
        self.bytes = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)
        self._view = _view(self.bytes)

    def room(self, num_bytes: int) -> memoryview:
        if len(self._view) < num_bytes:
            self._reserve(num_bytes)
        return self._view[:num_bytes]

    def copying(self) -> None:
        """Copies from it are under way on the current stream."""
        if self._arrived is not None:
            self._arrived.record()

    def wait(self) -> None:
        """Until it may be read into again."""
        if self._arrived is not None:
            self._arrived.synchronize()


class WeightReader:
    """The open files of one load. A context manager; not to be used after it is closed."""

    def __init__(self, files: Iterable[Path], device: torch.device = CPU, threads: int | None = None) -> None:
        """`device` has the targets. For a GPU memory begins to be pinned at once, beside what the caller does next."""
        threads = threads or min(CPU_THREADS if device.type == "cpu" else GPU_THREADS, max(2, os.cpu_count() or 1))
        self._device, self._threads = device, threads
        self._descriptors = {}
        with contextlib.ExitStack() as open_files:
            for path in files:
                self._descriptors[path] = _opened(path)
                open_files.callback(os.close, self._descriptors[path])
            self._open_files = open_files.pop_all()
        self._ended: SimpleQueue[tuple[list[_Piece], _Staging] | BaseException] = SimpleQueue()
        self._pool = ThreadPoolExecutor(threads + 1, thread_name_prefix="weights")
        self._pool.submit(self._allocate)

    def __enter__(self) -> WeightReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # The files are closed next, so no worker may be left reading.
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._open_files.close()

    def run(self, transfers: Sequence[Transfer], on_bytes: Callable[[int], None]) -> None:
        """Carries all out, roughly in the files' order; `on_bytes(count)` is called in this thread as pieces land (on a GPU: are
        on their way; they have landed when this returns). Once for a reader."""
        on_gpu = self._device.type == "cuda"
        work = self._into_staging if on_gpu else self._into_targets
        # Queues rather than futures, which take several times as long of the interpreter's lock.
        waiting: SimpleQueue[tuple[list[_Piece], _Staging] | None] = SimpleQueue()
        copied: deque[_Staging] = deque()

        def lane() -> None:
            for go, staging in iter(waiting.get, None):
                try:
                    work(go, staging)
                    self._ended.put((go, staging))
                except BaseException as error:
                    self._ended.put(error)

        def begin(staging: _Staging) -> bool:
            go = next(goes, None)
            if go is not None:
                staging.wait()
                waiting.put((go, staging))
            return go is not None

        with torch.inference_mode(), _side_stream(self._device) if on_gpu else contextlib.nullcontext():
            in_order = sorted(transfers, key=lambda transfer: (transfer.tensor.file, transfer.tensor.begin))
            goes = _goes(list(_pieces(in_order)))
            lanes = [self._pool.submit(lane) for _ in range(self._threads)]
            try:
                under_way = self._threads + SPARE_BUFFERS
                while under_way:
                    ended = self._ended.get()
                    if isinstance(ended, BaseException):
                        raise ended
                    go, staging = ended
                    if on_gpu and go:
                        _place(go, staging, self._device)
                    copied.append(staging)
                    under_way -= 1
                    if len(copied) > COPYING_BUFFERS or not under_way:
                        under_way += begin(copied.popleft())
                    if go:
                        on_bytes(sum(piece.counted_bytes for piece in go))
            finally:
                for _ in lanes:
                    waiting.put(None)

    def _allocate(self) -> None:
        """The buffers, which begin as if a read of nothing had ended; by one thread, since pinning by several takes longer."""
        try:
            for _ in range(self._threads + SPARE_BUFFERS):
                self._ended.put(([], _Staging(self._device.type == "cuda")))
        except BaseException as error:
            self._ended.put(error)

    def rows(self, tensor: StoredTensor, first: int = 0, last: int | None = None) -> Tensor:
        """Rows [first, last) as a new CPU tensor of the stored type; a scalar counts as one row."""
        read = _rows_read(tensor, first, _num_rows(tensor) if last is None else last)
        held = torch.empty(read.num_bytes, dtype=torch.uint8)
        self._read(tensor.file, read.begin, _view(held))
        return read.typed(held)

    def _into_staging(self, go: list[_Piece], staging: _Staging) -> None:
        """What the pieces need, in their order. Ranges that follow each other in a file are read in one go."""
        room = staging.room(sum(piece.num_bytes for piece in go))
        reads = [read for piece in go for read in piece.reads]
        start = place = 0
        for this, following in zip(reads, [*reads[1:], None], strict=True):
            place += this.num_bytes
            end = this.begin + this.num_bytes
            if following is None or following.tensor.file != this.tensor.file or following.begin != end:
                self._read(this.tensor.file, end - (place - start), room[start:place])
                start = place

    @torch.inference_mode()
    def _into_targets(self, go: list[_Piece], staging: _Staging) -> None:
        for piece in go:
            if piece.place is not None:
                self._read(piece.reads[0].tensor.file, piece.reads[0].begin, _view(piece.place))
            else:
                self._into_staging([piece], staging)
                piece.convert(staging.bytes[: piece.num_bytes])

    def _read(self, file: Path, offset: int, view: memoryview) -> None:
        while view.nbytes:
            try:
                count = os.preadv(self._descriptors[file], [view], offset)
            except OSError as error:
                raise CheckpointError(f"{file}: reading from byte {offset:,} on failed: {error.strerror}") from None
            if count == 0:
                raise CheckpointError(f"{file}: {count_bytes(view.nbytes)} from {offset:,} on vanished while it was read")
            view, offset = view[count:], offset + count


@contextlib.contextmanager
def _side_stream(device: torch.device) -> Iterator[None]:
    """A stream that begins where the current one is now, and has ended when this ends, whatever happens."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # the parameters' memory may still be in use there
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        stream.synchronize()


def _place(go: list[_Piece], staging: _Staging, device: torch.device) -> None:
    """From pinned memory to where the pieces belong; what is to be widened or cast is so on the GPU."""
    sizes = [piece.num_bytes for piece in go]
    held = staging.bytes[: sum(sizes)]
    places = [piece.place for piece in go if piece.place is not None]
    if places:
        # One call for all copies: this thread gives the interpreter's lock away, and waits for it, once.
        torch._foreach_copy_(places, held.split(sizes), non_blocking=True)
        staging.copying()
        return
    held = held.to(device, non_blocking=True)
    staging.copying()
    for piece, part in zip(go, held.split(sizes), strict=True):
        piece.convert(part)


def _pieces(transfers: Iterable[Transfer]) -> Iterator[_Piece]:
    for transfer in transfers:
        tensor, target, kind, scales = transfer
        rows, size = _num_rows(tensor), tensor.num_bytes
        if not size:
            continue
        place = None
        if not scales and target.dtype == TORCH_DTYPES[tensor.dtype] and target.is_contiguous():
            place = target.view(-1).view(torch.uint8)
            if size <= PIECE_BYTES:
                yield _Piece(transfer, (_Read(tensor, 0, rows, tensor.begin, size),), size, place)
                continue
        row_bytes = size // rows
        step = max(1, PIECE_BYTES // row_bytes)
        if scales:
            # Whole blocks, and fewer rows, because widening takes several times the stored size.
            step = max(BLOCK, step // 4 // BLOCK * BLOCK)
        for first in range(0, rows, step):
            last = min(first + step, rows)
            reads = (_rows_read(tensor, first, last), *(_scale_rows(kind, scale, first, last) for scale in scales))
            run = None if place is None else place[first * row_bytes : last * row_bytes]
            yield _Piece(transfer, reads, sum(read.num_bytes for read in reads), run)


def _num_rows(tensor: StoredTensor) -> int:
    """The first dimension; a scalar is one row."""
    return tensor.shape[0] if tensor.shape else 1


def _rows_read(tensor: StoredTensor, first: int, last: int) -> _Read:
    row_bytes = tensor.num_bytes // max(1, _num_rows(tensor))
    return _Read(tensor, first, last, tensor.begin + first * row_bytes, (last - first) * row_bytes)


def _scale_rows(kind: Format, scale: StoredTensor, first: int, last: int) -> _Read:
    """The scales of rows [first, last)."""
    if kind == "fp8_block":
        return _rows_read(scale, first // BLOCK, blocks(last))
    return _rows_read(scale, first, last) if len(scale.shape) == 2 else _rows_read(scale, 0, 1)


def _goes(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """Runs of about PIECE_BYTES, what one thread does in one go: of pieces that are moved, and of others that are converted."""
    runs: dict[bool, list[_Piece]] = {True: [], False: []}
    sizes = {True: 0, False: 0}
    for piece in pieces:
        moved = piece.place is not None
        if runs[moved] and sizes[moved] + piece.num_bytes > PIECE_BYTES:
            yield runs[moved]
            runs[moved], sizes[moved] = [], 0
        runs[moved].append(piece)
        sizes[moved] += piece.num_bytes
    yield from filter(None, runs.values())


def _widened(kind: Format, stored: list[Tensor]) -> Tensor:
    """The rows in fp32 [n, K]."""
    values, scale, *others = stored
    if kind == "fp8_block":
        return widen(values, scale, torch.float32)
    if kind == "int4_group":
        return widen_int4(values, scale, torch.float32)
    return widen_nvfp4(values, scale, others[0], torch.float32)


def _view(held: Tensor) -> memoryview:
    """The bytes of a tensor of bytes on the CPU, for calls that take no tensors."""
    view: memoryview = held.numpy().data
    return view


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from None


def _prove_in_range(tensor: StoredTensor, target: Tensor) -> None:
    if not bool(torch.isfinite(target).all()):
        raise CheckpointError(f"{tensor}: has values that float16 cannot hold; use --dtype bfloat16 or float32")
