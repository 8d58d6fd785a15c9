"""Whole files through a server, by `POST /v1/audio/transcriptions` or `/v1/audio/translations`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from rich.console import Console

from realtime.client.http_client import TRANSCRIPTIONS, TRANSLATIONS, Answer, FileUnreadable, Form, HttpServer
from realtime.client.wire_client import CannotConnect
from realtime.commands.file_reader import FileFailed
from realtime.commands.interrupts import EndOnInterrupt
from realtime.commands.standard_input import StandardInput
from realtime.commands.terminal import KEY_VARIABLE, STANDARD_INPUT, CommandFailed, shown_name
from realtime.commands.transcripts import FileTranscript
from realtime.commands.wishes import Wishes
from realtime.session.events import TimedWord

# Times come in seconds; a transcript counts in samples.
RATE = 16_000


class FileSender:
    """Raises CommandFailed if there is no such server, or it does not let us in."""

    def __init__(self, url: str, model: str, wishes: Wishes) -> None:
        try:
            self._server = HttpServer(url, os.environ.get(KEY_VARIABLE))
            answer = self._server.get("/v1/models")
        except CannotConnect as error:
            raise CommandFailed(str(error)) from error
        if answer.status in (401, 403):
            raise CommandFailed(f"{self._server.url} {answer.refusal}; set {KEY_VARIABLE}")
        self.model, taken = _taken(answer, model, wishes)
        fields = [("model", model), ("response_format", "verbose_json"), ("timestamp_granularities[]", "word")]
        self._fields = [*fields, *(item for item in taken.items() if item[0] in ("language", "prompt"))]
        self._fields += [("keywords[]", word) for word in wishes.keywords if "keywords" in taken]
        self._path = TRANSLATIONS if wishes.task else TRANSCRIPTIONS

    def transcribe(self, path: Path) -> FileTranscript:
        """Raises FileFailed for what concerns this file alone, and CommandFailed if the server is gone."""
        console = Console(file=sys.stderr)
        name = shown_name(Path(path.name))
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

    def _transcript(self, path: Path, answer: Answer) -> FileTranscript:
        try:
            body = answer.json()
            words = [
                TimedWord(
                    word["word"],
                    round(word["start"] * RATE),
                    round(word["end"] * RATE),
                    confidence=word.get("confidence"),
                )
                for word in body.get("words") or ()
            ]
            samples = round(float(body.get("duration") or 0) * RATE)
            return FileTranscript(path, self.model, RATE, str(body["text"]), words, samples)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FileFailed("the server answers something that is no transcript") from error


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, int | None]]:
    """The file, and how many bytes it has now; None for a pipe, which Ctrl-C ends."""
    if path == STANDARD_INPUT:
        with EndOnInterrupt() as interrupt:
            yield cast(BinaryIO, StandardInput(lambda: interrupt.ended)), None
        return
    with path.open("rb") as file:
        yield file, os.fstat(file.fileno()).st_size if path.is_file() else None


def note_what_is_not_taken(server: HttpServer, wishes: Wishes) -> None:
    """Raises CannotConnect."""
    _taken(server.get("/v1/models"), server.url, wishes)


def _taken(answer: Answer, asked: str, wishes: Wishes) -> tuple[str, dict[str, str]]:
    """The name of the served model, and what it takes of the wishes. Servers that do not say what their models take are
    believed to take all."""
    try:
        served: dict[str, Any] = answer.json()["data"][0]
        name, known = str(served["id"]), served.get("options")
    except (ValueError, KeyError, TypeError, IndexError):
        return asked, wishes.given()
    return name, wishes.given() if known is None else wishes.taken_by(name, known)
