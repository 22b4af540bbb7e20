"""Under a CUDA graph: replays with changed inputs and poisoned outputs equal eager calls bit for bit."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest
import torch
from gpu.kernel_samples import DEVICE, cache, choices, expert_weights, fp8, normal, same_bits, step
from gpu.test_attention import SHAPES, queries
from torch import Tensor

from minserve.kernels.interface import (
    AttentionMetadata,
    AttentionShape,
    HeadNorms,
    Kernels,
    LinearWeight,
    RotaryTable,
    RouterConfig,
)


def replays_equal_eager(call: Callable[[], Tensor], change: Callable[[], None]) -> None:
    """Captures call, then three times: change the inputs in place, poison the output, replay twice, compare with eager."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = call()
    for _ in range(3):
        change()
        out.fill_(float("nan"))
        graph.replay()
        first = out.clone()
        out.fill_(float("nan"))
        graph.replay()
        assert not first.isnan().any()
        assert same_bits(first, out)
        assert same_bits(first, call())


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("tokens", [1, 8, 32, 128, 300])
def test_experts(kernels: Kernels, kind: str, tokens: int) -> None:
    weights = expert_weights(32, 2048, 768, kind)
    x, (ids, shares) = normal(tokens, 2048), choices(tokens, 8, 32)

    def change() -> None:
        new_ids, new_shares = choices(tokens, 8, 32)
        x.normal_()
        ids.copy_(new_ids)
        shares.copy_(new_shares)

    replays_equal_eager(lambda: kernels.experts_flat(x, ids, shares, weights), change)


@pytest.mark.parametrize("tokens", [1, 32])
def test_fp8_linear(kernels: Kernels, tokens: int) -> None:
    weight, x = LinearWeight(*fp8(5120, 2048)), normal(tokens, 2048)

    def change() -> None:
        x.normal_()

    replays_equal_eager(lambda: kernels.linear(x, weight, None), change)


@dataclasses.dataclass
class Step:
    """Static buffers of a captured decode step, refilled for each replay."""

    metadata: AttentionMetadata
    layer: Tensor


def new_step(rows: int, shape: AttentionShape) -> Step:
    metadata = step([1] * rows, [1024] * rows, 64, max_pages=20)
    return Step(dataclasses.replace(metadata, graph=True), cache(metadata, shape))


def refill(static: Step, shape: AttentionShape) -> None:
    rows = static.metadata.page_table.shape[0]
    lengths = [random.randint(1, 1024) for _ in range(rows)]
    fresh = step([1] * rows, lengths, 64, max_pages=20)
    for name in ("seq_lens", "page_table", "slot_mapping"):
        getattr(static.metadata, name).copy_(getattr(fresh, name))
    static.layer.copy_(cache(fresh, shape, num_pages=static.layer.shape[0]))
    static.metadata = dataclasses.replace(static.metadata, seq_lens_host=fresh.seq_lens_host)


@pytest.mark.parametrize("name", ["qwen3", "qwen1.5", "moonlight", "deepseek-v3", "tiny-mla"])
@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("path", ["torch-gpu", "hopper", "flashinfer"])
def test_attention(name: str, rows: int, path: str) -> None:
    from minserve.kernels import stacks
    from minserve.kernels.flashinfer_attention import FlashInferAttention
    from minserve.kernels.triton_attention import TritonAttention

    shape = SHAPES[name]
    if path == "flashinfer":
        attention = FlashInferAttention(DEVICE, TritonAttention(DEVICE), least_mla_rows=1)
        plan_attention, gqa, mla = attention.plan, attention.gqa, attention.mla
    else:
        kernels = stacks.build(path, DEVICE)
        plan_attention, gqa, mla = kernels.plan_attention, kernels.gqa_attention, kernels.mla_attention
    static, inputs = new_step(rows, shape), queries(shape, rows)
    plans = [plan_attention(static.metadata, shape)]

    def call() -> Tensor:
        function: Callable[..., Tensor] = mla if shape.kind == "mla" else gqa
        return function(*inputs, static.layer, static.metadata, shape, plans[0])

    def change() -> None:
        refill(static, shape)
        for tensor in inputs:
            tensor.normal_()
        again = plan_attention(static.metadata, shape)
        assert again == plans[0]

    replays_equal_eager(call, change)


def test_a_moved_page_table_is_refused() -> None:
    from minserve.kernels.hopper import hopper

    kernels, shape = hopper(DEVICE), SHAPES["moonlight"]
    metadata = dataclasses.replace(step([1] * 64, [100] * 64, 64), graph=True)
    kernels.plan_attention(metadata, shape)
    moved = dataclasses.replace(metadata, page_table=metadata.page_table.clone())
    with pytest.raises(ValueError, match="moved"):
        kernels.plan_attention(moved, shape)
    kernels.forget_graphs()
    kernels.plan_attention(moved, shape)


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_a_whole_layer(kernels: Kernels, kind: str, rows: int) -> None:
    """Qwen3's widths: every entry of the table in one graph, the cache written by it."""
    shape, hidden_size = SHAPES["qwen3"], 2048
    static, x = new_step(rows, shape), normal(rows, hidden_size)

    def linear(n: int, k: int) -> LinearWeight:
        return LinearWeight(*fp8(n, k)) if kind == "fp8" else LinearWeight(normal(n, k, std=0.02))

    qkv, output, experts = linear(5120, hidden_size), linear(hidden_size, 4096), expert_weights(32, hidden_size, 768, kind)
    gate, gain, head_gain = normal(32, hidden_size, dtype=torch.float32), normal(hidden_size), normal(128)
    angles = torch.rand(1024, 64, device=DEVICE)
    rotary, norms = RotaryTable(torch.cat((angles.cos(), angles.sin()), 1), False), HeadNorms(head_gain, head_gain, 1e-6)
    positions = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    router = RouterConfig(8, "softmax", normalize=True)
    plans = [kernels.plan_attention(static.metadata, shape)]

    def call() -> Tensor:
        normed, residual = kernels.add_rms_norm(x, x, gain, 1e-6)
        fused = kernels.linear(normed, qkv, None)
        q = kernels.gqa_inputs(fused, norms, rotary, positions, static.layer, static.metadata.slot_mapping, shape)
        context = kernels.gqa_attention(q, static.layer, static.metadata, shape, plans[0]).flatten(1)
        normed, residual = kernels.add_rms_norm(kernels.linear(context, output, None), residual, gain, 1e-6)
        ids, shares = kernels.route(normed, gate, None, router, None)
        return kernels.experts_flat(normed, ids, shares, experts) + residual

    def change() -> None:
        refill(static, shape)
        x.normal_()
        positions.copy_(static.metadata.seq_lens - 1)
        kernels.plan_attention(static.metadata, shape)

    replays_equal_eager(call, change)
