"""Live captions in the terminal: sends audio to a local engine or a server as it comes, and shows and saves the text.

`tickertape mic`, `tickertape listen`, `tickertape demo` and `tickertape transcribe --live` call `run` or `play_file`,
each with its own source of audio. `CaptionOutput` takes the text, and owns the words that wait for their speakers and
the gaps that are not shown yet; `CaptionView` and `TranscriptFile` (`transcripts.py`) show and save it. With a server
the session is a `ResumingSession` (`realtime/client/resuming_session.py`), which reconnects.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from audio.errors import AudioError
from audio.formats import MODEL_RATE
from engine import messages
from engine.errors import EngineError
from realtime.client.resuming_session import ResumingSession
from realtime.client.wire_client import (
    COMPLETED,
    DELTA,
    FAILED,
    CannotConnect,
    HttpClient,
    SessionOptions,
    is_expected,
    realtime_url,
)
from realtime.commands import file_transcription
from realtime.commands.file_transcription import FileFailed, read_pieces, warn_unsupported_options
from realtime.commands.terminal import (
    INTERRUPTED,
    KEY_VARIABLE,
    STANDARD_INPUT,
    CommandFailed,
    EndOnInterrupt,
    note,
)
from realtime.commands.transcription_options import TranscriptionOptions
from realtime.commands.transcripts import CaptionView, ShownWord, TranscriptFile, chosen_extension
from realtime.session.events import Samples, TimedWord
from realtime.session.speakers import SpeakerTimeline, speaker_number
from realtime.session.speakers import shown_name as speaker_name
from realtime.session.words import timed_word


class AudioClock:
    """Seconds since the audio began: by the clock, or by the audio's length if it arrives faster than real time."""

    def __init__(self) -> None:
        self._time = asyncio.get_running_loop().time
        self._began: float | None = None
        self._received = 0

    def advance(self, samples: int) -> None:
        """Count a chunk of audio. The first one began its own length before it arrived."""
        if self._began is None:
            self._began = self._time() - samples / MODEL_RATE
        self._received += samples

    @property
    def heard_s(self) -> float:
        """Seconds of audio so far, with gaps."""
        return self._received / MODEL_RATE

    @property
    def now(self) -> float:
        return 0.0 if self._began is None else max(self._time() - self._began, self.heard_s)


class CaptionOutput:
    """Takes the results: text goes to the terminal and to the file, problems to the line below the captions."""

    def __init__(
        self, captions: CaptionView, clock: AudioClock, file: TranscriptFile | None, speakers: bool = False
    ) -> None:
        # Words are shown when their speakers are known: of a server at the end of a turn, else one by one.
        self.speakers = SpeakerTimeline() if speakers else None
        self._unlabelled: deque[TimedWord] = deque()
        self._speaker: int | None = None
        # Time of the last text, on the event loop's clock.
        self.last_news = 0.0
        self._captions = captions
        self._clock = clock
        self._file = file
        self._troubles: dict[str, str] = {}
        # Gaps in the audio (start, end in seconds) that wait for the first word after them.
        self._gaps: deque[tuple[float, float]] = deque(maxlen=MAX_GAPS)
        # Text of the open turn, if none of its words had times so far.
        self._untimed = ""
        self._timed = False
        # Number of words of the open turn that came with deltas.
        self._words = 0
        if file is not None:
            file.on_trouble = lambda text: self.trouble("disk", text)

    def on_text(self, delta: str, words: Sequence[ShownWord]) -> None:
        """Take final text, and the words that it completes."""
        self.last_news = asyncio.get_running_loop().time()
        while self._gaps and words and words[0].end > self._gaps[0][1]:
            self._show_gap()
        self._captions.add(delta, words, self._clock.now)
        self._timed |= bool(words)
        self._words += len(words)
        self._untimed = "" if self._timed else self._untimed + delta
        self._save(words)

    def end_turn(self) -> None:
        self._captions.end_turn()
        # If the server sends no word times, the words are saved with the time of the turn's end.
        now = self._clock.now
        self._save([ShownWord(text, now, now) for text in self._untimed.split()])
        self._untimed, self._timed, self._words = "", False, 0

    def on_gap(self, start: float, end: float) -> None:
        """Audio is missing between these seconds. It is shown before the first word that comes after it."""
        self._gaps.append((start, end))

    def show_gaps(self) -> None:
        """Show the gaps after the last word: no more words come."""
        while self._gaps:
            self._show_gap()

    def _show_gap(self) -> None:
        start, end = self._gaps.popleft()
        self._captions.gap(start, end)
        if self._file is not None:
            self._file.add_gap(start, end)

    def trouble(self, kind: str, text: str) -> None:
        """Show a problem of this kind; an empty text removes it."""
        self._troubles[kind] = text
        self._captions.note("; ".join(filter(None, self._troubles.values())))

    def on_labels(self, labels: messages.Labels | None) -> None:
        """Show the words of a local engine whose speakers are known now; None: no more labels come."""
        assert self.speakers is not None
        if labels is not None:
            self.speakers.add(labels, 0)
        while self._unlabelled and (labels is None or self.speakers.is_decided(self._unlabelled[0])):
            word = self.speakers.with_best_label(self._unlabelled.popleft())
            self.speakers.forget_before(word.start)
            self._show_labelled(word)

    def wait_for_label(self, words: Sequence[messages.Word]) -> None:
        """Keep words of a local engine until their speakers are known."""
        self._unlabelled.extend(map(timed_word, words))

    def _show_labelled(self, word: TimedWord) -> None:
        """Show a word; a line begins with its speaker."""
        who = ""
        if word.speaker is not None and word.speaker != self._speaker:
            self.end_turn()
            who, self._speaker = f"{speaker_name(word.speaker)}:", word.speaker
        times = word.start / MODEL_RATE, word.end / MODEL_RATE
        self.on_text(f"{who} {word.text}", [ShownWord(word.text, *times, word.confidence, word.speaker)])

    def on_event(self, event: dict[str, Any]) -> None:
        """Handle an event of the server. Raises CommandFailed for an error event."""
        match event.get("type"):
            case kind if self.speakers is not None and kind in (DELTA, COMPLETED):
                for word in _shown_words(event) if kind == COMPLETED else ():
                    start, end = round(word.start * MODEL_RATE), round(word.end * MODEL_RATE)
                    self._show_labelled(TimedWord(word.text, start, end, (), word.confidence, speaker=word.speaker))
            case kind if kind == DELTA:
                self.on_text(event["delta"], _shown_words(event))
            case kind if kind == COMPLETED:
                # The last word of a turn is completed by the end of the turn and not by a delta.
                self.on_text("", _shown_words(event)[self._words :])
                self.end_turn()
            case kind if kind == FAILED:
                self.end_turn()
                self.trouble("turn", f"a turn failed: {event['error'].get('message')}")
            case "error" if not is_expected(event):
                raise CommandFailed(f"the server says: {event['error'].get('message')}")

    def _save(self, words: Sequence[ShownWord]) -> None:
        if self._file is not None:
            timed = [(word, round(word.start * MODEL_RATE), round(word.end * MODEL_RATE)) for word in words]
            self._file.add(
                [
                    TimedWord(word.text, start, end, confidence=word.confidence, speaker=word.speaker)
                    for word, start, end in timed
                ]
            )


def _shown_words(event: dict[str, Any]) -> list[ShownWord]:
    return [
        ShownWord(word["word"], word["start"], word["end"], word.get("confidence"), speaker_number(word.get("speaker")))
        for word in event.get("words") or ()
    ]


CHUNK_SAMPLES = MODEL_RATE * 80 // 1000
TURNS = {"type": "server_vad", "silence_duration_ms": 500}
# Seconds without text after the end of the audio before the command gives up.
LAST_WORDS_S = 15.0

# Gaps that wait for the first word after them; beyond that the oldest marks are dropped.
MAX_GAPS = 1000

# Chunks of 16 kHz mono in real time. A number is a gap of that many samples.
Sound = AsyncIterator[Samples | int]


def run(options: argparse.Namespace, doing: str, sound: Callable[[EndOnInterrupt], Sound]) -> int:
    """Show live captions of `sound`, which is made when the captions begin, until it ends or Ctrl-C. Returns the exit
    code."""
    file = None
    if options.output:
        file = TranscriptFile(options.output, chosen_extension(options.output, options.format), options.words)
    note(f"{doing}; Ctrl-C stops")

    async def show() -> None:
        await caption(sound(interrupt), options, file, can_wait=False)

    try:
        with EndOnInterrupt() as interrupt:
            asyncio.run(show())
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        if file is not None:
            file.close()
    return 0


async def play_file(path: Path, options: argparse.Namespace) -> None:
    """Show captions of a file in real time. Raises FileFailed if the file is the problem."""
    try:
        await caption(as_it_comes(path) if path == STANDARD_INPUT else paced(path), options)
    except (AudioError, OSError) as error:
        raise FileFailed(str(error)) from error


async def paced(path: Path) -> Sound:
    """Chunks of a file in real time: each at the time at which its last sample would have been recorded."""
    loop = asyncio.get_running_loop()
    began, sent = None, 0
    async for piece in read_pieces(path):
        began = loop.time() if began is None else began
        for chunk in _chunks(piece):
            sent += len(chunk)
            # An absolute schedule, so that one late chunk does not delay all later ones.
            await asyncio.sleep(max(0.0, began + sent / MODEL_RATE - loop.time()))
            yield chunk


async def as_it_comes(path: Path) -> Sound:
    """Chunks of a pipe as they arrive; the writer sets the pace."""
    async for piece in read_pieces(path, CHUNK_SAMPLES):
        for chunk in _chunks(piece):
            yield chunk


async def until(sound: Sound, ended: Callable[[], bool]) -> Sound:
    """The audio until `ended()` is True. An error of the source after that is ignored."""
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
    """Show captions of the audio until it ends, and save them to `file`.

    `can_wait` is False for a microphone, whose audio cannot wait for a server. Raises CommandFailed, EngineError, and
    errors of `sound`.
    """
    clock = AudioClock()
    if options.server:
        await _through_server(sound, options, clock, file, can_wait)
    else:
        await _through_engine(sound, options, clock, file)


async def _through_engine(
    sound: Sound, options: argparse.Namespace, clock: AudioClock, file: TranscriptFile | None
) -> None:
    transcription_options = TranscriptionOptions.of(options).without_unsupported(options.model)
    async with file_transcription.local_engine(options.model, options.device) as client:
        wanted = transcription_options.engine_options(client.spec)
        try:
            stream = await client.open("live", live=True, options=wanted)
        except ValueError as error:
            raise CommandFailed(str(error)) from error
        with CaptionView(Console(), show_words=options.words) as captions:
            caption_output = CaptionOutput(captions, clock, file, transcription_options.speakers)

            async def listen() -> None:
                async for output in stream:
                    if caption_output.speakers is not None and isinstance(output, messages.Text):
                        caption_output.wait_for_label(output.words)
                    elif caption_output.speakers is not None and isinstance(output, messages.Labels | messages.Closed):
                        caption_output.on_labels(output if isinstance(output, messages.Labels) else None)
                    elif isinstance(output, messages.Text):
                        caption_output.on_text(output.delta, [_shown(word) for word in output.words])
                    elif isinstance(output, messages.Failed | messages.Dead | messages.Refused):
                        raise EngineError(output.message)

            async def send(audio: Samples | int) -> None:
                if isinstance(audio, int):
                    caption_output.on_gap(clock.heard_s - audio / MODEL_RATE, clock.heard_s)
                    await stream.gap(audio)
                else:
                    await stream.feed(audio)

            try:
                feeding = _feed(sound, clock, captions, send, stream.finish)
                await both(feeding, listen(), lambda: caption_output.last_news)
            finally:
                caption_output.show_gaps()
                await stream.abort()


def _shown(word: messages.Word) -> ShownWord:
    timed = timed_word(word)
    return ShownWord(timed.text, timed.start / MODEL_RATE, timed.end / MODEL_RATE, timed.confidence)


async def _through_server(
    sound: Sound, options: argparse.Namespace, clock: AudioClock, file: TranscriptFile | None, can_wait: bool
) -> None:
    transcription_options, key = TranscriptionOptions.of(options), os.environ.get(KEY_VARIABLE)
    try:
        if transcription_options.given():
            await asyncio.to_thread(warn_unsupported_options, HttpClient(options.server, key), transcription_options)
        asked = SessionOptions(
            MODEL_RATE,
            TURNS,
            None,
            transcription_options.language,
            transcription_options.prompt,
            transcription_options.keywords,
            transcription_options.task,
            transcription_options.speakers,
            # What the terminal has shown is not changed any more.
            finals="streamed",
            publish=getattr(options, "publish", None),
        )
        session = ResumingSession(realtime_url(options.server), key, asked)
        with CaptionView(Console(), show_words=options.words) as captions:
            caption_output = CaptionOutput(captions, clock, file, transcription_options.speakers)

            async def send(samples: Samples | int) -> None:
                if isinstance(samples, int):
                    caption_output.on_gap(clock.heard_s - samples / MODEL_RATE, clock.heard_s)
                    return session.append_gap(samples)
                if can_wait:
                    await session.wait_for_room(len(samples))
                session.append((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())
                if session.kept.lost:
                    caption_output.trouble(
                        "sound", f"{session.kept.lost / MODEL_RATE:.0f} s of audio were lost meanwhile"
                    )

            async def finish() -> None:
                session.finish()

            talking = session.run(caption_output.on_event, partial(caption_output.trouble, "line"))
            try:
                await both(_feed(sound, clock, captions, send, finish), talking, lambda: caption_output.last_news)
            finally:
                caption_output.show_gaps()
    except CannotConnect as error:
        raise CommandFailed(str(error)) from error


async def _feed(
    sound: Sound,
    clock: AudioClock,
    captions: CaptionView,
    send: Callable[[Samples | int], Awaitable[None]],
    finish: Callable[[], Awaitable[None]],
) -> None:
    """Send the audio, and finish the session even if the source of the audio fails."""
    try:
        async for samples in sound:
            clock.advance(samples if isinstance(samples, int) else len(samples))
            captions.heard(clock.now)
            await send(samples)
    except asyncio.CancelledError:
        raise
    except Exception:
        await finish()
        raise
    await finish()


async def both(
    feeding: Coroutine[Any, Any, None], listening: Coroutine[Any, Any, None], news: Callable[[], float]
) -> None:
    """Run both until they end; if `listening` ends first, `feeding` is cancelled.

    After the audio has ended, text is awaited for `LAST_WORDS_S` since the last text, whose time `news` returns.
    """
    time = asyncio.get_running_loop().time
    feeder, listener = asyncio.create_task(feeding), asyncio.create_task(listening)
    try:
        await asyncio.wait((feeder, listener), return_when=asyncio.FIRST_COMPLETED)
        ended = time()
        while not listener.done():
            patience = max(ended, news()) + LAST_WORDS_S - time()
            if patience <= 0:
                raise CommandFailed(f"the audio has ended, and no text arrived for {LAST_WORDS_S:g} s")
            await asyncio.wait((listener,), timeout=patience)
        await listener
        await feeder
    finally:
        for task in (feeder, listener):
            task.cancel()
        await asyncio.gather(feeder, listener, return_exceptions=True)
