"""Which weights are FP8: the tensors decide, the config is compared with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from weights.toy_model import ToyModel, toy_tensors, write_checkpoint

from minserve.errors import CheckpointError
from minserve.kernels.reference import widen
from minserve.models.checkpoint import open_checkpoint
from minserve.models.quantization_claim import formats_from_config
from minserve.models.weights import load_weights

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
HIDDEN, WIDTH = 192, 160
"""Neither is a multiple of the block."""


def fp8_tensors(scale_dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Toy tensors whose expert matrices are FP8."""
    tensors = toy_tensors(hidden=HIDDEN, width=WIDTH)
    for name in [name for name in tensors if ".experts." in name]:
        rows, columns = tensors[name].shape
        tensors[name] = torch.randn(rows, columns).mul(60).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.rand(-(-rows // 128), -(-columns // 128)).add(0.5).to(scale_dtype)
    return tensors


def widened(tensors: dict[str, Tensor], name: str) -> Tensor:
    """The matrix element by element: each value times the scale of its own block."""
    weight, scale = tensors[name].float(), tensors[f"{name}_scale_inv"].float()
    rows, columns = torch.arange(weight.shape[0]) // 128, torch.arange(weight.shape[1]) // 128
    return weight * scale[rows[:, None], columns[None, :]]


def opened(directory: Path, tensors: dict[str, Tensor], config: dict[str, object] | None = None, shards: int = 2) -> list[str]:
    return list(open_checkpoint(write_checkpoint(directory, tensors, shards, config)).notes)


@pytest.mark.parametrize("shards", [0, 2, 7])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_is_widened_by_blocks_wherever_its_scale_lies(
    tmp_path: Path, dtype: torch.dtype, scale_dtype: torch.dtype, shards: int
) -> None:
    tensors = fp8_tensors(scale_dtype)
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, tensors, shards, {"quantization_config": FP8}))
    assert not checkpoint.notes
    if shards:
        files = {name: checkpoint.tensors[name].file for name in tensors}
        assert any(files[name] != files[f"{name}_scale_inv"] for name in tensors if f"{name}_scale_inv" in tensors)
    model = ToyModel(checkpoint.formats, dtype=dtype, hidden=HIDDEN, width=WIDTH)
    report = load_weights(model, checkpoint)
    for destination in model.destinations():
        name = destination.name
        expected = widened(tensors, name) if f"{name}_scale_inv" in tensors else tensors[name]
        assert torch.equal(destination.target, expected.to(destination.target.dtype)), name
    assert report.dequantized == 18
    assert report.formats == {"fp8_block": 18, "plain": 7}
    assert "7 plain; 18 dequantised at load" in str(report)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_fp8_may_stay_as_it_is_with_fp32_scales(tmp_path: Path, scale_dtype: torch.dtype) -> None:
    tensors = fp8_tensors(scale_dtype)
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, tensors))
    model = ToyModel(checkpoint.formats, keep_fp8=True, hidden=HIDDEN, width=WIDTH)
    report = load_weights(model, checkpoint)
    for destination in model.destinations():
        stored = tensors[destination.name]
        if stored.dtype == torch.float8_e4m3fn:
            assert torch.equal(destination.target.view(torch.uint8), stored.view(torch.uint8))
        else:
            assert torch.equal(destination.target, stored.float())
    assert report.dequantized == 0
    assert report.tensors == len(tensors)


def test_a_matrix_read_in_many_pieces_keeps_its_scales(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minserve.models.weight_reader.PIECE_BYTES", 1000)
    name = "model.layers.0.mlp.experts.0.down_proj.weight"
    tensors = fp8_tensors()
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, tensors))
    model = ToyModel(checkpoint.formats, hidden=HIDDEN, width=WIDTH)
    calls: list[tuple[int, int]] = []
    report = load_weights(model, checkpoint, lambda done, total: calls.append((done, total)))
    assert torch.equal(model.w2[0][0], widened(tensors, name))
    assert len(calls) > len(tensors)
    assert calls[-1] == (report.bytes_read, report.bytes_read) == (checkpoint.num_bytes, checkpoint.num_bytes)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


@pytest.mark.parametrize("shape", [(1, 1), (127, 129), (128, 128), (576, 300)])
def test_partial_blocks(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128))
    expected = torch.stack([weight[r].float() * scale[r // 128][torch.arange(shape[1]) // 128] for r in range(shape[0])])
    assert torch.equal(widen(weight, scale, torch.float32), expected)


NAME = "model.layers.1.mlp.experts.2.up_proj.weight"


def test_fp8_without_its_scale_is_refused(tmp_path: Path) -> None:
    tensors = fp8_tensors()
    del tensors[f"{NAME}_scale_inv"]
    with pytest.raises(CheckpointError, match=f"{NAME} F8_E4M3 .*: FP8 without its {NAME}_scale_inv"):
        opened(tmp_path, tensors)


def test_all_missing_scales_are_named_up_to_ten(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in fp8_tensors().items() if not name.endswith("_scale_inv")}
    with pytest.raises(CheckpointError, match=r"(.*FP8 without its .*; ){10}and 8 more"):
        opened(tmp_path, tensors)


@pytest.mark.parametrize("without", ["weight", "fp8"])
def test_an_orphan_scale_is_refused(tmp_path: Path, without: str) -> None:
    tensors = fp8_tensors()
    if without == "weight":
        del tensors[NAME]
    else:
        tensors[NAME] = tensors[NAME].bfloat16()
    with pytest.raises(CheckpointError, match=f"{NAME}_scale_inv: without a quantised weight beside it"):
        opened(tmp_path, tensors)


def test_a_misshapen_scale_is_refused_with_both_shapes(tmp_path: Path) -> None:
    tensors = fp8_tensors() | {f"{NAME}_scale_inv": torch.ones(1, 2)}
    with pytest.raises(CheckpointError, match=r"scale_inv F32 \[1, 2\] .* \[160, 192\] .* needs the shape \[2, 2\]"):
        opened(tmp_path, tensors)


def test_a_scale_of_another_type_is_refused(tmp_path: Path) -> None:
    tensors = fp8_tensors() | {f"{NAME}_scale_inv": torch.ones(2, 2, dtype=torch.int32)}
    with pytest.raises(CheckpointError, match="must be BF16 or F16 or F32"):
        opened(tmp_path, tensors)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.a_proj.weight_zero_point", torch.ones(4, dtype=torch.int32), "asymmetric INT4 or INT8 weights are not supported"),
        ("model.a_proj.qweight", torch.ones(4, 4, dtype=torch.int32), "GPTQ or AWQ weights are not supported"),
        ("model.norm.weight_scale", torch.ones(4), "per-tensor or per-channel"),
        ("model.a_proj.weight_scale", torch.ones(4), "without a quantised weight beside it"),
        ("model.a_proj.weight_scale_2", torch.ones(1), "without a quantised weight beside it"),
        ("model.a_proj.weight_shape", torch.ones(2), "without a quantised weight beside it"),
        ("model.a_proj.weight_global_scale", torch.ones(1), "compressed-tensors NVFP4 weights are not supported"),
        ("model.a_proj.weight", torch.ones(4, 4).to(torch.float8_e5m2), "of this dtype are not supported"),
        ("model.a_proj.weight", torch.ones(2, 4, 4).to(torch.float8_e4m3fn), "FP8 without its"),
    ],
)
def test_formats_that_are_not_supported_are_named(tmp_path: Path, name: str, tensor: Tensor, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        opened(tmp_path, toy_tensors() | {name: tensor})


def test_fp8_of_three_dimensions_is_refused(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.ones(2, 4, 4).to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.ones(2, 1, 1)}
    with pytest.raises(CheckpointError, match="matrices only"):
        opened(tmp_path, tensors)


# The config against the tensors.


def test_fp8_tensors_without_a_quantization_config_are_believed_with_a_note(tmp_path: Path) -> None:
    (note,) = opened(tmp_path, fp8_tensors())
    assert "and 17 more: FP8 although the config has no quantization_config" in note


def test_a_config_that_promises_fp8_where_tensors_are_plain_is_overruled_with_a_note(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, toy_tensors(), config={"quantization_config": FP8}))
    assert {checkpoint.formats.of(name) for name in checkpoint.tensors} == {"plain"}
    (note,) = checkpoint.notes
    assert "and 17 more: stored plain although quantization_config does not exclude it" in note
    load_weights(ToyModel(checkpoint.formats), checkpoint)


@pytest.mark.parametrize("field", ["modules_to_not_convert", "ignored_layers", "ignore"])
@pytest.mark.parametrize(
    "exclusion",
    [
        "model.layers.0.self_attn.kv_b_proj",
        "kv_b_proj",
        "self_attn",
        "re:.*kv_b_proj$",
        "model.layers.*.self_attn*",
        "language_model.model.layers.0.self_attn.kv_b_proj",
    ],
)
def test_excluded_modules_are_plain_without_a_note(tmp_path: Path, field: str, exclusion: str) -> None:
    tensors = fp8_tensors() | {"model.layers.0.self_attn.kv_b_proj.weight": torch.randn(8, 8)}
    config = {"quantization_config": {**FP8, field: [exclusion, "lm_head"]}}
    assert not opened(tmp_path / "excluded", tensors, config)
    (note,) = opened(tmp_path / "not", tensors, {"quantization_config": {**FP8, field: ["lm_head", "b_proj", "proj"]}})
    assert note.startswith("model.layers.0.self_attn.kv_b_proj.weight: stored plain")


def test_a_module_that_is_fp8_although_excluded_is_believed_with_a_note(tmp_path: Path) -> None:
    config = {"quantization_config": {**FP8, "modules_to_not_convert": ["model.layers.1.mlp.experts.2.up_proj"]}}
    (note,) = opened(tmp_path, fp8_tensors(), config)
    assert note == f"{NAME}: FP8 although quantization_config excludes it"


def test_a_pattern_that_is_not_valid_is_a_note(tmp_path: Path) -> None:
    (note,) = opened(tmp_path, fp8_tensors(), {"quantization_config": {**FP8, "ignore": ["re:("]}})
    assert "not valid" in note


def test_the_section_is_found_in_text_config_and_in_its_own_file(tmp_path: Path) -> None:
    assert not opened(tmp_path / "a", fp8_tensors(), {"text_config": {"quantization_config": FP8}})
    directory = write_checkpoint(tmp_path / "b", fp8_tensors())
    (directory / "hf_quant_config.json").write_text('{"quantization": {"exclude_modules": ["lm_head"]}}')
    assert not open_checkpoint(directory).notes


def test_another_block_size_is_refused(tmp_path: Path) -> None:
    config = {"quantization_config": {**FP8, "weight_block_size": [64, 64]}}
    with pytest.raises(CheckpointError, match=r"weight_block_size \[64, 64\] is not supported"):
        opened(tmp_path, fp8_tensors(), config)


def test_formats_from_the_config_alone() -> None:
    formats = formats_from_config({**FP8, "modules_to_not_convert": ["kv_b_proj"]})
    attention, mlp = "model.layers.3.self_attn", "model.layers.3.mlp"
    quantised = (
        f"{attention}.kv_a_proj_with_mqa",
        f"{attention}.o_proj",
        f"{mlp}.experts.7.gate_proj",
        f"{mlp}.shared_experts.up_proj",
    )
    plain = (
        f"{attention}.kv_b_proj",
        f"{mlp}.gate",
        f"{mlp}.shared_expert_gate",
        "lm_head",
        "model.embed_tokens",
        f"{attention}.q_norm",
    )
    assert {formats.of(f"{module}.weight") for module in quantised} == {"fp8_block"}
    assert {formats.of(f"{module}.weight") for module in plain} == {"plain"}
    assert formats.of(f"{attention}.q_proj.bias") == "plain"
    assert formats_from_config(None).of(f"{attention}.o_proj.weight") == "plain"
    with pytest.raises(CheckpointError, match="'awq' is not supported"):
        formats_from_config({"quant_method": "awq"})
