"""DeepEP's legacy Buffer: tokens to the ranks of their experts and back, in low-latency mode for decode and normal for prompts.

The one place that knows deep_ep's names. All of it runs on the caller's stream: low-latency halves are received by their hook,
so that a graph sees no stream of the library's. ElasticBuffer (DeepEP 2.x, NCCL's device API) would be a second class with the
same methods; it does not load with the libraries that this one was proven with, so there is none.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F
from deep_ep import Buffer
from torch import Tensor

from minserve.kernels.triton_grouping import FP8_BLOCK
from minserve.kernels.triton_masked import masked_rows


class DeepEPBuffer:
    """One group's communication memory, made once and before any capture. Every rank makes the same calls in the same order."""

    def __init__(
        self,
        group: torch.distributed.ProcessGroup,
        *,
        hidden_size: int,
        width: int | None,
        num_slots: int,
        capacity: int,
        normal: bool,
    ) -> None:
        """group: any that gathers objects, such as gloo. width: the low-latency kernels' hidden size, None for no such mode;
        num_slots: expert slots of all ranks; capacity: most tokens that a rank sends in a low-latency step."""
        self.capacity = capacity
        self._hidden_size = hidden_size
        self._width = width
        self._num_slots = num_slots
        self._num_ranks = group.size()
        rdma_bytes = nvlink_bytes = 0
        if width is not None:
            # A rank's queues hold every token twice over: on its way, and its answer.
            depth = max(int(os.environ.get("NVSHMEM_QP_DEPTH", "1024")), 1 << (2 * capacity + 1).bit_length())
            os.environ["NVSHMEM_QP_DEPTH"] = str(depth)
            rdma_bytes = Buffer.get_low_latency_rdma_size_hint(capacity, width, self._num_ranks, num_slots)
        if normal:
            configs = (Buffer.get_dispatch_config(self._num_ranks), Buffer.get_combine_config(self._num_ranks))
            nvlink_bytes = max(config.get_nvl_buffer_size_hint(2 * hidden_size, self._num_ranks) for config in configs)
        self._buffer = Buffer(
            group,
            num_nvl_bytes=nvlink_bytes,
            num_rdma_bytes=rdma_bytes,
            low_latency_mode=width is not None,
            num_qps_per_rank=max(1, num_slots // self._num_ranks),
            explicitly_destroy=True,
        )

    def low_latency_dispatch(self, x: Tensor, slot_ids: Tensor, *, fp8: bool) -> tuple[Tensor, Tensor | None, Tensor, Any]:
        """x bf16 [T, H], slots int32 [T, k] (-1: none), T at most the capacity, any on each rank.

        (rows [E, ranks * capacity, H] by slot of this rank, their scales fp32 [E, ranks * capacity, H / 128] if `fp8`, the
        real rows of each slot int32 [E], a handle for the combine).
        """
        assert self._width is not None
        padding = self._width - self._hidden_size
        ids = slot_ids.to(torch.int64)
        rows, counts, handle, _, receive = self._buffer.low_latency_dispatch(
            F.pad(x, (0, padding)) if padding else x, ids, self.capacity, self._num_slots, use_fp8=fp8, return_recv_hook=True
        )
        receive()
        values, scales = rows if fp8 else (rows, None)
        if padding:
            values, _ = masked_rows(values, counts, columns=self._hidden_size)
            if scales is not None:
                scales = scales.transpose(1, 2)[:, : self._hidden_size // FP8_BLOCK].contiguous().transpose(1, 2)
        return values, scales, counts, (handle, ids, counts)

    def low_latency_combine(self, y: Tensor, weights: Tensor, handle: Any) -> Tensor:
        """y bf16 [E, ranks * capacity, H] in the rows of the dispatch, weights fp32 [T, k]: each token's weighted sum [T, H]."""
        sent, ids, counts = handle
        if self._width != self._hidden_size:
            y, _ = masked_rows(y, counts, room=self._width)
        out, _, receive = self._buffer.low_latency_combine(y, ids, weights, sent, return_recv_hook=True)
        receive()
        own: Tensor = out[:, : self._hidden_size].contiguous() if self._width != self._hidden_size else out
        return own

    def normal_dispatch(
        self, x: Tensor, scale: Tensor | None, slot_ids: Tensor, weights: Tensor, rows: int
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Any]:
        """x bf16 [T, H], or FP8 with its scales fp32 [T, H / 128]; slots int32 [T, k], weights fp32 [T, k]; `rows`: at least all
        ranks' tokens together.

        (x [rows, H] of the tokens that have a slot here, its scales, their local slots int32 [rows, k] with -1 elsewhere and in
        the rows that nobody got, weights [rows, k], a handle for the combine). Waits for nothing on the host.
        """
        ids = slot_ids.to(torch.int64)
        per_rank, _, per_slot, in_rank, _ = self._buffer.get_dispatch_layout(ids, self._num_slots)
        received, local_ids, local_weights, _, handle, _ = self._buffer.dispatch(
            x if scale is None else (x, scale),
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_slot,
            topk_idx=ids,
            topk_weights=weights,
            num_worst_tokens=rows,
        )
        values, scales = (received, None) if scale is None else received
        return values, scales, local_ids.to(torch.int32), local_weights, handle

    def destroy(self) -> None:
        """Free the memory, on all ranks together; a process has at most one buffer at a time."""
        self._buffer.destroy()

    def normal_combine(self, y: Tensor, handle: Any) -> Tensor:
        """y bf16 [rows, H], weighted and summed over this rank's slots: each token's sum over the ranks, [T, H]."""
        out: Tensor = self._buffer.combine(y, handle)[0]
        return out
