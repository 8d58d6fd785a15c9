"""`EncoderCache`: which rows of the runner's array hold an item's prepared encoder input, by the hash of its audio.

The prepared encoder input of a position is what the runner needs of its audio to run the encoder: samples (windowed
models) or the output of the encoder's convolutions (Voxtral Realtime). It has one row. The rows are in the runner
(`AudioSlab`, `EncoderInputs`); here are only their numbers. The planner asks the cache which items need not be prepared
again.

Streams with the same audio share an entry. Each item of each stream has its own reference, from the step that prepares
it until the stream needs it no more. An entry without references stays until its rows are needed for other items; the
entry released longest ago is evicted first. Row 0 is the model's silence and is never assigned.
"""

from __future__ import annotations


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
