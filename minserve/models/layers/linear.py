"""Linear layers: several checkpoint matrices stacked into one product. Knows where each one's rows and scales go."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from minserve.kernels.interface import Fp8RowKernels, Fp8Rows, LinearWeight, PartialSums
from minserve.models.build_context import BuildContext
from minserve.models.destinations import Destination, weight_destinations
from minserve.models.formats import BLOCK, blocks


def parameter(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Memory for a weight that the loader fills; inference only."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One checkpoint matrix: its module's name (`model.layers.0.self_attn.q_proj`) and its rows."""

    name: str
    rows: int

    @property
    def weight(self) -> str:
        return f"{self.name}.weight"


class Linear(nn.Module):
    """x [..., in_features] -> [..., sum of the parts' rows], the parts side by side in their order.

    The weight stays FP8 when all parts are FP8 and none but the last ends inside a block; otherwise, or with `widen`, it is
    plain in memory.
    """

    def __init__(
        self, parts: Sequence[Part], in_features: int, build: BuildContext, *, bias: bool = False, widen: bool = False
    ) -> None:
        super().__init__()
        self.parts = tuple(parts)
        self.kernels = build.kernels
        self.formats = build.formats
        rows = sum(part.rows for part in self.parts)
        aligned = all(part.rows % BLOCK == 0 for part in self.parts[:-1])
        keep = aligned and not widen and build.kept_format([part.weight for part in self.parts]) == "fp8_block"
        self.weight = parameter((rows, in_features), torch.float8_e4m3fn if keep else build.dtype, build.device)
        self.scale = parameter((blocks(rows), blocks(in_features)), torch.float32, build.device) if keep else None
        self.bias = parameter((rows,), build.dtype, build.device) if bias else None

    @property
    def by_parts(self) -> bool:
        """Whether it has a sum that it may leave to a norm."""
        return False

    def forward(self, x: Tensor | Fp8Rows) -> Tensor:
        weight = LinearWeight(self.weight, self.scale)
        if isinstance(x, Fp8Rows):
            assert self.kernels.fp8_rows is not None
            return self.kernels.fp8_rows.linear(x, weight, self.bias)
        return self.kernels.linear(x, weight, self.bias)

    def fp8_for(self, x: Tensor) -> Fp8RowKernels | None:
        """What can hand this layer its rows in FP8, which it would quantise otherwise; None where it takes them as they are.

        The rows are as many as x has, and of its type.
        """
        fp8 = self.kernels.fp8_rows
        if fp8 is None or not fp8.takes(x.shape[0], x.dtype, LinearWeight(self.weight, self.scale), self.by_parts):
            return None
        return fp8

    def split(self, output: Tensor) -> tuple[Tensor, ...]:
        """The parts' own columns of an output, as views."""
        return torch.split(output, [part.rows for part in self.parts], dim=-1)

    def destinations(self) -> Iterator[Destination]:
        start = 0
        for part in self.parts:
            end = start + part.rows
            scale = None if self.scale is None else self.scale[start // BLOCK : blocks(end)]
            yield from weight_destinations(part.weight, self.weight[start:end], scale, self.formats)
            if self.bias is not None:
                yield Destination(f"{part.name}.bias", self.bias[start:end])
            start = end


class OutputLinear(Linear):
    """One matrix whose product a norm alone reads, after adding it to the residual stream: it may be left to it in parts."""

    @property
    def by_parts(self) -> bool:
        return self.kernels.linear_parts is not None and self.bias is None

    def unsummed(self, x: Tensor | Fp8Rows) -> Tensor | PartialSums:
        if self.by_parts:
            assert self.kernels.linear_parts is not None
            return self.kernels.linear_parts(x, LinearWeight(self.weight, self.scale))
        output: Tensor = self(x)
        return output


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)): [T, H] -> [T, H]."""

    def __init__(self, prefix: str, hidden_size: int, intermediate_size: int, build: BuildContext) -> None:
        super().__init__()
        self.kernels = build.kernels
        gate, up = Part(f"{prefix}.gate_proj", intermediate_size), Part(f"{prefix}.up_proj", intermediate_size)
        self.gate_up = Linear([gate, up], hidden_size, build)
        self.down = Linear([Part(f"{prefix}.down_proj", hidden_size)], intermediate_size, build)

    def forward(self, x: Tensor | Fp8Rows) -> Tensor:
        hidden = self.gate_up(x)
        fp8 = self.down.fp8_for(hidden)
        output: Tensor = self.down((fp8 or self.kernels).silu_and_mul(hidden))
        return output
