"""Which steps FlashInfer's attention takes: plans are made on the host, so a double stands for the library."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from minserve import kernels
from minserve.kernels.interface import AttentionMetadata, AttentionShape
from minserve.runtime.cuda_graph import mixed_sizes

pytest.importorskip("triton")
DEEPSEEK = AttentionShape("mla", num_heads=128, num_kv_heads=1, head_dim=512, rope_dim=64, scale=1.0)


class Wrapper:
    """Takes any plan."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def plan(self, *_: object) -> None: ...


class Event:
    def synchronize(self) -> None: ...

    def record(self) -> None: ...


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    mla = types.SimpleNamespace(BatchMLAPagedAttentionWrapper=Wrapper)
    monkeypatch.setitem(sys.modules, "flashinfer", types.SimpleNamespace(mla=mla))
    monkeypatch.setitem(sys.modules, "flashinfer.mla", mla)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    spec = importlib.util.spec_from_file_location("planned_attention", Path(kernels.__path__[0]) / "flashinfer_attention.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def prompt(tokens: int, real: int, table: torch.Tensor) -> AttentionMetadata:
    """A step of one prompt, in the mixed graph of so many tokens."""
    rows = table.shape[0]
    lengths = (real, *(0,) * (rows - 1))
    starts, seq_lens = torch.zeros(rows + 1, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)
    return AttentionMetadata(starts, seq_lens, table, torch.zeros(tokens, dtype=torch.int64), 64, lengths, lengths, graph=True)


@pytest.mark.parametrize("most", [100, 256, 1000, 2048, 8192])
@pytest.mark.parametrize("max_num_seqs", [1, 16, 64, 128, 300])
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_every_step_of_a_mixed_graph_has_a_plan_for_its_grid(module: Any, heads: int, max_num_seqs: int, most: int) -> None:
    shape = AttentionShape("mla", num_heads=heads, num_kv_heads=1, head_dim=512, rope_dim=64, scale=1.0)
    triton = types.SimpleNamespace(plan=lambda *_: None)
    attention = module.FlashInferAttention(torch.device("cpu"), triton)
    table = torch.zeros(max_num_seqs + 1, 4, dtype=torch.int32)
    for smaller, size in itertools.pairwise((0, *mixed_sizes(most))):
        plans = [attention.plan(prompt(size, real, table), shape) for real in (size, smaller + 1)]
        assert plans[0] == plans[1]


def test_a_plan_for_another_grid_is_refused(module: Any) -> None:
    attention = module.FlashInferAttention(torch.device("cpu"), types.SimpleNamespace(plan=lambda *_: None))
    table = torch.zeros(65, 4, dtype=torch.int32)
    assert attention.plan(prompt(1024, 1024, table), DEEPSEEK).wrapper is not None
    with pytest.raises(ValueError, match="20 tokens are too few for the graph of 1024 tokens"):
        attention.plan(prompt(1024, 20, table), DEEPSEEK)
