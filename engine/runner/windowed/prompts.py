"""Text that a model is told came before: its tokens, by the ranks of a byte-pair vocabulary."""

from __future__ import annotations

import re
from collections.abc import Sequence
from heapq import heappop, heappush

# Most characters of a prompt that are looked at, from its end: a model keeps a few hundred tokens of it.
LAST_CHARACTERS = 2_000
# Pieces of a text that are never joined: words with the space before them, numbers, marks. As GPT-2 has them.
_WORDS = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")


class Prompts:
    """A token's number is its rank: of two neighbours that can be joined, those that make the lowest one are."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._ranks = {piece: token for token, piece in enumerate(pieces) if piece}

    def tokens(self, text: str) -> list[int]:
        """Of a text as if it were said: behind a space."""
        text = text.strip()[-LAST_CHARACTERS:]
        return [token for word in _WORDS.findall(f" {text}") for token in self._word(word.encode())] if text else []

    def _word(self, word: bytes) -> list[int]:
        """Pairs wait in order, the lowest rank first and of the same the leftmost. Nobody looks through the whole word
        for the next one: a prompt may be a single word, and everybody's step waits for this."""
        parts = [word[at : at + 1] for at in range(len(word))]
        before, after = list(range(-1, len(word) - 1)), list(range(1, len(word) + 1))
        pairs: list[tuple[int, int, bytes]] = []

        def offer(left: int) -> None:
            if left >= 0 and after[left] < len(word):
                joined = parts[left] + parts[after[left]]
                rank = self._ranks.get(joined)
                if rank is not None:
                    heappush(pairs, (rank, left, joined))

        for left in range(len(word)):
            offer(left)
        while pairs:
            _, left, joined = heappop(pairs)
            right = after[left]
            # One of the two may have been joined with another since.
            if not parts[left] or right == len(word) or parts[left] + parts[right] != joined:
                continue
            parts[left], parts[right], after[left] = joined, b"", after[right]
            if after[left] < len(word):
                before[after[left]] = left
            offer(before[left])
            offer(left)
        return [self._ranks[part] for part in parts if part in self._ranks]
