"""Text that a model is told came before: its tokens, by the ranks of a byte-pair vocabulary."""

from __future__ import annotations

import re
from collections.abc import Sequence

from engine.runner.pairs import joined_pairs, single_bytes

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
        words = _WORDS.findall(f" {text}") if text else []
        parts = (part for word in words for part in joined_pairs(single_bytes(word.encode()), self._ranks))
        return [self._ranks[part] for part in parts if part in self._ranks]
