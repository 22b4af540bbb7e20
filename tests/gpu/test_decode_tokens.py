"""Whole requests on a GPU, eager, captured and captured with two streams, against the same model on the CPU in float32."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from gpu.kernel_samples import DEVICE, one_expert, quantised
from gpu.runners import capture, runner_of
from release_checkpoints import write_release
from runtime.scripted import Loop
from tiny_checkpoints import VARIANTS, write_checkpoint
from torch import Tensor

from minserve.clients.arithmetic_reference import PromptTokens, load_reference
from minserve.config import EMBEDDED_DIRECTORY
from minserve.kernels import reference, stacks
from minserve.kernels.interface import ExpertWeights, Kernels, LinearWeight, kv_page_shape
from minserve.models.layers.streams import CudaLanes
from minserve.models.registry import build_model, load_model_config
from minserve.models.weights import load_weights, open_checkpoint
from minserve.request import Request, SamplingParams
from minserve.runtime.model_runner import ModelRunner
from minserve.runtime.scheduler import Limits
from tools.quantize_fp8 import quantize_checkpoint

LEGAL = {"hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 128}
MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
RELEASES = {"int4": "Kimi-K2-Thinking", "nvfp4": "Kimi-K2.5-NVFP4"}
KINDS = [(variant, kind) for variant in sorted(VARIANTS) for kind in ("bf16", "fp8")] + [("kimi_k2", kind) for kind in RELEASES]
EQUAL = {"bf16": 0.6, "fp8": 0.3, "int4": 0.6, "nvfp4": 0.6}
"""Least share of tokens before the first difference, of those that the CPU itself keeps when it rounds as the stack does:
in bf16, and where the stack quantises activations, those too. Random models with peaked routers are unstable: one close
choice of experts, and a request goes another way."""
MARGIN = {"bf16": 2.0, "fp8": 3.0, "int4": 2.0, "nvfp4": 2.0}
"""Nats between the CPU's best two tokens within which rounding may choose the other; bf16 on the CPU reaches 1.2."""


def requests() -> list[Request]:
    generator = torch.Generator().manual_seed(5)
    asked = []
    for index in range(12):
        length = int(torch.randint(1, 150, (), generator=generator))
        prompt = torch.randint(0, 256, (length,), generator=generator).tolist()
        sampling = SamplingParams(max_tokens=24, seed=index, temperature=0.0, logprobs=2)
        asked.append(Request(id=index, prompt_token_ids=prompt, sampling=sampling, arrival_time=0.0))
    return asked


def run(runner: ModelRunner) -> Loop:
    loop = Loop(runner.limits, runner)
    for request in requests():
        loop.add(request)
    loop.run()
    loop.check_at_rest()
    return loop


def fp8_activations() -> Kernels:
    """The reference with the activations that meet FP8 weights quantised as `hopper` does it: in blocks of 128 along a row."""
    plain = reference.cpu()

    def linear(x: Tensor, weight: LinearWeight, bias: Tensor | None) -> Tensor:
        return plain.linear(x if weight.scale is None else quantised(x).to(x.dtype), weight, bias)

    def experts_flat(x: Tensor, slot_ids: Tensor, weights: Tensor, experts: ExpertWeights) -> Tensor:
        out = torch.zeros_like(x, dtype=torch.float32)
        for slot in slot_ids.unique().tolist():
            rows, places = (slot_ids == slot).nonzero(as_tuple=True)
            if slot >= 0:
                result = one_expert(x[rows], slot, experts, experts.w13_scale is not None and x.shape[0] > 2)
                out.index_add_(0, rows, result * weights[rows, places].unsqueeze(1))
        return out.to(x.dtype)

    return dataclasses.replace(plain, linear=linear, experts_flat=experts_flat, keeps_fp8=True)


def load(
    directory: Path, stack: str, policy: str = "serial", dtype: torch.dtype = torch.bfloat16, kernels: Kernels | None = None
) -> ModelRunner:
    """`kernels`: other ones than the stack's own."""
    checkpoint, config = open_checkpoint(directory), load_model_config(directory)
    on_cpu = stack == "cpu"
    device = torch.device("cpu") if on_cpu else DEVICE
    kernels = kernels or (reference.cpu() if on_cpu else stacks.build(stack, device))
    lanes = CudaLanes(device) if policy == "overlap" else None
    model = build_model(config, checkpoint.formats, kernels, dtype, device, shared_expert=policy, lanes=lanes)
    load_weights(model, checkpoint)
    model.finish_load()
    if not on_cpu:
        return runner_of(model, kernels, max_num_seqs=8)
    limits = runner_limits(config.vocab_size)
    shape = (limits.num_pages + 1, *kv_page_shape(model.attention_shape, 64))
    cache = [torch.zeros(shape, dtype=dtype) for _ in range(model.num_layers)]
    return ModelRunner(model, kernels, cache, limits, device)


def runner_limits(vocab_size: int) -> Limits:
    return Limits(
        max_num_seqs=8, chunked_prefill_size=512, page_size=64, num_pages=200, max_model_len=2048, vocab_size=vocab_size
    )


def first_difference(wanted: Loop, got: Loop, index: int) -> tuple[int, float]:
    """(equal leading tokens, the margin that the CPU had at the first different one; 0 where none differs)."""
    entries = [entry for output in wanted.outputs[index] for entry in output.logprobs or ()]
    for place, (token, other) in enumerate(zip(wanted.tokens[index], got.tokens[index], strict=False)):
        if token != other:
            best, second = entries[place].top_logprobs[:2]
            return place, best - second
    return len(wanted.tokens[index]), 0.0


@pytest.mark.parametrize(("variant", "kind"), KINDS)
def test_tokens_are_those_of_the_cpu(variant: str, kind: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    changes = LEGAL | (MLA if "deepseek" in variant or variant in ("moonlight", "kimi_k2") else {"head_dim": 128})
    if variant.startswith("qwen2"):
        changes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "shared_expert_intermediate_size": 256}
        del changes["head_dim"]
    if kind in RELEASES:
        directory, _ = write_release(RELEASES[kind], tmp_path, **changes)
    else:
        directory = write_checkpoint(variant, tmp_path / "plain", **changes)
    if kind == "fp8":
        quantize_checkpoint(directory, tmp_path / "fp8")
        directory = tmp_path / "fp8"
    wanted = run(load(directory, "cpu", dtype=torch.float32))
    for stack in ("torch-gpu", "hopper"):
        tokens = {}
        quantises = kind == "fp8" and stack == "hopper"
        rounded = run(load(directory, "cpu", kernels=fp8_activations() if quantises else None))
        kept = sum(first_difference(wanted, rounded, index)[0] for index in wanted.tokens)
        fused = "qwen" not in variant and kind != "int4"  # a gate, or another form than the routed experts', stays beside them
        for mode in ("eager", "graph serial", "graph overlap", *(["graph fused"] if fused else [])):
            runner = load(directory, stack, "serial" if mode == "eager" else mode.removeprefix("graph "))
            if mode != "eager":
                capture(runner, (1, 2, 4, 8))
            got = run(runner)
            tokens[mode] = got.tokens
            found = [first_difference(wanted, got, index) for index in wanted.tokens]
            equal, margin = sum(place for place, _ in found), max(margin for _, margin in found)
            assert (mode == "eager") == (not got.scheduler.stats().graph_replays)
            print(variant, kind, stack, mode, f"{equal} of 288 equal (rounded on the CPU {kept}), margin {margin:.3f}")  # noqa: T201
            assert equal >= EQUAL[kind] * kept
            assert margin <= MARGIN[kind]
        assert tokens["graph serial"] == tokens["graph overlap"]


@pytest.mark.parametrize("stack", ["torch-gpu", "hopper"])
def test_requests_at_once_are_what_they_are_alone(stack: str) -> None:
    """200 questions of 7 to 1,400 tokens to the embedded model: other batch mates mean other rounding, nothing else.

    Its own kind of prompt, since on random ones rounding alone turns choices: on the CPU, bf16 parts from float32 in a quarter
    of such requests, at margins of up to 3.4 nats.
    """
    tokens_of, items = PromptTokens(), load_reference().items[:200]
    asked, answers = [], {}
    for index, item in enumerate(items):
        prompt, answers[index] = tokens_of.of(item)
        sampling = SamplingParams(max_tokens=128, seed=index, temperature=0.0, logprobs=2, stop_token_ids=(answers[index][-1],))
        asked.append(Request(id=index, prompt_token_ids=prompt, sampling=sampling, arrival_time=0.0))
    runner = load(EMBEDDED_DIRECTORY, stack, "overlap")
    capture(runner, (1, 2, 4, 8))
    loops = [Loop(runner.limits, runner), Loop(runner.limits, runner)]
    for request in asked:
        loops[0].add(request)
    loops[0].run()
    for request in asked:
        loops[1].add(request)
        loops[1].run()
    for loop in loops:
        loop.check_at_rest()
        right = sum(loop.tokens[index] == answer for index, answer in answers.items())
        print(stack, right, "of 200 right")  # noqa: T201
        assert right >= 194
    margins = [margin for index in answers if (margin := first_difference(loops[1], loops[0], index)[1]) > 0.0]
    print(stack, len(margins), "of 200 differ, by margins of", margins)  # noqa: T201
    assert max(margins, default=0.0) <= 0.5
