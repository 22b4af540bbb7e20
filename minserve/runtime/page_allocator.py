"""Who uses which KV page: free, in use by one or more requests, or idle with a cached prefix.

Plain bookkeeping in integers; knows nothing of requests, tokens or tensors. Page 0 is the dummy page that padded rows read
and write; it is never handed out.
"""

from __future__ import annotations

from collections.abc import Sequence

from minserve.runtime.prefix_cache import PrefixCache

DUMMY_PAGE = 0


class PageAllocator:
    """Counts users of pages 1 to `num_pages`. Free pages are handed out first, then idle cached ones, oldest use first."""

    def __init__(self, num_pages: int, cache: PrefixCache) -> None:
        self.num_pages = num_pages
        self.cache = cache
        self._users = [0] * (num_pages + 1)
        self._free = list(range(num_pages, 0, -1))

    @property
    def available(self) -> int:
        """Pages that `allocate` could hand out now."""
        return len(self._free) + self.cache.num_idle

    @property
    def used(self) -> int:
        """Pages that some request uses; idle cached pages do not count."""
        return self.num_pages - self.available

    def allocate(self, count: int) -> list[int]:
        """`count` pages with one user each. Raises ValueError when fewer are available; the caller looks before it asks."""
        if count > self.available:
            raise ValueError(f"{count} pages asked for, {self.available} available")
        pages = [self._free.pop() if self._free else self.cache.evict() for _ in range(count)]
        for page in pages:
            self._users[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """One more user for each of these cached pages, idle or not."""
        for page in pages:
            if self._users[page] == 0:
                self.cache.wake(page)
            self._users[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One user less for each. Cached pages of a prefix should come in its order: its end is evicted before its start."""
        for page in reversed(pages):
            if self._users[page] < 1:
                raise ValueError(f"page {page} released more often than used")
            self._users[page] -= 1
            if self._users[page] == 0:
                if page in self.cache:
                    self.cache.rest(page)
                else:
                    self._free.append(page)

    def distrust(self, hashes: Sequence[bytes]) -> None:
        """Never offer the pages of these hashes again; the idle ones are free at once."""
        for page in self.cache.forget(hashes):
            if self._users[page] == 0:
                self._free.append(page)

    def flush(self) -> int:
        """Forget every idle cached page; how many there were. Pages in use stay as they are."""
        count = self.cache.num_idle
        self._free.extend(self.cache.evict() for _ in range(count))
        return count
