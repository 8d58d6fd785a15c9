"""A file's transcript, and the ways to write it down."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from realtime.session.events import TimedWord
from realtime.session.subtitles import subtitles, to_srt, to_vtt
from realtime.session.words import word_fields


@dataclass(slots=True)
class FileTranscript:
    """What was heard in a file; times are samples at `sample_rate`."""

    path: Path
    model: str
    sample_rate: int
    text: str = ""
    words: list[TimedWord] = field(default_factory=list)
    samples: int = 0

    @property
    def seconds(self) -> float:
        return self.samples / self.sample_rate


def as_text(transcript: FileTranscript, words: bool) -> str:
    if not words:
        return transcript.text + "\n"
    return "".join(word_line(word, transcript.sample_rate) for word in transcript.words)


def word_line(word: TimedWord, sample_rate: int) -> str:
    """Start, end, word, and how sure the model is of it, if it tells."""
    sure = "" if word.confidence is None else f"\t{word.confidence:.2f}"
    return f"{word.start / sample_rate:.2f}\t{word.end / sample_rate:.2f}\t{word.text.strip()}{sure}\n"


def as_json(transcript: FileTranscript, words: bool) -> str:
    """One line, so that several files make JSON lines."""
    rate = transcript.sample_rate
    body: dict[str, Any] = {
        "file": str(transcript.path),
        "model": transcript.model,
        "seconds": round(transcript.seconds, 3),
        "text": transcript.text,
        "segments": [
            {"start": round(line.start, 3), "end": round(line.end, 3), "text": line.text}
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


# Extension -> how it is written.
FORMATS: dict[str, Callable[[FileTranscript, bool], str]] = {
    "txt": as_text,
    "json": as_json,
    "srt": as_srt,
    "vtt": as_vtt,
}


def write_whole(path: Path, text: str) -> None:
    """The file appears complete or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
