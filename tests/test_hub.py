"""Names of the Hub: the local cache first, offline respected, and a sentence for each way in which a name leads nowhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from hub_cache import write_cache
from safetensors.torch import load_file
from waiting import PATIENCE
from weights.toy_model import write_checkpoint

from minserve import hub
from minserve.config import Config, model_directory
from minserve.errors import CheckpointError, EnvironmentFault

TinyDir = Callable[[str], Path]


@pytest.fixture
def cached(tiny_dir: TinyDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The snapshot of `org/name` in a cache of its own; offline, as `HF_HUB_OFFLINE=1` makes the library."""
    source = tiny_dir("qwen3_moe")
    whole = write_checkpoint(tmp_path / "source", load_file(source / "model.safetensors"), 2)
    (whole / "config.json").write_bytes((source / "config.json").read_bytes())
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return write_cache(tmp_path / "home" / "hub", "org/name", whole)


@pytest.fixture
def fetched(cached: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Online: the calls that would reach the Hub, each answered with the snapshot."""
    calls: list[dict[str, Any]] = []
    real = huggingface_hub.snapshot_download

    def download(repo_id: str, **options: Any) -> str:
        if options.get("local_files_only"):
            return str(real(repo_id, **options))
        calls.append(options)
        return str(cached)

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return calls


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("deepseek-ai/DeepSeek-V3", True), ("Qwen/Qwen3-30B-A3B", True), ("moonshotai/Kimi-K2.5", True), ("embedded", False),
        ("/models/x", False), ("./a/b", False), ("../b", False), ("a/b/c", False), ("~/m", False), ("a/", False), ("", False),
    ],
)  # fmt: skip
def test_what_looks_like_a_name(name: str, is_one: bool) -> None:
    assert hub.is_repo_id(name) is is_one


def test_the_cache_is_enough_offline_and_online(cached: Path, fetched: list[dict[str, Any]]) -> None:
    assert model_directory(Config(model="org/name")) == cached
    assert not fetched


def test_a_directory_of_that_name_comes_first(cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "name" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert model_directory(Config(model="org/name")) == Path("org/name") != cached


@pytest.mark.parametrize("gap", ["shard", "config", "index"])
def test_an_incomplete_cache_is_fetched_again(gap: str, cached: Path, fetched: list[dict[str, Any]]) -> None:
    name = {"shard": "model-00002-of-00002.safetensors", "config": "config.json", "index": "model.safetensors.index.json"}[gap]
    (cached / name).resolve().unlink()
    hub.snapshot("org/name")
    (call,) = fetched
    assert "*.safetensors" in call["allow_patterns"] and "*.json" in call["allow_patterns"]
    assert not any(pattern.endswith((".bin", ".py", ".pt")) for pattern in call["allow_patterns"])


def test_a_plan_fetches_no_weights(cached: Path, fetched: list[dict[str, Any]]) -> None:
    for file in cached.glob("*.safetensors"):
        file.unlink()
    assert hub.snapshot("org/name", weights=False) == cached
    assert not fetched
    hub.snapshot("org/other", weights=False)
    assert "*.safetensors" not in fetched[0]["allow_patterns"]


def test_an_incomplete_cache_offline_is_left_to_the_proof_of_load(cached: Path) -> None:
    next(cached.glob("model-00001*")).resolve().unlink()
    assert hub.snapshot("org/name") == cached


@pytest.mark.usefixtures("cached")
def test_offline_and_not_cached() -> None:
    with pytest.raises(CheckpointError, match=r"'org/other' is no directory and not in the cache .*, and HF_HUB_OFFLINE is set"):
        model_directory(Config(model="org/other"))


@pytest.mark.parametrize("error", [OSError("no route"), ValueError("bad name\nand more"), RuntimeError("")])
@pytest.mark.usefixtures("fetched")
def test_what_the_hub_answers_is_said_in_one_line(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    real = huggingface_hub.snapshot_download

    def download(repo_id: str, **options: Any) -> str:
        if options.get("local_files_only"):
            return str(real(repo_id, **options))
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(CheckpointError) as said:
        hub.snapshot("org/other")
    expected = (str(error) or "RuntimeError").splitlines()[0]
    assert str(said.value) == f"'org/other' is no directory and cannot be had from the Hugging Face Hub: {expected}"


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(EnvironmentFault, match=r"pip install 'minserve\[hub\]'"):
        model_directory(Config(model="org/name"))


def test_the_commands_take_names(cached: Path) -> None:
    home = cached.parents[3]
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}

    def minserve(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "minserve", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment)

    assert json.loads((cached / "config.json").read_text())["architectures"] == ["Qwen3MoeForCausalLM"]
    done = minserve("check", "org/name")
    assert done.returncode == 0, done.stderr
    assert "checksums  4 files are what the hub cache's blob names say" in done.stdout
    assert minserve("plan", "org/name").stdout.splitlines()[-1].startswith("fits: ")
    assert minserve("launch", "org/other", "--port", "0").returncode == 4
