"""Into how many parts attention cuts the rows of a decode step, by the numbers alone."""

from __future__ import annotations

import types

import pytest

from minserve.kernels.attention_cuts import plan_decode
from minserve.kernels.interface import AttentionShape

QWEN3, MOONLIGHT = AttentionShape("gqa", 32, 4, 128, 0, 1.0), AttentionShape("mla", 16, 1, 512, 64, 1.0)


@pytest.mark.parametrize(
    ("shape", "rows", "room", "parts"),
    [
        (QWEN3, 1, 1024, (16, 16)),  # no part is shorter than a block
        (QWEN3, 1, 40_960, (33, 33)),
        (QWEN3, 8, 40_960, (4, 10)),
        (QWEN3, 16, 40_960, (2, 8)),
        (QWEN3, 32, 1024, (1, 1)),
        (QWEN3, 32, 40_960, (1, 4)),
        (QWEN3, 256, 262_144, (1, 4)),
        (MOONLIGHT, 1, 8192, (64, 64)),
        (MOONLIGHT, 11, 8192, (24, 24)),
    ],
)
def test_short_rows_leave_few_parts_empty(shape: AttentionShape, rows: int, room: int, parts: tuple[int, int]) -> None:
    metadata = types.SimpleNamespace(page_table=types.SimpleNamespace(shape=(rows, room // 64)), page_size=64)
    plan = plan_decode(metadata, shape, 132)  # type: ignore[arg-type]
    assert (plan.wanted, plan.num_splits) == parts
