"""`minserve doctor`: what on this machine would stop or slow a server, said before any weight is read.

Looks only; every look ends within seconds. Knows nothing of models.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from minserve import launch, library_probe
from minserve.config import Config
from minserve.errors import EnvironmentFault
from minserve.library_probe import LIBRARIES, Verdict

Status = Literal["ok", "note", "fault"]
GIB = 1 << 30
_OPEN_FILES = 65_536
_SHARED_MEMORY = GIB
"""Ranks of one host hand NCCL's and DeepEP's handles over in /dev/shm; a container's default is 64 MiB."""
_CACHE_ROOM = 2 * GIB
_PROC = Path("/proc")


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. A fault stops `minserve launch` with the same flags; a note costs speed or a feature."""

    area: str
    item: str
    status: Status
    detail: str
    remedy: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that holds GPU memory."""

    gpu: str
    """The GPU's UUID."""
    name: str
    pid: int
    used: int
    """Bytes."""


def examine(config: Config) -> list[Finding]:
    """All findings for a start with these settings, in the report's order. The slow looks run side by side."""
    environment = launch.engine_environment(config)
    with ThreadPoolExecutor(max_workers=12) as pool:
        torch_report = pool.submit(library_probe.torch_facts, environment)
        libraries = pool.submit(library_probe.probe, LIBRARIES, environment)
        nccl = pool.submit(library_probe.shared_library_facts, "libnccl.so.2", environment, "ncclGetVersion")
        nvshmem = pool.submit(library_probe.shared_library_facts, "libnvshmem_host.so.3", environment)
        driver, processes = pool.submit(_nvidia_smi, "driver_version"), pool.submit(_gpu_processes)
        compilers = pool.submit(lambda: list(_compilers(environment)))
        facts = torch_report.result()
        gpus: list[dict[str, Any]] = facts.get("gpus", [])
        on_gpu = bool(gpus) and config.device != "cpu"
        findings = list(_python_and_torch(config, facts, driver.result()))
        findings += [_library(config, verdict, on_gpu) for verdict in libraries.result()]
        findings += _communication(config, nccl.result(), nvshmem.result(), on_gpu)
        findings += compilers.result() if on_gpu else []
        findings += _gpus(config, gpus, processes.result()) if on_gpu else []
    findings += _limits(config, on_gpu)
    findings += _ports(config)
    findings += _folders(config)
    return findings


def _python_and_torch(config: Config, facts: Mapping[str, Any], driver: list[str]) -> Iterable[Finding]:
    yield Finding("software", "python", "ok", sys.version.split()[0])
    if error := facts.get("error"):
        late = error == library_probe.LATE  # a busy machine, more likely than a fault
        yield Finding("software", "torch", "note" if late else "fault", error, "" if late else "pip install 'torch>=2.11,<2.15'")
        return
    cuda = facts["cuda"]
    abi = "C++11 ABI" if facts["cxx11_abi"] else "old C++ ABI"
    yield Finding("software", "torch", "ok", f"{facts['version']}, {f'CUDA {cuda}' if cuda else 'built without CUDA'}, {abi}")
    if driver:
        status: Status = "ok" if facts["available"] or config.device == "cpu" else "fault"
        cure = "" if status == "ok" else "a torch whose CUDA the driver supports: pip install torch==2.11.0 (CUDA 13: driver 580)"
        yield Finding("software", "driver", status, driver[0] if status == "ok" else f"{driver[0]}, but torch sees no GPU", cure)
    elif config.device == "cuda":
        yield Finding("software", "driver", "fault", "no NVIDIA driver answers", "--device cpu, or a machine with a GPU")
    else:
        yield Finding("software", "driver", "note", "no NVIDIA GPU: the server will run on the CPU")


def _library(config: Config, verdict: Verdict, on_gpu: bool) -> Finding:
    if verdict.usable:
        return Finding("libraries", verdict.library, "ok", f"{verdict.version or 'version unknown'} imports")
    what, _, cure = verdict.detail.partition(": " if verdict.version is None else "; ")
    if not on_gpu:
        return Finding("libraries", verdict.library, "note", f"{what}; a CPU server does not use it")
    if verdict.version is None and verdict.library not in _needed(config):
        return Finding("libraries", verdict.library, "note", f"{what}: {_WITHOUT[verdict.library]}", cure)
    return Finding("libraries", verdict.library, "fault", f"{verdict.version or ''} {what}".strip(), cure)


_WITHOUT = {
    "triton": "no GPU stack works",
    "flashinfer": "stack torch-gpu will serve",
    "deep_gemm": "stack torch-gpu will serve",
    "deep_ep": "experts on several GPUs go through NCCL",
}


def _needed(config: Config) -> set[str]:
    """Modules without which these settings do not start on a GPU."""
    vendor = {"flashinfer", "deep_gemm"} if config.stack.startswith("hopper") else set()
    return {"triton"} | vendor | ({"deep_ep"} if config.stack == "hopper-ep" or config.moe_dispatcher == "deepep" else set())


def _communication(config: Config, nccl: Mapping[str, Any], nvshmem: Mapping[str, Any], on_gpu: bool) -> Iterable[Finding]:
    if not on_gpu or config.ep_size == 1:
        return
    for name, facts, package in (("NCCL", nccl, "nvidia-nccl-cu13"), ("NVSHMEM", nvshmem, "nvidia-nvshmem-cu13")):
        if facts["error"]:
            yield Finding("libraries", name, "fault" if name == "NCCL" else "note", facts["error"], f"pip install {package}")
        else:
            yield Finding("libraries", name, "ok", f"version {facts['version']}" if facts.get("version") else "found")


def _compilers(environment: Mapping[str, str]) -> Iterable[Finding]:
    """What the kernel libraries call at run time for shapes that the cache lacks."""
    path = environment.get("PATH")
    c = shutil.which(environment.get("CC", "cc"), path=path) or shutil.which("gcc", path=path)
    yield (
        Finding("compilers", "C compiler", "ok", c)
        if c
        else Finding("compilers", "C compiler", "fault", "none: Triton cannot launch kernels", "apt-get install gcc libc6-dev")
    )
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH") or "/usr/local/cuda"
    nvcc = shutil.which("nvcc", path=os.pathsep.join(filter(None, [f"{home}/bin", path])))
    if nvcc is None:
        cure = "set CUDA_HOME to a CUDA 13 toolkit, or pip install nvidia-cuda-nvcc==13.0.*"
        yield Finding("compilers", "nvcc", "note", "none: only kernels that the cache holds can run on stack hopper", cure)
    else:
        said = _output([nvcc, "--version"]).strip().splitlines()
        release = next((line.partition("release ")[2].partition(",")[0] for line in said if "release" in line), "unknown")
        yield Finding("compilers", "nvcc", "ok", f"{release} at {nvcc}")
    ninja = shutil.which("ninja", path=path)
    yield (
        Finding("compilers", "ninja", "ok", ninja)
        if ninja
        else Finding("compilers", "ninja", "note", "none: FlashInfer cannot compile what the cache lacks", "pip install ninja")
    )


def _gpus(config: Config, gpus: list[dict[str, Any]], processes: list[GpuProcess]) -> Iterable[Finding]:
    local = len(config.local_ranks)
    if len(gpus) < local:
        cure = f"--ep-size {len(gpus) * config.nnodes}, or more GPUs in CUDA_VISIBLE_DEVICES"
        yield Finding("GPUs", "count", "fault", f"{len(gpus)} visible, {local} ranks on this host", cure)
    for index, gpu in enumerate(gpus[:local]):
        free, total = gpu["free"] / GIB, gpu["total"] / GIB
        text = f"{gpu['name']}, sm_{gpu['capability'][0]}{gpu['capability'][1]}, {free:.1f} of {total:.1f} GiB free"
        wanted = config.gpu_memory_utilization * total
        if free < wanted:
            holders = [f"pid {one.pid} holds {one.used / GIB:.1f} GiB" for one in processes if one.gpu == gpu["uuid"]]
            held = ", ".join(holders) or "nothing visible holds it"
            cure = f"end what holds it ({held}), or --gpu-memory-utilization {max(0.05, int(free / total * 50) / 50):.2f}"
            yield Finding("GPUs", f"GPU {index}", "fault", text, cure)
        else:
            yield Finding("GPUs", f"GPU {index}", "ok", text)
        lacking = [other for other in range(local) if other != index and other not in gpu["peers"] and other < len(gpus)]
        if lacking:
            cure = "DeepEP needs NVLink between all GPUs of a host: --moe-dispatcher torch"
            yield Finding("GPUs", f"GPU {index} peers", "note", f"no peer access to {lacking}", cure)
    for one in processes:
        if _is_orphan(one.pid):
            cure = f"kill {one.pid}, if it is of no use to anyone"
            yield Finding(
                "GPUs", f"process {one.pid}", "note", f"{one.name} lost its parent and holds {one.used / GIB:.1f} GiB", cure
            )


def _limits(config: Config, on_gpu: bool) -> Iterable[Finding]:
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = files == resource.RLIM_INFINITY or files >= _OPEN_FILES
    text = "unlimited" if files == resource.RLIM_INFINITY else f"{files:,}"
    cure = "" if enough else f"ulimit -Hn {_OPEN_FILES}: each connection is a file"
    yield Finding("limits", "open files", "ok" if enough else "note", text, cure)
    if not on_gpu:
        return
    _, locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    free = locked == resource.RLIM_INFINITY
    several = config.nnodes > 1
    yield Finding(
        "limits", "locked memory", "ok" if free else "fault" if several else "note",
        "unlimited" if free else f"{locked / GIB:.2f} GiB", "" if free else "ulimit -l unlimited (docker: --ulimit memlock=-1)",
    )  # fmt: skip
    with contextlib.suppress(OSError):
        room = os.statvfs("/dev/shm")
        size = room.f_bavail * room.f_frsize
        enough = size >= _SHARED_MEMORY or config.ep_size == 1
        yield Finding(
            "limits", "/dev/shm", "ok" if enough else "fault", f"{size / GIB:.2f} GiB free",
            "" if enough else "docker: --ipc=host or --shm-size=8g",
        )  # fmt: skip


def _ports(config: Config) -> Iterable[Finding]:
    wanted = [("HTTP port", config.host, config.port)]
    if config.nnodes > 1 and config.node_rank == 0:
        wanted.append(("master port", config.master_addr, config.master_port))
    for item, host, port in wanted:
        try:
            launch.bind(host, port).close()
            yield Finding("network", item, "ok", f"{host}:{port} is free")
        except EnvironmentFault as error:
            yield Finding("network", item, "fault", str(error), "")


def _folders(config: Config) -> Iterable[Finding]:
    kernels = Path(next(iter(launch.kernel_cache_variables(config).values()))).parent
    yield _writable("kernel cache", kernels, "--kernel-cache FOLDER")
    home = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    if not hub.is_dir():
        yield Finding("folders", "hub cache", "ok", f"{hub} does not exist yet")
        return
    models = sorted(hub.glob("models--*"))
    dangling = [str(link.relative_to(hub)) for model in models for link in model.glob("snapshots/*/*") if _dangles(link)]
    if dangling:
        text = f"{len(dangling)} links of {hub} lead nowhere, first {dangling[0]}"
        yield Finding("folders", "hub cache", "note", text, "download that model again")
    else:
        yield Finding("folders", "hub cache", "ok", f"{hub}, {len(models)} models")


def _dangles(link: Path) -> bool:
    return link.is_symlink() and not link.exists()


def _writable(item: str, folder: Path, cure: str) -> Finding:
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return Finding("folders", item, "note", f"{folder} cannot be written: every start compiles anew", cure)
    room = os.statvfs(existing)
    free = room.f_bavail * room.f_frsize
    if free < _CACHE_ROOM:
        return Finding("folders", item, "note", f"{folder}: {free / GIB:.2f} GiB left, compiled kernels need up to 2", cure)
    return Finding("folders", item, "ok", f"{folder}, {free / GIB:.0f} GiB left")


def _output(words: list[str]) -> str:
    """What the program printed; nothing when it is missing, fails or hangs."""
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=library_probe.SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _nvidia_smi(query: str) -> list[str]:
    return _output(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]).split("\n")[:-1]


def _gpu_processes() -> list[GpuProcess]:
    words = ["nvidia-smi", "--query-compute-apps=gpu_uuid,process_name,pid,used_memory", "--format=csv,noheader,nounits"]
    found = []
    for line in _output(words).splitlines():
        with contextlib.suppress(ValueError):
            head, pid, mebibytes = (part.strip() for part in line.rsplit(",", 2))
            gpu, _, name = head.partition(", ")
            found.append(GpuProcess(gpu, name, int(pid), int(mebibytes) << 20))
    return found


def _is_orphan(pid: int) -> bool:
    """Did the process's parent die? Then init is its parent, or whatever adopts orphans: only init is told here."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int((_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[1]) == 1
    return False


def report(findings: list[Finding], *, as_json: bool, write: Callable[[str], object]) -> bool:
    """Writes the table or JSON; True when nothing would stop a start."""
    sound = all(finding.status != "fault" for finding in findings)
    if as_json:
        write(json.dumps({"sound": sound, "findings": [dataclasses.asdict(finding) for finding in findings]}, indent=2))
        return sound
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("area", "item", "", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for one in findings:
        style = {"ok": "green", "note": "yellow", "fault": "bold red"}[one.status]
        table.add_row(one.area, one.item, Text(one.status, style), Text(one.detail), Text(one.remedy))
    console = Console() if sys.stdout.isatty() else Console(width=160)
    with console.capture() as captured:
        console.print(table)
    write(captured.get().rstrip())
    faults = sum(finding.status == "fault" for finding in findings)
    write("\nready to serve" if sound else f"\n{faults} fault{'s' * (faults > 1)} would stop `minserve launch` with these flags")
    return sound
