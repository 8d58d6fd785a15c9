"""Placeholder ranges: which positions of an item carry an embedding.

The running sum of a mask is kept as a plain list of ints: reading one element of a tensor or an array per item and
step costs far more than the lookup it serves.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from engine.messages import Item, Saved


class PlaceholderRange:
    """`length` positions from `offset`; with a mask, only those marked True carry an embedding."""

    __slots__ = ("length", "offset", "sums")

    def __init__(self, offset: int, length: int, mask: Sequence[bool] | None = None) -> None:
        if offset < 0 or length < 0:
            raise ValueError(f"a range needs offset and length >= 0, got offset {offset} and length {length}")
        if mask is not None and len(mask) != length:
            raise ValueError(f"the mask has {len(mask)} entries for a range of {length} positions")
        self.offset = offset
        self.length = length
        self.sums: list[int] | None = None if mask is None else list(accumulate(map(int, mask)))

    @property
    def end(self) -> int:
        return self.offset + self.length

    def num_embeds(self) -> int:
        """How many embeddings the range needs; cache space and compute budgets count these, not positions."""
        if self.sums is None:
            return self.length
        return self.sums[-1] if self.sums else 0

    def embed_slice(self, start: int, end: int) -> tuple[int, int]:
        """Embedding rows of the positions [start, end), counted from the range's own first position."""
        if not 0 <= start <= end <= self.length:
            raise ValueError(f"positions [{start}, {end}) are not inside a range of {self.length} positions")
        if self.sums is None:
            return start, end
        # Index -1 is legal Python, so both zero cases need their own answer.
        first = self.sums[start - 1] if start else 0
        last = self.sums[end - 1] if end else 0
        return first, last

    def rows(self, rows: Sequence[int], start: int, end: int, silence: int) -> list[int]:
        """The cache row of each position in [start, end): from `rows` where there is an embedding, else `silence`."""
        first, last = self.embed_slice(start, end)
        if last - first == end - start:
            return list(rows[first:last])
        if self.sums is None or first == last:
            return [silence] * (end - start)
        previous = [first, *self.sums[start : end - 1]]
        return [
            rows[after - 1] if after > before else silence
            for before, after in zip(previous, self.sums[start:end], strict=True)
        ]


# The items of one stream, in order, found by bisect; and the map from positions back to audio samples.
#
# Indices are absolute: the first item a stream ever had is 0, and pruning never renumbers. Pruned items are dropped
# off the front of the lists when they outnumber the living, so every operation is O(1) amortised or O(log n).


class Timeline:
    """Sorted, non-overlapping items. Offsets and ends are plain int lists, so bisect runs in C."""

    __slots__ = ("__weakref__", "_base", "_dead", "_ends", "_items", "_masked", "_offsets", "end")

    def __init__(self, start: int = 0) -> None:
        self._base = 0  # absolute index of the lists' first entry
        self._dead = 0  # entries at the front that are pruned but not dropped yet
        self._offsets: list[int] = []
        self._ends: list[int] = []
        self._items: list[Item] = []
        # Ranges of the few items that have a mask; all others are plain [offset, end).
        self._masked: dict[int, PlaceholderRange] = {}
        self.end = start  # first position no item has covered yet

    def __len__(self) -> int:
        """Items appended so far, pruned ones included: the index the next item gets."""
        return self._base + len(self._ends)

    @property
    def first(self) -> int:
        """Index of the first living item."""
        return self._base + self._dead

    def append(self, item: Item) -> None:
        """Add an item at the end. Raises ValueError if it breaks the order or is malformed."""
        offset = item.offset
        if offset < self.end or item.length < 0:
            place = f"item of {item.length} positions at {offset}, but the positions before {self.end} are covered"
            raise ValueError(f"{place}; send items in order and without overlap")
        if item.mask is None:
            item.embeds = item.length if item.key else 0
        else:
            span = PlaceholderRange(offset, item.length, item.mask)
            item.embeds = span.num_embeds()
            self._masked[len(self)] = span
        self.end = end = offset + item.length
        self._offsets.append(offset)
        self._ends.append(end)
        self._items.append(item)

    def window(self, start: int, end: int) -> tuple[int, int]:
        """Indices [lo, hi) of the living items that overlap positions [start, end); lo == hi if none does."""
        dead, base = self._dead, self._base
        lo = bisect_right(self._ends, start, dead)
        hi = bisect_left(self._offsets, end, dead)
        if hi <= lo or end <= start:
            return base + lo, base + lo
        return base + lo, base + hi

    def item(self, index: int) -> Item:
        return self._items[index - self._base]

    def frame_at(self, index: int, position: int) -> Item | None:
        """The item `index` if it is just this one position, with an embedding: a live frame, found without a search."""
        place = index - self._base
        if place < len(self._items):
            item = self._items[place]
            if item.offset == position and item.length == 1 and item.embeds == 1:
                return item
        return None

    def items(self, lo: int, hi: int) -> list[Item]:
        """The items [lo, hi), as `window` found them."""
        return self._items[lo - self._base : hi - self._base]

    def first_beyond(self, index: int, position: int) -> int:
        """Index of the first item, from `index` on, reaching beyond a position; of the next to come if none does."""
        ends, place = self._ends, index - self._base
        while place < len(ends) and ends[place] <= position:
            place += 1
        return self._base + place

    def range(self, index: int) -> PlaceholderRange:
        """Which positions of an item carry an embedding."""
        masked = self._masked.get(index)
        if masked is not None:
            return masked
        item = self._items[index - self._base]
        return PlaceholderRange(item.offset, item.length)

    def arrival_at(self, position: int) -> int | None:
        """When the first item that reaches beyond `position` came; None if none does."""
        place = bisect_right(self._ends, position, self._dead)
        return self._items[place].arrival if place < len(self._items) else None

    def prune(self, position: int) -> None:
        """Forget the items that end at or before `position`; the others keep their indices."""
        ends, dead = self._ends, self._dead
        size = len(ends)
        while dead < size and ends[dead] <= position:
            if self._masked:
                self._masked.pop(self._base + dead, None)
            dead += 1
        self._dead = dead
        if dead > 32 and dead * 2 > size:
            del self._offsets[:dead], ends[:dead], self._items[:dead]
            self._base += dead
            self._dead = 0

    def check_integrity(self) -> None:
        assert len(self._offsets) == len(self._ends) == len(self._items), "lists of different lengths"
        assert 0 <= self._dead <= len(self._ends)
        previous = 0
        for offset, end, item in zip(self._offsets, self._ends, self._items, strict=True):
            assert previous <= offset <= end, f"item [{offset}, {end}) after {previous}"
            assert (item.offset, item.offset + item.length) == (offset, end)
            previous = end
        assert previous <= self.end
        masked = {index for index in range(self.first, len(self)) if self.item(index).mask is not None}
        assert masked == self._masked.keys(), "masked ranges and items disagree"


class SampleClock:
    """Positions to audio samples. A segment starts wherever the two clocks stop running together: at the stream's
    first sample, and after each flush, whose inserted silence moves positions but not audio time."""

    __slots__ = ("_origin", "_positions", "_rate", "_samples", "end_sample")

    def __init__(self, samples_per_position: int, first_position: int) -> None:
        self._rate = samples_per_position
        self._positions = [first_position]
        self._samples = [0]
        self._origin = -first_position * samples_per_position  # sample of position 0 if the last segment reached there
        self.end_sample = 0  # first sample no item has covered yet

    def append(self, item: Item) -> None:
        """Note where an item's audio sits. Raises ValueError if its samples run backwards."""
        sample = item.sample
        if sample < self.end_sample:
            raise ValueError(f"item at sample {sample}, but the samples before {self.end_sample} have come already")
        if sample != self._origin + item.offset * self._rate:
            self._positions.append(item.offset)
            self._samples.append(sample)
            self._origin = sample - item.offset * self._rate
        self.end_sample = sample + (item.length * self._rate if item.samples is None else item.samples)

    def sample_at(self, position: float) -> int:
        """The audio sample that a position starts at."""
        positions, samples, following = self._positions, self._samples, self.end_sample
        place = len(positions) - 1
        if position < positions[place]:
            place = max(0, bisect_right(positions, position) - 1)
            following = samples[place + 1] if place + 1 < len(samples) else following
        sample = samples[place] + int((position - positions[place]) * self._rate)
        if sample > following:
            sample = following
        return sample if sample > 0 else 0

    def position_at(self, sample: int) -> int:
        """The position that hears an audio sample."""
        place = max(0, bisect_right(self._samples, sample) - 1)
        return self._positions[place] + max(0, sample - self._samples[place]) // self._rate

    def save(self) -> Saved:
        return {"positions": list(self._positions), "samples": list(self._samples), "end_sample": self.end_sample}

    def resume(self, saved: Saved) -> None:
        """Take over the state of a saved clock."""
        self._positions, self._samples = list(saved["positions"]), list(saved["samples"])
        self._origin = self._samples[-1] - self._positions[-1] * self._rate
        self.end_sample = saved["end_sample"]

    def prune(self, position: int) -> None:
        """Forget the segments that end before `position`."""
        if len(self._positions) > 1 and self._positions[1] <= position:
            keep = bisect_right(self._positions, position) - 1
            del self._positions[:keep], self._samples[:keep]
