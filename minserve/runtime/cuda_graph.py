"""Steps as CUDA graphs: captured once for each padded size before the first request, and replayed from then on.

Knows sizes, capture rules and memory; nothing of what a step computes, and of CUDA only `CudaRecorder`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import torch

from minserve.capture_flags import CaptureFlags, GraphKind
from minserve.errors import DoesNotFit, EnvironmentFault, ServerError
from minserve.kernels.interface import LEAST_MIXED_TOKENS
from minserve.runtime.capture_mode import capture_mode

WARM_UPS = 2
"""Runs before the first recording: kernels compile in the first, libraries settle their workspaces by the second."""
_SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
_LATER_STEP = 128

Result = TypeVar("Result")
Work = Callable[[CaptureFlags], Result]
_TITLES: dict[GraphKind, str] = {
    "decode": "decode step of batch size {}",
    "mixed": "mixed step of {} tokens",
    "sampling": "sampling of {} rows",
}


def capture_sizes(max_num_seqs: int, asked: Sequence[int] = ()) -> tuple[int, ...]:
    """The batch sizes to capture, ascending. The last is always `max_num_seqs`, so no decode step is ever beyond them.

    `asked` replaces the usual sizes; those above `max_num_seqs` could never be used and are left out.
    """
    usual = (*_SIZES, *range(_SIZES[-1] + _LATER_STEP, max_num_seqs, _LATER_STEP))
    return tuple(sorted({size for size in asked or usual if size < max_num_seqs} | {max_num_seqs}))


def mixed_sizes(max_step_tokens: int) -> tuple[int, ...]:
    """Tokens of the mixed steps to capture, ascending: doubling, with one between from 1,024 to 4,096, where most are that carry
    decode rows. The last is the largest step that can be."""
    doubled = itertools.takewhile(
        lambda size: size < max_step_tokens, (LEAST_MIXED_TOKENS << power for power in itertools.count())
    )
    return tuple(sorted({*doubled, *(size for size in (1536, 3072) if size < max_step_tokens), max_step_tokens}))


class Graph(Protocol):
    """A recorded step; `torch.cuda.CUDAGraph` is one."""

    def replay(self) -> None: ...

    def reset(self) -> None: ...


class Recorder(Protocol):
    """Runs and records work. `CudaRecorder` does it on a GPU; a double does it without one."""

    def warm_up(self, work: Callable[[], object]) -> None:
        """Run it as it will be recorded, without recording."""

    def record(self, work: Callable[[], Result]) -> tuple[Graph, Result]:
        """Record it once. Whatever work raises goes on, with the capture ended."""

    def memory(self) -> int:
        """Bytes of the device in use now, by anyone."""

    def release(self) -> None:
        """Give back the memory of graphs that were reset."""


class CudaRecorder:
    """One capture stream and one memory pool, shared by all graphs: a smaller one reuses what a larger one left free."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def _capture_stream(self) -> Iterator[None]:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def warm_up(self, work: Callable[[], object]) -> None:
        with self._capture_stream():
            work()

    def new_graph(self) -> torch.cuda.CUDAGraph:
        return torch.cuda.CUDAGraph()

    def record(self, work: Callable[[], Result]) -> tuple[Graph, Result]:
        torch.cuda.synchronize(self._device)
        graph = self.new_graph()
        with torch.cuda.stream(self._stream):
            # Other threads may touch CUDA meanwhile; their calls are no part of this capture.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = work()
                graph.capture_end()
            except BaseException:
                self._abandon(graph)
                raise
        return graph, result

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that failed, so that the stream and the allocator are as before it."""
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
        with contextlib.suppress(RuntimeError):  # a capture that CUDA called invalid ends without telling the allocator
            torch._C._cuda_endAllocateToPool(self._device.index or 0, self._pool)
        with contextlib.suppress(RuntimeError):
            graph.reset()

    def memory(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def release(self) -> None:
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


class StepGraphs(Generic[Result]):
    """The graphs of one kind: by batch size decode steps up to their argmax, and the drawing of other tokens instead; by tokens
    mixed steps, whose sampling is not recorded.

    Three verbs: capture, replay, destroy.
    """

    def __init__(
        self,
        prepare: Callable[[int], Work[Result]],
        sizes: Sequence[int],
        recorder: Recorder,
        forget: Callable[[], None] = lambda: None,
        kind: GraphKind = "decode",
    ) -> None:
        """prepare: given a size, fills its static buffers with padding and plans for them; what it returns is captured.
        forget: called once the graphs are gone, for plans that belong to them."""
        self.sizes = tuple(sorted(sizes))
        self.memory_bytes: dict[int, int] = {}
        """Device memory that each size took when it was captured; a smaller one finds most of it there already."""
        self._prepare = prepare
        self._recorder = recorder
        self._forget = forget
        self._kind = kind
        self._graphs: dict[int, tuple[Graph, Result]] = {}

    @property
    def largest(self) -> int:
        return self.sizes[-1]

    def size_for(self, rows: int) -> int | None:
        """The smallest captured size that holds so many rows, or tokens; None beyond the largest, or when nothing is captured."""
        if not self._graphs:
            return None
        return next((size for size in self.sizes if size >= rows), None)

    def capture(self, on_progress: Callable[[float], None] = lambda _: None) -> None:
        """Warm up and record every size, the largest first. Raises ServerError when one cannot be had; then none is left."""
        gc.collect()
        try:
            for done, size in enumerate(reversed(self.sizes)):
                on_progress(done / len(self.sizes))
                self._capture_size(size)
        except BaseException as error:
            self.destroy()
            if isinstance(error, ServerError) or not isinstance(error, Exception):
                raise
            kind = DoesNotFit if isinstance(error, torch.OutOfMemoryError) else EnvironmentFault
            what = _TITLES[self._kind].format(size)
            raise kind(
                f"capturing the {what} failed: {error}; smaller --max-num-seqs, --cuda-graph-bs or --chunked-prefill-size take "
                "less memory, --enforce-eager serves without graphs"
            ) from error
        on_progress(1.0)

    def _capture_size(self, size: int) -> None:
        before = self._recorder.memory()
        work = self._prepare(size)
        with capture_mode("warm-up", padded_batch_size=size, kind=self._kind) as flags:
            for _ in range(1 if self._graphs else WARM_UPS):
                self._recorder.warm_up(functools.partial(work, flags))
        with capture_mode("record", padded_batch_size=size, kind=self._kind) as flags:
            self._graphs[size] = self._recorder.record(functools.partial(work, flags))
        self.memory_bytes[size] = max(0, self._recorder.memory() - before)

    def replay(self, size: int) -> Result:
        """Run a captured step on the current stream. Its result lies where the last replay's did: use it before the next."""
        graph, result = self._graphs[size]
        graph.replay()
        return result

    def result(self, size: int) -> Result:
        """Where a replay leaves its result, without one."""
        return self._graphs[size][1]

    def destroy(self) -> None:
        """Drop all graphs and give their memory back."""
        for graph, _ in self._graphs.values():
            graph.reset()
        self._graphs.clear()
        self._forget()
        self._recorder.release()
