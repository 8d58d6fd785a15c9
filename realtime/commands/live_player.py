"""Live captions in the terminal, of a microphone or of a file at its own pace, by an engine here or by a server."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from audio.errors import AudioError
from audio.resample import MODEL_RATE
from engine import messages
from engine.errors import EngineError
from realtime.client.http_client import HttpServer
from realtime.client.lasting_session import LastingSession
from realtime.client.wire_client import CannotConnect, SessionWishes, realtime_url
from realtime.commands import local_engine
from realtime.commands.caption_view import CaptionView, ShownWord
from realtime.commands.file_reader import FileFailed, heard
from realtime.commands.file_sender import note_what_is_not_taken
from realtime.commands.listener import AudioClock, Listener
from realtime.commands.terminal import KEY_VARIABLE, STANDARD_INPUT, CommandFailed
from realtime.commands.transcript_file import TranscriptFile
from realtime.commands.wishes import Wishes
from realtime.session.events import Samples
from realtime.session.words import timed_word

CHUNK_SAMPLES = MODEL_RATE * 80 // 1000
TURNS = {"type": "server_vad", "silence_duration_ms": 500}
# How long nothing may come back once the sound has ended, before it is given up.
LAST_WORDS_S = 15.0

# Chunks of 16 kHz mono as they become due.
Sound = AsyncIterator[Samples]


async def play_file(path: Path, options: argparse.Namespace) -> None:
    """Raises FileFailed for what is wrong with this file alone."""
    try:
        await caption(as_it_comes(path) if path == STANDARD_INPUT else paced(path), options)
    except (AudioError, OSError) as error:
        raise FileFailed(str(error)) from error


async def paced(path: Path) -> Sound:
    """Chunks of a file, each when its last sample would have been recorded."""
    loop = asyncio.get_running_loop()
    began, sent = None, 0
    async for piece in heard(path):
        began = loop.time() if began is None else began
        for chunk in _chunks(piece):
            sent += len(chunk)
            # To an absolute schedule: a late chunk does not make all later ones late.
            await asyncio.sleep(max(0.0, began + sent / MODEL_RATE - loop.time()))
            yield chunk


async def as_it_comes(path: Path) -> Sound:
    """Chunks of a pipe: whoever writes it sets the pace."""
    async for piece in heard(path, CHUNK_SAMPLES):
        for chunk in _chunks(piece):
            yield chunk


async def until(sound: Sound, ended: Callable[[], bool]) -> Sound:
    """The sound, until somebody has heard enough. What its source says when it is stopped then is no fault."""
    try:
        async for chunk in sound:
            if ended():
                return
            yield chunk
    except CommandFailed:
        if not ended():
            raise


def _chunks(piece: Samples) -> Iterator[Samples]:
    for start in range(0, len(piece), CHUNK_SAMPLES):
        yield piece[start : start + CHUNK_SAMPLES]


async def caption(
    sound: Sound, options: argparse.Namespace, file: TranscriptFile | None = None, *, can_wait: bool = True
) -> None:
    """Show captions of the sound until it ends, and save them. Sound of a microphone cannot wait for a server.

    Raises CommandFailed, EngineError, and what the sound raises.
    """
    clock = AudioClock()
    if options.server:
        await _through_server(sound, options, clock, file, can_wait)
    else:
        await _through_engine(sound, options, clock, file)


async def _through_engine(
    sound: Sound, options: argparse.Namespace, clock: AudioClock, file: TranscriptFile | None
) -> None:
    wishes = Wishes.of(options).fit_for(options.model)
    async with local_engine.local_engine(options.model, options.device) as client:
        wanted = wishes.options_for(client.spec)
        try:
            stream = await client.open("live", live=True, options=wanted)
        except ValueError as error:
            raise CommandFailed(str(error)) from error
        with CaptionView(Console(), show_words=options.words) as captions:
            listener = Listener(captions, clock, file)

            async def listen() -> None:
                async for output in stream:
                    if isinstance(output, messages.Text):
                        listener.heard(output.delta, [_shown(word) for word in output.words])
                    elif isinstance(output, messages.Failed | messages.Dead | messages.Refused):
                        raise EngineError(output.message)

            try:
                feeding = _feed(sound, clock, captions, stream.feed, stream.finish)
                await _both(feeding, listen(), lambda: listener.last_news)
            finally:
                await stream.abort()


def _shown(word: messages.Word) -> ShownWord:
    timed = timed_word(word)
    return ShownWord(timed.text, timed.start / MODEL_RATE, timed.end / MODEL_RATE, timed.confidence)


async def _through_server(
    sound: Sound, options: argparse.Namespace, clock: AudioClock, file: TranscriptFile | None, can_wait: bool
) -> None:
    wishes, key = Wishes.of(options), os.environ.get(KEY_VARIABLE)
    try:
        if wishes.given():
            await asyncio.to_thread(note_what_is_not_taken, HttpServer(options.server, key), wishes)
        asked = SessionWishes(MODEL_RATE, TURNS, None, wishes.language, wishes.prompt, wishes.keywords, wishes.task)
        session = LastingSession(realtime_url(options.server), key, asked)
        with CaptionView(Console(), show_words=options.words) as captions:
            listener = Listener(captions, clock, file)

            async def send(samples: Samples) -> None:
                if can_wait:
                    await session.wait_for_room(len(samples))
                session.append((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())
                if session.kept.lost:
                    listener.trouble("sound", f"{session.kept.lost / MODEL_RATE:.0f} s of sound were lost meanwhile")

            async def finish() -> None:
                session.finish()

            talking = session.run(listener.on_event, partial(listener.trouble, "line"))
            await _both(_feed(sound, clock, captions, send, finish), talking, lambda: listener.last_news)
    except CannotConnect as error:
        raise CommandFailed(str(error)) from error


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
            clock.heard(len(samples))
            captions.heard(clock.now)
            await send(samples)
    except asyncio.CancelledError:
        raise
    except Exception:
        await finish()
        raise
    await finish()


async def _both(
    feeding: Coroutine[Any, Any, None], listening: Coroutine[Any, Any, None], news: Callable[[], float]
) -> None:
    """Run both to their ends. The listener has the last word: when it fails, feeding is pointless.

    `news` tells when something last came back: a server that is behind is waited for as long as it goes on.
    """
    time = asyncio.get_running_loop().time
    feeder, listener = asyncio.create_task(feeding), asyncio.create_task(listening)
    try:
        await asyncio.wait((feeder, listener), return_when=asyncio.FIRST_COMPLETED)
        ended = time()
        while not listener.done():
            patience = max(ended, news()) + LAST_WORDS_S - time()
            if patience <= 0:
                raise CommandFailed(f"the sound has ended, and nothing came back for {LAST_WORDS_S:g} s")
            await asyncio.wait((listener,), timeout=patience)
        await listener
        await feeder
    finally:
        for task in (feeder, listener):
            task.cancel()
        await asyncio.gather(feeder, listener, return_exceptions=True)
