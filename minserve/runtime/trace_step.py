"""`minserve bench step --trace`: what one replayed decode step launches, each kernel with its entry of the kernel table, its
microseconds and bytes, the gaps between them, the graph's edges, and a picture of one layer.

Names and times are the replay's. Which entry a kernel belongs to, and the bytes that this one must move, come from an eager
run of the same step, whose kernels are the same. Knows no model; works on any runner with graphs.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from minserve.errors import EnvironmentFault
from minserve.kernels.interface import (
    AttentionMetadata,
    AttentionShape,
    ExpertRows,
    ExpertWeights,
    Fp8RowKernels,
    Fp8Rows,
    Kernels,
    LinearWeight,
    PartialSums,
    RotaryTable,
)
from minserve.models.decoder import Decoder
from minserve.runtime.cuda_graph import CudaRecorder
from minserve.runtime.graph_edges import Edge, edges_of
from minserve.runtime.model_runner import ModelRunner
from minserve.runtime.step import ScheduledStep

_ATTENTION = ("gqa_attention", "mla_attention", "gqa_decode")
_FP8_ENTRIES = ("linear", "rms_norm", "add_rms_norm", "silu_and_mul", "heads_linear", "gqa_attention", "gqa_decode")
"""Those that have a twin which reads or writes FP8 rows: both are called alike."""
_ENTRIES = (
    *(
        "rms_norm",
        "add_rms_norm",
        "silu_and_mul",
        "linear",
        "linear_parts",
        "heads_linear",
        "route",
        "experts_flat",
        "expert_rows",
        "gqa_inputs",
        "mla_inputs",
    ),
    *_ATTENTION,
    *("part_maxima", "record_tokens"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """One kernel of the replay."""

    entry: str
    """Of the kernel table, with what tells its calls apart; "" for torch's own operations."""
    kernel: str
    start: float
    """Microseconds from the step's first kernel."""
    length: float
    alone: float
    """Microseconds of it after the kernel before it on the stream had ended: one that starts early waits for that."""
    stream: int
    megabytes: float
    """What the entry must move, with its longest kernel; 0 with its others."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepTrace:
    """A replay from its first kernel to its last."""

    batch: int
    layers: int
    launches: tuple[Launch, ...]
    edges: collections.Counter[Edge]

    @property
    def span(self) -> float:
        """Microseconds."""
        return max(launch.start + launch.length for launch in self.launches)

    @property
    def gaps(self) -> float:
        """Microseconds in which nothing ran."""
        idle, end = 0.0, 0.0
        for launch in self.launches:
            idle += max(0.0, launch.start - end)
            end = max(end, launch.start + launch.length)
        return idle


class KeepingRecorder(CudaRecorder):
    """Records graphs whose nodes and edges can still be looked at."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.graphs: list[torch.cuda.CUDAGraph] = []

    def new_graph(self) -> torch.cuda.CUDAGraph:
        self.graphs.append(torch.cuda.CUDAGraph(keep_graph=True))
        return self.graphs[-1]


def trace(runner: ModelRunner, step: ScheduledStep, replay: Callable[[], object], graph: torch.cuda.CUDAGraph) -> StepTrace:
    """`replay` replays the kept `graph` of `step`, whose tensors are staged already."""
    calls = _eager_calls(runner, step)
    events = _kernels(_profile(replay))
    first = events[0]["ts"]
    seen: collections.Counter[str] = collections.Counter()
    launches = []
    ends: dict[int, float] = {}
    for event in events:
        # The same kernel runs in the same order in both; only lanes shift against each other.
        owners = calls.get(event["name"], [])
        entry, megabytes = owners[seen[event["name"]]] if seen[event["name"]] < len(owners) else ("", 0.0)
        seen[event["name"]] += 1
        start, length, stream = event["ts"] - first, event["dur"], event["args"]["stream"]
        ended = ends.get(stream, 0.0)
        ends[stream] = max(ended, start + length)
        launches.append(Launch(entry, event["name"], start, length, ends[stream] - max(start, ended), stream, megabytes))
    return StepTrace(len(step.rows), runner.model.num_layers, tuple(launches), edges_of(graph))


def _profile(run: Callable[[], object]) -> list[dict[str, Any]]:
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def _kernels(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted((event for event in events if event.get("cat") == "kernel"), key=lambda event: event["ts"])


def _eager_calls(runner: ModelRunner, step: ScheduledStep) -> dict[str, list[tuple[str, float]]]:
    """Kernel name to the (entry, megabytes) of each of its launches, in order, from an eager run."""
    moved: dict[str, float] = {}
    table = _recording(runner.kernels, moved, [row.start + 1 for row in step.rows])
    assert isinstance(runner.model, Decoder)
    holders: list[Any] = [module for module in runner.model.modules() if isinstance(getattr(module, "kernels", None), Kernels)]
    holders.append(runner.sampler)
    for module in holders:
        module.kernels = table
    graphs, runner.graphs = runner.graphs, None
    try:
        runner.launch(step).result()  # compiles what is new
        moved.clear()
        events = _profile(lambda: runner.launch(step).result())
    finally:
        runner.graphs = graphs
        for module in holders:
            module.kernels = runner.kernels
    ranges = sorted((e["ts"], e["ts"] + e["dur"], e["name"]) for e in events if e.get("cat") == "user_annotation")
    launched = {e["args"]["correlation"]: e["ts"] for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")}
    kernels = _kernels(events)
    owners = []
    owned: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for event in kernels:
        at = launched.get(event["args"]["correlation"], -1.0)
        owners.append(next((name for begin, end, name in ranges if begin <= at <= end and name in moved), ""))
        owned[owners[-1]].append(event)
    longest = {owner: max(its, key=lambda event: event["dur"]) for owner, its in owned.items()}
    calls: dict[str, list[tuple[str, float]]] = collections.defaultdict(list)
    for event, owner in zip(kernels, owners, strict=True):
        weight = moved[owner] / 1e6 if owner and longest[owner] is event else 0.0
        calls[event["name"]].append((owner.partition("#")[0], weight))
    return calls


def _recording(kernels: Kernels, moved: dict[str, float], seq_lens: Sequence[int]) -> Kernels:
    """The same table, which names each call "entry#number" to the profiler and notes its bytes in `moved`."""

    def wrap(entry: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*arguments: Any) -> Any:
            name = f"{_label(entry, arguments)}#{len(moved)}"
            with torch.profiler.record_function(name):
                result = function(*arguments)
            moved[name] = _bytes(entry, arguments, result, seq_lens)
            return result

        return recorded

    def wrapped(table: Kernels | Fp8RowKernels, entries: Sequence[str]) -> dict[str, Any]:
        return {entry: wrap(entry, getattr(table, entry)) for entry in entries if getattr(table, entry) is not None}

    fp8 = kernels.fp8_rows
    if fp8 is not None:
        fp8 = dataclasses.replace(fp8, **wrapped(fp8, _FP8_ENTRIES))
    return dataclasses.replace(kernels, fp8_rows=fp8, **wrapped(kernels, _ENTRIES))


def _label(entry: str, arguments: tuple[Any, ...]) -> str:
    weight = next((argument.weight for argument in arguments if isinstance(argument, LinearWeight)), None)
    return entry if weight is None else f"{entry} {weight.shape[0]}x{weight.shape[1]}"


def _bytes(entry: str, arguments: tuple[Any, ...], result: Any, seq_lens: Sequence[int]) -> float:
    """What a call must read and write: each tensor once, of the cache the rows' tokens, of the experts those that were hit."""
    if entry in _ATTENTION:
        shape = next(argument for argument in arguments if isinstance(argument, AttentionShape))
        cache = arguments[{"gqa_attention": 1, "mla_attention": 2, "gqa_decode": 4}[entry]]
        token = (shape.head_dim + shape.rope_dim) * (1 if shape.kind == "mla" else 2 * shape.num_kv_heads)
        return float(sum(seq_lens) * token * cache.element_size() + sum(map(_size, _tensors((arguments[0], result)))))
    if entry in ("experts_flat", "expert_rows"):
        x, slots, _, experts = arguments[:4]  # and the rows' scales, where they travelled in FP8
        held = sum(map(_size, _tensors(experts))) / len(experts.w13)
        return len(slots[slots >= 0].unique()) * held + sum(map(_size, _tensors((x, result))))
    if entry in ("gqa_inputs", "mla_inputs"):
        # The new cache entries are as large as the keys and values that come in; no more of the cache is touched.
        arguments = tuple(argument for argument in arguments if not (isinstance(argument, Tensor) and argument.dim() == 5))
        return 2.0 * _size(arguments[0]) + (_size(arguments[4]) if entry == "mla_inputs" else 0.0)
    if entry == "record_tokens":
        arguments = arguments[:3]  # of the slots' buffers it touches a number a row
    return float(sum(map(_size, _tensors((arguments, result)))))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, (LinearWeight, Fp8Rows, ExpertRows, PartialSums, ExpertWeights)):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))
    else:
        assert not isinstance(value, (AttentionMetadata, RotaryTable))


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def titled(title: str, words: Sequence[str], numbers: Sequence[str]) -> Table:
    """A table whose columns hold words, then numbers."""
    shown = Table(title=title, title_justify="left")
    for column in (*words, *numbers):
        shown.add_column(column, justify="left" if column in words else "right", overflow="fold")
    return shown


def table(traced: StepTrace) -> Table:
    """One line a kernel of an entry: calls a layer, microseconds after the kernel before, bytes, bandwidth, share of the step."""
    rows: dict[tuple[str, str], list[Launch]] = collections.defaultdict(list)
    for launch in traced.launches:
        rows[launch.entry or "torch", _short(launch.kernel)].append(launch)
    shown = titled(
        f"batch {traced.batch}: {len(traced.launches)} kernels, {len(traced.launches) / traced.layers:.1f} a layer, "
        f"{traced.span / 1e3:.3f} ms, gaps {traced.gaps / traced.span:.1%}",
        ("entry", "kernel"), ("a layer", "us", "MB", "GB/s", "share"),
    )  # fmt: skip
    for (entry, kernel), launches in sorted(rows.items(), key=lambda row: -sum(launch.alone for launch in row[1])):
        total = sum(launch.alone for launch in launches)
        megabytes = sum(launch.megabytes for launch in launches)
        shown.add_row(
            entry,
            kernel,
            f"{len(launches) / traced.layers:.2f}",
            f"{total / len(launches):.2f}",
            f"{megabytes / len(launches):.2f}" if megabytes else "",
            f"{megabytes / total * 1e3:,.0f}" if megabytes and total else "",
            f"{total / traced.span:.1%}",
        )
    return shown


def edge_table(traced: StepTrace) -> Table:
    """The graph's edges: which kernels may start while the one before still runs ("programmatic"), and which may not."""
    shown = titled(f"edges at batch {traced.batch}", ("from", "to", "kind"), ("a layer",))
    for edge, count in traced.edges.most_common():
        shown.add_row(_short(edge.before) or "-", _short(edge.after) or "-", edge.kind, f"{count / traced.layers:.2f}")
    return shown


def _short(kernel: str) -> str:
    """A kernel's name without its arguments: what a table has room for."""
    return kernel.removeprefix("void ").partition("<")[0].partition("(")[0][-40:]


def draw(traced: StepTrace, path: Path) -> None:
    """The timeline of the middle layer, from attention to attention. Raises EnvironmentFault without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EnvironmentFault("--trace draws with matplotlib: pip install 'minserve[plot]'") from error
    starts = [launch.start for launch in traced.launches if launch.entry in _ATTENTION and launch.megabytes]
    middle = len(starts) // 2
    begin, end = starts[middle - 1 : middle + 1] if len(starts) > 1 else (0.0, traced.span)
    shown = [launch for launch in traced.launches if begin <= launch.start < end]
    figure = Figure(figsize=(13.0, 1.2 + 0.28 * len(shown)), layout="constrained")
    axes = figure.subplots()
    streams = sorted({launch.stream for launch in shown})
    for line, launch in enumerate(shown):
        colour, start = f"C{streams.index(launch.stream)}", launch.start - begin
        waiting = launch.length - launch.alone
        axes.barh(line, waiting, left=start, height=0.7, color="lightgrey")
        axes.barh(line, launch.alone, left=start + waiting, height=0.7, color=colour)
    labels = [f"{launch.entry or 'torch'}: {_short(launch.kernel)}" for launch in shown]
    axes.set_yticks(range(len(shown)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("us")
    axes.set_title(f"one layer at batch {traced.batch}: {end - begin:.1f} us; a colour a stream, grey: waiting", fontsize=10)
    figure.savefig(path, dpi=130)
