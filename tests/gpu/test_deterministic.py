"""The deterministic stack: a token's result depends on nothing but its own request, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from gpu.kernel_samples import DEVICE, INTERPRETED, cache, choices, expert_weights, fp8, normal, same_bits, sized, step
from gpu.runners import capture, runner_of, small_model
from runtime.scripted import Loop
from torch import Tensor

from minserve.kernels import stacks, triton_cache
from minserve.kernels.interface import (
    AttentionMetadata,
    AttentionShape,
    HeadNorms,
    Kernels,
    LinearWeight,
    RotaryTable,
    RouterConfig,
)
from minserve.request import Request, SamplingParams

COUNTS = sized((1, 2, 5, 16, 40, 300, 700), (1, 9, 40))
"""Rows of a step: each side of every size at which another stack cuts its work differently."""


@pytest.fixture
def deterministic() -> Kernels:
    if INTERPRETED:
        from minserve.kernels import torch_gpu

        return torch_gpu.deterministic(DEVICE)
    return stacks.build("deterministic", DEVICE)


def rows_alike(call: Callable[[Tensor], Tensor | tuple[Tensor, ...]], x: Tensor) -> None:
    """The first row's results are the same beside any number of others, and in any place."""
    wanted: tuple[Tensor, ...] | None = None
    for count in COUNTS:
        place = random.randrange(count)
        mates = x[1:count]
        together = torch.cat((mates[:place], x[:1], mates[place:]))
        results = call(together)
        own = tuple(result[place] for result in (results if isinstance(results, tuple) else (results,)))
        wanted = wanted or own
        for result, other in zip(own, wanted, strict=True):
            assert same_bits(result, other), f"beside {count - 1} others"


@pytest.mark.interpreted
def test_products_of_a_row(deterministic: Kernels) -> None:
    width, experts = sized((2048, 128), (512, 16))
    x, kernels = normal(max(COUNTS), width), deterministic
    for weight in (LinearWeight(normal(width, width)), LinearWeight(*fp8(width, width))):
        rows_alike(lambda some, weight=weight: kernels.linear(some, weight, None), x)
    rows_alike(lambda some: kernels.add_rms_norm(some, some, x[0], 1e-6), x)
    rows_alike(lambda some: kernels.rms_norm(some[:, :96].contiguous(), x[0, :96], 1e-6), x)
    gate = normal(experts, width, dtype=torch.float32)
    rows_alike(lambda some: kernels.route(some, gate, None, RouterConfig(8, "softmax", normalize=True), None), x)
    weight = normal(4, 512, 128).transpose(1, 2)
    rows_alike(lambda some: kernels.heads_linear(some.view(len(some), -1, 128)[:, :4].contiguous(), weight), x)


@pytest.mark.interpreted
@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_experts_of_a_row(deterministic: Kernels, kind: str) -> None:
    experts, hidden, inner, top_k = sized((16, 512, 256, 4), (4, 192, 128, 2))
    x, weights = normal(max(COUNTS), hidden), expert_weights(experts, hidden, inner, kind)
    ids, shares = choices(max(COUNTS), top_k, experts)

    def call(some: Tensor) -> Tensor:
        place = int((some == x[0]).all(1).nonzero()[0])
        others = [*range(1, len(some))]
        order = torch.tensor([*others[:place], 0, *others[place:]], device=DEVICE)
        return deterministic.experts_flat(some, ids[order].contiguous(), shares[order].contiguous(), weights)

    rows_alike(call, x)


@pytest.mark.interpreted
def test_mla_inputs_of_a_row(deterministic: Kernels) -> None:
    heads, nope, rank, rope = sized((4, 128, 512, 64), (2, 40, 72, 16))
    x = normal(max(COUNTS), heads * (nope + rope) + rank + rope)
    gain, w_uk, table = normal(rank), normal(heads, nope, rank), RotaryTable(torch.rand(8, rope, device=DEVICE), True)
    pages = normal(12, 64, rank + rope)

    def call(some: Tensor) -> tuple[Tensor, ...]:
        slots, positions = torch.arange(len(some), device=DEVICE), torch.full((len(some),), 3, device=DEVICE)
        q, kv = some[:, : heads * (nope + rope)].unflatten(1, (heads, -1)), some[:, heads * (nope + rope) :]
        results = deterministic.mla_inputs(q, kv, gain, 1e-6, w_uk, table, positions, pages, slots)
        return (*results, pages.view(-1, rank + rope)[: len(some)].clone())

    rows_alike(call, x)


@pytest.mark.interpreted
def test_grouped_query_inputs_of_a_row(deterministic: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """So few heads that another cut adds up a norm in another order; how it is cut also shows where nothing is in parallel."""
    shape = AttentionShape("gqa", 4, 2, 128, 0, 128**-0.5)
    x, norms = normal(max(COUNTS), 8 * 128), HeadNorms(normal(128), normal(128), 1e-6)
    table, pages, cuts = RotaryTable(torch.rand(8, 128, device=DEVICE), False), normal(12, 2, 64, 2, 128), set()
    kernel = triton_cache._gqa_inputs_kernel

    class Watched:
        def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
            def launch(*operands: object, **options: object) -> None:
                cuts.add((grid[1], options["block_heads"], options["num_warps"]))
                kernel[grid](*operands, **options)

            return launch

    def call(some: Tensor) -> tuple[Tensor, ...]:
        slots, positions = torch.arange(len(some), device=DEVICE), torch.full((len(some),), 3, device=DEVICE)
        q = deterministic.gqa_inputs(some, norms, table, positions, pages, slots, shape)
        return (q, pages.transpose(1, 2).reshape(-1, 2, 2, 128)[: len(some)].clone())

    monkeypatch.setattr(triton_cache, "_gqa_inputs_kernel", Watched())
    rows_alike(call, x)
    call(normal(300, 8 * 128))
    assert len(cuts) == 1


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "shape",
    sized(
        [AttentionShape("gqa", 32, 4, 128, 0, 128**-0.5), AttentionShape("mla", 16, 1, 512, 64, 192**-0.5)],
        [AttentionShape("gqa", 4, 2, 32, 0, 32**-0.5), AttentionShape("mla", 4, 1, 32, 16, 40**-0.5)],
    ),
)
def test_attention_of_a_token(deterministic: Kernels, shape: AttentionShape) -> None:
    """The last token of a row: decoded alone, decoded beside others, and as the end of prompts of several lengths."""
    length, others = sized((1500, ([1, 1, 1], [7], [130], [1, 300, 40], [700, 1])), (150, ([1, 1, 1], [7], [130, 1])))
    metadata = step([1], [length], 64)
    layer = cache(metadata, shape)
    table = metadata.page_table

    def attend(lengths: list[int], seq_lens: list[int]) -> Tensor:
        sizes = (shape.head_dim, shape.rope_dim) if shape.kind == "mla" else (shape.head_dim,)
        q = [normal(sum(lengths), shape.num_heads, size) for size in sizes]
        for part, last in zip(q, own, strict=True):
            part[lengths[0] - 1] = last
        starts = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
        seen = torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE)
        tables = table.expand(len(lengths), -1).contiguous()
        rows = AttentionMetadata(starts, seen, tables, metadata.slot_mapping, 64, tuple(lengths), tuple(seq_lens))
        function: Callable[..., Tensor] = deterministic.mla_attention if shape.kind == "mla" else deterministic.gqa_attention
        return function(*q, layer, rows, shape, deterministic.plan_attention(rows, shape))[lengths[0] - 1]

    sizes = (shape.head_dim, shape.rope_dim) if shape.kind == "mla" else (shape.head_dim,)
    own = [normal(shape.num_heads, size) for size in sizes]
    alone = attend([1], [length])
    for lengths in others:
        seq_lens = [length, *(random.randint(own_length, length) for own_length in lengths[1:])]
        assert same_bits(attend(lengths, seq_lens), alone), lengths


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v3"])
@pytest.mark.parametrize("quantised", [False, True])
def test_tokens_do_not_depend_on_the_requests_beside_them(name: str, quantised: bool) -> None:
    """Random models are as sensitive as models can be: any bit that changes soon changes a token."""
    generator = random.Random(7)
    prompts = [[generator.randrange(1024) for _ in range(generator.choice([1, 20, 64, 300, 900]))] for _ in range(10)]
    kernels = stacks.build("deterministic", DEVICE)
    model = small_model(name, kernels, fp8=quantised, policy="serial")

    def tokens(groups: list[list[int]], graphs: bool) -> dict[int, list[int]]:
        got: dict[int, list[int]] = {}
        for group in groups:
            runner = runner_of(model, kernels, max_num_seqs=8)
            if graphs:
                capture(runner, (1, 2, 4, 8))
            loop = Loop(runner.limits, runner)
            for index in group:
                sampling = SamplingParams(max_tokens=30, seed=index, temperature=0.0)
                loop.add(Request(id=index, prompt_token_ids=prompts[index], sampling=sampling, arrival_time=0.0))
            loop.run()
            got |= {index: loop.tokens[index] for index in group}
        return got

    everyone = list(range(len(prompts)))
    alone = tokens([[index] for index in everyone], graphs=False)
    assert tokens([everyone], graphs=True) == alone
    assert tokens([everyone[::-1][:5], everyone[:5]], graphs=True) == alone
