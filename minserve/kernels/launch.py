"""How our Triton kernels follow one another on a stream: programmatic dependent launch.

The rules that make an early start safe: every program of a kernel launched with `dependent_launch` calls `follow`, early
returns included, and calls `lead` at any time. Before `follow` it touches only what no kernel of the step writes: weights, and
the step's own inputs (positions, lengths, pages), which lie ready before the step's first kernel, an ordinary launch; what a
kernel wrote that its predecessor followed before it led; and what programs of its predecessor have announced (`announce`,
`wait_for`). Programs that wait for such have `outlast` in place of `follow`. A program that writes nothing, and has touched only
what it may before `follow`, may end without either, if another of its launch always follows. A kernel then starts while its
predecessor drains, and what it does early overlaps with it. Knows no kernel.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
from __future__ import annotations

import functools
from typing import TypeVar

import torch
import triton
import triton.language as tl

_Function = TypeVar("_Function")

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Triton's interpreter runs the kernels in numpy, on tensors of the CPU, and knows no PTX."""
_INTERPRETED_PROCESSORS = 132
_INTERPRETED_SHARED = 228 << 10
"""An H200's, so that work is cut there as it is on one."""


def cdiv(size: int, block: int) -> int:
    """Blocks that hold so many. Triton's own function of that name takes the host microseconds a call, and this one a tenth."""
    return -(-size // block)


def next_power_of_2(size: int) -> int:
    """The smallest power of two that is no smaller; size is positive. Triton's own, likewise."""
    return 1 << (size - 1).bit_length()


@functools.cache
def _supported(index: int) -> bool:
    return torch.cuda.get_device_capability(index) >= (9, 0)


@functools.cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors to keep busy."""
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes that the programs of one streaming multiprocessor share out among them."""
    if device.type != "cuda":
        return _INTERPRETED_SHARED
    size: int = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
    return size


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Launch options of a kernel that has a `dependent` parameter: both on where the GPU knows the launch attribute."""
    if device.type != "cuda":
        return {"dependent": False}
    on = _supported(device.index or 0)
    return {"dependent": on, "launch_pdl": on}


def keyed(function: _Function) -> _Function:
    """Decorates a jit function that reads a global and is called by kernels: gives it its key in the compiler's cache at once.

    Triton 3.6 leaves the globals of a function without a key out of its caller's key. A kernel's key would depend on which
    kernel of the process came first, and a start could compile what an earlier one has compiled.
    """
    _ = getattr(function, "cache_key", None)  # the interpreter's functions have none
    return function


@triton.jit
def follow(dependent: tl.constexpr):
    """Waits until the kernel before this one has ended and its writes are visible."""
    if dependent:
        tl.extra.cuda.gdc_wait()


@triton.jit
def lead(dependent: tl.constexpr):
    """Lets the next kernel's programs start once all of this kernel's programs have said so or ended."""
    if dependent:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def announce(count):
    """Adds one to count: whoever sees it with `wait_for` sees what this program has written."""
    tl.debug_barrier()
    tl.atomic_add(count, 1, sem="release", scope="gpu")


@triton.jit
def wait_for(count, announced):
    """Waits until so many programs of the kernel before this one have announced themselves at count, which was zero before.

    It ends: a kernel starts early only once all programs of the one before it have led, so they run by now or have ended.
    """
    while tl.atomic_add(count, 0, sem="acquire", scope="gpu") < announced:
        pass


@triton.jit
def outlast(program, dependent: tl.constexpr):
    """Before each end of a program that did not `follow`: lets the first of them end no sooner than the kernel before this one.

    A kernel has ended when all of its programs have, so one that waits keeps their order; the others leave room for more.
    """
    if program == 0:
        follow(dependent)


@keyed
@triton.jit
def fetch_ahead(pointers):
    """Asks for the 128-byte lines at these addresses to be brought to the second-level cache, and waits for nothing."""
    if not _INTERPRETED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )
