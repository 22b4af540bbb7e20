"""Whatever a header or a quantisation section says, the answer is a format or a sentence."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from minserve.errors import CheckpointError
from minserve.models.formats import LAYOUTS, Formats, formats_from_tensors, set_aside_reason, stored_names
from minserve.models.quantization_claim import config_disagreements, formats_from_config
from minserve.models.safetensors_header import StoredTensor

MODULES = ("model.layers.0.mlp.experts.0.up_proj", "model.layers.0.self_attn.o_proj", "lm_head")
LEAVES = (
    "weight", "weight_packed", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_shape", "weight_zero_point",
    "input_scale", "bias",
)  # fmt: skip
SHAPES = ((), (1,), (2,), (4, 4), (1, 1), (4, 1), (128, 128), (128, 4), (128, 16), (128, 8), (0, 0), (2, 4, 4))

names = st.builds(lambda module, leaf: f"{module}.{leaf}", st.sampled_from(MODULES), st.sampled_from(LEAVES))
kinds = st.sampled_from(("BF16", "F32", "U8", "I32", "I64", "F8_E4M3", "F8_E5M2"))
tensors = st.dictionaries(names, st.tuples(kinds, st.sampled_from(SHAPES)), max_size=8).map(
    lambda found: {name: StoredTensor(name, Path("f"), kind, shape, 0, 0) for name, (kind, shape) in found.items()}
)
values = st.sampled_from(
    [
        None,
        4,
        8,
        32,
        "fp8",
        "gptq",
        "modelopt",
        "NVFP4",
        "compressed-tensors",
        "pack-quantized",
        [128, 128],
        ["re:(", "*", 3],
        {},
        True,
    ]
)
sections = st.dictionaries(
    st.sampled_from(("quant_method", "quant_algo", "format", "ignore", "exclude_modules", "weight_block_size", "config_groups")),
    values | st.dictionaries(st.text(max_size=3), st.dictionaries(st.sampled_from(("weights", "targets")), values), max_size=2),
)


@given(found=tensors, section=sections | st.none())
@settings(max_examples=600, deadline=None)
def test_any_header_has_formats_or_a_refusal(found: dict[str, StoredTensor], section: dict[str, Any] | None) -> None:
    try:
        formats = formats_from_tensors(found)
    except CheckpointError:
        return
    assert_sound(formats, found)
    with contextlib.suppress(CheckpointError):
        assert all(isinstance(note, str) for note in config_disagreements(found, formats, section))


def assert_sound(formats: Formats, found: dict[str, StoredTensor]) -> None:
    """Each quantised weight has all its tensors, in shapes that fit each other, and nothing is left over."""
    owned = set()
    for weight, kind in formats.quantized.items():
        stored = stored_names(weight, kind)
        owned |= set(stored)
        values, scale = found[stored[0]], found[stored[1]]
        assert len(values.shape) == len(scale.shape) == 2
        columns = values.shape[1] * LAYOUTS[kind].packed
        across, down = {"fp8_block": (128, 128), "int4_group": (32, 1), "nvfp4": (16, 1)}[kind]
        assert scale.shape == (-(-values.shape[0] // down), -(-columns // across))
    for name in found.keys() - owned:
        assert set_aside_reason(name) or formats.of(name) == "plain"
        assert not name.endswith(("_scale_inv", "weight_scale", "_scale_2", "_packed"))


@given(section=sections | st.none())
@settings(max_examples=300, deadline=None)
def test_any_section_promises_a_format_or_is_refused(section: dict[str, Any] | None) -> None:
    with contextlib.suppress(CheckpointError):
        assert formats_from_config(section).of(f"{MODULES[0]}.weight") in LAYOUTS
