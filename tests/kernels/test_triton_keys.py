"""A kernel's key in the compiler's cache does not depend on what the process compiled before it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

# Kernels get their keys before all else; those that they call have theirs already where they read globals, or Triton 3.6 leaves
# these out.
LATE = """
import importlib, pkgutil, sys
from triton.runtime.jit import DependenciesFinder, JITFunction
import minserve.kernels as kernels

add = DependenciesFinder._update_hash
late, called = set(), 0

def watched(self, function):
    global called
    keyless = function.hash is None
    add(self, function)
    called += 1
    if keyless and function.used_global_vals:
        late.add(function._fn_name)

for found in pkgutil.iter_modules(kernels.__path__):
    if found.name.startswith("triton_") or found.name == "launch":
        importlib.import_module(f"minserve.kernels.{found.name}")
DependenciesFinder._update_hash = watched
modules = [module for name, module in sys.modules.items() if name.startswith("minserve.kernels.")]
functions = [value for module in modules for value in vars(module).values() if isinstance(value, JITFunction)]
for function in sorted(functions, key=lambda function: not function.__name__.endswith("_kernel")):
    function.cache_key
assert called > 100, called
assert not late, f"@keyed is missing: {sorted(late)}"
"""


@pytest.mark.skipif((sys.platform, platform.machine()) != ("linux", "x86_64"), reason="Triton is not made for this machine")
def test_functions_with_globals_have_their_key_before_they_are_called() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", LATE], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
