"""Byte-pair encoding: splits text into tokens, for prompts (`PromptTokenizer`) and keywords (`bias.py`)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

# Characters at the end of a prompt that are used: a model keeps a few hundred tokens of it.
LAST_CHARACTERS = 2_000
# Parts of a text that are never joined: words with the space before them, numbers, marks. The same as in GPT-2.
_WORDS = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")


def joined_pairs(letters: Sequence[bytes], ranks: Mapping[bytes, int]) -> list[bytes]:
    """Tokenise by byte-pair merges: of all neighbours that can be joined, those with the lowest rank first, then the
    leftmost. Pairs are kept in a heap, not searched for: a client may send one very long word, and the step of all
    streams may wait for this."""
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
        # One of the two may have been joined with another part since.
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


class PromptTokenizer:
    """Tokenises prompts. The number of a token is its merge rank."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._ranks = {piece: token for token, piece in enumerate(pieces) if piece}

    def tokens(self, text: str) -> list[int]:
        """The tokens of a prompt, as if it were spoken text after a space."""
        text = text.strip()[-LAST_CHARACTERS:]
        words = _WORDS.findall(f" {text}") if text else []
        parts = (part for word in words for part in joined_pairs(single_bytes(word.encode()), self._ranks))
        return [self._ranks[part] for part in parts if part in self._ranks]
