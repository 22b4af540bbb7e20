"""Jobs over GPUs: what runs beside what, what is cut, and what a second call need not do again. The GPUs are names here."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from waiting import PATIENCE, until

from tools import measure
from tools.measure import Job

WRITE_PLACE = "import os, sys, time; print('on', os.environ['CUDA_VISIBLE_DEVICES'], flush=True); time.sleep(float(sys.argv[1]))"


def job(name: str, gpus: float = 1.0, sleep: float = 0.0, seconds: int = 60, code: str = WRITE_PLACE) -> Job:
    return Job(name, "jobs", ["-c", code, str(sleep)], gpus, seconds)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def measured(*jobs: Job, devices: str = "0,1", words: tuple[str, ...] = ()) -> int:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
        monkeypatch.setattr(measure, "jobs", lambda: list(jobs))
        return measure.main([str(tmp_path), *words])

    return measured


def said(folder: Path, name: str) -> str:
    return (folder / f"{name}.log").read_text()


def test_whole_gpus_go_to_one_job_each_and_fractions_share(call, tmp_path: Path) -> None:
    # The three fractions start at once, so what they leave is the second GPU alone.
    assert call(*(job(f"part{index}", 0.3, 2.0) for index in range(3)), job("whole")) == 0
    assert [said(tmp_path, f"part{index}") for index in range(3)] == ["on 0\n"] * 3
    assert said(tmp_path, "whole") == "on 1\n"


def test_a_job_of_two_gpus_has_both(call, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(job("one"), job("two", 2), job("four", 4)) == 1
    assert said(tmp_path, "two") == "on 0,1\n"
    told = capsys.readouterr().out
    assert "four is left out: it needs 4 GPUs, and 2 are visible" in told
    assert "2 of 3 jobs are done; left: four" in told


def test_what_ended_well_is_not_run_again(call, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(job("good"), job("bad", code="import sys; sys.exit('no luck')")) == 1
    assert "== bad\nno luck" in capsys.readouterr().out
    assert call(job("good", code="raise SystemExit(3)"), job("bad")) == 0
    assert said(tmp_path, "good") == said(tmp_path, "bad") == "on 0\n"


def test_a_script_in_another_folder_finds_the_checkout(call, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import tools.measure; print(tools.measure.ROOT)")
    assert call(Job("script", "jobs", [str(tmp_path / "script.py")])) == 0
    assert said(tmp_path, "script") == f"{measure.ROOT}\n"


def test_what_takes_too_long_is_cut_with_its_children(call, tmp_path: Path) -> None:
    child = "import subprocess; print('begun', flush=True); subprocess.run(['sleep', '900'])"
    began = time.monotonic()
    assert call(job("long", seconds=4, code=child), job("later")) == 1
    assert time.monotonic() - began < 60
    assert said(tmp_path, "long") == "begun\n"
    assert said(tmp_path, "later") == "on 1\n"
    assert call(job("long", sleep=900), words=("--seconds", "1")) == 1


def test_jobs_end_with_it(tmp_path: Path) -> None:
    job = "import subprocess; child = subprocess.Popen(['sleep', '900']); print(child.pid, flush=True); child.wait()"
    code = f"""
import signal
from tools import measure
signal.signal(signal.SIGINT, signal.default_int_handler)
measure.jobs = lambda: [measure.Job("long", "jobs", ["-c", {job!r}])]
measure.main([{str(tmp_path)!r}])
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=measure.ROOT, env=os.environ | {"CUDA_VISIBLE_DEVICES": "0"}) as tool:
        log = tmp_path / "long.log"
        until(lambda: log.exists() and log.read_text().endswith("\n"))
        child = psutil.Process(int(log.read_text()))
        tool.send_signal(signal.SIGINT)
    try:
        assert not psutil.wait_procs([child], PATIENCE)[1]
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def test_parts_and_jobs_are_chosen_by_name(call, tmp_path: Path) -> None:
    jobs = [job("one"), job("two"), Job("other", "others", ["-c", WRITE_PLACE, "0"])]
    assert call(*jobs, words=("--parts", "jobs", "--only", "two")) == 0
    assert sorted(path.name for path in tmp_path.glob("*.log")) == ["two.log"]
    assert call(*jobs, words=("--parts", "others")) == 0
    assert said(tmp_path, "other") == "on 0\n"


def test_without_a_gpu_it_says_so(call, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(job("one"), devices="") == 2
    assert "no GPU" in capsys.readouterr().out


def test_each_part_is_listed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert measure.main([str(tmp_path), "--list"]) == 0
    parts = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert len(parts) == len(set(parts)) == len({job.part for job in measure.jobs()})


def test_every_job_names_a_file_or_module_that_is_there() -> None:
    every = measure.jobs()
    assert len({job.name for job in every}) == len(every)
    root = measure.ROOT
    for one in every:
        for word in one.words:
            if word.startswith(("tests/", "tools/", "configs/")):
                assert (root / word).exists(), one.name
