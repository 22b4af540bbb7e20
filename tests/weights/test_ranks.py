"""The proof of load on every rank of an expert-parallel group, in every format: each reads its own experts and no others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from release_checkpoints import RELEASES, write_release
from torch import Tensor

from minserve.errors import CheckpointError
from minserve.kernels import reference
from minserve.models.checkpoint import Checkpoint, open_checkpoint
from minserve.models.decoder import Decoder
from minserve.models.layers.placement import ExpertPlacement
from minserve.models.registry import build_model, load_model_config
from minserve.models.weight_reader import WeightReader
from minserve.models.weights import load_weights
from minserve.roofline import in_memory, shape_from_config, weight_bytes


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_release(name, tmp_path_factory.mktemp(name))[0] for name in RELEASES}


def rank_model(directory: Path, checkpoint: Checkpoint, num_ranks: int, rank: int) -> Decoder:
    config = load_model_config(directory)
    assert config.moe is not None
    placement = ExpertPlacement.spread(config.moe.num_experts, num_ranks, rank)
    device = torch.device("cpu")
    return build_model(config, checkpoint.formats, reference.cpu(), torch.float32, device, placement=placement)


@pytest.mark.parametrize("name", RELEASES)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_each_rank_reads_its_own_experts(
    name: str, num_ranks: int, release: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: set[tuple[str, int, int]] = set()
    original = WeightReader._read

    def recorded(self: WeightReader, file: Path, offset: int, into: Tensor) -> None:
        read.add((names[file, offset], offset, into.nbytes))
        original(self, file, offset, into)

    monkeypatch.setattr(WeightReader, "_read", recorded)
    directory = release[name]
    checkpoint = open_checkpoint(directory)
    names = {(tensor.file, tensor.begin): name for name, tensor in checkpoint.tensors.items()}
    whole = rank_model(directory, checkpoint, 1, 0)
    load_weights(whole, checkpoint)
    everything, by_rank = set(read), []
    shape = shape_from_config(json.loads((directory / "config.json").read_text()))
    shape = in_memory(shape, element_bytes=4, keeps_fp8=False, keeps_int4=True)
    planned = {part: size / num_ranks if part == "routed_experts" else size for part, size in weight_bytes(shape).items()}
    for rank in range(num_ranks):
        read.clear()
        model = rank_model(directory, checkpoint, num_ranks, rank)
        report = load_weights(model, checkpoint)
        by_rank.append({item for item in read if ".experts." in item[0]})
        assert {item for item in everything if ".experts." not in item[0]} == read - by_rank[rank]
        assert report.bytes_written == sum(planned.values())
        assert ("an expert of another rank" in report.skipped) == (num_ranks > 1)
        count = model.layers[1].mlp.experts.w13.shape[0]
        for part in ("w13", "w2"):
            share = getattr(whole.layers[1].mlp.experts, part)[rank * count : (rank + 1) * count]
            assert torch.equal(getattr(model.layers[1].mlp.experts, part), share)
    assert sum(len(own) for own in by_rank) == len({item for item in everything if ".experts." in item[0]})
    assert set.union(*by_rank) == {item for item in everything if ".experts." in item[0]}


def test_a_gap_is_found_by_the_rank_that_has_it_and_what_nobody_wants_by_all(release: dict[str, Path]) -> None:
    directory = release["Kimi-K2-Thinking"]
    checkpoint = open_checkpoint(directory)
    name = "model.layers.1.mlp.experts.15.up_proj.weight_packed"
    tensors = dict(checkpoint.tensors)
    gone = tensors.pop(name)
    broken = Checkpoint(directory, tensors, {}, checkpoint.formats, ())
    load_weights(rank_model(directory, checkpoint, 2, 0), broken)
    with pytest.raises(CheckpointError, match=f"missing: {name}"):
        load_weights(rank_model(directory, checkpoint, 2, 1), broken)
    stranger = "model.layers.1.mlp.experts.16.up_proj.weight_packed"
    more = Checkpoint(directory, {**checkpoint.tensors, stranger: gone}, {}, checkpoint.formats, ())
    for rank in range(2):
        with pytest.raises(CheckpointError, match="1 tensors are unknown to the model"):
            load_weights(rank_model(directory, checkpoint, 2, rank), more)
