"""The audio items of one stream in order (`Timeline`), and which sample a position starts at (`SampleClock`).

The scheduler asks a timeline for the items of a range of positions. Item indices are absolute: the first item of a
stream has index 0, and pruning does not renumber. Pruned items leave the lists when they outnumber the others, so the
cost of an operation does not grow with the age of the stream. Sums and offsets are lists of ints: reading single
elements of a tensor or array would cost far more than the lookup.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from engine.messages import Item, Saved


class ItemPositions:
    """The positions of an item: `length` positions from `offset`, and which of them have a row in the encoder cache.

    A position without audio has no row; it reads the row of silence. Without a mask every position has a row.
    """

    __slots__ = ("length", "offset", "rows_until")

    def __init__(self, offset: int, length: int, mask: Sequence[bool] | None = None) -> None:
        if offset < 0 or length < 0:
            raise ValueError(f"a range needs offset and length >= 0, got offset {offset} and length {length}")
        if mask is not None and len(mask) != length:
            raise ValueError(f"the mask has {len(mask)} entries for a range of {length} positions")
        self.offset = offset
        self.length = length
        # Number of rows of the positions up to and including each one; None: every position has a row.
        self.rows_until: list[int] | None = None if mask is None else list(accumulate(map(int, mask)))

    @property
    def end(self) -> int:
        return self.offset + self.length

    def row_count(self) -> int:
        """How many rows the item needs; cache space and compute budgets count rows, not positions."""
        if self.rows_until is None:
            return self.length
        return self.rows_until[-1] if self.rows_until else 0

    def row_slice(self, start: int, end: int) -> tuple[int, int]:
        """The slice of the item's rows that belongs to its positions [start, end); 0 is the item's first position."""
        if not 0 <= start <= end <= self.length:
            raise ValueError(f"positions [{start}, {end}) are not inside a range of {self.length} positions")
        if self.rows_until is None:
            return start, end
        # Index -1 would be the last element, so 0 is a case of its own.
        first = self.rows_until[start - 1] if start else 0
        last = self.rows_until[end - 1] if end else 0
        return first, last

    def rows_of(self, start: int, end: int, item_rows: Sequence[int], silence: int) -> list[int]:
        """The row number of each position in [start, end): from the item's rows, or `silence` without audio."""
        first, last = self.row_slice(start, end)
        if last - first == end - start:
            return list(item_rows[first:last])
        if self.rows_until is None or first == last:
            return [silence] * (end - start)
        previous = [first, *self.rows_until[start : end - 1]]
        return [
            item_rows[after - 1] if after > before else silence
            for before, after in zip(previous, self.rows_until[start:end], strict=True)
        ]


class Timeline:
    """Sorted items that do not overlap. Offsets and ends are lists of ints, so bisect runs in C."""

    __slots__ = ("__weakref__", "_base", "_ends", "_items", "_masked", "_offsets", "_pruned", "end")

    def __init__(self, start: int = 0) -> None:
        self._base = 0  # absolute index of the first entry in the lists
        self._pruned = 0  # leading entries that are pruned but still in the lists
        self._offsets: list[int] = []
        self._ends: list[int] = []
        self._items: list[Item] = []
        # The positions of items with a mask, by index.
        self._masked: dict[int, ItemPositions] = {}
        self.end = start  # first position that no item covers

    def __len__(self) -> int:
        """Number of items appended so far, pruned ones included: the index of the next item."""
        return self._base + len(self._ends)

    @property
    def first(self) -> int:
        """Index of the first item that is not pruned."""
        return self._base + self._pruned

    def append(self, item: Item) -> None:
        """Add an item at the end, and set its `embeds`, the number of its positions with a row in the encoder cache.
        Raises ValueError if it overlaps the last item or is malformed."""
        offset = item.offset
        if offset < self.end or item.length < 0:
            place = f"item of {item.length} positions at {offset}, but the positions before {self.end} are covered"
            raise ValueError(f"{place}; send items in order and without overlap")
        if item.mask is None:
            item.embeds = item.length if item.key else 0
        else:
            span = ItemPositions(offset, item.length, item.mask)
            item.embeds = span.row_count()
            self._masked[len(self)] = span
        self.end = end = offset + item.length
        self._offsets.append(offset)
        self._ends.append(end)
        self._items.append(item)

    def window(self, start: int, end: int) -> tuple[int, int]:
        """Indices [lo, hi) of the items that overlap positions [start, end); lo == hi if there are none."""
        pruned, base = self._pruned, self._base
        lo = bisect_right(self._ends, start, pruned)
        hi = bisect_left(self._offsets, end, pruned)
        if hi <= lo or end <= start:
            return base + lo, base + lo
        return base + lo, base + hi

    def item(self, index: int) -> Item:
        return self._items[index - self._base]

    def single_position_item(self, index: int, position: int) -> Item | None:
        """Fast path for live audio: item `index` if it is exactly this one position, with audio; else None."""
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

    def positions(self, index: int) -> ItemPositions:
        """The positions of an item."""
        masked = self._masked.get(index)
        if masked is not None:
            return masked
        item = self._items[index - self._base]
        return ItemPositions(item.offset, item.length)

    def arrival_at(self, position: int) -> int | None:
        """`Item.arrival` of the first item that ends after `position`; None if there is none."""
        place = bisect_right(self._ends, position, self._pruned)
        return self._items[place].arrival if place < len(self._items) else None

    def prune(self, position: int) -> None:
        """Drop the items that end at or before `position`; the others keep their indices."""
        ends, pruned = self._ends, self._pruned
        size = len(ends)
        while pruned < size and ends[pruned] <= position:
            if self._masked:
                self._masked.pop(self._base + pruned, None)
            pruned += 1
        self._pruned = pruned
        if pruned > 32 and pruned * 2 > size:
            del self._offsets[:pruned], ends[:pruned], self._items[:pruned]
            self._base += pruned
            self._pruned = 0

    def check_integrity(self) -> None:
        assert len(self._offsets) == len(self._ends) == len(self._items), "lists of different lengths"
        assert 0 <= self._pruned <= len(self._ends)
        previous = 0
        for offset, end, item in zip(self._offsets, self._ends, self._items, strict=True):
            assert previous <= offset <= end, f"item [{offset}, {end}) after {previous}"
            assert (item.offset, item.offset + item.length) == (offset, end)
            previous = end
        assert previous <= self.end
        masked = {index for index in range(self.first, len(self)) if self.item(index).mask is not None}
        assert masked == self._masked.keys(), "masked ranges and items disagree"


class SampleClock:
    """Converts between positions and samples of a stream.

    A *segment* is a run in which positions and samples advance together. A flush inserts silence, which advances
    positions only, so the next segment begins after it.
    """

    __slots__ = ("_origin", "_positions", "_samples", "_samples_per_position", "end_sample")

    def __init__(self, samples_per_position: int, first_position: int) -> None:
        self._samples_per_position = samples_per_position
        # First position and first sample of each segment.
        self._positions = [first_position]
        self._samples = [0]
        # Sample of position 0, extrapolated from the last segment.
        self._origin = -first_position * samples_per_position
        self.end_sample = 0  # first sample that no item covers

    def append(self, item: Item) -> None:
        """Record the sample of an item. Raises ValueError if its samples overlap earlier ones."""
        sample = item.sample
        if sample < self.end_sample:
            raise ValueError(f"item at sample {sample}, but the samples before {self.end_sample} are already covered")
        if sample != self._origin + item.offset * self._samples_per_position:
            self._positions.append(item.offset)
            self._samples.append(sample)
            self._origin = sample - item.offset * self._samples_per_position
        self.end_sample = sample + item.covered_samples(self._samples_per_position)

    def sample_at(self, position: float) -> int:
        """The sample at which a position starts."""
        positions, samples, segment_end = self._positions, self._samples, self.end_sample
        segment = len(positions) - 1
        if position < positions[segment]:
            segment = max(0, bisect_right(positions, position) - 1)
            segment_end = samples[segment + 1] if segment + 1 < len(samples) else segment_end
        sample = samples[segment] + int((position - positions[segment]) * self._samples_per_position)
        # Positions of inserted silence belong to the sample at which their segment ends.
        if sample > segment_end:
            sample = segment_end
        return sample if sample > 0 else 0

    def position_at(self, sample: int) -> int:
        """The position that contains a sample."""
        segment = max(0, bisect_right(self._samples, sample) - 1)
        return self._positions[segment] + max(0, sample - self._samples[segment]) // self._samples_per_position

    def save(self) -> Saved:
        return {"positions": list(self._positions), "samples": list(self._samples), "end_sample": self.end_sample}

    def resume(self, saved: Saved) -> None:
        """Restore a saved state."""
        self._positions, self._samples = list(saved["positions"]), list(saved["samples"])
        self._origin = self._samples[-1] - self._positions[-1] * self._samples_per_position
        self.end_sample = saved["end_sample"]

    def prune(self, position: int) -> None:
        """Drop the segments that end before `position`."""
        if len(self._positions) > 1 and self._positions[1] <= position:
            keep = bisect_right(self._positions, position) - 1
            del self._positions[:keep], self._samples[:keep]
