"""Steps that read prompts, as graphs on the GPU: proven like decode graphs, and the tokens of eager steps."""

from __future__ import annotations

import random

import pytest
import torch
from gpu.kernel_samples import DEVICE, distance
from gpu.runners import small_runner

from minserve.request import SamplingParams
from minserve.runtime.cuda_graph import CudaRecorder, StepGraphs
from minserve.runtime.model_runner import ModelRunner
from minserve.runtime.self_check import check_graphs
from minserve.runtime.step import ScheduledRow, ScheduledStep, SlotSetup

MODELS = [
    ("qwen3-30b-a3b", False),
    ("qwen3-30b-a3b", True),
    ("deepseek-v3", False),
    ("deepseek-v3", True),
    ("qwen2-57b-a14b", False),
]


def capture(runner: ModelRunner) -> None:
    recorder = CudaRecorder(DEVICE)
    mixed = StepGraphs(runner.prepare_prompts, (128, 512), recorder, kind="mixed")
    mixed.capture()
    graphs = StepGraphs(runner.prepare_padding, (4, runner.limits.max_num_seqs), recorder, runner.kernels.forget_graphs)
    graphs.capture()
    runner.use_graphs(graphs, mixed)


@pytest.mark.parametrize("stack", ["torch-gpu", "hopper"])
@pytest.mark.parametrize(("name", "fp8"), MODELS)
def test_the_self_check_passes(name: str, fp8: bool, stack: str) -> None:
    runner = small_runner(name, stack, fp8=fp8)
    capture(runner)
    assert check_graphs(runner, "fast").comparisons == 6


@pytest.mark.parametrize("stack", ["torch-gpu", "hopper"])
@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v3"])
@pytest.mark.parametrize("decoding", [0, 1, 30])
def test_hidden_states_are_those_of_an_eager_step(name: str, stack: str, decoding: int) -> None:
    """Decode rows at random contexts, then prompts of which parts were read before; the eager step has no padding."""
    runner = small_runner(name, stack)
    capture(runner)
    for layer in runner.kv_cache:
        layer.normal_()
    dice = random.Random(decoding)
    pages = list(range(1, runner.limits.num_pages + 1))
    dice.shuffle(pages)
    rows = []
    for slot in range(decoding + 4):
        decodes = slot < decoding
        start, length = dice.randint(1, 200 if decodes else 90), 1 if decodes else dice.randint(2, 90)
        own = tuple(pages.pop() for _ in range(-(-(start + length) // 64)))
        setup = SlotSetup(SamplingParams(max_tokens=9, seed=0, temperature=0.0), [1])
        tokens = () if decodes else tuple(dice.randrange(1000) for _ in range(length))
        row = ScheduledRow(
            request_id=slot, slot=slot, start=start, num_tokens=length, token_ids=tokens, new_pages=own, samples=True, setup=setup
        )
        rows.append(row)
    total = sum(row.num_tokens for row in rows)
    step = ScheduledStep(number=1, rows=tuple(rows), num_decode_rows=decoding, num_tokens=total)
    assert runner.mixed_graphs is not None
    with torch.inference_mode():
        batch = runner.batches.to_device(runner.batches.stage(step))
        runner.fill_in_tokens(batch)
        eager = runner.forward(batch, runner.plan(batch))
        size = runner.mixed_graphs.size_for(total)
        assert size is not None
        padded = runner.batches.to_device(runner.batches.stage(step, size))
        runner.fill_in_tokens(padded)
        runner.plan(padded)
        replayed = runner.mixed_graphs.replay(size)[0][:total]
    # Close choices of experts part with the rounding of other paths; a row that is lost or mixed up is at a distance above 1.
    distances = sorted(distance(replayed[row], eager[row]) for row in range(total))
    assert distances[len(distances) // 2] < 0.02
    assert distances[-1] < 0.5
