"""FlashInfer attention on Hopper: planned on the host outside a graph, run inside it.

Shapes and types without a FlashInfer kernel here, and decode steps where ours is faster, go to Triton. Not for two streams
at once: the workspaces belong to the stream that attention runs on, which is the main one.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import flashinfer
import flashinfer.mla
import torch
from torch import Tensor

from minserve.kernels.attention_cuts import TritonPlan
from minserve.kernels.interface import LEAST_MIXED_TOKENS, AttentionMetadata, AttentionShape, Fp8Rows, Result
from minserve.kernels.triton_attention import TritonAttention
from minserve.kernels.triton_cache import list_pages
from minserve.kernels.triton_grouping import FP8_BLOCK, fp8_rows

WORKSPACE_BYTES = 128 << 20
"""Partial results of split caches; one for all wrappers, which never run at the same time."""

PAIRED_QUERIES = 64
"""FlashInfer's MLA kernel runs on pairs of programs where a step has more queries a row than this, heads counted and empty rows
too. The grid follows from it, and a graph keeps the grid that it was recorded with: replayed with a plan for the other one, it
leaves half of the work undone."""

SINGLES_SPLITS = 4
"""Most parts of a decode row's cache in a mixed step, where most of the launch's rows are empty."""

_DTYPE = torch.bfloat16


@dataclasses.dataclass(frozen=True, slots=True)
class FlashInferPlan:
    """What a step's attention runs with."""

    triton: TritonPlan
    wrapper: _Wrapper | None
    """FlashInfer's, planned for this step; None: Triton computes it."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Singles:
    """A mixed grouped-query step's leading rows of one token each: FlashInfer would read their cache once for each query head,
    so Triton's decode kernel takes them."""

    plan: TritonPlan
    lengths: Tensor
    """int32 [R]: the seq_lens of those rows, 0 for the others."""
    mask: Tensor
    """bool [R]"""

    def update(self, metadata: AttentionMetadata) -> None:
        """Row r is one of them when it and all before it have one token: then token r is its."""
        starts = metadata.query_start_loc
        row = torch.arange(starts.shape[0], dtype=torch.int32, device=starts.device)
        aligned = starts == row
        torch.logical_and(aligned[:-1], aligned[1:], out=self.mask)
        torch.mul(metadata.seq_lens, self.mask, out=self.lengths)


@dataclasses.dataclass(slots=True)
class _Wrapper:
    """One FlashInfer wrapper, with the event after which its pinned plan buffer may be written again."""

    run: Any
    pages: Tensor | None
    """The page table that a graph's kernel reads, flattened; None where each step brings its own."""
    planned: torch.cuda.Event
    singles: _Singles | None = None
    num_tokens: int = 0
    """Of the step that it is planned for, padding not counted."""
    paired: bool | None = None
    """How a graph that reads it was recorded."""


class FlashInferAttention:
    """Plan and run of one device: absorbed MLA, and the prompts of grouped-query steps.

    `plan` must be called once for every step before its forward, a replay's included. With `metadata.graph` the wrapper
    belongs to the numbers of rows and tokens and to the page table's address, is made on the first call, which must be for
    as many tokens as there can be, and keeps its buffers for good: the graph records `run`, and each later `plan` refills
    the buffers in place. Such a plan's result is the same object each time. Without `graph`, a wrapper serves any step.
    """

    def __init__(
        self, device: torch.device, triton: TritonAttention, least_mla_rows: int = 12, *, whole_gpu: bool = True
    ) -> None:
        """whole_gpu: no other process's kernels wait on the GPU for ours. FlashInfer's MLA kernel starts on all multiprocessors
        at once or not at all, and would wait for theirs."""
        self.device = device
        self.triton = triton
        self.whole_gpu = whole_gpu
        self.least_mla_rows = least_mla_rows
        """Decode batches of fewer rows are faster in Triton. Grouped-query decode is at every size, and plans nothing."""
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._graphs: dict[tuple[AttentionShape, int, int, int], FlashInferPlan] = {}
        self._eager: dict[str, _Wrapper] = {}

    def plan(self, metadata: AttentionMetadata, shape: AttentionShape) -> FlashInferPlan:
        """Host work: copies lengths to FlashInfer's buffers and cuts the work. Reads no device value.

        Raises ValueError when a graph's page table moved since its first plan, and the graph would read freed memory, or when
        so few of its tokens are real that FlashInfer would cut the work for another grid.
        """
        triton = self.triton.plan(metadata, shape)
        rows, tokens = metadata.page_table.shape[0], metadata.slot_mapping.shape[0]
        decode = metadata.one_token_each
        if not _covers(shape) or (decode and (shape.kind == "gqa" or rows < self.least_mla_rows)):
            return FlashInferPlan(triton, None)
        # All steps of a graph must run on pairs, as its recording does.
        least = 1 if metadata.graph and tokens <= LEAST_MIXED_TOKENS else tokens // 2
        if shape.kind == "mla" and (not self.whole_gpu or not (decode or _paired(shape, rows, least))):
            return FlashInferPlan(triton, None)
        if metadata.graph:
            return self._graph_plan(metadata, shape, triton)
        if shape.kind not in self._eager:
            make = self._mla_wrapper if shape.kind == "mla" else self._gqa_wrapper
            self._eager[shape.kind] = make(metadata, graph=False)
        wrapper = self._eager[shape.kind]
        wrapper.singles = self._singles(metadata, shape) if metadata.query_lens_host[0] == 1 else None
        self._plan(wrapper, metadata, shape)
        return FlashInferPlan(triton, wrapper)

    def _graph_plan(self, metadata: AttentionMetadata, shape: AttentionShape, triton: TritonPlan) -> FlashInferPlan:
        table = metadata.page_table
        key = (shape, table.shape[0], metadata.slot_mapping.shape[0], metadata.page_size)
        if key not in self._graphs:
            make = self._mla_wrapper if shape.kind == "mla" else self._gqa_wrapper
            made = make(metadata, graph=True)
            made.singles = self._singles(metadata, shape)
            self._graphs[key] = FlashInferPlan(triton, made)
        plan = self._graphs[key]
        assert plan.wrapper is not None
        wrapper = plan.wrapper
        if wrapper.pages is None or wrapper.pages.data_ptr() != table.data_ptr() or wrapper.pages.numel() != table.numel():
            raise ValueError(f"the page table of the {table.shape[0]}-row graph moved after its first plan")
        self._plan(wrapper, metadata, shape)
        paired = _paired(shape, table.shape[0], wrapper.num_tokens)
        if wrapper.paired is None:
            wrapper.paired = paired
        if shape.kind == "mla" and paired != wrapper.paired:
            raise ValueError(f"{wrapper.num_tokens} tokens are too few for the graph of {metadata.slot_mapping.shape[0]} tokens")
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

    def _gqa_wrapper(self, metadata: AttentionMetadata, *, graph: bool) -> _Wrapper:
        table = metadata.page_table
        rows, device = table.shape[0], self.device
        starts, page_starts, lengths = (torch.zeros(rows + extra, dtype=torch.int32, device=device) for extra in (1, 1, 0))
        run = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=graph,
            qo_indptr_buf=starts if graph else None,
            paged_kv_indptr_buf=page_starts if graph else None,
            paged_kv_indices_buf=torch.zeros_like(table).view(-1) if graph else None,
            paged_kv_last_page_len_buf=lengths if graph else None,
            backend="fa3",
        )
        return _Wrapper(run, table.view(-1) if graph else None, torch.cuda.Event())

    def _singles(self, metadata: AttentionMetadata, shape: AttentionShape) -> _Singles | None:
        if shape.kind == "mla":
            return None
        singles = dataclasses.replace(metadata, query_lens_host=(1,) * metadata.seq_lens.shape[0])
        mask = torch.zeros_like(metadata.seq_lens, dtype=torch.bool)
        plan = self.triton.plan(singles, shape)
        plan = dataclasses.replace(plan, num_splits=min(plan.num_splits, SINGLES_SPLITS))
        return _Singles(plan, torch.zeros_like(metadata.seq_lens), mask)

    def _plan(self, wrapper: _Wrapper, metadata: AttentionMetadata, shape: AttentionShape) -> None:
        # The previous plan's copy reads the pinned buffer that this one writes; it is long done unless the GPU lags.
        wrapper.planned.synchronize()
        wrapper.num_tokens = sum(metadata.query_lens_host)
        if shape.kind == "mla":
            _plan_mla(wrapper, metadata, shape)
        else:
            _plan_gqa(wrapper, metadata, shape)
        if wrapper.singles is not None:
            wrapper.singles.update(metadata)
        wrapper.planned.record()

    def gqa(self, q: Tensor, cache: Tensor, metadata: AttentionMetadata, shape: AttentionShape, plan: FlashInferPlan) -> Tensor:
        """q [T, Hq, D] over cache [pages, 2, page_size, Hkv, D], causal within the row: [T, Hq, D]."""
        if plan.wrapper is None or q.dtype != _DTYPE or cache.dtype != _DTYPE:
            return self.triton.gqa(q, cache, metadata, shape, plan.triton)
        wrapper, out = plan.wrapper, torch.empty_like(q)
        wrapper.run.run(q[: wrapper.num_tokens], cache, out=out[: wrapper.num_tokens])
        if wrapper.singles is None:
            return out
        rows = min(q.shape[0], metadata.seq_lens.shape[0])
        alone = dataclasses.replace(metadata, seq_lens=wrapper.singles.lengths[:rows], page_table=metadata.page_table[:rows])
        decoded = self.triton.gqa(q[:rows], cache, alone, shape, wrapper.singles.plan)
        out[:rows] = torch.where(wrapper.singles.mask[:rows, None, None], decoded, out[:rows])
        return out

    def gqa_fp8(
        self, q: Tensor, cache: Tensor, metadata: AttentionMetadata, shape: AttentionShape, plan: FlashInferPlan
    ) -> Fp8Rows:
        """`gqa` of bf16 queries, quantised: [T, Hq * D]; by a launch of its own where FlashInfer computes it."""
        if (plan.wrapper is None or cache.dtype != _DTYPE) and shape.head_dim % FP8_BLOCK == 0:
            return self.triton.gqa_fp8(q, cache, metadata, shape, plan.triton)
        return fp8_rows(self.gqa(q, cache, metadata, shape, plan).flatten(1))

    def by_triton(self, entry: Callable[..., Result]) -> Callable[..., Result]:
        """An entry of TritonAttention, whose last argument is its plan, for plans of this class."""

        def computed(*operands: Any) -> Result:
            *others, plan = operands
            return entry(*others, plan.triton)

        return computed

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
        rank, real = shape.head_dim, plan.wrapper.num_tokens
        out = torch.empty(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device)
        plan.wrapper.run.run(q_latent[:real], q_rope[:real], cache[..., :rank], cache[..., rank:], out=out[:real])
        return out


def _covers(shape: AttentionShape) -> bool:
    """The head sizes whose FlashInfer kernels are worth compiling: others would cost minutes at start."""
    if shape.kind == "mla":
        return (shape.head_dim, shape.rope_dim) == (512, 64)
    return shape.head_dim in (128, 256)


def _paired(shape: AttentionShape, rows: int, tokens: int) -> bool:
    return tokens * shape.num_heads // rows > PAIRED_QUERIES


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
    # The leading rows of one token are Triton's: here they are empty, and end where the first other row begins.
    singles = len(list(itertools.takewhile(lambda length: length == 1, metadata.query_lens_host)))
    starts = _running_sum(metadata.query_lens_host).clamp(min=singles)
    page_counts = [-(-length // size) for length in metadata.seq_lens_host]
    pages = torch.empty(sum(page_counts), dtype=torch.int32, device=metadata.page_table.device)
    list_pages(metadata.page_table, metadata.seq_lens, size, pages)
    wrapper.run.plan(
        starts,
        _running_sum(page_counts),
        pages,
        torch.tensor([(length - 1) % size + 1 for length in metadata.seq_lens_host], dtype=torch.int32),
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        size,
        causal=True,
        max_token_per_sequence=max(metadata.query_lens_host),  # FlashInfer's own search for it takes half a millisecond
        sm_scale=shape.scale,
        q_data_type=_DTYPE,
        kv_data_type=_DTYPE,
    )
