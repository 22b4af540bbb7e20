"""What a plan predicted of this start beside what came of it. Knows plans and sizes; measures nothing itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from minserve.config import Config
from minserve.kernels.interface import Kernels, dtype_bytes
from minserve.models.load_report import LoadReport, gigabytes
from minserve.models.model_config import ModelConfig
from minserve.plan import Plan, measure
from minserve.roofline import H200, in_memory, shape_from_config
from minserve.runtime.kv_cache import KVPlan


def forecast(config: Config, model_config: ModelConfig, kernels: Kernels, dtype: torch.dtype, device_bytes: int) -> Plan:
    """The plan of `minserve plan` for this device and what this stack keeps as it is stored; floors are an H200's."""
    shape = in_memory(
        shape_from_config(model_config.raw),
        element_bytes=dtype_bytes(dtype),
        keeps_fp8=kernels.keeps_fp8,
        keeps_int4=kernels.keeps_int4,
    )
    gpu = dataclasses.replace(H200, memory_bytes=device_bytes)
    return measure(shape, config, model_config.max_position_embeddings, gpu)


def compare(plan: Plan, report: LoadReport, size: KVPlan, *, on_gpu: bool) -> dict[str, dict[str, float]]:
    """Bytes by name, predicted and measured, for /server_info. Buffers are known on a GPU only: what neither the weights nor
    the KV cache could have of the usable memory."""
    rows = {"weights": (sum(plan.weights.values()), float(report.bytes_written))}
    if on_gpu:
        rows["buffers"] = (sum(plan.buffers.values()), plan.usable - size.memory_bytes - report.bytes_written)
    return {name: {"predicted": round(predicted), "measured": round(measured)} for name, (predicted, measured) in rows.items()}


def sentence(rows: dict[str, dict[str, Any]]) -> str:
    """`weights 61.1 GB predicted, 61.1 GB measured (+0.0 %)`, and so on."""
    parts = []
    for name, row in rows.items():
        share = (row["measured"] / row["predicted"] - 1) * 100 if row["predicted"] else 0.0
        parts.append(f"{name} {gigabytes(row['predicted'])} predicted, {gigabytes(row['measured'])} measured ({share:+.1f} %)")
    return "; ".join(parts)
