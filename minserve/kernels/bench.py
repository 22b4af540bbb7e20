"""Times the kernels at the sizes of published models: `python -m minserve.kernels.bench [--only TEXT ...] [--warm]` on a GPU.

Prints microseconds, achieved GB/s or TFLOP/s and the share of the ceiling; the last line is JSON. Times are of CUDA-graph
replays over several input sets, so neither launch gaps nor a warm L2 flatter them. Knows no model and no step.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from minserve.kernels import torch_gpu, triton_expert_rows, triton_experts, triton_linear
from minserve.kernels.deep_gemm_products import DeepGemmProducts
from minserve.kernels.expert_choices import ExpertShape
from minserve.kernels.flashinfer_attention import FlashInferAttention
from minserve.kernels.interface import (
    AttentionMetadata,
    AttentionShape,
    ExpertWeights,
    HeadNorms,
    LinearWeight,
    RotaryTable,
    RouterConfig,
    kv_page_shape,
)
from minserve.kernels.timing import Call, expert_bytes, graph_microseconds, random_experts, random_fp8, random_tokens
from minserve.kernels.triton_attention import TritonAttention
from minserve.kernels.triton_grouping import move_rows

COPY_GIGABYTES = 4300.0
"""Ceiling of memory-bound kernels, GB/s: a device-to-device copy on one H200, reads and writes counted."""
BF16_TERAFLOPS = 790.0
FP8_TERAFLOPS = 1300.0
_DEVICE = torch.device("cuda")
_BF16 = torch.bfloat16
_Experts = Callable[[Tensor, Tensor, Tensor, ExpertWeights], Tensor]
_Linear = Callable[[Tensor, LinearWeight, Tensor | None], object]


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One line of the table: calls that do the same work on different memory."""

    name: str
    path: str
    make: Callable[[], Sequence[Call]]
    gigabytes: float = 0.0
    """Bytes that one call must move, in GB; 0 where the launch is what counts."""
    teraflops: float = 0.0
    fp8: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """One measured line."""

    name: str
    path: str
    microseconds: float
    gigabytes_per_second: float
    teraflops_per_second: float
    share: float
    """Of the ceiling that bounds it: the larger of the two shares."""


def measure(case: Case) -> Result:
    us = graph_microseconds(case.make())
    bandwidth, rate = case.gigabytes / us * 1e6, case.teraflops / us * 1e6
    share = max(bandwidth / COPY_GIGABYTES, rate / (FP8_TERAFLOPS if case.fp8 else BF16_TERAFLOPS))
    return Result(case.name, case.path, us, bandwidth, rate, share)


MODELS = {
    "qwen3-30b bf16": ExpertShape("plain", 128, 2048, 768, 8),
    "qwen3-30b fp8": ExpertShape("fp8_block", 128, 2048, 768, 8),
    "moonlight bf16": ExpertShape("plain", 64, 2048, 1408, 6),
    "deepseek-v3 fp8": ExpertShape("fp8_block", 256, 7168, 2048, 8),
    "kimi-k2-thinking int4, a rank of 8": ExpertShape("int4_group", 48, 7168, 2048, 8),
}


def expert_paths(tokens: int, shape: ExpertShape) -> dict[str, _Experts]:
    """The rival ways to compute a step's experts."""
    products = DeepGemmProducts()
    paths: dict[str, _Experts] = {}
    if tokens <= 16 and shape.format != "int4_group":
        paths["vector"] = triton_expert_rows.experts_vector
    if tokens <= 4096 or shape.format == "plain":
        paths["tiles"] = triton_experts.experts_tiled
    if shape.format != "int4_group" and 8 <= tokens <= 256:
        paths["masked"] = partial(products.experts_grouped, masked=True)
    if shape.format != "int4_group" and tokens >= 256:
        paths["contiguous"] = partial(products.experts_grouped, masked=False)
    return paths


def expert_cases(model: str, batches: Sequence[int]) -> Iterator[Case]:
    shape, weights = MODELS[model], list[ExpertWeights]()

    def make(function: _Experts, inputs: list[tuple[Tensor, Tensor, Tensor]]) -> list[Call]:
        if not weights:
            weights.append(random_experts(shape))
        return [partial(function, x, ids, shares, weights[0]) for x, ids, shares in inputs]

    for tokens in batches:
        inputs = [random_tokens(tokens, shape) for _ in range(6 if tokens <= 256 else 1)]
        hit = sum(len(ids.unique()) for _, ids, _ in inputs) / len(inputs)
        flops = 6.0 * tokens * shape.top_k * shape.hidden * shape.inner
        for path, function in expert_paths(tokens, shape).items():
            fp8 = shape.format == "fp8_block"
            size = hit * expert_bytes(shape) / 1e9
            yield Case(f"experts {model} x{tokens}", path, partial(make, function, inputs), size, flops / 1e12, fp8)


def linear_cases(name: str, n: int, k: int, batches: Sequence[int]) -> Iterator[Case]:
    copies = max(2, min(16, (256 << 20) // (n * k)))
    deep_gemm = DeepGemmProducts()

    def make(function: _Linear, fp8: bool, tokens: int) -> list[Call]:
        x = torch.randn(tokens, k, device=_DEVICE, dtype=_BF16)
        plain = [LinearWeight(torch.randn(n, k, device=_DEVICE, dtype=_BF16)) for _ in range(0 if fp8 else copies)]
        scaled = [LinearWeight(*random_fp8(n, k)) for _ in range(copies if fp8 else 0)]
        return [partial(function, x, weight, None) for weight in plain + scaled]

    for tokens in batches:
        paths: dict[str, _Linear] = {
            "bf16 torch": lambda x, weight, bias: F.linear(x, weight.weight, bias),
            "bf16": triton_linear.linear,
            "bf16 parts": lambda x, weight, _: triton_linear.linear_parts(x, weight),
            "fp8 triton": triton_linear.linear,
            "fp8": deep_gemm.linear,
            "fp8 parts": lambda x, weight, _: deep_gemm.linear_parts(x, weight),
        }
        for path, function in paths.items():
            fp8 = path.startswith("fp8")
            size = n * k * (1 if fp8 else 2) / 1e9
            label = f"linear {name} {n}x{k} x{tokens}"
            yield Case(label, path, partial(make, function, fp8, tokens), size, 2e-12 * tokens * n * k, fp8)


def attention_metadata(query_lens: Sequence[int], seq_lens: Sequence[int], page_size: int = 64) -> tuple[AttentionMetadata, int]:
    """A step over shuffled pages, and the number of pages its cache needs."""
    counts = [-(-length // page_size) for length in seq_lens]
    order = (torch.randperm(sum(counts)) + 1).to(torch.int32).split(counts)
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for row, pages in enumerate(order):
        table[row, : len(pages)] = pages
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    metadata = AttentionMetadata(
        starts.to(_DEVICE),
        torch.tensor(seq_lens, dtype=torch.int32, device=_DEVICE),
        table.to(_DEVICE),
        torch.zeros(sum(query_lens), dtype=torch.int64, device=_DEVICE),
        page_size,
        tuple(query_lens),
        tuple(seq_lens),
        graph=all(length == 1 for length in query_lens),
    )
    return metadata, sum(counts) + 1


def attention_cases(name: str, shape: AttentionShape, rows: int, query: int, length: int) -> Iterator[Case]:
    latent = shape.kind == "mla"
    width = shape.head_dim + shape.rope_dim if latent else 2 * shape.num_kv_heads * shape.head_dim
    size = 2.0 * rows * length * width / 1e9
    per_pair = 2 * shape.head_dim + shape.rope_dim
    flops = 2.0 * shape.num_heads * per_pair * rows * query * (length - query / 2 if query > 1 else length)
    triton = TritonAttention(_DEVICE)

    def make(path: str) -> list[Call]:
        metadata, pages = attention_metadata([query] * rows, [length] * rows)
        attention: Any = triton if path == "triton" else FlashInferAttention(_DEVICE, triton, 1)
        plan = attention.plan(metadata, shape)
        q = torch.randn(query * rows, shape.num_heads, shape.head_dim, device=_DEVICE, dtype=_BF16)
        tail = torch.randn(query * rows, shape.num_heads, shape.rope_dim, device=_DEVICE, dtype=_BF16)
        page = kv_page_shape(shape, metadata.page_size)
        caches = [torch.randn(pages, *page, device=_DEVICE, dtype=_BF16) for _ in range(max(1, min(16, int(0.4 / size))))]
        if latent:
            return [partial(attention.mla, q, tail, cache, metadata, shape, plan) for cache in caches]
        return [partial(attention.gqa, q, cache, metadata, shape, plan) for cache in caches]

    for path in ("triton", "flashinfer") if latent or query > 1 else ("triton",):
        yield Case(f"attention {name} {rows}x{query} over {length}", path, partial(make, path), size, flops / 1e12)


def row_cases(tokens: int) -> Iterator[Case]:
    kernels = torch_gpu.torch_gpu(_DEVICE)
    x, residual = (torch.randn(tokens, 2048, device=_DEVICE, dtype=_BF16) for _ in range(2))
    gain, head_gain = (torch.ones(size, device=_DEVICE, dtype=_BF16) for size in (2048, 128))
    qkv = torch.randn(tokens, 40 * 128, device=_DEVICE, dtype=_BF16)
    table, positions = torch.randn(4096, 128, device=_DEVICE), torch.randint(0, 4096, (tokens,), device=_DEVICE)
    rotary, norms = RotaryTable(table, interleaved=False), HeadNorms(head_gain, head_gain, 1e-6)
    shape = AttentionShape("gqa", 32, 4, 128, 0, 128**-0.5)
    cache = torch.zeros(64, 2, 64, 4, 128, device=_DEVICE, dtype=_BF16)
    slots = torch.arange(tokens, device=_DEVICE)
    gates = [torch.randn(experts, 2048, device=_DEVICE) for experts in (128, 256)]
    router, groups = RouterConfig(8, "softmax", normalize=True), RouterConfig(8, "sigmoid", 8, 4, "top2_sum", True, 2.5)
    calls: dict[str, Call] = {
        "add_rms_norm 2048": partial(kernels.add_rms_norm, x, residual, gain, 1e-6),
        "gqa_inputs 32 + 4 heads": partial(kernels.gqa_inputs, qkv, norms, rotary, positions, cache, slots, shape),
        "route 2048 x 128, top 8": partial(kernels.route, x, gates[0], None, router, None),
        "route 2048 x 256, 8 groups": partial(kernels.route, x, gates[1], gates[1][:, 0].contiguous(), groups, None),
        "quantize 2048": partial(move_rows, x, tokens, quantize=True),
    }
    for name, call in calls.items():
        yield Case(f"rows {name} x{tokens}", "triton", partial(_repeat, call))


def _repeat(call: Call) -> list[Call]:
    return [call] * 20


def all_cases() -> Iterator[Case]:
    for tokens in (1, 128):
        yield from row_cases(tokens)
    gqa, mla = AttentionShape("gqa", 32, 4, 128, 0, 128**-0.5), AttentionShape("mla", 16, 1, 512, 64, 192**-0.5)
    for rows, length in ((1, 1024), (8, 1024), (32, 1024), (128, 1024), (1, 32768), (16, 8192)):
        yield from attention_cases("gqa 32/4x128", gqa, rows, 1, length)
        yield from attention_cases("mla 16x576", mla, rows, 1, length)
    yield from attention_cases("gqa 32/4x128", gqa, 8, 1024, 1024)
    yield from attention_cases("mla 16x576", mla, 8, 1024, 1024)
    for name, n, k in (("qwen3 qkv", 5120, 2048), ("qwen3 o", 2048, 4096), ("deepseek o", 7168, 16384)):
        yield from linear_cases(name, n, k, (1, 8, 32, 128))
    for model in MODELS:
        small = model.startswith(("qwen3", "moonlight"))
        yield from expert_cases(model, (1, 2, 4, 8, 16, 32, 64, 128, 256, 8192) if small else (1, 8, 32, 128))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", help="cases whose name or path contains this; may be given several times")
    parser.add_argument("--warm", action="store_true", help="compile every case's kernels and time nothing")
    options = parser.parse_args(arguments)
    results = []
    for case in all_cases():
        label = f"{case.name:40s} {case.path:14s}"
        if options.only and not any(text in label for text in options.only):
            continue
        try:
            if options.warm:
                for call in case.make()[:1]:
                    call()
                continue
            result = measure(case)
        except Exception as error:
            sys.stdout.write(f"{label} failed: {type(error).__name__}: {error}\n")
            continue
        results.append(result)
        sys.stdout.write(
            f"{label} {result.microseconds:9.1f} us {result.gigabytes_per_second:7.0f} GB/s "
            f"{result.teraflops_per_second:7.1f} TFLOP/s {result.share:6.1%}\n"
        )
        sys.stdout.flush()
    sys.stdout.write(json.dumps([dataclasses.asdict(result) for result in results]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
