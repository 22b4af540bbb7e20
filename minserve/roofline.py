"""Parameters, bytes and operations of a MoE model, counted from its config alone, and the floor they set for a decode step.

Plain arithmetic: no torch, no device, no weights. The floor charges each part of a step the larger of its bytes over the
memory bandwidth and its operations over the matrix rate; activations (which mostly live in L2) and launches cost nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from minserve.quantization import FP8_BLOCK, INT4_GROUP, claimed_format, quantization_section

MAX_LAYERS = 10_000

Stored = Literal["plain", "fp8", "int4"]
"""How matrices lie in memory: the compute type, FP8 in blocks of 128 x 128 or INT4 in groups of 32, scales included."""


@dataclasses.dataclass(frozen=True, slots=True)
class Gpu:
    """Measured ceilings of one GPU model: bytes a second, operations a second, bytes."""

    name: str
    memory_bytes: float
    bandwidth: float
    """Device-to-device copy, read plus write."""
    bf16_rate: float
    fp8_rate: float
    nvlink_bandwidth: float
    """Each way, per GPU, to the GPUs of its host."""
    rdma_bandwidth: float
    """Each way, per GPU, to other hosts: the line rate of its network adapter."""
    gpus_per_host: int


H200 = Gpu("h200", 143_156 * 2.0**20, 4.3e12, 790e12, 1300e12, 350e9, 400e9 / 8, 8)
GPUS: Mapping[str, Gpu] = {H200.name: H200}


@dataclasses.dataclass(frozen=True, slots=True)
class ModelShape:
    """The dimensions that bytes and operations depend on."""

    hidden: int
    num_layers: int
    vocab: int
    tied_embeddings: bool
    heads: int
    kv_heads: int
    """0 for MLA."""
    head_dim: int
    """0 for MLA."""
    q_lora: int
    kv_lora: int
    """0 for GQA."""
    nope: int
    rope: int
    v_dim: int
    qkv_bias: bool
    qk_norm: bool
    num_sparse_layers: int
    dense_intermediate: int
    num_experts: int
    top_k: int
    expert_intermediate: int
    shared_intermediate: int
    """Whole width of the shared expert, 0 for none."""
    shared_gate: bool
    correction_bias: bool
    linears: Stored
    """Linear layers outside the routed experts; embeddings, head and norms are plain, the router fp32."""
    experts: Stored
    element_bytes: int
    """Of a plain parameter."""

    @property
    def mla(self) -> bool:
        return self.kv_lora > 0

    @property
    def num_dense_layers(self) -> int:
        return self.num_layers - self.num_sparse_layers


def shape_from_config(config: Mapping[str, Any]) -> ModelShape:
    """Reads a published config.json (already parsed). Raises KeyError naming a missing field, and what a value of a wrong kind
    raises."""
    text: Mapping[str, Any] = config.get("text_config") or config

    def count(name: str, default: int = 0) -> int:
        return int(text.get(name) or default)

    layers = int(text["num_hidden_layers"])
    if layers > MAX_LAYERS:
        raise ValueError(f"num_hidden_layers is {layers}")
    mla = "kv_lora_rank" in text
    model_type = str(text.get("model_type", ""))
    v3 = mla and model_type != "deepseek_v2"
    num_experts = int(text.get("n_routed_experts") or text.get("num_local_experts") or text.get("num_experts") or 0)
    expert_width = count("moe_intermediate_size")
    if mla:
        shared = int(text.get("n_shared_experts", v3) or 0) * expert_width
        step, first = count("moe_layer_freq", 1), int(text.get("first_k_dense_replace", 3 * v3) or 0)
        sparse = sum(i >= first and i % step == 0 for i in range(layers))
    else:
        shared = count("shared_expert_intermediate_size")
        step = count("decoder_sparse_step", 1)
        dense_only = set(text.get("mlp_only_layers") or ())
        sparse = sum(i not in dense_only and (i + 1) % step == 0 for i in range(layers))
    kind = claimed_format(quantization_section(config))
    fp8 = kind == "fp8_block"
    heads = int(text["num_attention_heads"])
    return ModelShape(
        hidden=int(text["hidden_size"]),
        num_layers=layers,
        vocab=int(text["vocab_size"]),
        tied_embeddings=bool(text.get("tie_word_embeddings", False)),
        heads=heads,
        kv_heads=0 if mla else count("num_key_value_heads", heads),
        head_dim=0 if mla else int(text.get("head_dim") or int(text["hidden_size"]) // heads),
        q_lora=count("q_lora_rank"),
        kv_lora=count("kv_lora_rank"),
        nope=count("qk_nope_head_dim"),
        rope=count("qk_rope_head_dim"),
        v_dim=count("v_head_dim"),
        qkv_bias=bool(text.get("qkv_bias", model_type == "qwen2_moe")),
        qk_norm=model_type.startswith("qwen3"),
        num_sparse_layers=sparse if num_experts else 0,
        dense_intermediate=count("intermediate_size"),
        num_experts=num_experts,
        top_k=count("num_experts_per_tok"),
        expert_intermediate=expert_width,
        shared_intermediate=shared,
        shared_gate=model_type == "qwen2_moe",
        correction_bias=v3,
        linears="fp8" if fp8 else "plain",
        # A block that spans gate and up rows has no scale of its own. Releases in INT4 quantise the routed experts alone.
        experts="fp8" if fp8 and expert_width % FP8_BLOCK == 0 else "int4" if kind == "int4_group" else "plain",
        element_bytes=4 if (text.get("dtype") or text.get("torch_dtype")) == "float32" else 2,
    )


def in_memory(m: ModelShape, *, element_bytes: int, keeps_fp8: bool, keeps_int4: bool) -> ModelShape:
    """The same model where plain parameters have another size, or where kernels read fewer formats: others are widened."""
    kept = {"plain", *(["fp8"] if keeps_fp8 else []), *(["int4"] if keeps_int4 else [])}
    linears, experts = (stored if stored in kept else "plain" for stored in (m.linears, m.experts))
    return dataclasses.replace(m, element_bytes=element_bytes, linears=linears, experts=experts)


def attention_parameters(m: ModelShape) -> dict[str, int]:
    """One layer's attention: `linear` matrices, `kv_up` (MLA's kv_b_proj, absorbed in bf16), and `other` (norms, biases)."""
    if m.mla:
        query = m.heads * (m.nope + m.rope)
        q = m.hidden * m.q_lora + m.q_lora * query if m.q_lora else m.hidden * query
        linear = q + m.hidden * (m.kv_lora + m.rope) + m.heads * m.v_dim * m.hidden
        return {"linear": linear, "kv_up": m.kv_lora * m.heads * (m.nope + m.v_dim), "other": m.q_lora + m.kv_lora}
    query, key = m.heads * m.head_dim, m.kv_heads * m.head_dim
    other = (query + 2 * key if m.qkv_bias else 0) + (2 * m.head_dim if m.qk_norm else 0)
    return {"linear": m.hidden * (2 * query + 2 * key), "kv_up": 0, "other": other}


def parameters(m: ModelShape) -> dict[str, int]:
    """Parameters by part, exactly as the checkpoint holds them (MTP layers left out); their sum is the model's total."""
    attention = attention_parameters(m)
    per_expert = 3 * m.hidden * m.expert_intermediate
    return {
        "embedding": m.vocab * m.hidden,
        "lm_head": 0 if m.tied_embeddings else m.vocab * m.hidden,
        "attention": m.num_layers * sum(attention.values()),
        "dense_mlp": m.num_dense_layers * 3 * m.hidden * m.dense_intermediate,
        "router": m.num_sparse_layers * m.num_experts * (m.hidden + m.correction_bias),
        "routed_experts": m.num_sparse_layers * m.num_experts * per_expert,
        "shared_expert": m.num_sparse_layers * (3 * m.hidden * m.shared_intermediate + (m.hidden if m.shared_gate else 0)),
        "norms": (2 * m.num_layers + 1) * m.hidden,
    }


def parameter_bytes(m: ModelShape, stored: Stored) -> float:
    """Bytes of one parameter of a matrix, its share of the scales included."""
    if stored == "fp8":
        return 1 + 4 / FP8_BLOCK**2
    return 0.5 + m.element_bytes / INT4_GROUP if stored == "int4" else float(m.element_bytes)


def weight_bytes(m: ModelShape) -> dict[str, float]:
    """Bytes in memory by part, of all experts. MLA's kv_b_proj is plain whatever the rest is, since it is absorbed."""
    plain, linear = parameter_bytes(m, "plain"), parameter_bytes(m, m.linears)
    attention = attention_parameters(m)
    factor = {"dense_mlp": linear, "shared_expert": linear, "routed_experts": parameter_bytes(m, m.experts), "router": 4.0}
    sizes = {part: count * factor.get(part, plain) for part, count in parameters(m).items()}
    sizes["attention"] = m.num_layers * (attention["linear"] * linear + (attention["kv_up"] + attention["other"]) * plain)
    return sizes


def kv_bytes_per_token(m: ModelShape, element_bytes: float = 2.0) -> float:
    """Bytes of KV cache of one token over all layers."""
    per_layer = m.kv_lora + m.rope if m.mla else 2 * m.kv_heads * m.head_dim
    return m.num_layers * per_layer * element_bytes


def distinct_experts(num_experts: int, top_k: int, tokens: float) -> float:
    """Expected number of experts hit by `tokens` tokens under uniform routing."""
    return num_experts * (1 - (1 - top_k / num_experts) ** tokens) if num_experts else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class PartCost:
    """What one part of a step moves and takes, on one GPU."""

    bytes: float
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class StepFloor:
    """The least time of one decode step on one GPU."""

    parts: dict[str, PartCost]
    wire_seconds: dict[str, float]
    """Of `nvlink` and `rdma`, which are used at once."""

    @property
    def gpu_seconds(self) -> float:
        return sum(part.seconds for part in self.parts.values())

    @property
    def seconds(self) -> float:
        return self.gpu_seconds + max(self.wire_seconds.values())


def step_floor(m: ModelShape, gpu: Gpu, batch: int, context: int, ep_size: int = 1) -> StepFloor:
    """One decode step of `batch` requests per GPU, each with `context` tokens in the cache.

    Weights are read once, of the routed experts only those hit (uniform routing over all ranks' tokens), the KV cache once.
    Under expert parallelism FP8 dispatch (one byte) and bf16 combine (two) carry each token to the ranks of its experts.
    """
    linear, routed = parameter_bytes(m, m.linears), parameter_bytes(m, m.experts)
    attention = attention_parameters(m)
    attention_bytes = m.num_layers * (attention["linear"] * linear + attention["kv_up"] * 2)
    attention_macs = m.num_layers * (attention["linear"] + attention["kv_up"])
    per_pair = m.heads * (2 * m.kv_lora + m.rope if m.mla else 2 * m.head_dim)
    expert = 3 * m.hidden * m.expert_intermediate
    hit = distinct_experts(m.num_experts, m.top_k, batch * ep_size) / ep_size
    counts = parameters(m)
    rate, expert_rate = (gpu.fp8_rate if stored == "fp8" else gpu.bf16_rate for stored in (m.linears, m.experts))
    chosen = batch * m.top_k * m.num_sparse_layers * expert

    def part(size: float, macs: float, matrix_rate: float) -> PartCost:
        return PartCost(size, max(size / gpu.bandwidth, 2 * macs / matrix_rate))

    head = m.vocab * m.hidden
    parts = {
        "attention_weights": part(attention_bytes, batch * attention_macs, rate),
        "kv_cache": part(
            batch * (context + 1) * kv_bytes_per_token(m),
            m.num_layers * batch * context * per_pair,
            gpu.bf16_rate,
        ),
        "router": part(counts["router"] * 2, batch * counts["router"], gpu.bf16_rate),
        "routed_experts": part(m.num_sparse_layers * hit * expert * routed, chosen, expert_rate),
        "shared_expert": part(counts["shared_expert"] * linear, batch * counts["shared_expert"], rate),
        "dense_mlp": part(counts["dense_mlp"] * linear, batch * counts["dense_mlp"], rate),
        "lm_head": part(head * 2, batch * head, gpu.bf16_rate),
    }
    return StepFloor(parts, wire_seconds(m, gpu, batch, ep_size))


def wire_seconds(m: ModelShape, gpu: Gpu, batch: int, ep_size: int) -> dict[str, float]:
    """Dispatch and combine of `batch` tokens per GPU in all sparse layers, uniform routing.

    Each token goes to each of its experts on its own, as low-latency kernels send it: in FP8 with a float32 scale per 128
    values where experts are FP8, else in bf16; it comes back in bf16.
    """
    there = 1 + 4 / FP8_BLOCK if m.experts == "fp8" else 2.0
    sent = m.num_sparse_layers * batch * m.top_k * m.hidden * (there + 2) / ep_size
    near = min(ep_size, gpu.gpus_per_host)
    return {"nvlink": sent * (near - 1) / gpu.nvlink_bandwidth, "rdma": sent * (ep_size - near) / gpu.rdma_bandwidth}
