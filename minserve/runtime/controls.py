"""The rare control calls of the front: flush_cache, server_info, start_profile, stop_profile. Knows no sockets and no loop."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from minserve.messages import Call, Reply
from minserve.runtime.grammar import Grammars
from minserve.runtime.scheduler import Scheduler

_METHODS = ("flush_cache", "server_info", "start_profile", "stop_profile")

ExpertLoad = Callable[[], dict[int, list[int]]]
"""Layer to how many (token, expert) pairs each of this rank's experts has had."""


class Controls:
    """Answers calls between two steps. `info` is what does not change after the start."""

    def __init__(
        self, scheduler: Scheduler, info: dict[str, Any], device: torch.device, grammars: Grammars, expert_load: ExpertLoad = dict
    ) -> None:
        self._scheduler = scheduler
        self._grammars = grammars
        self._expert_load = expert_load
        self._info = info
        self._device = device
        self._profile: tuple[torch.profiler.profile, Path] | None = None

    def answer(self, call: Call) -> Reply:
        """Never raises: what goes wrong is the reply's error."""
        try:
            match call.method:
                case "flush_cache":
                    return Reply(call.call_id, self._flush_cache())
                case "server_info":
                    return Reply(call.call_id, self._server_info())
                case "start_profile":
                    return Reply(call.call_id, self._start_profile(call.arguments.get("folder")))
                case "stop_profile":
                    return Reply(call.call_id, self._stop_profile())
        except Exception as error:
            return Reply(call.call_id, error=f"{call.method}: {error}")
        return Reply(call.call_id, error=f"there is no call {call.method!r}; there are {', '.join(_METHODS)}")

    def _flush_cache(self) -> dict[str, int]:
        flushed = self._scheduler.pages.flush()
        return {"flushed_pages": flushed, "used_pages": self._scheduler.pages.used}

    def _server_info(self) -> dict[str, Any]:
        pages, stats = self._scheduler.pages, self._scheduler.stats()
        live: dict[str, Any] = {
            "pages": {"total": pages.num_pages, "used": pages.used, "cached": pages.cache.num_idle},
            "stats": msgspec.to_builtins(msgspec.structs.asdict(stats), str_keys=True),
            "grammars": {"masks": self._grammars.num_masks, "seconds": self._grammars.mask_seconds},
            "profiling": self._profile is not None,
            "expert_load": {str(layer): counts for layer, counts in self._expert_load().items()},
        }
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            live["device_memory"] = {"free_bytes": free, "total_bytes": total}
        return self._info | live

    def _start_profile(self, given: object) -> dict[str, str]:
        """`given`: the folder where the trace goes; None: a new temporary one."""
        if self._profile is not None:
            raise RuntimeError(f"a profile is being taken already, into {self._profile[1]}")
        if given is not None and not (isinstance(given, str) and given):
            raise ValueError("folder must be a path")
        folder = Path(given) if given is not None else Path(tempfile.mkdtemp(prefix="minserve-profile-"))
        folder.mkdir(parents=True, exist_ok=True)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profiler = torch.profiler.profile(activities=activities)
        profiler.start()
        path = folder / f"minserve-{os.getpid()}-{time.strftime('%Y%m%d-%H%M%S')}.json"
        self._profile = (profiler, path)
        return {"path": str(path)}

    def _stop_profile(self) -> dict[str, str]:
        """The trace, in Chrome's format, lies at the path."""
        if self._profile is None:
            raise RuntimeError("no profile is being taken")
        (profiler, path), self._profile = self._profile, None
        profiler.stop()
        profiler.export_chrome_trace(str(path))
        if not _is_whole(path):
            raise OSError(f"the trace could not be written to {path}; is the disk full?")
        return {"path": str(path)}


def _is_whole(trace: Path) -> bool:
    """Whether the file ends as JSON does: its writer says nothing of a full disk."""
    with contextlib.suppress(OSError), trace.open("rb") as file:
        file.seek(max(0, trace.stat().st_size - 16))
        return file.read().rstrip().endswith(b"}")
    return False
