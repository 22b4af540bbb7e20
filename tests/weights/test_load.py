"""The proof of load: every parameter written once, every tensor accounted for, nothing cast that should not be."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from weights.toy_model import EXPERTS, HIDDEN, LAYERS, VOCAB, WIDTH, ToyModel, assert_loaded, toy_tensors, write_checkpoint

from minserve.errors import CheckpointError
from minserve.models.checkpoint import Checkpoint, open_checkpoint
from minserve.models.coverage import prove_coverage
from minserve.models.destinations import Destination
from minserve.models.formats import Formats
from minserve.models.weights import load_weights


def checkpoint_of(directory: Path, tensors: dict[str, Tensor], shards: int = 2) -> Checkpoint:
    return open_checkpoint(write_checkpoint(directory, tensors, shards))


def refusal(model: ToyModel, checkpoint: Checkpoint) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_weights(model, checkpoint)
    return str(caught.value)


@pytest.mark.parametrize("threads", [1, 5])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_type_loads_into_every_type(tmp_path: Path, dtype: torch.dtype, stored: torch.dtype, threads: int) -> None:
    tensors = toy_tensors(dtype=stored)
    checkpoint = checkpoint_of(tmp_path, tensors)
    model = ToyModel(dtype=dtype)
    report = load_weights(model, checkpoint, threads=threads)
    assert_loaded(model, tensors)
    assert report.tensors == len(tensors)
    assert report.files == 2
    assert report.bytes_read == checkpoint.num_bytes
    assert report.bytes_written == sum(p.numel() * p.element_size() for p in model.parameters())
    assert not report.skipped


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("piece", [1, 100, 1000])
def test_tensors_in_many_pieces_land_where_they_belong(
    tmp_path: Path, piece: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minserve.models.weight_reader.PIECE_BYTES", piece)
    tensors = toy_tensors()
    model = ToyModel(dtype=dtype)
    load_weights(model, checkpoint_of(tmp_path, tensors))
    assert_loaded(model, tensors)


def test_models_built_in_inference_mode_and_with_gradients_load(tmp_path: Path) -> None:
    tensors = toy_tensors()
    checkpoint = checkpoint_of(tmp_path, tensors)
    with torch.inference_mode():
        inside = ToyModel()
    load_weights(inside, checkpoint)
    assert_loaded(inside, tensors)
    outside = ToyModel()
    with torch.inference_mode():
        load_weights(outside, checkpoint)
    assert_loaded(outside, tensors)
    assert not any(parameter.is_inference() for parameter in outside.parameters())


def test_the_report_is_one_page(tmp_path: Path) -> None:
    tensors = toy_tensors() | {
        f"model.layers.{LAYERS}.eh_proj.weight": torch.ones(4, 4),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
    }
    text = str(load_weights(ToyModel(), checkpoint_of(tmp_path, tensors)))
    assert f"weights   {tmp_path}" in text
    assert "from 2 files" in text
    assert "each byte exactly once" in text
    assert "1 tensors, 64 bytes: multi-token prediction layer" in text
    assert "1 tensors, 32 bytes: rotary frequencies are computed" in text
    assert len(text.splitlines()) <= 10


@pytest.mark.parametrize("fp8", [False, True])
def test_the_extra_prediction_layer_is_skipped_and_reported(tmp_path: Path, fp8: bool) -> None:
    prefix = f"model.layers.{LAYERS}"
    extra = {f"{prefix}.mlp.experts.0.up_proj.weight": torch.ones(4, 4), f"{prefix}.shared_head.norm.weight": torch.ones(4)}
    if fp8:
        name = f"{prefix}.self_attn.o_proj.weight"
        extra |= {name: torch.ones(4, 4).to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1, 1)}
    tensors = toy_tensors()
    model = ToyModel()
    report = load_weights(model, checkpoint_of(tmp_path, tensors | extra))
    assert_loaded(model, tensors)
    assert report.skipped["multi-token prediction layer"].tensors == len(extra)


# Names and shapes.


def test_missing_tensors_are_named_with_shapes_up_to_ten(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in toy_tensors().items() if ".experts." not in name}
    message = refusal(ToyModel(), checkpoint_of(tmp_path, tensors))
    assert "18 tensors that the model needs are missing" in message
    assert f"model.layers.0.mlp.experts.0.gate_proj.weight [{WIDTH}, {HIDDEN}]" in message
    assert "and 8 more" in message


def test_a_tensor_that_the_index_forgot_is_said_to_lie_in_the_file(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, toy_tensors(), 2)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps(index))
    message = refusal(ToyModel(), open_checkpoint(tmp_path))
    assert f"missing: model.norm.weight [{HIDDEN}] ({4 * HIDDEN} bytes of parameters)" in message
    assert "does not list them: model.norm.weight" in message


def test_unknown_tensors_are_named_with_shapes_up_to_ten(tmp_path: Path) -> None:
    strange = {f"model.layers.0.self_attn.strange_{i:02}.weight": torch.ones(3, 2) for i in range(12)}
    message = refusal(ToyModel(), checkpoint_of(tmp_path, toy_tensors() | strange))
    assert "12 tensors are unknown to the model" in message
    assert "(288 bytes)" in message
    assert "model.layers.0.self_attn.strange_00.weight F32 [3, 2] in model-0000" in message
    assert "and 2 more" in message


def test_a_renamed_tensor_is_both_missing_and_unknown(tmp_path: Path) -> None:
    tensors = toy_tensors()
    tensors["model.final_norm.weight"] = tensors.pop("model.norm.weight")
    message = refusal(ToyModel(), checkpoint_of(tmp_path, tensors))
    assert f"1 tensors that the model needs are missing: model.norm.weight [{HIDDEN}]" in message
    assert "1 tensors are unknown to the model: model.final_norm.weight" in message


@pytest.mark.parametrize("shape", [(HIDDEN, WIDTH), (WIDTH * HIDDEN,), (WIDTH, HIDDEN + 1), (1, WIDTH, HIDDEN)])
def test_a_wrong_shape_is_refused_with_both(tmp_path: Path, shape: tuple[int, ...]) -> None:
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    message = refusal(ToyModel(), checkpoint_of(tmp_path, toy_tensors() | {name: torch.ones(shape)}))
    assert f"{name} F32 {list(shape)} in " in message
    assert f"where the model has [{WIDTH}, {HIDDEN}]" in message


def test_nothing_is_written_when_a_name_is_wrong(tmp_path: Path) -> None:
    tensors = toy_tensors()
    del tensors["model.norm.weight"]
    model = ToyModel()
    refusal(model, checkpoint_of(tmp_path, tensors))
    assert bool(model.embedding.isnan().all())


def test_integers_are_not_cast_to_weights(tmp_path: Path) -> None:
    tensors = toy_tensors() | {"model.norm.weight": torch.ones(HIDDEN, dtype=torch.int64)}
    assert "model.norm.weight I64 [16] " in refusal(ToyModel(), checkpoint_of(tmp_path, tensors))


def test_fp8_is_not_cast_without_its_scale_nor_plain_values_to_fp8(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    quantised = {name: torch.ones(WIDTH, HIDDEN).to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1, 1)}
    message = refusal(ToyModel(), checkpoint_of(tmp_path / "a", toy_tensors() | quantised))
    assert f"{name} F8_E4M3 [24, 16] in " in message
    assert f"unknown to the model: {name}_scale_inv" in message
    message = refusal(ToyModel(keep_fp8=True), checkpoint_of(tmp_path / "b", toy_tensors()))
    assert "where the model has torch.float8_e4m3fn" in message


def test_a_plain_weight_is_not_widened(tmp_path: Path) -> None:
    message = refusal(ToyModel(Formats(lambda _: "fp8_block")), checkpoint_of(tmp_path, toy_tensors()))
    assert "up_proj.weight BF16 [24, 16] in" in message
    assert "is to be widened but is not FP8" in message


def test_values_that_float16_cannot_hold_are_refused(tmp_path: Path) -> None:
    tensors = toy_tensors()
    tensors["model.norm.weight"][3] = 70000.0
    checkpoint = checkpoint_of(tmp_path, tensors)
    assert "model.norm.weight BF16 [16] in " in (message := refusal(ToyModel(dtype=torch.float16), checkpoint))
    assert "float16 cannot hold" in message
    load_weights(ToyModel(dtype=torch.bfloat16), checkpoint)


def test_names_that_resemble_each_other_are_kept_apart(tmp_path: Path) -> None:
    class Gates(nn.Module):
        """The shared expert's gate beside a gate projection and the router's gate."""

        def __init__(self) -> None:
            super().__init__()
            shapes = {
                "shared_expert_gate": (1, 4),
                "shared_expert.gate_proj": (3, 4),
                "gate": (2, 4),
                "experts.1.up_proj": (5, 4),
            }
            shapes |= {"experts.10.up_proj": (5, 4), "experts.11.up_proj": (5, 4)}
            self.matrices = nn.ParameterList(torch.zeros(shape) for shape in shapes.values())
            self.names = [f"model.layers.0.mlp.{name}.weight" for name in shapes]

        def destinations(self) -> Iterator[Destination]:
            yield from map(Destination, self.names, self.matrices)

        def ignored(self, _name: str) -> str | None:
            return None

    model = Gates()
    tensors = {name: torch.randn(matrix.shape) for name, matrix in zip(model.names, model.matrices, strict=True)}
    load_weights(model, checkpoint_of(tmp_path, tensors))
    for name, matrix in zip(model.names, model.matrices, strict=True):
        assert torch.equal(matrix, tensors[name])


# Tied and untied heads.


@pytest.mark.parametrize("shards", [0, 2])
def test_an_untied_head_is_its_own_matrix(tmp_path: Path, shards: int) -> None:
    tensors = toy_tensors()
    model = ToyModel()
    load_weights(model, checkpoint_of(tmp_path, tensors, shards))
    assert torch.equal(model.head, tensors["lm_head.weight"].float())
    assert not torch.equal(model.head, model.embedding)


def test_an_untied_head_that_is_absent_is_refused(tmp_path: Path) -> None:
    message = refusal(ToyModel(), checkpoint_of(tmp_path, toy_tensors(head=False)))
    assert "missing: lm_head.weight [32, 16]" in message
    assert "tie_word_embeddings" in message


def test_a_tied_head_that_is_absent_is_the_embedding(tmp_path: Path) -> None:
    tensors = toy_tensors(head=False)
    model = ToyModel(tied=True)
    report = load_weights(model, checkpoint_of(tmp_path, tensors))
    assert model.head is model.embedding
    assert_loaded(model, tensors)
    assert not report.notes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_tied_head_that_is_present_and_equal_is_reported(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = toy_tensors()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    report = load_weights(ToyModel(tied=True, dtype=dtype), checkpoint_of(tmp_path, tensors))
    assert report.skipped["tied to the embedding"].tensors == 1
    assert not report.notes


@pytest.mark.parametrize("change", ["first", "last", "shape", "type"])
def test_a_tied_head_that_differs_is_a_warning_and_does_not_overwrite(
    tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minserve.models.weights.PIECE_BYTES", 7 * HIDDEN * 2)
    tensors = toy_tensors()
    head = tensors["model.embed_tokens.weight"].clone()
    if change == "shape":
        head = head[:5].clone()
    elif change == "type":
        head = head.to(torch.float8_e5m2).view(torch.int8)
    else:
        head[{"first": 0, "last": VOCAB - 1}[change], 2] += 1.0
    tensors["lm_head.weight"] = head
    model = ToyModel(tied=True)
    report = load_weights(model, checkpoint_of(tmp_path, tensors))
    assert torch.equal(model.head, tensors["model.embed_tokens.weight"].float())
    (note,) = report.notes
    assert note.startswith("WARNING: lm_head.weight is stored and differs")
    assert note in str(report)


# Every byte once.


class AlteredModel(ToyModel):
    """Drops or doubles destinations of the first expert's down projection."""

    def __init__(self, alteration: str) -> None:
        super().__init__()
        self.alteration = alteration

    def destinations(self) -> Iterator[Destination]:
        chosen = "model.layers.1.mlp.experts.1.down_proj.weight"
        for destination in super().destinations():
            if destination.name != chosen or self.alteration != "drop":
                yield destination
        if self.alteration == "double":
            yield Destination(chosen, self.w2[1][0])
        if self.alteration == "elsewhere":
            yield Destination(chosen, torch.zeros(HIDDEN, WIDTH))
        if self.alteration == "buffer":
            yield Destination("model.layers.0.mlp.gate.e_score_correction_bias", self.derived[:EXPERTS])

    def ignored(self, name: str) -> str | None:
        return "not wanted" if self.alteration == "drop" else super().ignored(name)


@pytest.mark.parametrize(
    ("alteration", "message"),
    [
        ("drop", r"w2.1: 1,536 of 4,608 bytes are written by no tensor"),
        (
            "double",
            "experts.0.down_proj.weight and model.layers.1.mlp.experts.1.down_proj.weight would be written to the same place",
        ),
        ("elsewhere", "experts.1.down_proj.weight would be written to memory that is no parameter"),
        ("buffer", "e_score_correction_bias would be written to memory that is no parameter"),
    ],
)
def test_gaps_and_overlaps_of_destinations_are_refused_before_writing(tmp_path: Path, alteration: str, message: str) -> None:
    model = AlteredModel(alteration)
    assert message in refusal(model, checkpoint_of(tmp_path, toy_tensors()))
    assert bool(model.embedding.isnan().all())


def covered(parameter: Tensor, *views: Tensor) -> int:
    return prove_coverage({"p": parameter}, [Destination(f"t{index}", view) for index, view in enumerate(views)])


def test_views_of_any_strides_cover() -> None:
    p = torch.empty(6, 4, 5)
    assert covered(p, p) == 480
    assert covered(p, p.permute(2, 0, 1)) == 480
    assert covered(p, p[:2], p[2:, :1], p[2:, 1:]) == 480
    assert covered(p, p[:, :, 3:], p[:, :, :3]) == 480
    assert covered(p, p[::2], p[1::2].transpose(0, 2)) == 480
    assert covered(p, *p.reshape(-1).split(7)) == 480
    assert covered(torch.empty(0, 3)) == 0
    scalar = torch.empty(())
    assert covered(scalar, scalar) == 4


@pytest.mark.parametrize(
    "views",
    [
        lambda p: [p[:5]],
        lambda _: [],
        lambda p: [p, p[:1]],
        lambda p: [p[:4], p[3:]],
        lambda p: [p[:, :3]],
        lambda p: [p[:, :3], p[:, 2:]],
        lambda p: [p[::2], p[::2]],
        lambda p: [p[:1].expand(6, 4)],
        lambda p: [p.as_strided((6, 4), (2, 1))],
    ],
)
def test_views_that_miss_or_repeat_are_refused(views: object) -> None:
    p = torch.empty(6, 4)
    assert callable(views)
    with pytest.raises(CheckpointError):
        covered(p, *views(p))


def test_views_beyond_a_parameter_that_shares_its_storage_are_refused() -> None:
    storage = torch.empty(10)
    parameter = storage[:6]
    assert covered(parameter, storage[:6]) == 24
    with pytest.raises(CheckpointError, match="t0 would write 16 bytes outside"):
        covered(parameter, storage)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_is_written_beside_or_instead_of_a_parameter_is_told_apart(device: str) -> None:
    whole, other = torch.empty(4, 6, device=device), torch.empty(4, 6, device=device)
    assert covered(whole, whole[:, :2], whole[:, 2:]) == 96
    with pytest.raises(CheckpointError, match="t0 would be written to memory that is no parameter"):
        covered(whole, other)
    with pytest.raises(CheckpointError, match="p: 32 of 96 bytes are written by no tensor"):
        covered(whole, whole[:, 2:])
    with pytest.raises(CheckpointError, match="t0 would write 64 bytes outside"):
        covered(whole[:, :2], whole)


def test_tied_parameters_count_once() -> None:
    p = torch.empty(4, 4)
    assert prove_coverage({"a": p, "b": p, "c": p[:2]}, [Destination("t", p)]) == 64


# While reading.


class TransposedModel(nn.Module):
    """Stores a matrix transposed, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(5, 70))
        self.scalar = nn.Parameter(torch.zeros(()))

    def destinations(self) -> Iterator[Destination]:
        yield Destination("matrix", self.matrix.t())
        yield Destination("scalar", self.scalar)

    def ignored(self, _name: str) -> str | None:
        return None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strided_targets_and_scalars(tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minserve.models.weight_reader.PIECE_BYTES", 64)
    tensors = {"matrix": torch.randn(70, 5).to(dtype), "scalar": torch.tensor(3.5, dtype=dtype)}
    model = TransposedModel()
    load_weights(model, checkpoint_of(tmp_path, tensors))
    assert torch.equal(model.matrix.t(), tensors["matrix"].float())
    assert model.scalar == 3.5


def test_one_tensor_may_fill_several_places(tmp_path: Path) -> None:
    class TwoSlots(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slots = nn.Parameter(torch.zeros(2, 3))

        def destinations(self) -> Iterator[Destination]:
            yield Destination("expert", self.slots[0])
            yield Destination("expert", self.slots[1])

        def ignored(self, _name: str) -> str | None:
            return None

    model = TwoSlots()
    report = load_weights(model, checkpoint_of(tmp_path, {"expert": torch.arange(3.0)}))
    assert model.slots.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert report.tensors == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_that_shrinks_after_the_proof_is_an_error(tmp_path: Path, dtype: torch.dtype) -> None:
    checkpoint = checkpoint_of(tmp_path, toy_tensors(), shards=0)
    path = tmp_path / "model.safetensors"
    os.truncate(path, path.stat().st_size - 3)
    with pytest.raises(CheckpointError, match=r"3 bytes from .* on vanished while it was read"):
        load_weights(ToyModel(dtype=dtype), checkpoint)


def test_a_file_that_disappears_after_the_proof_is_an_error(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, toy_tensors())
    checkpoint.files[1].unlink()
    with pytest.raises(CheckpointError, match="cannot be opened: No such file"):
        load_weights(ToyModel(), checkpoint)
    assert not [fd for fd in os.listdir("/proc/self/fd") if str(tmp_path) in os.path.realpath(f"/proc/self/fd/{fd}")]
