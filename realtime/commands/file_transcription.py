"""Transcribes files and standard input for the commands, with an engine in this process or with a server.

- `read_pieces` reads a file or standard input as samples at 16 kHz mono. Standard input is decoded as it arrives: a WAV
  stream of 16-bit samples, which other programs usually write, here; all other formats by `audio/containers.py`.
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
import select
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import av
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from audio.containers import OPEN_OPTIONS, ContainerDecoder, read_file
from audio.errors import AudioError, CorruptAudio, EmptyAudio
from audio.formats import MODEL_RATE, PCM16_SCALE, Resampler
from engine import messages
from engine.errors import EngineError
from engine.logs import set_up_logging
from engine.options import EngineConfig
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
from realtime.commands.transcripts import FileTranscript, clock
from realtime.serving.engine_api import EngineApi, StreamApi
from realtime.session.events import Samples, TimedWord
from realtime.session.speakers import speaker_number
from realtime.session.words import timed_word

if TYPE_CHECKING:
    from engine.client.client import EngineClient
    from realtime.client.wire_client import HttpAnswer, HttpClient


# Reading files and standard input

# Bytes of one read.
READ_BYTES = 64 * 1024
# Seconds after which a waiting read checks whether it has to stop.
POLL_S = 0.2
# A WAV stream with a longer header is decoded by libav.
MAX_HEAD_BYTES = 16 * 1024
# Format codes of WAV: PCM, and a code that stands later in the chunk.
PCM, EXTENSIBLE = 1, 0xFFFE
# Writers that do not know the length of the data write zero or nearly the largest value.
UNKNOWN_LENGTH = 0x7FFF_0000


class StandardInput:
    """Standard input as a file that cannot seek. It ends when its writer closes it, or `ended()` is True."""

    def __init__(self, ended: Callable[[], bool]) -> None:
        self._fd = sys.stdin.fileno()
        self._ended = ended
        self._stopped = False

    def stop(self) -> None:
        """End the input; a waiting read returns soon."""
        self._stopped = True

    def read1(self, size: int) -> bytes:
        """The available bytes, at most `size`; empty at the end."""
        while not self._stopped and not self._ended():
            if select.select([self._fd], [], [], POLL_S)[0]:
                return os.read(self._fd, size)
        return b""


def read_standard_input(source: StandardInput) -> Iterator[Samples]:
    """Samples at 16 kHz mono as they arrive. Raises AudioError after everything that could be decoded, and OSError."""
    head = b""
    while (plain := _plain_wav(head)) is None and (data := source.read1(READ_BYTES)):
        head += data
    if isinstance(plain, PlainWav):
        yield from _plain_blocks(source, plain, head[plain.head_bytes :])
    else:
        yield from _container_blocks(source, head)


def _container_blocks(source: StandardInput, head: bytes) -> Iterator[Samples]:
    decoder = ContainerDecoder()
    try:
        data = head
        while data:
            yield from decoder.decode(data)
            data = source.read1(READ_BYTES)
        yield from decoder.flush()
    finally:
        decoder.close()


@dataclass(frozen=True, slots=True)
class PlainWav:
    """The header of a WAV stream of 16-bit samples. `data_bytes` is None if its writer did not know the length."""

    head_bytes: int
    rate: int
    channels: int
    data_bytes: int | None


def _plain_wav(head: bytes) -> PlainWav | bool | None:
    """The header of a WAV stream of 16-bit samples; False if it is another format, None if more bytes are needed.

    Parsed here because libav reads 128 KiB (four seconds of speech) before it returns the first sample.
    """
    if not head.startswith(b"RIFF"[: len(head)]) or head[8:12] != b"WAVE"[: max(0, len(head) - 8)]:
        return False
    rate = channels = 0
    offset = 12
    while offset + 8 <= len(head):
        name, size = head[offset : offset + 4], int.from_bytes(head[offset + 4 : offset + 8], "little")
        if name == b"data":
            unknown = size == 0 or size >= UNKNOWN_LENGTH
            return PlainWav(offset + 8, rate, channels, None if unknown else size) if rate else False
        body = head[offset + 8 : offset + 8 + size]
        if name == b"fmt " and len(body) == size:
            rate, channels = _plain_format(body)
            if not rate:
                return False
        offset += 8 + size + size % 2
    return None if offset <= MAX_HEAD_BYTES else False


def _plain_format(body: bytes) -> tuple[int, int]:
    """Rate and channels of a `fmt ` chunk of 16-bit samples; zeros for other formats."""
    kind, channels = int.from_bytes(body[:2], "little"), int.from_bytes(body[2:4], "little")
    rate, bits = int.from_bytes(body[4:8], "little"), int.from_bytes(body[14:16], "little")
    if kind == EXTENSIBLE:
        kind = int.from_bytes(body[24:26], "little")
    return (rate, channels) if kind == PCM and bits == 16 and channels else (0, 0)


def _plain_blocks(source: StandardInput, wav: PlainWav, data: bytes) -> Iterator[Samples]:
    resampler = Resampler(wav.rate)
    frame_bytes = 2 * wav.channels
    # Bytes that the header announces and that have not come; None if their number is unknown.
    missing = wav.data_bytes
    received = 0
    rest = b""
    # The header may arrive without samples.
    data = data or source.read1(READ_BYTES)
    while data and missing != 0:
        data = data if missing is None else data[:missing]
        missing = None if missing is None else missing - len(data)
        received += len(data)
        data = rest + data
        complete = len(data) // frame_bytes * frame_bytes
        rest = data[complete:]
        yield resampler.resample(_mono(data[:complete], wav.channels))
        data = source.read1(READ_BYTES)
    yield resampler.flush()
    if not received:
        raise EmptyAudio("the audio track has no samples; send audio that has some")
    if missing:
        seconds = received / frame_bytes / wav.rate
        raise CorruptAudio(f"the audio is cut short: {seconds:.2f} s came, {missing} bytes are missing")


def _mono(data: bytes, channels: int) -> NDArray[np.float32]:
    samples = np.frombuffer(data, "<i2").reshape(-1, channels)
    mixed: NDArray[np.float32] = samples.mean(axis=1, dtype=np.float32) * PCM16_SCALE
    return mixed


# Decoded audio is returned in pieces of about this length.
PIECE_SAMPLES = MODEL_RATE


async def read_pieces(path: Path, samples: int = PIECE_SAMPLES) -> AsyncIterator[Samples]:
    """The audio of a file, or of standard input as it arrives, in pieces. Ctrl-C ends standard input."""
    if path != STANDARD_INPUT:
        pieces = read_audio(path, samples)
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            yield piece
        return
    with EndOnInterrupt() as interrupt:
        source = StandardInput(lambda: interrupt.ended)
        pieces = join_blocks(read_standard_input(source), samples)
        try:
            while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                yield piece
        finally:
            source.stop()


def read_audio(path: Path, samples: int = PIECE_SAMPLES) -> Iterator[Samples]:
    """The audio of a file in pieces, like `join_blocks`."""
    return join_blocks(read_file(path), samples)


def join_blocks(blocks: Iterator[Samples], samples: int) -> Iterator[Samples]:
    """Join blocks to pieces of at least `samples` samples; the last piece may be shorter.

    An error of `blocks` is raised after all samples before it were returned.
    """
    pending: list[Samples] = []
    count = 0
    error_at_end: AudioError | OSError | None = None
    try:
        for block in blocks:
            pending.append(block)
            count += len(block)
            if count >= samples:
                yield np.concatenate(pending)
                pending, count = [], 0
    except (AudioError, OSError) as error:
        error_at_end = error
    if count:
        yield np.concatenate(pending)
    if error_at_end is not None:
        raise error_at_end


def duration_of(path: Path) -> float | None:
    """The duration of a file in seconds by its container, for the progress bar; None if it has none."""
    if path == STANDARD_INPUT:
        return None
    try:
        with path.open("rb") as file, av.open(file, mode="r", options=OPEN_OPTIONS) as container:
            return container.duration / av.time_base if container.duration else None
    except (av.error.FFmpegError, OSError):
        return None


# Transcribing

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
        from realtime.client.wire_client import TRANSCRIPTIONS, TRANSLATIONS, CannotConnect, HttpClient

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
        from realtime.client.wire_client import CannotConnect, FileUnreadable, Form

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
