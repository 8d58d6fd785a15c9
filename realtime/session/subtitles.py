"""Subtitles and lines of speakers: groups words with times into them, and writes them as SubRip, WebVTT or text.

Pure functions, used by uploads (`realtime/http`), the viewers' captions and the commands.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from realtime.session.events import TimedWord
from realtime.session.speakers import shown_name, speaker_of
from realtime.session.words import SENTENCE_ENDS

# Longer subtitles are hard to read in the time that they are shown.
MAX_SUBTITLE_CHARACTERS = 84
MAX_SUBTITLE_SECONDS = 6.0


@dataclass(frozen=True, slots=True)
class Subtitle:
    """One subtitle, shown from `start` to `end` (seconds)."""

    start: float
    end: float
    text: str
    words: tuple[TimedWord, ...]
    # Number of the speaker, if it is known.
    speaker: int | None = None


def subtitles(words: Iterable[TimedWord], sample_rate: int) -> list[Subtitle]:
    """Group words into subtitles: one sentence each, or a part of a sentence that is too long or of two speakers."""
    return list(each_subtitle(words, sample_rate))


def each_subtitle(words: Iterable[TimedWord], sample_rate: int) -> Iterator[Subtitle]:
    """Like `subtitles`, as an iterator."""
    line: list[TimedWord] = []
    length = 0
    for word in words:
        too_long = length + len(word.text) + 1 > MAX_SUBTITLE_CHARACTERS
        too_long = too_long or bool(line and (word.end - line[0].start) / sample_rate > MAX_SUBTITLE_SECONDS)
        if line and (too_long or word.speaker != line[-1].speaker):
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
    return Subtitle(line[0].start / sample_rate, line[-1].end / sample_rate, text, tuple(line), speaker_of(line))


def _clock(seconds: float, separator: str) -> str:
    milliseconds = round(seconds * 1000)
    hours, rest = divmod(milliseconds, 3_600_000)
    minutes, rest = divmod(rest, 60_000)
    whole, thousandths = divmod(rest, 1000)
    return f"{hours:02}:{minutes:02}:{whole:02}{separator}{thousandths:03}"


def vtt_time(seconds: float) -> str:
    """A time in WebVTT."""
    return _clock(seconds, ".")


def srt_blocks(lines: Iterable[Subtitle], names: Sequence[str] = ()) -> Iterator[str]:
    """The blocks of a SubRip file. `names` are those of the enrolled speakers."""
    for number, line in enumerate(lines, start=1):
        before = "\n" if number > 1 else ""
        who = "" if line.speaker is None else f"{shown_name(line.speaker, names)}: "
        yield f"{before}{number}\n{_clock(line.start, ',')} --> {_clock(line.end, ',')}\n{who}{line.text}\n"


def vtt_blocks(lines: Iterable[Subtitle], names: Sequence[str] = ()) -> Iterator[str]:
    """The blocks of a WebVTT file; speakers are in voice tags."""
    yield "WEBVTT\n\n"
    for number, line in enumerate(lines):
        before = "\n" if number else ""
        who = "" if line.speaker is None else f"<v {escaped_cue(shown_name(line.speaker, names))}>"
        yield f"{before}{_clock(line.start, '.')} --> {_clock(line.end, '.')}\n{who}{escaped_cue(line.text)}\n"


def spoken_lines(words: Iterable[TimedWord], names: Sequence[str] = ()) -> Iterator[str]:
    """The text with a line for each turn of a speaker: `Speaker 1: ...`."""
    line: list[TimedWord] = []
    for word in (*words, None):
        if line and (word is None or word.speaker != line[-1].speaker):
            who = "" if line[0].speaker is None else f"{shown_name(line[0].speaker, names)}: "
            yield f"{who}{' '.join(said.text.strip() for said in line)}\n"
            line = []
        if word is not None:
            line.append(word)


def escaped_cue(text: str) -> str:
    """Text for WebVTT, where `<...>` is a tag and `-->` begins another cue."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def to_srt(lines: Iterable[Subtitle]) -> str:
    return "".join(srt_blocks(lines))


def to_vtt(lines: Iterable[Subtitle]) -> str:
    return "".join(vtt_blocks(lines))
