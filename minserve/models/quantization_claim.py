"""What a checkpoint's config says of its weights' format: compared with the tensors, believed only where there are none.

Knows quantisation sections as releases write them, no file of weights and no model.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
from typing import Any

from minserve.errors import CheckpointError
from minserve.models.formats import LAYOUTS, Formats
from minserve.models.safetensors_header import StoredTensor
from minserve.models.tensor_names import canonical_name, some
from minserve.quantization import claimed_format

_EXCLUSION_FIELDS = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")


def formats_from_config(quantization: Mapping[str, Any] | None) -> Formats:
    """What the config alone promises, for random weights that have no file."""
    kind = None if quantization is None else claimed_format(quantization)
    if quantization is None or kind is None:
        return Formats(lambda _: "plain")
    is_excluded = _exclusion_rule(quantization)
    return Formats(lambda name: kind if _is_projection(name) and not is_excluded(name) else "plain")


def config_disagreements(
    tensors: Mapping[str, StoredTensor], formats: Formats, quantization: Mapping[str, Any] | None
) -> list[str]:
    """Sentences on where config and tensors differ; the tensors are believed. CheckpointError for what tensors cannot tell:
    another block size, a scheme that is not supported."""
    quantized = sorted(formats.quantized)
    if quantization is None:
        return [f"{_titled(quantized, formats)} although the config has no quantization_config"] if quantized else []
    claimed = claimed_format(quantization)
    notes = []
    others = [name for name in quantized if claimed is not None and formats.of(name) != claimed]
    if others and claimed is not None:
        notes.append(f"{_titled(others, formats)} although quantization_config says {LAYOUTS[claimed].title}")
    try:
        is_excluded = _exclusion_rule(quantization)
    except CheckpointError as error:
        return [f"{error}; not compared with the tensors"]
    excluded_but_quantized = [name for name in quantized if is_excluded(name)]
    if excluded_but_quantized:
        notes.append(f"{_titled(excluded_but_quantized, formats)} although quantization_config excludes it")
    unquantized = [
        name
        for name, tensor in tensors.items()
        if formats.of(name) == "plain" and len(tensor.shape) == 2 and _is_projection(name) and not is_excluded(name)
    ]
    if unquantized:
        notes.append(f"{some(unquantized)}: stored plain although quantization_config does not exclude it")
    return notes


def _titled(names: list[str], formats: Formats) -> str:
    return f"{some(names)}: {LAYOUTS[formats.of(names[0])].title}"


def _exclusion_rule(quantization: Mapping[str, Any]) -> Callable[[str], bool]:
    """Does a section exclude this weight? `re:` is a regular expression, `*` a glob; else whole path segments, anywhere.

    CheckpointError for an expression that is not valid."""
    patterns: list[re.Pattern[str]] = []
    runs: list[str] = []
    lists = [value for field in _EXCLUSION_FIELDS if isinstance(value := quantization.get(field), list)]
    for entry in (entry for entries in lists for entry in entries if isinstance(entry, str)):
        if not entry.startswith("re:") and "*" not in entry:
            runs.append(f".{canonical_name(entry)}.")
            continue
        try:
            patterns.append(re.compile(entry[3:] if entry.startswith("re:") else fnmatch.translate(canonical_name(entry))))
        except re.error as error:
            raise CheckpointError(f"quantization_config excludes modules by a pattern that is not valid: {error}") from error

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
