"""Byte-pair encoding: splits text into tokens, for prompts (`PromptTokenizer`) and keywords (`bias.py`)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

# Characters at the end of a prompt that are used: a model uses a few hundred tokens of it.
PROMPT_CHARACTERS = 2_000
# Parts of a text that are never merged: words with the space before them, numbers, marks. The same as in GPT-2.
_WORDS = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")


def bpe_merge(letters: Sequence[bytes], ranks: Mapping[bytes, int]) -> list[bytes]:
    """Tokenise by byte-pair merges: of all neighbours that can be merged, first those with the lowest rank, then the
    leftmost. `ranks`: token -> its rank. A heap finds the next pair, because a client may send one very long word, and
    the step of all streams may wait for this."""
    parts, count = list(letters), len(letters)
    before, after = list(range(-1, count - 1)), list(range(1, count + 1))
    pairs: list[tuple[int, int, bytes]] = []

    def add_pair(left: int) -> None:
        """Add the pair of the part at `left` and the part after it, if their merge is a token."""
        if left >= 0 and after[left] < count:
            merged = parts[left] + parts[after[left]]
            rank = ranks.get(merged)
            if rank is not None:
                heappush(pairs, (rank, left, merged))

    for left in range(count):
        add_pair(left)
    while pairs:
        _, left, merged = heappop(pairs)
        right = after[left]
        # One of the two may have been merged with another part since.
        if not parts[left] or right == count or parts[left] + parts[right] != merged:
            continue
        parts[left], parts[right], after[left] = merged, b"", after[right]
        if after[left] < count:
            before[after[left]] = left
        add_pair(before[left])
        add_pair(left)
    return [part for part in parts if part]


def single_bytes(text: bytes) -> list[bytes]:
    """Each byte of the text."""
    return [text[index : index + 1] for index in range(len(text))]


class PromptTokenizer:
    """Tokenises prompts. The number of a token is its merge rank."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._ranks = {piece: token for token, piece in enumerate(pieces) if piece}

    def tokens(self, text: str) -> list[int]:
        """The tokens of the end of a prompt, as of text after a space."""
        text = text.strip()[-PROMPT_CHARACTERS:]
        words = _WORDS.findall(f" {text}") if text else []
        parts = (part for word in words for part in bpe_merge(single_bytes(word.encode()), self._ranks))
        return [self._ranks[part] for part in parts if part in self._ranks]
