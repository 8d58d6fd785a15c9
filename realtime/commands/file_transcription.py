"""Transcribes files and standard input for the commands, with an engine in this process or with a server.

- `local_engine` starts the engine, also for live captions.
- `FileTranscriber` feeds a file to an engine as fast as the engine reads it, and shows a progress bar.
- `FileSender` uploads a file to a server, which transcribes it (`realtime/http/file_transcription.py`).

`FileTranscriber` and `FileSender` return a `FileTranscript` (`transcripts.py`), which `tickertape transcribe` writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from audio.errors import AudioError
from audio.formats import MODEL_RATE
from engine import messages
from engine.errors import EngineError
from engine.logs import set_up_logging
from engine.options import EngineConfig
from realtime.commands.audio_input import StandardInput, duration_of, read_pieces
from realtime.commands.caption_view import clock
from realtime.commands.pull import fetch, is_here, model_name
from realtime.commands.terminal import (
    KEY_VARIABLE,
    STANDARD_INPUT,
    CommandFailed,
    EndOnInterrupt,
    harmless,
    is_debugging,
    shown_name,
)
from realtime.commands.transcription_options import TranscriptionOptions
from realtime.commands.transcripts import FileTranscript
from realtime.serving.engine_api import EngineApi, StreamApi
from realtime.session.events import TimedWord
from realtime.session.speakers import speaker_number
from realtime.session.words import timed_word

if TYPE_CHECKING:
    from engine.client.client import EngineClient
    from realtime.client.http_client import HttpAnswer, HttpClient

# Streams that an engine in this process may have; `tickertape doctor` and `wyoming` need more than one.
MAX_STREAMS = 4


@asynccontextmanager
async def local_engine(
    model: str, device: str, live: bool = True, speakers: bool = True
) -> AsyncIterator[EngineClient]:
    """An engine in a thread of this process; its model is downloaded if needed. Raises EngineError.

    Without `live` the engine is for files alone, and starts sooner: it is not warmed up, reads one file at a time, and
    has no turn detector. Without `speakers` such an engine has no speaker labels.
    """
    from engine.client.client import EngineClient
    from engine.client.engine_handles import EngineThread, import_ahead

    # The error of an engine that fails says why; its log is for debugging.
    set_up_logging(logging.BASIC_FORMAT, "info" if is_debugging() else "critical")
    name = model_name(model)
    if is_here(name):
        # Imports torch on a thread, while this thread checks the digests of the weights.
        import_ahead()
    # The path and not the name: the digests of a named model would be checked again.
    config = EngineConfig(str(fetch(name)), device, MAX_STREAMS)
    if not live:
        config = replace(config, speakers=speakers, turn_detector=False, files_only=True)
    client = EngineClient([EngineThread(config, warm=live)])
    await client.start()
    try:
        yield client
    finally:
        await client.close()


class FileFailed(Exception):
    """One file failed; the command continues with the others. `transcript` is the text before the failure."""

    def __init__(self, message: str, transcript: FileTranscript | None = None) -> None:
        super().__init__(message)
        self.transcript = transcript


class FileTranscriber:
    """Transcribes files with an engine, one at a time, and shows a progress bar."""

    def __init__(self, engine: EngineApi, transcription_options: TranscriptionOptions) -> None:
        if engine.spec.sample_rate != MODEL_RATE:
            raise CommandFailed(f"the model needs {engine.spec.sample_rate} Hz; files are read at {MODEL_RATE} Hz only")
        self._engine = engine
        self._options = transcription_options.engine_options(engine.spec)
        self._count = 0

    async def transcribe(self, path: Path) -> FileTranscript:
        """Transcribe one file. Raises FileFailed, and CommandFailed if the engine refuses the options."""
        try:
            stream = await self._engine.open(f"file-{self._count}", live=False, options=self._options)
        except ValueError as error:
            raise CommandFailed(str(error)) from error
        self._count += 1
        transcript = FileTranscript(path, self._engine.spec.name, self._engine.spec.sample_rate)
        console = Console(file=sys.stderr)
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[clock]} {task.fields[speed]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        with bar:
            row = bar.add_task(
                escape(harmless(shown_name(Path(path.name)))),
                total=await asyncio.to_thread(duration_of, path),
                clock="",
                speed="",
            )
            feeding = asyncio.create_task(_feed(path, stream, transcript), name=f"feed {path.name}")
            try:
                await self._listen(stream, transcript, bar, row)
                await feeding
            except (AudioError, EngineError, OSError) as error:
                raise FileFailed(str(error), transcript) from error
            finally:
                feeding.cancel()
                await asyncio.gather(feeding, return_exceptions=True)
                await stream.abort()
        return transcript

    async def _listen(self, stream: StreamApi, transcript: FileTranscript, bar: Progress, row: TaskID) -> None:
        began = asyncio.get_running_loop().time()
        async for output in stream:
            if isinstance(output, messages.Text):
                delta = output.delta if transcript.text else output.delta.lstrip()
                transcript.text += delta
                transcript.words += [timed_word(word) for word in output.words]
                transcript.label()
                second = output.sample / MODEL_RATE
                elapsed = asyncio.get_running_loop().time() - began
                bar.update(row, completed=second, clock=clock(second), speed=f"{second / max(elapsed, 0.01):.1f}x")
            elif isinstance(output, messages.Labels):
                transcript.speakers.add(output, 0)
                transcript.label()
            elif isinstance(output, messages.Closed):
                transcript.label(ended=True)
                return
            elif isinstance(output, messages.Failed | messages.Dead | messages.Refused):
                raise EngineError(output.message)


async def _feed(path: Path, stream: StreamApi, transcript: FileTranscript) -> None:
    """Feed everything that can be decoded. An error in the file is raised after its valid part has been fed."""
    try:
        async for piece in read_pieces(path):
            transcript.samples += len(piece)
            await stream.feed(piece)
    finally:
        # Finish the stream in any case, or the listener would wait forever.
        with contextlib.suppress(EngineError):
            await stream.finish()


# Files on a server. The HTTP client is imported where it is used, because a local engine starts without it.


class FileSender:
    """Uploads files to a server. Raises CommandFailed if there is no server, or it refuses the key."""

    def __init__(self, url: str, model: str, transcription_options: TranscriptionOptions) -> None:
        from realtime.client.http_client import TRANSCRIPTIONS, TRANSLATIONS, HttpClient
        from realtime.client.wire_client import CannotConnect

        try:
            self._server = HttpClient(url, os.environ.get(KEY_VARIABLE))
            answer = self._server.get("/v1/models")
        except CannotConnect as error:
            raise CommandFailed(str(error)) from error
        if answer.status in (401, 403):
            raise CommandFailed(f"{self._server.url} {answer.refusal}; set {KEY_VARIABLE}")
        self.model, supported = _supported_options(answer, model, transcription_options)
        fields = [("model", model), ("response_format", "verbose_json"), ("timestamp_granularities[]", "word")]
        self._fields = [*fields, *(item for item in supported.items() if item[0] in ("language", "prompt"))]
        self._fields += [("keywords[]", word) for word in transcription_options.keywords if "keywords" in supported]
        self._fields += [("speakers", "true")] if transcription_options.speakers else []
        self._path = TRANSLATIONS if transcription_options.task else TRANSCRIPTIONS

    def transcribe(self, path: Path) -> FileTranscript:
        """Upload one file. Raises FileFailed if the file is the problem, CommandFailed if the server is gone."""
        from realtime.client.http_client import FileUnreadable, Form
        from realtime.client.wire_client import CannotConnect

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
                    round(word["start"] * MODEL_RATE),
                    round(word["end"] * MODEL_RATE),
                    confidence=word.get("confidence"),
                    speaker=speaker_number(word.get("speaker")),
                )
                for word in body.get("words") or ()
            ]
            samples = round(float(body.get("duration") or 0) * MODEL_RATE)
            return FileTranscript(path, self.model, MODEL_RATE, _text(body["text"]), words, samples)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise FileFailed("the server's answer is not a transcript") from error


def _text(value: Any) -> str:
    """The value, which must be a text. Raises TypeError."""
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


def warn_unsupported_options(server: HttpClient, transcription_options: TranscriptionOptions) -> None:
    """Print a note about options that the server's model does not support. Raises CannotConnect."""
    _supported_options(server.get("/v1/models"), server.url, transcription_options)


def _supported_options(
    answer: HttpAnswer, model: str, transcription_options: TranscriptionOptions
) -> tuple[str, dict[str, str]]:
    """The name of the served model, and the given options that it supports; `model` is the name if none is reported.

    If a server does not report supported options, all count as supported.
    """
    try:
        served: dict[str, Any] = answer.json()["data"][0]
        name, known = str(served["id"]), served.get("options")
    except (ValueError, KeyError, TypeError, IndexError):
        return model, transcription_options.given()
    if known is None:
        return name, transcription_options.given()
    transcription_options.note_unsupported(name, known)
    return name, transcription_options.supported(known)
