"""Writes the commands' transcripts to files, as text, JSON, SubRip or WebVTT.

`tickertape transcribe` writes the transcript of a file at once (`FileTranscript` and `FORMATS`). Live captions
(`captions.py`) are saved as they come: `TranscriptFile` writes every word as soon as it is shown. The server writes its
own responses in `realtime/http/file_transcription.py`.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from audio.formats import MODEL_RATE
from realtime.commands.caption_view import clock
from realtime.commands.terminal import CommandFailed, UsageError, note
from realtime.session.events import TimedWord
from realtime.session.speakers import SpeakerTimeline, letter_name, shown_name
from realtime.session.subtitles import Subtitle, spoken_lines, subtitles, to_srt, to_vtt
from realtime.session.words import SENTENCE_ENDS, word_fields


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
