"""How a byte-pair vocabulary cuts a word: neighbours are joined, those first whose piece has the lowest number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush


def joined_pairs(letters: Sequence[bytes], ranks: Mapping[bytes, int]) -> list[bytes]:
    """Pairs wait in order, the lowest rank first and of the same the leftmost. Nobody looks through the whole word for
    the next one: what a client sends may be a single word, and everybody's step waits for this."""
    parts, count = list(letters), len(letters)
    before, after = list(range(-1, count - 1)), list(range(1, count + 1))
    pairs: list[tuple[int, int, bytes]] = []

    def offer(left: int) -> None:
        if left >= 0 and after[left] < count:
            joined = parts[left] + parts[after[left]]
            rank = ranks.get(joined)
            if rank is not None:
                heappush(pairs, (rank, left, joined))

    for left in range(count):
        offer(left)
    while pairs:
        _, left, joined = heappop(pairs)
        right = after[left]
        # One of the two may have been joined with another since.
        if not parts[left] or right == count or parts[left] + parts[right] != joined:
            continue
        parts[left], parts[right], after[left] = joined, b"", after[right]
        if after[left] < count:
            before[after[left]] = left
        offer(before[left])
        offer(left)
    return [part for part in parts if part]


def single_bytes(text: bytes) -> list[bytes]:
    return [text[at : at + 1] for at in range(len(text))]
