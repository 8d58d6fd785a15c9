"""Words with times -> subtitles to read: grouped into lines, and written as SubRip or WebVTT; pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
    return list(each_subtitle(words, sample_rate))


def each_subtitle(words: Iterable[TimedWord], sample_rate: int) -> Iterator[Subtitle]:
    """The same one by one, as they are asked for. Each has a bounded number of words."""
    line: list[TimedWord] = []
    length = 0
    for word in words:
        too_long = length + len(word.text) + 1 > MAX_SUBTITLE_CHARACTERS
        if line and (too_long or (word.end - line[0].start) / sample_rate > MAX_SUBTITLE_SECONDS):
            yield _subtitle(line, sample_rate)
            line, length = [], 0
        line.append(word)
        length += len(word.text) + 1
        if word.text.endswith(SENTENCE_ENDS):
            yield _subtitle(line, sample_rate)
            line, length = [], 0
    if line:
        yield _subtitle(line, sample_rate)


def _subtitle(line: list[TimedWord], sample_rate: int) -> Subtitle:
    text = " ".join(word.text.strip() for word in line)
    return Subtitle(line[0].start / sample_rate, line[-1].end / sample_rate, text, tuple(line))


def _clock(seconds: float, separator: str) -> str:
    milliseconds = round(seconds * 1000)
    hours, rest = divmod(milliseconds, 3_600_000)
    minutes, rest = divmod(rest, 60_000)
    whole, thousandths = divmod(rest, 1000)
    return f"{hours:02}:{minutes:02}:{whole:02}{separator}{thousandths:03}"


def srt_blocks(lines: Iterable[Subtitle]) -> Iterator[str]:
    """The parts of a SubRip file, one after the other."""
    for number, line in enumerate(lines, start=1):
        before = "\n" if number > 1 else ""
        yield f"{before}{number}\n{_clock(line.start, ',')} --> {_clock(line.end, ',')}\n{line.text}\n"


def vtt_blocks(lines: Iterable[Subtitle]) -> Iterator[str]:
    """The parts of a WebVTT file, one after the other."""
    yield "WEBVTT\n\n"
    for number, line in enumerate(lines):
        before = "\n" if number else ""
        yield f"{before}{_clock(line.start, '.')} --> {_clock(line.end, '.')}\n{_escaped(line.text)}\n"


def _escaped(text: str) -> str:
    """As WebVTT wants it: what stands between `<` and `>` would be a tag, and `-->` would begin another cue."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def to_srt(lines: Iterable[Subtitle]) -> str:
    return "".join(srt_blocks(lines))


def to_vtt(lines: Iterable[Subtitle]) -> str:
    return "".join(vtt_blocks(lines))
