"""A model of a few matrices that declares destinations as real ones do, and the files to fill it from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from minserve.models.destinations import Destination
from minserve.models.formats import Formats, blocks
from minserve.models.quantization_claim import formats_from_config

VOCAB, HIDDEN, WIDTH, EXPERTS, LAYERS = 32, 16, 24, 3, 2


def _parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.full(shape, float("nan")).to(dtype))


class ToyModel(nn.Module):
    """Embedding, one norm, per layer a router and stacked experts, a head. FP8 weights are widened, or kept with their scales."""

    def __init__(
        self,
        formats: Formats | None = None,
        *,
        tied: bool = False,
        dtype: torch.dtype = torch.float32,
        keep_fp8: bool = False,
        hidden: int = HIDDEN,
        width: int = WIDTH,
    ) -> None:
        super().__init__()
        self.formats = formats or formats_from_config(None)
        self.tied, self.width, self.keep_fp8 = tied, width, keep_fp8
        weight_dtype = torch.float8_e4m3fn if keep_fp8 else dtype
        self.embedding = _parameter(VOCAB, hidden, dtype=dtype)
        self.norm = _parameter(hidden, dtype=dtype)
        self.head = self.embedding if tied else _parameter(VOCAB, hidden, dtype=dtype)
        self.gates = nn.ParameterList(_parameter(EXPERTS, hidden) for _ in range(LAYERS))
        self.gate_biases = nn.ParameterList(_parameter(EXPERTS) for _ in range(LAYERS))
        self.w13 = nn.ParameterList(_parameter(EXPERTS, 2 * width, hidden, dtype=weight_dtype) for _ in range(LAYERS))
        self.w2 = nn.ParameterList(_parameter(EXPERTS, hidden, width, dtype=weight_dtype) for _ in range(LAYERS))
        if keep_fp8:
            self.w13_scale = nn.ParameterList(_parameter(EXPERTS, 2 * blocks(width), blocks(hidden)) for _ in range(LAYERS))
            self.w2_scale = nn.ParameterList(_parameter(EXPERTS, blocks(hidden), blocks(width)) for _ in range(LAYERS))
        self.register_buffer("derived", torch.zeros(7), persistent=False)

    def destinations(self) -> Iterator[Destination]:
        yield Destination("model.embed_tokens.weight", self.embedding)
        yield Destination("model.norm.weight", self.norm)
        if not self.tied:
            yield Destination("lm_head.weight", self.head)
        for layer in range(LAYERS):
            prefix = f"model.layers.{layer}.mlp"
            yield Destination(f"{prefix}.gate.weight", self.gates[layer])
            yield Destination(f"{prefix}.gate.e_score_correction_bias", self.gate_biases[layer])
            for expert in range(EXPERTS):
                name = f"{prefix}.experts.{expert}"
                yield self._weight(f"{name}.gate_proj.weight", self.w13[layer][expert, : self.width])
                yield self._weight(f"{name}.up_proj.weight", self.w13[layer][expert, self.width :])
                yield self._weight(f"{name}.down_proj.weight", self.w2[layer][expert])
                if self.keep_fp8:
                    half = blocks(self.width)
                    yield Destination(f"{name}.gate_proj.weight_scale_inv", self.w13_scale[layer][expert, :half])
                    yield Destination(f"{name}.up_proj.weight_scale_inv", self.w13_scale[layer][expert, half:])
                    yield Destination(f"{name}.down_proj.weight_scale_inv", self.w2_scale[layer][expert])

    def _weight(self, name: str, target: Tensor) -> Destination:
        return Destination(name, target, "plain" if self.keep_fp8 else self.formats.of(name))

    def ignored(self, name: str) -> str | None:
        segments = name.split(".")
        if segments[:2] == ["model", "layers"] and int(segments[2]) >= LAYERS:
            return "multi-token prediction layer"
        if segments[-1] == "inv_freq":
            return "rotary frequencies are computed"
        if name == "lm_head.weight" and self.tied:
            return "tied to the embedding"
        return None


def toy_tensors(
    seed: int = 0, dtype: torch.dtype = torch.bfloat16, *, head: bool = True, hidden: int = HIDDEN, width: int = WIDTH
) -> dict[str, Tensor]:
    """A checkpoint's tensors for `ToyModel`, the correction bias in fp32."""
    torch.manual_seed(seed)
    tensors = {"model.embed_tokens.weight": torch.randn(VOCAB, hidden), "model.norm.weight": torch.randn(hidden)}
    if head:
        tensors["lm_head.weight"] = torch.randn(VOCAB, hidden)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}.mlp"
        tensors[f"{prefix}.gate.weight"] = torch.randn(EXPERTS, hidden)
        for expert in range(EXPERTS):
            tensors[f"{prefix}.experts.{expert}.gate_proj.weight"] = torch.randn(width, hidden)
            tensors[f"{prefix}.experts.{expert}.up_proj.weight"] = torch.randn(width, hidden)
            tensors[f"{prefix}.experts.{expert}.down_proj.weight"] = torch.randn(hidden, width)
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    for layer in range(LAYERS):
        tensors[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"] = torch.randn(EXPERTS)
    return tensors


def write_checkpoint(
    directory: Path, tensors: Mapping[str, Tensor], shards: int = 2, config: Mapping[str, object] | None = None
) -> Path:
    """Writes the tensors in turn to `shards` files with an index, or to model.safetensors when `shards` is 0."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config or {"model_type": "toy"}))
    if not shards:
        save_file(dict(tensors), directory / "model.safetensors")
        return directory
    files: dict[str, dict[str, Tensor]] = {}
    for index, name in enumerate(sorted(tensors)):
        files.setdefault(f"model-{index % shards + 1:05}-of-{shards:05}.safetensors", {})[name] = tensors[name]
    for file, content in files.items():
        save_file(content, directory / file)
    write_index(directory, {name: file for file, content in files.items() for name in content})
    return directory


def write_index(directory: Path, weight_map: Mapping[str, str], total_size: int | None = None) -> None:
    body = {"metadata": {} if total_size is None else {"total_size": total_size}, "weight_map": dict(weight_map)}
    (directory / "model.safetensors.index.json").write_text(json.dumps(body))


def read_index(directory: Path) -> dict[str, str]:
    weight_map: dict[str, str] = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    return weight_map


def assert_loaded(model: ToyModel, tensors: Mapping[str, Tensor]) -> None:
    """Each destination of a plain checkpoint holds its tensor's value, cast."""
    for destination in model.destinations():
        assert torch.equal(destination.target, tensors[destination.name].to(destination.target.dtype)), destination.name
