"""An engine's driver opens the GPU that the engine will claim, and no other; a machine without one is none the worse."""

from __future__ import annotations

import ctypes
import sys
import types

import pytest
import torch

import minserve.runtime
from minserve.runtime import __main__ as process
from minserve.seat import SEAT_VARIABLE, Seat, encode


class Driver:
    """CUDA's, with so many GPUs, under other handles than their numbers."""

    def __init__(self, gpus, init=0):
        self._gpus, self._init = gpus, init
        self.opened, self.closed = [], []

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

    def cuDevicePrimaryCtxRelease(self, device):  # noqa: N802
        self.closed.append(device.value)


@pytest.mark.parametrize(
    ("driver", "rank", "opened"),
    [(Driver(1), 0, [100]), (Driver(8), 11, [103]), (Driver(2), 3, [101]), (Driver(0), 0, []), (Driver(1, init=100), 0, [])],
)
def test_the_gpu_of_the_seat_is_opened_and_given_back_where_torch_has_no_use_for_it(monkeypatch, driver, rank, opened):
    monkeypatch.setattr(ctypes, "CDLL", {"libcuda.so.1": driver}.__getitem__)
    monkeypatch.setenv(SEAT_VARIABLE, encode(Seat(rank=rank, num_ranks=16, ranks_per_host=8)))
    gpu = process._OpenedGpu()
    gpu._opening.join()
    assert (driver.opened, driver.closed) == (opened, [])
    gpu.close()
    assert driver.closed == opened


def test_without_a_driver_nothing_happens(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    process._OpenedGpu().close()


@pytest.mark.parametrize("words", [["cpu"], ["auto"], ["cuda"]])
@pytest.mark.parametrize("torch_has_gpu", [True, False])
def test_an_engine_on_a_cpu_leaves_all_gpus_alone(monkeypatch, words, torch_has_gpu):
    said = []

    class Gpu:
        def __init__(self):
            said.append("opened")

        def close(self):
            said.append("closed")

    def leave(code):
        raise SystemExit(code)

    engine = types.SimpleNamespace(main=lambda: 0, leave=leave)
    monkeypatch.setattr(minserve.runtime, "engine", engine, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: torch_has_gpu)
    monkeypatch.setattr(sys, "argv", ["minserve.runtime", *words])
    monkeypatch.setattr(process, "_OpenedGpu", Gpu)
    monkeypatch.setattr(process, "gc", types.SimpleNamespace(disable=lambda: None, freeze=lambda: None))
    with pytest.raises(SystemExit):
        process.main()
    assert said == ([] if words == ["cpu"] else ["opened"] if torch_has_gpu else ["opened", "closed"])
