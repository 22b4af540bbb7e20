"""Named stacks: the probe's verdicts from real child processes, and which stack is chosen from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minserve.errors import EnvironmentFault, UsageError
from minserve.kernels import reference, stacks
from minserve.kernels.stacks import Library, Verdict

GPU = torch.device("cuda")


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fake_sound.py").write_text("print('chatter of an import')\n")
    (tmp_path / "fake_broken.py").write_text("raise OSError('libfake.so.3: cannot open shared object file')\n")
    (tmp_path / "fake_crash.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    (tmp_path / "fake_slow.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.usefixtures("modules")
def test_the_probe_tells_sound_broken_crashing_and_missing_libraries_apart() -> None:
    libraries = (
        Library("fake_sound", ("numpy",), "pip install sound"),
        Library("fake_broken", ("no-such-name", "numpy"), "pip install broken"),
        Library("fake_crash", ("numpy",), "pip install crash"),
        Library("fake_absent", ("no-such-name",), "pip install absent"),
    )
    sound, broken, crash, absent = stacks.probe(libraries)
    assert sound.usable
    assert sound.version is not None
    assert sound.version.startswith("numpy ")
    assert not broken.usable
    assert "libfake.so.3" in broken.detail
    assert "pip install broken" in broken.detail
    assert not crash.usable
    assert "signal 11" in crash.detail
    assert (absent.usable, absent.version, absent.detail) == (False, None, "is not installed: pip install absent")


@pytest.mark.usefixtures("modules")
def test_an_import_that_does_not_end_is_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "PROBE_SECONDS", 0.5)
    (verdict,) = stacks.probe([Library("fake_slow", (), "pip install slow")])
    assert not verdict.usable
    assert "did not end" in verdict.detail


def verdicts(*broken: str) -> tuple[Verdict, ...]:
    names = ("triton", "flashinfer", "deep_gemm", "deep_ep")
    return tuple(
        Verdict(name, name not in broken, "1.0", "imports" if name not in broken else "is not installed") for name in names
    )


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device=None: (9, 0))


def test_the_cpu_has_one_stack() -> None:
    cpu = torch.device("cpu")
    assert stacks.choose("auto", cpu).name == "cpu"
    assert stacks.resolve("cpu", cpu).rms_norm is reference.rms_norm
    with pytest.raises(UsageError, match="needs a CUDA device"):
        stacks.choose("hopper", cpu)
    with pytest.raises(UsageError, match="hopper-ep-torch, not 'fast'"):
        stacks.choose("fast", cpu)


@pytest.mark.usefixtures("hopper")
def test_auto_takes_the_fastest_stack_that_works() -> None:
    assert stacks.choose("auto", GPU, verdicts()).name == "hopper"
    assert stacks.choose("auto", GPU, verdicts("deep_ep")).name == "hopper"
    fallback = stacks.choose("auto", GPU, verdicts("deep_gemm"))
    assert fallback.name == "torch-gpu"
    assert "deep_gemm is not installed" in fallback.reason
    with pytest.raises(EnvironmentFault, match="triton is not installed"):
        stacks.choose("auto", GPU, verdicts("triton"))


@pytest.mark.usefixtures("hopper")
def test_a_named_stack_is_never_replaced() -> None:
    assert stacks.choose("hopper-ep", GPU, verdicts()).name == "hopper-ep"
    assert stacks.choose("torch-gpu", GPU, verdicts("flashinfer", "deep_gemm")).name == "torch-gpu"
    with pytest.raises(EnvironmentFault, match="--stack hopper-ep: deep_ep is not installed"):
        stacks.choose("hopper-ep", GPU, verdicts("deep_ep"))


def test_other_gpus_get_the_stack_without_vendor_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device=None: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device=None: "an older GPU")
    assert stacks.choose("auto", GPU, verdicts()).name == "torch-gpu"
    with pytest.raises(UsageError, match="needs a Hopper GPU, not an older GPU"):
        stacks.choose("hopper", GPU, verdicts())
