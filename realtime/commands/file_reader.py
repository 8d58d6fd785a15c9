"""A file through an engine: read piece by piece, as fast as the engine takes it, with a progress bar."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import av
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from audio.containers import OPEN_OPTIONS, read_file
from audio.errors import AudioError
from audio.resample import MODEL_RATE
from engine import messages
from engine.errors import EngineError
from realtime.commands.caption_view import clock
from realtime.commands.interrupts import EndOnInterrupt
from realtime.commands.standard_input import StandardInput, blocks_of
from realtime.commands.terminal import STANDARD_INPUT, CommandFailed, shown_name
from realtime.commands.transcripts import FileTranscript
from realtime.commands.wishes import Wishes
from realtime.serving.engine_api import EngineApi, StreamApi
from realtime.session.events import Samples
from realtime.session.words import timed_word

# Decoded audio is handed over in pieces of about this length.
PIECE_SAMPLES = MODEL_RATE


class FileFailed(Exception):
    """One file failed; others go on. `transcript` is what was heard before, if anything was."""

    def __init__(self, message: str, transcript: FileTranscript | None = None) -> None:
        super().__init__(message)
        self.transcript = transcript


class FileTranscriber:
    def __init__(self, engine: EngineApi, wishes: Wishes) -> None:
        if engine.spec.sample_rate != MODEL_RATE:
            raise CommandFailed(f"the model wants {engine.spec.sample_rate} Hz; files are read at {MODEL_RATE} Hz only")
        self._engine = engine
        self._options = wishes.options_for(engine.spec)
        self._count = 0

    async def transcribe(self, path: Path) -> FileTranscript:
        """Raises FileFailed, and CommandFailed if the engine does not take what was asked for."""
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
                shown_name(Path(path.name)), total=await asyncio.to_thread(duration_of, path), clock="", speed=""
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
                heard = output.sample / MODEL_RATE
                elapsed = asyncio.get_running_loop().time() - began
                bar.update(row, completed=heard, clock=clock(heard), speed=f"{heard / max(elapsed, 0.01):.1f}x")
            elif isinstance(output, messages.Closed):
                return
            elif isinstance(output, messages.Failed | messages.Dead | messages.Refused):
                raise EngineError(output.message)


async def _feed(path: Path, stream: StreamApi, transcript: FileTranscript) -> None:
    """Feed everything that can be decoded. A fault in the file is raised once its good part has been finished."""
    try:
        async for piece in heard(path):
            transcript.samples += len(piece)
            await stream.feed(piece)
    finally:
        # The listener must come to an end in any case.
        with contextlib.suppress(EngineError):
            await stream.finish()


async def heard(path: Path, samples: int = PIECE_SAMPLES) -> AsyncIterator[Samples]:
    """The pieces of a file, or of standard input as they arrive; there Ctrl-C is the end of the sound."""
    if path != STANDARD_INPUT:
        pieces = pieces_of(path, samples)
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            yield piece
        return
    with EndOnInterrupt() as interrupt:
        source = StandardInput(lambda: interrupt.ended)
        pieces = gathered(blocks_of(source), samples)
        try:
            while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                yield piece
        finally:
            source.stop()


def pieces_of(path: Path, samples: int = PIECE_SAMPLES) -> Iterator[Samples]:
    """The audio of a file in pieces, as `gathered` makes them."""
    return gathered(read_file(path), samples)


def gathered(blocks: Iterator[Samples], samples: int) -> Iterator[Samples]:
    """Blocks in pieces of at least so many samples, the last one excepted.

    A fault is raised after everything before it has been handed out.
    """
    waiting: list[Samples] = []
    count = 0
    fault: AudioError | OSError | None = None
    try:
        for block in blocks:
            waiting.append(block)
            count += len(block)
            if count >= samples:
                yield np.concatenate(waiting)
                waiting, count = [], 0
    except (AudioError, OSError) as error:
        fault = error
    if count:
        yield np.concatenate(waiting)
    if fault is not None:
        raise fault


def duration_of(path: Path) -> float | None:
    """What the container says, for the progress bar; None if it does not say."""
    if path == STANDARD_INPUT:
        return None
    try:
        with path.open("rb") as file, av.open(file, mode="r", options=OPEN_OPTIONS) as container:
            return container.duration / av.time_base if container.duration else None
    except (av.error.FFmpegError, OSError):
        return None
