"""Chooses the rank that gets a request: the one with the least work before it. Knows nothing of sockets or tokens' text."""

from __future__ import annotations


class Balancer:
    """Outstanding work of each rank, in sequences and prompt tokens."""

    TOKENS_PER_SEQUENCE = 256
    """How many prompt tokens weigh as much as one more sequence to decode."""

    def __init__(self, num_ranks: int) -> None:
        self._work = [0] * num_ranks
        self._sequences = [0] * num_ranks

    def choose(self) -> int:
        """The rank with the least outstanding work; the lowest of equals."""
        return min(range(len(self._work)), key=self._work.__getitem__)

    def add(self, rank: int, num_prompt_tokens: int) -> None:
        self._sequences[rank] += 1
        self._work[rank] += self._weight(num_prompt_tokens)

    def remove(self, rank: int, num_prompt_tokens: int) -> None:
        """Takes back one `add` with the same arguments."""
        self._sequences[rank] -= 1
        self._work[rank] -= self._weight(num_prompt_tokens)

    def num_sequences(self, rank: int) -> int:
        return self._sequences[rank]

    def _weight(self, num_prompt_tokens: int) -> int:
        return self.TOKENS_PER_SEQUENCE + num_prompt_tokens
