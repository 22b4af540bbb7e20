"""Reads config.json field by field and refuses, by name and value, what is missing, wrong or not supported.

Knows what the fields of all families have in common; each family's own fields are read in its file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from minserve.errors import CheckpointError
from minserve.models.model_config import GqaConfig, MlaConfig, ModelConfig, MoeConfig, RopeConfig, WeightDtype, YarnConfig
from minserve.quantization import read_json_object

_TOO_LARGE = 1 << 31
"""No model has sizes near it; bytes counted from smaller ones fit in 64 bits, and the machine says that they do not fit in it."""


class Fields:
    """One JSON object. A null field counts as absent; without a default an absent field is an error."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self.values = values
        self.where = where

    def get(self, *names: str) -> Any:
        """The first of the names that is there and not null, else None."""
        return next((self.values[name] for name in names if self.values.get(name) is not None), None)

    def unsupported(self, name: str, expected: str) -> CheckpointError:
        """The error for a field whose value this server cannot serve."""
        return CheckpointError(f"{self.where}: {name} is {json.dumps(self.get(name))}; supported: {expected}")

    def integer(self, *names: str, default: int | None = None, minimum: int = 1) -> int:
        """A whole number under the first of `names` (others are other spellings)."""
        value = self._present(names, default)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value < _TOO_LARGE:
            raise self._wrong(names, value, f"a whole number of at least {minimum}, below 2**31,")
        return value

    def number(self, *names: str, default: float | None = None, minimum: float = 0.0) -> float:
        value = self._present(names, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value < math.inf:
            raise self._wrong(names, value, f"a number of at least {minimum:g}")
        return float(value)

    def boolean(self, *names: str, default: bool | None = None) -> bool:
        value = self._present(names, default)
        if not isinstance(value, bool):
            raise self._wrong(names, value, "true or false")
        return value

    def text(self, *names: str, default: str | None = None) -> str:
        value = self._present(names, default)
        if not isinstance(value, str):
            raise self._wrong(names, value, "a string")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers, a single one counts as a list; absent is empty."""
        value = self.get(name)
        values = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in values):
            raise self._wrong((name,), value, "whole numbers")
        return tuple(values)

    def section(self, name: str) -> Fields | None:
        """An object within; None where absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong((name,), value, "an object")
        return Fields(value, f"{self.where}: {name}")

    def must_be(self, name: str, allowed: Sequence[Any]) -> None:
        """Refuses a field that is there with any other value."""
        value = self.get(name)
        if value is not None and value not in allowed:
            raise self.unsupported(name, ", ".join(json.dumps(item) for item in allowed))

    def _present(self, names: tuple[str, ...], default: Any) -> Any:
        value = self.get(*names)
        if value is None and default is None:
            raise CheckpointError(f"{self.where}: {names[0]} is missing")
        return default if value is None else value

    def _wrong(self, names: tuple[str, ...], value: Any, expected: str) -> CheckpointError:
        name = next((name for name in names if self.values.get(name) is not None), names[0])
        return CheckpointError(f"{self.where}: {name} is {json.dumps(value)}; {expected} is expected")


def read_fields(model_dir: Path) -> Fields:
    """config.json; the text model of a multimodal wrapper is laid over the wrapper's own fields."""
    values = read_json_object(model_dir / "config.json")
    text = values.get("text_config")
    if isinstance(text, dict):
        values = {**values, **text}
    return Fields(values)


def read_rope(fields: Fields, head_dim: int, *, interleaved: bool) -> RopeConfig:
    """Rotary fields in either spelling: `rope_parameters`, or `rope_theta` beside `rope_scaling`."""
    inner = fields.section("rope_parameters") or fields.section("rope_scaling") or Fields({}, fields.where)
    theta = inner.number("rope_theta", default=fields.number("rope_theta", default=10000.0, minimum=2.0), minimum=2.0)
    partial = inner.number("partial_rotary_factor", default=fields.number("partial_rotary_factor", default=1.0))
    rotary_dim = int(head_dim * partial)
    if partial > 1.0 or rotary_dim < 2 or rotary_dim % 2:
        name = "partial_rotary_factor"
        raise CheckpointError(f"{fields.where}: {name} is {partial:g}; an even part of the {head_dim} dims of a head is expected")
    kind = inner.text("rope_type", "type", default="default")
    if kind == "default":
        return RopeConfig(theta, rotary_dim, interleaved)
    if kind != "yarn":
        raise inner.unsupported("rope_type" if inner.get("rope_type") else "type", '"default", "yarn"')
    return RopeConfig(theta, rotary_dim, interleaved, _read_yarn(inner, fields))


def _read_yarn(inner: Fields, fields: Fields) -> YarnConfig:
    longest = fields.integer("max_position_embeddings")
    original = inner.integer("original_max_position_embeddings", default=longest)
    factor = inner.number("factor", default=longest / original, minimum=1.0)
    # As DeepSeek publishes it: mscale is 1 and mscale_all_dim 0 unless given, each counting by itself.
    mscale = yarn_mscale(factor, inner.number("mscale", default=1.0))
    mscale_all_dim = yarn_mscale(factor, inner.number("mscale_all_dim", default=0.0))
    return YarnConfig(
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=inner.number("beta_fast", default=32.0, minimum=0.001),
        beta_slow=inner.number("beta_slow", default=1.0, minimum=0.001),
        truncate=inner.boolean("truncate", default=True),
        attention_factor=inner.number("attention_factor", default=mscale / mscale_all_dim),
    )


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's temperature for a context stretched by `factor`."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _longest_context(fields: Fields, rope: RopeConfig) -> int:
    """max_position_embeddings, or what YaRN stretches the original context to where that is more."""
    stretched = rope.yarn.factor * rope.yarn.original_max_position_embeddings if rope.yarn else 0.0
    if stretched >= _TOO_LARGE:
        raise CheckpointError(f"{fields.where}: rope_scaling stretches the context to {stretched:g} tokens, which is no context")
    return max(fields.integer("max_position_embeddings"), int(stretched))


def read_decoder(
    fields: Fields,
    architecture: str,
    model_dir: Path,
    rope: RopeConfig,
    attention: GqaConfig | MlaConfig,
    moe: MoeConfig | None,
) -> ModelConfig:
    """What all families spell alike, around the parts that each reads for itself."""
    fields.must_be("hidden_act", ("silu",))
    dtype_name = "dtype" if fields.get("dtype") is not None else "torch_dtype"  # as it was called before
    fields.must_be(dtype_name, ("bfloat16", "float16", "float32"))
    return ModelConfig(
        architecture=architecture,
        model_type=fields.text("model_type"),
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        num_layers=fields.integer("num_hidden_layers"),
        intermediate_size=fields.integer("intermediate_size"),
        rms_norm_eps=fields.number("rms_norm_eps", default=1e-6),
        max_position_embeddings=_longest_context(fields, rope),
        rope=rope,
        attention=attention,
        moe=moe,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", default=False),
        num_nextn_predict_layers=0,
        eos_token_ids=_read_eos(fields, model_dir),
        dtype=cast(WeightDtype, fields.text(dtype_name, default="bfloat16")),
        raw=fields.values,
    )


def _read_eos(fields: Fields, model_dir: Path) -> tuple[int, ...]:
    """EOS ids of config.json, then those that only generation_config.json adds."""
    ids = fields.integers("eos_token_id")
    path = model_dir / "generation_config.json"
    if path.exists():
        ids += Fields(read_json_object(path), "generation_config.json").integers("eos_token_id")
    return tuple(dict.fromkeys(ids))
