"""Where experts lie: every expert somewhere, equal shares, no two copies on a rank, and loads that even out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minserve.errors import UsageError
from minserve.models.layers.placement import ExpertPlacement, balanced, read_loads


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[float], int, int]:
    """Loads, ranks and redundant slots that fit together."""
    ranks, per_rank = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    redundant = draw(st.integers(0, ranks * per_rank - 1))
    experts = ranks * per_rank - redundant
    redundant = redundant if redundant <= experts * (ranks - 1) else 0
    experts = ranks * per_rank - redundant
    return draw(st.lists(st.floats(0, 1e6), min_size=experts, max_size=experts)), ranks, redundant


@given(groups())
def test_every_expert_has_a_slot_and_no_rank_has_it_twice(group: tuple[list[float], int, int]) -> None:
    load, ranks, redundant = group
    placements = [ExpertPlacement.spread(len(load), ranks, rank, redundant, load) for rank in range(ranks)]
    assert {expert for placement in placements for expert in placement.local_experts} == set(range(len(load)))
    for placement in placements:
        assert len(placement.local_experts) == len(set(placement.local_experts)) == (len(load) + redundant) // ranks
    for expert, slots in enumerate(placements[0].replica_table()):
        assert {placements[0].expert_of_slot[slot] for slot in slots} == {expert}


def totals(load: list[float], slots: tuple[int, ...], ranks: int) -> list[float]:
    share = len(slots) // ranks
    return [sum(load[e] / slots.count(e) for e in slots[rank * share : (rank + 1) * share]) for rank in range(ranks)]


def test_a_hot_expert_is_copied_and_ranks_even_out() -> None:
    load = [100.0, *[1.0] * 15]
    slots = balanced(tuple(load), 4, 4)
    assert slots.count(0) == 4  # all copies went to it: one on each rank
    assert max(totals(load, slots, 4)) < 1.1 * min(totals(load, slots, 4))
    plain = tuple(range(16))
    assert max(totals(load, plain, 4)) > 3 * max(totals(load, slots, 4))


def test_a_load_without_copies_moves_experts_only() -> None:
    load = [8.0, 8.0, 8.0, 8.0, 1.0, 1.0, 1.0, 1.0]
    slots = balanced(tuple(load), 4, 0)
    assert sorted(slots) == list(range(8))
    assert totals(load, slots, 4) == [9.0] * 4


def test_shares_that_are_not_equal_are_refused() -> None:
    with pytest.raises(UsageError, match=r"--redundant-experts 3: 4 ranks share 16 experts and these only if there are 4"):
        ExpertPlacement.spread(16, 4, 0, 3)
    with pytest.raises(UsageError, match=r"--redundant-experts 20: 16 put every expert on every rank"):
        ExpertPlacement.spread(16, 2, 0, 20)


def test_loads_are_the_sums_over_ranks(tmp_path: Path) -> None:
    file = tmp_path / "load.json"
    file.write_text(json.dumps({"ranks": [{"now": {"expert_load": {"1": [1, 0]}}}, {"now": {"expert_load": {"1": [0, 5]}}}]}))
    assert read_loads(file, 2) == {1: [1.0, 5.0]}


WRONG = ["", "[]", '{"ranks": []}', '{"ranks": [{"now": {"expert_load": {"1": [1, 2, 3]}}}]}', '{"ranks": 3}']


@pytest.mark.parametrize("text", WRONG)
def test_files_that_are_something_else_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "load.json"
    file.write_text(text)
    with pytest.raises(UsageError, match="--expert-load"):
        read_loads(file, 2)
