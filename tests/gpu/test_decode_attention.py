"""Attention that takes a projection's output as it is: what preparing its heads and attending to them give, in one launch."""

from __future__ import annotations

import pytest
import torch
from gpu.kernel_samples import DEVICE, INTERPRETED, cache, distance, normal, same_bits, sized, step
from torch import Tensor

from minserve.kernels import reference, triton_grouping
from minserve.kernels.interface import AttentionMetadata, AttentionShape, HeadNorms, RotaryTable
from minserve.kernels.triton_attention import TritonAttention

pytestmark = [pytest.mark.interpreted, pytest.mark.usefixtures("poisoned")]
ERROR = 8e-3
SHAPES = sized(
    {
        "qwen3": (AttentionShape("gqa", 32, 4, 128, 0, 128**-0.5), 128),
        "qwen1.5": (AttentionShape("gqa", 16, 16, 128, 0, 128**-0.5), 128),
        "qwen2": (AttentionShape("gqa", 28, 4, 128, 0, 128**-0.5), 128),
        "qwen3-next": (AttentionShape("gqa", 16, 2, 256, 0, 256**-0.5), 64),
    },
    {
        "heads of 128": (AttentionShape("gqa", 4, 2, 128, 0, 128**-0.5), 128),
        "heads of 256": (AttentionShape("gqa", 2, 1, 256, 0, 256**-0.5), 64),
        "seven heads each": (AttentionShape("gqa", 14, 2, 48, 0, 48**-0.5), 48),
        "forty heads each": (AttentionShape("gqa", 40, 1, 16, 0, 0.25), 16),
    },
)
STEPS = {
    "one part": ([70, 1, 64, 130, 65], 264),
    "parts of each row": (sized([900, 20], [200, 20]), 264),
    "the last part holds the token alone": ([129, 65], 264),
    "parts of long rows alone": ([70, 4500, 1], 1),
}


def inputs(
    metadata: AttentionMetadata, shape: AttentionShape, rot: int, *, normed: bool, interleaved: bool
) -> tuple[Tensor, HeadNorms | None, RotaryTable, Tensor]:
    """(qkv, norms, rotary, positions) of rows of one token."""
    qkv = normal(len(metadata.seq_lens), (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim)
    norms = HeadNorms(normal(shape.head_dim), normal(shape.head_dim), 1e-6) if normed else None
    angles = torch.rand(5000, rot // 2, device=DEVICE) * 6.3
    table = RotaryTable(torch.cat((angles.cos(), angles.sin()), dim=1), interleaved)
    return qkv, norms, table, metadata.seq_lens.long() - 1


def truth_of(
    given: tuple[Tensor, HeadNorms | None, RotaryTable, Tensor], layer: Tensor, metadata: AttentionMetadata, shape: AttentionShape
) -> Tensor:
    """In fp32; writes to layer."""
    qkv, norms, table, positions = given
    wide = None if norms is None else HeadNorms(norms.q.float(), norms.k.float(), norms.eps)
    q = reference.gqa_inputs(qkv.float(), wide, table, positions, layer, metadata.slot_mapping, shape)
    return reference.gqa_attention(q, layer.float(), metadata, shape, reference.plan_attention(metadata, shape))


@pytest.mark.parametrize(("normed", "interleaved"), [(True, False), (False, True)])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kind", STEPS)
def test_one_launch_equals_the_reference(kind: str, name: str, normed: bool, interleaved: bool) -> None:
    (shape, rot), (lengths, processors) = SHAPES[name], STEPS[kind]
    metadata, engine = step([1] * len(lengths), lengths, 64), TritonAttention(DEVICE)
    engine.num_processors = processors
    given, layer, plan = (
        inputs(metadata, shape, rot, normed=normed, interleaved=interleaved),
        cache(metadata, shape),
        engine.plan(metadata, shape),
    )
    true_layer, before = layer.clone(), given[0].clone()
    truth = truth_of(given, true_layer, metadata, shape)
    result = engine.gqa_decode(*given, layer, metadata, shape, plan)
    assert all(distance(row, true_row) < ERROR for row, true_row in zip(result, truth, strict=True))
    written = torch.zeros(layer.shape[0], 64, dtype=torch.bool, device=DEVICE)
    written[metadata.slot_mapping // 64, metadata.slot_mapping % 64] = True
    entries, true_entries = layer.transpose(1, 2), true_layer.transpose(1, 2)
    assert distance(entries[written], true_entries[written]) < ERROR
    assert same_bits(entries[~written], true_entries[~written])
    assert same_bits(given[0], before)
    assert INTERPRETED or same_bits(result, engine.gqa_decode(*given, layer, metadata, shape, plan))
    if shape.num_heads * shape.head_dim % 128 == 0:
        rows, alone = engine.gqa_decode_fp8(*given, layer, metadata, shape, plan), triton_grouping.fp8_rows(result.flatten(1))
        assert same_bits(rows.values, alone.values) and same_bits(rows.scales.t(), alone.scales.t())


@pytest.mark.parametrize("kind", ["one part", "parts of each row"])
@pytest.mark.parametrize("page_size", [16, 96, 128])
def test_blocks_of_the_cache_and_pages_of_other_sizes(page_size: int, kind: str) -> None:
    """Several pages in a block, blocks across pages' borders, several blocks in a page."""
    (shape, rot), (lengths, processors) = SHAPES[sized("qwen3", "heads of 128")], STEPS[kind]
    metadata, engine = step([1] * len(lengths), lengths, page_size), TritonAttention(DEVICE)
    engine.num_processors = processors
    given, layer = inputs(metadata, shape, rot, normed=True, interleaved=False), cache(metadata, shape)
    true_layer = layer.clone()
    truth = truth_of(given, true_layer, metadata, shape)
    result = engine.gqa_decode(*given, layer, metadata, shape, engine.plan(metadata, shape))
    assert all(distance(row, true_row) < ERROR for row, true_row in zip(result, truth, strict=True))
    assert distance(layer.nan_to_num(), true_layer.nan_to_num()) < ERROR


def test_a_token_whose_entry_is_shared_writes_elsewhere_and_sees_itself() -> None:
    """As the last token of a prompt that the prefix cache has: it is computed again, and its entry stays."""
    shape, rot = SHAPES[sized("qwen3", "heads of 128")]
    metadata, engine = step([1, 1], [70, 90], 64), TritonAttention(DEVICE)
    given, layer = inputs(metadata, shape, rot, normed=True, interleaved=False), cache(metadata, shape)
    metadata.slot_mapping[1] = 5  # in the dummy page
    before, truth = layer.clone(), layer.clone()
    result = engine.gqa_decode(*given, layer, metadata, shape, engine.plan(metadata, shape))
    metadata.slot_mapping[1] = int(metadata.page_table[1, 1]) * 64 + 89 - 64
    assert distance(result, truth_of(given, truth, metadata, shape)) < ERROR
    assert same_bits(layer[metadata.page_table[1].long()], before[metadata.page_table[1].long()])


def test_nan_in_padding_and_in_a_row_stays_there() -> None:
    shape, rot = SHAPES[sized("qwen3", "heads of 128")]
    metadata, engine = step([1] * 4, [70, 90, 1, 1], 64), TritonAttention(DEVICE)
    given, layer = inputs(metadata, shape, rot, normed=True, interleaved=False), cache(metadata, shape)
    metadata.page_table[2:], metadata.slot_mapping[2:] = 0, 0
    sound = engine.gqa_decode(*given, layer.clone(), metadata, shape, engine.plan(metadata, shape))
    given[0][1:] = torch.nan
    broken = engine.gqa_decode(*given, layer, metadata, shape, engine.plan(metadata, shape))
    assert same_bits(broken[0], sound[0])
    assert bool(broken[1:].isnan().all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_types(dtype: torch.dtype) -> None:
    shape, rot = SHAPES[sized("qwen3", "seven heads each")]
    metadata, engine = step([1] * 3, [70, 9, 1], 64), TritonAttention(DEVICE)
    qkv, norms, table, positions = inputs(metadata, shape, rot, normed=True, interleaved=False)
    assert norms is not None
    given = qkv.to(dtype), HeadNorms(norms.q.to(dtype), norms.k.to(dtype), 1e-6), table, positions
    layer = cache(metadata, shape, dtype=dtype)
    truth = truth_of(given, layer.float(), metadata, shape)
    result = engine.gqa_decode(*given, layer, metadata, shape, engine.plan(metadata, shape))
    assert result.dtype == dtype
    assert distance(result, truth) < (1e-5 if dtype == torch.float32 else ERROR)
