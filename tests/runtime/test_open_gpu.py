"""An engine's driver opens the GPU that the engine will claim, and no other; a machine without one is none the worse."""

from __future__ import annotations

import ctypes
import sys

import pytest

import minserve.runtime
from minserve.runtime import __main__ as process
from minserve.seat import DESCRIPTOR_VARIABLE, SEAT_VARIABLE, Seat, encode


class Driver:
    """CUDA's, with so many GPUs, under other handles than their numbers."""

    def __init__(self, gpus, init=0):
        self._gpus, self._init = gpus, init
        self.opened = []

    def cuInit(self, flags):  # noqa: N802
        assert flags == 0
        return self._init

    def cuDeviceGetCount(self, count):  # noqa: N802
        count._obj.value = self._gpus
        return 0

    def cuDeviceGet(self, device, ordinal):  # noqa: N802
        device._obj.value = 100 + ordinal
        return 0

    def cuDevicePrimaryCtxRetain(self, context, device):  # noqa: N802
        assert isinstance(context._obj, ctypes.c_void_p)
        self.opened.append(device.value)
        return 0


@pytest.mark.parametrize(
    ("driver", "rank", "opened"),
    [(Driver(1), 0, [100]), (Driver(8), 11, [103]), (Driver(2), 3, [101]), (Driver(0), 0, []), (Driver(1, init=100), 0, [])],
)
def test_the_gpu_of_the_seat_is_opened(monkeypatch, driver, rank, opened):
    monkeypatch.setattr(ctypes, "CDLL", {"libcuda.so.1": driver}.__getitem__)
    monkeypatch.setenv(SEAT_VARIABLE, encode(Seat(rank=rank, num_ranks=16, ranks_per_host=8)))
    process._open_gpu()
    assert driver.opened == opened


def test_without_a_driver_nothing_happens(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    process._open_gpu()


@pytest.mark.parametrize(("words", "opens"), [(["cpu"], False), (["auto"], True), (["cuda"], True)])
def test_an_engine_on_a_cpu_leaves_all_gpus_alone(monkeypatch, words, opens):
    begun = []

    class Thread:
        def __init__(self, target, daemon):
            begun.append((target, daemon))

        def start(self):
            begun.append("started")

    monkeypatch.setattr(sys, "argv", ["minserve.runtime", *words])
    monkeypatch.setattr(process.threading, "Thread", Thread)
    monkeypatch.setattr(process.gc, "disable", lambda: None)
    monkeypatch.delattr(minserve.runtime, "engine", raising=False)
    monkeypatch.setitem(sys.modules, "minserve.runtime.engine", None)  # its import fails, and the process ends
    monkeypatch.delenv(DESCRIPTOR_VARIABLE, raising=False)
    with pytest.raises(SystemExit):
        process.main()
    assert begun == ([(process._open_gpu, True), "started"] if opens else [])
