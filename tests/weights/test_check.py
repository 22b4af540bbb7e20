"""`minserve check`: what it proves without loading, and every kind of damage named with its bytes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hub_cache import write_cache
from hypothesis import given, settings
from hypothesis import strategies as st
from release_checkpoints import write_release
from safetensors.torch import load_file, save_file
from waiting import PATIENCE
from weights.toy_model import write_checkpoint

from minserve.config import Config
from minserve.errors import CheckpointError, ServerError
from minserve.models.check import check, compute_checksums, prove
from minserve.plan import make_plan, read_config

TinyDir = Callable[[str], Path]
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


def minserve_check(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "minserve", "check", *map(str, words)], capture_output=True, text=True, timeout=PATIENCE
    )


@pytest.fixture
def sharded(tiny_dir: TinyDir, tmp_path: Path) -> Path:
    """A tiny model in three files with an index."""
    source = tiny_dir("moonlight")
    target = write_checkpoint(tmp_path / "model", load_file(source / "model.safetensors"), 3)
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    return target


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Changes the tensors of the file that holds EXPERT."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = load_file(directory / index[EXPERT])
    change(tensors)
    save_file(tensors, directory / index[EXPERT])


def test_the_command_proves_a_whole_checkpoint_and_says_what(sharded: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.json"
    done = minserve_check(sharded, "--write-manifest", manifest)
    assert done.returncode == 0, done.stderr
    tensors = {name for file in sharded.glob("*.safetensors") for name in load_file(file)}
    assert "files      3, whole to the byte" in done.stdout
    assert f"model      DeepseekV3ForCausalLM: {len(tensors)} tensors" in done.stdout
    assert f"manifest   {len(tensors)} tensors written to {manifest}" in done.stdout
    written = json.loads(manifest.read_text())
    assert written["minserve_manifest"] == 1 and written["tensors"].keys() == tensors
    assert written["tensors"][EXPERT].keys() == {"dtype", "shape", "bytes", "sha256"}
    rewrite(sharded, lambda tensors: tensors[EXPERT].view(torch.uint8).__setitem__((5, 7), 77))
    done = minserve_check(sharded, "--manifest", manifest)
    assert done.returncode == 4
    assert f"1 tensors differ from the manifest: {EXPERT} (4,096 bytes)" in done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_manifest_does_not_care_how_tensors_are_spread_over_files(sharded: Path, tmp_path: Path) -> None:
    check(sharded, None, tmp_path / "manifest.json")
    tensors = {name: value for file in sharded.glob("*.safetensors") for name, value in load_file(file).items()}
    other = write_checkpoint(tmp_path / "other", tensors, 0)
    (other / "config.json").write_bytes((sharded / "config.json").read_bytes())
    assert f"{len(tensors)} tensors are what" in check(other, tmp_path / "manifest.json", None)


def test_a_missing_tokenizer_is_a_note(sharded: Path) -> None:
    note = "note       neither tokenizer.json nor tiktoken.model is there: a server will need --tokenizer"
    assert note in check(sharded, None, None)
    (sharded / "tiktoken.model").write_bytes(b"IQ== 0")
    assert note not in check(sharded, None, None)


def test_without_anything_to_compare_with_it_says_so(sharded: Path) -> None:
    assert "checksums  not compared: no hub cache and no --manifest" in check(sharded, None, None)


@pytest.mark.parametrize("differs", [False, True])
def test_a_head_beside_a_tied_embedding_is_compared_with_it(sharded: Path, differs: bool) -> None:
    config = json.loads((sharded / "config.json").read_text())
    (sharded / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    files = {name: file for file in sharded.glob("*.safetensors") for name in load_file(file)}
    head = load_file(files["model.embed_tokens.weight"])["model.embed_tokens.weight"].clone()
    head[-1, -1] += differs
    save_file(load_file(files["lm_head.weight"]) | {"lm_head.weight": head}, files["lm_head.weight"])
    page = check(sharded, None, None)
    assert "the head is tied to the embedding" in page
    assert ("note       WARNING: lm_head.weight is stored and differs" in page) == differs


def test_missing_extra_and_retyped_tensors_of_a_manifest(sharded: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.json"
    check(sharded, None, manifest)
    body = json.loads(manifest.read_text())
    del body["tensors"][EXPERT]
    body["tensors"]["gone.weight"] = {"dtype": "BF16", "shape": [2], "bytes": 4, "sha256": "0" * 64}
    body["tensors"]["model.norm.weight"]["dtype"] = "F16"
    manifest.write_text(json.dumps(body))
    with pytest.raises(CheckpointError) as error:
        check(sharded, manifest, None)
    assert "differ from the manifest: model.norm.weight (BF16 [64] and not F16 [64])" in str(error.value)
    assert "of the manifest are missing: gone.weight (4 bytes)" in str(error.value)
    assert f"are not in the manifest: {EXPERT} (4,096 bytes)" in str(error.value)


@pytest.mark.parametrize(
    ("body", "message"),
    [("{", "is no manifest"), ("{}", "is no manifest"), ('{"minserve_manifest": 2, "tensors": {}}', "version 2"), (None, "read")],
)
def test_a_damaged_manifest(sharded: Path, tmp_path: Path, body: str | None, message: str) -> None:
    manifest = tmp_path / "manifest.json"
    if body is not None:
        manifest.write_text(body)
    with pytest.raises(CheckpointError, match=message):
        check(sharded, manifest, None)
    with pytest.raises(CheckpointError, match="cannot be written"):
        check(sharded, None, tmp_path / "no" / "folder.json")


@pytest.mark.parametrize("damage", ["index", "short", "missing", "shape", "unknown"])
def test_every_gap_of_a_load_is_a_gap_here(damage: str, sharded: Path) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[EXPERT]

    index_file = sharded / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    file = sharded / index["weight_map"][EXPERT]
    if damage == "index":
        file.unlink()
        expected = f"{file.name} is not there"
    elif damage == "short":
        file.write_bytes(file.read_bytes()[:-3])
        expected = "3 bytes missing"
    elif damage == "missing":
        rewrite(sharded, drop)
        del index["weight_map"][EXPERT]
        expected = rf"1 tensors that the model needs are missing: {EXPERT} \[32, 64\]"
    elif damage == "shape":
        rewrite(sharded, lambda tensors: tensors.update({EXPERT: torch.ones(64, 32)}))
        expected = r"do not fit the model: .* where the model has \[32, 64\]"
    else:
        rewrite(sharded, lambda tensors: tensors.update({"model.layers.0.more.weight": torch.ones(2)}))
        index["weight_map"]["model.layers.0.more.weight"] = file.name
        expected = r"unknown to the model: model\.layers\.0\.more\.weight"
    index_file.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=expected):
        check(sharded, None, None)


def test_no_memory_is_taken_for_a_context_of_any_length(sharded: Path) -> None:
    config = json.loads((sharded / "config.json").read_text())
    (sharded / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1 << 30}))
    assert prove(sharded)[2] == "DeepseekV3ForCausalLM"


WRONG = [None, -1, 0, 1, 2, 3, 1e-300, 1e300, 10**20, float("nan"), True, "", "x", "yarn", [], [0], {}, {"a": []}]


@pytest.fixture(scope="module")
def yarn_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_release("Kimi-K2.5", tmp_path_factory.mktemp("yarn"))[0]


@given(data=st.data())
@settings(max_examples=250, deadline=None)
def test_fuzz_values_of_config_and_index_end_in_a_proof_or_a_refusal(yarn_model: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["config.json", "config.json", "model.safetensors.index.json"]))
    original = (yarn_model / name).read_bytes()
    values = json.loads(original)
    place = values
    while True:
        key = data.draw(st.sampled_from(sorted(place)))
        if not isinstance(place[key], dict) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(st.sampled_from(WRONG))
    (yarn_model / name).write_text(json.dumps(values))
    try:
        with contextlib.suppress(CheckpointError):
            prove(yarn_model)
        with contextlib.suppress(ServerError):
            make_plan(read_config(yarn_model)[0], Config())
    finally:
        (yarn_model / name).write_bytes(original)


@pytest.mark.parametrize("name", ["Kimi-K2.5", "Kimi-K2.5-NVFP4", "DeepSeek-V3"])
def test_releases_are_proven_in_every_format(name: str, tmp_path: Path) -> None:
    release, _ = write_release(name, tmp_path)
    (release / "tokenizer.json").write_text("{}")
    page = check(release, None, tmp_path / "manifest.json")
    kind = {"Kimi-K2.5": "int4_group", "Kimi-K2.5-NVFP4": "nvfp4"}.get(name, "fp8_block")
    assert f" {kind}" in page and "note" not in page
    assert ("not for text (vision)" in page) == name.startswith("Kimi")
    # What is left on disk has its checksums too.
    assert ("vision_tower" in (tmp_path / "manifest.json").read_text()) == name.startswith("Kimi")


# ---- hub caches


def test_a_hub_cache_is_held_to_its_blob_names(sharded: Path, tmp_path: Path) -> None:
    snapshot = write_cache(tmp_path / "hub", "org/name", sharded)
    assert f"{len(list(sharded.iterdir()))} files are what the hub cache's blob names say" in check(snapshot, None, None)
    victim = next(snapshot.glob("model-00002*")).resolve()
    body = bytearray(victim.read_bytes())
    body[-1] ^= 1
    victim.write_bytes(body)
    config = (snapshot / "config.json").resolve()
    config.write_text(config.read_text() + "\n")
    with pytest.raises(CheckpointError) as error:
        check(snapshot, None, None)
    assert "2 of 5 files are damaged: config.json (" in str(error.value)
    assert f"model-00002-of-00003.safetensors ({len(body):,} bytes) has " in str(error.value)
    assert f"its blob is {victim.name}" in str(error.value)


def test_an_incomplete_hub_cache_is_named(sharded: Path, tmp_path: Path) -> None:
    snapshot = write_cache(tmp_path / "hub", "org/name", sharded)
    next(snapshot.glob("model-00002*")).resolve().unlink()
    with pytest.raises(
        CheckpointError, match=r"model-00002-of-00003.safetensors is a dangling link to .*/blobs/.*incomplete download"
    ):
        check(snapshot, None, None)


def test_small_weights_that_git_keeps_itself_have_gits_checksum(sharded: Path, tmp_path: Path) -> None:
    """Repositories of tiny models: the weights are no LFS files there, so their blobs are named by git's sha1."""
    snapshot = write_cache(tmp_path / "hub", "org/name", sharded, lfs=())
    assert all(len(link.resolve().name) == 40 for link in snapshot.iterdir())
    assert "5 files are what" in check(snapshot, None, None)
    next(snapshot.glob("model-00001*")).resolve().open("r+b").write(b"\x10")
    with pytest.raises(CheckpointError):
        check(snapshot, None, None)


def test_another_file_of_a_cache_that_dangles_is_named(sharded: Path, tmp_path: Path) -> None:
    (sharded / "tokenizer.json").write_text("{}")
    snapshot = write_cache(tmp_path / "hub", "org/name", sharded)
    (snapshot / "tokenizer.json").resolve().unlink()
    with pytest.raises(CheckpointError, match=r"1 of 6 files are damaged: tokenizer.json cannot be read: No such file"):
        check(snapshot, None, None)


def test_a_file_that_goes_away_after_the_proof_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone.safetensors cannot be read: No such file"):
        compute_checksums([tmp_path / "gone.safetensors"], print, by_tensor=False)


# ---- one pass, bounded memory


def test_each_byte_is_read_once_and_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minserve.models.check.PIECE_BYTES", 1 << 16)
    tensors = {"a": torch.randn(1000, 1000), "empty": torch.ones(0, 4), "b": torch.randn(3), "c": torch.randn(4000, 500)}
    save_file(tensors, tmp_path / "model.safetensors")
    file, counts = tmp_path / "model.safetensors", []
    tracemalloc.start()
    sums = compute_checksums([file], counts.append, by_tensor=True, threads=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 16
    assert sum(counts) == file.stat().st_size and max(counts) <= 1 << 16
    assert sums.files == compute_checksums([file], counts.append, by_tensor=False).files
    assert sums.tensors.keys() == tensors.keys()
    assert sums.files[file] == hashlib.sha256(file.read_bytes()).hexdigest()
    for name, tensor in tensors.items():
        assert sums.tensors[name].sha256 == hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
