"""Words with times: cut from the engine's text deltas (`WordCutter`), and written as text, JSON, SubRip or WebVTT.

Pure functions, and `WordCutter`, which owns the incomplete word at the end of a stream's text. `subtitles` and
`spoken_lines` group words to subtitles and to lines of speakers. Used by the session core, the dialects, uploads, the
viewers' captions and the commands.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from engine import messages
from realtime.session.events import TimedWord
from realtime.session.speakers import letter_name, shown_name, speaker_of

SENTENCE_ENDS = (".", "?", "!", "…", "。", "？", "！")


@dataclass(frozen=True, slots=True)
class WordPiece:
    """A complete word. `fresh` is its text that was not returned before, with the white space before the word."""

    fresh: str
    word: TimedWord
    # The first part of the word was returned by `take_partial`; the rest belongs to the same turn.
    continues: bool


class WordCutter:
    """Splits a stream's text into words.

    The engine sends deltas that may end within a word, and sends a word with its times once it is complete. The text
    after the last complete word is the partial word. It can be taken before the word is complete.
    """

    def __init__(self) -> None:
        self._partial = ""
        # Characters of the partial word that were already taken.
        self._taken_length = 0

    def save(self) -> tuple[str, int]:
        """The partial word, and the number of its characters that were taken."""
        return self._partial, self._taken_length

    def load(self, partial: str, taken: int) -> None:
        self._partial, self._taken_length = partial, taken

    def cut_words(self, text_delta: messages.Text, base: int) -> list[WordPiece]:
        """Add a delta; returns the words that it completes. `base` is the session sample where the stream began."""
        self._partial += text_delta.delta
        pieces = []
        for word, timed in zip(text_delta.words, timed_words(text_delta, base), strict=True):
            found = self._partial.find(word.text)
            # If the word is not in the text (a model that normalizes), it gets all text so far: no text is lost.
            cut = found + len(word.text) if found >= 0 else len(self._partial)
            text, self._partial = self._partial[:cut], self._partial[cut:]
            taken, self._taken_length = min(self._taken_length, cut), max(0, self._taken_length - cut)
            pieces.append(WordPiece(text[taken:], timed, continues=taken > 0))
        return pieces

    @property
    def has_taken_partial(self) -> bool:
        """Whether the beginning of a partial word was taken."""
        return self._taken_length > 0

    def take_partial(self) -> str:
        """Return the partial word now; the rest of the word follows as a piece that `continues`."""
        text = self._partial[self._taken_length :]
        self._taken_length = len(self._partial)
        return text

    def end_partial(self) -> str:
        """Return the rest of the partial word and clear it: no more text belongs to it."""
        text = self.take_partial()
        self._partial, self._taken_length = "", 0
        return text


def timed_word(word: messages.Word, base: int = 0) -> TimedWord:
    """A word of the engine with session times; `base` is the session sample where its stream began."""
    start, end, chances = base + word.start_sample, base + word.end_sample, tuple(word.chances)
    # The probabilities of punctuation say nothing about the word.
    spoken = [log for piece, log in chances if any(map(str.isalnum, piece.decode(errors="ignore")))]
    counted = spoken or [log for _, log in chances]
    return TimedWord(word.text, start, end, chances, math.exp(math.fsum(counted)) if counted else None)


def timed_words(text: messages.Text, base: int = 0) -> list[TimedWord]:
    """The words that a text completed, with its language and no-speech probability."""
    if not text.language and text.no_speech is None:
        return [timed_word(word, base) for word in text.words]
    language, no_speech = text.language, text.no_speech
    return [replace(timed_word(word, base), language=language, no_speech=no_speech) for word in text.words]


def first_word(word: TimedWord) -> TimedWord:
    """The first word of a text, without white space at the start of its tokens, so that the tokens equal the text."""
    spelled = b"".join(piece for piece, _ in word.chances)
    # A space may have several bytes, and a token may end within it.
    text = spelled.decode(errors="surrogateescape").lstrip().encode(errors="surrogateescape")
    spaces, chances = len(spelled) - len(text), []
    for piece, log in word.chances:
        if len(piece) > spaces:
            chances.append((piece[spaces:], log))
        spaces = max(0, spaces - len(piece))
    return replace(word, chances=tuple(chances))


def text_of(words: Iterable[TimedWord]) -> str:
    """The text of these words, with the white space between them as the model wrote it."""
    return "".join(map(spelled, words))


def spelled(word: TimedWord) -> str:
    """A word as the model wrote it, with the white space before it."""
    text = b"".join(piece for piece, _ in word.chances).decode(errors="replace") or word.text
    return text if text[:1].isspace() else f" {text}"


def languages_of(words: Iterable[TimedWord]) -> list[str]:
    """The language codes of these words, in order of appearance; empty if the model reports none."""
    return list(dict.fromkeys(word.language for word in words if word.language))


def word_fields(word: TimedWord, sample_rate: int, names: Sequence[str] = ()) -> dict[str, Any]:
    """A word as JSON fields, with times in seconds; `confidence` if the model has one, `speaker` if it is known.
    `names` are those of the enrolled speakers."""
    fields: dict[str, Any] = {
        "word": word.text.strip(),
        "start": round(word.start / sample_rate, 3),
        "end": round(word.end / sample_rate, 3),
    }
    if word.confidence is not None:
        fields["confidence"] = round(word.confidence, 4)
    if word.speaker is not None:
        fields["speaker"] = letter_name(word.speaker, names)
    return fields


def token_logprobs(words: Iterable[TimedWord]) -> list[dict[str, Any]] | None:
    """The tokens of these words with log-probabilities, in OpenAI's format; None if the model has none."""
    chances = [chance for word in words for chance in word.chances]
    tokens = [
        {"token": piece.decode(errors="replace"), "logprob": round(log, 5), "bytes": list(piece)}
        for piece, log in chances
    ]
    return tokens or None


def ends_sentence(text: str) -> bool:
    """Whether the text ends with a complete sentence."""
    return text.rstrip(" \n\"')”’").endswith(SENTENCE_ENDS) and not text.rstrip().endswith(("...", "…"))


# Subtitles and lines of speakers

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
