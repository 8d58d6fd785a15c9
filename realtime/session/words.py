"""Text of an engine stream cut into words with times; pure.

The engine sends text in deltas that may end inside a word, and names a word with its times once it is complete. The
cutter keeps both together, so that a turn can get the words that were spoken in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

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

    def cut_words(self, said: messages.Text, base: int) -> list[Piece]:
        """Take a delta and the words it completed (times counted from `base`); returns those words as pieces."""
        self._loose += said.delta
        pieces = []
        for word, timed in zip(said.words, timed_words(said, base), strict=True):
            found = self._loose.find(word.text)
            # A word that is not in the text (a model that normalises) takes what there is: no text is lost.
            cut = found + len(word.text) if found >= 0 else len(self._loose)
            text, self._loose = self._loose[:cut], self._loose[cut:]
            given, self._given = min(self._given, cut), max(0, self._given - cut)
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


def timed_word(word: messages.Word, base: int = 0) -> TimedWord:
    """A word of an engine stream whose first sample is the session's sample `base`."""
    start, end, chances = base + word.start_sample, base + word.end_sample, tuple(word.chances)
    # What the model thinks of the marks behind a word says nothing of the word.
    spoken = [log for piece, log in chances if any(map(str.isalnum, piece.decode(errors="ignore")))]
    counted = spoken or [log for _, log in chances]
    return TimedWord(word.text, start, end, chances, math.exp(math.fsum(counted)) if counted else None)


def timed_words(text: messages.Text, base: int = 0) -> list[TimedWord]:
    """The words that a text completed, with what the model thinks of what it heard."""
    if not text.language and text.no_speech is None:
        return [timed_word(word, base) for word in text.words]
    language, nobody = text.language, text.no_speech
    return [replace(timed_word(word, base), language=language, no_speech=nobody) for word in text.words]


def first_word(word: TimedWord) -> TimedWord:
    """A word that a text begins with: its tokens have no space before it either, so that they are the text."""
    spelled = b"".join(piece for piece, _ in word.chances)
    # Some spaces have several bytes, and tokens may be cut inside of them.
    text = spelled.decode(errors="surrogateescape").lstrip().encode(errors="surrogateescape")
    spaces, chances = len(spelled) - len(text), []
    for piece, log in word.chances:
        if len(piece) > spaces:
            chances.append((piece[spaces:], log))
        spaces = max(0, spaces - len(piece))
    return replace(word, chances=tuple(chances))


def languages_of(words: Iterable[TimedWord]) -> list[str]:
    """Codes of the languages that some words are in, in their order; none if the model does not say."""
    return list(dict.fromkeys(word.language for word in words if word.language))


def word_fields(word: TimedWord, sample_rate: int) -> dict[str, Any]:
    """A word as people read it in JSON, with times in seconds; `confidence` where the model tells one."""
    fields: dict[str, Any] = {
        "word": word.text.strip(),
        "start": round(word.start / sample_rate, 3),
        "end": round(word.end / sample_rate, 3),
    }
    if word.confidence is not None:
        fields["confidence"] = round(word.confidence, 4)
    return fields


def token_logprobs(words: Iterable[TimedWord]) -> list[dict[str, Any]] | None:
    """The tokens of some words and their log-probabilities, as OpenAI writes them; None where the model tells none."""
    chances = [chance for word in words for chance in word.chances]
    tokens = [
        {"token": piece.decode(errors="replace"), "logprob": round(log, 5), "bytes": list(piece)}
        for piece, log in chances
    ]
    return tokens or None


def ends_sentence(text: str) -> bool:
    """The text reads as finished: its last sentence has its full stop."""
    return text.rstrip(" \n\"')”’").endswith(SENTENCE_ENDS) and not text.rstrip().endswith(("...", "…"))


# Words with times -> subtitles to read: grouped into lines, and written as SubRip or WebVTT; pure.

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
