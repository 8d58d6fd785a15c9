"""Page numbers of keys and values: the pool that all streams share (`PagePool`), and each stream's table (`RingTable`).

Only numbers are kept here; the memory itself is in `engine/runner/frames/memory.py`. The scheduler owns the pools, a
stream owns one table per group of layers with the same attention window. A page stores a block of consecutive
positions. A table is a ring that holds one attention window and the page being written. Once it is full, the page that
leaves the window is reused for the next block, so a table never grows. The pages of a whole ring are reserved when a
stream is admitted or brought back to the device, so a stream that computes never waits for a page. A silent stream can
be parked: its pages go to host memory, and its reservation to another stream.
"""

from __future__ import annotations

from engine.spec import KvGroup


class PagePool:
    """Page numbers that are free, and the count of reserved pages."""

    def __init__(self, pages: int) -> None:
        self.capacity = pages
        self.reserved = 0
        self._free = list(range(pages - 1, -1, -1))

    def can_reserve(self, pages: int) -> bool:
        return self.reserved + pages <= self.capacity

    def reserve(self, pages: int) -> None:
        assert self.can_reserve(pages), "ask can_reserve first"
        self.reserved += pages

    def allocate(self) -> int:
        """Take one of the reserved pages."""
        return self._free.pop()

    def give_back(self, pages: list[int], reserved: int) -> None:
        """Return a closed stream's pages and its reservation."""
        self._free.extend(pages)
        self.reserved -= reserved

    def check_integrity(self, in_use: list[int]) -> None:
        assert sorted(self._free + in_use) == list(range(self.capacity)), "pages were lost or handed out twice"
        assert len(in_use) <= self.reserved <= self.capacity


class RingTable:
    """The pages of one stream in one group: block b is at ring index b % ring_pages."""

    __slots__ = ("_page_positions", "_pool", "_ring_pages", "covered", "pages", "parked")

    def __init__(self, group: KvGroup, pool: PagePool) -> None:
        self._pool = pool
        self._page_positions = group.page_positions
        self._ring_pages = group.ring_pages
        self.pages: list[int] = []
        self.parked = 0  # number of pages in host memory
        self.covered = 0  # positions before this one have a page, on the device or in host memory

    def extend(self, end: int) -> list[tuple[int, int]]:
        """Allocate pages for all positions before `end`; returns the new ring entries (index, page)."""
        blocks = -(-end // self._page_positions)
        self.covered = blocks * self._page_positions
        added = []
        while len(self.pages) < blocks and len(self.pages) < self._ring_pages:
            page = self._pool.allocate()
            added.append((len(self.pages), page))
            self.pages.append(page)
        return added

    def park(self) -> list[int]:
        """Give up the pages and the reservation; returns the pages, whose contents go to host memory."""
        pages, self.pages = self.pages, []
        self.parked = len(pages)
        self._pool.give_back(pages, self._ring_pages)
        return pages

    def restore(self) -> list[tuple[int, int]]:
        """Allocate pages for what was parked, after a reservation; returns the ring entries (index, page)."""
        self.pages = [self._pool.allocate() for _ in range(self.parked)]
        self.parked = 0
        return list(enumerate(self.pages))

    def close(self) -> None:
        """Give back the pages and the reservation of a stream that is on the device."""
        self._pool.give_back(self.pages, self._ring_pages)
        self.pages = []
