"""Each way out of the page cache delivers the files' bytes, and a way that is refused is a row that says so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tools import page_cache_copies
from tools.page_cache_copies import WAYS, describe, mapped, run

CPU = torch.device("cpu")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setattr(page_cache_copies, "READ_THREADS", (2, 3))
    monkeypatch.setattr(page_cache_copies, "READ_BLOCKS", (4096, 8192))
    monkeypatch.setattr(page_cache_copies, "COPY_THREADS", (1, 3))
    monkeypatch.setattr(page_cache_copies, "COPY_BLOCK", 4096)
    made = [tmp_path / f"{size}.safetensors" for size in (5, 4096, 50_001)]
    for file in made:
        file.write_bytes(os.urandom(int(file.stem)))
    return made


@pytest.mark.parametrize("way", ["preadv into pinned", "preadv into huge pages", "mapping", "populated mapping"])
def test_every_row_moves_all_bytes(files: list[Path], way: str) -> None:
    results = run(way, files, CPU)
    assert len(results) == (4 if way.startswith("preadv") else 2)
    for result in results:
        assert result["gb"] == (5 + 4096 + 50_001) / 1e9
        assert result["gb_per_second"] == pytest.approx(result["gb"] / sum(result["seconds"].values()))
        assert " GB/s (" in describe(result)


@pytest.mark.parametrize("way", [way for way in WAYS if way.startswith("registered")])
def test_a_refused_way_is_a_row_with_its_reason(files: list[Path], way: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("CUDA may take it")
    results = run(way, files, CPU)
    assert len(results) == 2
    assert all("CUDA" in result["error"] and result["error"] in describe(result) for result in results)


@pytest.mark.parametrize("populate", [False, True])
def test_a_mapping_is_the_file(files: list[Path], populate: bool) -> None:
    assert bytes(mapped(files[2], populate=populate).numpy()) == files[2].read_bytes()


def test_bytes_that_did_not_arrive_are_an_error(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "equal", lambda *_: False)
    assert [result["error"] for result in run("mapping", files, CPU)] == [
        "RuntimeError: the bytes that arrived are not the file's"
    ] * 2


def test_what_was_registered_is_given_back_when_a_range_is_refused(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_cache_copies, "RANGE_BYTES", 16384)
    registered: list[int] = []

    class Cuda:
        most = 6

        def cudaHostRegister(self, address: int, _size: int, flags: int) -> int:  # noqa: N802
            assert flags == page_cache_copies.READ_ONLY
            registered.append(address)
            return int(len(registered) > self.most)

        def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
            registered.remove(address)
            return 0

        def cudaGetErrorString(self, _error: int) -> str:  # noqa: N802
            return "operation not supported"

    cuda = Cuda()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    assert [list(result["seconds"]) for result in run("registered, read-only", files, CPU)] == [
        ["map", "register", "copy", "unregister"]
    ] * 2
    assert not registered
    cuda.most = 3
    errors = [result["error"] for result in run("registered, read-only", files, CPU)]
    assert errors == ["OSError: refused: operation not supported"] * 2
