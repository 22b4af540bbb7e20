"""Small models with random weights on the GPU, in runners that are ready to capture. Knows no server."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu.kernel_samples import DEVICE

from minserve.kernels import stacks
from minserve.kernels.interface import Kernels, kv_page_shape
from minserve.models.checkpoint import read_quantization_config
from minserve.models.decoder import Decoder
from minserve.models.formats import Formats
from minserve.models.layers.streams import CudaLanes
from minserve.models.model_config import ModelConfig
from minserve.models.registry import build_model, load_model_config
from minserve.models.weights import dummy_weights, formats_from_config
from minserve.runtime import captured_steps
from minserve.runtime.cuda_graph import CudaRecorder, StepGraphs
from minserve.runtime.model_runner import ModelRunner, Sampled
from minserve.runtime.scheduler import Limits

SHAPES = Path(__file__).parents[2] / "configs" / "shapes"
SMALL: dict[str, dict[str, Any]] = {
    "deepseek-v3": {
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 128,
        "intermediate_size": 384,
        "moe_intermediate_size": 128,
        "n_routed_experts": 32,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
    },
    "moonlight-16b-a3b": {
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 384,
        "moe_intermediate_size": 128,
        "n_routed_experts": 16,
    },
    "qwen2-57b-a14b": {
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 256,
        "num_experts": 16,
    },
    "qwen3-30b-a3b": {"hidden_size": 256, "num_attention_heads": 8, "moe_intermediate_size": 128, "num_experts": 32},
}
"""The published shapes made narrow, in widths that every GPU kernel takes."""
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def small_config(name: str, *, layers: int = 3, fp8: bool = False) -> tuple[ModelConfig, Formats]:
    fields = json.loads((SHAPES / name / "config.json").read_text()) | SMALL[name]
    fields |= {"num_hidden_layers": layers, "vocab_size": 1024, "max_position_embeddings": 4096}
    fields |= {"eos_token_id": 1, "bos_token_id": 0, "quantization_config": FP8 if fp8 else None}
    if not fp8:
        del fields["quantization_config"]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(fields))
        return load_model_config(Path(folder)), formats_from_config(read_quantization_config(Path(folder)))


def small_model(
    name: str,
    kernels: Kernels,
    *,
    layers: int = 3,
    fp8: bool = False,
    policy: str = "overlap",
    dtype: torch.dtype = torch.bfloat16,
) -> Decoder:
    config, formats = small_config(name, layers=layers, fp8=fp8)
    lanes = CudaLanes(DEVICE) if policy == "overlap" else None
    model = build_model(config, formats, kernels, dtype, DEVICE, shared_expert=policy, lanes=lanes)
    dummy_weights(model, 0)
    model.finish_load()
    return model


def runner_of(
    model: Decoder, kernels: Kernels, *, max_num_seqs: int = 40, num_pages: int = 200, chunked_prefill_size: int = 512
) -> ModelRunner:
    limits = Limits(
        max_num_seqs=max_num_seqs,
        chunked_prefill_size=chunked_prefill_size,
        page_size=64,
        num_pages=num_pages,
        max_model_len=2048,
        vocab_size=model.config.vocab_size,
    )
    shape = (num_pages + 1, *kv_page_shape(model.attention_shape, 64))
    dtype = model.embedding.weight.dtype
    cache = [torch.zeros(shape, dtype=dtype, device=DEVICE) for _ in range(model.num_layers)]
    return ModelRunner(model, kernels, cache, limits, DEVICE)


def small_runner(
    name: str,
    stack: str = "torch-gpu",
    *,
    change: Callable[[Kernels], Kernels] = lambda kernels: kernels,
    layers: int = 3,
    fp8: bool = False,
    policy: str = "overlap",
    dtype: torch.dtype = torch.bfloat16,
    **sizes: int,
) -> ModelRunner:
    kernels = change(stacks.build(stack, DEVICE))
    model = small_model(name, kernels, layers=layers, fp8=fp8, policy=policy, dtype=dtype)
    return runner_of(model, kernels, **sizes)


def capture(runner: ModelRunner, sizes: tuple[int, ...] | None = None) -> StepGraphs[Sampled]:
    sizes = sizes or (runner.limits.max_num_seqs,)
    captured_steps.capture(runner, CudaRecorder(DEVICE), sizes)
    assert runner.graphs is not None
    return runner.graphs
