"""Live captions in the terminal: sends audio to a server as it comes, and shows and saves the text.

`tickertape mic`, `tickertape listen`, `tickertape demo` and `tickertape transcribe --live` call `run` or `play_file`,
each with its own source of audio. The audio goes to a session of a server, which is a `ResumingSession`
(`realtime/client/resuming_session.py`) and reconnects; without `--server` the command runs a server of its own.
`CaptionOutput` receives the text, and has the turns that are not final and the gaps that are not shown yet.
`CaptionView` shows the text and `TranscriptFile` saves it (both in `transcripts.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from audio.errors import AudioError
from audio.formats import MODEL_RATE
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
from realtime.commands.transcripts import (
    RECENT_WORDS,
    CaptionView,
    ShownWord,
    TranscriptFile,
    caption_lines,
    chosen_extension,
    split_at_word,
)
from realtime.session.events import Samples, TimedWord
from realtime.session.speakers import shown_name as speaker_name
from realtime.session.speakers import speaker_number


class AudioClock:
    """Seconds since the audio began: by the wall clock, or by the audio's length if it came faster than real time."""

    def __init__(self) -> None:
        self._time = asyncio.get_running_loop().time
        self._began: float | None = None
        self._received = 0

    def advance(self, samples: int) -> None:
        """Count a chunk of audio. The audio began when the first chunk arrived, minus the length of that chunk."""
        if self._began is None:
            self._began = self._time() - samples / MODEL_RATE
        self._received += samples

    @property
    def received_s(self) -> float:
        """Seconds of audio so far, with gaps."""
        return self._received / MODEL_RATE

    @property
    def now(self) -> float:
        return 0.0 if self._began is None else max(self._time() - self._began, self.received_s)


@dataclass(slots=True)
class _Turn:
    """A turn whose final is not shown yet: its streamed text, then its final."""

    text: str = ""
    words: list[ShownWord] = field(default_factory=list)
    # When each word was shown that has no times yet.
    shown: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_WORDS))
    is_final: bool = False
    # Of a long turn: whether its first lines have been shown as final already, and where they end in seconds, if words
    # have times.
    has_scrolled: bool = False
    scrolled_until: float = 0.0


class CaptionOutput:
    """Shows the events of a session: text in the terminal and the file, problems in the line below the captions.

    Streamed text is shown as it comes. The final of a turn, which may have better words, replaces it and stays. Of a
    long turn only the last `MAX_OPEN_CHARACTERS` can be replaced; the text before them is final as it was streamed.
    Turns become final in the order in which they began.
    """

    def __init__(
        self, captions: CaptionView, clock: AudioClock, file: TranscriptFile | None, speakers: bool = False
    ) -> None:
        # Time of the last text, on the event loop's clock.
        self.last_text_at = 0.0
        self._captions = captions
        self._clock = clock
        self._file = file
        # Whether the finals name speakers, and the last one of whom a line was shown.
        self._names_speakers = speakers
        self._speaker: int | None = None
        # The current problems, by kind.
        self._problems: dict[str, str] = {}
        # Gaps in the audio (start, end in seconds) that wait for the first final word after them.
        self._gaps: deque[tuple[float, float]] = deque(maxlen=MAX_GAPS)
        # Item id -> turn, in the order in which they began.
        self._turns: dict[str, _Turn] = {}
        # The id of the server's session.
        self._session: str | None = None
        if file is not None:
            file.on_problem = lambda text: self.show_problem("disk", text)

    def on_event(self, event: dict[str, Any]) -> None:
        """Handle an event of the server. Raises CommandFailed for an error event."""
        match event.get("type"):
            case kind if kind == DELTA:
                self._on_delta(self._turn_of(event), event["delta"], _shown_words(event))
            case kind if kind == COMPLETED:
                self._on_final(self._turn_of(event), str(event["transcript"]), _shown_words(event))
            case kind if kind == FAILED:
                self._turn_of(event).is_final = True
                self._settle()
                self.show_problem("turn", f"a turn failed: {event['error'].get('message')}")
            case "session.updated":
                # The session could not be resumed, and a new one has begun: finals of the old one do not come any more.
                if (session := event["session"].get("id")) != self._session:
                    self._settle(all_turns=True)
                    self._session = session
            case "error" if not is_expected(event):
                raise CommandFailed(f"the server says: {event['error'].get('message')}")

    def _turn_of(self, event: dict[str, Any]) -> _Turn:
        return self._turns.setdefault(str(event.get("item_id")), _Turn())

    def _on_delta(self, turn: _Turn, delta: str, words: Sequence[ShownWord]) -> None:
        self.last_text_at = asyncio.get_running_loop().time()
        turn.text += delta
        turn.words += words
        self._captions.measure_delays(turn.shown, delta, words, self._clock.now)
        while len(self._turns) > MAX_OPEN_TURNS:
            next(iter(self._turns.values())).is_final = True
            self._settle()
        if len(turn.text) > MAX_OPEN_CHARACTERS and turn is next(iter(self._turns.values())):
            self._scroll(turn)
        self._show_open()

    def _scroll(self, turn: _Turn) -> None:
        """Show the first lines of a long turn as final, except words whose times may still come."""
        lines = caption_lines(turn.text, turn.words)
        open_characters = len(turn.text)
        for line, words in lines[:-1]:
            if open_characters <= MAX_OPEN_CHARACTERS or (turn.words and not words):
                break
            self._add(line, words or self._untimed(line))
            open_characters -= len(line)
            turn.words = turn.words[len(words) :]
            turn.text = turn.text.lstrip()[len(line) :]
            turn.has_scrolled = True
            turn.scrolled_until = words[-1].end if words else turn.scrolled_until

    def _on_final(self, turn: _Turn, text: str, words: Sequence[ShownWord]) -> None:
        self.last_text_at = asyncio.get_running_loop().time()
        # The last word of a turn has its times only now.
        self._captions.measure_delays(turn.shown, "", words[max(0, len(words) - len(turn.shown)) :], self._clock.now)
        if words and turn.scrolled_until:
            shown_count = sum((word.start + word.end) / 2 < turn.scrolled_until for word in words)
            turn.text, turn.words = split_at_word(text, words, shown_count)[1], list(words[shown_count:])
        elif not turn.has_scrolled:
            turn.text, turn.words = text, list(words)
        turn.is_final = True
        self._settle()

    def _settle(self, all_turns: bool = False) -> None:
        """Show and save the turns that are final, up to the first one that is not."""
        while self._turns:
            name, turn = next(iter(self._turns.items()))
            if not (turn.is_final or all_turns):
                break
            del self._turns[name]
            self._add(turn.text, self._words_of(turn))
        self._show_open()

    def _words_of(self, turn: _Turn) -> list[ShownWord]:
        """The words of a turn; if the server sends no word times, with the time at which they were shown."""
        return turn.words or self._untimed(turn.text)

    def _untimed(self, text: str) -> list[ShownWord]:
        """The words of a text, with the present as their time."""
        now = self._clock.now
        return [ShownWord(word, now, now) for word in text.split()]

    def _show_open(self) -> None:
        self._captions.show_open("  ".join(turn.text.strip() for turn in self._turns.values()))
        if self._file is not None:
            self._file.show([_timed(word) for turn in self._turns.values() for word in self._words_of(turn)])

    def _add(self, text: str, words: Sequence[ShownWord]) -> None:
        """Show and save final text with its words, divided at gaps and changes of the speaker, and into lines."""
        while words:
            count = len(words)
            if self._gaps:
                count = next((index for index, word in enumerate(words) if word.end > self._gaps[0][1]), count)
                if not count:
                    self._show_gap()
                    continue
            prefix = ""
            if self._names_speakers:
                speaker = words[0].speaker
                count = next((index for index in range(count) if words[index].speaker != speaker), count)
                if speaker is not None and speaker != self._speaker:
                    prefix, self._speaker = f"{speaker_name(speaker)}: ", speaker
            part, text = (text, "") if count == len(words) else split_at_word(text, words, count)
            for line, line_words in caption_lines(part, words[:count]):
                self._captions.add_line(prefix + line, line_words)
                prefix = ""
            if self._file is not None:
                self._file.add([_timed(word) for word in words[:count]])
            words = words[count:]

    def end(self) -> None:
        """No more events come: what was streamed is final, and the gaps after the last word are shown."""
        self._settle(all_turns=True)
        while self._gaps:
            self._show_gap()

    def on_gap(self, start: float, end: float) -> None:
        """Audio is missing between these seconds. It is shown before the first final word that comes after it."""
        self._gaps.append((start, end))

    def _show_gap(self) -> None:
        start, end = self._gaps.popleft()
        self._captions.gap(start, end)
        if self._file is not None:
            self._file.add_gap(start, end)

    def show_problem(self, kind: str, text: str) -> None:
        """Show a problem of this kind; an empty text removes it."""
        self._problems[kind] = text
        self._captions.note("; ".join(filter(None, self._problems.values())))


def _timed(word: ShownWord) -> TimedWord:
    start, end = round(word.start * MODEL_RATE), round(word.end * MODEL_RATE)
    return TimedWord(word.text, start, end, confidence=word.confidence, speaker=word.speaker)


def _shown_words(event: dict[str, Any]) -> list[ShownWord]:
    return [
        ShownWord(word["word"], word["start"], word["end"], word.get("confidence"), speaker_number(word.get("speaker")))
        for word in event.get("words") or ()
    ]


# Audio is sent in chunks of 80 ms.
CHUNK_SAMPLES = MODEL_RATE * 80 // 1000
TURN_DETECTION = {"type": "server_vad", "silence_duration_ms": 500}
# Seconds without text after the end of the audio before the command gives up.
LAST_WORDS_S = 15.0

# Gaps that wait for the first word after them; beyond that the oldest marks are dropped.
MAX_GAPS = 1000
# Most characters of a turn that may still change: more would not fit into a terminal.
MAX_OPEN_CHARACTERS = 600
# Most turns without a final; beyond that the oldest is final as it was streamed.
MAX_OPEN_TURNS = 16

# Chunks of audio at 16 kHz in real time. A number is a gap of that many samples.
AudioSource = AsyncIterator[Samples | int]


def run(options: argparse.Namespace, doing: str, sound: Callable[[EndOnInterrupt], AudioSource]) -> int:
    """Show live captions of a source until it ends or Ctrl-C, and return the exit code.

    `sound` makes the source; it is called when the captions begin. `doing` is a text for the user.
    """
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
    """Show captions of a file in real time. Raises FileFailed if the file cannot be read."""
    try:
        await caption(as_it_comes(path) if path == STANDARD_INPUT else paced(path), options)
    except (AudioError, OSError) as error:
        raise FileFailed(str(error)) from error


async def paced(path: Path) -> AudioSource:
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


async def as_it_comes(path: Path) -> AudioSource:
    """Chunks of a pipe as they arrive; the writer sets the pace."""
    async for piece in read_pieces(path, CHUNK_SAMPLES):
        for chunk in _chunks(piece):
            yield chunk


async def until(sound: AudioSource, ended: Callable[[], bool]) -> AudioSource:
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
    sound: AudioSource, options: argparse.Namespace, file: TranscriptFile | None = None, *, can_wait: bool = True
) -> None:
    """Show captions of the audio until it ends, and save them to `file`.

    `can_wait` is False for a microphone, whose audio cannot wait for a server. Raises CommandFailed, EngineError, and
    errors of `sound`.
    """
    wanted = TranscriptionOptions.of(options)
    if options.server:
        key = os.environ.get(KEY_VARIABLE)
        try:
            if wanted.given():
                await asyncio.to_thread(warn_unsupported_options, HttpClient(options.server, key), wanted)
            await _through_server(options.server, key, sound, options, wanted, file, can_wait)
        except CannotConnect as error:
            raise CommandFailed(str(error)) from error
        return
    wanted = wanted.without_unsupported(options.model)
    async with _own_server(options.model, options.device) as (url, key):
        await _through_server(url, key, sound, options, wanted, file, can_wait)


@asynccontextmanager
async def _own_server(model: str, device: str) -> AsyncIterator[tuple[str, str]]:
    """A server for this command alone, on a free port of this machine and with a key of its own: (URL, key)."""
    from realtime.app import listening
    from realtime.config import AuthConfig, Config, LimitsConfig, Secret, ServerConfig

    key = secrets.token_urlsafe()
    # Its only session is not refused because the machine is slow.
    limits = LimitsConfig(max_load=0.0)
    config = Config(ServerConfig(host="127.0.0.1", port=0), AuthConfig(keys=(Secret(key),)), limits)
    async with file_transcription.local_engine(model, device) as engine, listening(engine, config) as server:
        yield server.url, key


async def _through_server(
    url: str,
    key: str | None,
    sound: AudioSource,
    options: argparse.Namespace,
    wanted: TranscriptionOptions,
    file: TranscriptFile | None,
    can_wait: bool,
) -> None:
    clock = AudioClock()
    asked = SessionOptions(
        MODEL_RATE,
        TURN_DETECTION,
        None,
        wanted.language,
        wanted.prompt,
        wanted.keywords,
        wanted.task,
        wanted.speakers,
        publish=getattr(options, "publish", None),
    )
    session = ResumingSession(realtime_url(url), key, asked)
    with CaptionView(Console(), show_words=options.words) as captions:
        caption_output = CaptionOutput(captions, clock, file, wanted.speakers)

        async def send(samples: Samples | int) -> None:
            if isinstance(samples, int):
                caption_output.on_gap(clock.received_s - samples / MODEL_RATE, clock.received_s)
                return session.append_gap(samples)
            if can_wait:
                await session.wait_for_room(len(samples))
            session.append((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())
            if session.unacknowledged.lost:
                caption_output.show_problem(
                    "sound", f"{session.unacknowledged.lost / MODEL_RATE:.0f} s of audio were lost meanwhile"
                )

        async def finish() -> None:
            session.finish()

        running = session.run(caption_output.on_event, partial(caption_output.show_problem, "line"))
        try:
            await both(_feed(sound, clock, captions, send, finish), running, lambda: caption_output.last_text_at)
        finally:
            caption_output.end()


async def _feed(
    sound: AudioSource,
    clock: AudioClock,
    captions: CaptionView,
    send: Callable[[Samples | int], Awaitable[None]],
    finish: Callable[[], Awaitable[None]],
) -> None:
    """Send the audio, and finish the session even if the source of the audio fails."""
    try:
        async for samples in sound:
            clock.advance(samples if isinstance(samples, int) else len(samples))
            captions.advance(clock.now)
            await send(samples)
    except asyncio.CancelledError:
        raise
    except Exception:
        await finish()
        raise
    await finish()


async def both(
    feeding: Coroutine[Any, Any, None], listening: Coroutine[Any, Any, None], last_text_at: Callable[[], float]
) -> None:
    """Run both until they end; if `listening` ends first, `feeding` is cancelled.

    After the audio has ended, text is awaited for `LAST_WORDS_S` since the last text (`last_text_at`).
    """
    time = asyncio.get_running_loop().time
    feeder, listener = asyncio.create_task(feeding), asyncio.create_task(listening)
    try:
        await asyncio.wait((feeder, listener), return_when=asyncio.FIRST_COMPLETED)
        ended = time()
        while not listener.done():
            wait_s = max(ended, last_text_at()) + LAST_WORDS_S - time()
            if wait_s <= 0:
                raise CommandFailed(f"the audio has ended, and no text arrived for {LAST_WORDS_S:g} s")
            await asyncio.wait((listener,), timeout=wait_s)
        await listener
        await feeder
    finally:
        for task in (feeder, listener):
            task.cancel()
        await asyncio.gather(feeder, listener, return_exceptions=True)
