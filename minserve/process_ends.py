"""How processes of the tree end: at SIGTERM like at an exception, and with their parent. Knows none of them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import types

from minserve.errors import ExitCode

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_PR_SET_PDEATHSIG = 1
"""From Linux's <sys/prctl.h>."""


def die_with(parent: int) -> None:
    """From now on the kernel kills this process when its parent dies, an engine from before its first instruction on."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel was asked
        os._exit(ExitCode.RANK_DIED)


def leave_on_sigterm() -> None:
    """Before and after serving there is nothing to drain: SIGTERM leaves like an exception, through what ends the engine."""

    def leave(_number: int, _frame: types.FrameType | None) -> None:
        raise SystemExit(ExitCode.OK)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, leave)
