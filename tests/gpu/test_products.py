"""Linear layers and routed experts, plain and FP8, at tiny and real widths."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from gpu.kernel_samples import (
    BF16,
    DEVICE,
    INTERPRETED,
    choices,
    distance,
    expert_truth,
    expert_weights,
    fp8,
    normal,
    one_expert,
    quantised,
    same_bits,
    sized,
)

from minserve.kernels import reference
from minserve.kernels.interface import ExpertRows, Kernels, LinearWeight
from minserve.kernels.triton_grouping import combine

pytestmark = [pytest.mark.interpreted, pytest.mark.usefixtures("poisoned")]
# (experts, hidden, inner, top_k): a tiny one, then the widths of Qwen3-30B, Moonlight, DeepSeek-V3 and Qwen2-57B.
SIZES = sized(
    [(8, 128, 256, 2), (16, 2048, 768, 8), (16, 2048, 1408, 6), (8, 7168, 2048, 4), (8, 3584, 2560, 4)],
    [(4, 128, 256, 2), (6, 160, 96, 3)],
)
WIDE = sized((16, 2048, 768, 8), (4, 160, 96, 3))
"""The sizes of tests about which rows matter."""
KINDS = ["bf16", "fp8", "int4"]
BF16_ERROR = 8e-3
FP8_ACTIVATION_ERROR = 6e-2
"""What quantising activations costs on random data, against unquantised ones."""
FP8_ROUNDING = 2.5e-2
"""Against a truth that quantises too: the two agree but for values near the middle of two FP8 numbers."""


def expert_path(name: str) -> Callable[..., torch.Tensor]:
    from minserve.kernels import triton_expert_rows, triton_experts

    if name in ("vector", "tiled"):
        return {"vector": triton_expert_rows.experts_vector, "tiled": triton_experts.experts_tiled}[name]
    from minserve.kernels.deep_gemm_products import DeepGemmProducts

    return functools.partial(DeepGemmProducts().experts_grouped, masked=name == "masked")


PATHS = [("vector", 1), ("vector", 2), ("tiled", 1), ("tiled", 5), ("tiled", 30)]
PATHS += sized([("tiled", 8), ("tiled", 300), ("masked", 30), ("contiguous", 300)], [])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("path", "tokens"), PATHS)
def test_experts_equal_the_reference(kind: str, sizes: tuple[int, int, int, int], path: str, tokens: int) -> None:
    if kind == "int4" and path != "tiled":
        pytest.skip("INT4 has tiles alone")
    experts, hidden, inner, top_k = sizes
    weights, function = expert_weights(experts, hidden, inner, kind), expert_path(path)
    x, (ids, shares) = normal(tokens, hidden), choices(tokens, top_k, experts)
    before = x.clone()
    result = function(x, ids, shares, weights)
    quantises = kind == "fp8" and path in ("masked", "contiguous")
    error = distance(result, expert_truth(x, ids, shares, weights))
    assert error < (FP8_ACTIVATION_ERROR if quantises else BF16_ERROR)
    if quantises:
        assert distance(result, expert_truth(x, ids, shares, weights, fp8_activations=True)) < FP8_ROUNDING
    assert same_bits(x, before)
    assert INTERPRETED or same_bits(result, function(x, ids, shares, weights))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", sized([0, 1, 20, 200, 300], [0, 20, 257]))
def test_experts_that_leave_their_sum_do_the_same(kernels: Kernels, kind: str, tokens: int) -> None:
    experts, hidden, inner, top_k = WIDE
    weights, x, (ids, shares) = (
        expert_weights(experts, hidden, inner, kind),
        normal(tokens, hidden),
        choices(tokens, top_k, experts),
    )
    assert kernels.expert_rows is not None
    left, wanted = kernels.expert_rows(x, ids, shares, weights), kernels.experts_flat(x, ids, shares, weights)
    if isinstance(left, ExpertRows):
        assert 0 < tokens <= 256
        assert torch.equal(left.slots, ids) and torch.equal(left.weights, shares)
        left = combine(left.rows, left.slots, left.weights, direct=True)
    assert same_bits(left, wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", sized([3, 30, 300], [3, 20]))
def test_padded_rows_add_nothing_and_stay_finite(kernels: Kernels, kind: str, tokens: int) -> None:
    experts, hidden, inner, top_k = WIDE
    weights = expert_weights(experts, hidden, inner, kind)
    x, (ids, shares) = normal(tokens, hidden), choices(tokens, top_k, experts)
    full = kernels.experts_flat(x, ids, shares, weights)
    padded_ids, padded_x, padded_shares = ids.clone(), x.clone(), shares.clone()
    padded_ids[2:], padded_x[2:], padded_shares[2:] = -1, float("nan"), float("nan")
    padded = kernels.experts_flat(padded_x, padded_ids, padded_shares, weights)
    assert same_bits(padded[:2], full[:2])
    assert not padded[2:].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", sized([2, 7, 30, 128, 300], [5, 20]))
def test_a_row_depends_on_no_other(kernels: Kernels, kind: str, tokens: int) -> None:
    experts, hidden, inner, top_k = WIDE
    weights = expert_weights(experts, hidden, inner, kind)
    (x, other_x), (ids, shares), (other_ids, other_shares) = (
        normal(2, tokens, hidden),
        *(choices(tokens, top_k, experts) for _ in range(2)),
    )
    kept = [0, tokens - 1]
    other_x[kept], other_ids[kept], other_shares[kept] = x[kept], ids[kept], shares[kept]
    result, beside_others = (
        kernels.experts_flat(x, ids, shares, weights),
        kernels.experts_flat(other_x, other_ids, other_shares, weights),
    )
    assert same_bits(result[kept], beside_others[kept])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", sized([0, 1, 8, 100, 300], [0, 1, 8, 40]))
def test_all_tokens_may_choose_one_expert(kernels: Kernels, kind: str, tokens: int) -> None:
    experts, hidden, inner, top_k = WIDE
    weights, x, (ids, shares) = (
        expert_weights(experts, hidden, inner, kind),
        normal(tokens, hidden),
        choices(tokens, top_k, experts),
    )
    ids[:], ids[:, 1] = -1, 3
    result = kernels.experts_flat(x, ids, shares, weights)
    bound = FP8_ACTIVATION_ERROR if (kind, kernels.name) == ("fp8", "hopper") else BF16_ERROR
    assert result.shape == x.shape
    assert distance(result, expert_truth(x, ids, shares, weights)) < bound


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", SIZES[:2], ids=str)
@pytest.mark.parametrize("capacity", sized([16, 40, 128], [16, 40]))
def test_masked_experts_equal_the_reference(kernels: Kernels, kind: str, sizes: tuple[int, int, int, int], capacity: int) -> None:
    experts, hidden, inner, _ = sizes
    weights = expert_weights(experts, hidden, inner, kind)
    x = normal(experts, capacity, hidden)
    counts = torch.randint(0, capacity + 1, (experts,), device=DEVICE, dtype=torch.int32)
    counts[0], counts[1] = 0, capacity
    result = kernels.experts_masked(x, counts, weights)
    bound = FP8_ACTIVATION_ERROR if (kind, kernels.name, capacity) == ("fp8", "hopper", 128) else BF16_ERROR
    for slot, count in enumerate(counts.tolist()):
        if count:
            truth = one_expert(x[slot, :count], slot, weights, False)
            assert distance(result[slot, :count], truth) < bound, slot


@pytest.mark.parametrize("kind", KINDS)
def test_every_triton_tile_shape_equals_the_reference(kind: str) -> None:
    from minserve.kernels import triton_expert_rows, triton_experts

    experts, hidden, inner, top_k = sized((4, 384, 640, 2), (2, 160, 96, 1))
    weights = expert_weights(experts, hidden, inner, kind)
    for tokens in sized((2, 9, 60, 150, 700), (9, 60, 150, 220)):
        x, (ids, shares) = normal(tokens, hidden), choices(tokens, top_k, experts)
        result = triton_experts.experts_tiled(x, ids, shares, weights)
        assert distance(result, expert_truth(x, ids, shares, weights)) < BF16_ERROR, tokens
        if tokens <= 16 and kind != "int4":
            result = triton_expert_rows.experts_vector(x, ids, shares, weights)
            assert distance(result, expert_truth(x, ids, shares, weights)) < BF16_ERROR, tokens


@pytest.mark.parametrize("rows", [8, 16])
@pytest.mark.parametrize("inner", sized([768, 1408], [256, 128]))
def test_fp8_blocks_asked_for_together_give_the_same_bits(rows: int, inner: int) -> None:
    from minserve.kernels import triton_experts
    from minserve.kernels.expert_tiles import Block, TileSizes

    experts, hidden, top_k, tokens = sized((16, 2048, 8, 90), (3, 512, 2, 10))
    weights, x, (ids, shares) = (
        expert_weights(experts, hidden, inner, "fp8"),
        normal(tokens, hidden),
        choices(tokens, top_k, experts),
    )
    one, two = (
        triton_experts.experts_tiled(x, ids, shares, weights, TileSizes(rows, Block(128, k, 4, 2), Block(64, k, 4, 2)))
        for k in (128, 256)
    )
    assert distance(one, expert_truth(x, ids, shares, weights)) < BF16_ERROR
    assert same_bits(one, two)


@pytest.mark.parametrize("inner", sized([768, 1408], [128, 256]))
@pytest.mark.parametrize("pairs", [1, 8, 9, 16, 17])
def test_fp8_tiles_of_sixteen_may_hold_fewer(pairs: int, inner: int) -> None:
    """Those of up to eight pairs do without the second half; a pair's bits are the same with it."""
    from minserve.kernels import triton_experts
    from minserve.kernels.expert_tiles import Block, TileSizes

    weights, others = expert_weights(2, sized(2048, 160), inner, "fp8"), sized(9, 1)
    x, shares = normal(pairs + others, sized(2048, 160)), torch.ones(pairs + others, 1, device=DEVICE)
    ids = torch.tensor([0] * pairs + [1] * others, dtype=torch.int32, device=DEVICE)[:, None]
    sizes = TileSizes(16, Block(128, 128, 4, 2), Block(64, 128, 4, 3))
    result = triton_experts.experts_tiled(x, ids, shares, weights, sizes)
    assert distance(result, expert_truth(x, ids, shares, weights)) < BF16_ERROR
    full = x.new_zeros(16, x.shape[1])
    full[: min(pairs, 8)] = x[: min(pairs, 8)]
    beside = triton_experts.experts_tiled(full, ids.new_zeros(16, 1), shares.new_ones(16, 1), weights, sizes)
    assert same_bits(result[: min(pairs, 8)], beside[: min(pairs, 8)])


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_no_tile_goes_on_before_it_is_written(kind: str) -> None:
    """Its second product starts while other tiles' first ones run: it would meet the poison of new memory."""
    from minserve.kernels import triton_experts

    experts, hidden, inner, top_k = sized((64, 2048, 768, 8), (6, 160, 128, 3))
    weights = expert_weights(experts, hidden, inner, kind)
    for tokens in sized([20, 100, 700], [20]):
        x, (ids, shares) = normal(tokens, hidden), choices(tokens, top_k, experts)
        truth = expert_truth(x, ids, shares, weights)
        for _ in range(sized(50, 1)):
            assert distance(triton_experts.experts_tiled(x, ids, shares, weights), truth) < BF16_ERROR, tokens


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"),
    sized(
        [(1, 8, 128), (128, 8, 128), (700, 6, 64), (3000, 8, 256), (20000, 8, 60)],
        [(1, 8, 64), (40, 4, 16), (70, 4, 8), (1400, 3, 5), (22000, 4, 4)],
    ),
)
def test_pairs_are_placed_in_order(tokens: int, top_k: int, experts: int) -> None:
    from minserve.kernels import triton_grouping

    ids, _ = choices(tokens, top_k, experts)
    flat, capacity = ids.flatten(), tokens
    order = flat.argsort(stable=True)
    order = order[flat[order] >= 0]
    owner, counts = flat[order].long(), torch.bincount(flat[flat >= 0], minlength=experts)
    rank = torch.arange(len(order), device=DEVICE) - (counts.cumsum(0) - counts)[owner]

    masked = triton_grouping.place_masked(ids, experts, capacity)
    assert torch.equal(masked.destinations[order].long(), owner * capacity + rank)
    assert torch.equal(masked.counts.long(), counts)
    assert (masked.destinations[flat < 0] == -1).all()

    packed = triton_grouping.place_contiguous(ids, experts, 128)
    padded = (counts + 127) // 128 * 128
    assert torch.equal(packed.destinations[order].long(), (padded.cumsum(0) - padded)[owner] + rank)
    assert packed.row_expert is not None
    owners = torch.repeat_interleave(torch.arange(experts, device=DEVICE), padded)
    assert torch.equal(packed.row_expert[: len(owners)].long(), owners)
    assert (packed.row_expert[len(owners) :] == -1).all()

    tiles = triton_grouping.tiles_of_pairs(ids, experts, 16)
    assert tiles.ready is not None
    assert tiles.ready.shape == tiles.expert.shape
    assert not tiles.ready.any()
    rows = tiles.rows.view(-1, 16)[tiles.expert >= 0]
    assert torch.equal(rows[rows >= 0].long(), order)
    assert torch.equal(
        flat[rows.clamp(min=0).long()][rows >= 0], tiles.expert[tiles.expert >= 0].repeat_interleave(16)[rows.flatten() >= 0]
    )


def test_quantised_rows_and_scales_equal_the_ideal() -> None:
    from minserve.kernels import triton_grouping

    width = sized(2048, 1280)
    x = normal(77, width)
    rows, scales = triton_grouping.move_rows(x, 77, quantize=True)
    assert scales is not None
    assert scales.stride() == (80 * (width // 128), 1, 80)
    assert distance(rows.float() * scales[0].repeat_interleave(128, dim=1), quantised(x)) < 3e-3
    gated, gated_scales = triton_grouping.move_rows(x, 77, gated=True, quantize=True)
    assert gated_scales is not None
    truth = reference.silu_and_mul(x.float())
    assert distance(gated.float() * gated_scales[0].repeat_interleave(128, dim=1), truth) < 4e-2


@pytest.mark.parametrize(
    ("n", "k"), sized([(576, 7168), (5120, 2048), (2048, 1408), (256, 128), (200, 384)], [(256, 128), (200, 384), (40, 4200)])
)
@pytest.mark.parametrize("tokens", [1, 2, 7, 33, 300])
def test_fp8_linear_equals_the_reference(kernels: Kernels, n: int, k: int, tokens: int) -> None:
    (weight, scale), x, bias = fp8(n, k), normal(tokens, k), normal(n)
    for extra in (None, bias):
        result = kernels.linear(x, LinearWeight(weight, scale), extra)
        wide = None if extra is None else extra.float()
        truth = reference.linear(x.float(), LinearWeight(weight, scale), wide)
        quantises = kernels.name == "hopper" and n % 64 == 0 and (tokens > 8 or (tokens > 1 and k > 4096))
        assert distance(result, truth) < (FP8_ACTIVATION_ERROR if quantises else BF16_ERROR)
        if quantises:
            assert distance(result, reference.linear(quantised(x), LinearWeight(weight, scale), wide)) < BF16_ERROR


@pytest.mark.parametrize(
    ("n", "k"), sized([(5120, 2048), (2048, 4096), (2048, 2048), (2048, 11264), (600, 7168), (200, 96)], [(200, 96), (40, 600)])
)
@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 33])
def test_plain_linear_equals_the_reference(kernels: Kernels, n: int, k: int, tokens: int) -> None:
    x, weight, bias = normal(tokens, k), normal(n, k), normal(n)
    truth = x.double() @ weight.double().T
    assert distance(kernels.linear(x, LinearWeight(weight), None), truth) < BF16_ERROR
    assert distance(kernels.linear(x, LinearWeight(weight), bias), truth + bias.double()) < BF16_ERROR


def test_plain_linear_takes_bf16_and_fp32(kernels: Kernels) -> None:
    for dtype, bound in ((BF16, BF16_ERROR), (torch.float32, 1e-5)):
        x, weight = normal(5, 2048, dtype=dtype), normal(128, 2048, dtype=dtype)
        truth = x.double() @ weight.double().T
        assert distance(kernels.linear(x, LinearWeight(weight), None), truth) < bound


def test_fp8_products_hold_large_activations_at_the_largest_half() -> None:
    """Inputs and what lies between two products are halves there: 1e6 and its square must not become infinite."""
    from minserve.kernels import triton_experts, triton_linear

    x, (weight, scale) = normal(5, 256), fp8(64, 256)
    x[1, 7] = 1e6
    result = triton_linear.linear(x, LinearWeight(weight, scale), None)
    assert distance(result, reference.linear(x.float().clamp(-65504, 65504), LinearWeight(weight, scale), None)) < BF16_ERROR
    ids, shares = choices(5, 2, 4)
    ids[1] = torch.tensor([0, 3], device=DEVICE)
    result = triton_experts.experts_tiled(x, ids, shares, expert_weights(4, 256, 128, "fp8"))
    assert result.isfinite().all()
