"""Norms, rotary embedding, activation, router and cache writes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from gpu.kernel_samples import BF16, DEVICE, choices, distance, normal, same_bits, sized

from minserve.kernels import reference
from minserve.kernels.interface import ExpertRows, Kernels, PartialSums, RouterConfig

pytestmark = [pytest.mark.interpreted, pytest.mark.usefixtures("poisoned")]
WIDTHS = sized([48, 128, 2048, 7168], [48, 128, 600])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [1, 130])
def test_norms_equal_the_reference(kernels: Kernels, width: int, rows: int) -> None:
    x, residual, weight = normal(rows, width), normal(rows, width), normal(width)
    x[-1], residual[-1] = x[-1] * 1e-3, residual[-1] * 1e-3  # a row whose mean square is about eps
    before = x.clone(), residual.clone()
    alone, true_alone = kernels.rms_norm(x, weight, 1e-6), reference.rms_norm(x.float(), weight, 1e-6)
    assert distance(alone, true_alone) < 4e-3
    assert distance(alone[-1], true_alone[-1]) < 4e-3
    normed, total = kernels.add_rms_norm(x, residual, weight, 1e-6)
    truth = reference.add_rms_norm(x, residual, weight, 1e-6)
    assert same_bits(total, truth[1])
    assert distance(normed, truth[0]) < 4e-3
    assert same_bits(x, before[0])
    assert same_bits(residual, before[1])


def unsummed(tokens: int, top_k: int, width: int) -> ExpertRows:
    """NaN where there is no slot."""
    slots, weights = choices(tokens, top_k, 2 * top_k)
    slots[-1] = -1  # padding
    rows = normal(tokens, top_k, width).masked_fill((slots < 0).unsqueeze(-1), torch.nan)
    return ExpertRows(rows.flatten(0, 1), slots, weights.masked_fill(slots < 0, torch.nan))


@pytest.mark.parametrize(("width", "top_k"), sized([(128, 8), (2048, 8), (7168, 8), (2048, 6)], [(48, 3), (384, 8)]))
@pytest.mark.parametrize("tokens", sized([2, 32, 256], [2, 5]))
def test_a_norm_sums_what_experts_leave_unsummed(kernels: Kernels, tokens: int, width: int, top_k: int) -> None:
    from minserve.kernels import triton_grouping, triton_rows

    x, residual, gain = unsummed(tokens, top_k, width), normal(tokens, width), normal(width)
    before = x.rows.clone(), residual.clone()
    summed = triton_grouping.combine(x.rows, x.slots, x.weights, direct=True)
    assert distance(summed, reference.sum_rows(x)) < 4e-3
    normed, total = kernels.add_rms_norm(x, residual, gain, 1e-6)
    wanted, wanted_total = kernels.add_rms_norm(summed, residual, gain, 1e-6)
    assert same_bits(total, wanted_total)
    assert distance(normed, wanted) < 1e-3
    assert same_bits(x.rows, before[0]) and same_bits(residual, before[1])
    assert distance(reference.add_rms_norm(x, residual, gain, 1e-6)[0], wanted) < 8e-3
    if width % 128 == 0:
        rows, again = triton_rows.add_rms_norm_fp8(x, residual, gain, 1e-6)
        alone = triton_grouping.fp8_rows(normed)
        assert same_bits(again, total)
        assert same_bits(rows.values, alone.values) and same_bits(rows.scales.t(), alone.scales.t())


@pytest.mark.parametrize(("width", "top_k"), sized([(128, 8), (2048, 6), (3584, 8), (7168, 8)], [(48, 3), (384, 6)]))
@pytest.mark.parametrize("tokens", sized([1, 32, 256], [1, 5]))
def test_a_norm_adds_the_shared_expert_to_the_experts_sum(kernels: Kernels, tokens: int, width: int, top_k: int) -> None:
    """To the bit what a sum, torch's addition and a norm do one after the other."""
    from minserve.kernels import triton_grouping, triton_rows

    routed, shared = unsummed(tokens, top_k, width), normal(tokens, width)
    residual, gain = normal(tokens, width), normal(width)
    x = dataclasses.replace(routed, added=shared)
    before = routed.rows.clone(), shared.clone(), residual.clone()
    summed = triton_grouping.combine(routed.rows, routed.slots, routed.weights, direct=True)
    wanted, wanted_total = kernels.add_rms_norm(summed + shared, residual, gain, 1e-6)
    normed, total = kernels.add_rms_norm(x, residual, gain, 1e-6)
    assert same_bits(total, wanted_total)
    assert distance(normed, wanted) < 1e-3
    assert same_bits(routed.rows, before[0]) and same_bits(shared, before[1]) and same_bits(residual, before[2])
    assert distance(reference.add_rms_norm(x, residual, gain, 1e-6)[0], wanted) < 8e-3
    views = dataclasses.replace(routed, added=torch.stack((shared, residual), dim=1)[:, 0])
    assert same_bits(kernels.add_rms_norm(views, residual, gain, 1e-6)[1], total)
    if width % 128 == 0:
        rows, again = triton_rows.add_rms_norm_fp8(x, residual, gain, 1e-6)
        alone = triton_grouping.fp8_rows(normed)
        assert same_bits(again, total)
        assert same_bits(rows.values, alone.values) and same_bits(rows.scales.t(), alone.scales.t())


@pytest.mark.parametrize("width", sized([2048, 7168], [48, 384]))
@pytest.mark.parametrize("parts", [2, 4, 8])
@pytest.mark.parametrize("rows", sized([1, 2, 32], [1, 5]))
def test_a_norm_sums_a_product_s_parts(kernels: Kernels, rows: int, parts: int, width: int) -> None:
    """To the bit what adding them up in order, rounding and a norm do one after the other."""
    from minserve.kernels import triton_grouping, triton_rows

    # The first two take each other out: what they swallow of the others depends on the order of the sum.
    left = normal(rows, parts, width, dtype=torch.float32)
    left[:, 0] += 8e4
    left[:, 1] -= 8e4
    x, residual, gain = PartialSums(left), normal(rows, width), normal(width)
    before = left.clone(), residual.clone(), gain.clone()
    summed = torch.zeros(rows, width, device=DEVICE)
    for part in left.unbind(1):
        summed += part
    wanted, wanted_total = kernels.add_rms_norm(summed.to(BF16), residual, gain, 1e-6)
    normed, total = kernels.add_rms_norm(x, residual, gain, 1e-6)
    assert normed.dtype == BF16
    assert same_bits(total, wanted_total)
    assert distance(normed, wanted) < 1e-3
    assert all(same_bits(one, other) for one, other in zip((left, residual, gain), before, strict=True))
    assert same_bits(kernels.add_rms_norm(x, residual, gain, 1e-6)[0], normed)
    true_normed, true_total = reference.add_rms_norm(x, residual, gain, 1e-6)
    assert true_normed.dtype == true_total.dtype == BF16
    assert distance(normed, true_normed) < 8e-3 and distance(total, true_total) < 8e-3
    if width % 128 == 0:
        rows_in_fp8, again = triton_rows.add_rms_norm_fp8(x, residual, gain, 1e-6)
        alone = triton_grouping.fp8_rows(normed)
        assert same_bits(again, total)
        assert rows_in_fp8.scales.stride() == alone.scales.stride()
        assert same_bits(rows_in_fp8.values, alone.values) and same_bits(rows_in_fp8.scales.t(), alone.scales.t())


def test_a_norm_of_no_parts_rows(kernels: Kernels) -> None:
    nothing = PartialSums(torch.empty(0, 4, 256, device=DEVICE))
    normed, total = kernels.add_rms_norm(nothing, normal(0, 256), normal(256), 1e-6)
    assert normed.shape == total.shape == (0, 256)


def test_norms_read_views(kernels: Kernels) -> None:
    fused, weight = normal(9, 40 * 128), normal(128)
    heads = fused.unflatten(1, (40, 128))[:, 32:36]
    assert distance(kernels.rms_norm(heads, weight, 1e-5), reference.rms_norm(heads.float(), weight, 1e-5)) < 4e-3
    latent, gain = fused[:, 100:612], normal(512)
    assert distance(kernels.rms_norm(latent, gain, 1e-5), reference.rms_norm(latent.float(), gain, 1e-5)) < 4e-3


@pytest.mark.parametrize("inner", sized([70, 768, 18432], [70, 1500]))
def test_silu_and_mul_equals_the_reference(kernels: Kernels, inner: int) -> None:
    x = normal(5, 2 * inner)
    assert distance(kernels.silu_and_mul(x), reference.silu_and_mul(x.float())) < 4e-3


ROUTERS = {
    "qwen1.5": (60, RouterConfig(4, "softmax")),
    "qwen3": (128, RouterConfig(8, "softmax", normalize=True)),
    "qwen3-next": (512, RouterConfig(10, "softmax", normalize=True)),
    "moonlight": (64, RouterConfig(6, "sigmoid", normalize=True, scale=2.446)),
    "kimi-k2": (384, RouterConfig(8, "sigmoid", normalize=True, scale=2.827)),
    "deepseek-v3": (256, RouterConfig(8, "sigmoid", 8, 4, "top2_sum", True, 2.5)),
    "deepseek-v2": (160, RouterConfig(6, "softmax", 8, 3, "max", False, 16.0)),
    "moonlight, shared expert fused": (64, RouterConfig(6, "sigmoid", normalize=True, scale=2.446, always_on=2)),
    "deepseek-v3, shared expert fused": (256, RouterConfig(8, "sigmoid", 8, 4, "top2_sum", True, 2.5, 1)),
    "tiny": (24, RouterConfig(3, "sigmoid", 3, 1, "top2_sum", True, 2.5)),
}


ROUTED = sized(
    [(name, tokens, hidden) for name in ROUTERS for tokens, hidden in ((1, 2048), (19, 7168), (300, 1000))],
    [*((name, 3, 300) for name in ROUTERS), ("deepseek-v3, shared expert fused", 17, 100), ("tiny", 257, 70)],
)


@pytest.mark.parametrize(("name", "tokens", "hidden"), ROUTED)
def test_router_chooses_as_the_reference(kernels: Kernels, name: str, tokens: int, hidden: int) -> None:
    experts, config = ROUTERS[name]
    x, weight = normal(tokens, hidden), normal(experts, hidden, std=2 * hidden**-0.5, dtype=torch.float32)
    bias = normal(experts, dtype=torch.float32) - 1.0 if config.scoring == "sigmoid" else None
    num_tokens = torch.tensor([max(1, tokens - 3)], dtype=torch.int32, device=DEVICE)
    ids, weights = kernels.route(x, weight, bias, config, num_tokens)
    logits = (x.double() @ weight.double().t()).float()
    true_ids, true_weights = reference.choose(logits, bias, config)
    real = torch.arange(tokens, device=DEVICE) < num_tokens
    same = (ids == true_ids).all(dim=1)[real]
    # fp32 sums, sigmoid and exp differ by ulps between implementations, so near ties may fall the other way; never many.
    assert same.float().mean() > 0.97
    assert distance(weights[real][same], true_weights[real][same]) < 2e-5
    assert ids[~real].eq(-1).all()
    assert weights[~real].eq(0).all()
    again = kernels.route(x, weight, bias, config, None)
    assert same_bits(again[0][real], ids[real])
    assert same_bits(again[1][real], weights[real])


def test_router_breaks_ties_towards_the_lower_id(kernels: Kernels) -> None:
    x, weight = normal(5, 512), normal(16, 512, dtype=torch.float32).repeat(4, 1)
    ids, _ = kernels.route(x, weight, None, RouterConfig(4, "softmax"), None)
    assert torch.equal(ids, reference.choose(x.float() @ weight.t(), None, RouterConfig(4, "softmax"))[0])
    grouped = RouterConfig(4, "sigmoid", 4, 2, "top2_sum")
    ids, _ = kernels.route(x, weight, None, grouped, None)
    assert torch.equal(ids, reference.choose(x.float() @ weight.t(), None, grouped)[0])


def test_router_reads_every_bit_of_its_weights(kernels: Kernels) -> None:
    """All that differs between these experts is far below what two bf16 numbers hold of an fp32 one."""
    signs = torch.tensor([1.0, -1.0], device=DEVICE).repeat(256)
    weight = 1 + 2**-9 + torch.arange(16, device=DEVICE).unsqueeze(1) * 2**-20 * signs
    ids, _ = kernels.route(torch.stack((signs, -signs)).to(torch.bfloat16), weight, None, RouterConfig(4, "softmax"), None)
    assert ids.tolist() == [[15, 14, 13, 12], [0, 1, 2, 3]]


@pytest.mark.parametrize("tokens", sized([1, 128, 300, 4096], [3, 257]))
def test_a_gate_in_bf16_is_the_gate_in_fp32(kernels: Kernels, tokens: int) -> None:
    x, weight = normal(tokens, sized(2048, 100)), normal(24, sized(2048, 100))
    config = RouterConfig(4, "softmax", normalize=True)
    narrow, wide = (kernels.route(x, gate, None, config, None) for gate in (weight, weight.float()))
    assert all(same_bits(one, other) for one, other in zip(narrow, wide, strict=True))
    assert (narrow[0] == reference.route(x, weight, None, config, None)[0]).all(dim=1).float().mean() > 0.97


@pytest.mark.parametrize("name", ROUTERS)
def test_router_gives_valid_ids_for_rows_of_nan(kernels: Kernels, name: str) -> None:
    experts, config = ROUTERS[name]
    x = normal(3, 256)
    x[1] = float("nan")
    ids, _ = kernels.route(x, normal(experts, 256, dtype=torch.float32), None, config, None)
    columns = config.top_k + config.always_on
    assert all(min(row) >= 0 and max(row) < experts + config.always_on and len(set(row)) == columns for row in ids.tolist())
