"""The way from a checkpoint's folder to its `ModelConfig`."""

from __future__ import annotations

from pathlib import Path

from minserve.models.config_reader import read_fields
from minserve.models.config_types import GqaConfig, MlaConfig, ModelConfig, MoeConfig
from minserve.models.registry import find_row

__all__ = ["GqaConfig", "MlaConfig", "ModelConfig", "MoeConfig", "load_model_config"]


def load_model_config(model_dir: Path) -> ModelConfig:
    """Reads config.json and what stands beside it; CheckpointError names the field that is missing, wrong or not supported."""
    fields = read_fields(model_dir)
    row = find_row(fields)
    return row.parse(fields, row.architecture, model_dir)
