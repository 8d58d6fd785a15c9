"""Sends files to a server: `FileSender` uploads to `POST /v1/audio/transcriptions` or `/v1/audio/translations`.

The server's side is `realtime/http/file_transcription.py`. Without a server, `file_transcription.py` transcribes here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from rich.console import Console
from rich.markup import escape

from realtime.client.wire_client import (
    TRANSCRIPTIONS,
    TRANSLATIONS,
    CannotConnect,
    FileUnreadable,
    Form,
    HttpAnswer,
    HttpServer,
)
from realtime.commands.file_transcription import FileFailed, StandardInput
from realtime.commands.terminal import KEY_VARIABLE, STANDARD_INPUT, CommandFailed, EndOnInterrupt, harmless, shown_name
from realtime.commands.transcription_options import TranscriptionOptions
from realtime.commands.transcripts import FileTranscript
from realtime.session.events import TimedWord
from realtime.session.speakers import speaker_number

# The sample rate of transcripts from a server, which sends times in seconds.
RATE = 16_000


class FileSender:
    """Uploads files to a server. Raises CommandFailed if there is no server, or it refuses the key."""

    def __init__(self, url: str, model: str, transcription_options: TranscriptionOptions) -> None:
        try:
            self._server = HttpServer(url, os.environ.get(KEY_VARIABLE))
            answer = self._server.get("/v1/models")
        except CannotConnect as error:
            raise CommandFailed(str(error)) from error
        if answer.status in (401, 403):
            raise CommandFailed(f"{self._server.url} {answer.refusal}; set {KEY_VARIABLE}")
        self.model, taken = _supported_options(answer, model, transcription_options)
        fields = [("model", model), ("response_format", "verbose_json"), ("timestamp_granularities[]", "word")]
        self._fields = [*fields, *(item for item in taken.items() if item[0] in ("language", "prompt"))]
        self._fields += [("keywords[]", word) for word in transcription_options.keywords if "keywords" in taken]
        self._fields += [("speakers", "true")] if transcription_options.speakers else []
        self._path = TRANSLATIONS if transcription_options.task else TRANSCRIPTIONS

    def transcribe(self, path: Path) -> FileTranscript:
        """Upload one file. Raises FileFailed if the file is the problem, CommandFailed if the server is gone."""
        console = Console(file=sys.stderr)
        name = escape(harmless(shown_name(Path(path.name))))
        try:
            with console.status(f"sending {name}") as status, _opened(path) as (file, size):

                def show(sent: int) -> None:
                    done = "" if size is None else f" of {size / 1e6:.1f}"
                    status.update(f"sending {name}: {sent / 1e6:.1f}{done} MB; then it is transcribed")

                answer = self._server.upload(Form(self._fields, path.name, file, size, show), self._path)
        except CannotConnect as error:
            raise CommandFailed(str(error)) from error
        except FileUnreadable as error:
            raise FileFailed(str(error)) from error
        except OSError as error:
            raise FileFailed(error.strerror or str(error)) from error
        if answer.status != 200:
            raise FileFailed(f"the server {answer.refusal}")
        return self._transcript(path, answer)

    def _transcript(self, path: Path, answer: HttpAnswer) -> FileTranscript:
        try:
            body = answer.json()
            words = [
                TimedWord(
                    _text(word["word"]),
                    round(word["start"] * RATE),
                    round(word["end"] * RATE),
                    confidence=word.get("confidence"),
                    speaker=speaker_number(word.get("speaker")),
                )
                for word in body.get("words") or ()
            ]
            samples = round(float(body.get("duration") or 0) * RATE)
            return FileTranscript(path, self.model, RATE, _text(body["text"]), words, samples)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise FileFailed("the server's answer is not a transcript") from error


def _text(value: Any) -> str:
    """Raises TypeError."""
    if not isinstance(value, str):
        raise TypeError
    return value


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, int | None]]:
    """The file and its size in bytes; None for a pipe, which Ctrl-C ends."""
    if path == STANDARD_INPUT:
        with EndOnInterrupt() as interrupt:
            yield cast(BinaryIO, StandardInput(lambda: interrupt.ended)), None
        return
    with path.open("rb") as file:
        yield file, os.fstat(file.fileno()).st_size if path.is_file() else None


def warn_unsupported_options(server: HttpServer, transcription_options: TranscriptionOptions) -> None:
    """Print a note about options that the server's model does not support. Raises CannotConnect."""
    _supported_options(server.get("/v1/models"), server.url, transcription_options)


def _supported_options(
    answer: HttpAnswer, asked: str, transcription_options: TranscriptionOptions
) -> tuple[str, dict[str, str]]:
    """The name of the served model, and the options that it supports. If a server does not report supported options,
    all count as supported."""
    try:
        served: dict[str, Any] = answer.json()["data"][0]
        name, known = str(served["id"]), served.get("options")
    except (ValueError, KeyError, TypeError, IndexError):
        return asked, transcription_options.given()
    if known is None:
        return name, transcription_options.given()
    transcription_options.note_unsupported(name, known)
    return name, transcription_options.supported(known)
