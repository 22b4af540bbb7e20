"""Products of up to 32 rows, whole and in parts: to the bit where sums are exact, and where a stack takes them."""

from __future__ import annotations

import random

import pytest
import torch
from gpu.kernel_samples import BF16, DEVICE, INTERPRETED, distance, fp8, normal, quantised, same_bits, sized
from torch import Tensor

from minserve.kernels import reference, triton_few_rows, triton_grouping, triton_linear
from minserve.kernels.interface import Fp8Rows, Kernels, LinearWeight, PartialSums

pytestmark = [pytest.mark.interpreted, pytest.mark.usefixtures("poisoned")]
FP8 = torch.float8_e4m3fn
ROWS = [1, 2, 3, 9, 16, 17, 31, 32]
SIZES = sized([(5120, 2048), (3648, 2048), (2048, 4096), (2048, 2048)], [(192, 384), (64, 1024)])
"""Whole products': some widths are half a block of scales more than whole blocks."""
KINDS = ["bf16", "fp8"]
CUTS = [
    (n, k, parts, kind)
    for n, k, parts in sized(
        [(1088, 1024, 2), (3648, 2048, 2), (2048, 2048, 4), (2048, 4096, 4), (2048, 2048, 8), (2048, 4096, 8)],
        [(192, 512, 2), (64, 512, 4), (192, 2048, 8)],
    )
    for kind in KINDS
    if 64 * k // parts * (2 if kind == "bf16" else 1) <= 64 << 10
]
"""Columns of the result and of the weight, parts, and the type: what a program holds at most."""
BF16_ERROR = 8e-3
ROUNDED = 2.4e-3
"""Rounding once to bf16 is 1.7e-3, cutting what is beyond 3.3e-3."""
FP8_SUMS = sized(4e-3, 1e-5)
"""A GPU's matrix instructions add FP8 products with fewer bits than fp32 has."""
Rows = Tensor | Fp8Rows


def whole_numbers(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randint(-2, 3, shape, device=DEVICE).to(dtype)


def powers_of_two(*shape: int) -> Tensor:
    return torch.tensor([0.125, 0.25, 0.5, 1.0, 2.0, 4.0], device=DEVICE)[torch.randint(0, 6, shape, device=DEVICE)]


def exact(rows: int, n: int, k: int, kind: str) -> tuple[Rows, LinearWeight]:
    """Numbers of few bits, whose sums fp32 holds in any order. Scales differ in each block; those of no row are NaN."""
    if kind != "fp8":
        dtype = BF16 if kind == "bf16" else torch.float16
        return whole_numbers(rows, k, dtype=dtype), LinearWeight(whole_numbers(n, k, dtype=dtype))
    x = triton_grouping.empty_fp8_rows(rows, k, DEVICE)
    x.values.copy_(whole_numbers(rows, k))
    x.scales.copy_(powers_of_two(*x.scales.shape))
    return x, LinearWeight(whole_numbers(n, k).to(FP8), powers_of_two(-(-n // 128), k // 128))


def some(rows: int, n: int, k: int, kind: str) -> tuple[Rows, LinearWeight]:
    """Numbers of all bits."""
    if kind == "bf16":
        return normal(rows, k), LinearWeight(normal(n, k))
    return triton_grouping.fp8_rows(normal(rows, k)), LinearWeight(*fp8(n, k))


def wide(x: Rows) -> Tensor:
    """fp64 [T, K]"""
    return x.double() if isinstance(x, Tensor) else x.values.double() * x.scales.double().repeat_interleave(128, dim=1)


def wide_weight(weight: LinearWeight) -> Tensor:
    """fp64 [N, K]"""
    if weight.scale is None:
        return weight.weight.double()
    scale = weight.scale.double().repeat_interleave(128, dim=0).repeat_interleave(128, dim=1)
    return weight.weight.double() * scale[: weight.weight.shape[0]]


def truth(x: Rows, weight: LinearWeight) -> Tensor:
    """fp64 [T, N]"""
    return wide(x) @ wide_weight(weight).T


def true_parts(x: Rows, weight: LinearWeight, parts: int) -> Tensor:
    """fp64 [T, P, N]: part p is of the p-th share of the columns."""
    rows, columns = (side.unflatten(1, (parts, -1)) for side in (wide(x), wide_weight(weight)))
    return torch.einsum("tpk,npk->tpn", rows, columns)


def tensors(x: Rows, weight: LinearWeight) -> list[Tensor]:
    """`scales` rows fastest, as they lie in memory."""
    held = [x] if isinstance(x, Tensor) else [x.values, x.scales.t()]
    return [*held, weight.weight, *([] if weight.scale is None else [weight.scale])]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("rows", ROWS)
def test_a_whole_product_is_the_sum_rounded_once(rows: int, n: int, k: int, kind: str) -> None:
    x, weight = exact(rows, n, k, kind)
    before = [tensor.clone() for tensor in tensors(x, weight)]
    got = triton_few_rows.linear(x, weight, None)
    assert got.dtype == BF16
    assert torch.equal(got, truth(x, weight).to(BF16))
    assert all(same_bits(tensor, old) for tensor, old in zip(tensors(x, weight), before, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 3, 32])
def test_a_bias_is_added_before_the_rounding(rows: int, kind: str) -> None:
    (n, k), bias = SIZES[0], whole_numbers(SIZES[0][0])
    x, weight = exact(rows, n, k, kind)
    bias *= 8.5
    assert torch.equal(triton_few_rows.linear(x, weight, bias), (truth(x, weight) + bias.double()).to(BF16))


def test_half_precision_rows() -> None:
    x, weight = exact(9, *SIZES[0], "fp16")
    got = triton_few_rows.linear(x, weight, None)
    assert got.dtype == torch.float16
    assert torch.equal(got, truth(x, weight).half())


@pytest.mark.parametrize(("n", "k", "parts", "kind"), CUTS)
@pytest.mark.parametrize("rows", ROWS)
def test_each_part_is_of_its_columns(rows: int, n: int, k: int, parts: int, kind: str) -> None:
    x, weight = exact(rows, n, k, kind)
    before = [tensor.clone() for tensor in tensors(x, weight)]
    got = triton_few_rows.linear_parts(x, weight, parts).parts
    assert got.dtype == torch.float32
    assert torch.equal(got.double(), true_parts(x, weight, parts))
    assert all(same_bits(tensor, old) for tensor, old in zip(tensors(x, weight), before, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 9, 32])
def test_whole_products_of_numbers_of_all_bits(rows: int, kind: str) -> None:
    bound = ROUNDED if kind == "bf16" or INTERPRETED else FP8_SUMS
    for n, k in SIZES:
        x, weight = some(rows, n, k, kind)
        got = triton_few_rows.linear(x, weight, None)
        assert distance(got, truth(x, weight)) < bound
        assert same_bits(got, triton_few_rows.linear(x, weight, None))


@pytest.mark.parametrize("rows", [1, 9, 32])
def test_parts_of_numbers_of_all_bits(rows: int) -> None:
    for n, k, parts, kind in CUTS:
        x, weight = some(rows, n, k, kind)
        got = triton_few_rows.linear_parts(x, weight, parts).parts
        assert distance(got, true_parts(x, weight, parts)) < (1e-5 if kind == "bf16" else FP8_SUMS)
        assert same_bits(got, triton_few_rows.linear_parts(x, weight, parts).parts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("rows", [3, 16, 31])
def test_a_row_depends_on_no_other(rows: int, parts: int, kind: str) -> None:
    """Nor on what lies behind the last one; and nothing is written there."""
    n, k = sized((2048, 2048), (64, 512))
    x, weight = some(rows + 5, n, k, kind)
    plain = x if isinstance(x, Tensor) else x.values
    plain[rows:] = torch.nan
    if isinstance(x, Fp8Rows):
        x.scales[rows:] = torch.nan
    kept = [0, rows - 1]

    def product() -> Tensor:
        few: Rows = x[:rows] if isinstance(x, Tensor) else Fp8Rows(x.values[:rows], x.scales[:rows])
        room = torch.full((rows + 5, parts, n), 7.0, device=DEVICE, dtype=torch.float32 if parts > 1 else BF16)
        triton_few_rows._launch(few, weight, None, room[:rows], parts)
        assert room[rows:].eq(7).all()
        return room[:rows]

    alone = product()
    assert alone.isfinite().all()
    assert distance(alone.double().sum(dim=1), truth(x, weight)[:rows]) < (ROUNDED if kind == "bf16" else FP8_SUMS + ROUNDED)
    plain[1 : rows - 1] = torch.nan
    beside = product()
    assert same_bits(beside[kept], alone[kept])
    assert beside[1 : rows - 1].isnan().all()


def test_rows_that_are_not_contiguous() -> None:
    n, k, parts, _ = CUTS[0]
    fused, weight = whole_numbers(9, k + 300), LinearWeight(whole_numbers(n, k))
    for x in (fused[:, 100 : 100 + k], whole_numbers(k, 5).t(), fused[::3, 7 : 7 + k]):
        assert not x.is_contiguous()
        assert torch.equal(triton_few_rows.linear(x, weight, None), truth(x, weight).to(BF16))
        got = triton_few_rows.linear_parts(x, weight, parts).parts
        assert torch.equal(got.double(), true_parts(x, weight, parts))


def sized_weight(n: int, k: int, kind: torch.dtype) -> LinearWeight:
    """On a device of no memory, which counts as one of 132 processors."""
    scale = torch.empty(-(-n // 128), -(-k // 128), device="meta") if kind == FP8 else None
    return LinearWeight(torch.empty(n, k, dtype=kind, device="meta"), scale)


# Of each weight: whether it is multiplied whole, and its parts where rows are plain and in FP8.
PUBLISHED = {
    "Qwen3-30B qkv": (5120, 2048, True, 0, 0),
    "Qwen3-30B o": (2048, 4096, False, 8, 4),
    "Moonlight q and kv": (3648, 2048, True, 4, 2),
    "Moonlight o": (2048, 2048, False, 8, 4),
    "Moonlight shared gate and up": (5632, 2048, False, 0, 0),
    "Moonlight shared down": (2048, 2816, False, 0, 0),
    "DeepSeek-V3 o": (7168, 16384, False, 0, 0),
    "DeepSeek-V3 q_b": (24576, 1536, False, 0, 0),
    "DeepSeek-V3 shared down": (7168, 2048, False, 0, 0),
    "a head": (151936, 2048, False, 0, 0),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_which_published_weights_are_taken(name: str) -> None:
    n, k, whole, plain_parts, fp8_parts = PUBLISHED[name]
    for kind, parts in ((BF16, plain_parts), (torch.float16, plain_parts), (FP8, fp8_parts)):
        weight = sized_weight(n, k, kind)
        for rows in (0, 1, 2, 8, 32, 33):
            few = 1 <= rows <= 32
            assert triton_few_rows.takes_whole(rows, kind, weight) == (whole and few), rows
            assert triton_few_rows.parts_of(rows, kind, weight) == (parts if few and rows > 1 else 0), rows


@pytest.mark.parametrize("rows", [2, 32])
def test_rows_and_weights_of_two_types_are_not_taken(rows: int) -> None:
    kinds = (BF16, torch.float16, torch.float32, FP8)
    for row_type in kinds:
        for kind in kinds:
            taken = row_type == kind != torch.float32
            for n, k in ((5120, 2048), (2048, 4096)):
                weight = sized_weight(n, k, kind)
                assert triton_few_rows.takes_whole(rows, row_type, weight) == (taken and n == 5120)
                assert bool(triton_few_rows.parts_of(rows, row_type, weight)) == (taken and n == 2048)
    unscaled = LinearWeight(sized_weight(5120, 2048, FP8).weight)
    assert not triton_few_rows.takes_whole(rows, FP8, unscaled) and not triton_few_rows.takes_whole(rows, BF16, unscaled)


def test_whatever_is_taken_fits() -> None:
    """Programs of whole blocks. Those of parts run at once, two of plain weights on a processor; whole ones leave some free."""
    cuts = set()
    for _ in range(20_000):
        kind, rows = random.choice((BF16, FP8)), random.randint(0, 40)
        n, k = random.randint(1, 300) * random.choice((64, 64, 64, 32)), random.randint(1, 80) * random.choice((128, 128, 64))
        weight = sized_weight(n, k, kind)
        parts, whole = triton_few_rows.parts_of(rows, kind, weight), triton_few_rows.takes_whole(rows, kind, weight)
        if parts or whole:
            assert 1 <= rows <= 32 and n % 64 == 0 and k % 128 == 0
        if parts:
            assert k % (parts * 128) == 0
            assert 64 * k // parts * kind.itemsize <= 64 << 10
            assert n // 64 * parts <= 132 * kind.itemsize
        if whole:
            assert 44 <= n // 64 <= 82 and 1024 <= k <= 4096
        cuts |= {parts, whole}
    assert cuts == {0, 1, 2, 4, 8}


@pytest.mark.parametrize(
    ("n", "k", "paths"),
    [
        (5120, 2048, {1: "vector", 2: "few", 8: "few", 9: "few", 32: "few", 33: "tiles"}),
        (5632, 2048, {1: "vector", 2: "vector", 3: "tiles", 32: "tiles"}),
        (3648, 2048, {1: "vector", 2: "vector", 8: "skinny", 9: "few", 32: "few", 33: "tiles"}),
        (2048, 4096, {1: "vector", 2: "vector", 3: "tiles", 32: "tiles"}),
        (151936, 2048, {1: "vector", 2: "vector", 3: "tiles", 32: "tiles"}),
    ],
)
def test_plain_layers_take_them_where_they_are_fastest(n: int, k: int, paths: dict[int, str]) -> None:
    weight, scaled = sized_weight(n, k, BF16), sized_weight(n, k, FP8)
    assert {rows: triton_linear.path_of(rows, BF16, weight) for rows in paths} == paths
    assert all(triton_linear.path_of(rows, BF16, scaled) != "few" for rows in paths), "plain rows meet no FP8 weight there"


STACK_SIZES = sized(
    [(5120, 2048), (3648, 2048), (2048, 4096), (2048, 2048), (5632, 2048), (2112, 7168)],
    [(2816, 1024), (192, 1024), (64, 512), (200, 384)],
)
STACK_ROWS = sized([1, 2, 3, 8, 9, 16, 17, 32, 33, 40], [1, 2, 9, 32, 33])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), STACK_SIZES)
def test_a_stack_s_layers_with_few_rows(kernels: Kernels, n: int, k: int, kind: str) -> None:
    weight, bias = LinearWeight(normal(n, k, std=0.02)) if kind == "bf16" else LinearWeight(*fp8(n, k)), normal(n)
    assert kernels.linear_parts is not None
    for rows in STACK_ROWS if n < 2816 or not INTERPRETED else [9, 33]:
        x = normal(rows, k)
        before = x.clone()
        takes = kernels.fp8_rows.takes if kernels.fp8_rows is not None else lambda *_: False
        wanted = [truth(quantised(x) if takes(rows, BF16, weight, by_parts) else x, weight) for by_parts in (False, True)]
        assert distance(kernels.linear(x, weight, None), wanted[0]) < BF16_ERROR, rows
        assert distance(kernels.linear(x, weight, bias), wanted[0] + bias.double()) < BF16_ERROR, rows
        left = kernels.linear_parts(x, weight)
        if isinstance(left, PartialSums):
            assert left.parts.shape[::2] == (rows, n)
            residual = normal(rows, n)
            total = kernels.add_rms_norm(left, residual, bias, 1e-6)[1]
            assert distance(total, wanted[1] + residual.double()) < BF16_ERROR, rows
            left = reference.sum_rows(left)
        assert left.shape == (rows, n)
        assert distance(left, wanted[1]) < BF16_ERROR, rows
        assert same_bits(x, before)


def test_a_stack_leaves_parts_of_few_rows_alone(kernels: Kernels) -> None:
    """Of the type that `parts_of` says, so that a norm has them to sum."""
    n, k = sized((2048, 4096), (64, 1024))
    assert kernels.linear_parts is not None
    for rows in (1, 2, 32, 33):
        left = kernels.linear_parts(normal(rows, k), LinearWeight(normal(n, k)))
        assert isinstance(left, PartialSums) == (2 <= rows <= 32), rows
        scaled = kernels.linear_parts(normal(rows, k), LinearWeight(*fp8(n, k)))
        assert isinstance(scaled, PartialSums) == (kernels.name == "hopper" and 2 <= rows <= 32), rows
    assert kernels.linear_parts(normal(0, k), LinearWeight(normal(n, k))).shape == (0, n)


@pytest.mark.parametrize("rows", sized([3, 9, 32], [9]))
def test_a_product_of_few_rows_keeps_the_leading_shape(kernels: Kernels, rows: int) -> None:
    n, k = sized((5120, 2048), (2816, 1024))
    x, weight = whole_numbers(rows, k), LinearWeight(whole_numbers(n, k))
    got = kernels.linear(x[:, None], weight, None)
    assert got.shape == (rows, 1, n)
    assert torch.equal(got[:, 0], truth(x, weight).to(BF16))
