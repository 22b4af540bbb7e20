"""Chooses the rank that gets a request: little work before it, pages free, the prompt's beginning there already.

Everything is weighed as tokens to compute. Knows nothing of sockets or tokens' text.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from minserve.messages import StepStats


class Balancer:
    """Outstanding work of each rank, in sequences and prompt tokens, and which pages of prompts it was sent."""

    TOKENS_PER_SEQUENCE = 256
    """How many prompt tokens weigh as much as one more sequence to decode."""
    MISSING_PAGE_WEIGHT = 4
    """A page that a rank lacks has to be waited for: it weighs so many times its tokens."""
    MOST_PAGES = 1 << 16
    """Pages of prompts whose rank is remembered; the ranks' own caches are about as large."""

    def __init__(self, num_ranks: int) -> None:
        self._work = [0] * num_ranks
        self._sequences = [0] * num_ranks
        self._num_pages = [0] * num_ranks
        self._page_size = 64
        self._home: collections.OrderedDict[int, int] = collections.OrderedDict()
        """Hash of a prompt's beginning, a whole number of pages, to the rank that was last sent it."""

    def know_pages(self, num_pages: Sequence[int], page_size: int) -> None:
        """KV pages of each rank, and tokens of one."""
        self._num_pages = list(num_pages)
        self._page_size = page_size

    def choose(self, prompt: Sequence[int] = (), stats: Sequence[StepStats] = ()) -> int:
        """The rank where the prompt's first token comes soonest; the lowest of equals. `stats`: what each rank last said."""
        if len(self._work) == 1:
            return 0
        pages = self._page_hashes(prompt)
        costs = [self._cost(rank, len(prompt), stats) for rank in range(len(self._work))]
        for page in pages:
            home = self._home.get(page)
            if home is None:
                break
            costs[home] -= self._page_size
        rank = min(range(len(costs)), key=costs.__getitem__)
        for page in pages:
            self._home[page] = rank
            self._home.move_to_end(page)
        while len(self._home) > self.MOST_PAGES:
            self._home.popitem(last=False)
        return rank

    def _cost(self, rank: int, num_prompt_tokens: int, stats: Sequence[StepStats]) -> int:
        cost = self._work[rank]
        if stats:
            said = stats[rank]
            of_other_fronts = max(0, said.num_running + said.num_waiting - self._sequences[rank])
            needed = -(-num_prompt_tokens // self._page_size)
            missing = max(0, needed - (self._num_pages[rank] - said.used_pages)) if self._num_pages[rank] else 0
            cost += of_other_fronts * self.TOKENS_PER_SEQUENCE + missing * self._page_size * self.MISSING_PAGE_WEIGHT
        return cost

    def _page_hashes(self, prompt: Sequence[int]) -> list[int]:
        """Of each whole page with all before it. An equal hash of other tokens would only send a request elsewhere."""
        hashes, chain = [], 0
        for start in range(0, len(prompt) - self._page_size + 1, self._page_size):
            chain = hash((chain, *prompt[start : start + self._page_size]))
            hashes.append(chain)
        return hashes

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
