"""Text of an engine stream cut into words with times, and whole transcripts written as captions; pure.

The engine sends text in deltas that may end inside a word, and names a word with its times once it is complete. The
cutter keeps both together, so that a turn can get the words that were spoken in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine import messages
from realtime.session.events import TimedWord

# A caption longer than this is hard to read in the time it is shown.
MAX_CAPTION_CHARACTERS = 84
MAX_CAPTION_SECONDS = 6.0
SENTENCE_ENDS = (".", "?", "!", "…", "。", "？", "！")


@dataclass(frozen=True, slots=True)
class Piece:
    """A complete word with the white space before it. `fresh` is the part nobody has been given yet."""

    fresh: str
    word: TimedWord
    # Part of the word was given away while it was still incomplete; the rest belongs to the same place.
    continues: bool


class Cutter:
    """Splits a stream's deltas into complete words, and a loose end whose word is still to come."""

    def __init__(self) -> None:
        self._loose = ""
        self._given = 0

    def push(self, delta: str, words: Sequence[messages.Word], base: int) -> list[Piece]:
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

    def take_loose(self) -> str:
        """Give the loose end away now; the rest of its word will follow it."""
        text = self._loose[self._given :]
        self._given = len(self._loose)
        return text

    def cut(self) -> str:
        """Give the loose end away and forget it: the engine says that nothing more belongs to it."""
        text = self.take_loose()
        self._loose, self._given = "", 0
        return text


def ends_sentence(text: str) -> bool:
    """The text reads as finished: its last sentence has its full stop."""
    return text.rstrip(" \n\"')”’").endswith(SENTENCE_ENDS) and not text.rstrip().endswith(("...", "…"))


@dataclass(frozen=True, slots=True)
class Caption:
    """A line to show from `start` to `end`, in seconds."""

    start: float
    end: float
    text: str
    words: tuple[TimedWord, ...]


def captions(words: Iterable[TimedWord], sample_rate: int) -> list[Caption]:
    """Group words into captions: a sentence each, or less where a sentence is too long to read."""
    result: list[Caption] = []
    line: list[TimedWord] = []
    length = 0
    for word in words:
        too_long = length + len(word.text) + 1 > MAX_CAPTION_CHARACTERS
        if line and (too_long or (word.end - line[0].start) / sample_rate > MAX_CAPTION_SECONDS):
            result.append(_caption(line, sample_rate))
            line, length = [], 0
        line.append(word)
        length += len(word.text) + 1
        if word.text.endswith(SENTENCE_ENDS):
            result.append(_caption(line, sample_rate))
            line, length = [], 0
    if line:
        result.append(_caption(line, sample_rate))
    return result


def _caption(line: list[TimedWord], sample_rate: int) -> Caption:
    text = " ".join(word.text.strip() for word in line)
    return Caption(line[0].start / sample_rate, line[-1].end / sample_rate, text, tuple(line))


def _clock(seconds: float, separator: str) -> str:
    milliseconds = round(seconds * 1000)
    hours, rest = divmod(milliseconds, 3_600_000)
    minutes, rest = divmod(rest, 60_000)
    whole, thousandths = divmod(rest, 1000)
    return f"{hours:02}:{minutes:02}:{whole:02}{separator}{thousandths:03}"


def to_srt(lines: Sequence[Caption]) -> str:
    blocks = [
        f"{number}\n{_clock(line.start, ',')} --> {_clock(line.end, ',')}\n{line.text}\n"
        for number, line in enumerate(lines, start=1)
    ]
    return "\n".join(blocks)


def to_vtt(lines: Sequence[Caption]) -> str:
    blocks = [f"{_clock(line.start, '.')} --> {_clock(line.end, '.')}\n{line.text}\n" for line in lines]
    return "WEBVTT\n\n" + "\n".join(blocks)
