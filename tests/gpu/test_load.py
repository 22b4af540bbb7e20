"""Weights that are streamed to the GPU, and widened there, are bit for bit what the CPU makes of the same files."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch
from gpu.kernel_samples import DEVICE, choices, distance, expert_truth, normal, same_bits
from release_checkpoints import RELEASES, write_release
from weights.toy_model import ToyModel, toy_tensors, write_checkpoint

from minserve.errors import CheckpointError
from minserve.kernels import reference
from minserve.kernels.interface import ExpertWeights, Kernels
from minserve.models.checkpoint import open_checkpoint
from minserve.models.decoder import Decoder
from minserve.models.registry import build_model, load_model_config
from minserve.models.weights import load_weights

WIDE = {"hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 256}
KEPT = {"kept": {"keeps_fp8": True, "keeps_int4": True}, "widened": {"keeps_fp8": False, "keeps_int4": False}}


def loaded(directory: Path, kernels: Kernels, dtype: torch.dtype, device: torch.device, threads: int | None = None) -> Decoder:
    checkpoint = open_checkpoint(directory)
    model = build_model(load_model_config(directory), checkpoint.formats, kernels, dtype, device)
    for value in model.state_dict().values():
        value.view(torch.uint8).fill_(0xFF)
    calls: list[tuple[int, int]] = []
    load_weights(model, checkpoint, lambda done, total: calls.append((done, total)), threads)
    assert calls[-1][0] == calls[-1][1]
    return model


@pytest.mark.parametrize("piece", [16 << 20, 20_000])
@pytest.mark.parametrize("name", RELEASES)
def test_every_release_arrives_whole(name: str, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, _ = write_release(name, tmp_path, **WIDE)
    monkeypatch.setattr("minserve.models.weight_reader.PIECE_BYTES", piece)
    for kept in KEPT.values():
        kernels = dataclasses.replace(reference.cpu(), **kept)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            expected = loaded(directory, kernels, dtype, torch.device("cpu")).state_dict()
            for threads in (1, 7):
                actual = loaded(directory, kernels, dtype, DEVICE, threads).state_dict()
                different = [key for key, value in expected.items() if not same_bits(value, actual[key].cpu())]
                assert not different


@pytest.mark.parametrize("name", ["Kimi-K2-Thinking", "Kimi-K2.5-NVFP4"])
def test_four_bit_experts_compute_what_their_values_say(name: str, kernels: Kernels, tmp_path: Path) -> None:
    """Held as INT4 where the kernels read it, else widened: the same as the experts of the plain checkpoint."""
    directories, stored = write_release(name, tmp_path, **WIDE), []
    for directory in directories:
        model = loaded(directory, kernels, torch.bfloat16, DEVICE)
        model.finish_load()
        experts = model.layers[1].mlp.experts
        stored.append(ExpertWeights(experts.w13, experts.w2, experts.w13_scale, experts.w2_scale))
    assert (stored[0].format == "int4_group") == (kernels.keeps_int4 and name == "Kimi-K2-Thinking")
    for tokens in (1, 2, 3, 8, 40, 300):
        x, (ids, weights) = normal(tokens, WIDE["hidden_size"]), choices(tokens, 4, 16)
        truth = expert_truth(x, ids, weights, stored[0])
        results = [kernels.experts_flat(x, ids, weights, experts) for experts in stored]
        assert all(distance(result, truth) < 0.01 for result in results)


def test_memory_that_a_running_kernel_still_uses_is_not_written_early(tmp_path: Path) -> None:
    tensors = toy_tensors()
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, tensors, 0))
    model = ToyModel().to(DEVICE)
    torch.cuda._sleep(200_000_000)
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))  # behind the sleep: a load that does not wait is overwritten
    load_weights(model, checkpoint)
    torch.cuda.synchronize()
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def test_a_file_that_shrinks_while_it_is_loaded_is_an_error(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, toy_tensors(), 0))
    path = tmp_path / "model.safetensors"
    os.truncate(path, path.stat().st_size - 3)
    with pytest.raises(CheckpointError, match=r"3 bytes from .* on vanished while it was read"):
        load_weights(ToyModel().to(DEVICE), checkpoint)
