"""How releases spell the names of tensors and modules, and the one spelling used here. Knows names only."""

from __future__ import annotations

from collections.abc import Iterable

_MAX_NAMED = 10
_WRAPPER_PREFIXES = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("language_model.", "model."),
)
"""First match wins. The last is for checkpoints that say `language_model.layers.`."""
_WRAPPERS = ("language_model", "model.language_model")
"""What names with one of these prefixes begin with: most names are told apart by one look."""

OTHER_MODALITIES = (
    "vision_tower.", "vision_model.", "visual.", "mm_projector.", "multi_modal_projector.", "model.visual.",
    "model.vision_tower.", "model.vision_model.", "model.mm_projector.", "model.multi_modal_projector.",
)  # fmt: skip
"""Canonical prefixes of tensors that a text server has no use for."""


def canonical_name(name: str) -> str:
    """The name without a multimodal wrapper's prefix; whole path segments only. Works for module names too."""
    if not name.startswith(_WRAPPERS):
        return name
    for prefix, replacement in _WRAPPER_PREFIXES:
        if f"{name}.".startswith(prefix):
            return (replacement + f"{name}."[len(prefix) :]).removesuffix(".")
    return name


def named(items: Iterable[object]) -> str:
    """Up to ten of them for an error message, and how many more there are."""
    texts = [str(item) for item in items]
    more = len(texts) - _MAX_NAMED
    return "; ".join(texts[:_MAX_NAMED]) + (f"; and {more:,} more" if more > 0 else "")


def some(names: list[str]) -> str:
    """One of them for a sentence, and how many more there are."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1:,} more"
