"""Placeholder ranges: which positions of an item carry an embedding.

The running sum of a mask is kept as a plain list of ints: reading one element of a tensor or an array per item and
step costs far more than the lookup it serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


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
