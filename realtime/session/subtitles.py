"""Words with times -> subtitles to read: grouped into lines, and written as SubRip or WebVTT; pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from realtime.session.events import TimedWord
from realtime.session.words import SENTENCE_ENDS

# A longer subtitle is hard to read in the time it is shown.
MAX_SUBTITLE_CHARACTERS = 84
MAX_SUBTITLE_SECONDS = 6.0


@dataclass(frozen=True, slots=True)
class Subtitle:
    """A line to show from `start` to `end`, in seconds."""

    start: float
    end: float
    text: str
    words: tuple[TimedWord, ...]


def subtitles(words: Iterable[TimedWord], sample_rate: int) -> list[Subtitle]:
    """Group words into subtitles: a sentence each, or less where a sentence is too long to read."""
    result: list[Subtitle] = []
    line: list[TimedWord] = []
    length = 0
    for word in words:
        too_long = length + len(word.text) + 1 > MAX_SUBTITLE_CHARACTERS
        if line and (too_long or (word.end - line[0].start) / sample_rate > MAX_SUBTITLE_SECONDS):
            result.append(_subtitle(line, sample_rate))
            line, length = [], 0
        line.append(word)
        length += len(word.text) + 1
        if word.text.endswith(SENTENCE_ENDS):
            result.append(_subtitle(line, sample_rate))
            line, length = [], 0
    if line:
        result.append(_subtitle(line, sample_rate))
    return result


def _subtitle(line: list[TimedWord], sample_rate: int) -> Subtitle:
    text = " ".join(word.text.strip() for word in line)
    return Subtitle(line[0].start / sample_rate, line[-1].end / sample_rate, text, tuple(line))


def _clock(seconds: float, separator: str) -> str:
    milliseconds = round(seconds * 1000)
    hours, rest = divmod(milliseconds, 3_600_000)
    minutes, rest = divmod(rest, 60_000)
    whole, thousandths = divmod(rest, 1000)
    return f"{hours:02}:{minutes:02}:{whole:02}{separator}{thousandths:03}"


def to_srt(lines: Sequence[Subtitle]) -> str:
    blocks = [
        f"{number}\n{_clock(line.start, ',')} --> {_clock(line.end, ',')}\n{line.text}\n"
        for number, line in enumerate(lines, start=1)
    ]
    return "\n".join(blocks)


def to_vtt(lines: Sequence[Subtitle]) -> str:
    blocks = [f"{_clock(line.start, '.')} --> {_clock(line.end, '.')}\n{line.text}\n" for line in lines]
    return "WEBVTT\n\n" + "\n".join(blocks)
