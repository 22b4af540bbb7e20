"""Times calls by replays of a CUDA graph, and makes random experts to time. Knows no kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from minserve.kernels.expert_choices import ExpertShape
from minserve.kernels.interface import ExpertWeights

Call = Callable[[], object]
_DEVICE = torch.device("cuda")
_BF16 = torch.bfloat16


def graph_microseconds(calls: Sequence[Call], replays: int = 10) -> float:
    """Time of one call, from replays of a graph that holds all of them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which may still be making the inputs
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = [call() for call in calls]
    for _ in range(3):
        graph.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    del kept
    return float(start.elapsed_time(end)) * 1e3 / (replays * len(calls))


def random_fp8(*shape: int) -> tuple[Tensor, Tensor]:
    """Weights [..., N, K] and block scales fp32 [..., N / 128, K / 128], rounded up, whose products have std about 0.02."""
    weight = (torch.randn(shape, device=_DEVICE, dtype=_BF16) * 64).to(torch.float8_e4m3fn)
    blocks = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    return weight, torch.rand(blocks, device=_DEVICE) * 3e-4 + 1.5e-4


def _random_int4(*shape: int) -> tuple[Tensor, Tensor]:
    packed = torch.randint(-(1 << 31), 1 << 31, (*shape[:-1], shape[-1] // 8), device=_DEVICE, dtype=torch.int64).int()
    return packed, (torch.rand(*shape[:-1], shape[-1] // 32, device=_DEVICE) * 6e-3 + 1e-3).to(_BF16)


def random_experts(shape: ExpertShape) -> ExpertWeights:
    """Weights whose values have std about 0.02."""
    e, h, i = shape.experts, shape.hidden, shape.inner
    if shape.format == "plain":
        return ExpertWeights(*(torch.empty(s, device=_DEVICE, dtype=_BF16).normal_(std=0.02) for s in ((e, 2 * i, h), (e, h, i))))
    random = random_fp8 if shape.format == "fp8_block" else _random_int4
    (w13, s13), (w2, s2) = random(e, 2 * i, h), random(e, h, i)
    return ExpertWeights(w13, w2, s13, s2)


def random_tokens(tokens: int, shape: ExpertShape) -> tuple[Tensor, Tensor, Tensor]:
    """Rows bf16 [T, H], their slots, uniform and distinct, int32 [T, k], and weights fp32 [T, k]."""
    ids = torch.rand(tokens, shape.experts, device=_DEVICE).topk(shape.top_k).indices.int()
    return torch.randn(tokens, shape.hidden, device=_DEVICE, dtype=_BF16), ids, torch.rand(tokens, shape.top_k, device=_DEVICE)


def expert_bytes(shape: ExpertShape) -> float:
    """Of one expert's weights and scales."""
    each = {"plain": 2.0, "fp8_block": 1.0, "int4_group": 0.5625}[shape.format]
    return 3.0 * shape.hidden * shape.inner * each
