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
from typing import Any, Literal, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from minserve import launch, library_probe
from minserve.config import Config, kernel_cache_directory
from minserve.errors import EnvironmentFault
from minserve.library_probe import LIBRARIES, Verdict

Status = Literal["ok", "note", "fault"]
GIB = 1 << 30
_OPEN_FILES = 65_536
_SHARED_MEMORY = GIB
"""Ranks of one host hand NCCL's and DeepEP's handles over in /dev/shm; a container's default is 64 MiB."""
_CACHE_ROOM = 2 * GIB


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. A fault stops `minserve launch` with the same flags; a note costs speed or a feature."""

    area: str
    item: str
    status: Status
    detail: str
    remedy: str = ""


class GpuProcess(NamedTuple):
    """A process that holds GPU memory."""

    gpu: str
    """The GPU's UUID."""
    name: str
    pid: int
    used: int
    """Bytes."""


def _judged(area: str, item: str, sound: bool, detail: str, otherwise: Status, remedy: str) -> Finding:
    """Sound, or else this status and what to do."""
    return Finding(area, item, "ok" if sound else otherwise, detail, "" if sound else remedy)


def examine(config: Config) -> list[Finding]:
    """All findings for a start with these settings, in the report's order. The slow looks run side by side."""
    environment = launch.engine_environment(config)
    with ThreadPoolExecutor(max_workers=12) as pool:
        torch_report = pool.submit(library_probe.torch_facts, environment)
        libraries = pool.submit(library_probe.probe, LIBRARIES, environment)
        nccl = pool.submit(library_probe.shared_library_facts, "libnccl.so.2", environment, "ncclGetVersion")
        nvshmem = pool.submit(library_probe.shared_library_facts, "libnvshmem_host.so.3", environment)
        driver, processes = pool.submit(_nvidia_smi, "--query-gpu=driver_version"), pool.submit(_gpu_processes)
        compilers = pool.submit(_compilers, environment)
        facts = torch_report.result()
        gpus: list[dict[str, Any]] = facts.get("gpus", [])
        on_gpu = bool(gpus) and config.device != "cpu"
        findings = [*_python_and_torch(config, facts, driver.result())]
        findings += [_library(config, verdict, on_gpu) for verdict in libraries.result()]
        if on_gpu and config.ep_size > 1:
            findings += [_communication("NCCL", nccl.result(), "fault"), _communication("NVSHMEM", nvshmem.result(), "note")]
        findings += [*compilers.result(), *_gpus(config, gpus, processes.result())] if on_gpu else []
    return [*findings, *_limits(config, on_gpu), *_ports(config), *_folders(config)]


def _python_and_torch(config: Config, facts: Mapping[str, Any], driver: list[str]) -> Iterable[Finding]:
    yield Finding("software", "python", "ok", sys.version.split()[0])
    if error := facts.get("error"):
        late = error == library_probe.LATE  # a busy machine, more likely than a fault
        yield Finding("software", "torch", "note" if late else "fault", error, "" if late else "pip install 'torch>=2.11,<2.15'")
    else:
        cuda = f"CUDA {facts['cuda']}" if facts["cuda"] else "built without CUDA"
        abi = "C++11 ABI" if facts["cxx11_abi"] else "old C++ ABI"
        yield Finding("software", "torch", "ok", f"{facts['version']}, {cuda}, {abi}")
    if driver and error:
        yield Finding("software", "driver", "note", f"{driver[0]}; whether torch sees a GPU is not known")
    elif driver:
        sound = facts["available"] or config.device == "cpu"
        cure = "a torch whose CUDA the driver supports: pip install torch==2.11.0 (CUDA 13: driver 580)"
        said = driver[0] if sound else f"{driver[0]}, but torch sees no GPU"
        yield _judged("software", "driver", sound, said, "fault", cure)
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


def _communication(name: str, facts: Mapping[str, Any], otherwise: Status) -> Finding:
    found = f"version {facts['version']}" if facts.get("version") else "found"
    cure = f"pip install nvidia-{name.lower()}-cu13"
    return _judged("libraries", name, not facts["error"], facts["error"] or found, otherwise, cure)


def _compilers(environment: Mapping[str, str]) -> list[Finding]:
    """What the kernel libraries call at run time for shapes that the cache lacks."""
    path = environment.get("PATH")
    c = shutil.which(environment.get("CC", "cc"), path=path) or shutil.which("gcc", path=path)
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH") or "/usr/local/cuda"
    nvcc = shutil.which("nvcc", path=os.pathsep.join(filter(None, [f"{home}/bin", path])))
    said = _output([nvcc, "--version"]).splitlines() if nvcc else []
    release = next((line.partition("release ")[2].partition(",")[0] for line in said if "release" in line), "unknown")
    ninja = shutil.which("ninja", path=path)
    area, toolkit = "compilers", "set CUDA_HOME to a CUDA 13 toolkit, or pip install nvidia-cuda-nvcc==13.0.*"
    no_c, no_nvcc = "none: Triton cannot launch kernels", "none: only kernels that the cache holds can run on stack hopper"
    no_ninja = "none: FlashInfer cannot compile what the cache lacks"
    return [
        _judged(area, "C compiler", c is not None, c or no_c, "fault", "apt-get install gcc libc6-dev"),
        _judged(area, "nvcc", nvcc is not None, f"{release} at {nvcc}" if nvcc else no_nvcc, "note", toolkit),
        _judged(area, "ninja", ninja is not None, ninja or no_ninja, "note", "pip install ninja"),
    ]


def _gpus(config: Config, gpus: list[dict[str, Any]], processes: list[GpuProcess]) -> Iterable[Finding]:
    local = len(config.local_ranks)
    if len(gpus) < local:
        cure = f"--ep-size {len(gpus) * config.nnodes}, or more GPUs in CUDA_VISIBLE_DEVICES"
        yield Finding("GPUs", "count", "fault", f"{len(gpus)} visible, {local} ranks on this host", cure)
    for index, gpu in enumerate(gpus[:local]):
        free, total = gpu["free"] / GIB, gpu["total"] / GIB
        text = f"{gpu['name']}, sm_{gpu['capability'][0]}{gpu['capability'][1]}, {free:.1f} of {total:.1f} GiB free"
        holders = [f"pid {one.pid} holds {one.used / GIB:.1f} GiB" for one in processes if one.gpu == gpu["uuid"]]
        held = ", ".join(holders) or "nothing visible holds it"
        cure = f"end what holds it ({held}), or --gpu-memory-utilization {max(0.05, int(free / total * 50) / 50):.2f}"
        yield _judged("GPUs", f"GPU {index}", free >= config.gpu_memory_utilization * total, text, "fault", cure)
        lacking = [other for other in range(local) if other != index and other not in gpu["peers"] and other < len(gpus)]
        if lacking:
            cure = "DeepEP needs NVLink between all GPUs of a host: --moe-dispatcher torch"
            yield Finding("GPUs", f"GPU {index} peers", "note", f"no peer access to {lacking}", cure)
    for one in processes:
        if _is_orphan(one.pid):
            text = f"{one.name} lost its parent and holds {one.used / GIB:.1f} GiB"
            yield Finding("GPUs", f"process {one.pid}", "note", text, f"kill {one.pid}, if it is of no use to anyone")


def _limits(config: Config, on_gpu: bool) -> Iterable[Finding]:
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough, text = files == resource.RLIM_INFINITY or files >= _OPEN_FILES, f"{files:,}"
    text = "unlimited" if files == resource.RLIM_INFINITY else text
    yield _judged("limits", "open files", enough, text, "note", f"ulimit -Hn {_OPEN_FILES}: each connection is a file")
    if not on_gpu:
        return
    _, locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    free, text = locked == resource.RLIM_INFINITY, f"{locked / GIB:.2f} GiB"
    text, cure = "unlimited" if free else text, "ulimit -l unlimited (docker: --ulimit memlock=-1)"
    yield _judged("limits", "locked memory", free, text, "fault" if config.nnodes > 1 else "note", cure)
    with contextlib.suppress(OSError):
        size = shutil.disk_usage("/dev/shm").free
        enough, cure = size >= _SHARED_MEMORY or config.ep_size == 1, "docker: --ipc=host or --shm-size=8g"
        yield _judged("limits", "/dev/shm", enough, f"{size / GIB:.2f} GiB free", "fault", cure)


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
    kernels = kernel_cache_directory(config)
    yield _writable("kernel cache", kernels, "--kernel-cache FOLDER")
    home = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    if not hub.is_dir():
        yield Finding("folders", "hub cache", "ok", f"{hub} does not exist yet")
        return
    models = sorted(hub.glob("models--*"))
    links = (link for model in models for link in model.glob("snapshots/*/*"))
    dangling = [str(link.relative_to(hub)) for link in links if link.is_symlink() and not link.exists()]
    text = f"{len(dangling)} links of {hub} lead nowhere, first {dangling[0]}" if dangling else f"{hub}, {len(models)} models"
    yield _judged("folders", "hub cache", not dangling, text, "note", "download that model again")


def _writable(item: str, folder: Path, cure: str) -> Finding:
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return Finding("folders", item, "note", f"{folder} cannot be written: every start compiles anew", cure)
    free = shutil.disk_usage(existing).free
    left = f"{free / GIB:.0f} GiB left" if free >= _CACHE_ROOM else f"{free / GIB:.2f} GiB left, compiled kernels need up to 2"
    return _judged("folders", item, free >= _CACHE_ROOM, f"{folder}, {left}", "note", cure)


def _output(words: list[str]) -> str:
    """What the program printed; nothing when it is missing, fails or hangs."""
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=library_probe.SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _nvidia_smi(query: str) -> list[str]:
    return _output(["nvidia-smi", query, "--format=csv,noheader,nounits"]).splitlines()


def _gpu_processes() -> list[GpuProcess]:
    found = []
    for line in _nvidia_smi("--query-compute-apps=gpu_uuid,process_name,pid,used_memory"):
        with contextlib.suppress(ValueError):
            head, pid, mebibytes = (part.strip() for part in line.rsplit(",", 2))
            gpu, _, name = head.partition(", ")
            found.append(GpuProcess(gpu, name, int(pid), int(mebibytes) << 20))
    return found


def _is_orphan(pid: int) -> bool:
    """Did the process's parent die? Then init is its parent, or whatever adopts orphans: only init is told here."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) == 1
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
