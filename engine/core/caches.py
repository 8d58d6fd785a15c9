"""The numbers of both caches of an engine: pages of keys and values, and rows of prepared encoder input.

The scheduler owns the page pools and the encoder cache; the memory itself is in the runner (`StackCache`; `AudioSlab`,
`EncoderInputs`).

Pages for keys and values: `PagePool` has those of an engine, `RingTable` those of one stream and one KV group, a group
of layers with the same attention window. A page stores a block of consecutive positions. A table is a ring of at most
one attention window and the page being written. Once it is full, the page that leaves the window is reused for the next
block, so a table never grows. The pages of a whole ring are reserved when a stream is admitted or brought back to the
device, so a stream that is computed never waits for a page. A silent stream can be parked: its pages go to host memory,
and its reservation to another stream.

`EncoderCache`: which rows have an item's prepared encoder input, by the hash of its audio. The prepared encoder input
of a position is what the runner needs of its audio to run the encoder: samples (windowed models) or the output of the
encoder's convolutions (Voxtral Realtime). It has one row. The planner asks the cache which items need not be prepared
again. Streams with the same audio share an entry. Each item of each stream has its own reference, from the step that
prepares it until the stream needs it no more. An entry without references stays until its rows are needed for other
items; the entry released longest ago is evicted first. Row 0 is the model's silence and is never assigned.
"""

from __future__ import annotations

from engine.spec import KvGroup

# Pages for keys and values.


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


# Rows of prepared encoder input.


class CachedRows(list[int]):
    """An entry of the cache: the row numbers of one item. It is a list itself, because the hot path indexes it."""

    __slots__ = ("key", "references")

    key: bytes  # hash of the item's audio
    references: int  # number of (stream, item) pairs that use the entry


# The entries that one stream references, by the index of the item.
StreamEntries = dict[int, CachedRows]


class EncoderCache:
    """Assigns `capacity` rows, numbered from 1, to items."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"an encoder cache needs at least one row, got {capacity}")
        self.capacity = capacity
        self.queries = 0  # items that needed rows; `hits` of them had an entry already
        self.hits = 0
        self._free = list(range(capacity, 0, -1))
        self.entries: dict[bytes, CachedRows] = {}  # by the hash of the audio
        # Entries without references, in order of release, in two generations: the older ones are evicted from the end
        # of their list, which may also contain entries that were referenced again; when it is empty, the newer ones
        # become the older ones. With a single dict, each eviction would scan the places of the keys removed before.
        self._released_new: dict[bytes, CachedRows] = {}
        self._released_old: list[CachedRows] = []
        self._evictable = 0  # rows of the entries without references
        self._streams: dict[str, StreamEntries] = {}

    def open(self, stream: str) -> StreamEntries:
        """Begin a stream; returns its entries, which the other methods get as an argument and update."""
        assert stream not in self._streams, f"stream {stream!r} is open"
        entries: StreamEntries = {}
        self._streams[stream] = entries
        return entries

    def close(self, stream: str) -> None:
        """Release everything that a stream references."""
        for entry in self._streams.pop(stream, {}).values():
            self._drop_reference(entry)

    def lookup(self, referenced: StreamEntries, index: int, key: bytes) -> CachedRows | None:
        """The entry with this hash, now referenced by the stream's item `index`; None if the item must be prepared."""
        entry = self.entries.get(key)
        if entry is None:
            return None
        self.queries += 1
        self.hits += 1
        previous = referenced.get(index)
        if previous is not entry:
            if entry.references == 0:
                self._released_new.pop(key, None)
                self._evictable -= len(entry)
            entry.references += 1
            referenced[index] = entry
            if previous is not None:
                self._drop_reference(previous)
        return entry

    def allocate(self, referenced: StreamEntries, index: int, key: bytes, count: int) -> CachedRows | None:
        """Allocate rows for a stream's item `index`, which is about to be prepared; None if too few can be freed."""
        free = self._free
        if count > len(free):
            if count > len(free) + self._evictable:
                return None
            self._evict(count)
        assert count > 0 and key not in self.entries, "look an item up before allocating rows for it"
        if count == 1:
            entry = CachedRows((free.pop(),))
        else:
            entry = CachedRows(free[-count:])
            del free[-count:]
        entry.key = key
        entry.references = 1
        self.queries += 1
        self.entries[key] = entry
        referenced[index] = entry
        return entry

    def release(self, referenced: StreamEntries, index: int) -> int:
        """Release the reference of one item, if it has one; returns the number of its rows."""
        entry = referenced.pop(index, None)
        return 0 if entry is None else self._drop_reference(entry)

    def _drop_reference(self, entry: CachedRows) -> int:
        count = len(entry)
        entry.references -= 1
        if entry.references == 0:
            self._released_new[entry.key] = entry
            self._evictable += count
        return count

    def _evict(self, count: int) -> None:
        """Evict entries without references, oldest release first, until `count` rows are free."""
        free, old = self._free, self._released_old
        while len(free) < count:
            if not old:
                old = self._released_old = list(reversed(self._released_new.values()))
                self._released_new = {}
            entry = old.pop()
            key = entry.key
            if entry.references == 0 and key not in self._released_new:
                del self.entries[key]
                self._evictable -= len(entry)
                free += entry

    def check_integrity(self) -> None:
        references: dict[bytes, int] = dict.fromkeys(self.entries, 0)
        for referenced in self._streams.values():
            for entry in referenced.values():
                assert self.entries[entry.key] is entry, "a referenced entry is not in the cache"
                references[entry.key] += 1
        for key, entry in self.entries.items():
            assert entry.references == references[key], f"{entry.references} counted, {references[key]} found"
            assert entry.references == 0 or key not in self._released_new
        queued = [*self._released_new.values(), *self._released_old]
        released = {id(entry): entry for entry in queued if entry.references == 0}
        assert {entry.key for entry in released.values()} == {key for key in references if references[key] == 0}
        assert self._evictable == sum(len(entry) for entry in released.values())
        rows = [row for entry in self.entries.values() for row in entry] + self._free
        assert sorted(rows) == list(range(1, self.capacity + 1)), "rows were lost or handed out twice"
