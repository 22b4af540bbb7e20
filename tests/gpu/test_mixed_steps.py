"""Steps that read prompts, as graphs on the GPU: proven like decode graphs, and the tokens of eager steps."""

from __future__ import annotations

import random

import pytest
import torch
from gpu.kernel_samples import DEVICE, distance
from gpu.runners import small_runner
from torch import Tensor

from minserve.request import SamplingParams
from minserve.runtime import captured_steps
from minserve.runtime.cuda_graph import CudaRecorder
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


def capture(runner: ModelRunner, sizes: tuple[int, ...] = (128, 512)) -> None:
    captured_steps.capture(runner, CudaRecorder(DEVICE), (4, runner.limits.max_num_seqs), sizes)


@pytest.mark.parametrize("stack", ["torch-gpu", "hopper"])
@pytest.mark.parametrize(("name", "fp8"), MODELS)
def test_the_self_check_passes(name: str, fp8: bool, stack: str) -> None:
    runner = small_runner(name, stack, fp8=fp8, chunked_prefill_size=2048)
    capture(runner, (128, 512, 2048))
    assert check_graphs(runner, "fast").comparisons == 9


def random_step(runner: ModelRunner, dice: random.Random, decoding: int, prompts: int) -> ScheduledStep:
    """Decode rows at random contexts, then prompts of which parts were read before, over a random cache."""
    for layer in runner.kv_cache:
        layer.normal_()
    pages = list(range(1, runner.limits.num_pages + 1))
    dice.shuffle(pages)
    rows = []
    for slot in range(decoding + prompts):
        decodes = slot < decoding
        start, length = dice.randint(1, 200 if decodes else 90), 1 if decodes else dice.randint(2, 90)
        own = tuple(pages.pop() for _ in range(-(-(start + length) // 64)))
        setup = SlotSetup(SamplingParams(max_tokens=9, seed=0, temperature=0.0), [1])
        tokens = () if decodes else tuple(dice.randrange(1000) for _ in range(length))
        row = ScheduledRow(
            request_id=slot, slot=slot, start=start, num_tokens=length, token_ids=tokens, new_pages=own, samples=True, setup=setup
        )
        rows.append(row)
    return ScheduledStep.of(1, rows, decoding)


@torch.inference_mode()
def hidden(runner: ModelRunner, step: ScheduledStep, size: int | None) -> Tensor:
    """Of the mixed graph of so many tokens, or of an eager step, which has no padding."""
    batch = runner.batches.to_device(runner.batches.stage(step, size))
    runner.fill_in_tokens(batch)
    plan = runner.plan(batch)
    if size is None:
        return runner.forward(batch, plan)
    assert runner.mixed_graphs is not None
    return runner.mixed_graphs.replay(size)[0][: step.num_tokens]


@pytest.mark.parametrize("stack", ["torch-gpu", "hopper"])
@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v3"])
@pytest.mark.parametrize(("decoding", "prompts"), [(0, 4), (1, 4), (30, 4), (3, 37)])
def test_hidden_states_are_those_of_an_eager_step(name: str, stack: str, decoding: int, prompts: int) -> None:
    runner = small_runner(name, stack, chunked_prefill_size=2048)
    capture(runner, (128, 512, 2048))
    step = random_step(runner, random.Random(decoding), decoding, prompts)
    eager = hidden(runner, step, None)
    assert runner.mixed_graphs is not None
    replayed = hidden(runner, step, runner.mixed_graphs.size_for(step.num_tokens))
    # Close choices of experts part with the rounding of other paths; a row that is lost or mixed up is at a distance above 1.
    distances = sorted(distance(replayed[row], eager[row]) for row in range(step.num_tokens))
    assert distances[len(distances) // 2] < 0.02
    assert distances[-1] < 0.5


def test_a_plan_for_another_grid_than_the_graph_s_is_refused() -> None:
    """FlashInfer chooses its grid by the queries of a row: a graph whose plan changed it computed half of the step."""
    runner = small_runner("deepseek-v3", "hopper", chunked_prefill_size=2048)
    capture(runner, (2048,))
    step = random_step(runner, random.Random(1), 0, 4)
    with pytest.raises(ValueError, match="tokens are too few for the graph of 2048 tokens"):
        hidden(runner, step, 2048)
