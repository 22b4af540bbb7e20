"""Checkpoint directories that are incomplete, contradictory or wrapped."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from weights.toy_model import ToyModel, assert_loaded, read_index, toy_tensors, write_checkpoint, write_index

from minserve.errors import CheckpointError, ExitCode
from minserve.models.checkpoint import open_checkpoint
from minserve.models.tensor_names import canonical_name
from minserve.models.weights import load_weights


def refusal(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(directory)
    assert caught.value.exit_code == ExitCode.CHECKPOINT
    return str(caught.value)


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.mark.parametrize("shards", [0, 1, 2, 5])
def test_a_whole_checkpoint_opens(tmp_path: Path, shards: int) -> None:
    tensors = toy_tensors()
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, tensors, shards))
    assert set(checkpoint.tensors) == set(tensors)
    assert not checkpoint.notes
    assert not checkpoint.set_aside
    assert checkpoint.num_bytes == sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    assert len(checkpoint.files) == max(1, shards)


def test_an_absent_shard_is_named(tmp_path: Path) -> None:
    (write_checkpoint(tmp_path, toy_tensors()) / SECOND).unlink()
    assert f"1 of 2 files that model.safetensors.index.json names cannot be read: {SECOND} is not there" in refusal(tmp_path)


def test_all_absent_shards_are_named_up_to_ten(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, toy_tensors(), shards=12)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    message = refusal(tmp_path)
    assert "12 of 12 files" in message
    assert message.count("is not there") == 10
    assert "and 2 more" in message


@pytest.mark.parametrize("cut", [1, 0.5, "header"])
def test_a_short_file_is_refused_with_the_missing_bytes(tmp_path: Path, cut: int | float | str) -> None:
    path = write_checkpoint(tmp_path, toy_tensors()) / SECOND
    size = path.stat().st_size
    header = int.from_bytes(path.read_bytes()[:8], "little")
    left = {1: size - 1, 0.5: size // 2, "header": 8 + header // 2}[cut]
    os.truncate(path, left)
    missing = 8 + header - left if cut == "header" else size - left
    assert f"{SECOND}: " in (message := refusal(tmp_path))
    assert f"{missing:,} byte" in message
    assert "missing" in message


def test_all_short_files_are_named_at_once(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, toy_tensors(), 3)
    for number, missing in ((1, 7), (3, 1)):
        file = tmp_path / f"model-{number:05}-of-00003.safetensors"
        os.truncate(file, file.stat().st_size - missing)
    message = refusal(tmp_path)
    assert "model-00001-of-00003.safetensors: 7 bytes missing" in message
    assert "model-00003-of-00003.safetensors: 1 byte missing" in message


def test_a_dangling_link_of_a_hub_cache_is_named(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "snapshot", toy_tensors())
    blob = tmp_path / "blobs" / "0a1b"
    blob.parent.mkdir()
    (directory / FIRST).rename(blob)
    (directory / FIRST).symlink_to("../blobs/0a1b")
    assert len(open_checkpoint(directory).files) == 2
    blob.unlink()
    assert f"{FIRST} is a dangling link to ../blobs/0a1b" in refusal(directory)


def test_a_dangling_index_is_no_absent_index(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, toy_tensors(), shards=0)
    (tmp_path / "model.safetensors.index.json").symlink_to("../blobs/gone")
    assert "index.json: is a dangling link to ../blobs/gone" in refusal(tmp_path)


def test_strays_are_ignored_with_a_note(tmp_path: Path) -> None:
    tensors = toy_tensors(seed=1)
    write_checkpoint(tmp_path, tensors)
    for stray in ("consolidated.safetensors", "model.safetensors"):
        save_file(toy_tensors(seed=2), tmp_path / stray)
    (tmp_path / "broken.safetensors").write_bytes(b"no")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.notes == (
        "ignored, since model.safetensors.index.json is the whole model: "
        "broken.safetensors; consolidated.safetensors; model.safetensors",
    )
    model = ToyModel()
    load_weights(model, checkpoint)
    assert_loaded(model, tensors)


def test_a_stray_beside_a_single_file_is_ignored(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, toy_tensors(), shards=0)
    save_file(toy_tensors(seed=2), tmp_path / "consolidated.safetensors")
    (note,) = open_checkpoint(tmp_path).notes
    assert "consolidated.safetensors" in note


def test_a_tensor_in_two_indexed_files_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, toy_tensors())
    name, file = next((name, file) for name, file in read_index(tmp_path).items() if file == SECOND)
    content = load_file(tmp_path / FIRST)
    save_file({**content, name: load_file(tmp_path / file)[name]}, tmp_path / FIRST)
    assert f"tensors that are in more than one indexed file: {name} in {FIRST}; {SECOND}" in refusal(tmp_path)


def test_an_index_that_points_to_the_wrong_file_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, toy_tensors())
    index = read_index(tmp_path)
    name = next(name for name, file in index.items() if file == FIRST)
    write_index(tmp_path, {**index, name: SECOND})
    assert f"{name} is not in {SECOND} but in {FIRST}" in refusal(tmp_path)
    write_index(tmp_path, {**index, "model.invented.weight": SECOND})
    assert f"model.invented.weight is not in {SECOND}" in refusal(tmp_path)


def test_tensors_that_the_index_does_not_list_are_ignored_with_a_note(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, toy_tensors())
    save_file({**load_file(tmp_path / FIRST), "model.extra.weight": torch.ones(3)}, tmp_path / FIRST)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.notes == ("ignored, since model.safetensors.index.json does not list them: model.extra.weight",)
    assert "model.extra.weight" not in checkpoint.tensors


def test_a_wrong_total_size_is_a_note(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, toy_tensors()))
    write_index(tmp_path, read_index(tmp_path), checkpoint.num_bytes)
    assert not open_checkpoint(tmp_path).notes
    write_index(tmp_path, read_index(tmp_path), checkpoint.num_bytes - 2)
    (note,) = open_checkpoint(tmp_path).notes
    assert f"total_size {checkpoint.num_bytes - 2}" in note


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("", "is not valid"),
        ("[]", "is not valid"),
        ('{"weight_map": {}}', "weight_map is empty"),
        ('{"weight_map": {"a": 1}}', "is not valid"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "'a' is there twice"),
        ('{"metadata": {"a": 1}, "metadata": {"a": 1, "b": 2}, "weight_map": {"a": "x"}}', "'metadata' is there twice"),
        ('{"x": ' + "[" * 50_000, "is not valid: nested too deeply"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "which is not a safetensors file beside the index"),
        ('{"weight_map": {"a": "/x.safetensors"}}', "which is not a safetensors file beside the index"),
        ('{"weight_map": {"a": "x.bin"}}', "which is not a safetensors file beside the index"),
        ('{"weight_map": {"a": "x\\u0000.safetensors"}}', "which is not a safetensors file beside the index"),
        ('{"weight_map": {"a": "' + "x" * 5000 + '.safetensors"}}', "cannot be read"),
        ('{"weight_map": ' * 100_000, "is not valid"),
    ],
)
def test_a_damaged_index_is_refused(tmp_path: Path, body: str, message: str) -> None:
    write_checkpoint(tmp_path, toy_tensors())
    (tmp_path / "model.safetensors.index.json").write_text(body)
    assert message in refusal(tmp_path)


def test_directories_without_weights_say_what_is_missing(tmp_path: Path) -> None:
    assert "is not a directory" in refusal(tmp_path / "absent")
    assert "no model.safetensors and no model.safetensors.index.json" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert "only safetensors can be loaded, not pytorch_model.bin" in refusal(tmp_path)
    write_checkpoint(tmp_path, toy_tensors())
    (tmp_path / "model.safetensors.index.json").unlink()
    assert f"says which of these are the model: {FIRST}; {SECOND}" in refusal(tmp_path)


@pytest.mark.parametrize("config", ["{", "[1]", "[" * 100_000])
def test_a_damaged_config_is_refused(tmp_path: Path, config: str) -> None:
    write_checkpoint(tmp_path, toy_tensors())
    (tmp_path / "config.json").write_text(config)
    assert "config.json" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("stored", "canonical"),
    [
        ("model.layers.0.mlp.gate.weight", "model.layers.0.mlp.gate.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("language_model.model.layers.0.mlp.gate.weight", "model.layers.0.mlp.gate.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("language_model.layers.0.mlp.gate.weight", "model.layers.0.mlp.gate.weight"),
        ("model.language_model.layers.0.mlp.gate.weight", "model.layers.0.mlp.gate.weight"),
        ("model.language_model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("language_model.lm_head", "lm_head"),
        ("language_models.layers.0", "language_models.layers.0"),
        ("model.language_modeling.weight", "model.language_modeling.weight"),
        ("mtp.fc.weight", "mtp.fc.weight"),
        ("language_model.lm_head_extra.weight", "model.lm_head_extra.weight"),
    ],
)
def test_wrapper_prefixes_are_stripped_by_whole_segments(stored: str, canonical: str) -> None:
    assert canonical_name(stored) == canonical


def wrapped(tensors: dict[str, torch.Tensor], style: str) -> dict[str, torch.Tensor]:
    if style == "outside":
        return {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    return {
        name.replace("model.", "model.language_model.", 1) if "lm_head" not in name else name: t for name, t in tensors.items()
    }


@pytest.mark.parametrize("style", ["outside", "inside"])
def test_a_wrapped_language_model_loads_and_its_vision_part_is_reported(tmp_path: Path, style: str) -> None:
    tensors = toy_tensors()
    vision = {
        "vision_tower.blocks.0.weight": torch.ones(4),
        "mm_projector.proj.0.weight": torch.ones(2),
        "model.visual.x": torch.ones(2),
    }
    model = ToyModel()
    report = load_weights(model, open_checkpoint(write_checkpoint(tmp_path, wrapped(tensors, style) | vision)))
    assert_loaded(model, tensors)
    skipped = report.skipped["not for text (vision)"]
    assert (skipped.tensors, skipped.bytes) == (3, 32)
    assert "3 tensors, 32 bytes: not for text (vision)" in str(report)


def test_a_wrapped_model_without_its_head_is_refused_unless_tied(tmp_path: Path) -> None:
    tensors = toy_tensors(head=False)
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, wrapped(tensors, "inside")))
    with pytest.raises(CheckpointError, match=r"lm_head.weight \[32, 16\].*tie_word_embeddings"):
        load_weights(ToyModel(), checkpoint)
    model = ToyModel(tied=True)
    load_weights(model, checkpoint)
    assert_loaded(model, tensors)


def test_two_spellings_of_one_tensor_are_refused(tmp_path: Path) -> None:
    tensors = toy_tensors()
    write_checkpoint(tmp_path, tensors | {"language_model.model.norm.weight": torch.ones(16)})
    assert "are both model.norm.weight" in refusal(tmp_path)


def test_a_vision_model_alone_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"vision_tower.a": torch.ones(1)}, shards=0)
    assert "no tensor of a text model" in refusal(tmp_path)


def test_index_metadata_of_any_kind_is_tolerated(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, toy_tensors())
    path = tmp_path / "model.safetensors.index.json"
    body = json.loads(path.read_text())
    path.write_text(json.dumps({**body, "metadata": {"total_parameters": 1.5, "mergekit": {"a": []}}, "more": 1}))
    assert not open_checkpoint(tmp_path).notes
