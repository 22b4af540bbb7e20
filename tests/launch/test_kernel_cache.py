"""Where compiled kernels are kept: one folder, in the engine's environment before it starts; what the person has set stays."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

import pytest

from minserve import launch
from minserve.config import Config

VARIABLES = {"TRITON_CACHE_DIR": "triton", "DG_JIT_CACHE_DIR": "deep_gemm", "FLASHINFER_WORKSPACE_BASE": "flashinfer"}


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (*VARIABLES, "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)


def test_the_flag_names_the_folder(tmp_path: Path) -> None:
    environment = launch.engine_environment(Config(kernel_cache=str(tmp_path / "kernels")))
    assert {name: environment[name] for name in VARIABLES} == {
        name: str(tmp_path / "kernels" / folder) for name, folder in VARIABLES.items()
    }


def test_a_relative_folder_is_that_of_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert launch.engine_environment(Config(kernel_cache="k"))["TRITON_CACHE_DIR"] == str(tmp_path / "k" / "triton")


def test_without_the_flag_it_lies_in_the_cache_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    default = launch.engine_environment(Config())["TRITON_CACHE_DIR"]
    assert default == str(tmp_path / ".cache" / "minserve" / "kernels" / "triton")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert launch.engine_environment(Config())["DG_JIT_CACHE_DIR"] == str(tmp_path / "xdg" / "minserve" / "kernels" / "deep_gemm")


def test_what_the_person_has_set_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    environment = launch.engine_environment(Config(kernel_cache=str(tmp_path)))
    assert environment["TRITON_CACHE_DIR"] == "/elsewhere"
    assert environment["DG_JIT_CACHE_DIR"] == str(tmp_path / "deep_gemm")


@pytest.mark.parametrize(
    ("there", "forbidden", "writable", "kept"),
    [(True, True, False, False), (False, False, True, False), (False, True, True, True), (False, False, False, True)],
)
def test_bytecode_is_kept_where_the_modules_cannot_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool, forbidden: bool, writable: bool, kept: bool
) -> None:
    package = tmp_path / "torch"
    (package / "__pycache__").mkdir(parents=True)
    cached = package / "__pycache__" / "__init__.pyc"
    if there:
        cached.touch()
    spec = importlib.machinery.ModuleSpec("torch", None)
    spec.cached = str(cached)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    monkeypatch.setattr(os, "access", lambda path, _: writable and Path(path) == package)
    monkeypatch.setattr(sys, "dont_write_bytecode", forbidden)
    wanted = {"PYTHONPYCACHEPREFIX": str(tmp_path / "cache" / "python"), "PYTHONDONTWRITEBYTECODE": ""}
    assert launch.bytecode_variables(Config(kernel_cache=str(tmp_path / "cache"))) == (wanted if kept else {})
