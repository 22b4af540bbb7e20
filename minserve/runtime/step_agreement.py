"""Ranks that share experts step together: before each step they tell each other what they have, and all do the same.

A rank proposes a step while the one before it still runs, so that the device never waits for the talk. One message a step goes
to every other rank over a stream socket (on one host a Unix one), whose end is at once the news of a rank's death. When
nobody has work nobody proposes, and a rank's proposal is what wakes the others. Knows counts and sockets, nothing of tensors.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import functools
import logging
import operator
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from minserve.errors import ExitCode, RankLost

WAIT_SECONDS = 0.5
"""A rank that waits for others calls `while_waiting` so often."""
GRACE_SECONDS = 1.0
"""After a rank's end the loop has so long to tell of it before the watcher ends this process."""
PATIENCE = 0.8
"""Share of the watchdog's time that ranks wait for each other: whoever waits names the late one before all are silent."""
_FRAME = struct.Struct("<qiiBBh")
"""Number of the step, tokens, calls, kind, whether it leaves, the rank that failed (or one of the two below)."""
_NOBODY = -1
_STRANDED = -2
"""A farewell: this rank is well, and left a step whose collectives failed."""
_POLLRDHUP = getattr(select, "POLLRDHUP", select.POLLHUP)

log = logging.getLogger("minserve.runtime")


class Kind(enum.IntFlag):
    """What a step holds; several ranks' together hold what any of them does."""

    IDLE = 0
    DECODE = 1
    PREFILL = 2
    MIXED = 3


class Proposal(NamedTuple):
    """What one rank has for the next step."""

    kind: Kind
    num_tokens: int
    num_calls: int = 0
    """Control calls that this rank was asked for so far; they are carried out when every rank of the host has been."""
    leaving: bool = False


class Agreed(NamedTuple):
    """What all ranks do next."""

    kind: Kind
    """IDLE: no rank runs anything."""
    rows_per_rank: int
    """The most tokens of any rank: the room that each gets in the step's collectives."""
    num_calls: int
    """Control calls to have been carried out before the step."""
    stop: bool
    """A rank leaves: all do, now."""
    someone_only_decodes: bool = False
    """A rank that reads no prompt itself would wait for the others' prompts."""


IDLE = Agreed(Kind.IDLE, 0, 0, False)


class StepAgreement:
    """One rank's end. All methods belong to the engine's thread."""

    def __init__(
        self, rank: int, peers: Mapping[int, socket.socket], *, ranks_per_host: int = 1, watchdog_seconds: float = 300.0
    ) -> None:
        """`peers`: a connected stream socket to every other rank; an engine alone has none, and its proposals are agreed."""
        self.rank = rank
        self.patience = PATIENCE * watchdog_seconds
        """Seconds after which a rank that is waited for counts as lost."""
        self._peers = dict(sorted(peers.items()))
        self._neighbours = [peer for peer in self._peers if peer // ranks_per_host == rank // ranks_per_host]
        self._heard: dict[int, collections.deque[tuple[int, ...]]] = {peer: collections.deque() for peer in self._peers}
        self._partial = dict.fromkeys(self._peers, b"")
        self._number = 1
        self._proposal = Proposal(Kind.IDLE, 0)
        self._readable = select.poll()
        for peer in self._peers.values():
            peer.setblocking(False)
            self._readable.register(peer, select.POLLIN)
        self._leaving = threading.Event()
        if self._peers:
            threading.Thread(target=self._watch, name="rank-watch", daemon=True).start()

    @property
    def descriptors(self) -> list[int]:
        """To wait on while idle: they become readable when another rank proposes."""
        return [peer.fileno() for peer in self._peers.values()]

    @property
    def called(self) -> bool:
        """Whether another rank has proposed the step that this one has not. Raises RankLost."""
        return any(self._hear(peer) for peer in self._peers)

    def agree(self, proposal: Proposal, while_waiting: Callable[[], None]) -> Agreed:
        """What all ranks propose, once all have. Raises RankLost naming a rank that has ended or does not come."""
        self._proposal = proposal
        self._tell(proposal, _NOBODY)
        missing = [peer for peer in self._peers if not self._hear(peer)]
        began = told = time.monotonic()
        while missing:
            self._readable.poll(WAIT_SECONDS * 1000)
            missing = [peer for peer in missing if not self._hear(peer)]
            now = time.monotonic()
            if missing and now - began > self.patience:
                raise self._lost(missing, f"did not come to {{step}} within {self.patience:g} s")
            if missing and now - told >= WAIT_SECONDS:
                told = now
                while_waiting()
        heads = {peer: heard.popleft() for peer, heard in self._heard.items()}
        self._number += 1
        tokens = max([proposal.num_tokens, *(head[1] for head in heads.values())])
        calls = min([proposal.num_calls, *(heads[peer][2] for peer in self._neighbours)])
        kinds = [proposal.kind, *(Kind(head[3]) for head in heads.values())]
        stop = proposal.leaving or any(head[4] for head in heads.values())
        if stop:
            self._leaving.set()
        kind = functools.reduce(operator.or_, kinds)
        return Agreed(kind, tokens, calls, stop, Kind.DECODE in kinds)

    def _tell(self, proposal: Proposal, failed: int) -> None:
        number, (kind, tokens, calls, leaving) = self._number, proposal
        frame = _FRAME.pack(number, tokens, calls, kind, leaving, failed)
        for peer in self._peers.values():
            with contextlib.suppress(OSError):  # its end is told by what is read from it
                peer.send(frame)

    def _hear(self, peer: int) -> bool:
        """Take in what the rank said; whether it has proposed the next step. Raises RankLost."""
        heard = self._heard[peer]
        if not heard:
            self._read(peer)
        if not heard:
            return False
        number, *_, failed = heard[0]
        if failed >= 0:
            raise self._lost([failed], f"failed in {{step}}, as rank {peer} tells" if failed != peer else "failed in {step}")
        if failed == _STRANDED or number != self._number:
            raise self._lost([peer], f"is at step {number} while this rank is at {{step}}")
        return True

    def _read(self, peer: int) -> None:
        try:
            data = self._peers[peer].recv(64 * _FRAME.size)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            raise self._lost([peer], "has ended before {step}")
        data = self._partial[peer] + data
        whole = len(data) - len(data) % _FRAME.size
        self._heard[peer].extend(_FRAME.iter_unpack(data[:whole]))
        self._partial[peer] = data[whole:]

    # when something went wrong

    def blame(self) -> RankLost | None:
        """After a collective failed here: the rank whose fault that is, told by the others; None when all are well.

        Whoever waited in vain says so; a rank that has ended, or says nothing, is the one.
        """
        self._tell(self._proposal, _STRANDED)
        told: set[int] = set()
        deadline = time.monotonic() + min(GRACE_SECONDS, self.patience / 8)
        try:
            while len(told) < len(self._peers) and time.monotonic() < deadline:
                for peer in self._peers.keys() - told:
                    self._read(peer)
                    for *_, failed in self._heard[peer]:
                        if failed >= 0:
                            return self._lost([failed], "failed in {step}")
                        if failed == _STRANDED:
                            told.add(peer)
                time.sleep(0.005)
        except RankLost as error:
            return error
        silent = sorted(self._peers.keys() - told)
        return self._lost(silent, f"took no part in {{step}} for {self.patience:g} s") if silent else None

    def accuse(self, failed: int) -> None:
        """This rank ends because of that one, which may be itself: so that all name the same."""
        self._leaving.set()
        self._tell(self._proposal, failed)

    def _lost(self, ranks: list[int], what: str) -> RankLost:
        names = f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
        kind, tokens = self._proposal[:2]
        part = f"{Kind(kind).name or kind}".lower()
        step = f"step {self._number} (rank {self.rank}'s part: {part}, {tokens} tokens)"
        return RankLost(f"{names} {what.format(step=step)}", ranks[0])

    def _watch(self) -> None:
        """The loop may be deep in a collective that never returns when a rank ends: then this ends the process."""
        hang_up = select.poll()
        names = {peer.fileno(): rank for rank, peer in self._peers.items()}
        for descriptor in names:
            hang_up.register(descriptor, _POLLRDHUP)
        found = hang_up.poll()
        time.sleep(GRACE_SECONDS)
        if not self._leaving.is_set():
            log.error("rank %s has ended; rank %d does, too", ", ".join(str(names[fd]) for fd, _ in found), self.rank)
            os._exit(ExitCode.RANK_DIED)

    def close(self) -> None:
        """This rank leaves in order."""
        self._leaving.set()
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
