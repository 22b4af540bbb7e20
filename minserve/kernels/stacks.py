"""Which named stack of kernels this machine can run, and its table. Knows no kernel itself."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Sequence
from typing import Literal

import torch

from minserve import library_probe
from minserve.errors import EnvironmentFault, UsageError
from minserve.kernels import reference
from minserve.kernels.expert_choices import ExpertChoices
from minserve.kernels.interface import Kernels
from minserve.library_probe import DEEP_EP, DEEP_GEMM, FLASHINFER, TRITON, Library, Verdict
from minserve.remembered import Remembered

StackName = Literal["cpu", "torch-gpu", "deterministic", "hopper", "hopper-ep", "hopper-ep-torch"]
DispatcherName = Literal["auto", "deepep", "torch", "local"]

PROBE_SECONDS = 120.0
"""A first import may compile; longer than this and the library counts as broken."""
_IMPORTS = "library-imports"

STACKS: dict[StackName, tuple[Library, ...]] = {
    "cpu": (),
    "torch-gpu": (TRITON,),
    "deterministic": (TRITON,),
    "hopper": (TRITON, FLASHINFER, DEEP_GEMM),
    "hopper-ep": (TRITON, FLASHINFER, DEEP_GEMM, DEEP_EP),
    "hopper-ep-torch": (TRITON, FLASHINFER, DEEP_GEMM),
}
"""The named stacks and what each needs beside torch."""


def probe(libraries: Sequence[Library] = STACKS["hopper-ep"], remembered: Remembered | None = None) -> tuple[Verdict, ...]:
    """A verdict on each, from a child process that imports it, or from an earlier start that imported the same build.

    A remembered verdict is used up: `open_stack` keeps it again once this process, too, has imported the library. So one that
    has come to take its process down does so once.
    """
    known: dict[str, Verdict] = {}
    for library in libraries if remembered is not None else ():
        key = library_probe.build_key(library)
        if remembered is not None and (kept := remembered.recall(_IMPORTS, key)) is not None:
            remembered.forget(_IMPORTS, key)
            known[library.module] = Verdict(**kept)
    fresh = library_probe.probe([library for library in libraries if library.module not in known], seconds=PROBE_SECONDS)
    known |= {verdict.library: verdict for verdict in fresh}
    return tuple(known[library.module] for library in libraries)


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """A stack that this machine can run, and why it is this one."""

    name: StackName
    reason: str
    verdicts: tuple[Verdict, ...]


def choose(
    name: str,
    device: torch.device,
    verdicts: Sequence[Verdict] | None = None,
    remembered: Remembered | None = None,
    dispatcher: DispatcherName = "local",
) -> Choice:
    """The stack of that name, or for "auto" the fastest that works here; probes what it needs to know unless told.

    `dispatcher`: how tokens reach experts of other ranks; local: there are none. Raises UsageError for an unknown name, one of
    the wrong device or of another dispatcher, EnvironmentFault when a needed library is unusable.
    """
    if name != "auto" and name not in STACKS:
        raise UsageError(f"--stack must be auto or one of {', '.join(STACKS)}, not {name!r}")
    if dispatcher == "deepep" and (device.type == "cpu" or name not in ("auto", "hopper-ep")):
        where = "a CPU (--device cpu)" if device.type == "cpu" else f"--stack {name}"
        raise UsageError(f"--moe-dispatcher deepep is no choice for {where}; torch is")
    if dispatcher == "torch" and name == "hopper-ep":
        raise UsageError("--stack hopper-ep is DeepEP's; with --moe-dispatcher torch it is hopper-ep-torch")
    if device.type == "cpu":
        if name not in ("auto", "cpu"):
            raise UsageError(f"--stack {name} needs a CUDA device; this one is the CPU (--device cpu)")
        return Choice("cpu", "the device is the CPU", ())
    if name == "auto":
        alone = _choose_for_gpu(device, verdicts, remembered)
        return alone if dispatcher == "local" else _choose_for_ranks(alone, dispatcher, remembered)
    chosen = next(known for known in STACKS if known == name)
    if chosen.startswith("hopper") and torch.cuda.get_device_capability(device) != (9, 0):
        raise UsageError(f"--stack {name} needs a Hopper GPU, not {torch.cuda.get_device_name(device)}; use --stack torch-gpu")
    verdicts = _relevant(chosen, probe(STACKS[chosen], remembered) if verdicts is None else verdicts)
    broken = [verdict for verdict in verdicts if not verdict.usable]
    if broken:
        raise EnvironmentFault(f"--stack {name}: " + "; ".join(f"{verdict.library} {verdict.detail}" for verdict in broken))
    return Choice(chosen, "asked for", tuple(verdicts))


def _choose_for_gpu(device: torch.device, verdicts: Sequence[Verdict] | None, remembered: Remembered | None) -> Choice:
    hopper = torch.cuda.get_device_capability(device) == (9, 0)
    verdicts = tuple(probe(STACKS["hopper" if hopper else "torch-gpu"], remembered) if verdicts is None else verdicts)
    if hopper and all(verdict.usable for verdict in _relevant("hopper", verdicts)):
        return Choice("hopper", "a Hopper GPU with every library", verdicts)
    missing = [f"{verdict.library} {verdict.detail}" for verdict in verdicts if not verdict.usable]
    if any(not verdict.usable for verdict in _relevant("torch-gpu", verdicts)):
        raise EnvironmentFault("no GPU stack works here: " + "; ".join(missing))
    return Choice("torch-gpu", "; ".join(missing) if hopper else "not a Hopper GPU", verdicts)


def _choose_for_ranks(alone: Choice, dispatcher: DispatcherName, remembered: Remembered | None) -> Choice:
    """The stack of a rank on a GPU where an engine alone would take that one."""
    if alone.name != "hopper":
        if dispatcher == "deepep":
            raise EnvironmentFault(f"--moe-dispatcher deepep needs what the hopper stack needs: {alone.reason}")
        return alone
    if dispatcher == "torch":
        return Choice("hopper-ep-torch", "--moe-dispatcher torch", alone.verdicts)
    known = [verdict for verdict in alone.verdicts if verdict.library == DEEP_EP.module]
    (verdict,) = known or probe([DEEP_EP], remembered)
    found = (*(other for other in alone.verdicts if other is not verdict), verdict)
    if verdict.usable:
        return Choice("hopper-ep", "a Hopper GPU with every library", found)
    if dispatcher == "deepep":
        raise EnvironmentFault(f"--moe-dispatcher deepep: {verdict.library} {verdict.detail}")
    return Choice("hopper-ep-torch", f"{verdict.library} {verdict.detail}", found)


def _relevant(name: StackName, verdicts: Sequence[Verdict]) -> tuple[Verdict, ...]:
    needed = {library.module for library in STACKS[name]}
    return tuple(verdict for verdict in verdicts if verdict.library in needed)


def open_stack(
    name: str, device: torch.device, remembered: Remembered, dispatcher: DispatcherName = "local", *, whole_gpu: bool = True
) -> tuple[Choice, Kernels]:
    """`choose`, then `build`; what imports without harm is remembered. Raises what `choose` raises."""
    choice = choose(name, device, remembered=remembered, dispatcher=dispatcher)
    try:
        kernels = build(choice.name, device, remembered, whole_gpu=whole_gpu)
    except (ImportError, OSError, AttributeError) as error:
        raise EnvironmentFault(f"the libraries of the {choice.name} stack do not import together: {error}") from error
    for library in STACKS[choice.name]:
        verdict = next(verdict for verdict in choice.verdicts if verdict.library == library.module)
        remembered.keep(_IMPORTS, library_probe.build_key(library), dataclasses.asdict(verdict))
    return choice, kernels


def resolve(name: str, device: torch.device) -> Kernels:
    """The table of the named stack ("auto": the fastest that works here). Raises what `choose` raises."""
    return build(choose(name, device).name, device)


def build(name: StackName, device: torch.device, remembered: Remembered | None = None, *, whole_gpu: bool = True) -> Kernels:
    """The table of a stack whose libraries are known to import. Imports them here, so that other stacks need none.

    whole_gpu: no other rank has the same device.
    """
    if name == "cpu":
        return reference.cpu()
    choices = ExpertChoices(torch.cuda.get_device_name(device), remembered)
    threading.Thread(target=_hash_triton, daemon=True).start()
    if name in ("torch-gpu", "deterministic"):
        from minserve.kernels.torch_gpu import deterministic, torch_gpu

        return torch_gpu(device, choices) if name == "torch-gpu" else deterministic(device)
    from minserve.kernels.hopper import hopper

    return hopper(device, name, choices, whole_gpu=whole_gpu)


def _hash_triton() -> None:
    """Triton's first compilation, or look into its cache, hashes its whole installation: half a second that may pass while
    weights are loaded."""
    with contextlib.suppress(ImportError, AttributeError, OSError):
        from triton.runtime.cache import triton_key

        triton_key()
