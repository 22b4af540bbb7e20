"""Compiles our Triton kernels for an H200 on a machine without a GPU, at the widths of published models, as a step launches them.

python compile_for_h200.py: a line for each kernel with its variants, registers, spilled bytes, shared memory; the last is JSON.
Tensors lie on the CPU and hold nothing: launches end when their kernel is compiled.
"""

from __future__ import annotations

import collections
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from minserve.kernels import (
    torch_gpu,
    triton_attention,
    triton_cache,
    triton_exchange,
    triton_few_rows,
    triton_grouping,
    triton_masked,
    triton_rows,
)
from minserve.kernels.expert_choices import ExpertChoices
from minserve.kernels.interface import (
    AttentionMetadata,
    AttentionShape,
    ExpertRows,
    ExpertWeights,
    HeadNorms,
    Kernels,
    LinearWeight,
    PartialSums,
    RotaryTable,
    RouterConfig,
    kv_page_shape,
)

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
DEVICE = torch.device("cpu")
PAGE = 64


class NoGPU:
    """Stands for Triton's driver, as far as compiling asks it."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device

    def get_active_torch_device(self) -> torch.device:
        return DEVICE


def compile_only() -> dict[str, dict[int, Any]]:
    """From now on launches compile, and nothing runs. The compiled kernels, by function."""
    compiled: dict[str, dict[int, Any]] = collections.defaultdict(dict)
    plain_run = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        del warmup
        kernel = plain_run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled[f"{self.__module__.rsplit('.', 1)[-1]}.{self.__name__}"][id(kernel)] = kernel
        return kernel

    def dependent_launch(device: torch.device) -> dict[str, bool]:
        del device
        return {"dependent": True, "launch_pdl": True}

    driver.set_active(NoGPU())
    JITFunction.run = run
    for name, module in list(sys.modules.items()):
        if name.startswith("minserve.kernels.") and hasattr(module, "dependent_launch"):
            module.dependent_launch = dependent_launch
    return compiled


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Takes no memory until it is touched."""
    return torch.empty(shape, dtype=dtype)


def experts(kind: str, count: int, hidden: int, inner: int) -> ExpertWeights:
    if kind == "bf16":
        return ExpertWeights(empty(count, 2 * inner, hidden), empty(count, hidden, inner))
    if kind == "int4":
        packed = empty(count, 2 * inner, hidden // 8, dtype=torch.int32), empty(count, hidden, inner // 8, dtype=torch.int32)
        return ExpertWeights(*packed, empty(count, 2 * inner, hidden // 32), empty(count, hidden, inner // 32))
    scales = (
        empty(count, inner // 64, hidden // 128, dtype=torch.float32),
        empty(count, hidden // 128, inner // 128, dtype=torch.float32),
    )
    return ExpertWeights(empty(count, 2 * inner, hidden, dtype=FP8), empty(count, hidden, inner, dtype=FP8), *scales)


def metadata(query: int, rows: int, length: int) -> AttentionMetadata:
    pages = -(-length // PAGE)
    return AttentionMetadata(
        torch.zeros(rows + 1, dtype=torch.int32),
        torch.zeros(rows, dtype=torch.int32),
        torch.zeros(rows, pages, dtype=torch.int32),
        torch.zeros(query * rows, dtype=torch.int64),
        PAGE,
        (query,) * rows,
        (length,) * rows,
        graph=query == 1,
    )


def rows_of(kernels: Kernels, tokens: int, hidden: int, router: RouterConfig, num_experts: int) -> None:
    x, gain = empty(tokens, hidden), empty(hidden)
    kernels.rms_norm(x, gain, 1e-6)
    kernels.add_rms_norm(x, x, gain, 1e-6)
    kernels.silu_and_mul(empty(tokens, 2 * hidden))
    bias = empty(num_experts, dtype=torch.float32) if router.scoring == "sigmoid" else None
    for kept in (torch.float32, BF16):
        kernels.route(x, empty(num_experts, hidden, dtype=kept), bias, router, torch.ones(1, dtype=torch.int32))


def linears(kernels: Kernels, tokens: int, *sizes: tuple[int, int]) -> None:
    for n_size, k_size in sizes:
        scale = empty(-(-n_size // 128), -(-k_size // 128), dtype=torch.float32)
        kernels.linear(empty(tokens, k_size), LinearWeight(empty(n_size, k_size, dtype=FP8), scale), None)


def gqa(kernels: Kernels, shape: AttentionShape, meta: AttentionMetadata, *, norms: bool) -> None:
    tokens, width = len(meta.slot_mapping), shape.num_heads + 2 * shape.num_kv_heads
    cache = empty(64, *kv_page_shape(shape, PAGE))
    gains = HeadNorms(empty(shape.head_dim), empty(shape.head_dim), 1e-6) if norms else None
    rotary = RotaryTable(empty(4096, shape.head_dim, dtype=torch.float32), interleaved=False)
    positions = torch.zeros(tokens, dtype=torch.int64)
    q = kernels.gqa_inputs(empty(tokens, width * shape.head_dim), gains, rotary, positions, cache, meta.slot_mapping, shape)
    kernels.gqa_attention(q, cache, meta, shape, kernels.plan_attention(meta, shape))


def mla(kernels: Kernels, shape: AttentionShape, meta: AttentionMetadata, nope: int) -> None:
    tokens, heads, rank, rope = len(meta.slot_mapping), shape.num_heads, shape.head_dim, shape.rope_dim
    cache = empty(64, *kv_page_shape(shape, PAGE))
    q, tail = kernels.mla_inputs(
        empty(tokens, heads, nope + rope),
        empty(tokens, rank + rope),
        empty(rank),
        1e-6,
        empty(heads, nope, rank),
        RotaryTable(empty(4096, rope, dtype=torch.float32), interleaved=True),
        torch.zeros(tokens, dtype=torch.int64),
        cache,
        meta.slot_mapping,
    )
    latent = kernels.mla_attention(q, tail, cache, meta, shape, kernels.plan_attention(meta, shape))
    kernels.heads_linear(latent, empty(heads, 128, rank).transpose(1, 2))


def moe(kernels: Kernels, tokens: int, top_k: int, weights: ExpertWeights, hidden: int) -> None:
    ids, shares = torch.zeros(tokens, top_k, dtype=torch.int32), torch.zeros(tokens, top_k)
    kernels.experts_flat(empty(tokens, hidden), ids, shares, weights)


def chosen(kernels: Kernels, rows: int, vocab_size: int) -> None:
    values, ids = kernels.part_maxima(empty(rows, vocab_size))
    slots, last_tokens = torch.zeros(rows, dtype=torch.int64), torch.zeros(257, dtype=torch.int64)
    counted = torch.zeros(257, dtype=torch.int32), torch.zeros(257, dtype=torch.int32), empty(257, vocab_size, dtype=torch.int32)
    kernels.record_tokens(values, ids, slots, last_tokens, *counted)
    kernels.record_tokens(values[:, :1], ids[:, :1], slots, last_tokens, *counted)


def qwen3(kernels: Kernels, tokens: int) -> None:
    shape = AttentionShape("gqa", 32, 4, 128, 0, 128**-0.5)
    rows_of(kernels, tokens, 2048, RouterConfig(8, "softmax", normalize=True), 128)
    gqa(kernels, shape, metadata(1, tokens, 2048) if tokens <= 128 else metadata(tokens // 2, 2, 4096), norms=True)
    linears(kernels, tokens, (5120, 2048), (2048, 4096))
    for kind in ("bf16", "fp8"):
        moe(kernels, tokens, 8, experts(kind, 128, 2048, 768), 2048)
    chosen(kernels, tokens, 151_936)


def moonlight(kernels: Kernels, tokens: int) -> None:
    shape = AttentionShape("mla", 16, 1, 512, 64, 192**-0.5)
    rows_of(kernels, tokens, 2048, RouterConfig(6, "sigmoid", normalize=True, scale=2.446), 64)
    mla(kernels, shape, metadata(1, tokens, 2048) if tokens <= 128 else metadata(tokens // 2, 2, 4096), 128)
    moe(kernels, tokens, 6, experts("bf16", 64, 2048, 1408), 2048)
    chosen(kernels, tokens, 163_840)


def deepseek_v3(kernels: Kernels, tokens: int) -> None:
    shape = AttentionShape("mla", 128, 1, 512, 64, 192**-0.5)
    rows_of(kernels, tokens, 7168, RouterConfig(8, "sigmoid", 8, 4, "top2_sum", True, 2.5), 256)
    mla(kernels, shape, metadata(1, tokens, 2048) if tokens <= 128 else metadata(tokens // 2, 2, 4096), 128)
    linears(kernels, tokens, (7168, 16384))
    moe(kernels, tokens, 8, experts("fp8", 256, 7168, 2048), 7168)


def kimi_k2_int4(kernels: Kernels, tokens: int) -> None:
    moe(kernels, tokens, 8, experts("int4", 48, 7168, 2048), 7168)


def between_batches(kernels: Kernels) -> None:
    """Cuts that no batch of the default ones takes: FP8 tiles of sixteen pairs, the router's of 17 to 256 tokens."""
    rows_of(kernels, 128, 2048, RouterConfig(8, "softmax", normalize=True), 128)
    moe(kernels, 128, 8, experts("fp8", 128, 2048, 768), 2048)


def around_vendor_kernels(kernels: Kernels) -> None:
    """What the hopper stacks launch between DeepGEMM's products, FlashInfer's attention and DeepEP's exchange."""
    counts = torch.zeros(16, dtype=torch.int32)
    ids = torch.zeros(256, 8, dtype=torch.int32)
    for place in (triton_grouping.place_masked(ids, 128, 256), triton_grouping.place_contiguous(ids, 128, 128)):
        groups = 1 if place.row_expert is not None else 128
        for quantize in (False, True):
            into = {"where": place.destinations, "groups": groups, "quantize": quantize}
            triton_grouping.move_rows(empty(256, 2048), place.num_rows, mapping="scatter", items=256, top_k=8, **into)
            hidden = empty(place.num_rows, 1536)
            triton_grouping.move_rows(hidden, place.num_rows, mapping="listed", items=2048, gated=True, **into)
        values, scales = triton_exchange.quantize_rows(empty(256, 2048))
        triton_exchange.scatter_quantized(values, scales, place.destinations, place.num_rows, top_k=8, groups=groups)
    triton_grouping.move_rows(empty(256, 2048), 256, quantize=True)
    into_fp8_rows()
    for quantize in (False, True):
        triton_masked.masked_rows(empty(16, 128, 2048), counts, quantize=quantize)
        triton_masked.masked_rows(empty(16, 128, 1536), counts, gated=True, quantize=quantize)
    for kind in ("bf16", "fp8", "int4"):
        kernels.experts_masked(empty(16, 128, 2048), counts, experts(kind, 16, 2048, 768))
    triton_cache.list_pages(
        torch.zeros(8, 32, dtype=torch.int32), torch.zeros(8, dtype=torch.int32), PAGE, torch.zeros(256, dtype=torch.int32)
    )


def into_fp8_rows() -> None:
    """Producers that quantise for DeepGEMM."""
    shape = AttentionShape("gqa", 32, 4, 128, 0, 128**-0.5)
    for tokens in (32, 128):
        for width in (2048, 4096, 7168):
            triton_rows.rms_norm_fp8(empty(tokens, width), empty(width), 1e-6)
            triton_rows.add_rms_norm_fp8(empty(tokens, width), empty(tokens, width), empty(width), 1e-6)
            ids, shares = torch.zeros(tokens, 8, dtype=torch.int32), torch.zeros(tokens, 8)
            for norm in (triton_rows.add_rms_norm, triton_rows.add_rms_norm_fp8):
                for added in (None, empty(tokens, width)):
                    norm(ExpertRows(empty(tokens * 8, width), ids, shares, added), empty(tokens, width), empty(width), 1e-6)
        attention, cache = triton_attention.TritonAttention(DEVICE), empty(64, *kv_page_shape(shape, PAGE))
        rotary = RotaryTable(empty(4096, 128, dtype=torch.float32), interleaved=False)
        gains, positions = HeadNorms(empty(128), empty(128), 1e-6), torch.zeros(tokens, dtype=torch.int64)
        for longest in (2048, 40_960):  # whole rows, and rows that are cut where they are long
            meta = metadata(1, tokens, longest)
            plan = attention.plan(meta, shape)
            attention.gqa_fp8(empty(tokens, 32, 128), cache, meta, shape, plan)
            for decode in (attention.gqa_decode, attention.gqa_decode_fp8):
                decode(empty(tokens, 40 * 128), gains, rotary, positions, cache, meta, shape, plan)
        triton_cache.heads_linear_fp8(empty(tokens, 128, 512), empty(128, 128, 512).transpose(1, 2))


def few_rows() -> None:
    """Products of one row and of either block of rows, whole and in parts, and the norms that sum these."""
    for rows in (1, 9, 32):
        for kind in (BF16, FP8):
            for n_size, k_size in ((5120, 2048), (3648, 2048), (2048, 4096), (2048, 2048)):
                scale = empty(-(-n_size // 128), k_size // 128, dtype=torch.float32) if kind == FP8 else None
                weight = LinearWeight(empty(n_size, k_size, dtype=kind), scale)
                x = empty(rows, k_size) if kind == BF16 else triton_grouping.empty_fp8_rows(rows, k_size, DEVICE)
                if triton_few_rows.takes_whole(rows, kind, weight):
                    for bias in (None, empty(n_size)) if rows == 9 else (None,):
                        triton_few_rows.linear(x, weight, bias)
                if parts := triton_few_rows.parts_of(rows, kind, weight):
                    triton_few_rows.linear_parts(x, weight, parts)
    for width, parts in ((2048, 8), (2048, 4), (3584, 2)):
        for norm in (triton_rows.add_rms_norm, triton_rows.add_rms_norm_fp8):
            norm(PartialSums(empty(2, parts, width, dtype=torch.float32)), empty(2, width), empty(width), 1e-6)


def wide_heads() -> None:
    """Decode attention whose blocks of the cache take the most shared memory, also of heads that are no power of two wide."""
    meta, attention = metadata(1, 16, 2048), triton_attention.TritonAttention(DEVICE)
    for head_dim in (96, 192, 256):
        shape = AttentionShape("gqa", 24, 1, head_dim, 0, head_dim**-0.5)
        cache, plan = empty(64, *kv_page_shape(shape, PAGE)), attention.plan(meta, shape)
        attention.gqa(empty(16, 24, head_dim), cache, meta, shape, plan)
        rotary = RotaryTable(empty(4096, head_dim // 4, dtype=torch.float32), interleaved=False)
        positions = torch.zeros(16, dtype=torch.int64)
        attention.gqa_decode(empty(16, 26 * head_dim), None, rotary, positions, cache, meta, shape, plan)


def resources(kernel: Any) -> dict[str, int]:
    """Registers of a thread, bytes that it spills, and shared memory of a program, from the machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        told = subprocess.run([CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK):(\d+)", told)}
    return {"registers": found["REG"], "spilled": found["STACK"], "shared": int(kernel.metadata.shared)}


def main() -> int:
    compiled = compile_only()
    choices = ExpertChoices("NVIDIA H200")
    stacks = [torch_gpu.torch_gpu(DEVICE, choices), torch_gpu.deterministic(DEVICE)]
    batches = [int(word) for word in os.environ.get("COMPILE_BATCHES", "1 8 2048").split()]
    for kernels in stacks:
        for tokens in batches:
            for model in (qwen3, moonlight, deepseek_v3, kimi_k2_int4):
                model(kernels, tokens)
        batches = batches[1:2]
    between_batches(stacks[0])
    around_vendor_kernels(stacks[0])
    few_rows()
    wide_heads()
    report = {}
    for name, variants in sorted(compiled.items()):
        rows = [resources(kernel) for kernel in variants.values()]
        most = {key: max(row[key] for row in rows) for key in rows[0]}
        report[name] = {"variants": len(rows), **most}
        sys.stdout.write(f"{name:45} {len(rows):3} variants, at most {most}\n")
    sys.stdout.write(json.dumps(report) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
