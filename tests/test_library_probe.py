"""Verdicts on libraries from real child processes: sound, broken, crashing, hanging and missing ones told apart."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from waiting import PATIENCE

from minserve import library_probe
from minserve.library_probe import Library, remedy


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "fake_sound.py").write_text("print('chatter of an import')\n")
    (tmp_path / "fake_broken.py").write_text("raise OSError('libfake.so.3: cannot open shared object file')\n")
    (tmp_path / "fake_crash.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    (tmp_path / "fake_slow.py").write_text("import time\ntime.sleep(60)\n")
    return os.environ | {"PYTHONPATH": str(tmp_path)}


def test_sound_broken_crashing_and_missing_libraries_are_told_apart(environment: dict[str, str]) -> None:
    libraries = (
        Library("fake_sound", ("numpy",), "pip install sound"),
        Library("fake_broken", ("no-such-name",), "pip install broken"),
        Library("fake_crash", ("numpy",), "pip install crash"),
        Library("fake_absent", ("no-such-name",), "pip install absent"),
    )
    sound, broken, crash, absent = library_probe.probe(libraries, environment, PATIENCE)
    assert sound.usable and sound.version is not None and sound.version.startswith("numpy ")
    assert not broken.usable and "libfake.so.3" in broken.detail and "pip install broken" in broken.detail
    assert not crash.usable and "signal 11" in crash.detail
    assert (absent.usable, absent.version, absent.detail) == (False, None, "is not installed: pip install absent")


def test_an_import_that_does_not_end_is_a_verdict(environment: dict[str, str]) -> None:
    (verdict,) = library_probe.probe([Library("fake_slow", (), "pip install slow")], environment, seconds=0.5)
    assert not verdict.usable and "did not end" in verdict.detail


@pytest.mark.skipif(shutil.which("gcc") is None, reason="builds a library with gcc")
def test_a_wheel_for_another_torch_is_named_with_its_symbol_and_the_pin(tmp_path: Path, environment: dict[str, str]) -> None:
    source = tmp_path / "fake_abi.c"
    source.write_text(
        "extern int _ZN3c1012missing_hereEv(void);\nint PyInit_fake_abi(void) { return _ZN3c1012missing_hereEv(); }\n"
    )
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-z,now", "-o", str(tmp_path / "fake_abi.so"), str(source)], check=True)
    (verdict,) = library_probe.probe([Library("fake_abi", ("sgl-deep-gemm",), "pip install fake")], environment, PATIENCE)
    assert not verdict.usable
    assert "_ZN3c1012missing_hereEv" in verdict.detail and "another torch" in verdict.detail
    assert "pip install 'sgl-deep-gemm==" in verdict.detail


def test_an_older_nccl_is_named_with_its_symbol() -> None:
    said = remedy(library_probe.DEEP_EP, "ImportError: deep_ep_cpp.so: undefined symbol: ncclCommQueryProperties")
    assert "NCCL lacks ncclCommQueryProperties" in said and "pip install 'tokenspeed-deepep==" in said
