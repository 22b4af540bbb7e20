"""`--shared-expert auto` on a GPU: every plan that a model can have is captured and timed, once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpu.kernel_samples import DEVICE
from gpu.runners import small_config

from minserve.kernels import stacks
from minserve.remembered import Remembered
from minserve.runtime import shared_expert
from minserve.runtime.shared_expert import BATCHES, Shape, Times


@pytest.mark.parametrize("stack", ["torch-gpu", "hopper"])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("name", "fusable"), [("deepseek-v3", True), ("moonlight-16b-a3b", True), ("qwen2-57b-a14b", False)])
def test_auto_times_each_plan_once(
    name: str, fusable: bool, fp8: bool, stack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape(*small_config(name, fp8=fp8), stacks.build(stack, DEVICE), torch.bfloat16, DEVICE)
    seen: list[Times] = []
    measure = shared_expert.measure

    def measured(shape: Shape) -> Times:
        seen.append(measure(shape))
        return seen[-1]

    monkeypatch.setattr(shared_expert, "measure", measured)
    plans = [shared_expert.choose("auto", shape, captured=True, spread=False, remembered=Remembered(tmp_path)) for _ in range(2)]
    assert len(seen) == 1
    assert list(seen[0]) == ["serial", "overlap", *(["fused"] if fusable else [])]
    assert all(list(times) == list(BATCHES) and min(times.values()) > 0 for times in seen[0].values())
    assert plans[0].policy == plans[1].policy == shared_expert.fastest(seen[0])
    print(name, "fp8" if fp8 else "bf16", stack, plans[0])  # noqa: T201
