"""What is proven of kernels and graphs before the first request, as --self-check asks for it. Knows how to prove neither."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from minserve.config import Config
from minserve.models.decoder import Decoder
from minserve.runtime import canary, self_check
from minserve.runtime.model_runner import ModelRunner
from minserve.runtime.parallel import Group
from minserve.runtime.startup import Timeline

log = logging.getLogger("minserve.runtime")


def prove(
    config: Config,
    model: Decoder,
    runner: ModelRunner,
    kv_dtype: torch.dtype,
    timeline: Timeline,
    group: Group,
    while_device_works: Callable[[], object],
) -> dict[str, Any]:
    """The self-check of --self-check, for /server_info; all ranks of the group in step. Raises SelfCheckFailed."""
    if runner.device.type == "cpu":
        return {"verdict": "no graphs on a CPU"}
    if config.self_check == "off":
        log.warning("--self-check off: graphs and kernels are not proven")
        return {"verdict": "off (--self-check off)"}
    timeline.begin("self check")
    began = time.monotonic()
    errors = canary.check_layers(model, runner.kernels, kv_dtype, config.page_size, group.collectives)

    def under_way(fraction: float) -> None:
        timeline.progress(fraction)
        while_device_works()

    proven = self_check.check_graphs(runner, config.self_check, under_way)
    verdict = {
        "verdict": "passed" if runner.graphs is not None else f"passed for the kernels; no graphs ({runner.eager_reason})",
        "level": config.self_check,
        "comparisons": proven.comparisons,
        "streams_at_replay": {str(batch): count for batch, count in proven.streams.items()},
        "layer_errors": errors,
        "seconds": round(time.monotonic() - began, 3),
    }
    log.info("self-check: %s", verdict)
    return verdict
