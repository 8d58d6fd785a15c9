"""Encoder output by content, between the step that computes it and the last step that reads it.

Sessions that carry the same audio share an entry. A reference belongs to one (request, input) pair, so two equal items
of one session (silence, say) hold two. An entry nobody references stays until its rows are needed; the one released
longest ago goes first. Rows are counted in embeddings; row 0 belongs to the model's silence and is never handed out.
"""

from __future__ import annotations

from collections.abc import KeysView


class Entry:
    """Rows of one encoded item, and how many (request, input) pairs hold it."""

    __slots__ = ("key", "references", "rows")

    def __init__(self, key: bytes, rows: list[int]) -> None:
        self.key = key
        self.rows = rows
        self.references = 0


class EncoderCache:
    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"an encoder cache needs room for at least one embedding, got {capacity}")
        self.capacity = capacity
        self.queries = 0
        self.hits = 0
        self._free = list(range(capacity, 0, -1))
        self._entries: dict[bytes, Entry] = {}
        # Entries without a reference, oldest release first, and how many rows they would give back.
        self._released: dict[bytes, Entry] = {}
        self._releasable = 0
        self._held: dict[str, dict[int, Entry]] = {}
        self._evicted: dict[bytes, None] = {}

    def open(self, request: str) -> None:
        assert request not in self._held, f"request {request!r} is open"
        self._held[request] = {}

    def close(self, request: str) -> None:
        """Release all that a request holds, in time proportional to it."""
        for entry in self._held.pop(request, {}).values():
            self._drop_reference(entry)

    def cached_inputs(self, request: str) -> KeysView[int]:
        """The inputs of a request that are cached for it, without a scan."""
        return self._held[request].keys()

    def rows(self, request: str, index: int) -> list[int]:
        """Rows that an input of a request holds."""
        return self._held[request][index].rows

    def lookup(self, request: str, index: int, key: bytes) -> list[int] | None:
        """Rows of a cached item, now referenced by this input; None if it must be encoded."""
        self.queries += 1
        entry = self._entries.get(key)
        if entry is None:
            return None
        self.hits += 1
        self._take(request, index, entry)
        return entry.rows

    def has_room(self, embeds: int) -> bool:
        """Whether `reserve` would succeed. Asking changes nothing."""
        return embeds <= len(self._free) + self._releasable

    def reserve(self, request: str, index: int, key: bytes, embeds: int) -> list[int]:
        """Rows for an item that is about to be encoded, referenced by this input."""
        assert key not in self._entries, "reserving an item that is cached: look it up first"
        free = self._free
        if embeds > len(free):
            self._evict(embeds)
        rows = [free.pop() for _ in range(embeds)]
        entry = Entry(key, rows)
        self._entries[key] = entry
        self._evicted.pop(key, None)
        self._take(request, index, entry)
        return rows

    def release(self, request: str, index: int) -> None:
        """Give up one input's reference. Harmless when there is none (any more)."""
        held = self._held.get(request)
        entry = held.pop(index, None) if held else None
        if entry is not None:
            self._drop_reference(entry)

    def take_evicted(self) -> list[bytes]:
        """Keys evicted since the last call, without those that came back meanwhile."""
        if not self._evicted:
            return []
        evicted = list(self._evicted)
        self._evicted.clear()
        return evicted

    def _take(self, request: str, index: int, entry: Entry) -> None:
        held = self._held[request]
        previous = held.get(index)
        if previous is entry:
            return
        if entry.references == 0 and self._released.pop(entry.key, None) is not None:
            self._releasable -= len(entry.rows)
        entry.references += 1
        held[index] = entry
        if previous is not None:
            self._drop_reference(previous)

    def _drop_reference(self, entry: Entry) -> None:
        entry.references -= 1
        if entry.references == 0:
            self._released[entry.key] = entry
            self._releasable += len(entry.rows)

    def _evict(self, embeds: int) -> None:
        """Free the oldest released entries, only as many as needed, never a referenced one."""
        if not self.has_room(embeds):
            raise MemoryError(
                f"{embeds} embeddings do not fit: {len(self._free)} rows are free and {self._releasable} can be freed"
            )
        free, released = self._free, self._released
        while len(free) < embeds:
            key = next(iter(released))
            entry = released.pop(key)
            del self._entries[key]
            self._releasable -= len(entry.rows)
            free.extend(entry.rows)
            self._evicted[key] = None

    def check_integrity(self) -> None:
        references: dict[bytes, int] = dict.fromkeys(self._entries, 0)
        for held in self._held.values():
            for entry in held.values():
                assert self._entries[entry.key] is entry, "a held entry is not in the cache"
                references[entry.key] += 1
        for key, entry in self._entries.items():
            assert entry.references == references[key], f"{entry.references} counted, {references[key]} held"
            assert (key in self._released) == (entry.references == 0)
        assert self._releasable == sum(len(entry.rows) for entry in self._released.values())
        rows = [row for entry in self._entries.values() for row in entry.rows] + self._free
        assert sorted(rows) == list(range(1, self.capacity + 1)), "rows were lost or handed out twice"
        assert not self._evicted.keys() & self._entries.keys(), "a cached entry is reported as evicted"
