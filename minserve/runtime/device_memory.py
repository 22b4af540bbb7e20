"""How much GPU memory the KV cache may take, and what a plan had predicted of the start.

The cache gets what the whole process may use, less weights, buffers, a trial step's peak and the graphs, measured by a trial
capture.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import torch

from minserve.config import Config
from minserve.kernels.interface import Kernels, dtype_bytes, kv_page_shape
from minserve.models.load_report import LoadReport, gigabytes
from minserve.models.model import Model
from minserve.models.model_config import ModelConfig
from minserve.plan import Plan, measure
from minserve.request import SamplingParams
from minserve.roofline import H200, in_memory, shape_from_config
from minserve.runtime.captured_steps import decode_graphs, mixed_graphs, sampling_graphs
from minserve.runtime.cuda_graph import CudaRecorder, StepGraphs
from minserve.runtime.kv_cache import KVPlan
from minserve.runtime.model_runner import ModelRunner
from minserve.runtime.scheduler import Limits
from minserve.runtime.step import ScheduledRow, ScheduledStep, SlotSetup

_SCORED = 512
"""Prompt tokens that the trial step scores: several pieces, which are all of one size."""

_ELSEWHERE_BYTES = 8 << 30
"""More than the driver and the libraries take: another process has a part of the GPU."""

log = logging.getLogger("minserve.runtime")


def left_for_cache(
    config: Config,
    model: Model,
    kernels: Kernels,
    kv_dtype: torch.dtype,
    device: torch.device,
    decode_sizes: Sequence[int],
    mixed_sizes: Sequence[int],
) -> int:
    """Bytes, possibly negative. Runs the largest step on a cache of the dummy page alone to see what a step takes, and captures
    the largest decode and the largest mixed step there to see what all graphs will take; without sizes there are none."""
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info(device)
    longest = config.max_model_len or model.config.max_position_embeddings
    limits = Limits.of(config, model.config.vocab_size, -(-longest // config.page_size), longest)
    shape = (1, *kv_page_shape(model.attention_shape, config.page_size))
    cache = [torch.zeros(shape, dtype=kv_dtype, device=device) for _ in range(model.num_layers)]
    runner = ModelRunner(model, kernels, cache, limits, device)
    torch.cuda.reset_peak_memory_stats(device)
    runner.launch(trial_step(limits)).result()
    step_bytes = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    graphs = graph_bytes(runner, decode_sizes, mixed_sizes)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)  # the trial's buffers still live: the real ones are as large
    log.info("memory: a step takes up to %s, graphs up to %s", gigabytes(step_bytes), gigabytes(graphs))
    elsewhere = total - free - torch.cuda.memory_reserved(device)
    if elsewhere > _ELSEWHERE_BYTES:
        log.warning("%s of the GPU's memory are not this engine's; the KV cache is smaller by as much", gigabytes(elsewhere))
    return int(total * config.gpu_memory_utilization) - (total - free) - step_bytes - graphs


def graph_bytes(runner: ModelRunner, sizes: Sequence[int], mixed: Sequence[int] = ()) -> int:
    """What graphs of these decode and mixed steps take together, from a trial capture of the largest of each.

    The pool's working memory is shared, so it is needed once; each size keeps its own outputs and its own driver memory.
    """
    device, config, recorder = runner.device, runner.model.config, CudaRecorder(runner.device)
    trials: list[tuple[StepGraphs[Any], Sequence[int], int]] = []
    if mixed:
        trials.append((mixed_graphs(runner, [max(mixed)], recorder), mixed, 4 * config.hidden_size))
    if sizes:
        decode = decode_graphs(runner, [max(sizes)], recorder)
        trials.append((decode, sizes, 4 * config.vocab_size + 4 * config.hidden_size))
        trials.append((sampling_graphs(runner, decode, recorder), sizes, 8))  # token ids
    total = 0
    for graphs, all_sizes, bytes_each in trials:
        torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved(device)
        graphs.capture()
        whole = graphs.memory_bytes[max(all_sizes)]
        in_driver = max(0, whole - (torch.cuda.memory_reserved(device) - reserved))
        total += whole + in_driver * (len(all_sizes) - 1) + (sum(all_sizes) - max(all_sizes)) * bytes_each
    for graphs, _, _ in trials:
        graphs.destroy()
    return total


def trial_step(limits: Limits) -> ScheduledStep:
    """The step that takes most memory: all tokens that a step may have, from prompts, in rows that ask for everything.

    Every page is the dummy page, so no cache is needed and none is touched.
    """
    sampling = SamplingParams(max_tokens=1, seed=0, repetition_penalty=1.1, top_p=0.9)
    num_rows = min(limits.max_num_seqs, limits.max_step_tokens)
    most = limits.max_model_len - 1
    rows = []
    left = limits.max_step_tokens
    for slot in range(num_rows):
        length = max(1, min(most, left - (num_rows - slot - 1)))
        left -= length
        tokens = [token % limits.vocab_size for token in range(length)]
        rows.append(
            ScheduledRow(
                request_id=slot,
                slot=slot,
                start=0,
                num_tokens=length,
                token_ids=tuple(tokens),
                write_from=length,
                samples=True,
                logprobs=20,
                scored_ids=tuple(tokens[1:_SCORED]),
                scored_top=20,
                setup=SlotSetup(sampling, tokens),
            )
        )
    return ScheduledStep.of(1, rows)


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
