"""Which named stack of kernels this machine can run, and its table. Vendor libraries are first imported in a child process,
since a broken build may take its process down. Knows no kernel itself.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Literal

import torch

from minserve.errors import EnvironmentFault, UsageError
from minserve.kernels import reference
from minserve.kernels.interface import Kernels

StackName = Literal["cpu", "torch-gpu", "hopper", "hopper-ep", "hopper-ep-torch"]

PROBE_SECONDS = 120.0
"""A first import may compile; longer than this and the library counts as broken."""


@dataclasses.dataclass(frozen=True, slots=True)
class Library:
    """One library that a stack needs."""

    module: str
    distributions: tuple[str, ...]
    """Names under which it is installed, ours first."""
    install: str


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What a probe found."""

    library: str
    usable: bool
    version: str | None
    detail: str
    """One sentence: that it works, or what is wrong and what to install."""


_TRITON = Library("triton", ("triton",), "pip install torch (its CUDA build brings triton)")
_FLASHINFER = Library("flashinfer", ("flashinfer-python",), "pip install 'minserve[hopper]'")
_DEEP_GEMM = Library("deep_gemm", ("sgl-deep-gemm", "tokenspeed-deepgemm", "deep-gemm"), "pip install 'minserve[hopper]'")
_DEEP_EP = Library("deep_ep", ("tokenspeed-deepep", "sgl-deep-ep", "deep-ep"), "pip install 'minserve[deepep]'")

STACKS: dict[StackName, tuple[Library, ...]] = {
    "cpu": (),
    "torch-gpu": (_TRITON,),
    "hopper": (_TRITON, _FLASHINFER, _DEEP_GEMM),
    "hopper-ep": (_TRITON, _FLASHINFER, _DEEP_GEMM, _DEEP_EP),
    "hopper-ep-torch": (_TRITON, _FLASHINFER, _DEEP_GEMM),
}
"""The named stacks and what each needs beside torch."""

_CHILD = """
import importlib, importlib.metadata, json, sys
module, names = sys.argv[1], sys.argv[2:]
report = {"version": None, "error": None}
for name in names:
    try:
        report["version"] = f"{name} {importlib.metadata.version(name)}"
        break
    except importlib.metadata.PackageNotFoundError:
        pass
try:
    importlib.import_module(module)
except BaseException as error:
    report["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
print("\\n" + json.dumps(report))
"""


def probe(libraries: Sequence[Library] = STACKS["hopper-ep"]) -> tuple[Verdict, ...]:
    """Imports each library in a child process of its own, all at once, and says how it went. Takes seconds."""
    children = [
        subprocess.Popen(
            [sys.executable, "-c", _CHILD, library.module, *library.distributions],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for library in libraries
    ]
    return tuple(_judge(library, child) for library, child in zip(libraries, children, strict=True))


def _judge(library: Library, child: subprocess.Popen[str]) -> Verdict:
    try:
        output, errors = child.communicate(timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return Verdict(library.module, False, None, f"its import did not end within {PROBE_SECONDS:.0f} s")
    lines = output.strip().splitlines()
    if child.returncode != 0 or not lines:
        last = errors.strip().splitlines()[-1:] or ["no message"]
        ended = f"signal {-child.returncode}" if child.returncode < 0 else f"exit code {child.returncode}"
        return Verdict(
            library.module, False, None, f"its import ended the process ({ended}: {last[0]}); reinstall: {library.install}"
        )
    report = json.loads(lines[-1])
    version, error = report["version"], report["error"]
    if error is None:
        return Verdict(library.module, True, version, "imports")
    if version is None:
        return Verdict(library.module, False, None, f"is not installed: {library.install}")
    return Verdict(library.module, False, version, f"does not import ({error}); reinstall: {library.install}")


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """A stack that this machine can run, and why it is this one."""

    name: StackName
    reason: str
    verdicts: tuple[Verdict, ...]


def choose(name: str, device: torch.device, verdicts: Sequence[Verdict] | None = None) -> Choice:
    """The stack of that name, or for "auto" the fastest that works here; probes what it needs to know unless told.

    Raises UsageError for an unknown name or one of the wrong device, EnvironmentFault when a needed library is unusable.
    """
    if name != "auto" and name not in STACKS:
        raise UsageError(f"--stack must be auto or one of {', '.join(STACKS)}, not {name!r}")
    if device.type == "cpu":
        if name not in ("auto", "cpu"):
            raise UsageError(f"--stack {name} needs a CUDA device; this one is the CPU (--device cpu)")
        return Choice("cpu", "the device is the CPU", ())
    if name == "auto":
        return _choose_for_gpu(device, verdicts)
    chosen = next(known for known in STACKS if known == name)
    if chosen.startswith("hopper") and torch.cuda.get_device_capability(device) != (9, 0):
        raise UsageError(f"--stack {name} needs a Hopper GPU, not {torch.cuda.get_device_name(device)}; use --stack torch-gpu")
    verdicts = _relevant(chosen, probe(STACKS[chosen]) if verdicts is None else verdicts)
    broken = [verdict for verdict in verdicts if not verdict.usable]
    if broken:
        raise EnvironmentFault(f"--stack {name}: " + "; ".join(f"{verdict.library} {verdict.detail}" for verdict in broken))
    return Choice(chosen, "asked for", tuple(verdicts))


def _choose_for_gpu(device: torch.device, verdicts: Sequence[Verdict] | None) -> Choice:
    hopper = torch.cuda.get_device_capability(device) == (9, 0)
    verdicts = tuple(probe(STACKS["hopper" if hopper else "torch-gpu"]) if verdicts is None else verdicts)
    if hopper and all(verdict.usable for verdict in _relevant("hopper", verdicts)):
        return Choice("hopper", "a Hopper GPU with every library", verdicts)
    missing = [f"{verdict.library} {verdict.detail}" for verdict in verdicts if not verdict.usable]
    if any(not verdict.usable for verdict in _relevant("torch-gpu", verdicts)):
        raise EnvironmentFault("no GPU stack works here: " + "; ".join(missing))
    return Choice("torch-gpu", "; ".join(missing) if hopper else "not a Hopper GPU", verdicts)


def _relevant(name: StackName, verdicts: Sequence[Verdict]) -> tuple[Verdict, ...]:
    needed = {library.module for library in STACKS[name]}
    return tuple(verdict for verdict in verdicts if verdict.library in needed)


def resolve(name: str, device: torch.device) -> Kernels:
    """The table of the named stack ("auto": the fastest that works here). Raises what `choose` raises."""
    return build(choose(name, device).name, device)


def build(name: StackName, device: torch.device) -> Kernels:
    """The table of a stack whose libraries are known to import. Imports them here, so that other stacks need none."""
    if name == "cpu":
        return reference.cpu()
    if name == "torch-gpu":
        from minserve.kernels.torch_gpu import torch_gpu

        return torch_gpu(device)
    from minserve.kernels.hopper import hopper

    return hopper(device, name)
