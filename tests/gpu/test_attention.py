"""Attention over the paged cache, where everything that no row may read is NaN."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from gpu.kernel_samples import BF16, DEVICE, INTERPRETED, attention_truth, cache, distance, normal, same_bits, sized, step
from torch import Tensor

from minserve.kernels.interface import AttentionMetadata, AttentionShape

if TYPE_CHECKING:  # they need their libraries
    from minserve.kernels.flashinfer_attention import FlashInferAttention
    from minserve.kernels.triton_attention import TritonAttention

pytestmark = [pytest.mark.interpreted, pytest.mark.usefixtures("poisoned")]
ERROR = 8e-3
TINY_SHAPES = {
    "tiny-gqa": AttentionShape("gqa", 4, 2, 32, 0, 32**-0.5),
    "tiny-mla": AttentionShape("mla", 4, 1, 32, 16, 40**-0.5),
}
SHAPES = TINY_SHAPES | sized(
    {
        "qwen3": AttentionShape("gqa", 32, 4, 128, 0, 128**-0.5),
        "qwen1.5": AttentionShape("gqa", 16, 16, 128, 0, 128**-0.5),
        "qwen2": AttentionShape("gqa", 28, 4, 128, 0, 128**-0.5),
        "qwen3-next": AttentionShape("gqa", 16, 2, 256, 0, 256**-0.5),
        "moonlight": AttentionShape("mla", 16, 1, 512, 64, 192**-0.5),
        "deepseek-v3": AttentionShape("mla", 128, 1, 512, 64, 192**-0.5 * 1.87),
    },
    {
        "seven heads each": AttentionShape("gqa", 14, 2, 48, 0, 48**-0.5),
        "heads of 256": AttentionShape("gqa", 2, 1, 256, 0, 256**-0.5),
        "latents of 512": AttentionShape("mla", 20, 1, 512, 64, 192**-0.5),
    },
)


def attention(path: str) -> TritonAttention | FlashInferAttention:
    from minserve.kernels.triton_attention import TritonAttention

    triton = TritonAttention(DEVICE)
    if path == "triton":
        return triton
    from minserve.kernels.flashinfer_attention import FlashInferAttention

    return FlashInferAttention(DEVICE, triton, least_mla_rows=1)


def queries(shape: AttentionShape, tokens: int, dtype: torch.dtype = BF16) -> tuple[Tensor, ...]:
    sizes = (shape.head_dim, shape.rope_dim) if shape.kind == "mla" else (shape.head_dim,)
    return tuple(normal(tokens, shape.num_heads, size, dtype=dtype) for size in sizes)


def run(
    attention: TritonAttention | FlashInferAttention,
    inputs: tuple[Tensor, ...],
    layer: Tensor,
    metadata: AttentionMetadata,
    shape: AttentionShape,
) -> Tensor:
    function: Callable[..., Tensor] = attention.mla if shape.kind == "mla" else attention.gqa
    return function(*inputs, layer, metadata, shape, attention.plan(metadata, shape))


def short_prompts(rows: int, longest: int) -> AttentionMetadata:
    lengths = [random.randint(1, longest) for _ in range(rows)]
    return step(lengths, lengths, 64)


STEPS = {"a first token": lambda: step([1, 1], [1, 64], 64)} | sized(
    {
        "one row": lambda: step([1], [random.randint(600, 1200)], 64),
        "decode": lambda: step([1] * 40, [random.randint(1, 700) for _ in range(40)], 64),
        "decode, pages of 16": lambda: step([1] * 9, [random.randint(1, 700) for _ in range(9)], 16),
        "prefill": lambda: step([300, 64, 5], [300, 64, 5], 64),
        "mixed": lambda: step([1, 130, 1, 33, 200], [500, 400, 3, 33, 555], 64),
        "many short prompts": lambda: short_prompts(30, 90),
    },
    {
        "one row": lambda: step([1], [random.randint(130, 300)], 64),
        "decode": lambda: step([1] * 4, [random.randint(1, 200) for _ in range(4)], 64),
        "decode, pages of 16": lambda: step([1] * 2, [random.randint(1, 100) for _ in range(2)], 16),
        "prefill": lambda: step([70, 64, 5], [70, 64, 5], 64),
        "mixed": lambda: step([1, 40, 1, 33], [150, 100, 3, 33], 64),
        "many short prompts": lambda: short_prompts(4, 20),
    },
)
PATHS = sized(["triton", "flashinfer"], ["triton"])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kind", STEPS)
def test_attention_equals_the_reference(path: str, name: str, kind: str) -> None:
    shape, metadata = SHAPES[name], STEPS[kind]()
    inputs, layer = queries(shape, sum(metadata.query_lens_host)), cache(metadata, SHAPES[name])
    engine = attention(path)
    result = run(engine, inputs, layer, metadata, shape)
    assert result.shape == inputs[0].shape
    truth = attention_truth(inputs, layer, metadata, shape)
    assert distance(result, truth) < ERROR
    # A row lost among many would hide in the whole.
    assert distance(result[-1], truth[-1]) < 3 * ERROR
    assert INTERPRETED or same_bits(result, run(engine, inputs, layer, metadata, shape))


@pytest.mark.parametrize("kind", ["one row", "mixed"])
@pytest.mark.parametrize("page_size", [16, 96, 128])
@pytest.mark.parametrize("name", TINY_SHAPES)
def test_blocks_of_the_cache_and_pages_of_other_sizes(name: str, page_size: int, kind: str) -> None:
    """Several pages in a block, blocks across pages' borders, several blocks in a page; a row of several parts, and prompts."""
    shape, engine = TINY_SHAPES[name], attention("triton")
    engine.num_processors = 264
    metadata = step([1], [300], page_size) if kind == "one row" else step([1, 40, 1, 33], [150, 300, 3, 33], page_size)
    inputs, layer = queries(shape, sum(metadata.query_lens_host)), cache(metadata, shape)
    result, truth = run(engine, inputs, layer, metadata, shape), attention_truth(inputs, layer, metadata, shape)
    assert distance(result, truth) < ERROR
    assert distance(result[-1], truth[-1]) < 3 * ERROR


@pytest.mark.parametrize("kind", ["one row", "mixed"])
@pytest.mark.parametrize("name", TINY_SHAPES)
def test_scores_of_several_hundred(name: str, kind: str) -> None:
    """Powers of them overflow, or vanish to the last, unless the greatest is taken off in the units of the exponent."""
    shape, metadata = TINY_SHAPES[name], STEPS[kind]()
    inputs, layer = queries(shape, sum(metadata.query_lens_host)), cache(metadata, shape)
    loud = tuple(query * 64 for query in inputs)
    assert distance(run(attention("triton"), loud, layer, metadata, shape), attention_truth(loud, layer, metadata, shape)) < ERROR


@pytest.mark.parametrize("name", sized(["qwen3", "moonlight"], ["tiny-gqa", "tiny-mla"]))
def test_a_nan_in_a_row_s_own_cache_is_seen_in_that_row_alone(name: str) -> None:
    shape, metadata = SHAPES[name], step([1] * 3, sized([40, 700, 1200], [40, 390, 130]), 64)
    inputs, layer = queries(shape, 3), cache(metadata, shape)
    engine = attention("triton")
    sound = run(engine, inputs, layer, metadata, shape)
    page = int(metadata.page_table[1, 5])
    layer[page] = torch.nan
    broken = run(engine, inputs, layer, metadata, shape)
    assert bool(broken[1].isnan().all())
    assert same_bits(broken[[0, 2]], sound[[0, 2]])


def test_long_rows_beside_short_ones() -> None:
    shape = SHAPES[sized("qwen3", "tiny-gqa")]
    metadata = step([1] * 3, sized([20000, 1, 700], [4500, 1, 70]), 64)
    inputs, layer = queries(shape, 3), cache(metadata, shape)
    truth = attention_truth(inputs, layer, metadata, shape)
    for path in PATHS:
        assert distance(run(attention(path), inputs, layer, metadata, shape), truth) < ERROR


@pytest.mark.parametrize(("longest", "parts"), [(4500, 2), (17000, 4)])
@pytest.mark.parametrize("name", TINY_SHAPES)
def test_where_rows_alone_fill_the_gpu_only_long_ones_are_cut(name: str, longest: int, parts: int) -> None:
    shape, metadata = TINY_SHAPES[name], step([1] * 3, [70, longest, 1], 64)
    inputs, layer = queries(shape, 3), cache(metadata, shape)
    engine = attention("triton")
    engine.num_processors = 1
    assert (engine.plan(metadata, shape).wanted, engine.plan(metadata, shape).num_splits) == (1, parts)
    assert distance(run(engine, inputs, layer, metadata, shape), attention_truth(inputs, layer, metadata, shape)) < ERROR


@pytest.mark.parametrize("processors", [1, 264])
@pytest.mark.parametrize("name", TINY_SHAPES)
def test_rows_without_a_token_are_zeros(name: str, processors: int) -> None:
    """As are a mixed step's rows that are FlashInfer's. Their first parts run: were all empty ones to end at once, none of the
    kernel's programs might wait for the kernel before."""
    shape, metadata = TINY_SHAPES[name], step([1] * 3, [70, 300, 40], 64, max_pages=640)
    inputs, layer = queries(shape, 3), cache(metadata, shape)
    truth = attention_truth(inputs, layer, metadata, shape)
    engine = attention("triton")
    engine.num_processors = processors
    assert engine.plan(metadata, shape).num_splits > 1
    metadata.seq_lens[0], metadata.seq_lens[2], truth[0], truth[2] = 0, 0, 0, 0
    result = run(engine, inputs, layer, metadata, shape)
    assert distance(result, truth) < ERROR
    assert bool(result[[0, 2]].eq(0).all())
    metadata.seq_lens.zero_()
    assert bool(run(engine, inputs, layer, metadata, shape).eq(0).all())


@pytest.mark.parametrize("name", ["tiny-gqa", "tiny-mla"])
def test_fp32_attention(name: str) -> None:
    shape, metadata = SHAPES[name], STEPS["mixed"]()
    inputs = queries(shape, sum(metadata.query_lens_host), torch.float32)
    layer = cache(metadata, shape, dtype=torch.float32)
    truth = attention_truth(inputs, layer, metadata, shape)
    assert distance(run(attention(PATHS[-1]), inputs, layer, metadata, shape), truth) < 1e-5


@pytest.mark.skipif(INTERPRETED, reason="FlashInfer needs a GPU")
def test_the_stack_s_own_choice_of_path() -> None:
    from minserve.kernels.hopper import hopper

    kernels = hopper(DEVICE)
    for name in ("qwen3", "moonlight"):
        shape = SHAPES[name]
        for rows in (2, 70):
            metadata = step([1] * rows, [random.randint(1, 500) for _ in range(rows)], 64)
            inputs, layer = queries(shape, rows), cache(metadata, shape)
            plan = kernels.plan_attention(metadata, shape)
            function: Callable[..., Tensor] = kernels.mla_attention if shape.kind == "mla" else kernels.gqa_attention
            result = function(*inputs, layer, metadata, shape, plan)
            assert distance(result, attention_truth(inputs, layer, metadata, shape)) < ERROR
