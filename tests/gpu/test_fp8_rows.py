"""Rows that are quantised where they are made: to the bit what a launch of its own makes of them, and what a layer reads."""

from __future__ import annotations

import random

import pytest
import torch
from gpu.kernel_samples import DEVICE, INTERPRETED, cache, distance, fp8, normal, same_bits, sized, step
from torch import Tensor

from minserve.kernels import reference, triton_cache, triton_grouping, triton_rows
from minserve.kernels.interface import AttentionShape, Fp8Rows, Kernels, LinearWeight, PartialSums
from minserve.kernels.triton_attention import TritonAttention

pytestmark = [pytest.mark.interpreted, pytest.mark.usefixtures("poisoned")]
ROWS = sized([1, 5, 32, 128, 131], [1, 5])
WIDTHS = sized([128, 1536, 2048, 4096, 7168], [128, 384])


def assert_same_rows(got: Fp8Rows, wanted: Tensor) -> None:
    """`wanted`: the rows in bf16."""
    alone = triton_grouping.fp8_rows(wanted)
    assert got.scales.stride() == alone.scales.stride()
    assert same_bits(got.values, alone.values)
    assert same_bits(got.scales.t(), alone.scales.t())


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", WIDTHS)
def test_norms(rows: int, width: int) -> None:
    x, residual, gain = normal(rows, width), normal(rows, width), normal(width)
    residual[0], x[0, :128], x[-1, 64:] = -x[0], 1e-9, 0.0
    before = x.clone(), residual.clone()
    assert_same_rows(triton_rows.rms_norm_fp8(x, gain, 1e-6), triton_rows.rms_norm(x, gain, 1e-6))
    got, total = triton_rows.add_rms_norm_fp8(x, residual, gain, 1e-6)
    wanted, wanted_total = triton_rows.add_rms_norm(x, residual, gain, 1e-6)
    assert_same_rows(got, wanted)
    assert same_bits(total, wanted_total)
    assert all(same_bits(one, other) for one, other in zip((x, residual), before, strict=True))


def test_a_norm_of_a_view_and_no_rows() -> None:
    fused, gain = normal(7, 700), normal(256)
    view = fused[:, 100:356]
    assert_same_rows(triton_rows.rms_norm_fp8(view, gain, 1e-6), triton_rows.rms_norm(view, gain, 1e-6))
    assert triton_rows.rms_norm_fp8(view[:0], gain, 1e-6).values.shape == (0, 256)


def test_a_nan_stays_in_its_row() -> None:
    x, gain = normal(3, 256), normal(256)
    x[1, 7] = torch.nan
    got = triton_rows.rms_norm_fp8(x, gain, 1e-6)
    assert got.values.float().isnan().any(dim=1).tolist() == [False, True, False]
    assert_same_rows(got, triton_rows.rms_norm(x, gain, 1e-6))


STEPS = {
    "one part": ([1] * 5, [70, 1, 64, 130, 20], 264),
    "parts of each row": ([1] * 2, sized([900, 20], [200, 20]), 264),
    "parts of long rows alone": ([1] * 3, [70, 4500, 1], 1),
    "prompts": ([1, 30, 1, 5], [60, 40, 3, 5], 264),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), sized([(32, 4, 128), (28, 4, 128), (16, 2, 256)], [(4, 2, 128), (2, 1, 256)])
)
def test_attention(name: str, heads: int, kv_heads: int, head_dim: int) -> None:
    query, lengths, processors = STEPS[name]
    metadata, shape = step(query, lengths, 64), AttentionShape("gqa", heads, kv_heads, head_dim, 0, head_dim**-0.5)
    q, layer, engine = normal(sum(query), heads, head_dim), cache(metadata, shape), TritonAttention(DEVICE)
    engine.num_processors = processors
    plan = engine.plan(metadata, shape)
    got = engine.gqa_fp8(q, layer, metadata, shape, plan)
    assert_same_rows(got, engine.gqa(q, layer, metadata, shape, plan).flatten(1))


@pytest.mark.parametrize("tokens", sized([1, 16, 17, 70, 130], [1, 19]))
@pytest.mark.parametrize(
    ("heads", "rank", "width"), sized([(16, 512, 128), (128, 512, 128), (4, 64, 256)], [(3, 40, 128), (2, 32, 256)])
)
def test_heads_linear(tokens: int, heads: int, rank: int, width: int) -> None:
    x, weight = normal(tokens, heads, rank), normal(heads, width, rank, std=rank**-0.5).transpose(1, 2)
    assert_same_rows(triton_cache.heads_linear_fp8(x, weight), triton_cache.heads_linear(x, weight).flatten(1))


def test_the_reference_quantises_alike() -> None:
    x = normal(6, 384)
    x[2] = 0.0
    got, truth = triton_grouping.fp8_rows(x), reference.quantize(x)
    assert got.scales.stride() == truth.scales.stride()
    for rows in (got, truth):
        wide = rows.values.float() * rows.scales.repeat_interleave(128, dim=1)
        assert distance(wide, x) < 4e-2
    assert distance(got.scales, truth.scales) < 1e-6


@pytest.mark.skipif(INTERPRETED, reason="DeepGEMM needs a GPU")
@pytest.mark.parametrize("rows", [2, 8, 12, 32, 33, 128, 300])
@pytest.mark.parametrize(("n", "k"), [(5120, 2048), (2048, 4096), (2112, 7168), (7168, 16384)])
def test_a_layer_takes_them_where_it_would_quantise(kernels: Kernels, rows: int, n: int, k: int) -> None:
    weight, x, bias = LinearWeight(*fp8(n, k)), normal(rows, k), normal(n)
    if kernels.fp8_rows is None:
        assert kernels.name == "torch-gpu"
        return
    takes = kernels.fp8_rows.takes
    for by_parts in (False, True):
        assert not takes(rows, torch.float32, weight, by_parts)
        assert not takes(rows, x.dtype, LinearWeight(x), by_parts)
        assert not takes(0, x.dtype, weight, by_parts)
    assert takes(rows, x.dtype, weight, False) == (rows > 8 or k > 4096)
    # A product in parts reads FP8 rows where that product of few plain ones would not.
    assert takes(rows, x.dtype, weight, True) == (rows > 8 or k > 4096 or (n, k) == (2048, 4096))
    if takes(rows, x.dtype, weight, False):
        for extra in (None, bias):
            handed = kernels.fp8_rows.linear(triton_grouping.fp8_rows(x), weight, extra)
            assert same_bits(handed, kernels.linear(x, weight, extra))
    assert kernels.linear_parts is not None
    if takes(rows, x.dtype, weight, True):
        left, wanted = kernels.linear_parts(triton_grouping.fp8_rows(x), weight), kernels.linear_parts(x, weight)
        assert isinstance(left, PartialSums) == isinstance(wanted, PartialSums) == ((n, k) == (2048, 4096) and rows <= 32)
        sums = [side.parts if isinstance(side, PartialSums) else side for side in (left, wanted)]
        assert same_bits(*sums)


@pytest.mark.skipif(INTERPRETED, reason="FlashInfer needs a GPU")
@pytest.mark.parametrize("query", [[1] * 20, [1, 40, 1, 33], [1, 1, 50]])
def test_every_step_s_attention_of_a_stack_is_quantised(kernels: Kernels, query: list[int]) -> None:
    if kernels.fp8_rows is None:
        return
    for shape in (AttentionShape("gqa", 32, 4, 128, 0, 128**-0.5), AttentionShape("gqa", 4, 2, 64, 0, 0.125)):
        metadata = step(query, [length + random.randint(0, 300) for length in query], 64)
        q, layer, plan = (
            normal(sum(query), shape.num_heads, shape.head_dim),
            cache(metadata, shape),
            kernels.plan_attention(metadata, shape),
        )
        got = kernels.fp8_rows.gqa_attention(q, layer, metadata, shape, plan)
        assert_same_rows(got, kernels.gqa_attention(q, layer, metadata, shape, plan).flatten(1))
