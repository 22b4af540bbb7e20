"""Which pages hold which prefix, so that a prompt seen before is not computed again.

Knows hashes and page numbers; nothing of requests, of who uses a page, or of the tensors behind it.
"""

from __future__ import annotations

import array
import collections
import hashlib
from collections.abc import Iterable, Sequence

CHAIN_START = b"minserve prefix"
"""Stands for the empty prefix before the first page."""


def page_hash(previous: bytes, token_ids: Sequence[int]) -> bytes:
    """The name of a whole page: sha256 over the hash of the page before it and this page's token ids.

    Equal hashes mean equal prefixes from the first token on, so a page may be shared by its hash alone.
    """
    return hashlib.sha256(previous + array.array("q", token_ids).tobytes()).digest()


class PrefixCache:
    """Hash to page and back, and which cached pages nobody uses ("idle"), least recently used first.

    A cached page is in use or idle; only idle ones may be evicted. Pages that were never registered are unknown here.
    """

    def __init__(self) -> None:
        self._page_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._idle: collections.OrderedDict[int, None] = collections.OrderedDict()  # in the order of the last use

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def __contains__(self, page: int) -> bool:
        return page in self._hash_of

    def lookup(self, hashes: Iterable[bytes]) -> list[int]:
        """Pages of the longest cached run from the start of `hashes`."""
        pages: list[int] = []
        for digest in hashes:
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def register(self, digest: bytes, page: int) -> None:
        """Make a page in use findable. When another page holds the same prefix already, that one stays the answer."""
        if digest not in self._page_of and page not in self._hash_of:
            self._page_of[digest] = page
            self._hash_of[page] = digest

    def forget(self, hashes: Iterable[bytes]) -> list[int]:
        """Drop these prefixes, idle or in use; the pages that held them."""
        pages = [page for digest in hashes if (page := self._page_of.pop(digest, None)) is not None]
        for page in pages:
            del self._hash_of[page]
            self._idle.pop(page, None)
        return pages

    def rest(self, page: int) -> None:
        """A cached page has lost its last user."""
        self._idle[page] = None

    def wake(self, page: int) -> None:
        """An idle page has a user again."""
        del self._idle[page]

    def evict(self) -> int:
        """Drop the idle page that was used longest ago; its number. Raises KeyError when none is idle."""
        page, _ = self._idle.popitem(last=False)
        del self._page_of[self._hash_of.pop(page)]
        return page
