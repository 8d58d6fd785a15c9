"""The items of one stream, in order, found by bisect; and the map from positions back to audio samples.

Indices are absolute: the first item a stream ever had is 0, and pruning never renumbers. Dropping dead items off the
front of the lists happens when they outnumber the living, so every operation is O(1) amortised or O(log n).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from engine.core.ranges import PlaceholderRange
from engine.messages import Item


class Timeline:
    """Sorted, non-overlapping items. Offsets and ends are plain int lists, so bisect runs in C."""

    __slots__ = ("_base", "_dead", "_ends", "_items", "_offsets", "_ranges", "_stamps", "end")

    def __init__(self, start: int = 0) -> None:
        self._base = 0  # absolute index of the lists' first entry
        self._dead = 0  # entries at the front that are pruned but not dropped yet
        self._offsets: list[int] = []
        self._ends: list[int] = []
        self._ranges: list[PlaceholderRange] = []
        self._items: list[Item] = []
        self._stamps: list[int] = []
        self.end = start  # first position no item has covered yet

    def __len__(self) -> int:
        """Items appended so far, pruned ones included: the index the next item gets."""
        return self._base + len(self._offsets)

    @property
    def first(self) -> int:
        """Index of the first living item."""
        return self._base + self._dead

    def append(self, item: Item, span: PlaceholderRange, stamp: int) -> None:
        """Add an item at the end, with its range; `stamp` is its arrival. Raises ValueError if it breaks the order."""
        offset = span.offset
        if offset < self.end:
            raise ValueError(
                f"item at position {offset}, but the positions before {self.end} are covered already; "
                "send items in order and without overlap"
            )
        self.end = end = offset + span.length
        self._offsets.append(offset)
        self._ends.append(end)
        self._ranges.append(span)
        self._items.append(item)
        self._stamps.append(stamp)

    def window(self, start: int, end: int) -> tuple[int, int]:
        """Indices [lo, hi) of the living items that overlap positions [start, end); lo == hi if none does."""
        dead = self._dead
        lo = bisect_right(self._ends, start, dead)
        hi = bisect_left(self._offsets, end, dead)
        if hi <= lo or end <= start:
            return self._base + lo, self._base + lo
        return self._base + lo, self._base + hi

    def item(self, index: int) -> Item:
        return self._items[index - self._base]

    def range(self, index: int) -> PlaceholderRange:
        return self._ranges[index - self._base]

    def end_of(self, index: int) -> int:
        return self._ends[index - self._base]

    def stamp_at(self, position: int) -> int | None:
        """Arrival of the first item that reaches beyond `position`; None if none does."""
        place = bisect_right(self._ends, position, self._dead)
        return self._stamps[place] if place < len(self._stamps) else None

    def prune(self, position: int) -> None:
        """Forget the items that end at or before `position`; the others keep their indices."""
        ends, dead = self._ends, self._dead
        size = len(ends)
        while dead < size and ends[dead] <= position:
            dead += 1
        self._dead = dead
        if dead > 32 and dead * 2 > size:
            for entries in (self._offsets, ends, self._ranges, self._items, self._stamps):
                del entries[:dead]
            self._base += dead
            self._dead = 0

    def check_integrity(self) -> None:
        sizes = {len(self._offsets), len(self._ends), len(self._ranges), len(self._items), len(self._stamps)}
        assert len(sizes) == 1, f"lists of different lengths: {sizes}"
        assert 0 <= self._dead <= len(self._ends)
        previous = 0
        for offset, end, span in zip(self._offsets, self._ends, self._ranges, strict=True):
            assert previous <= offset <= end, f"item [{offset}, {end}) after {previous}"
            assert (span.offset, span.end) == (offset, end)
            previous = end
        assert previous <= self.end


class SampleClock:
    """Positions to audio samples. A segment starts wherever the two clocks stop running together: at the stream's
    first sample, and after each flush, whose inserted silence moves positions but not audio time."""

    __slots__ = ("_positions", "_rate", "_samples", "end_sample")

    def __init__(self, samples_per_position: int, first_position: int) -> None:
        self._rate = samples_per_position
        self._positions = [first_position]
        self._samples = [0]
        self.end_sample = 0  # first sample no item has covered yet

    def check(self, item: Item) -> None:
        """Raises ValueError if the item's samples run backwards."""
        if item.sample < self.end_sample:
            raise ValueError(f"item at sample {item.sample}, but the samples before {self.end_sample} have come already")

    def append(self, item: Item) -> None:
        """Note where a checked item's audio sits."""
        if item.sample != self._samples[-1] + (item.offset - self._positions[-1]) * self._rate:
            self._positions.append(item.offset)
            self._samples.append(item.sample)
        covered = item.length * self._rate if item.samples is None else item.samples
        self.end_sample = item.sample + covered

    def sample_at(self, position: float) -> int:
        """The audio sample that a position starts at."""
        place = max(0, bisect_right(self._positions, position) - 1)
        sample = self._samples[place] + int((position - self._positions[place]) * self._rate)
        following = self._samples[place + 1] if place + 1 < len(self._samples) else self.end_sample
        return max(0, min(sample, following))

    def position_at(self, sample: int) -> int:
        """The position that hears an audio sample."""
        place = max(0, bisect_right(self._samples, sample) - 1)
        return self._positions[place] + max(0, sample - self._samples[place]) // self._rate

    def prune(self, position: int) -> None:
        """Forget the segments that end before `position`."""
        if len(self._positions) > 1 and self._positions[1] <= position:
            keep = bisect_right(self._positions, position) - 1
            del self._positions[:keep]
            del self._samples[:keep]
