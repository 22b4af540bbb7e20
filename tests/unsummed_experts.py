"""Experts that leave their sum to the norm that reads it, in plain torch: what the GPU stacks do with few tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from minserve.kernels import reference
from minserve.kernels.interface import ExpertRows, ExpertWeights


def expert_rows(x: Tensor, slot_ids: Tensor, weights: Tensor, experts: ExpertWeights) -> ExpertRows:
    """An entry for `Kernels.expert_rows`; NaN where there is no slot."""
    each = x.repeat_interleave(slot_ids.shape[1], dim=0)
    rows = reference.experts_flat(each, slot_ids.reshape(-1, 1), torch.ones(len(each), 1), experts)
    return ExpertRows(rows.masked_fill(slot_ids.reshape(-1, 1) < 0, torch.nan), slot_ids, weights)
