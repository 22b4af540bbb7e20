"""Random weights without a file."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from weights.toy_model import ToyModel

from minserve.errors import CheckpointError
from minserve.kernels.reference import widen
from minserve.models.quantization_claim import formats_from_config
from minserve.models.weights import dummy_weights


def filled(seed: int, **options: object) -> dict[str, Tensor]:
    model = ToyModel(**options)  # type: ignore[arg-type]
    dummy_weights(model, seed)
    return {destination.name: destination.target for destination in model.destinations()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_plausible_finite_and_different(dtype: torch.dtype) -> None:
    values = filled(0, dtype=dtype, hidden=256, width=128)
    assert all(bool(value.isfinite().all()) for value in values.values())
    assert bool((values["model.norm.weight"] == 1).all())
    assert bool((values["model.layers.0.mlp.gate.e_score_correction_bias"] == 0).all())
    matrices = [value.float() for name, value in values.items() if value.dim() == 2]
    assert all(abs(matrix.std().item() - 0.02) < 0.002 for matrix in matrices)
    experts = [values[f"model.layers.{layer}.mlp.experts.{e}.up_proj.weight"] for layer in (0, 1) for e in (0, 1, 2)]
    assert not any(torch.equal(a, b) for i, a in enumerate(experts) for b in experts[:i])


def test_the_seed_decides() -> None:
    first, again, other = filled(3), filled(3), filled(4)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_a_tensor_depends_on_its_name_and_not_on_its_neighbours() -> None:
    untied, tied = filled(5), filled(5, tied=True)
    assert all(torch.equal(value, untied[name]) for name, value in tied.items())


def test_fp8_values_and_scales_give_the_same_spread() -> None:
    formats = formats_from_config({"quant_method": "fp8"})
    values = filled(0, formats=formats, keep_fp8=True, hidden=256, width=256)
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    assert values[name].dtype == torch.float8_e4m3fn
    wide = widen(values[name], values[f"{name}_scale_inv"], torch.float32)
    assert bool(wide.isfinite().all())
    assert abs(wide.std().item() - 0.02) < 0.005
    assert values[f"{name}_scale_inv"].unique().numel() > 1


def test_what_fp8_is_widened_at_load_is_filled_as_plain() -> None:
    values = filled(0, formats=formats_from_config({"quant_method": "fp8"}), hidden=256, width=256)
    assert abs(values["model.layers.0.mlp.experts.0.up_proj.weight"].std().item() - 0.02) < 0.002


def test_a_parameter_without_destination_is_refused() -> None:
    model = ToyModel()
    model.forgotten = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(CheckpointError, match="forgotten: 12 of 12 bytes"):
        dummy_weights(model, 0)


def test_the_report_says_so() -> None:
    assert str(dummy_weights(ToyModel(), 0)).startswith("weights   random, ")
