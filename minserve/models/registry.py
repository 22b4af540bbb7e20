"""Which architectures there are. A model that differs from another in nothing but its name is one more row here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from minserve.errors import CheckpointError
from minserve.kernels.interface import Kernels
from minserve.models import deepseek_v3, qwen_moe
from minserve.models.build_context import BuildContext
from minserve.models.config_reader import Fields, read_fields
from minserve.models.decoder import Decoder
from minserve.models.formats import Formats
from minserve.models.layers.dispatcher import Dispatcher, LocalDispatcher
from minserve.models.layers.placement import ExpertPlacement
from minserve.models.layers.streams import Lanes, SharedExpertPolicy
from minserve.models.model_config import ModelConfig


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One kind of checkpoint: what config.json calls it, how its fields are read, how its model is built."""

    architecture: str
    model_type: str
    parse: Callable[[Fields, str, Path], ModelConfig]
    build: Callable[[ModelConfig, BuildContext], Decoder]


ROWS = (
    Row("DeepseekV2ForCausalLM", "deepseek_v2", deepseek_v3.parse_config, deepseek_v3.build),
    Row("DeepseekV3ForCausalLM", "deepseek_v3", deepseek_v3.parse_config, deepseek_v3.build),
    Row("DeepseekV3ForCausalLM", "kimi_k2", deepseek_v3.parse_config, deepseek_v3.build),
    # K2.5's wrapper around a text model: its text_config may or may not say which of the names is the text model's.
    Row("KimiK25ForConditionalGeneration", "kimi_k2", deepseek_v3.parse_config, deepseek_v3.build),
    Row("KimiK25ForConditionalGeneration", "kimi_k25", deepseek_v3.parse_config, deepseek_v3.build),
    Row("DeepseekV3ForCausalLM", "kimi_k25", deepseek_v3.parse_config, deepseek_v3.build),
    Row("Qwen2MoeForCausalLM", "qwen2_moe", qwen_moe.parse_config, qwen_moe.build),
    Row("Qwen3MoeForCausalLM", "qwen3_moe", qwen_moe.parse_config, qwen_moe.build),
)


def load_model_config(model_dir: Path) -> ModelConfig:
    """Reads config.json and what stands beside it; CheckpointError names the field that is missing, wrong or not supported."""
    fields = read_fields(model_dir)
    names = fields.get("architectures")
    named = [row for row in ROWS if isinstance(names, list) and row.architecture in names]
    if not named:
        supported = ", ".join(dict.fromkeys(row.architecture for row in ROWS))
        raise CheckpointError(f"{fields.where}: architectures is {json.dumps(names)}; supported: {supported}")
    model_type = fields.text("model_type")
    for row in named:
        if row.model_type == model_type:
            return row.parse(fields, row.architecture, model_dir)
    raise fields.unsupported("model_type", " or ".join(f'"{row.model_type}"' for row in named))


def build_model(
    config: ModelConfig,
    formats: Formats,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    *,
    dispatcher: Dispatcher | None = None,
    placement: ExpertPlacement | None = None,
    placements: Mapping[int, ExpertPlacement] | None = None,
    shared_expert: SharedExpertPolicy = "serial",
    lanes: Lanes | None = None,
) -> Decoder:
    """The model with unwritten parameters. By default all experts are local, each in the slot of its own number."""
    row = next(row for row in ROWS if (row.architecture, row.model_type) == (config.architecture, config.model_type))
    fused = shared_expert == "fused"
    model = row.build(
        config, BuildContext(formats, kernels, dtype, device, dispatcher or LocalDispatcher(), placement, placements or {}, fused)
    )
    model.shared_expert, model.lanes = shared_expert, lanes
    return model
