"""Mirrored caches at the two ends of the process boundary, so that the same audio does not cross twice.

The sender keeps hashes and sizes, the receiver keeps the data. Both are LRU by bytes with the same capacity and see the
same messages in the same order, so the sender knows what the receiver holds without asking. Within one message all
items are touched before any is stored: a later item cannot evict an earlier one of the same message.

When the two drift apart (a side lost its cache, a message was lost) the receiver names all hashes it misses, the sender
forgets exactly those and sends the data again. Every other disagreement only costs bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


class ByteLru(Generic[T]):
    """Values by key, least recently used first out, bounded by the sum of their sizes."""

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 0:
            raise ValueError(f"a cache cannot hold {capacity_bytes} bytes; give 0 or more")
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._entries: OrderedDict[bytes, tuple[int, T]] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def keys(self) -> list[bytes]:
        """All keys, the next one to leave first."""
        return list(self._entries)

    def size_of(self, key: bytes) -> int:
        return self._entries[key][0]

    def touch(self, key: bytes) -> T:
        """The value of a key that is present; it is now the last to leave."""
        self._entries.move_to_end(key)
        return self._entries[key][1]

    def store(self, key: bytes, size: int, value: T) -> None:
        """Keep a value, at the expense of those used longest ago. One larger than the whole cache is not kept."""
        self.forget(key)
        if size > self.capacity_bytes:
            return
        self._entries[key] = (size, value)
        self.used_bytes += size
        while self.used_bytes > self.capacity_bytes:
            _, (evicted, _) = self._entries.popitem(last=False)
            self.used_bytes -= evicted

    def forget(self, key: bytes) -> None:
        """Harmless for a key that is not there."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.used_bytes -= entry[0]

    def clear(self) -> None:
        self._entries.clear()
        self.used_bytes = 0

    def check_integrity(self) -> None:
        """Recompute what is kept incrementally."""
        total = sum(size for size, _ in self._entries.values())
        assert total == self.used_bytes, f"{self.used_bytes} bytes counted, {total} held"
        assert total <= self.capacity_bytes, f"{total} bytes held, {self.capacity_bytes} allowed"


@dataclass(slots=True)
class CacheStats:
    """Counted in items, except where bytes are named."""

    queries: int = 0
    hits: int = 0
    bytes_sent: int = 0
    bytes_saved: int = 0
    repairs: int = 0

    def add(self, other: CacheStats) -> None:
        self.queries += other.queries
        self.hits += other.hits
        self.bytes_sent += other.bytes_sent
        self.bytes_saved += other.bytes_saved
        self.repairs += other.repairs


class SenderCache:
    """What the receiver holds, as far as the sender knows."""

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

    def pack(self, items: Sequence[tuple[bytes, int]]) -> list[bool]:
        """For each (hash, size) of one message: must its data travel? The message must then be sent."""
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
        """The receiver misses these (hash -> size): forget exactly them, and count each as sent, not as a hit."""
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
        """The receiver misses these and nobody has their data: what was counted as a hit was none."""
        for key in keys:
            if key in self._mirror:
                self.stats.hits -= 1
                self.stats.bytes_saved -= self._mirror.size_of(key)
                self._mirror.forget(key)

    def clear(self) -> None:
        """The receiver starts empty: a new epoch, or a reset of both sides."""
        self._mirror.clear()

    def check_integrity(self) -> None:
        self._mirror.check_integrity()


class ReceiverCache(Generic[T]):
    """The data itself, in step with one sender."""

    def __init__(self, capacity_bytes: int) -> None:
        self._held: ByteLru[T] = ByteLru(capacity_bytes)

    @property
    def capacity_bytes(self) -> int:
        return self._held.capacity_bytes

    def keys(self) -> list[bytes]:
        return self._held.keys()

    def missing(self, items: Sequence[tuple[bytes, int, T | None]], repaired: Mapping[bytes, T]) -> list[bytes]:
        """All hashes of a message whose data is neither here nor in the message nor repaired. Changes nothing."""
        arriving = {key for key, _, data in items if data is not None}
        wanted = dict.fromkeys(key for key, _, data in items if data is None)
        return [key for key in wanted if key not in self._held and key not in arriving and key not in repaired]

    def unpack(self, items: Sequence[tuple[bytes, int, T | None]], repaired: Mapping[bytes, T]) -> list[T | None]:
        """The data of each (hash, size, data) of one message; None for what is `missing` and could not be repaired."""
        arrived = {key: (size, data) for key, size, data in items if data is not None}
        found: list[T | None] = []
        for key, size, data in items:
            if data is None and key in self._held:
                data = self._held.touch(key)
            elif data is None and key in repaired:
                data = repaired[key]
                arrived.setdefault(key, (size, data))
            elif data is None and key in arrived:
                data = arrived[key][1]
            found.append(data)
        for key, (size, data) in arrived.items():
            self._held.store(key, size, data)
        return found

    def clear(self) -> None:
        self._held.clear()

    def check_integrity(self) -> None:
        self._held.check_integrity()
