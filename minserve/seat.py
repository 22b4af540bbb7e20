"""Where an engine sits among the ranks that share the experts: told by launch in the engine's environment.

Knows numbers, an address and the way there; nothing of processes or collectives.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket

import msgspec

SEAT_VARIABLE = "MINSERVE_ENGINE_SEAT"
DESCRIPTOR_VARIABLE = "MINSERVE_ENGINE_FD"
"""The numbers of an engine's sockets to the front's workers, in order."""


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


def host_seats(ranks: range, num_ranks: int, address: str, port: int, listener: socket.socket | None) -> list[Seat]:
    """Of one host's ranks. `listener`: where all ranks meet, on the host of rank 0; its port counts then."""
    port, descriptor = (port, None) if listener is None else (listener.getsockname()[1], listener.fileno())
    own = Seat(num_ranks=num_ranks, ranks_per_host=len(ranks), address=address, port=port)
    return [msgspec.structs.replace(own, rank=rank, listener=None if rank else descriptor) for rank in ranks]


def encode(seat: Seat) -> str:
    return msgspec.json.encode(seat).decode()


def own_seat() -> Seat:
    """This process's, as launch has told it; a seat alone where nobody did. Raises ValueError for what launch would not write."""
    return msgspec.json.decode(os.environ.get(SEAT_VARIABLE, "{}"), type=Seat)


def own_address(address: str, port: int) -> str:
    """This host's address as a host of the group sees it. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, max(1, port)))  # sends nothing: only the route is looked up
        return str(probe.getsockname()[0])


def interface_towards(address: str, port: int) -> str | None:
    """This host's network interface that leads to a host of the group, by name; None where the system does not tell.

    Libraries that pick one by the host's own name may pick one that the others cannot reach.
    """
    request, ifreq = 0x8915, 256  # SIOCGIFADDR of Linux's <linux/sockios.h>, on a struct ifreq
    try:
        local = socket.inet_aton(own_address(address, port))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):  # one without an address
                    if fcntl.ioctl(probe, request, name.encode().ljust(ifreq, b"\0"))[20:24] == local:
                        return name
    except OSError:
        pass
    return None
