"""Whether torch, CUDA and the kernel libraries work here: each is really imported in a child process, which it may take down.

Imports none of them itself, and knows nothing of what they are used for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SECONDS = 8.0
"""A child that takes longer counts as hanging, unless the caller has more patience."""
LATE = "its import did not end in time"


@dataclasses.dataclass(frozen=True, slots=True)
class Library:
    """One library that a kernel stack needs."""

    module: str
    distributions: tuple[str, ...]
    """Names under which it is installed, ours first."""
    install: str


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What a probe found."""

    library: str
    usable: bool
    version: str | None
    """Distribution and version; None when it is not installed."""
    detail: str
    """One sentence: that it works, or what is wrong and what to install."""


TRITON = Library("triton", ("triton",), "pip install torch (its CUDA build brings triton)")
FLASHINFER = Library("flashinfer", ("flashinfer-python",), "pip install 'minserve[hopper]'")
DEEP_GEMM = Library("deep_gemm", ("sgl-deep-gemm", "tokenspeed-deepgemm", "deep-gemm"), "pip install 'minserve[hopper]'")
DEEP_EP = Library("deep_ep", ("tokenspeed-deepep", "sgl-deep-ep", "deep-ep"), "pip install 'minserve[deepep]'")
LIBRARIES = (TRITON, FLASHINFER, DEEP_GEMM, DEEP_EP)

_IMPORT = """
import importlib, json, sys
error = None
try:
    importlib.import_module(sys.argv[1])
except BaseException as raised:
    error = f"{type(raised).__name__}: {raised}".splitlines()[0]
print("\\n" + json.dumps({"error": error}))
"""

_TORCH = """
import json, torch
cuda = torch.cuda.is_available()
gpus = []
for index in range(torch.cuda.device_count() if cuda else 0):
    free, total = torch.cuda.mem_get_info(index)
    peers = [other for other in range(torch.cuda.device_count())
             if other != index and torch.cuda.can_device_access_peer(index, other)]
    gpus.append({"name": torch.cuda.get_device_name(index), "capability": list(torch.cuda.get_device_capability(index)),
                 "free": free, "total": total, "peers": peers,
                 "uuid": f"GPU-{torch.cuda.get_device_properties(index).uuid}"})
print("\\n" + json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "available": cuda, "gpus": gpus,
                          "cxx11_abi": torch.compiled_with_cxx11_abi(),
                          "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None}))
"""

_SHARED_LIBRARY = """
import ctypes, json, sys
report = {"error": None}
try:
    library = ctypes.CDLL(sys.argv[1])
    if len(sys.argv) > 2:
        value = ctypes.c_int()
        getattr(library, sys.argv[2])(ctypes.byref(value))
        report["version"] = value.value
except OSError as error:
    report["error"] = str(error)
print("\\n" + json.dumps(report))
"""


def run_child(code: str, words: Sequence[str], environment: Mapping[str, str], seconds: float = SECONDS) -> dict[str, Any]:
    """What the code printed as JSON on its last line, or {"error": sentence} when it died, hung or printed none."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, *words],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=seconds, env=dict(environment),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": LATE}
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        report: dict[str, Any] = json.loads(lines[-1])
        return report
    ended = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    said = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return {"error": f"ended the process ({ended}: {said})"}


def probe(
    libraries: Sequence[Library] = LIBRARIES, environment: Mapping[str, str] | None = None, seconds: float = SECONDS
) -> tuple[Verdict, ...]:
    """Imports each library in a child process of its own, all at once, and says how it went. Takes seconds."""
    variables = dict(os.environ) if environment is None else environment

    def judge(library: Library) -> Verdict:
        name, found = _installed(library)
        version = f"{name} {found.version}" if found else None
        error = run_child(_IMPORT, [library.module], variables, seconds)["error"]
        if error is None:
            return Verdict(library.module, True, version, "imports")
        if version is None and "ModuleNotFoundError" in error:
            return Verdict(library.module, False, None, f"is not installed: {library.install}")
        return Verdict(library.module, False, version, f"does not import ({error}); {remedy(library, error)}")

    with ThreadPoolExecutor(max_workers=max(1, len(libraries))) as pool:
        return tuple(pool.map(judge, libraries))


def _installed(library: Library) -> tuple[str, importlib.metadata.Distribution | None]:
    """The first of its names under which it is installed; None under any."""
    for name in library.distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return name, importlib.metadata.distribution(name)
    return "", None


def build_key(library: Library) -> list[str | None]:
    """What the outcome of its import depends on: its files, torch's and the driver's version, where shared libraries lie."""
    name, found = _installed(library)
    files = (found.read_text("RECORD") or "") if found else ""
    digest = f"{name} {found.version} {hashlib.sha256(files.encode()).hexdigest()}" if found else None
    try:
        driver: str | None = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        driver = None
    return [library.module, digest, importlib.metadata.version("torch"), sys.version, driver, os.environ.get("LD_LIBRARY_PATH")]


def torch_facts(environment: Mapping[str, str]) -> dict[str, Any]:
    """torch's version, CUDA, and each GPU's name, memory and peers; {"error": ...} when it does not import."""
    return run_child(_TORCH, [], environment)


def shared_library_facts(name: str, environment: Mapping[str, str], version_function: str | None = None) -> dict[str, Any]:
    """Whether the dynamic linker finds a library by name, and the int that its version function stores."""
    return run_child(_SHARED_LIBRARY, [name, *filter(None, [version_function])], environment)


def remedy(library: Library, error: str) -> str:
    """What to install so that it works, from how its import failed."""
    install = f"reinstall: {_pinned(library)}"
    if symbol := re.search(r"undefined symbol: (\S+)", error):
        missing = symbol.group(1)
        if "nccl" in missing.lower():
            return f"the installed NCCL lacks {missing}; {install}"
        if any(word in missing for word in ("c10", "2at", "torch", "caffe2")):
            return f"it was built for another torch, which has {missing}; {install}, together with the torch that it names"
        return install
    if shared := re.search(r"(\S+\.so\S*): cannot open shared object file", error):
        return f"install what holds {shared.group(1)} or put its folder on LD_LIBRARY_PATH; else {install}"
    return install


def _pinned(library: Library) -> str:
    """The command with the version that was run together with the others, as this package's extras pin it."""
    try:
        requirements = importlib.metadata.requires("minserve") or []
    except importlib.metadata.PackageNotFoundError:
        requirements = []
    pins = [line.partition(";")[0].strip() for line in requirements if re.match(r"[\w.-]+", line)[0] in library.distributions]  # type: ignore[index]
    return f"pip install '{pins[0]}'" if pins else library.install
