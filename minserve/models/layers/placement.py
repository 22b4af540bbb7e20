"""Which slots hold which experts, and which of the slots are this rank's. Knows counts and loads, no weights."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minserve.errors import UsageError

MOST_COLUMNS = 840
"""Of a replica table: enough that experts with up to 8 copies share their tokens equally."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """The expert of each slot; the slots are the ranks' in equal shares, in order of rank. Some experts have several slots."""

    expert_of_slot: tuple[int, ...]
    num_experts: int
    num_ranks: int = 1
    rank: int = 0

    @classmethod
    def spread(
        cls, num_experts: int, num_ranks: int, rank: int, redundant: int = 0, load: Sequence[float] | None = None
    ) -> ExpertPlacement:
        """Each expert in the slot of its own number; with `redundant` slots more or a `load` (one an expert), where it balances
        the ranks best. Raises UsageError, with what would do, where the shares are not equal."""
        if (num_experts + redundant) % num_ranks:
            if redundant:
                short = -(num_experts + redundant) % num_ranks
                raise UsageError(f"--redundant-experts {redundant}: {num_ranks} ranks share {num_experts} experts and these only "
                                 f"if there are {redundant + short}")  # fmt: skip
            legal = ", ".join(str(size) for size in range(1, num_experts + 1) if num_experts % size == 0)
            raise UsageError(f"--ep-size {num_ranks} does not divide the model's {num_experts} experts; possible: {legal}")
        if not redundant and load is None:
            return cls(tuple(range(num_experts)), num_experts, num_ranks, rank)
        if redundant > num_experts * (num_ranks - 1):
            raise UsageError(f"--redundant-experts {redundant}: {num_experts * (num_ranks - 1)} put every expert on every rank")
        return cls(balanced(tuple(load or [1.0] * num_experts), num_ranks, redundant), num_experts, num_ranks, rank)

    @property
    def is_identity(self) -> bool:
        return self.expert_of_slot == tuple(range(self.num_experts))

    @property
    def slots_per_rank(self) -> int:
        return len(self.expert_of_slot) // self.num_ranks

    @property
    def local_experts(self) -> tuple[int, ...]:
        """The expert of each of this rank's slots; none twice."""
        first = self.rank * self.slots_per_rank
        return self.expert_of_slot[first : first + self.slots_per_rank]

    def replica_table(self) -> list[list[int]]:
        """[E, C]: in turn, the slots of each expert. C is 1 when no expert has two."""
        slots: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(self.expert_of_slot):
            slots[expert].append(slot)
        columns = math.lcm(*map(len, slots))
        columns = columns if columns <= MOST_COLUMNS else MOST_COLUMNS
        return [[own[column % len(own)] for column in range(columns)] for own in slots]


def balanced(load: tuple[float, ...], num_ranks: int, redundant: int) -> tuple[int, ...]:
    """The expert of each slot, ranks in order, such that the largest rank's load is small.

    The experts with the most load a copy get one copy more, `redundant` times; then, copies of one expert on different ranks,
    each goes to the rank with the least so far: the greedy way of DeepSeek's expert balancer, without its groups of hosts.
    """
    copies = [1] * len(load)
    for _ in range(redundant):
        able = [expert for expert in range(len(load)) if copies[expert] < num_ranks]
        copies[max(able, key=lambda expert: (load[expert] / copies[expert], -expert))] += 1
    room = (len(load) + redundant) // num_ranks
    held: list[list[int]] = [[] for _ in range(num_ranks)]
    totals = [0.0] * num_ranks
    for expert in sorted(range(len(load)), key=lambda expert: (copies[expert] == 1, -load[expert] / copies[expert], expert)):
        share, several = load[expert] / copies[expert], copies[expert] > 1
        # While experts have several copies, ranks fill evenly, so that each copy finds a rank of its own.
        free = sorted((rank for rank in range(num_ranks) if len(held[rank]) < room),
                      key=lambda rank: (len(held[rank]) if several else 0, totals[rank], rank))  # fmt: skip
        for rank in free[: copies[expert]]:
            held[rank].append(expert)
            totals[rank] += share
    return tuple(expert for experts in held for expert in sorted(experts))


def read_loads(file: Path, num_experts: int) -> dict[int, list[float]]:
    """Layer to each expert's share of the tokens, from what /server_info answered. Raises UsageError."""
    try:
        answer: Any = json.loads(file.read_text(encoding="utf-8"))
        loads: dict[int, list[float]] = {}
        for rank in answer["ranks"]:
            for layer, counts in rank["now"]["expert_load"].items():
                total = loads.setdefault(int(layer), [0.0] * num_experts)
                for expert, count in enumerate(counts):
                    total[expert] += float(count)
    except OSError as error:
        raise UsageError(f"--expert-load {file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise UsageError(f"--expert-load {file}: not what /server_info of this model answers ({error!r})") from error
    if not any(map(sum, loads.values())):
        raise UsageError(f"--expert-load {file}: no expert has been counted in it")
    return loads
