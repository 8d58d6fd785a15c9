"""The bookkeeping of both caches of an engine: pages of keys and values, and rows of encoder output. Only numbers.

The scheduler owns the pool of pages and the encoder cache; the memory itself is in the runner
(`engine/runner/frames/kv_pages.py`).

`PagePool` has the pages that all streams share, `RingTable` those of one stream and one group of layers with the same
attention window. A page stores a block of consecutive positions. A table is a ring that holds one attention window and
the page being written. Once it is full, the page that leaves the window is reused for the next block, so a table never
grows. The pages of a whole ring are reserved when a stream is admitted or brought back to the device, so a stream that
computes never waits for a page. A silent stream can be parked: its pages go to host memory, and its reservation to
another stream.

`EncoderCache` maps the hash of an item's audio to the rows that hold its encoder output, one embedding each; the
planner asks it which items need not be encoded. Streams with the same audio share an entry. Each item of each stream
holds its own reference, from its encoding until the stream needs it no more. An entry without references stays until
its rows are needed; the one released longest ago is evicted first. Row 0 is the model's silence and is never assigned.
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


class CachedRows(list[int]):
    """The cache rows of one encoded item, and the number of (stream, item) pairs that reference it."""

    __slots__ = ("key", "references")

    key: bytes
    references: int


# The cached items of one stream, by item index.
Held = dict[int, CachedRows]


class EncoderCache:
    """Keeps track of `capacity` embedding rows; the embeddings themselves are in the runner."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"an encoder cache needs room for at least one embedding, got {capacity}")
        self.capacity = capacity
        self.queries = 0  # references taken to items; `hits` of them were cached already
        self.hits = 0
        self._free = list(range(capacity, 0, -1))
        self.entries: dict[bytes, CachedRows] = {}  # by content
        # Entries without references, in order of release, in two generations: `_stale` is consumed from its end and may
        # contain entries that were referenced again; `_fresh` becomes the next `_stale`. With a single dict, every
        # eviction would scan its deleted slots.
        self._fresh: dict[bytes, CachedRows] = {}
        self._stale: list[CachedRows] = []
        self._releasable = 0  # rows of the entries without references
        self._streams: dict[str, Held] = {}

    def open(self, stream: str) -> Held:
        """Begin a stream; returns its table of cached items, which the other methods take and update."""
        assert stream not in self._streams, f"stream {stream!r} is open"
        held: Held = {}
        self._streams[stream] = held
        return held

    def close(self, stream: str) -> None:
        """Release everything that a stream references."""
        for entry in self._streams.pop(stream, {}).values():
            self._drop_reference(entry)

    def lookup(self, held: Held, index: int, key: bytes) -> CachedRows | None:
        """The entry of a cached item, now referenced by the stream's item `index`; None if the item must be encoded."""
        entry = self.entries.get(key)
        if entry is None:
            return None
        self.queries += 1
        self.hits += 1
        previous = held.get(index)
        if previous is not entry:
            if entry.references == 0:
                self._fresh.pop(key, None)
                self._releasable -= len(entry)
            entry.references += 1
            held[index] = entry
            if previous is not None:
                self._drop_reference(previous)
        return entry

    def reserve(self, held: Held, index: int, key: bytes, embeds: int) -> CachedRows | None:
        """Allocate rows for a stream's item `index`, which is about to be encoded; None if there is no room."""
        free = self._free
        if embeds > len(free):
            if embeds > len(free) + self._releasable:
                return None
            self._evict(embeds)
        assert embeds > 0 and key not in self.entries, "look an item up before reserving rows for it"
        if embeds == 1:
            entry = CachedRows((free.pop(),))
        else:
            entry = CachedRows(free[-embeds:])
            del free[-embeds:]
        entry.key = key
        entry.references = 1
        self.queries += 1
        self.entries[key] = entry
        held[index] = entry
        return entry

    def release(self, held: Held, index: int) -> int:
        """Release the reference of one item, if it has one; returns the number of its embeddings."""
        entry = held.pop(index, None)
        return 0 if entry is None else self._drop_reference(entry)

    def _drop_reference(self, entry: CachedRows) -> int:
        embeds = len(entry)
        entry.references -= 1
        if entry.references == 0:
            self._fresh[entry.key] = entry
            self._releasable += embeds
        return embeds

    def _evict(self, embeds: int) -> None:
        """Evict entries without references, oldest release first, until `embeds` rows are free."""
        free, stale = self._free, self._stale
        while len(free) < embeds:
            if not stale:
                stale = self._stale = list(reversed(self._fresh.values()))
                self._fresh = {}
            entry = stale.pop()
            key = entry.key
            if entry.references == 0 and key not in self._fresh:
                del self.entries[key]
                self._releasable -= len(entry)
                free += entry

    def check_integrity(self) -> None:
        references: dict[bytes, int] = dict.fromkeys(self.entries, 0)
        for held in self._streams.values():
            for entry in held.values():
                assert self.entries[entry.key] is entry, "a held entry is not in the cache"
                references[entry.key] += 1
        for key, entry in self.entries.items():
            assert entry.references == references[key], f"{entry.references} counted, {references[key]} held"
            assert entry.references == 0 or key not in self._fresh
        released = {id(entry): entry for entry in [*self._fresh.values(), *self._stale] if entry.references == 0}
        assert {entry.key for entry in released.values()} == {key for key in references if references[key] == 0}
        assert self._releasable == sum(len(entry) for entry in released.values())
        rows = [row for entry in self.entries.values() for row in entry] + self._free
        assert sorted(rows) == list(range(1, self.capacity + 1)), "rows were lost or handed out twice"
