"""Root-mean-square norm, with and without the residual sum before it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from minserve.kernels.interface import Fp8Rows, Unsummed
from minserve.models.build_context import BuildContext
from minserve.models.destinations import Destination
from minserve.models.layers.linear import Linear, parameter


class RMSNorm(nn.Module):
    """x over its root mean square, times a learned weight: [..., size] -> [..., size]."""

    def __init__(self, name: str, size: int, eps: float, build: BuildContext) -> None:
        super().__init__()
        self.name = name
        self.eps = eps
        self.kernels = build.kernels
        self.weight = parameter((size,), build.dtype, build.device)

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor | Unsummed, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual), both new."""
        return self.kernels.add_rms_norm(x, residual, self.weight, self.eps)

    def read_by(self, reader: Linear, x: Tensor | Unsummed, residual: Tensor | None = None) -> tuple[Tensor | Fp8Rows, Tensor]:
        """(norm of x + residual as `reader`, which alone reads it, takes it; x + residual). Without a residual the sum is x."""
        if residual is None:
            assert isinstance(x, Tensor)
            return (reader.fp8_for(x) or self.kernels).rms_norm(x, self.weight, self.eps), x
        return (reader.fp8_for(residual) or self.kernels).add_rms_norm(x, residual, self.weight, self.eps)

    def destinations(self) -> Iterator[Destination]:
        yield Destination(f"{self.name}.weight", self.weight)
