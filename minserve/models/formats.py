"""Which storage format each weight has, decided per module from the tensors; the config's claim is only compared with it.

Knows tensor headers and quantisation configs, no files and no model. A later format is a new name in `Format` and a rule in
`formats_from_tensors`; a `Destination` then names its companion tensors as it does the scale.
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from minserve.errors import CheckpointError
from minserve.models.safetensors_header import StoredTensor

Format = Literal["plain", "fp8_block"]

BLOCK = 128
"""Rows and columns of a block that shares one FP8 scale."""
SCALE_SUFFIX = "_scale_inv"
"""`x.weight_scale_inv` belongs to `x.weight`. Despite the name the stored factor multiplies: W = weight * scale."""

_PLAIN_DTYPES = frozenset({"BF16", "F16", "F32"})
_FOREIGN_SUFFIXES = {
    "weight_packed": "INT4 compressed-tensors",
    "qweight": "GPTQ or AWQ",
    "weight_scale_2": "NVFP4",
    "weight_scale": "per-tensor or per-channel FP8 or INT8",
}


class Formats:
    """Answers `of(weight_name)`."""

    def __init__(self, rule: Callable[[str], Format], counts: Mapping[Format, int] | None = None) -> None:
        self._rule = rule
        self.counts: Mapping[Format, int] = counts or {}
        """Weights of each format; empty when no checkpoint was read."""

    def of(self, weight_name: str) -> Format:
        """Format of `model.layers.3.mlp.down_proj.weight`; a name that does not exist is plain (and missing at load)."""
        return self._rule(weight_name)


def scale_name(weight_name: str) -> str:
    return weight_name + SCALE_SUFFIX


def blocks(size: int) -> int:
    return -(-size // BLOCK)


def formats_from_tensors(tensors: Mapping[str, StoredTensor]) -> Formats:
    """Formats of the tensors by canonical name. CheckpointError on FP8 without its scale, an orphan or misshapen scale, or a
    format that is not supported."""
    _refuse_foreign(tensors)
    quantized = frozenset(name for name, tensor in tensors.items() if tensor.dtype == "F8_E4M3")
    for name in sorted(quantized):
        _prove_scale(tensors[name], tensors.get(scale_name(name)))
    orphans = [n for n in tensors if n.endswith(SCALE_SUFFIX) and n.removesuffix(SCALE_SUFFIX) not in quantized]
    if orphans:
        raise CheckpointError(f"{_some(orphans)}: a scale without an FP8 weight beside it")
    weights = [name for name in tensors if not name.endswith(SCALE_SUFFIX)]
    counts: Counter[Format] = Counter("fp8_block" if name in quantized else "plain" for name in weights)
    return Formats(lambda name: "fp8_block" if name in quantized else "plain", counts)


def formats_from_config(quantization: Mapping[str, Any] | None) -> Formats:
    """What the config alone promises, for random weights that have no file."""
    if quantization is None:
        return Formats(lambda _: "plain")
    if quantization.get("quant_method") != "fp8":
        raise CheckpointError(
            f"quantization_config.quant_method {quantization.get('quant_method')!r} is not supported without tensors"
        )
    _prove_block_size(quantization)
    is_excluded = _exclusion_rule(_exclusions(quantization))
    return Formats(lambda name: "fp8_block" if _is_projection(name) and not is_excluded(name) else "plain")


def config_disagreements(
    tensors: Mapping[str, StoredTensor], formats: Formats, quantization: Mapping[str, Any] | None, canonical: Callable[[str], str]
) -> list[str]:
    """Sentences on where config and tensors differ; the tensors are believed. CheckpointError for another block size,
    because tensors of few blocks cannot tell it."""
    quantized = [name for name in tensors if formats.of(name) == "fp8_block"]
    if quantization is None:
        return [f"{_some(quantized)}: FP8 although the config has no quantization_config"] if quantized else []
    if quantized:
        _prove_block_size(quantization)
    notes = []
    exclusions = _exclusions(quantization)
    try:
        is_excluded = _exclusion_rule([canonical(entry) for entry in exclusions])
    except re.error as error:
        return [f"quantization_config excludes modules by a pattern that is not valid ({error}); not compared with the tensors"]
    excluded_but_quantized = [name for name in quantized if is_excluded(name)]
    if excluded_but_quantized:
        notes.append(f"{_some(excluded_but_quantized)}: FP8 although quantization_config excludes it")
    unquantized = [
        name
        for name, tensor in tensors.items()
        if formats.of(name) == "plain" and len(tensor.shape) == 2 and _is_projection(name) and not is_excluded(name)
    ]
    if unquantized:
        notes.append(f"{_some(unquantized)}: stored plain although quantization_config does not exclude it")
    return notes


def _refuse_foreign(tensors: Mapping[str, StoredTensor]) -> None:
    for name, tensor in tensors.items():
        foreign = _FOREIGN_SUFFIXES.get(name.rpartition(".")[2])
        if foreign is not None:
            raise CheckpointError(f"{tensor}: {foreign} weights are not supported")
        if tensor.dtype in ("F8_E5M2", "F4", "F6_E2M3", "F6_E3M2", "F8_E8M0"):
            raise CheckpointError(f"{tensor}: weights of this dtype are not supported")


def _prove_scale(weight: StoredTensor, scale: StoredTensor | None) -> None:
    if scale is None:
        raise CheckpointError(f"{weight}: FP8 without its {scale_name(weight.name)}")
    if len(weight.shape) != 2:
        raise CheckpointError(f"{weight}: FP8 block scales are known for matrices only")
    if scale.dtype not in _PLAIN_DTYPES:
        raise CheckpointError(f"{scale}: a scale must be F32, BF16 or F16")
    expected = (blocks(weight.shape[0]), blocks(weight.shape[1]))
    if scale.shape != expected:
        raise CheckpointError(
            f"{scale}: {weight.name} {list(weight.shape)} in blocks of {BLOCK} needs the scale shape {list(expected)}"
        )


def _prove_block_size(quantization: Mapping[str, Any]) -> None:
    size = quantization.get("weight_block_size")
    if size is not None and size != [BLOCK, BLOCK]:
        raise CheckpointError(f"quantization_config.weight_block_size {size!r} is not supported, only [{BLOCK}, {BLOCK}]")


def _exclusions(quantization: Mapping[str, Any]) -> list[str]:
    entries: list[str] = []
    for field in ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules"):
        value = quantization.get(field)
        if isinstance(value, list):
            entries += [entry for entry in value if isinstance(entry, str)]
    return entries


def _exclusion_rule(entries: Iterable[str]) -> Callable[[str], bool]:
    """Does a list exclude this weight? `re:` is a regular expression, `*` a glob; else whole path segments, anywhere."""
    patterns: list[re.Pattern[str]] = []
    runs: list[str] = []
    for entry in entries:
        if entry.startswith("re:"):
            patterns.append(re.compile(entry[3:]))
        elif "*" in entry:
            patterns.append(re.compile(fnmatch.translate(entry)))
        else:
            runs.append(f".{entry}.")

    def is_excluded(weight_name: str) -> bool:
        module = weight_name.rpartition(".")[0]
        path = f".{module}."
        return any(run in path for run in runs) or any(pattern.match(module) for pattern in patterns)

    return is_excluded


def _is_projection(weight_name: str) -> bool:
    """Is it a linear layer that releases quantise when nothing excludes it? Routers, embeddings, norms and heads never are."""
    module, _, leaf = weight_name.rpartition(".")
    segment = module.rpartition(".")[2]
    return leaf == "weight" and ("_proj_" in segment or segment.endswith("_proj")) and segment != "eh_proj"


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1:,} more"
