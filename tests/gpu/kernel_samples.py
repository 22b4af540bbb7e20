"""Random inputs for kernels, and how far a result is from the truth. Knows no kernel."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from minserve.kernels import reference
from minserve.kernels.interface import AttentionMetadata, AttentionShape, ExpertWeights, kv_page_shape

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""The kernels run in Triton's interpreter, on a CPU: a hundred programs a second."""
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
BF16 = torch.bfloat16
Sizes = TypeVar("Sizes")


def sized(real: Sizes, small: Sizes) -> Sizes:
    """What a test runs with on a GPU, or in the interpreter."""
    return small if INTERPRETED else real


def distance(result: Tensor, truth: Tensor) -> float:
    """||result - truth|| / ||truth|| in fp64; NaN never passes a bound."""
    result, truth = result.double(), truth.double()
    return float((result - truth).norm() / truth.norm().clamp(min=1e-30))


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Equal byte for byte, NaN included."""
    return first.dtype == second.dtype and torch.equal(
        first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8)
    )


def normal(*shape: int, std: float = 1.0, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, device=DEVICE, dtype=dtype).normal_(std=std)


def fp8(*shape: int) -> tuple[Tensor, Tensor]:
    """Weight [..., N, K] and scale fp32 [..., blocks, blocks], different in each block; the products have std about 0.03."""
    blocks = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    weight = (normal(*shape) * 50).clamp(-448, 448).to(torch.float8_e4m3fn)
    return weight, torch.rand(blocks, device=DEVICE) * 1e-3 + 1e-4


def int4(*shape: int) -> tuple[Tensor, Tensor]:
    """Packed int32 [..., N, K / 8], every nibble, and bf16 scales [..., N, K / 32]; the products have std about 0.02."""
    packed = torch.randint(-(1 << 31), 1 << 31, (*shape[:-1], shape[-1] // 8), device=DEVICE, dtype=torch.int64).int()
    return packed, (torch.rand(*shape[:-1], shape[-1] // 32, device=DEVICE) * 6e-3 + 1e-3).to(BF16)


def expert_weights(experts: int, hidden: int, inner: int, kind: str) -> ExpertWeights:
    """FP8: the inner width is rounded up to whole blocks."""
    if kind == "fp8":
        inner = -(-inner // 128) * 128
    if kind != "bf16":
        random = fp8 if kind == "fp8" else int4
        (w13, s13), (w2, s2) = random(experts, 2 * inner, hidden), random(experts, hidden, inner)
        return ExpertWeights(w13, w2, s13, s2)
    return ExpertWeights(normal(experts, 2 * inner, hidden, std=0.02), normal(experts, hidden, inner, std=0.02))


def choices(tokens: int, top_k: int, experts: int) -> tuple[Tensor, Tensor]:
    """Distinct slot ids int32 [T, k], some -1, and weights fp32 [T, k]."""
    ids = torch.rand(tokens, experts, device=DEVICE).topk(top_k).indices.int()
    ids[torch.rand(tokens, top_k, device=DEVICE) < 0.1] = -1
    return ids, torch.rand(tokens, top_k, device=DEVICE)


def quantised(x: Tensor) -> Tensor:
    """fp32 x after FP8 quantisation in blocks of 128 along each row, as an ideal activation quantiser leaves it."""
    blocks = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % 128)).unflatten(-1, (-1, 128))
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448.0
    rounded: Tensor = ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)[..., : x.shape[-1]]
    return rounded


def expert_truth(x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertWeights, *, fp8_activations: bool = False) -> Tensor:
    """What experts_flat should give, in fp32, expert by expert."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for slot in range(experts.w13.shape[0]):
        rows, places = (ids == slot).nonzero(as_tuple=True)
        if len(rows):
            out.index_add_(0, rows, one_expert(x[rows], slot, experts, fp8_activations) * weights[rows, places].unsqueeze(1))
    return out


def one_expert(x: Tensor, slot: int, experts: ExpertWeights, fp8_activations: bool) -> Tensor:
    w13, w2 = (
        reference.widen(weight[slot], None if scale is None else scale[slot], torch.float32).float()
        for weight, scale in ((experts.w13, experts.w13_scale), (experts.w2, experts.w2_scale))
    )
    hidden = (quantised(x) if fp8_activations else x.float()) @ w13.T
    hidden = reference.silu_and_mul(hidden.to(BF16).float() if fp8_activations else hidden)
    return (quantised(hidden) if fp8_activations else hidden) @ w2.T


def step(query_lens: list[int], seq_lens: list[int], page_size: int, *, max_pages: int | None = None) -> AttentionMetadata:
    """A step over shuffled pages; page 0 is the dummy."""
    counts = [-(-length // page_size) for length in seq_lens]
    table = torch.zeros(len(counts), max_pages or max(counts), dtype=torch.int32)
    for row, pages in enumerate((torch.randperm(sum(counts)) + 1).int().split(counts)):
        table[row, : len(pages)] = pages
    positions = [torch.arange(seq - query, seq) for query, seq in zip(query_lens, seq_lens, strict=True)]
    slots = [table[row].long()[place // page_size] * page_size + place % page_size for row, place in enumerate(positions)]
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).int().to(DEVICE),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE),
        page_table=table.to(DEVICE),
        slot_mapping=torch.cat(slots).to(DEVICE),
        page_size=page_size,
        query_lens_host=tuple(query_lens),
        seq_lens_host=tuple(seq_lens),
    )


def cache(metadata: AttentionMetadata, shape: AttentionShape, num_pages: int | None = None, dtype: torch.dtype = BF16) -> Tensor:
    """A layer's pages: random where the rows' tokens lie, NaN everywhere else."""
    size = metadata.page_size
    pages = num_pages or int(metadata.page_table.max()) + 1
    values = normal(pages, *kv_page_shape(shape, size), dtype=dtype)
    used = torch.zeros(pages, size, dtype=torch.bool, device=DEVICE)
    for row, length in enumerate(metadata.seq_lens_host):
        place = torch.arange(length, device=DEVICE)
        used[metadata.page_table[row].long()[place // size], place % size] = True
    if shape.kind == "mla":
        return values.masked_fill(~used[:, :, None], float("nan"))
    return values.masked_fill(~used[:, None, :, None, None], float("nan"))


def attention_truth(queries: tuple[Tensor, ...], layer: Tensor, metadata: AttentionMetadata, shape: AttentionShape) -> Tensor:
    wide = [query.float() for query in queries]
    function: Callable[..., Tensor] = reference.mla_attention if shape.kind == "mla" else reference.gqa_attention
    return function(*wide, layer.float(), metadata, shape, reference.plan_attention(metadata, shape))
