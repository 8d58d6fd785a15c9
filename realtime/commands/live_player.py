"""Live captions in the terminal, of a microphone or of a file at its own pace, by an engine here or by a server."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from websockets.exceptions import ConnectionClosed

from audio.errors import AudioError
from audio.resample import MODEL_RATE
from engine import messages
from engine.errors import EngineError
from realtime.client.wire_client import COMPLETED, DELTA, FAILED, CannotConnect, WireSession, open_session, realtime_url
from realtime.commands import local_engine
from realtime.commands.caption_view import CaptionView, ShownWord
from realtime.commands.file_reader import FileFailed, open_stream, pieces_of
from realtime.commands.terminal import KEY_VARIABLE, CommandFailed
from realtime.session.events import Samples

CHUNK_SAMPLES = MODEL_RATE * 80 // 1000
TURNS = {"type": "server_vad", "silence_duration_ms": 500}
# How long a server may take for its last words once the sound has ended.
LAST_WORDS_S = 15.0

# Chunks of 16 kHz mono as they become due.
Sound = AsyncIterator[Samples]


class AudioClock:
    """How long the microphone has been open."""

    def __init__(self) -> None:
        self._time = asyncio.get_running_loop().time
        self._began: float | None = None

    def start(self, samples: int) -> None:
        """The first chunk is complete: recording began as long ago as the chunk lasts."""
        if self._began is None:
            self._began = self._time() - samples / MODEL_RATE

    @property
    def now(self) -> float:
        return 0.0 if self._began is None else self._time() - self._began


async def play_file(path: Path, options: argparse.Namespace) -> None:
    """Raises FileFailed for what is wrong with this file alone."""
    try:
        await caption(paced(path), options)
    except (AudioError, OSError) as error:
        raise FileFailed(str(error)) from error


async def paced(path: Path) -> Sound:
    """Chunks of a file, each when its last sample would have been recorded."""
    loop = asyncio.get_running_loop()
    pieces = pieces_of(path)
    began, sent = None, 0
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        began = loop.time() if began is None else began
        for start in range(0, len(piece), CHUNK_SAMPLES):
            chunk = piece[start : start + CHUNK_SAMPLES]
            sent += len(chunk)
            # To an absolute schedule: a late chunk does not make all later ones late.
            await asyncio.sleep(max(0.0, began + sent / MODEL_RATE - loop.time()))
            yield chunk


async def caption(sound: Sound, options: argparse.Namespace) -> None:
    """Show captions of the sound until it ends. Raises CommandFailed, EngineError, and what the sound raises."""
    through = _through_server if options.server else _through_engine
    await through(sound, options, Console())


async def _through_engine(sound: Sound, options: argparse.Namespace, console: Console) -> None:
    async with local_engine.local_engine(options.model, options.device) as client:
        wanted = {"language": options.language} if options.language else {}
        stream = await open_stream(client, "live", wanted, live=True)
        clock = AudioClock()
        with CaptionView(console, show_words=options.words) as captions:

            async def listen() -> None:
                async for output in stream:
                    if isinstance(output, messages.Text):
                        captions.add(output.delta, [_shown(word) for word in output.words], clock.now)
                    elif isinstance(output, messages.Failed | messages.Dead | messages.Refused):
                        raise EngineError(output.message)

            try:
                await _both(_feed(sound, clock, captions, stream.feed, stream.finish), listen())
            finally:
                await stream.abort()


def _shown(word: messages.Word) -> ShownWord:
    return ShownWord(word.text, word.start_sample / MODEL_RATE, word.end_sample / MODEL_RATE)


async def _through_server(sound: Sound, options: argparse.Namespace, console: Console) -> None:
    clock = AudioClock()
    try:
        async with open_session(realtime_url(options.server), os.environ.get(KEY_VARIABLE)) as session:
            await session.configure(MODEL_RATE, TURNS, options.language)

            async def send(samples: Samples) -> None:
                await session.append((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())

            with CaptionView(console, show_words=options.words) as captions:
                listening = listen_to_server(session, captions, clock)
                await _both(_feed(sound, clock, captions, send, session.finish), listening)
    except CannotConnect as error:
        raise CommandFailed(str(error)) from error
    except ConnectionClosed as error:
        raise CommandFailed(f"the server closed the connection: {error}") from error


async def listen_to_server(session: WireSession, captions: CaptionView, clock: AudioClock) -> None:
    """Until the session has said its last words."""
    async for event in session.events():
        match event.get("type"):
            case kind if kind == DELTA:
                words = [ShownWord(word["word"], word["start"], word["end"]) for word in event.get("words") or ()]
                captions.add(event["delta"], words, clock.now)
            case kind if kind == COMPLETED:
                captions.end_line()
            case kind if kind == FAILED:
                captions.note(f"a turn failed: {event['error'].get('message')}")
            case "error" if not session.is_expected(event):
                raise CommandFailed(f"the server says: {event['error'].get('message')}")
        if session.is_over:
            return


async def _feed(
    sound: Sound,
    clock: AudioClock,
    captions: CaptionView,
    send: Callable[[Samples], Awaitable[None]],
    finish: Callable[[], Awaitable[None]],
) -> None:
    """Send the sound. What was sent is finished even if the sound fails."""
    try:
        async for samples in sound:
            clock.start(len(samples))
            captions.heard(clock.now)
            await send(samples)
    except asyncio.CancelledError:
        raise
    except Exception:
        await finish()
        raise
    await finish()


async def _both(feeding: Coroutine[Any, Any, None], listening: Coroutine[Any, Any, None]) -> None:
    """Run both to their ends. The listener has the last word: when it fails, feeding is pointless."""
    feeder, listener = asyncio.create_task(feeding), asyncio.create_task(listening)
    try:
        await asyncio.wait((feeder, listener), return_when=asyncio.FIRST_COMPLETED)
        if listener.done():
            await listener
        await asyncio.wait((listener,), timeout=LAST_WORDS_S)
        if not listener.done():
            raise CommandFailed(f"the last words did not come within {LAST_WORDS_S:g} s")
        await listener
        await feeder
    finally:
        for task in (feeder, listener):
            task.cancel()
        await asyncio.gather(feeder, listener, return_exceptions=True)
