"""Where an engine sits among the ranks that share the experts: told by launch in the engine's environment.

Knows numbers and an address; nothing of processes or collectives.
"""

from __future__ import annotations

import msgspec

SEAT_VARIABLE = "MINSERVE_ENGINE_SEAT"


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of the group. The default is an engine alone."""

    rank: int = 0
    num_ranks: int = 1
    ranks_per_host: int = 1
    """Ranks of one host follow each other."""
    address: str = "127.0.0.1"
    """Where the ranks meet: rank 0 listens there."""
    port: int = 0
    listener: int | None = None
    """Rank 0 only: the descriptor of the socket that is bound to that port and listens already."""

    @property
    def local_rank(self) -> int:
        return self.rank % self.ranks_per_host

    @property
    def one_host(self) -> bool:
        return self.num_ranks == self.ranks_per_host


ALONE = Seat()


def encode(seat: Seat) -> str:
    return msgspec.json.encode(seat).decode()


def decode(text: str) -> Seat:
    """Raises ValueError for what launch would not write."""
    return msgspec.json.decode(text, type=Seat)
