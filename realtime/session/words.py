"""Text of an engine stream cut into words with times; pure.

The engine sends text in deltas that may end inside a word, and names a word with its times once it is complete. The
cutter keeps both together, so that a turn can get the words that were spoken in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine import messages
from realtime.session.events import TimedWord

SENTENCE_ENDS = (".", "?", "!", "…", "。", "？", "！")


@dataclass(frozen=True, slots=True)
class Piece:
    """A complete word with the white space before it. `fresh` is the part nobody has been given yet."""

    fresh: str
    word: TimedWord
    # Part of the word was given away while it was still incomplete; the rest belongs to the same place.
    continues: bool


class WordCutter:
    """Splits a stream's deltas into complete words, and a loose end whose word is still to come."""

    def __init__(self) -> None:
        self._loose = ""
        self._given = 0

    def save(self) -> tuple[str, int]:
        """The loose end, and how much of it was given away."""
        return self._loose, self._given

    def load(self, loose: str, given: int) -> None:
        self._loose, self._given = loose, given

    def cut_words(self, delta: str, words: Sequence[messages.Word], base: int) -> list[Piece]:
        """Take a delta and the words it completed (times counted from `base`); returns those words as pieces."""
        self._loose += delta
        pieces = []
        for word in words:
            found = self._loose.find(word.text)
            # A word that is not in the text (a model that normalises) takes what there is: no text is lost.
            cut = found + len(word.text) if found >= 0 else len(self._loose)
            text, self._loose = self._loose[:cut], self._loose[cut:]
            given, self._given = min(self._given, cut), max(0, self._given - cut)
            timed = TimedWord(word.text, base + word.start_sample, base + word.end_sample)
            pieces.append(Piece(text[given:], timed, continues=given > 0))
        return pieces

    @property
    def gave_loose(self) -> bool:
        """Part of a word that is still to come was given away."""
        return self._given > 0

    def take_loose(self) -> str:
        """Give the loose end away now; the rest of its word will follow it."""
        text = self._loose[self._given :]
        self._given = len(self._loose)
        return text

    def cut_loose(self) -> str:
        """Give the loose end away and forget it: the engine says that nothing more belongs to it."""
        text = self.take_loose()
        self._loose, self._given = "", 0
        return text


def ends_sentence(text: str) -> bool:
    """The text reads as finished: its last sentence has its full stop."""
    return text.rstrip(" \n\"')”’").endswith(SENTENCE_ENDS) and not text.rstrip().endswith(("...", "…"))
