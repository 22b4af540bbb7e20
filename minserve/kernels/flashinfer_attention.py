"""FlashInfer attention on Hopper: planned on the host outside a graph, run inside it.

Shapes and types without a FlashInfer kernel here, and decode steps where ours is faster, go to Triton. Not for two streams
at once: the workspaces belong to the stream that attention runs on, which is the main one.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import flashinfer
import flashinfer.mla
import torch
from torch import Tensor

from minserve.kernels.interface import AttentionMetadata, AttentionShape
from minserve.kernels.triton_attention import TritonAttention, TritonPlan
from minserve.kernels.triton_cache import list_pages

WORKSPACE_BYTES = 128 << 20
"""Partial results of split caches; one for all wrappers, which never run at the same time."""

_DTYPE = torch.bfloat16


@dataclasses.dataclass(frozen=True, slots=True)
class FlashInferPlan:
    """What a step's attention runs with."""

    triton: TritonPlan
    wrapper: Any
    """FlashInfer's, planned for this step; None: Triton computes it."""


@dataclasses.dataclass(slots=True)
class _Wrapper:
    """One FlashInfer wrapper, with the event after which its pinned plan buffer may be written again."""

    run: Any
    pages: Tensor | None
    """The page table that a graph's kernel reads, flattened; None where each step brings its own."""
    planned: torch.cuda.Event


class FlashInferAttention:
    """Plan and run of one device: absorbed MLA, and grouped-query steps that hold prefill tokens.

    `plan` must be called once for every step before its forward, a replay's included. With `metadata.graph` the wrapper
    belongs to the number of rows and to the page table's address, is made on the first call, and keeps its buffers for
    good: the graph records `run`, and each later `plan` refills the buffers in place. Such a plan's result is the same
    object each time. Without `graph`, a wrapper serves any step.
    """

    def __init__(self, device: torch.device, triton: TritonAttention, least_mla_rows: int = 12) -> None:
        self.device = device
        self.triton = triton
        self.least_mla_rows = least_mla_rows
        """Decode batches of fewer rows are faster in Triton. Grouped-query decode is at every size, and plans nothing."""
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._graphs: dict[tuple[AttentionShape, int, int], tuple[_Wrapper, FlashInferPlan]] = {}
        self._eager: dict[str, _Wrapper] = {}

    def plan(self, metadata: AttentionMetadata, shape: AttentionShape) -> FlashInferPlan:
        """Host work: copies lengths to FlashInfer's buffers and cuts the work. Reads no device value.

        Raises ValueError when a graph's page table moved since its first plan: the graph would read freed memory.
        """
        triton = self.triton.plan(metadata, shape)
        decode, rows = metadata.decode_only, metadata.page_table.shape[0]
        captured_mixed = metadata.graph and not decode
        if not _covers(shape) or captured_mixed or (decode and (shape.kind == "gqa" or rows < self.least_mla_rows)):
            return FlashInferPlan(triton, None)
        if decode and metadata.graph:
            return self._graph_plan(metadata, shape, triton)
        if shape.kind not in self._eager:
            self._eager[shape.kind] = self._mla_wrapper(metadata, graph=False) if shape.kind == "mla" else self._gqa_wrapper()
        wrapper = self._eager[shape.kind]
        self._plan(wrapper, metadata, shape)
        return FlashInferPlan(triton, wrapper.run)

    def _graph_plan(self, metadata: AttentionMetadata, shape: AttentionShape, triton: TritonPlan) -> FlashInferPlan:
        table = metadata.page_table
        key = (shape, table.shape[0], metadata.page_size)
        if key not in self._graphs:
            wrapper = self._mla_wrapper(metadata, graph=True)
            self._graphs[key] = (wrapper, FlashInferPlan(triton, wrapper.run))
        wrapper, plan = self._graphs[key]
        if wrapper.pages is None or wrapper.pages.data_ptr() != table.data_ptr() or wrapper.pages.numel() != table.numel():
            raise ValueError(f"the page table of the {table.shape[0]}-row graph moved after its first plan")
        self._plan(wrapper, metadata, shape)
        return plan

    def forget_graphs(self) -> None:
        """Drops the wrappers of captured sizes: call it when the graphs themselves are destroyed."""
        self._graphs.clear()

    def _mla_wrapper(self, metadata: AttentionMetadata, *, graph: bool) -> _Wrapper:
        # The kernel finds each row's pages at an offset, so the page table itself is the list of pages. The other buffers
        # are only copied to, never read by the kernel: host memory is enough.
        rows = metadata.page_table.shape[0]
        pages = metadata.page_table.view(-1) if graph else None
        starts, page_starts, lengths = (torch.empty(rows + extra, dtype=torch.int32) for extra in (1, 1, 0))
        run = flashinfer.mla.BatchMLAPagedAttentionWrapper(
            self._workspace, graph, starts, page_starts, pages, lengths, backend="fa3"
        )
        return _Wrapper(run, pages, torch.cuda.Event())

    def _gqa_wrapper(self) -> _Wrapper:
        run = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend="fa3")
        return _Wrapper(run, None, torch.cuda.Event())

    def _plan(self, wrapper: _Wrapper, metadata: AttentionMetadata, shape: AttentionShape) -> None:
        # The previous plan's copy reads the pinned buffer that this one writes; it is long done unless the GPU lags.
        wrapper.planned.synchronize()
        if shape.kind == "mla":
            _plan_mla(wrapper, metadata, shape)
        else:
            _plan_gqa(wrapper, metadata, shape)
        wrapper.planned.record()

    def gqa(self, q: Tensor, cache: Tensor, metadata: AttentionMetadata, shape: AttentionShape, plan: FlashInferPlan) -> Tensor:
        """q [T, Hq, D] over cache [pages, 2, page_size, Hkv, D], causal within the row: [T, Hq, D]."""
        if plan.wrapper is None or q.dtype != _DTYPE or cache.dtype != _DTYPE:
            return self.triton.gqa(q, cache, metadata, shape, plan.triton)
        result: Tensor = plan.wrapper.run(q, cache)
        return result

    def mla(
        self,
        q_latent: Tensor,
        q_rope: Tensor,
        cache: Tensor,
        metadata: AttentionMetadata,
        shape: AttentionShape,
        plan: FlashInferPlan,
    ) -> Tensor:
        """q_latent [T, Hq, R] and q_rope [T, Hq, P] over cache [pages, page_size, R + P]: the mean latent [T, Hq, R]."""
        if plan.wrapper is None or q_latent.dtype != _DTYPE or cache.dtype != _DTYPE:
            return self.triton.mla(q_latent, q_rope, cache, metadata, shape, plan.triton)
        rank = shape.head_dim
        out = torch.empty(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device)
        result: Tensor = plan.wrapper.run(q_latent, q_rope, cache[..., :rank], cache[..., rank:], out=out)
        return result


def _covers(shape: AttentionShape) -> bool:
    """The head sizes whose FlashInfer kernels are worth compiling: others would cost minutes at start."""
    if shape.kind == "mla":
        return (shape.head_dim, shape.rope_dim) == (512, 64)
    return shape.head_dim in (128, 256)


def _running_sum(values: list[int] | tuple[int, ...]) -> Tensor:
    """int32 [len + 1] on the host: 0, then the sums of the first 1, 2, ... values."""
    return torch.tensor(list(itertools.accumulate(values, initial=0)), dtype=torch.int32)


def _plan_mla(wrapper: _Wrapper, metadata: AttentionMetadata, shape: AttentionShape) -> None:
    table = metadata.page_table
    wrapper.run.plan(
        _running_sum(metadata.query_lens_host),
        torch.arange(0, table.shape[0] + 1, dtype=torch.int32) * table.shape[1],
        table.reshape(-1) if wrapper.pages is None else wrapper.pages[:0],
        torch.tensor(metadata.seq_lens_host, dtype=torch.int32),
        shape.num_heads,
        shape.head_dim,
        shape.rope_dim,
        metadata.page_size,
        not metadata.decode_only,
        shape.scale,
        _DTYPE,
        _DTYPE,
    )


def _plan_gqa(wrapper: _Wrapper, metadata: AttentionMetadata, shape: AttentionShape) -> None:
    size = metadata.page_size
    page_counts = [-(-length // size) for length in metadata.seq_lens_host]
    pages = torch.empty(sum(page_counts), dtype=torch.int32, device=metadata.page_table.device)
    list_pages(metadata.page_table, metadata.seq_lens, size, pages)
    wrapper.run.plan(
        _running_sum(metadata.query_lens_host),
        _running_sum(page_counts),
        pages,
        torch.tensor([(length - 1) % size + 1 for length in metadata.seq_lens_host], dtype=torch.int32),
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        size,
        causal=True,
        sm_scale=shape.scale,
        q_data_type=_DTYPE,
        kv_data_type=_DTYPE,
    )
