"""What `bench step --trace` makes of a replay's kernels: times after the kernel before, gaps, bytes, a picture. The replay itself
needs a GPU."""

from __future__ import annotations

import collections
import dataclasses
from pathlib import Path

import pytest
import torch
from rich.console import Console

from minserve.kernels import reference
from minserve.kernels.interface import (
    AttentionShape,
    ExpertRows,
    ExpertWeights,
    Fp8RowKernels,
    Fp8Rows,
    LinearWeight,
    PartialSums,
)
from minserve.runtime import trace_step
from minserve.runtime.graph_edges import Edge, edges_of
from minserve.runtime.trace_step import Launch, StepTrace


def launch(entry: str, kernel: str, start: float, end: float, before: float, stream: int = 7, megabytes: float = 0.0) -> Launch:
    return Launch(entry, kernel, start, end - start, end - max(start, before), stream, megabytes)


def traced() -> StepTrace:
    """Three layers of three kernels, 10 us each; the second starts early, and before the third nothing runs for 1 us."""
    launches = []
    for layer in range(3):
        begin = 10.0 * layer
        launches += [
            launch("gqa_attention", "_attention_kernel", begin, begin + 4, begin, megabytes=2.0),
            launch("linear 8x4", "_vector_kernel", begin + 2, begin + 7, begin + 4, megabytes=6.0),
            launch("", "void at::native::add<float>(int)", begin + 8, begin + 10, begin + 7),
        ]
    edges = collections.Counter({Edge("_attention_kernel", "_vector_kernel", "programmatic"): 3, Edge("", "x", "full"): 1})
    return StepTrace(2, 3, tuple(launches), edges)


def text(table) -> str:
    console = Console(width=140)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def test_the_table_counts_what_comes_after_the_kernel_before() -> None:
    step = traced()
    assert (step.span, step.gaps) == (30.0, 3.0)
    shown = text(trace_step.table(step))
    assert "9 kernels, 3.0 a layer, 0.030 ms, gaps 10.0%" in shown
    rows = {
        line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:-1]] for line in shown.splitlines() if "│" in line
    }
    assert rows["linear 8x4"] == ["_vector_kernel", "1.00", "3.00", "6.00", "2,000", "30.0%"]
    assert rows["gqa_attention"][2:] == ["4.00", "2.00", "500", "40.0%"]
    assert rows["torch"] == ["at::native::add", "1.00", "2.00", "", "", "20.0%"]
    edges = text(trace_step.edge_table(step))
    assert "programmatic" in edges
    assert "full" in edges


def test_one_layer_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace_step.draw(traced(), tmp_path / "layer.png")
    assert (tmp_path / "layer.png").stat().st_size > 1000


def test_bytes_are_those_that_a_call_must_move() -> None:
    x, weight = torch.zeros(2, 4), torch.zeros(8, 4)
    linear = trace_step._bytes("linear", (x, LinearWeight(weight, torch.zeros(1, 1)), None), torch.zeros(2, 8), [])
    assert linear == 4 * (2 * 4 + 8 * 4 + 1 + 2 * 8)
    experts = ExpertWeights(torch.zeros(4, 6, 4), torch.zeros(4, 4, 3))
    slots = torch.tensor([[0, 2], [2, -1]], dtype=torch.int32)
    hit = trace_step._bytes("experts_flat", (x, slots, torch.zeros(2, 2), experts), torch.zeros(2, 4), [])
    assert hit == 4 * (2 * (6 * 4 + 4 * 3) + 2 * (2 * 4))
    travelled = (x, slots, torch.zeros(2, 2), experts, torch.zeros(2, 1))
    assert trace_step._bytes("experts_flat", travelled, torch.zeros(2, 4), []) == hit
    parts = PartialSums(torch.zeros(2, 3, 8))
    assert trace_step._bytes("linear_parts", (x, LinearWeight(weight)), parts, []) == 4 * (2 * 4 + 8 * 4 + 2 * 3 * 8)
    left = ExpertRows(torch.zeros(4, 4), slots, torch.zeros(2, 2))
    for summed, both in ((left, 0), (dataclasses.replace(left, added=x), 2 * 4)):
        normed = trace_step._bytes("add_rms_norm", (summed, x, torch.zeros(4), 1e-6), (x, x), [])
        assert normed == 4 * (4 * 4 + 2 * (2 * 2) + both + 2 * 4 + 4 + 2 * (2 * 4))
    shape, cache = AttentionShape("gqa", 4, 2, 8, 0, 1.0), torch.zeros(9, 2, 16, 2, 8)
    q = torch.zeros(2, 4, 8)
    attended = trace_step._bytes("gqa_attention", (q, cache, None, shape, None), q, [5, 7])
    assert attended == 4 * (12 * 2 * 2 * 8 + 2 * (2 * 4 * 8))
    rows = Fp8Rows(torch.zeros(2, 256, dtype=torch.float8_e4m3fn), torch.zeros(2, 2))
    into_fp8 = trace_step._bytes("gqa_attention", (q, cache, None, shape, None), rows, [5, 7])
    assert into_fp8 == 4 * (12 * 2 * 2 * 8 + 2 * 4 * 8) + 2 * (256 + 2 * 4)


def test_every_entry_that_launches_is_recorded() -> None:
    """A new entry of the table would otherwise be listed as torch's."""
    host_only = {"plan_attention", "forget_graphs", "experts_masked"}
    entries = {name for name in reference.cpu().__slots__ if callable(getattr(reference.cpu(), name))}
    assert entries - host_only == {*trace_step._ENTRIES} - {"gqa_decode", "expert_rows", "linear_parts"}
    assert reference.cpu().gqa_decode is reference.cpu().expert_rows is reference.cpu().linear_parts is None
    assert {*trace_step._FP8_ENTRIES, "takes"} == {field.name for field in dataclasses.fields(Fp8RowKernels)}


def test_a_graph_that_no_driver_tells_of_has_no_edges(caplog: pytest.LogCaptureFixture) -> None:
    class Graph:
        def raw_cuda_graph(self) -> int:
            return 0

    if torch.cuda.is_available():
        pytest.skip("there is a driver")
    assert not edges_of(Graph())  # type: ignore[arg-type]
    assert "does not tell a graph's edges" in caplog.text
