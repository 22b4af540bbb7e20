"""Two lanes of one forward: routed experts on the main stream, the shared expert on the alt stream.

The order of recording is the whole point. In a CUDA graph a node with several parents goes on in the lane of its
first-recorded parent, so a side block recorded before the main one drags the main chain onto a new lane at every layer
(61 streams at replay for 61 layers). Hence the lane law: fork early with an event only, record the main block, record the
side block right before its join, join exactly once, never fork for nothing.

Knows nothing of experts; `side_by_side` takes two functions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol, TypeVar

import torch

from minserve.capture_flags import CaptureFlags

SharedExpertPolicy = Literal["fused", "overlap", "serial"]
Result = TypeVar("Result")
SideResult = TypeVar("SideResult")


class Lanes(Protocol):
    """A main stream and one alt stream. CUDA's are `CudaLanes`; a recording double drives the same law without a GPU."""

    def fork(self) -> Any:
        """Marks this point of the main stream; launches nothing."""

    def alt(self, fork: Any) -> contextlib.AbstractContextManager[None]:
        """Inside, work goes to the alt stream, after the fork's point."""

    def join(self) -> None:
        """The main stream waits for all that the alt stream holds."""


class CudaLanes:
    """One alt stream for the whole model, beside whatever stream is current.

    One alt stream, not one a layer: the next fork orders the reuse of blocks that were allocated on it. So it does for a side
    result that the main stream goes on to read after the join, as long as it reads before it forks again: only a side block
    behind that fork can be given the result's memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._alt = torch.cuda.Stream(device)

    def fork(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._alt.device))
        return event

    @contextlib.contextmanager
    def alt(self, fork: torch.cuda.Event) -> Iterator[None]:
        self._alt.wait_event(fork)
        with torch.cuda.stream(self._alt):
            yield

    def join(self) -> None:
        torch.cuda.current_stream(self._alt.device).wait_stream(self._alt)


def plan_streams(policy: SharedExpertPolicy, lanes: Lanes | None, flags: CaptureFlags, num_tokens: int) -> Lanes | None:
    """The lanes of one forward's MoE layers, None for serial ones: overlap where it was asked for, a capture allows it and
    there is work to overlap.

    Eager steps are host-bound, so a second stream would only add launches there. Experts that write over their input
    would race with the alt stream's read, so in-place permission and overlap exclude each other.
    """
    if policy != "overlap" or lanes is None or not flags.allow_overlap or num_tokens == 0:
        return None
    if flags.allow_inplace:
        raise ValueError("overlap refuses in-place experts: they write over the input that the shared expert reads")
    return lanes


def side_by_side(main: Callable[[], Result], side: Callable[[], SideResult], lanes: Lanes | None) -> tuple[Result, SideResult]:
    """Both results. Overlapped, `main` is recorded first on the current stream and `side` on the alt stream before the join.

    The functions, and with them every tensor that they close over, stay referenced until after the join: a block freed
    earlier could be handed out on the main stream while the alt stream still reads it. An exception in `main` leaves nothing
    forked; one in `side` is joined before it goes on, so that a capture can end.
    """
    if lanes is None:
        first = main()
        return first, side()
    fork = lanes.fork()
    first = main()
    try:
        with lanes.alt(fork):
            second = side()
    finally:
        lanes.join()
    return first, second
