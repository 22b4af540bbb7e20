"""What a load did, on one page. Knows numbers and sentences only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from minserve.models.formats import Format


@dataclasses.dataclass(frozen=True, slots=True)
class Skipped:
    """Tensors that were left on disk for one reason."""

    tensors: int
    bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class LoadReport:
    """The proof of load in numbers; `str(report)` is the page for a person."""

    directory: Path | None
    """None for random weights."""
    files: int = 0
    tensors: int = 0
    """Checkpoint tensors read, scales included."""
    bytes_read: int = 0
    bytes_written: int = 0
    """Size of the parameters, each byte written exactly once."""
    formats: Mapping[Format, int] = dataclasses.field(default_factory=dict)
    """Read weights by storage format."""
    dequantized: int = 0
    """Weights widened at load."""
    skipped: Mapping[str, Skipped] = dataclasses.field(default_factory=dict)
    """By reason."""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def gb_per_second(self) -> float:
        return self.bytes_read / 1e9 / self.seconds if self.seconds > 0 else 0.0

    def __str__(self) -> str:
        if self.directory is None:
            lines = [f"weights   random, {gigabytes(self.bytes_written)} in {self.seconds:.1f} s"]
        else:
            kinds = ", ".join(f"{count:,} {name}" for name, count in sorted(self.formats.items()))
            widened = f"; {self.dequantized:,} dequantised at load" if self.dequantized else ""
            files = f"{self.files:,} file{'' if self.files == 1 else 's'}"
            lines = [
                f"weights   {self.directory}",
                f"read      {self.tensors:,} tensors, {gigabytes(self.bytes_read)} from {files} "
                f"in {self.seconds:.1f} s ({self.gb_per_second:.2f} GB/s)",
                f"formats   {kinds}{widened}",
                f"written   {gigabytes(self.bytes_written)} of parameters, each byte exactly once",
            ]
        for reason, skipped in sorted(self.skipped.items()):
            lines.append(f"skipped   {skipped.tensors:,} tensors, {gigabytes(skipped.bytes)}: {reason}")
        lines += [f"note      {note}" for note in self.notes]
        return "\n".join(lines)


def gigabytes(count: int) -> str:
    """A size for a person: `31.2 GB`, `4.1 MB`, `17 bytes`."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
