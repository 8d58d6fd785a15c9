"""Pages for keys and values: `PagePool` has those of an engine, `RingTable` those of one stream and one KV group.

Both have page numbers only; the memory of the pages is in the runner (`engine/runner/frames/memory.py`). The scheduler
owns the pools. A page stores a block of consecutive positions. A KV group is a group of layers with the same attention
window. A table is a ring of at most one attention window and the page being written. Once it is full, the page that
leaves the window is reused for the next block, so a table never grows.

The pages of a whole ring are reserved when a stream is admitted or brought back to the device, so a stream that is
computed never waits for a page. A silent stream can be parked: its pages go to host memory, and its reservation to
another stream.
"""

from __future__ import annotations

from engine.spec import KvGroup


class PagePool:
    """The pages of one KV group: the numbers of the free ones, and how many are reserved."""

    def __init__(self, pages: int) -> None:
        self.capacity = pages
        self.reserved = 0  # pages that streams have or may still allocate
        self._free = list(range(pages - 1, -1, -1))

    def can_reserve(self, pages: int) -> bool:
        return self.reserved + pages <= self.capacity

    def reserve(self, pages: int) -> None:
        assert self.can_reserve(pages), "ask can_reserve first"
        self.reserved += pages

    def allocate(self) -> int:
        """The number of a free page, within a reservation."""
        return self._free.pop()

    def free(self, pages: list[int], reserved: int) -> None:
        """Free a stream's pages, and end its reservation of `reserved` pages."""
        self._free.extend(pages)
        self.reserved -= reserved

    def check_integrity(self, in_use: list[int]) -> None:
        assert sorted(self._free + in_use) == list(range(self.capacity)), "pages were lost or handed out twice"
        assert len(in_use) <= self.reserved <= self.capacity


class RingTable:
    """The pages of one stream in one KV group: block b is at ring index b % ring_pages."""

    __slots__ = ("_page_positions", "_pool", "_ring_pages", "paged_until", "pages", "parked")

    def __init__(self, group: KvGroup, pool: PagePool) -> None:
        self._pool = pool
        self._page_positions = group.page_positions
        self._ring_pages = group.ring_pages
        self.pages: list[int] = []
        self.parked = 0  # number of pages in host memory
        # `extend` has been called up to this position: the ring's last positions before it have pages, on the device or
        # in host memory.
        self.paged_until = 0

    def extend(self, end: int) -> list[tuple[int, int]]:
        """Allocate the pages that the ring still needs for positions before `end`; returns the new ring entries (index,
        page). A full ring needs none: later blocks reuse its pages."""
        blocks = -(-end // self._page_positions)
        self.paged_until = blocks * self._page_positions
        added = []
        while len(self.pages) < blocks and len(self.pages) < self._ring_pages:
            page = self._pool.allocate()
            added.append((len(self.pages), page))
            self.pages.append(page)
        return added

    def park(self) -> list[int]:
        """Free the pages and end the reservation; returns the pages, whose contents go to host memory."""
        pages, self.pages = self.pages, []
        self.parked = len(pages)
        self._pool.free(pages, self._ring_pages)
        return pages

    def restore(self) -> list[tuple[int, int]]:
        """Allocate pages for the parked contents, after a reservation; returns the ring entries (index, page)."""
        self.pages = [self._pool.allocate() for _ in range(self.parked)]
        self.parked = 0
        return list(enumerate(self.pages))

    def close(self) -> None:
        """Free the pages and end the reservation of a stream that is on the device."""
        self._pool.free(self.pages, self._ring_pages)
        self.pages = []
