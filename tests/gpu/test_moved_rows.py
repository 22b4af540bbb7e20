"""Rows that are sorted by expert, quantised, moved with their scales and summed up again; and a step's list of pages."""

from __future__ import annotations

import pytest
import torch
from gpu.kernel_samples import DEVICE, choices, distance, normal, quantised, same_bits, sized, step
from torch import Tensor

from minserve.kernels import reference, triton_cache, triton_exchange, triton_grouping, triton_masked

pytestmark = [pytest.mark.interpreted, pytest.mark.usefixtures("poisoned")]
ROUNDING = 3e-3
"""Of values that two quantisers put on different sides of the middle between two FP8 numbers."""
EXPERTS, TOP_K = 5, 3


def widened(values: Tensor, scales: Tensor) -> Tensor:
    """FP8 [..., W] times its scales fp32 [..., ceil(W / 128)]."""
    return values.float() * scales.repeat_interleave(128, dim=-1)[..., : values.shape[-1]]


@pytest.mark.parametrize(("rows", "width"), [(0, 256), (3, 256), sized((77, 7168), (7, 1280)), (5, 200)])
def test_rows_are_quantised_as_an_ideal_quantiser_does(rows: int, width: int) -> None:
    x = normal(rows, width)
    if rows:
        x[-1] = 0.0
    values, scales = triton_exchange.quantize_rows(x)
    assert scales.shape == (rows, -(-width // 128))
    assert distance(widened(values, scales), quantised(x)) < ROUNDING
    assert distance(triton_exchange.dequantize_rows(values, scales), x) < 4e-2
    if rows:
        assert not values[-1].float().any() and scales[-1].isfinite().all()


@pytest.mark.parametrize("groups", [1, EXPERTS])
@pytest.mark.parametrize("width", sized([256, 7168], [256, 1280]))
def test_quantised_rows_go_to_their_experts_with_their_scales(groups: int, width: int) -> None:
    """As the contiguous (one group) and the masked (one for each expert) products of DeepGEMM read them."""
    tokens = 6
    ids, _ = choices(tokens, TOP_K, EXPERTS)
    place = triton_grouping.place_masked(ids, EXPERTS, 7) if groups > 1 else triton_grouping.place_contiguous(ids, EXPERTS, 8)
    where, x = place.destinations.long(), normal(tokens, width)
    real = where >= 0
    origin = (torch.arange(ids.numel(), device=DEVICE) // TOP_K)[real]
    values, scales = triton_exchange.quantize_rows(x)
    sent, sent_scales = triton_exchange.scatter_quantized(
        values, scales, place.destinations, place.num_rows, top_k=TOP_K, groups=groups
    )
    moved, moved_scales = triton_grouping.move_rows(
        x, place.num_rows, mapping="scatter", where=place.destinations, items=tokens, top_k=TOP_K, groups=groups, quantize=True
    )
    assert moved_scales is not None
    for rows, row_scales in ((sent, sent_scales), (moved, moved_scales)):
        assert row_scales.shape == (groups, place.num_rows // groups, width // 128) and row_scales.stride(1) == 1
        assert row_scales.stride(2) % 4 == 0
        assert same_bits(rows[where[real]], values[origin])
        assert same_bits(row_scales.flatten(0, 1)[where[real]], scales[origin])


@pytest.mark.parametrize("quantize", [False, True])
def test_the_rows_of_pairs_are_gated_where_they_lie_and_summed(quantize: bool) -> None:
    tokens, width = 6, 320 if not quantize else 256
    ids, shares = choices(tokens, TOP_K, EXPERTS)
    place = triton_grouping.place_contiguous(ids, EXPERTS, 8)
    hidden = torch.full((place.num_rows, 2 * width), torch.nan, device=DEVICE, dtype=torch.bfloat16)
    where = place.destinations.long()
    real = where >= 0
    hidden[where[real]] = normal(int(real.sum()), 2 * width)
    truth = reference.silu_and_mul(hidden[where[real]].float())
    rows, scales = triton_grouping.move_rows(
        hidden, place.num_rows, mapping="listed", where=place.destinations, items=ids.numel(), gated=True, quantize=quantize
    )
    if scales is not None:
        assert distance(widened(rows, scales[0])[where[real]], truth) < 4e-2
        return
    assert distance(rows[where[real]], truth) < 4e-3
    expected = torch.zeros(tokens * TOP_K, width, device=DEVICE)
    expected[real] = rows[where[real]].float() * shares.flatten()[real].unsqueeze(1)
    shares[ids < 0] = torch.nan
    summed = triton_grouping.combine(rows, place.destinations, shares, direct=False)
    assert distance(summed, expected.view(tokens, TOP_K, width).sum(1)) < 4e-3


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_the_counted_rows_of_each_expert_are_moved(gated: bool, quantize: bool) -> None:
    capacity, width = 18, 256
    source = normal(3, capacity, 2 * width if gated else width)
    counts = torch.tensor([0, capacity, 11], dtype=torch.int32, device=DEVICE)
    rows, scales = triton_masked.masked_rows(source, counts, gated=gated, quantize=quantize)
    for expert, count in ((1, capacity), (2, 11)):
        real = source[expert, :count].float()
        truth = reference.silu_and_mul(real) if gated else real
        if scales is None:
            assert distance(rows[expert, :count], truth) < 4e-3
        else:
            assert (scales.stride(1), scales.stride(2)) == (1, 20)
            assert distance(widened(rows[expert], scales[expert])[:count], quantised(truth)) < ROUNDING


def test_counted_rows_are_cut_and_given_room() -> None:
    source, counts = normal(2, 5, 384), torch.tensor([5, 2], dtype=torch.int32, device=DEVICE)
    cut, _ = triton_masked.masked_rows(source, counts, columns=200)
    wide, _ = triton_masked.masked_rows(source, counts, room=512)
    assert cut.shape == (2, 5, 200) and wide.shape == (2, 5, 512)
    for expert, count in ((0, 5), (1, 2)):
        assert same_bits(cut[expert, :count], source[expert, :count, :200])
        assert same_bits(wide[expert, :count, :384], source[expert, :count])


def test_pages_of_all_rows_one_after_the_other() -> None:
    metadata = step([1] * 4, [64 * 130, 65, 1, 128], 64)
    wanted = torch.cat([metadata.page_table[row, :count] for row, count in enumerate((130, 2, 1, 2))])
    pages = torch.full((140,), -7, dtype=torch.int32, device=DEVICE)
    triton_cache.list_pages(metadata.page_table, metadata.seq_lens, 64, pages)
    assert torch.equal(pages[:135], wanted)
    assert (pages[135:] == -7).all()
