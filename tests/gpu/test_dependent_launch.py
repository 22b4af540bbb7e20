"""Kernels that start before their predecessor has ended must wait for what it writes: each behind a producer that is slow."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from gpu.kernel_samples import BF16, DEVICE, cache, choices, expert_weights, fp8, normal, same_bits, step
from torch import Tensor

from minserve.kernels.interface import (
    AttentionShape,
    ExpertRows,
    Fp8Rows,
    HeadNorms,
    Kernels,
    LinearWeight,
    PartialSums,
    RotaryTable,
    RouterConfig,
    kv_page_shape,
)

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402


@triton.jit
def _slow_copy(source, target, size, block: tl.constexpr):
    """Lets the next kernel start at once, sleeps for milliseconds, then writes."""
    tl.extra.cuda.gdc_launch_dependents()
    for _ in range(1000):
        tl.inline_asm_elementwise("nanosleep.u32 4000; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    for start in range(0, size, block):
        place = start + tl.arange(0, block)
        tl.store(target + place, tl.load(source + place, mask=place < size), mask=place < size)


class Case(NamedTuple):
    """A call of kernels, and the tensors that a kernel before it would have written."""

    produced: list[Tensor]
    call: Callable[[], Tensor | tuple[Tensor, ...]]


GQA = AttentionShape("gqa", 32, 4, 128, 0, 128**-0.5)
MLA = AttentionShape("mla", 16, 1, 512, 64, 192**-0.5)


def table(rot: int) -> RotaryTable:
    return RotaryTable(torch.rand(600, rot, device=DEVICE), False)


def norm(kernels: Kernels, rows: int) -> Case:
    x, residual, weight = normal(rows, 2048), normal(rows, 2048), normal(2048)
    return Case([x], lambda: kernels.add_rms_norm(x, residual, weight, 1e-6))


def norm_into_fp8(kernels: Kernels, rows: int) -> Case:
    from minserve.kernels.triton_rows import add_rms_norm_fp8

    del kernels
    x, residual, weight = normal(rows, 2048), normal(rows, 2048), normal(2048)
    return Case([x], lambda: parts_of(*add_rms_norm_fp8(x, residual, weight, 1e-6)))


def norm_of_unsummed(kernels: Kernels, rows: int) -> Case:
    ids, shares = choices(rows, 4, 16)
    x, residual, weight = ExpertRows(normal(rows * 4, 2048), ids, shares), normal(rows, 2048), normal(2048)
    return Case([x.rows, ids, shares], lambda: kernels.add_rms_norm(x, residual, weight, 1e-6))


def norm_of_unsummed_and_shared(kernels: Kernels, rows: int) -> Case:
    (ids, shares), added = choices(rows, 4, 16), normal(rows, 2048)
    x, residual, weight = ExpertRows(normal(rows * 4, 2048), ids, shares, added), normal(rows, 2048), normal(2048)
    return Case([x.rows, added], lambda: kernels.add_rms_norm(x, residual, weight, 1e-6))


def parts_of(rows: Fp8Rows, *others: Tensor) -> tuple[Tensor, ...]:
    return rows.values, rows.scales, *others


def activation(kernels: Kernels, rows: int) -> Case:
    x = normal(rows, 1536)
    return Case([x], lambda: kernels.silu_and_mul(x))


def linear(kernels: Kernels, rows: int) -> Case:
    x, weight = normal(rows, 2048), LinearWeight(normal(5120, 2048))
    return Case([x], lambda: kernels.linear(x, weight, None))


def fp8_linear(kernels: Kernels, rows: int) -> Case:
    x, weight = normal(rows, 2048), LinearWeight(*fp8(5120, 2048))
    return Case([x], lambda: kernels.linear(x, weight, None))


def few_rows(rows: int, n: int, k: int, parts: int) -> Case:
    from minserve.kernels import triton_few_rows

    x, weight = normal(min(rows, 32), k), LinearWeight(normal(n, k))
    if parts == 1:
        return Case([x], lambda: triton_few_rows.linear(x, weight, None))
    return Case([x], lambda: triton_few_rows.linear_parts(x, weight, parts).parts)


def few_fp8_rows(rows: int, n: int, k: int, parts: int) -> Case:
    """Both the values and the scales come late; the rows are a multiple of four, so that the scales have no gaps."""
    from minserve.kernels import triton_few_rows
    from minserve.kernels.triton_grouping import fp8_rows

    x, weight = fp8_rows(normal(4 * min(rows, 8), k)), LinearWeight(*fp8(n, k))
    produced = [x.values.view(torch.uint8), x.scales.t()]
    assert all(tensor.is_contiguous() for tensor in produced)
    if parts == 1:
        return Case(produced, lambda: triton_few_rows.linear(x, weight, None))
    return Case(produced, lambda: triton_few_rows.linear_parts(x, weight, parts).parts)


def whole_product(kernels: Kernels, rows: int) -> Case:
    del kernels
    return few_rows(rows, 5120, 2048, 1)


def whole_fp8_product(kernels: Kernels, rows: int) -> Case:
    del kernels
    return few_fp8_rows(rows, 5120, 2048, 1)


def product_in_parts(kernels: Kernels, rows: int) -> Case:
    del kernels
    return few_rows(rows, 2048, 4096, 8)


def fp8_product_in_parts(kernels: Kernels, rows: int) -> Case:
    del kernels
    return few_fp8_rows(rows, 2048, 4096, 4)


def norm_of_parts(kernels: Kernels, rows: int) -> Case:
    x, residual, weight = normal(rows, 8, 2048, dtype=torch.float32), normal(rows, 2048), normal(2048)
    return Case([x], lambda: kernels.add_rms_norm(PartialSums(x), residual, weight, 1e-6))


def norm_of_parts_into_fp8(kernels: Kernels, rows: int) -> Case:
    from minserve.kernels.triton_rows import add_rms_norm_fp8

    del kernels
    x, residual, weight = normal(rows, 4, 2048, dtype=torch.float32), normal(rows, 2048), normal(2048)
    return Case([x], lambda: parts_of(*add_rms_norm_fp8(PartialSums(x), residual, weight, 1e-6)))


def router(kernels: Kernels, rows: int) -> Case:
    x, weight = normal(rows, 2048), normal(128, 2048, dtype=torch.float32)
    return Case([x], lambda: kernels.route(x, weight, None, RouterConfig(8, "softmax", normalize=True), None))


def gqa_inputs(kernels: Kernels, rows: int) -> Case:
    qkv, norms, rotary = normal(rows, 40 * 128), HeadNorms(normal(128), normal(128), 1e-6), table(128)
    pages, positions = normal(10, *kv_page_shape(GQA, 64)), torch.randint(0, 600, (rows,), device=DEVICE)
    slots = torch.randperm(640, device=DEVICE)[:rows]
    return Case([qkv], lambda: (kernels.gqa_inputs(qkv, norms, rotary, positions, pages, slots, GQA), pages))


def mla_inputs(kernels: Kernels, rows: int) -> Case:
    fused, w_uk, gain, rotary = normal(rows, 16 * 192 + 576), normal(16, 128, 512), normal(512), table(64)
    pages, positions = normal(10, *kv_page_shape(MLA, 64)), torch.randint(0, 600, (rows,), device=DEVICE)
    slots = torch.randperm(640, device=DEVICE)[:rows]
    q, kv = fused[:, : 16 * 192].unflatten(1, (16, 192)), fused[:, 16 * 192 :]
    return Case([fused], lambda: (*kernels.mla_inputs(q, kv, gain, 1e-6, w_uk, rotary, positions, pages, slots), pages))


def heads_linear(kernels: Kernels, rows: int) -> Case:
    x, weight = normal(rows, 16, 512), normal(16, 128, 512).transpose(1, 2)
    return Case([x], lambda: kernels.heads_linear(x, weight))


def gqa_attention(kernels: Kernels, rows: int) -> Case:
    metadata = step([1] * rows, [random.randint(65, 200) for _ in range(rows)], 64)
    q, layer, plan = normal(rows, 32, 128), cache(metadata, GQA), kernels.plan_attention(metadata, GQA)
    return Case([q, layer], lambda: kernels.gqa_attention(q, layer, metadata, GQA, plan))


def gqa_attention_into_fp8(kernels: Kernels, rows: int) -> Case:
    from minserve.kernels.triton_attention import TritonAttention

    del kernels
    metadata = step([1] * rows, [random.randint(65, 200) for _ in range(rows)], 64)
    q, layer, engine = normal(rows, 32, 128), cache(metadata, GQA), TritonAttention(DEVICE)
    return Case([q, layer], lambda: parts_of(engine.gqa_fp8(q, layer, metadata, GQA, engine.plan(metadata, GQA))))


def gqa_decode(kernels: Kernels, rows: int) -> Case:
    """Of short rows where long ones may come: most programs end without waiting."""
    metadata, norms = (
        step([1] * rows, [random.randint(1, 200) for _ in range(rows)], 64, max_pages=640),
        HeadNorms(normal(128), normal(128), 1e-6),
    )
    qkv, layer, plan = normal(rows, 40 * 128), cache(metadata, GQA), kernels.plan_attention(metadata, GQA)
    rotary, positions = table(128), metadata.seq_lens.long() - 1
    assert kernels.gqa_decode is not None
    decode = kernels.gqa_decode
    return Case([qkv, layer], lambda: (decode(qkv, norms, rotary, positions, layer, metadata, GQA, plan), layer))


def heads_linear_into_fp8(kernels: Kernels, rows: int) -> Case:
    from minserve.kernels.triton_cache import heads_linear_fp8

    del kernels
    x, weight = normal(rows, 16, 512), normal(16, 128, 512).transpose(1, 2)
    return Case([x], lambda: parts_of(heads_linear_fp8(x, weight)))


def mla_attention(kernels: Kernels, rows: int) -> Case:
    metadata = step([1] * rows, [random.randint(65, 200) for _ in range(rows)], 64)
    latent, rope, layer = normal(rows, 16, 512), normal(rows, 16, 64), cache(metadata, MLA)
    plan = kernels.plan_attention(metadata, MLA)
    return Case([latent, rope, layer], lambda: kernels.mla_attention(latent, rope, layer, metadata, MLA, plan))


def experts(kernels: Kernels, rows: int, kind: str = "bf16") -> Case:
    x, weights = normal(rows, 2048), expert_weights(16, 2048, 768, kind)
    ids, shares = choices(rows, 4, 16)
    return Case([x, ids, shares], lambda: kernels.experts_flat(x, ids, shares, weights))


def fp8_experts(kernels: Kernels, rows: int) -> Case:
    return experts(kernels, rows, "fp8")


def unsorted_experts(kernels: Kernels, rows: int) -> Case:
    return experts(kernels, 4 + rows % 4)


def int4_experts(kernels: Kernels, rows: int) -> Case:
    return experts(kernels, rows, "int4")


def part_maxima(kernels: Kernels, rows: int) -> Case:
    logits = normal(rows, 9000)
    return Case([logits], lambda: kernels.part_maxima(logits))


def record_tokens(kernels: Kernels, rows: int) -> Case:
    values, ids = normal(rows, 5, dtype=torch.float32).sort(dim=1).values, torch.randint(1, 3000, (rows, 5), device=DEVICE)
    slots = 1 + torch.randperm(rows, device=DEVICE)
    last_tokens = torch.zeros(rows + 1, dtype=torch.int64, device=DEVICE)
    output_index, broken_rows = (torch.zeros(rows + 1, dtype=torch.int32, device=DEVICE) for _ in range(2))
    counts = torch.zeros(rows + 1, 3000, dtype=torch.int32, device=DEVICE)
    given = (values, ids, slots, last_tokens, output_index, broken_rows, counts)
    return Case([values, ids, slots], lambda: (kernels.record_tokens(*given), last_tokens))


CASES = [
    norm,
    norm_into_fp8,
    norm_of_unsummed,
    norm_of_unsummed_and_shared,
    activation,
    linear,
    fp8_linear,
    whole_product,
    whole_fp8_product,
    product_in_parts,
    fp8_product_in_parts,
    norm_of_parts,
    norm_of_parts_into_fp8,
    router,
    gqa_inputs,
    mla_inputs,
    heads_linear,
    gqa_attention,
    gqa_attention_into_fp8,
    gqa_decode,
    heads_linear_into_fp8,
    mla_attention,
    experts,
    fp8_experts,
    unsorted_experts,
    int4_experts,
    part_maxima,
    record_tokens,
]


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("make", CASES)
def test_a_kernel_waits_for_a_slow_producer(kernels: Kernels, make: Callable[[Kernels, int], Case], rows: int) -> None:
    case = make(kernels, rows)
    wanted = case.call()
    wanted = [result.clone() for result in (wanted if isinstance(wanted, tuple) else (wanted,))]
    good = [tensor.clone() for tensor in case.produced]
    last = len(good) - 1
    for turn in range(len(good)):
        # Its inputs hold other numbers until the producer, which writes one of them last, has slept.
        for index, tensor in enumerate(case.produced):
            tensor.copy_(good[index] if index != turn else torch.zeros_like(tensor))
        torch.cuda.synchronize()
        _slow_copy[(1,)](good[turn], case.produced[turn], good[turn].numel(), block=4096)
        got = case.call()
        torch.cuda.synchronize()
        for result, truth in zip(got if isinstance(got, tuple) else (got,), wanted, strict=True):
            assert same_bits(result, truth), f"input {turn} of {last + 1} was read before it was written"


def test_the_producer_is_slow_enough_to_be_overtaken() -> None:
    """A kernel that does not wait reads what was there before: what the tests above would see."""

    @triton.jit
    def impatient(source, target, size: tl.constexpr):
        place = tl.arange(0, size)
        tl.store(target + place, tl.load(source + place))

    good, between, result = normal(1024), torch.zeros(1024, device=DEVICE, dtype=BF16), normal(1024)
    impatient[(1,)](between, result, size=1024, launch_pdl=True)
    torch.cuda.synchronize()
    _slow_copy[(1,)](good, between, 1024, block=1024)
    impatient[(1,)](between, result, size=1024, launch_pdl=True)
    torch.cuda.synchronize()
    assert result.eq(0).all()
