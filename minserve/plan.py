"""Will it fit: what each rank's memory holds and how fast a step can be, from a checkpoint's config.json alone.

Knows no torch, no device and no weights. Weights and KV cache are counted exactly; buffers are estimates, and are called so.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from minserve.config import Config, flag_name
from minserve.errors import CheckpointError, UsageError
from minserve.quantization import claimed_format, quantization_section, read_config_json, read_json_object
from minserve.roofline import H200, Gpu, ModelShape, kv_bytes_per_token, parameters, shape_from_config, step_floor, weight_bytes

FLOOR_BATCHES = (1, 8, 32, 128, 256)
FLOOR_CONTEXT = 1024
MAX_RANKS = 64
MODEL_TYPES = frozenset({"deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25", "qwen2_moe", "qwen3_moe"})
"""Whose parameters the arithmetic knows: the kinds that are served."""
_DISPATCH_STEP = 128
"""A rank's room in a low-latency dispatch is a multiple of it: for its decode rows, and one more for prompts."""

_MAX_SIZE = 1 << 32
_CONTEXT_BYTES = 1.2e9
"""CUDA context, kernel code, cuBLAS and vendor libraries' workspaces."""
_LIBRARIES_BYTES = 2.3e9
"""NCCL's, NVSHMEM's and DeepEP's own, whatever the model."""
_GRAPH_BYTES = 5e6
"""The driver's memory for one captured graph."""
_SAMPLED_ROWS, _SAMPLED_BYTES = 64, 80
"""Rows that are sampled at once at most, and what a graph of them takes for each token id: logits, and sorting them."""
_MIXED_GRAPHS = 12
"""Captured sizes of steps that read prompts, about."""
_CAPTURED = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """One rank's memory in bytes, and the floor of its steps. All ranks hold the same amounts."""

    model: str
    gpu: str
    ep_size: int
    parameters: int
    """Of the whole model."""
    usable: float
    """The GPU's memory times --gpu-memory-utilization."""
    weights: dict[str, float]
    buffers: dict[str, float]
    """Estimates."""
    kv_bytes_per_token: float
    kv_tokens: int
    """That fit into what weights and buffers leave; 0 when nothing is left."""
    max_model_len: int
    floors: dict[int, float]
    """Batch a rank to the least milliseconds of a decode step at 1,024 tokens of context."""
    fits: bool
    verdict: str
    notes: tuple[str, ...]

    @property
    def kv_cache(self) -> float:
        return max(0.0, self.usable - sum(self.weights.values()) - sum(self.buffers.values()))


def read_config(model: Path) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """config.json of a directory (or that file itself), and what the index beside it says. CheckpointError when unreadable."""
    directory = model.parent if model.name == "config.json" else model
    config = read_config_json(directory)
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return config, ()
    listed = read_json_object(index)
    files, size = listed.get("weight_map"), listed.get("metadata")
    total = size.get("total_size") if isinstance(size, dict) else None
    count = len({str(file) for file in files.values()}) if isinstance(files, dict) else 0
    said = f", {total / 1e9:,.1f} GB" if isinstance(total, int | float) else ""
    return config, (f"the index lists {count:,} files{said} (with what a text server leaves on disk)",)


def make_plan(config: Mapping[str, Any], settings: Config, notes: tuple[str, ...] = (), gpu: Gpu = H200) -> Plan:
    """UsageError for settings that the model does not have, CheckpointError for a config that lacks a field or is of a kind
    that is not served."""
    model = settings.model
    kinds = [part.get("model_type") for part in (config.get("text_config"), config) if isinstance(part, Mapping)]
    if not any(str(kind) in MODEL_TYPES for kind in kinds):
        raise CheckpointError(f"{model}: config.json: model_type is {kinds[-1]!r:.80}; known: {', '.join(sorted(MODEL_TYPES))}")
    try:
        shape = shape_from_config(config)
        longest = _longest_context(config.get("text_config") or config)
    except KeyError as error:
        raise CheckpointError(f"{model}: config.json: {error.args[0]} is missing") from error
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{model}: config.json: a field is of the wrong kind: {error}") from error
    positive = (shape.hidden, shape.num_layers, shape.vocab, shape.heads, kv_bytes_per_token(shape), longest)
    sizes = (*positive, *(value for value in dataclasses.astuple(shape) if not isinstance(value, str)))
    if min(positive) <= 0 or min(sizes) < 0 or max(sizes) > _MAX_SIZE or (shape.num_experts and shape.top_k > shape.num_experts):
        raise CheckpointError(f"{model}: config.json: a size is out of range")
    if claimed_format(quantization_section(config)) == "nvfp4":
        notes += ("NVFP4 weights are widened to 16 bits while they are loaded",)
    plan = measure(shape, settings, longest, gpu, notes)
    return plan if plan.fits else dataclasses.replace(plan, verdict=_what_to_move(shape, plan, settings, longest, gpu))


def _longest_context(text: Mapping[str, Any]) -> int:
    """max_position_embeddings, or what YaRN stretches the original context to where that is more."""
    rope, known = text.get("rope_parameters") or text.get("rope_scaling") or {}, int(text["max_position_embeddings"])
    yarn = "yarn" in (rope.get("rope_type"), rope.get("type"))
    return max(known, int(rope.get("factor", 1.0) * rope.get("original_max_position_embeddings", known))) if yarn else known


def measure(shape: ModelShape, settings: Config, longest: int, gpu: Gpu, notes: tuple[str, ...] = ()) -> Plan:
    """The plan of a model of this shape whose longest context is `longest`, without advice. Raises UsageError."""
    ep_size, experts, wanted = settings.ep_size, shape.num_experts, settings.max_model_len
    slots = experts + settings.redundant_experts
    if ep_size < 1 or (ep_size > 1 and (not experts or slots % ep_size)):
        legal, copies = ", ".join(map(str, _rank_counts(shape, settings))) or "1", settings.redundant_experts
        shared = f"{experts} experts{f' and {copies} redundant ones' if copies else ''}"
        raise UsageError(f"--ep-size {ep_size} does not divide the model's {shared}; possible: {legal}")
    if wanted is not None and wanted > longest:
        raise UsageError(f"--max-model-len {wanted} is more than the model's max_position_embeddings of {longest}")
    weights = {part: size for part, size in weight_bytes(shape).items() if size}
    if "routed_experts" in weights:
        weights["routed_experts"] = weights["routed_experts"] * slots / (experts * ep_size)
    buffers = buffer_bytes(shape, settings)
    usable = gpu.memory_bytes * settings.gpu_memory_utilization
    per_token = kv_bytes_per_token(shape, shape.element_bytes)
    left = usable - sum(weights.values()) - sum(buffers.values())
    pages = max(0, int(left // (per_token * settings.page_size)) - 1)  # one more is the dummy page of padded rows
    tokens = pages * settings.page_size
    length = wanted or min(longest, tokens)
    at_once = min(settings.max_num_seqs, tokens // length) if length else 0
    requests = f"{at_once:,} request{'' if at_once == 1 else 's'} of {length:,} tokens"
    return Plan(
        model=settings.model,
        gpu=gpu.name,
        ep_size=ep_size,
        parameters=sum(parameters(shape).values()),
        usable=usable,
        weights=weights,
        buffers=buffers,
        kv_bytes_per_token=per_token,
        kv_tokens=tokens,
        max_model_len=length,
        floors={b: step_floor(shape, gpu, b, FLOOR_CONTEXT, ep_size).seconds * 1e3 for b in FLOOR_BATCHES},
        fits=length >= 2 and tokens >= length,
        verdict=f"fits: the KV cache of a rank holds {tokens:,} tokens, {requests} at once",
        notes=notes,
    )


def _rank_counts(shape: ModelShape, settings: Config) -> list[int]:
    """How many ranks could have equal shares of the experts and their copies."""
    slots = shape.num_experts + settings.redundant_experts
    return [size for size in range(1, MAX_RANKS + 1) if shape.num_experts and slots % size == 0]


def buffer_bytes(m: ModelShape, settings: Config) -> dict[str, float]:
    """Estimates of what is neither weights nor cache: the largest step's tensors, graphs, communication, the context."""
    tokens, size = max(settings.chunked_prefill_size, settings.max_num_seqs), m.element_bytes
    widest = max(m.dense_intermediate, m.shared_intermediate, m.heads * max(m.head_dim, m.nope + m.rope))
    rows = tokens * m.top_k * (2 * m.hidden + 3 * m.expert_intermediate)  # permuted in and out, gate, up, product
    forward = (rows + tokens * (3 * m.hidden + widest)) * size
    sampled = min(settings.max_num_seqs, _SAMPLED_ROWS) * m.vocab * _SAMPLED_BYTES
    captured = sum(batch < settings.max_num_seqs for batch in _CAPTURED) + 1 + _MIXED_GRAPHS
    # Graphs share one pool: the largest step's tensors, and what of sampling does not fit between them.
    graphs = max(forward, sampled) + sampled / 2 + _GRAPH_BYTES * captured
    buffers = {"step": max(forward, sampled * 2 / 3), "graphs": graphs, "context": _CONTEXT_BYTES}
    if settings.ep_size > 1:
        # DeepEP low-latency: dispatch and combine, sent and received, in two sets used in turn.
        capacity = (-(-settings.max_num_seqs // _DISPATCH_STEP) + 1) * _DISPATCH_STEP
        buffers["communication"] = _LIBRARIES_BYTES + 2.0 * 2.0 * m.num_experts * capacity * (2 * m.hidden + 16)
    return buffers


def _what_to_move(shape: ModelShape, plan: Plan, settings: Config, longest: int, gpu: Gpu) -> str:
    """One sentence: why it does not fit, and which flag to move which way."""

    def fitting(**changes: Any) -> bool:
        return measure(shape, msgspec.structs.replace(settings, **changes), longest, gpu).fits

    missing = sum(plan.weights.values()) + sum(plan.buffers.values()) - plan.usable
    if plan.kv_tokens:
        cause = f"the KV cache holds {plan.kv_tokens:,} tokens and --max-model-len is {plan.max_model_len:,}"
    else:
        cause = f"weights and buffers leave no KV cache: {gigabytes(max(0.0, missing))} too much for a rank"
    advice = [f"lower --max-model-len to {plan.kv_tokens}"] if plan.kv_tokens > 1 else []
    sizes = [size for size in _rank_counts(shape, settings) if size > settings.ep_size]
    advice += [f"raise --ep-size to {size}" for size in sizes if fitting(ep_size=size)][:1]
    if settings.gpu_memory_utilization < 0.95 and fitting(gpu_memory_utilization=0.95):
        advice.append("raise --gpu-memory-utilization to 0.95")
    for field in ("max_num_seqs", "chunked_prefill_size"):
        halves = [getattr(settings, field) >> power for power in range(1, 7)]
        smaller = next((value for value in halves if value and fitting(**{field: value})), None)
        if smaller and not advice:
            advice.append(f"lower {flag_name(field)} to {smaller}")
    return f"does not fit: {cause}; {' or '.join(advice) or f'no --ep-size up to {MAX_RANKS} is enough on this GPU'}"


def describe(plan: Plan) -> str:
    """The plan as a table for a person."""
    ranks = f"{plan.ep_size} rank{'s' if plan.ep_size > 1 else ''}"
    lines = [f"{plan.model}: {plan.parameters / 1e9:,.1f} B parameters on {ranks} of {plan.gpu}; a rank holds:", ""]
    lines += [_row(part.replace("_", " "), size, plan.usable) for part, size in plan.weights.items()]
    lines += [_row("weights", sum(plan.weights.values()), plan.usable, "=")]
    lines += [_row(f"{part} (estimate)", size, plan.usable) for part, size in plan.buffers.items()]
    lines += [_row("left for the KV cache", plan.kv_cache, plan.usable, "="), _row("usable", plan.usable, plan.usable, "="), ""]
    lines += [f"  KV cache: {plan.kv_bytes_per_token / 1024:,.1f} KiB a token, {plan.kv_tokens:,} tokens", ""]
    lines += [f"  {'batch a rank':>12}  {'floor of a step':>15}  {'tokens/s, all ranks':>19}   (context {FLOOR_CONTEXT:,})"]
    lines += [
        f"  {batch:12,}  {milliseconds:12.2f} ms  {plan.ep_size * batch / milliseconds * 1e3:19,.0f}"
        for batch, milliseconds in plan.floors.items()
    ]
    lines += ["", *(f"note: {note}" for note in plan.notes), plan.verdict]
    return "\n".join(lines)


def to_json(plan: Plan) -> str:
    return json.dumps(dataclasses.asdict(plan) | {"kv_cache": plan.kv_cache}, indent=2)


def gigabytes(size: float) -> str:
    return f"{size / 1e9:,.2f} GB"


def _row(name: str, size: float, whole: float, mark: str = " ") -> str:
    return f"{mark} {name:<26} {gigabytes(size):>12} {size / whole:7.1%}"
