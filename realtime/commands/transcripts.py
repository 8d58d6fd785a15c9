"""Output of the commands: live captions in the terminal (`CaptionView`), and files as text, JSON, SubRip or WebVTT.

- Live captions (`captions.py`) in the terminal: lines of final text scroll, the text of open turns grows below them,
  and a status line shows the delay. Without a terminal (a pipe, a log) only final lines are written.
- Files: `tickertape transcribe` writes the transcript of a file at once (`FileTranscript` and `FORMATS`). Live captions
  are saved as they come: `TranscriptFile` writes every word as soon as it is shown. The server writes its own responses
  in `realtime/http/file_transcription.py`.
"""

from __future__ import annotations

import json
import os
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from audio.formats import MODEL_RATE
from realtime.commands.terminal import CommandFailed, UsageError, harmless, note
from realtime.session.events import TimedWord
from realtime.session.speakers import SpeakerTimeline, letter_name, shown_name
from realtime.session.words import (
    SENTENCE_ENDS,
    Subtitle,
    ends_sentence,
    spoken_lines,
    subtitles,
    to_srt,
    to_vtt,
    word_fields,
)

# Live captions in the terminal

# A line ends with its turn, with the first sentence after this many characters, or after this many in any case.
SENTENCE_CHARACTERS = 60
MAX_CHARACTERS = 200
REFRESH_PER_SECOND = 8
# Words whose delays are kept for the median.
RECENT_WORDS = 500


@dataclass(frozen=True, slots=True)
class ShownWord:
    """A word with its start and end in seconds of audio."""

    text: str
    start: float
    end: float
    confidence: float | None = None
    speaker: int | None = None


def count_characters(text: str) -> int:
    """The number of characters that are not spaces."""
    return sum(map(len, text.split()))


def split_at_word(text: str, words: Sequence[ShownWord], count: int) -> tuple[str, str]:
    """Split a text after its first `count` words.

    The place is found by the number of characters, because the text may spell words in another way.
    """
    remaining = sum(count_characters(word.text) for word in words[:count])
    for token in re.finditer(r"\S+", text):
        if remaining <= 0:
            return text[: token.start()], text[token.start() :]
        remaining -= len(token.group())
    return text, ""


def caption_lines(text: str, words: Sequence[ShownWord]) -> list[tuple[str, list[ShownWord]]]:
    """Text and its words, broken into lines: after a sentence, or where a line is too long."""
    lines, line, rest = list[tuple[str, list[ShownWord]]](), "", deque(words)
    for token in re.findall(r"\s*\S+", text):
        line += token
        if len(line) > MAX_CHARACTERS or (len(line) > SENTENCE_CHARACTERS and ends_sentence(line)):
            lines.append((line.strip(), _pop_words(rest, count_characters(line))))
            line = ""
    if line or rest:
        lines.append((line.strip(), list(rest)))
    return lines


def _pop_words(words: deque[ShownWord], characters: int) -> list[ShownWord]:
    """Remove and return the first words, as many as have this number of characters."""
    popped: list[ShownWord] = []
    while words and characters > 0:
        characters -= count_characters(words[0].text)
        popped.append(words.popleft())
    return popped


class CaptionView:
    """Shows captions in the terminal: final lines, below them the text that may still change, and a status line.

    `now` is in seconds of audio time: the time since the audio began.
    """

    def __init__(self, console: Console, *, show_words: bool = False) -> None:
        self.delays: deque[float] = deque(maxlen=RECENT_WORDS)
        self._console = console
        self._show_words = show_words
        # The text of turns that are not final.
        self._open = ""
        self._last: ShownWord | None = None
        self._now = 0.0
        self._note = ""
        self._live = Live(
            console=console, refresh_per_second=REFRESH_PER_SECOND, get_renderable=self._render, transient=True
        )

    def __enter__(self) -> CaptionView:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()
        if self.typical_delay is not None:
            summary = (
                f"words were shown {self.typical_delay:.2f} s after they were spoken (median of {len(self.delays)})"
            )
            self._print(Text(summary, "dim"))

    def show_open(self, text: str) -> None:
        """Show this text of turns that are not final, in place of the text before."""
        self._open = harmless(text).strip()

    def measure_delays(self, shown: deque[float], delta: str, words: Sequence[ShownWord], now: float) -> None:
        """Measure the delays of the words that `delta`, shown now, completes.

        `shown` has the times at which the turn's incomplete words were shown, and is updated.
        """
        self._now = max(now, self._now)
        pieces = delta.split()
        if pieces and shown and not delta[0].isspace():
            # The first piece completes the last word. Punctuation after a word does not count for its delay.
            if delta[0].isalnum():
                shown[-1] = now
            pieces = pieces[1:]
        shown.extend(now for _ in pieces)
        for word in words:
            self.delays.append((shown.popleft() if shown else now) - word.end)
            self._last = replace(word, text=harmless(word.text))

    def advance(self, now: float) -> None:
        """Advance the clock, with or without speech."""
        self._now = max(now, self._now)

    def note(self, text: str) -> None:
        """Show a problem, such as a lost connection; an empty text removes it."""
        text = harmless(text)
        if text and not self._console.is_terminal and text != self._note:
            self._print(Text(text, "yellow"))
        self._note = text

    def gap(self, start: float, end: float) -> None:
        """Show that audio is missing between these seconds."""
        self._print(Text(f"{clock(start)}  [no sound until {clock(end)}]", "yellow"))

    def add_line(self, line: str, words: Sequence[ShownWord]) -> None:
        """Show a line that does not change any more."""
        line = harmless(line).strip()
        if not line:
            return
        second = words[0].start if words else self._now
        self._print(Text.assemble((f"{clock(second)}  ", "dim"), line))
        if self._show_words and words:
            times = "  ".join(f"{harmless(word.text).strip()} {word.start:.2f}-{word.end:.2f}" for word in words)
            self._print(Text(times, "dim"))

    def _print(self, text: Text) -> None:
        # Do not wrap lines in a pipe.
        self._console.print(text, soft_wrap=not self._console.is_terminal)

    @property
    def typical_delay(self) -> float | None:
        """Median of the recent delays, in seconds from the end of a word to its display."""
        ordered = sorted(self.delays)
        return ordered[len(ordered) // 2] if ordered else None

    def _render(self) -> Group:
        status = [f"● {clock(self._now)}"]
        if self.delays:
            status.append(f"behind {self.delays[-1]:.2f} s (typically {self.typical_delay:.2f} s)")
        if self._last is not None:
            status.append(f"“{self._last.text.strip()}” {self._last.start:.2f}-{self._last.end:.2f} s")
        lines = [Text(self._open, "bold"), Text("  ".join(status), "dim")]
        if self._note:
            lines.append(Text(self._note, "yellow"))
        return Group(*lines)


def clock(seconds: float) -> str:
    """A time as minutes, seconds and tenths, with hours if there are any."""
    minutes, rest = divmod(max(seconds, 0.0), 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours}:{minutes:02}:{rest:04.1f}" if hours else f"{minutes:02}:{rest:04.1f}"


# Files


@dataclass(slots=True)
class FileTranscript:
    """The transcript of a file; times are samples at `sample_rate`."""

    path: Path
    model: str
    sample_rate: int
    text: str = ""
    words: list[TimedWord] = field(default_factory=list)
    samples: int = 0
    # Speaker labels so far, and the number of words that have been labelled.
    speakers: SpeakerTimeline = field(default_factory=SpeakerTimeline)
    labelled: int = 0

    @property
    def seconds(self) -> float:
        return self.samples / self.sample_rate

    def label(self, ended: bool = False) -> None:
        """Label the words whose speakers are known by now; all of them if the labels have ended."""
        while self.labelled < len(self.words) and (ended or self.speakers.is_decided(self.words[self.labelled])):
            self.words[self.labelled] = self.speakers.with_best_label(self.words[self.labelled])
            self.labelled += 1


def as_text(transcript: FileTranscript, words: bool) -> str:
    if not words:
        labelled = any(word.speaker is not None for word in transcript.words)
        return "".join(spoken_lines(transcript.words)) if labelled else transcript.text + "\n"
    return "".join(word_line(word, transcript.sample_rate) for word in transcript.words)


def word_line(word: TimedWord, sample_rate: int) -> str:
    """Start, end, word, its confidence if the model has one, and its speaker if asked for; separated by tabs."""
    confidence = "" if word.confidence is None else f"\t{word.confidence:.2f}"
    speaker = "" if word.speaker is None else f"\t{shown_name(word.speaker)}"
    return f"{word.start / sample_rate:.2f}\t{word.end / sample_rate:.2f}\t{word.text.strip()}{confidence}{speaker}\n"


def as_json(transcript: FileTranscript, words: bool) -> str:
    """One line of JSON, so that several files make JSON lines."""
    rate = transcript.sample_rate
    body: dict[str, Any] = {
        "file": str(transcript.path),
        "model": transcript.model,
        "seconds": round(transcript.seconds, 3),
        "text": transcript.text,
        "segments": [
            {
                "start": round(line.start, 3),
                "end": round(line.end, 3),
                "text": line.text,
                **({} if line.speaker is None else {"speaker": letter_name(line.speaker)}),
            }
            for line in subtitles(transcript.words, rate)
        ],
    }
    if words:
        body["words"] = [word_fields(word, rate) for word in transcript.words]
    return json.dumps(body, ensure_ascii=False) + "\n"


def as_srt(transcript: FileTranscript, words: bool) -> str:
    return to_srt(subtitles(transcript.words, transcript.sample_rate))


def as_vtt(transcript: FileTranscript, words: bool) -> str:
    return to_vtt(subtitles(transcript.words, transcript.sample_rate))


# Extension -> function that writes the format.
FORMATS: dict[str, Callable[[FileTranscript, bool], str]] = {
    "txt": as_text,
    "json": as_json,
    "srt": as_srt,
    "vtt": as_vtt,
}


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: it appears complete or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


# Captions that wait for space on the disk, about a day of speech; beyond that the oldest are dropped.
MAX_UNSAVED = 20_000


def _text(caption: Subtitle, number: int, words: bool) -> str:
    if not words:
        return f"{caption.text}\n"
    return "".join(word_line(word, MODEL_RATE) for word in caption.words)


def _json(caption: Subtitle, number: int, words: bool) -> str:
    body: dict[str, object] = {"start": round(caption.start, 3), "end": round(caption.end, 3), "text": caption.text}
    if words:
        body["words"] = [word_fields(word, MODEL_RATE) for word in caption.words]
    return json.dumps(body, ensure_ascii=False) + "\n"


def _srt(caption: Subtitle, number: int, words: bool) -> str:
    block = to_srt([caption]).removeprefix("1\n")
    return f"{'' if number == 1 else chr(10)}{number}\n{block}"


def _vtt(caption: Subtitle, number: int, words: bool) -> str:
    return "\n" + to_vtt([caption]).removeprefix("WEBVTT\n\n")


def _gap_line(start: float, end: float) -> str:
    return f"[no sound from {clock(start)} to {clock(end)}]\n"


def _gap_json(start: float, end: float) -> str:
    return json.dumps({"gap": True, "start": round(start, 3), "end": round(end, 3)}) + "\n"


# Extension -> function that writes a gap in the audio. SubRip has no comments, so a gap has no text in it.
GAPS: dict[str, Callable[[float, float], str]] = {
    "txt": _gap_line,
    "json": _gap_json,
    "srt": lambda start, end: "",
    "vtt": lambda start, end: f"\nNOTE {_gap_line(start, end)}",
}

# Extension -> function that writes a caption, and the header of the file.
LIVE_FORMATS: dict[str, tuple[Callable[[Subtitle, int, bool], str], str]] = {
    "txt": (_text, ""),
    "json": (_json, ""),
    "srt": (_srt, ""),
    "vtt": (_vtt, "WEBVTT\n"),
}


class TranscriptFile:
    """A transcript that is written while the audio is transcribed, so that everything shown is saved.

    Captions of final words stay, except the last one while its sentence goes on. Words of turns that are not final
    follow them in the file, and are overwritten by the next ones. If the disk is full, `on_problem` is called once with
    the problem, and with an empty text when it is solved; captions wait in memory meanwhile.
    """

    def __init__(self, path: Path, extension: str, words: bool) -> None:
        self.on_problem: Callable[[str], None] = note
        self._write_caption, head = LIVE_FORMATS[extension]
        self._write_gap = GAPS[extension]
        self._path = path
        self._words = words
        # Words of the last caption, if its sentence goes on, and of turns that are not final.
        self._open: list[TimedWord] = []
        self._not_final: list[TimedWord] = []
        self._captions = 0
        # Complete captions that are not on the disk yet.
        self._unsaved: deque[bytes] = deque(maxlen=MAX_UNSAVED)
        # Captions that were dropped, and bytes of complete captions in the file.
        self._lost = 0
        self._saved_bytes = 0
        self._has_problem = False
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            raise UsageError(f"{path} exists already; name another file, or remove it") from None
        except OSError as error:
            raise CommandFailed(f"cannot write {path}: {error.strerror}") from error
        self._queue(head)
        self._save()

    def show(self, words: Sequence[TimedWord]) -> None:
        """Save the words of all turns that are not final, in place of those of the last call."""
        self._not_final = list(words)
        self._save()

    def add(self, words: Sequence[TimedWord]) -> None:
        """Add final words."""
        if not words:
            return
        captions = subtitles([*self._open, *words], MODEL_RATE)
        is_complete = captions[-1].words[-1].text.endswith(SENTENCE_ENDS)
        complete, current = (captions, []) if is_complete else (captions[:-1], captions[-1:])
        for caption in complete:
            self._complete(caption)
        self._open = [word for caption in current for word in caption.words]
        self._save()

    def add_gap(self, start: float, end: float) -> None:
        """Mark missing audio, in seconds, after the words so far."""
        self._complete_open()
        self._queue(self._write_gap(start, end))
        self._save()

    def _complete_open(self) -> None:
        for caption in subtitles(self._open, MODEL_RATE):
            self._complete(caption)
        self._open = []

    def close(self) -> None:
        """Save the rest. A file without captions is removed. Raises CommandFailed if something could not be saved."""
        self._open += self._not_final
        self._not_final = []
        self._complete_open()
        self._save()
        os.close(self._fd)
        if not self._captions:
            self._path.unlink(missing_ok=True)
        elif missing := len(self._unsaved) + self._lost:
            raise CommandFailed(f"{missing} captions are missing at the end of {self._path}: they could not be written")

    def _complete(self, caption: Subtitle) -> None:
        self._captions += 1
        self._queue(self._write_caption(caption, self._captions, self._words))

    def _queue(self, text: str) -> None:
        if text:
            self._lost += len(self._unsaved) == MAX_UNSAVED
            self._unsaved.append(text.encode())

    def _save(self) -> None:
        """Write the waiting captions, then those that may change, which the next write overwrites."""
        changing = subtitles([*self._open, *self._not_final], MODEL_RATE)
        text = "".join(
            self._write_caption(caption, number, self._words)
            for number, caption in enumerate(changing, start=self._captions + 1)
        )
        try:
            while self._unsaved:
                self._write(self._unsaved[0])
                self._saved_bytes += len(self._unsaved.popleft())
            end = self._saved_bytes + self._write(text.encode())
            os.ftruncate(self._fd, end)
        except OSError as error:
            if not self._has_problem:
                text = f"cannot save to {self._path}: {error.strerror}; captions continue, and saving is tried again"
                self.on_problem(text)
            self._has_problem = True
            return
        if self._has_problem:
            self._has_problem = False
            self.on_problem("")

    def _write(self, data: bytes) -> int:
        """Write all bytes after the saved ones; returns their number. Raises OSError."""
        written = 0
        while written < len(data):
            written += os.pwrite(self._fd, data[written:], self._saved_bytes + written)
        return written


def chosen_extension(path: Path, format_name: str | None) -> str:
    """The format of a file: the one that is named, or else the file's suffix. Raises UsageError."""
    known = ", ".join(LIVE_FORMATS)
    extension = format_name or path.suffix.removeprefix(".").lower()
    if extension not in LIVE_FORMATS:
        raise UsageError(f"the format of {path} is not known; end its name in {known}, or add --format")
    return extension
