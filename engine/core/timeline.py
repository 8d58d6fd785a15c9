"""The items of one stream in order (`Timeline`), and the conversion of positions to samples (`SampleClock`).

Each `Stream` of `engine/core/stream.py` has one of each. `Timeline` finds the items of a range of positions. Item
indices are absolute: the first item of a stream has index 0, and pruning does not renumber. Pruned items leave the
lists when they outnumber the others, so every operation is O(1) amortised or O(log n). Sums and offsets are lists of
ints: reading single elements of a tensor or array would cost far more than the lookup.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from engine.messages import Item, Saved


class EmbeddingRange:
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
        # Index -1 would be the last element, so 0 is a case of its own.
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


class Timeline:
    """Sorted items that do not overlap. Offsets and ends are lists of ints, so bisect runs in C."""

    __slots__ = ("__weakref__", "_base", "_dead", "_ends", "_items", "_masked", "_offsets", "end")

    def __init__(self, start: int = 0) -> None:
        self._base = 0  # absolute index of the first entry in the lists
        self._dead = 0  # leading entries that are pruned but still in the lists
        self._offsets: list[int] = []
        self._ends: list[int] = []
        self._items: list[Item] = []
        # Ranges of the items with a mask; all others are plain [offset, end).
        self._masked: dict[int, EmbeddingRange] = {}
        self.end = start  # first position that no item covers

    def __len__(self) -> int:
        """Number of items appended so far, pruned ones included: the index of the next item."""
        return self._base + len(self._ends)

    @property
    def first(self) -> int:
        """Index of the first item that is not pruned."""
        return self._base + self._dead

    def append(self, item: Item) -> None:
        """Add an item at the end. Raises ValueError if it overlaps the last one or is malformed."""
        offset = item.offset
        if offset < self.end or item.length < 0:
            place = f"item of {item.length} positions at {offset}, but the positions before {self.end} are covered"
            raise ValueError(f"{place}; send items in order and without overlap")
        if item.mask is None:
            item.embeds = item.length if item.key else 0
        else:
            span = EmbeddingRange(offset, item.length, item.mask)
            item.embeds = span.num_embeds()
            self._masked[len(self)] = span
        self.end = end = offset + item.length
        self._offsets.append(offset)
        self._ends.append(end)
        self._items.append(item)

    def window(self, start: int, end: int) -> tuple[int, int]:
        """Indices [lo, hi) of the items that overlap positions [start, end); lo == hi if there are none."""
        dead, base = self._dead, self._base
        lo = bisect_right(self._ends, start, dead)
        hi = bisect_left(self._offsets, end, dead)
        if hi <= lo or end <= start:
            return base + lo, base + lo
        return base + lo, base + hi

    def item(self, index: int) -> Item:
        return self._items[index - self._base]

    def frame_at(self, index: int, position: int) -> Item | None:
        """Fast path for live audio: item `index` if it is exactly this one position, with an embedding; else None."""
        place = index - self._base
        if place < len(self._items):
            item = self._items[place]
            if item.offset == position and item.length == 1 and item.embeds == 1:
                return item
        return None

    def items(self, lo: int, hi: int) -> list[Item]:
        """The items [lo, hi), indices as returned by `window`."""
        return self._items[lo - self._base : hi - self._base]

    def first_beyond(self, index: int, position: int) -> int:
        """Index of the first item from `index` on that ends after a position; else the index of the next item."""
        ends, place = self._ends, index - self._base
        while place < len(ends) and ends[place] <= position:
            place += 1
        return self._base + place

    def range(self, index: int) -> EmbeddingRange:
        """The positions of an item that have an embedding."""
        masked = self._masked.get(index)
        if masked is not None:
            return masked
        item = self._items[index - self._base]
        return EmbeddingRange(item.offset, item.length)

    def arrival_at(self, position: int) -> int | None:
        """Arrival time of the first item that ends after `position`; None if there is none."""
        place = bisect_right(self._ends, position, self._dead)
        return self._items[place].arrival if place < len(self._items) else None

    def prune(self, position: int) -> None:
        """Drop the items that end at or before `position`; the others keep their indices."""
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
    """Converts positions to samples. A segment begins where the two stop advancing together: at the first sample, and
    after each flush, whose inserted silence advances positions but not samples."""

    __slots__ = ("_origin", "_positions", "_rate", "_samples", "end_sample")

    def __init__(self, samples_per_position: int, first_position: int) -> None:
        self._rate = samples_per_position
        self._positions = [first_position]
        self._samples = [0]
        self._origin = (
            -first_position * samples_per_position
        )  # sample of position 0, extrapolated from the last segment
        self.end_sample = 0  # first sample that no item covers

    def append(self, item: Item) -> None:
        """Record the sample of an item. Raises ValueError if its samples overlap earlier ones."""
        sample = item.sample
        if sample < self.end_sample:
            raise ValueError(f"item at sample {sample}, but the samples before {self.end_sample} are already covered")
        if sample != self._origin + item.offset * self._rate:
            self._positions.append(item.offset)
            self._samples.append(sample)
            self._origin = sample - item.offset * self._rate
        self.end_sample = sample + item.covered_samples(self._rate)

    def sample_at(self, position: float) -> int:
        """The sample at which a position starts."""
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
        """The position that contains a sample."""
        place = max(0, bisect_right(self._samples, sample) - 1)
        return self._positions[place] + max(0, sample - self._samples[place]) // self._rate

    def save(self) -> Saved:
        return {"positions": list(self._positions), "samples": list(self._samples), "end_sample": self.end_sample}

    def resume(self, saved: Saved) -> None:
        """Restore a saved state."""
        self._positions, self._samples = list(saved["positions"]), list(saved["samples"])
        self._origin = self._samples[-1] - self._positions[-1] * self._rate
        self.end_sample = saved["end_sample"]

    def prune(self, position: int) -> None:
        """Drop the segments that end before `position`."""
        if len(self._positions) > 1 and self._positions[1] <= position:
            keep = bisect_right(self._positions, position) - 1
            del self._positions[:keep], self._samples[:keep]
