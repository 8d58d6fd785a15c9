"""The input cache of a link, so that the same payload is not sent twice: `SenderCache` (gateway), `ReceiverCache`.

A gateway has a sender cache for each engine (`EngineLink`), an engine has a receiver cache for each gateway (`Peer`).
The sender keeps hashes and sizes of items' payloads, the receiver keeps the payloads (data). Both are LRU caches with
the same capacity in bytes and see the same messages in the same order, so the sender knows without asking which
payloads the receiver has. Within one message all items are touched before any is stored, so that a later item cannot
evict an earlier one of the same message.

If the two caches differ (one side lost its cache, or a message was lost), the receiver names the hashes that it misses
and the sender sends the data again. Any other difference only costs bandwidth. The engine's encoder cache is another
one: it knows which prepared encoder input is on the device (`engine/core/caches.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


class ByteLru(Generic[T]):
    """A least-recently-used cache, bounded by the sum of the sizes of its values."""

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 0:
            raise ValueError(f"the capacity of a cache cannot be {capacity_bytes} bytes; give 0 or more")
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._entries: OrderedDict[bytes, tuple[int, T]] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def keys(self) -> list[bytes]:
        """All keys, least recently used first."""
        return list(self._entries)

    def size_of(self, key: bytes) -> int:
        return self._entries[key][0]

    def touch(self, key: bytes) -> T:
        """The value of a key that is present; marks it as most recently used."""
        self._entries.move_to_end(key)
        return self._entries[key][1]

    def store(self, key: bytes, size: int, value: T) -> None:
        """Store a value and evict the least recently used ones. A value larger than the whole cache is not stored."""
        self.forget(key)
        if size > self.capacity_bytes:
            return
        self._entries[key] = (size, value)
        self.used_bytes += size
        while self.used_bytes > self.capacity_bytes:
            _, (evicted, _) = self._entries.popitem(last=False)
            self.used_bytes -= evicted

    def forget(self, key: bytes) -> None:
        """Remove a key; does nothing if it is not present."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.used_bytes -= entry[0]

    def clear(self) -> None:
        self._entries.clear()
        self.used_bytes = 0

    def check_integrity(self) -> None:
        """Assert that the running total of bytes is correct and within the capacity."""
        total = sum(size for size, _ in self._entries.values())
        assert total == self.used_bytes, f"{self.used_bytes} bytes counted, {total} held"
        assert total <= self.capacity_bytes, f"{total} bytes held, {self.capacity_bytes} allowed"


@dataclass(slots=True)
class CacheStats:
    """Counters of a sender cache."""

    # Items looked up, and those of them whose data was not sent.
    queries: int = 0
    hits: int = 0
    # Bytes of payloads that were sent, and that were not sent because of hits.
    bytes_sent: int = 0
    bytes_saved: int = 0
    # Items whose data was sent again, because the receiver missed it.
    repairs: int = 0

    def add(self, other: CacheStats) -> None:
        self.queries += other.queries
        self.hits += other.hits
        self.bytes_sent += other.bytes_sent
        self.bytes_saved += other.bytes_saved
        self.repairs += other.repairs


class SenderCache:
    """The sender's mirror of the receiver's cache: hashes and sizes, no data."""

    def __init__(self, capacity_bytes: int) -> None:
        self._mirror: ByteLru[None] = ByteLru(capacity_bytes)
        self.stats = CacheStats()

    @property
    def enabled(self) -> bool:
        return self._mirror.capacity_bytes > 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._mirror

    def keys(self) -> list[bytes]:
        return self._mirror.keys()

    def plan_send(self, items: Sequence[tuple[bytes, int]]) -> list[bool]:
        """For each (hash, size) of one message: whether its data must be sent. The caller must then send the message,
        because the mirror counts it as received."""
        if not self.enabled:
            self.stats.bytes_sent += sum(size for _, size in items)
            return [True] * len(items)
        missed: dict[bytes, int] = {}
        with_data = []
        for key, size in items:
            hit = True
            if key in self._mirror:
                self._mirror.touch(key)
                size = self._mirror.size_of(key)
            elif key not in missed:
                hit = False
                missed[key] = size
            self._count(size, hit)
            with_data.append(not hit)
        for key, size in missed.items():
            self._mirror.store(key, size, None)
        return with_data

    def _count(self, size: int, hit: bool) -> None:
        self.stats.queries += 1
        self.stats.hits += hit
        if hit:
            self.stats.bytes_saved += size
        else:
            self.stats.bytes_sent += size

    def repair(self, missing: Mapping[bytes, int]) -> None:
        """The receiver misses these (hash -> size) and gets them again: count them as sent instead of as hits."""
        self.stats.repairs += len(missing)
        for key in missing:
            self._mirror.forget(key)
        for key, size in missing.items():
            self.stats.hits -= 1
            self.stats.bytes_saved -= size
            self.stats.bytes_sent += size
            if self.enabled:
                self._mirror.store(key, size, None)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Take back hits: the receiver misses these hashes, and this side does not have their data any more either."""
        for key in keys:
            if key in self._mirror:
                self.stats.hits -= 1
                self.stats.bytes_saved -= self._mirror.size_of(key)
                self._mirror.forget(key)

    def clear(self) -> None:
        """The receiver starts empty."""
        self._mirror.clear()

    def check_integrity(self) -> None:
        self._mirror.check_integrity()


class ReceiverCache(Generic[T]):
    """The data that one sender has sent."""

    def __init__(self, capacity_bytes: int) -> None:
        self._cached: ByteLru[T] = ByteLru(capacity_bytes)

    @property
    def capacity_bytes(self) -> int:
        return self._cached.capacity_bytes

    def keys(self) -> list[bytes]:
        return self._cached.keys()

    def missing(self, items: Sequence[tuple[bytes, int, T | None]], repaired: Mapping[bytes, T]) -> list[bytes]:
        """Hashes of a message whose data is neither cached, nor in the message, nor among the data that was sent again
        (`repaired`). Changes nothing."""
        arriving = {key for key, _, data in items if data is not None}
        wanted = dict.fromkeys(key for key, _, data in items if data is None)
        return [key for key in wanted if key not in self._cached and key not in arriving and key not in repaired]

    def resolve(self, items: Sequence[tuple[bytes, int, T | None]], repaired: Mapping[bytes, T]) -> list[T | None]:
        """Store the data of one message, and return the data of each (hash, size, data) in it; None: it is missing."""
        arrived = {key: (size, data) for key, size, data in items if data is not None}
        resolved: list[T | None] = []
        for key, size, data in items:
            if data is None and key in self._cached:
                data = self._cached.touch(key)
            elif data is None and key in repaired:
                data = repaired[key]
                arrived.setdefault(key, (size, data))
            elif data is None and key in arrived:
                data = arrived[key][1]
            resolved.append(data)
        for key, (size, data) in arrived.items():
            self._cached.store(key, size, data)
        return resolved

    def clear(self) -> None:
        self._cached.clear()

    def check_integrity(self) -> None:
        self._cached.check_integrity()
