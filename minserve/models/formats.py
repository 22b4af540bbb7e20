"""Which storage format each weight has, decided per module from the tensors alone. Knows tensor headers, no files and no model.

A quantised matrix `x.weight` [N, K] is stored as one tensor of values and some of scales, whose names extend its own.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Literal

from minserve.errors import CheckpointError
from minserve.models.safetensors_header import StoredTensor
from minserve.models.tensor_names import named

Format = Literal["plain", "fp8_block", "int4_group", "nvfp4"]

BLOCK = 128
"""Rows and columns of a block that shares one FP8 scale."""
INT4_GROUP = 32
"""Values along K that share one INT4 scale."""
NVFP4_GROUP = 16
"""Values along K that share one FP8 scale of NVFP4."""


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """What is appended to `x.weight` to name the tensors that store it."""

    values: str = ""
    scales: tuple[str, ...] = ()
    packed: int = 1
    """Values along K in one element."""
    title: str = "plain"
    group: int = 1
    """Values along K that share one scale, where each row has its own."""


LAYOUTS: Mapping[Format, Layout] = {
    "plain": Layout(),
    # Despite the name the factor multiplies: W = weight * scale_inv.
    "fp8_block": Layout("", ("_scale_inv",), 1, "FP8"),
    # compressed-tensors "pack-quantized": eight values plus 8 in an int32, the lowest nibble first.
    "int4_group": Layout("_packed", ("_scale",), 8, "INT4", INT4_GROUP),
    # modelopt: two e2m1 values in a byte, the low nibble first; W = value * scale * scale_2.
    "nvfp4": Layout("", ("_scale", "_scale_2"), 2, "NVFP4", NVFP4_GROUP),
}
PACKED_SHAPE = "_shape"
"""`x.weight_shape` holds [N, K] of an INT4 weight."""

_FLOATS = frozenset({"BF16", "F16", "F32"})
_COMPANIONS: Mapping[Format, Mapping[str, frozenset[str]]] = {
    "fp8_block": {"_scale_inv": _FLOATS},
    "int4_group": {"_scale": _FLOATS, PACKED_SHAPE: frozenset({"I32", "I64"})},
    "nvfp4": {"_scale": frozenset({"F8_E4M3"}), "_scale_2": frozenset({"F32"})},
}
"""The tensors beside the values of a quantised weight, and their types."""
_EXTENSIONS = ("_scale_inv", "_scale", "_scale_2", PACKED_SHAPE)
_FOREIGN_LEAVES = {
    "qweight": "GPTQ or AWQ",
    "weight_zero_point": "asymmetric INT4 or INT8",
    "weight_g_idx": "activation-ordered INT4",
    "weight_global_scale": "compressed-tensors NVFP4",
}
_FOREIGN_DTYPES = frozenset({"F8_E5M2", "F4", "F6_E2M3", "F6_E3M2", "F8_E8M0"})
_ACTIVATION_SCALES = ("input_scale", "output_scale", "k_scale", "v_scale", "q_scale", "input_global_scale")


class Formats:
    """Answers `of(weight_name)`."""

    def __init__(self, rule: Callable[[str], Format], quantized: Mapping[str, Format] | None = None) -> None:
        self._rule = rule
        self.quantized: Mapping[str, Format] = quantized or {}
        """Every weight that is not plain, by name; empty when no checkpoint was read."""
        self._weight_of = {stored: weight for weight, kind in self.quantized.items() for stored in stored_names(weight, kind)}

    def of(self, weight_name: str) -> Format:
        """Format of `model.layers.3.mlp.down_proj.weight`; a name that does not exist is plain (and missing at load)."""
        return self._rule(weight_name)

    def count(self, stored: Mapping[str, object]) -> Counter[Format]:
        """Weights of each format among tensors by stored name; scales count with their weights."""
        return Counter(self.of(weight) for weight in {self._weight_of.get(name, name) for name in stored})


def stored_names(weight_name: str, kind: Format) -> tuple[str, ...]:
    """The tensors that store a weight: its values, then its scales."""
    if kind == "plain":
        return (weight_name,)
    layout = LAYOUTS[kind]
    return (weight_name + layout.values, *[weight_name + scale for scale in layout.scales])


def blocks(size: int) -> int:
    return -(-size // BLOCK)


def set_aside_reason(name: str) -> str | None:
    """Why a tensor that belongs to a quantised weight is not read into a model; None for all others."""
    leaf = name.rpartition(".")[2]
    if leaf == f"weight{PACKED_SHAPE}":
        return "shapes of packed weights, proven against the weights"
    return "scales of activations, which are not quantised" if leaf in _ACTIVATION_SCALES else None


def formats_from_tensors(tensors: Mapping[str, StoredTensor]) -> Formats:
    """Formats of the tensors by canonical name. CheckpointError for a missing, orphan or misshapen scale and for a format
    that is not supported."""
    quantized: dict[str, Format] = {}
    for name, tensor in tensors.items():
        _refuse_foreign(name, tensor)
        if name.endswith(".weight_packed"):
            quantized[name.removesuffix("_packed")] = "int4_group"
        elif tensor.dtype == "U8" and name.endswith(".weight"):
            quantized[name] = "nvfp4"
        elif tensor.dtype == "F8_E4M3" and not name.endswith(".weight_scale"):
            quantized[name] = "fp8_block"
    faults = [fault for name, kind in quantized.items() if (fault := _fault(name, kind, tensors)) is not None]
    if faults:
        raise CheckpointError(named(faults))
    _refuse_orphans(tensors, quantized)
    return Formats(lambda name: quantized.get(name, "plain"), quantized)


def _refuse_foreign(name: str, tensor: StoredTensor) -> None:
    foreign = _FOREIGN_LEAVES.get(name.rpartition(".")[2])
    if foreign is not None:
        raise CheckpointError(f"{tensor}: {foreign} weights are not supported")
    if tensor.dtype in _FOREIGN_DTYPES:
        raise CheckpointError(f"{tensor}: weights of this dtype are not supported")


def _refuse_orphans(tensors: Mapping[str, StoredTensor], quantized: Mapping[str, Format]) -> None:
    owned = {stored for name, kind in quantized.items() for stored in stored_names(name, kind)}
    owned |= {name + PACKED_SHAPE for name, kind in quantized.items() if kind == "int4_group"}
    orphans = [name for name in tensors if name not in owned and name.rpartition(".")[2].endswith(_EXTENSIONS)]
    orphans = [name for name in orphans if set_aside_reason(name) is None or name.endswith(PACKED_SHAPE)]
    if not orphans:
        return
    weight = orphans[0].removesuffix("_scale")
    if weight != orphans[0] and weight in tensors:
        raise CheckpointError(f"{tensors[orphans[0]]}: per-tensor or per-channel FP8 or INT8 weights are not supported")
    raise CheckpointError(f"{named(orphans)}: without a quantised weight beside it")


def _fault(name: str, kind: Format, tensors: Mapping[str, StoredTensor]) -> str | None:
    """What is wrong with the tensors of a quantised weight."""
    layout, companions = LAYOUTS[kind], _COMPANIONS[kind]
    weight = tensors[name + layout.values]
    if kind == "int4_group" and weight.dtype != "I32":
        return f"{weight}: packed weights of this dtype are not supported, only INT4 in I32"
    for extension in companions:
        if name + extension not in tensors:
            return f"{weight}: {layout.title} without its {name}{extension}"
    if len(weight.shape) != 2:
        return f"{weight}: {layout.title} is known for matrices only"
    rows, columns = weight.shape[0], weight.shape[1] * layout.packed
    if columns % layout.group:
        return f"{weight}: {columns} columns are not whole groups of {layout.group}"
    for extension, dtypes in companions.items():
        tensor = tensors[name + extension]
        if tensor.dtype not in dtypes:
            return f"{tensor}: its dtype must be {' or '.join(sorted(dtypes))}"
        if extension == "_scale_2":
            if tensor.shape not in ((), (1,)):
                return f"{tensor}: one number is expected"
            continue
        shape, what = [rows, columns // layout.group], f"groups of {layout.group}"
        if extension == PACKED_SHAPE:
            shape, what = [2], "[rows, columns]"
        elif kind == "fp8_block":
            shape, what = [blocks(rows), blocks(columns)], f"blocks of {BLOCK}"
        if list(tensor.shape) != shape:
            return f"{tensor}: {weight.name} {list(weight.shape)} in {what} needs the shape {shape}"
    return None
