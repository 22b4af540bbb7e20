"""Named stacks: which one is chosen from the verdicts on its libraries."""

from __future__ import annotations

import pytest
import torch

from minserve.errors import EnvironmentFault, UsageError
from minserve.kernels import reference, stacks
from minserve.library_probe import Verdict

GPU = torch.device("cuda")


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
