"""The loader with the real models, on tiny checkpoints of every architecture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoints import VARIANTS
from torch import Tensor
from weights.toy_model import write_checkpoint

from minserve.errors import CheckpointError
from minserve.kernels import reference
from minserve.models.decoder import Decoder
from minserve.models.formats import Formats
from minserve.models.quantization_claim import formats_from_config
from minserve.models.registry import build_model, load_model_config
from minserve.models.weights import LoadReport, dummy_weights, load_weights, open_checkpoint
from tools.quantize_fp8 import QUANTIZATION_CONFIG, quantize_block, quantize_checkpoint

TinyDir = Callable[[str], Path]


def built(directory: Path, formats: Formats, dtype: torch.dtype = torch.float32) -> Decoder:
    model = build_model(load_model_config(directory), formats, reference.cpu(), dtype, torch.device("cpu"))
    for value in model.state_dict().values():
        value.fill_(float("nan"))
    return model


def loaded(directory: Path, dtype: torch.dtype = torch.float32) -> tuple[Decoder, LoadReport]:
    checkpoint = open_checkpoint(directory)
    model = built(directory, checkpoint.formats, dtype)
    return model, load_weights(model, checkpoint)


def resharded(source: Path, target: Path, tensors: dict[str, Tensor], shards: int = 3) -> Path:
    write_checkpoint(target, tensors, shards)
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    return target


def assert_same_state(one: Decoder, other: Decoder) -> None:
    states = one.state_dict(), other.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("name", VARIANTS)
def test_every_architecture_loads_whole(name: str, tiny_dir: TinyDir, tmp_path: Path) -> None:
    directory = tiny_dir(name)
    tensors = load_file(directory / "model.safetensors")
    model, report = loaded(directory)
    assert all(bool(value.isfinite().all()) for value in model.state_dict().values())
    for destination in model.destinations():
        assert torch.equal(destination.target, tensors[destination.name].float()), destination.name
    assert report.tensors + sum(skipped.tensors for skipped in report.skipped.values()) == len(tensors)
    assert not report.notes
    expected = {"deepseek_v3": ["a multi-token prediction layer, which is not used"]}
    expected["deepseek_v2"] = ["rotary frequencies are computed from the config"]
    assert list(report.skipped) == expected.get(name, [])

    wrapped = {f"language_model.{key}": value for key, value in tensors.items()} | {"vision_tower.patch.weight": torch.ones(2)}
    again, report = loaded(resharded(directory, tmp_path, wrapped))
    assert_same_state(model, again)
    assert "not for text (vision)" in report.skipped


@pytest.mark.parametrize("name", VARIANTS)
def test_each_tensor_is_indispensable(name: str, tiny_dir: TinyDir, tmp_path: Path) -> None:
    """Without one tensor of each kind of module the load is refused."""
    directory = tiny_dir(name)
    tensors = load_file(directory / "model.safetensors")
    model, _ = loaded(directory)
    wanted = [destination.name for destination in model.destinations()]
    kinds = {name.rpartition("layers.")[2].split(".", 1)[-1]: name for name in wanted if ".experts." not in name}
    experts = [name for name in wanted if ".experts." in name][-3:]
    for chosen in (*kinds.values(), *experts):
        resharded(directory, tmp_path, {key: value for key, value in tensors.items() if key != chosen}, shards=1)
        with pytest.raises(CheckpointError, match=f"1 tensors that the model needs are missing: {chosen}"):
            loaded(tmp_path)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_layers_beyond_the_configs_are_unknown_unless_it_announces_them(name: str, tiny_dir: TinyDir, tmp_path: Path) -> None:
    directory = tiny_dir(name)
    tensors = load_file(directory / "model.safetensors") | {"model.layers.3.mlp.gate.weight": torch.ones(4, 4)}
    resharded(directory, tmp_path, tensors)
    if name == "deepseek_v3":
        loaded(tmp_path)
    else:
        with pytest.raises(CheckpointError, match=r"unknown to the model: model\.layers\.3\.mlp\.gate\.weight"):
            loaded(tmp_path)


@pytest.mark.parametrize("present", ["equal", "different"])
def test_a_stored_head_of_a_tied_model(present: str, tiny_dir: TinyDir, tmp_path: Path) -> None:
    directory = tiny_dir("qwen3_moe_tied")
    tensors = load_file(directory / "model.safetensors")
    head = tensors["model.embed_tokens.weight"] * (1 if present == "equal" else 2)
    model, report = loaded(resharded(directory, tmp_path, tensors | {"lm_head.weight": head.clone()}))
    assert_same_state(model, loaded(directory)[0])
    assert bool(report.notes) == (present == "different")


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen2_moe", "qwen3_moe_tied", "moonlight"])
@pytest.mark.parametrize("shards", [0, 3])
def test_the_fp8_twin_loads_as_the_product_of_values_and_scales(
    name: str, shards: int, tiny_dir: TinyDir, tmp_path: Path
) -> None:
    source = tiny_dir(name)
    tensors = load_file(source / "model.safetensors")
    if shards:
        source = resharded(source, tmp_path / "sharded", tensors, shards)
    quantised, kept = quantize_checkpoint(source, tmp_path / "twin")
    assert quantised + kept == len(tensors)
    checkpoint = open_checkpoint(tmp_path / "twin")
    assert not checkpoint.notes
    assert len(checkpoint.files) == max(1, shards)

    original, _ = loaded(source)
    twin, report = loaded(tmp_path / "twin")
    for one, other in zip(original.destinations(), twin.destinations(), strict=True):
        error = (one.target - other.target).abs()
        if other.widen_from == "plain":
            assert not error.any(), one.name
        else:
            # e4m3 has three bits of mantissa: half a step of the largest value, and of the smallest normal one near zero.
            assert bool((error <= one.target.abs() / 16 + one.target.abs().max() / 448 * 2**-10).all()), one.name
            assert 0 < error.mean() < 0.05 * one.target.abs().mean()
    assert report.dequantized == report.formats["fp8_block"] > 0
    plain = {
        name.split(".")[-2] for name, tensor in checkpoint.tensors.items() if tensor.dtype != "F8_E4M3" and len(tensor.shape) == 2
    }
    assert plain - {name.split(".")[-2] for name in checkpoint.tensors if name.endswith("_scale_inv")} <= {
        "embed_tokens", "gate", "lm_head", "shared_expert_gate", "eh_proj", "head",
    }  # fmt: skip


def test_the_twin_copies_what_is_beside_the_weights(tiny_dir: TinyDir, tmp_path: Path) -> None:
    source = tiny_dir("qwen3_moe")
    quantize_checkpoint(source, tmp_path / "twin")
    names = {file.name for file in source.iterdir()}
    assert {file.name for file in (tmp_path / "twin").iterdir()} == names
    for name in names - {"config.json", "model.safetensors"}:
        assert (tmp_path / "twin" / name).read_bytes() == (source / name).read_bytes()
    with pytest.raises(CheckpointError, match="is quantised already"):
        quantize_checkpoint(tmp_path / "twin", tmp_path / "twice")
    with pytest.raises(CheckpointError, match="is not empty"):
        quantize_checkpoint(source, tmp_path / "twin")


def test_quantised_blocks_use_the_whole_range_and_survive_zeros() -> None:
    weight = torch.randn(200, 300).bfloat16()
    weight[:128, 128:256] = 0.0
    weight[5, 5] = 1e-30
    low, scale = quantize_block(weight)
    assert scale.shape == (2, 3)
    assert bool(low.float().isfinite().all())
    largest = [low[r : r + 128, c : c + 128].float().abs().max().item() for r in (0, 128) for c in (0, 128, 256)]
    assert largest == [448.0, 0.0, 448.0, 448.0, 448.0, 448.0]


@pytest.mark.parametrize("name", ["qwen2_moe", "deepseek_v3"])
@pytest.mark.parametrize("quantization", [None, QUANTIZATION_CONFIG])
def test_random_weights_need_no_file(name: str, quantization: dict[str, object] | None, tiny_dir: TinyDir) -> None:
    model = built(tiny_dir(name), formats_from_config(quantization), torch.bfloat16)
    dummy_weights(model, seed=7)
    model.finish_load()
    assert all(bool(value.isfinite().all()) for value in model.state_dict().values())
