"""FlashInfer attention on Hopper: planned on the host outside a graph, run inside it.

Shapes and types without a FlashInfer kernel here, and small decode batches, go to Triton. Not for two streams at once: the
workspaces belong to the stream that attention runs on, which is the main one.
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
    pages: Tensor
    """int32 device list that the wrapper reads pages from; empty where each step brings its own."""
    planned: torch.cuda.Event


class FlashInferAttention:
    """Plan and run of one device.

    `plan` must be called once for every step before its forward, a replay's included. With `metadata.graph` the wrapper
    belongs to the number of rows and to the page table's address, is made on the first call, and keeps its buffers for
    good: the graph records `run`, and each later `plan` refills the buffers in place. Such a plan's result is the same
    object each time. Without `graph`, a wrapper serves any step.
    """

    def __init__(self, device: torch.device, triton: TritonAttention, least_gqa_rows: int = 33, least_mla_rows: int = 17) -> None:
        self.device = device
        self.triton = triton
        self.least_rows = {"gqa": least_gqa_rows, "mla": least_mla_rows}
        """Decode batches of fewer rows are faster in Triton, which plans nothing."""
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._graphs: dict[tuple[AttentionShape, int, int], tuple[_Wrapper, int, FlashInferPlan]] = {}
        self._eager: dict[tuple[str, bool, bool], _Wrapper] = {}

    def plan(self, metadata: AttentionMetadata, shape: AttentionShape) -> FlashInferPlan:
        """Host work: copies lengths to FlashInfer's buffers and cuts the work. Reads no device value.

        Raises ValueError when a graph's page table moved since its first plan: the graph would read freed memory.
        """
        triton = self.triton.plan(metadata, shape)
        decode, rows = metadata.decode_only, metadata.page_table.shape[0]
        if not _covers(shape) or (decode and rows < self.least_rows[shape.kind]):
            return FlashInferPlan(triton, None)
        if decode and metadata.graph:
            return self._graph_plan(metadata, shape, triton)
        wide = shape.head_dim > 128
        key = (shape.kind, decode, wide)
        if key not in self._eager:
            self._eager[key] = self._make(metadata, shape, decode, graph=False)
        wrapper = self._eager[key]
        self._plan(wrapper, metadata, shape, decode, graph=False)
        return FlashInferPlan(triton, wrapper.run)

    def _graph_plan(self, metadata: AttentionMetadata, shape: AttentionShape, triton: TritonPlan) -> FlashInferPlan:
        table = metadata.page_table
        key = (shape, table.shape[0], metadata.page_size)
        if key not in self._graphs:
            wrapper = self._make(metadata, shape, True, graph=True)
            self._graphs[key] = (wrapper, table.data_ptr(), FlashInferPlan(triton, wrapper.run))
        wrapper, address, plan = self._graphs[key]
        if address != table.data_ptr():
            raise ValueError(f"the page table of the {table.shape[0]}-row graph moved after its first plan")
        self._plan(wrapper, metadata, shape, True, graph=True)
        return plan

    def forget_graphs(self) -> None:
        """Drops the wrappers of captured sizes: call it when the graphs themselves are destroyed."""
        self._graphs.clear()

    def _make(self, metadata: AttentionMetadata, shape: AttentionShape, decode: bool, *, graph: bool) -> _Wrapper:
        rows = metadata.page_table.shape[0]
        pages = torch.empty(0, dtype=torch.int32, device=self.device)
        run: Any
        if shape.kind == "mla":
            # The kernel finds a row's pages at an offset of its own, so the page table itself is the list of pages. The
            # other buffers are only copied to, never read by the kernel: host memory is enough.
            pages = metadata.page_table.view(-1) if graph else pages
            counts = [torch.empty(rows + extra, dtype=torch.int32) for extra in (1, 1, 0)]
            run = flashinfer.mla.BatchMLAPagedAttentionWrapper(
                self._workspace, use_cuda_graph=graph, qo_indptr=counts[0], kv_indptr=counts[1], kv_indices=pages,
                kv_len_arr=counts[2], backend="fa3",
            )  # fmt: skip
        elif decode:
            tensor_cores = shape.num_heads >= 4 * shape.num_kv_heads or shape.head_dim != 128
            buffers: dict[str, Tensor] = {}
            if graph:
                pages = torch.zeros(metadata.page_table.numel(), dtype=torch.int32, device=self.device)
                buffers = {
                    "paged_kv_indptr_buffer": torch.zeros(rows + 1, dtype=torch.int32, device=self.device),
                    "paged_kv_indices_buffer": pages,
                    "paged_kv_last_page_len_buffer": torch.zeros(rows, dtype=torch.int32, device=self.device),
                }
            run = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace, "NHD", use_cuda_graph=graph, use_tensor_cores=tensor_cores, backend="fa2", **buffers
            )
        else:
            run = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend="fa3")
        return _Wrapper(run, pages, torch.cuda.Event())

    def _plan(self, wrapper: _Wrapper, metadata: AttentionMetadata, shape: AttentionShape, decode: bool, *, graph: bool) -> None:
        # The previous plan's copy reads the pinned buffer that this one writes; it is long done unless the GPU lags.
        wrapper.planned.synchronize()
        if shape.kind == "mla":
            self._plan_mla(wrapper, metadata, shape, decode, graph)
        else:
            self._plan_gqa(wrapper, metadata, shape, decode, graph)
        wrapper.planned.record()

    def _plan_mla(self, wrapper: _Wrapper, metadata: AttentionMetadata, shape: AttentionShape, decode: bool, graph: bool) -> None:
        table = metadata.page_table
        wrapper.run.plan(
            _running_sum(metadata.query_lens_host),
            torch.arange(0, table.shape[0] + 1, dtype=torch.int32) * table.shape[1],
            wrapper.pages[:0] if graph else table.reshape(-1),
            torch.tensor(metadata.seq_lens_host, dtype=torch.int32),
            shape.num_heads,
            shape.head_dim,
            shape.rope_dim,
            metadata.page_size,
            not decode,
            shape.scale,
            _DTYPE,
            _DTYPE,
        )

    def _plan_gqa(self, wrapper: _Wrapper, metadata: AttentionMetadata, shape: AttentionShape, decode: bool, graph: bool) -> None:
        size = metadata.page_size
        page_counts = [-(-length // size) for length in metadata.seq_lens_host]
        starts = _running_sum(page_counts)
        pages = wrapper.pages if graph else torch.empty(sum(page_counts), dtype=torch.int32, device=self.device)
        list_pages(metadata.page_table, metadata.seq_lens, size, pages)
        last = torch.tensor([(length - 1) % size + 1 for length in metadata.seq_lens_host], dtype=torch.int32)
        heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim, size)
        options = {"sm_scale": shape.scale, "q_data_type": _DTYPE, "kv_data_type": _DTYPE}
        if decode:
            wrapper.run.plan(starts, pages[:0] if graph else pages, last, *heads, **options)
        else:
            wrapper.run.plan(_running_sum(metadata.query_lens_host), starts, pages, last, *heads, causal=True, **options)

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
