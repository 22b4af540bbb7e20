"""`minserve doctor`: each thing that would stop a start is found before the start, with what to do, within seconds."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from waiting import PATIENCE, once_within, unused_port

from minserve import doctor, library_probe
from minserve.config import Config
from minserve.doctor import Finding, GpuProcess
from minserve.library_probe import Verdict

H200 = {"name": "NVIDIA H200", "capability": [9, 0], "free": 138 << 30, "total": 139 << 30, "peers": [], "uuid": "GPU-a"}


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "minserve", "doctor", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=os.environ | variables)


def found(output: str, item: str) -> dict[str, Any]:
    (one,) = (finding for finding in json.loads(output)["findings"] if finding["item"] == item)
    return dict(one)


def test_a_sound_machine_is_ready_within_ten_seconds(tmp_path: Path) -> None:
    def scenario() -> float:
        started = time.monotonic()
        done = run("--device", "cpu", "--port", str(unused_port()), "--kernel-cache", str(tmp_path))
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.rstrip().endswith("ready to serve") and str(tmp_path) in done.stdout
        return time.monotonic() - started

    once_within(30, scenario)  # two other tests may share the cores


def test_a_busy_port_is_a_fault() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run("--json", "--device", "cpu", "--port", str(taken.getsockname()[1]))
    assert done.returncode == 3
    assert found(done.stdout, "HTTP port")["status"] == "fault"


def test_a_gpu_asked_for_where_none_is(tmp_path: Path) -> None:
    done = run("--json", "--device", "cuda", "--port", str(unused_port()), CUDA_VISIBLE_DEVICES="", PATH=str(tmp_path))
    assert done.returncode == 3
    assert found(done.stdout, "driver")["status"] == "fault"


def test_a_torch_that_comes_late_hides_no_missing_driver() -> None:
    late = {"error": library_probe.LATE}
    assert statuses(list(doctor._python_and_torch(Config(device="cuda"), late, [])))["driver"] == "fault"
    assert statuses(list(doctor._python_and_torch(Config(device="cuda"), late, ["580.1"])))["driver"] == "note"


def test_a_torch_that_does_not_import_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")
    done = run("--json", "--port", str(unused_port()), PYTHONPATH=str(tmp_path))
    assert done.returncode == 3
    torch = found(done.stdout, "torch")
    assert torch["status"] == "fault" and "libcudart.so.13" in torch["detail"] and "pip install" in torch["remedy"]


def test_the_kernel_cache_that_cannot_be_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    done = run("--json", "--device", "cpu", "--port", str(unused_port()), "--kernel-cache", str(file / "below"))
    assert found(done.stdout, "kernel cache")["status"] == "note"


def test_links_of_the_hub_cache_that_lead_nowhere(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(tmp_path / "gone")
    done = run("--json", "--device", "cpu", "--port", str(unused_port()), HF_HUB_CACHE=str(tmp_path))
    hub = found(done.stdout, "hub cache")
    assert hub["status"] == "note" and "model.safetensors" in hub["detail"]


def test_wrong_flags_are_refused_as_launch_refuses_them() -> None:
    done = run("--prot", "1")
    assert done.returncode == 2 and "--port" in done.stderr


def statuses(findings: list[Finding]) -> dict[str, str]:
    return {finding.item: finding.status for finding in findings}


def test_memory_that_others_hold_is_a_fault_that_names_them() -> None:
    held = H200 | {"free": 20 << 30}
    holders = [GpuProcess("GPU-a", "python", 2**22 + 1, 118 << 30), GpuProcess("GPU-b", "python", 2**22 + 2, 1 << 30)]
    (gpu,) = doctor._gpus(Config(), [held], holders)
    assert (
        gpu.status == "fault" and "(pid 4194305 holds 118.0 GiB)" in gpu.remedy and "--gpu-memory-utilization 0.14" in gpu.remedy
    )
    (gpu,) = doctor._gpus(Config(), [H200], [])
    assert gpu.status == "ok"


def test_ranks_need_a_gpu_each_and_a_way_to_each_other() -> None:
    config = Config(ep_size=2)
    assert statuses(list(doctor._gpus(config, [H200], [])))["count"] == "fault"
    joined = [H200 | {"peers": [1]}, H200 | {"peers": [0]}]
    assert statuses(list(doctor._gpus(config, joined, []))) == {"GPU 0": "ok", "GPU 1": "ok"}
    assert statuses(list(doctor._gpus(config, [H200, H200], [])))["GPU 0 peers"] == "note"


@pytest.mark.parametrize(
    ("stack", "installed", "on_gpu", "status"),
    [
        ("auto", False, True, "note"),  # torch-gpu serves without it
        ("hopper", False, True, "fault"),
        ("auto", True, True, "fault"),  # there, but broken: somebody meant to use it
        ("auto", True, False, "note"),
    ],
)
def test_a_library_matters_where_it_is_needed(stack: Any, installed: bool, on_gpu: bool, status: str) -> None:
    verdict = Verdict("deep_gemm", False, "sgl-deep-gemm 9" if installed else None, "is wrong: x; pip install y")
    assert doctor._library(Config(stack=stack), verdict, on_gpu).status == status


def test_an_orphan_is_told_by_its_parent() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'input()'], stdin=0).pid)"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout is not None and child.stdin is not None
    orphan = int(child.stdout.readline())
    child.wait()
    parent = int((Path("/proc") / str(orphan) / "stat").read_text().rpartition(")")[2].split()[1])
    assert doctor._is_orphan(orphan) == (parent == 1)
    assert not doctor._is_orphan(os.getpid())
    child.stdin.close()
