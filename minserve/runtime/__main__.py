"""Where an engine process begins: opens its GPU, imports the engine, and where that cannot be, says so to the front.

Knows no engine itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import threading
from typing import NoReturn

from minserve.errors import DoesNotFit, EnvironmentFault, ServerError
from minserve.messages import Fatal
from minserve.runtime.connection import FrontConnection, FrontGone
from minserve.seat import own_seat

_NO_ROOM = ("failed to map", "cannot allocate", "out of memory")
"""How the loader of shared libraries says that memory is short."""


def _fault(error: BaseException) -> ServerError:
    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if isinstance(error, MemoryError) or any(words in str(error).lower() for words in _NO_ROOM):
        return DoesNotFit(f"there is not enough memory to load torch ({reason}); raise the limit of this process (ulimit -v)")
    return EnvironmentFault(f"the engine's libraries cannot be loaded ({reason}); install minserve's dependencies again")


class _OpenedGpu:
    """The one that the engine will claim. The driver takes its time to start and to open it, as torch takes to import: both side
    by side. Torch then finds its context."""

    def __init__(self) -> None:
        self._driver: ctypes.CDLL | None = None
        self._device = ctypes.c_int()
        self._opening = threading.Thread(target=self._open, daemon=True)
        self._opening.start()

    def _open(self) -> None:
        count, context = ctypes.c_int(), ctypes.c_void_p()
        with contextlib.suppress(OSError, AttributeError, ValueError):
            driver = ctypes.CDLL("libcuda.so.1")
            if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
                return  # torch will say what is wrong
            driver.cuDeviceGet(ctypes.byref(self._device), own_seat().local_rank % count.value)
            if driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), self._device) == 0:
                self._driver = driver

    def close(self) -> None:
        """Gives back what it takes of the GPU's memory."""
        self._opening.join()
        if self._driver is not None:
            self._driver.cuDevicePrimaryCtxRelease(self._device)


def main() -> NoReturn:
    gpu = None if sys.argv[1:] == ["cpu"] else _OpenedGpu()
    gc.disable()  # imports make a million objects, and none of them is garbage; the engine enables it once it is ready
    try:
        import torch

        from minserve.runtime import engine
    except (ImportError, MemoryError, OSError) as error:
        fault = _fault(error)
        try:
            FrontConnection.inherited().send(Fatal(fault.exit_code, str(fault)))
        except (KeyError, ValueError, OSError, FrontGone):
            sys.stderr.write(f"minserve: error: {fault}\n")
        sys.exit(fault.exit_code)
    if gpu is not None and not torch.cuda.is_available():
        gpu.close()  # a torch for CPUs, on a machine that has GPUs
    gc.freeze()
    engine.leave(engine.main())


if __name__ == "__main__":
    main()
