"""Every published form of a checkpoint, tiny: it opens without a note, loads whole, and computes what its values say."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from logit_comparison import prompt
from paged_steps import PagedSteps
from paged_steps import load as load_model
from release_checkpoints import RELEASES, pack_int4, pack_nvfp4, write_release
from safetensors.torch import load_file, save_file
from torch import Tensor

from minserve.errors import CheckpointError
from minserve.kernels import reference
from minserve.kernels.four_bits import widen_int4, widen_nvfp4
from minserve.models.checkpoint import open_checkpoint, read_quantization_config
from minserve.models.decoder import Decoder
from minserve.models.quantization_claim import formats_from_config
from minserve.models.registry import build_model, load_model_config
from minserve.models.weights import dummy_weights, load_weights

WIDENING = dataclasses.replace(reference.cpu(), name="widening", keeps_int4=False)
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    return {name: write_release(name, tmp_path_factory.mktemp(name)) for name in RELEASES}


def logits(model: Decoder) -> Tensor:
    return PagedSteps(model).step([("r", prompt(24, seed=3))])[0]


@pytest.mark.parametrize("name", RELEASES)
def test_a_release_is_its_dequantised_twin(name: str, release: dict[str, tuple[Path, Path]]) -> None:
    directory, twin = release[name]
    checkpoint = open_checkpoint(directory)
    assert not checkpoint.notes
    model = build_model(load_model_config(directory), checkpoint.formats, reference.cpu(), torch.float32, torch.device("cpu"))
    report = load_weights(model, checkpoint)
    model.finish_load()
    expected = {"Kimi-K2-Thinking", "Kimi-K2.5", "Kimi-K2.6"}
    kept = {name for name, parameter in model.named_parameters() if parameter.dtype == torch.int32}
    assert bool(kept) == (name in expected)
    assert report.bytes_read == sum(tensor.num_bytes for tensor in checkpoint.tensors.values()) - skipped_of_text(report.skipped)
    assert torch.equal(logits(model), logits(load_model(twin)))


def skipped_of_text(skipped: object) -> int:
    """Bytes of the text model's own tensors that a load leaves."""
    assert isinstance(skipped, dict)
    return sum(entry.bytes for reason, entry in skipped.items() if "prediction" in reason)


@pytest.mark.parametrize("name", ["Kimi-K2-Thinking", "Kimi-K2.5", "Kimi-K2.5-NVFP4"])
def test_four_bits_are_widened_where_no_kernel_reads_them(name: str, release: dict[str, tuple[Path, Path]]) -> None:
    directory, twin = release[name]
    model = load_model(directory, WIDENING)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    expected = load_model(twin).state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())


def test_a_widened_matrix_may_be_read_in_many_pieces(
    release: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minserve.models.weight_reader.PIECE_BYTES", 64)
    monkeypatch.setattr("minserve.models.weight_reader.BLOCK", 4)
    for name in ("Kimi-K2-Thinking", "Kimi-K2.5-NVFP4"):
        directory, twin = release[name]
        calls: list[tuple[int, int]] = []
        checkpoint = open_checkpoint(directory)
        model = build_model(load_model_config(directory), checkpoint.formats, WIDENING, torch.float32, torch.device("cpu"))
        load_weights(model, checkpoint, lambda done, total: calls.append((done, total)))  # noqa: B023
        assert calls[-1][0] == calls[-1][1]
        assert len(calls) > 3 * len(checkpoint.formats.quantized)
        expected = load_model(twin).state_dict()
        assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())


def test_what_a_release_sets_aside_is_reported(release: dict[str, tuple[Path, Path]]) -> None:
    model = load_model(release["Kimi-K2.5"][0])
    count = sum(name.endswith("_proj.weight_packed") for name in open_checkpoint(release["Kimi-K2.5"][0]).tensors)
    report = load_weights(model, open_checkpoint(release["Kimi-K2.5"][0]))
    assert report.skipped["not for text (vision)"].tensors == 2
    assert report.skipped["shapes of packed weights, proven against the weights"].tensors == count > 0
    assert report.formats["int4_group"] == count
    report = load_weights(load_model(release["Kimi-K2.5-NVFP4"][0]), open_checkpoint(release["Kimi-K2.5-NVFP4"][0]))
    assert report.skipped["scales of activations, which are not quantised"].tensors == count
    assert (report.formats["nvfp4"], report.dequantized) == (count, count)


def test_every_level_and_both_ends_of_an_int32() -> None:
    levels = torch.arange(16).repeat(2).view(1, 32)
    packed = sum((levels[:, place::8].long() << (4 * place)) for place in range(8))
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
    wide = widen_int4(packed, torch.tensor([[0.5]]), torch.float32)
    assert torch.equal(wide, (levels - 8) * 0.5)


def test_every_code_of_e2m1() -> None:
    packed = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8)
    wide = widen_nvfp4(packed, torch.tensor([[2.0]]).to(torch.float8_e4m3fn), torch.tensor([0.25]), torch.float32)
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert wide.tolist() == [[value * 0.5 for value in (*positive, *(-value for value in positive))]]


def test_quantisation_loses_what_four_bits_lose() -> None:
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    for pack, bound in ((pack_int4, 0.12), (pack_nvfp4, 0.12)):
        wide = pack(weight)[1]
        assert 0.02 < float((wide - weight).norm() / weight.norm()) < bound


@pytest.mark.parametrize(
    ("name", "stored", "change", "message"),
    [
        ("Kimi-K2-Thinking", f"{EXPERT}_scale", None, f"INT4 without its {EXPERT}_scale"),
        ("Kimi-K2-Thinking", f"{EXPERT}_shape", None, f"INT4 without its {EXPERT}_shape"),
        ("Kimi-K2-Thinking", f"{EXPERT}_packed", None, "without a quantised weight beside it"),
        ("Kimi-K2-Thinking", f"{EXPERT}_scale", torch.ones(32, 1).bfloat16(), "in groups of 32 needs the shape [32, 2]"),
        ("Kimi-K2-Thinking", f"{EXPERT}_scale", torch.ones(32, 2).int(), "its dtype must be BF16 or F16 or F32"),
        ("Kimi-K2-Thinking", f"{EXPERT}_shape", torch.tensor([32, 32]), "says [32, 32], but"),
        ("Kimi-K2-Thinking", f"{EXPERT}_shape", torch.tensor([1, 32, 64]), "needs the shape [2]"),
        ("Kimi-K2-Thinking", f"{EXPERT}_packed", torch.zeros(32, 3, dtype=torch.int32), "24 columns are not whole groups of 32"),
        ("Kimi-K2-Thinking", f"{EXPERT}_packed", torch.zeros(8, dtype=torch.int32), "INT4 is known for matrices only"),
        ("Kimi-K2.5-NVFP4", f"{EXPERT}_scale", None, f"NVFP4 without its {EXPERT}_scale"),
        ("Kimi-K2.5-NVFP4", f"{EXPERT}_scale_2", None, f"NVFP4 without its {EXPERT}_scale_2"),
        ("Kimi-K2.5-NVFP4", f"{EXPERT}_scale_2", torch.ones(2), "one number is expected"),
        ("Kimi-K2.5-NVFP4", EXPERT, None, "without a quantised weight beside it"),
        ("Kimi-K2.5-NVFP4", EXPERT, torch.zeros(32, 20, dtype=torch.uint8), "40 columns are not whole groups of 16"),
    ],
)
def test_a_damaged_four_bit_weight_is_refused(
    name: str, stored: str, change: Tensor | None, message: str, release: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    source = release[name][0]
    tensors = {key: value for file in source.glob("*.safetensors") for key, value in load_file(file).items()}
    actual = stored if name == "Kimi-K2-Thinking" else stored.replace("model.", "language_model.", 1)
    assert actual in tensors
    del tensors[actual]
    save_file(tensors | ({} if change is None else {actual: change}), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=re.escape(message)):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "'float-quantized' is not supported"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "'pack-quantized' is not supported"),
        ({"num_bits": 8}, "weights.num_bits is 8; supported: 4"),
        ({"group_size": 128}, "weights.group_size is 128; supported: 32"),
        ({"symmetric": False}, "weights.symmetric is False; supported: True"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "'modelopt FP8' is not supported"),
        ({"quant_method": "gptq"}, "'gptq' is not supported"),
    ],
)
def test_sections_that_are_not_supported(section: dict[str, object], message: str) -> None:
    if "quant_method" not in section:
        weights = {"num_bits": 4, "group_size": 32, "symmetric": True, "type": "int", **section}
        groups = {"group_0": {"weights": weights, "targets": ["Linear"]}}
        section = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    with pytest.raises(CheckpointError, match=re.escape(message)):
        formats_from_config(section)


def test_a_config_of_another_format_is_overruled_with_a_note(release: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    source = release["Kimi-K2-Thinking"][0]
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "ignore": config["quantization_config"]["ignore"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (note,) = open_checkpoint(tmp_path).notes
    assert note.endswith("INT4 although quantization_config says FP8")


@pytest.mark.parametrize("name", ["Kimi-K2-Thinking", "Kimi-K2.5-NVFP4"])
def test_random_weights_have_the_format_that_the_config_promises(name: str, release: dict[str, tuple[Path, Path]]) -> None:
    directory = release[name][0]
    checkpoint = open_checkpoint(directory)
    promised = formats_from_config(read_quantization_config(directory))
    assert all(promised.of(weight) == kind for weight, kind in checkpoint.formats.quantized.items())
    assert all(promised.of(weight) == "plain" for weight in checkpoint.tensors if weight.endswith("self_attn.o_proj.weight"))
    model = build_model(load_model_config(directory), promised, reference.cpu(), torch.float32, torch.device("cpu"))
    dummy_weights(model, seed=1)
    model.finish_load()
    assert bool(logits(model).isfinite().all())
    if name == "Kimi-K2-Thinking":
        experts = model.layers[1].mlp.experts
        wide = reference.widen(experts.w13, experts.w13_scale, torch.float32)
        assert 0.018 < float(wide.std()) < 0.023
