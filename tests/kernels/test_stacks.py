"""Named stacks: which one is chosen from the verdicts on its libraries."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from minserve import library_probe
from minserve.errors import EnvironmentFault, UsageError
from minserve.kernels import reference, stacks
from minserve.kernels.interface import Kernels
from minserve.library_probe import Library, Verdict
from minserve.remembered import Remembered

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
def test_ranks_take_deep_ep_where_it_works() -> None:
    def chosen(dispatcher: stacks.DispatcherName, *broken: str) -> stacks.Choice:
        return stacks.choose("auto", GPU, verdicts(*broken), dispatcher=dispatcher)

    assert chosen("auto").name == "hopper-ep"
    assert chosen("deepep").name == "hopper-ep"
    assert {verdict.library for verdict in chosen("auto").verdicts} >= {"deep_ep", "flashinfer"}
    assert chosen("torch").name == "hopper-ep-torch"
    fallback = chosen("auto", "deep_ep")
    assert fallback.name == "hopper-ep-torch" and "deep_ep is not installed" in fallback.reason
    with pytest.raises(EnvironmentFault, match="--moe-dispatcher deepep: deep_ep is not installed"):
        chosen("deepep", "deep_ep")
    assert chosen("auto", "flashinfer").name == "torch-gpu"
    with pytest.raises(EnvironmentFault, match="needs what the hopper stack needs: flashinfer is not installed"):
        chosen("deepep", "flashinfer")


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("name", "device", "dispatcher", "said"),
    [
        ("hopper-ep", "cuda", "torch", "--stack hopper-ep is DeepEP's; with --moe-dispatcher torch it is hopper-ep-torch"),
        ("hopper", "cuda", "deepep", "--moe-dispatcher deepep is no choice for --stack hopper; torch is"),
        ("auto", "cpu", "deepep", "--moe-dispatcher deepep is no choice for a CPU"),
    ],
)
def test_a_stack_and_a_dispatcher_that_exclude_each_other(
    name: str, device: str, dispatcher: stacks.DispatcherName, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        stacks.choose(name, torch.device(device), verdicts(), dispatcher=dispatcher)


@pytest.mark.usefixtures("hopper")
def test_a_named_stack_is_never_replaced() -> None:
    assert stacks.choose("hopper-ep", GPU, verdicts()).name == "hopper-ep"
    for name in ("torch-gpu", "deterministic"):
        assert stacks.choose(name, GPU, verdicts("flashinfer", "deep_gemm")).name == name
    with pytest.raises(EnvironmentFault, match="--stack hopper-ep: deep_ep is not installed"):
        stacks.choose("hopper-ep", GPU, verdicts("deep_ep"))


def test_other_gpus_get_the_stack_without_vendor_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device=None: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device=None: "an older GPU")
    assert stacks.choose("auto", GPU, verdicts()).name == "torch-gpu"
    with pytest.raises(UsageError, match="needs a Hopper GPU, not an older GPU"):
        stacks.choose("hopper", GPU, verdicts())


@pytest.mark.usefixtures("hopper")
def test_a_library_that_imported_without_harm_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def imports(libraries: Sequence[Library], seconds: float) -> tuple[Verdict, ...]:
        del seconds
        tried.extend(library.module for library in libraries)
        return tuple(Verdict(library.module, True, "1.0", "imports") for library in libraries)

    monkeypatch.setattr(library_probe, "probe", imports)
    monkeypatch.setattr(stacks, "build", lambda *_, **__: reference.cpu())
    memory = Remembered(tmp_path)
    choices = [stacks.open_stack("auto", GPU, memory)[0] for _ in range(2)]
    assert tried == ["triton", "flashinfer", "deep_gemm"]
    assert choices[0] == choices[1]
    monkeypatch.setenv("LD_LIBRARY_PATH", "/elsewhere")
    stacks.open_stack("auto", GPU, memory)
    assert len(tried) == 6


@pytest.mark.usefixtures("hopper")
def test_a_library_that_takes_its_process_down_does_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = [verdicts()[:3], verdicts("deep_gemm")[:3]]
    monkeypatch.setattr(library_probe, "probe", lambda libraries, **_: outcomes.pop(0) if libraries else ())
    memory = Remembered(tmp_path)

    def build(name: str, device: torch.device, remembered: Remembered, **_: bool) -> Kernels:
        del device, remembered
        if name == "hopper" and len(outcomes) == 1 and memory_was_used:
            raise KeyboardInterrupt  # as good as dead
        return reference.cpu()

    monkeypatch.setattr(stacks, "build", build)
    memory_was_used = False
    assert stacks.open_stack("auto", GPU, memory)[0].name == "hopper"
    memory_was_used = True
    with pytest.raises(KeyboardInterrupt):
        stacks.open_stack("auto", GPU, memory)
    assert stacks.open_stack("auto", GPU, memory)[0].name == "torch-gpu"


@pytest.mark.usefixtures("hopper")
def test_libraries_that_do_not_import_together_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*_: object, **__: object) -> Kernels:
        raise ImportError("undefined symbol: nothing")

    monkeypatch.setattr(library_probe, "probe", lambda *_, **__: verdicts()[:3])
    monkeypatch.setattr(stacks, "build", build)
    with pytest.raises(EnvironmentFault, match="hopper stack do not import together: undefined symbol"):
        stacks.open_stack("auto", GPU, Remembered(tmp_path))
