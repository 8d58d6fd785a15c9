"""A deterministic engine for gateway tests: it behaves like the real one and says a word for each stretch of sound.

Speech probabilities follow the signal's energy, words follow the audio heard (one per `WORD_SAMPLES` of sound) and come
out a delay later, or at a flush. Nothing depends on the clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from engine import messages
from engine.boundary.input_cache import SenderCache
from engine.client.link import ItemChecker
from engine.client.pool import Capacity
from engine.client.prepared_audio import Rendered, render
from engine.errors import AtCapacity, EngineUnreachable, StreamFinished
from engine.options import Options
from engine.server.speech_track import SpeechTrack
from engine.spec import NAMES, ModelSpec
from tests.realtime.speech_tracks import judge

RATE = 16_000
FRAME = 512
# Log-probability of every word that has none of its own.
CHANCE = -0.25
WORD_SAMPLES = 6_400
DELAY_SAMPLES = 4_800
LOUD = 0.01
# A speaker is decided when this much audio has followed.
LABEL_SAMPLES = 16_000
# What models of the real families take; their own tests compare.
ENGLISH = Options(languages=("en",))
MULTILINGUAL = Options(languages=tuple(NAMES)[:99], detects_language=True, translates=True, prompt=True)
SPEC = ModelSpec(
    name="fake-model", sample_rate=RATE, samples_per_position=1280, default_delay_positions=6, max_delay_positions=30
)


def tone(seconds: float, rate: int = 24_000, amplitude: float = 0.3) -> bytes:
    """Sound the fake takes for speech, as PCM16."""
    times = np.arange(round(seconds * rate)) / rate
    return (np.sin(2 * np.pi * 440 * times) * amplitude * 32767).astype("<i2").tobytes()


def silence(seconds: float, rate: int = 24_000) -> bytes:
    return bytes(2 * round(seconds * rate))


class FakeStream:
    """One stream; `script` knobs on the engine make it misbehave."""

    def __init__(self, engine: FakeEngine, name: str, live: bool = True) -> None:
        self.id = name
        self.samples = 0
        self.heard: list[NDArray[np.float32]] = []
        self.flushes: list[int] = []
        self.turns: messages.TurnRule | None = None
        self.track = SpeechTrack()
        self.finished = False
        self.aborted = False
        self._engine = engine
        self._muted = len(engine.streams) < engine.mute_first
        self._outputs: asyncio.Queue[messages.Output] = asyncio.Queue()
        self._frame_rest = np.empty(0, np.float32)
        self._frames = 0
        self._loud_samples = 0
        self._words = 0
        self._pending: list[messages.Word] = []
        # Samples after which a window of a file is read; 0 for live sound, and where files are read word by word.
        self._window = 0 if live else round(engine.file_window_s * RATE)
        self._windows = 0
        self._unfinished: messages.Word | None = None
        # With speaker labels: the spans that are not decided yet. Two words of one speaker follow two of the other.
        self.labels = False
        self._undecided: list[messages.LabelSpan] = []
        self._voices: dict[int, int] = {}

    async def feed(self, samples: NDArray[np.float32]) -> None:
        self._check()
        if self._engine.feed_delay_s:
            await asyncio.sleep(self._engine.feed_delay_s * len(samples) / RATE)
        self._hear(samples)

    def feed_now(self, samples: NDArray[np.float32]) -> bool:
        if self._engine.feed_delay_s or self.finished or self.aborted:
            return False
        self._hear(samples)
        return True

    async def gap(self, samples: int) -> None:
        self._check()
        self.samples += samples
        self._listen(np.zeros(samples, np.float32))

    def change_turns(self, turns: messages.TurnRule | None) -> None:
        self._check()
        self.turns = turns
        self.track.change(turns, self.samples)

    async def flush(self, pause: int | None = None, ends_speech: bool = False, turn_over: bool = False) -> int:
        self._check()
        if ends_speech:
            self.track.restart(self.samples)
        self.flushes.append(self.samples)
        if self._engine.mute_flush:
            return len(self.flushes)
        self._say(self.samples)
        self.put(messages.Flushed(self.id, len(self.flushes), self.samples))
        return len(self.flushes)

    async def finish(self) -> None:
        self._check()
        self.finished = True
        self._say(self.samples)
        self._label(len(self._undecided))
        self.put(messages.Closed(self.id, self.samples))
        self._engine.forget(self)

    async def abort(self) -> None:
        if not self.aborted and not self.finished:
            self.aborted = True
            self.put(messages.Closed(self.id, self.samples))
            self._engine.forget(self)

    def fail(self, message: str = "numbers went wrong") -> None:
        self.finished = True
        self.put(messages.Failed(self.id, "StreamFailed", message))
        self._engine.forget(self)

    def die(self) -> None:
        self.put(messages.Dead("the engine stopped"))

    def __aiter__(self) -> AsyncIterator[messages.Output]:
        return self._iterate()

    def subscribe(self, listener: Callable[[messages.Output], None]) -> None:
        self._telling = asyncio.create_task(self._tell(listener))

    async def _tell(self, listener: Callable[[messages.Output], None]) -> None:
        async for output in self:
            listener(output)

    async def _iterate(self) -> AsyncIterator[messages.Output]:
        while True:
            output = await self._outputs.get()
            if self._engine.output_delay_s:
                await asyncio.sleep(self._engine.output_delay_s)
            yield output
            if isinstance(output, messages.Closed | messages.Failed | messages.Dead):
                return

    def _check(self) -> None:
        if self.finished or self.aborted:
            raise StreamFinished(self.id, "was finished; open a new stream")

    def put(self, output: messages.Output) -> None:
        self._outputs.put_nowait(output)

    def _hear(self, samples: NDArray[np.float32]) -> None:
        if self._engine.keep_audio:
            self.heard.append(samples)
        self.samples += len(samples)
        self._listen(samples)

    def _listen(self, samples: NDArray[np.float32]) -> None:
        joined = np.concatenate((self._frame_rest, samples))
        whole = len(joined) // FRAME * FRAME
        self._frame_rest = joined[whole:]
        self._speech(joined[:whole])
        self._say(self.samples - DELAY_SAMPLES)

    def _speech(self, samples: NDArray[np.float32]) -> None:
        if not len(samples):
            return
        frames = samples.reshape(-1, FRAME)
        loud = np.sqrt((frames**2).mean(axis=1)) > LOUD
        start = self._frames * FRAME
        for is_loud in loud:
            if is_loud:
                self._loud_samples += FRAME
                if self._loud_samples >= WORD_SAMPLES:
                    self._loud_samples -= WORD_SAMPLES
                    self._words += 1
                    end = (self._frames + 1) * FRAME
                    text = self._engine.word(self._words)
                    chances = [(f" {text}".encode(), self._engine.chances.get(text, CHANCE))]
                    self._pending.append(messages.Word(text, max(0, end - WORD_SAMPLES), end, chances))
                    speaker = 0 if self._engine.one_voice else (self._words - 1) // 2 % 2
                    self._undecided.append((max(0, end - WORD_SAMPLES), end, speaker, 0.9))
            self._frames += 1
        probabilities = [0.99 if is_loud else 0.01 for is_loud in loud]
        self.put(judge(self.track, messages.Speech(self.id, start, FRAME, probabilities)))
        self._label(sum(self._frames * FRAME >= end + LABEL_SAMPLES for _, end, _, _ in self._undecided))

    def _label(self, count: int) -> None:
        """Decide the next spans, and guess the others."""
        decided, self._undecided = self._undecided[:count], self._undecided[count:]
        if self.labels and (decided or self._undecided):
            for start, end, speaker, _ in decided:
                self._voices[speaker] = self._voices.get(speaker, 0) + end - start
            total = np.arange(192, dtype="<i4").tobytes()
            voices = [{"number": number, "weight": 1, "total": total} for number in self._voices]
            state = {"labels": {"voices": voices}} if decided else None
            unheard = self._frames * FRAME - self._loud_samples
            settled = self._undecided[0][0] if self._undecided else unheard
            self.put(messages.Labels(self.id, decided, list(self._undecided), state, settled))

    def _say(self, until: int) -> None:
        if self._window:
            last = until == self.samples
            if last or self.samples // self._window > self._windows:
                self._windows = self.samples // self._window
                self._say_window(last)
            return
        while self._pending and self._pending[0].end_sample <= max(until, 0) + FRAME:
            word = self._pending.pop(0)
            if not self._muted:
                self.put(messages.Text(self.id, f" {word.text}", [word], [self._words], word.end_sample))

    def _say_window(self, last: bool) -> None:
        """As windowed models read a file: all text of a window at once, and a word ends where the next one begins.

        The last word is complete when the next window is read, and so is the mark behind it.
        """
        before, words = self._unfinished, self._pending
        self._pending, self._unfinished = [], None
        delta = "".join(f" {word.text}" for word in words)
        if before is not None:
            delta, words = before.text[-1] + delta, [before, *words]
        for word, following in zip(words, words[1:], strict=False):
            word.end_sample = following.start_sample
        if not last and words:
            delta, self._unfinished = delta[:-1], words.pop()
        if delta or words:
            self.put(messages.Text(self.id, delta, words, [self._words], self.samples))


class FakeEngine:
    """The engine client's face. Streams are kept for tests to look at."""

    def __init__(self, slots: int = 64, words: list[str] | None = None) -> None:
        self.spec = SPEC
        self.ready = True
        self.slots = slots
        self.streams: list[FakeStream] = []
        self.opened: list[dict[str, object]] = []
        # What each opened stream was given to go on with speaker labels.
        self.labels_resumed: list[tuple[messages.Saved, int] | None] = []
        self.active: set[str] = set()
        # All words are of one speaker.
        self.one_voice = False
        self.words = words
        # Log-probabilities of some words.
        self.chances: dict[str, float] = {}
        self.feed_delay_s = 0.0
        # Files are read in windows of so many seconds, as by windowed models; 0: word by word.
        self.file_window_s = 0.0
        self.output_delay_s = 0.0
        self.keep_audio = False
        # So many first streams hear but say nothing.
        self.mute_first = 0
        self.mute_flush = False
        self.refuse_open: Exception | None = None
        self.injected: list[messages.Item] = []
        self.takes(MULTILINGUAL)

    def takes(self, options: Options) -> None:
        """From now on the model takes these options and no others."""
        self.spec = replace(SPEC, options=options)

    def word(self, number: int) -> str:
        return self.words[(number - 1) % len(self.words)] if self.words else f"w{number}"

    def render(self, samples: NDArray[np.float32], delay_positions: int | None = None) -> Rendered:
        return render(ItemChecker("preparing", SPEC, SenderCache(0)), samples, SenderCache(0), delay_positions)

    async def inject(self, items: Sequence[messages.Item | None]) -> int:
        checked = ItemChecker("main", SPEC, SenderCache(0)).check(items)
        self.injected += [item for item in checked if item.payload is not None]
        return len(self.injected)

    def capacity(self) -> Capacity:
        used, total = len(self.active), self.slots
        return Capacity(
            used=used,
            total=total,
            speaking=0,
            load=0.1,
            retry_after_s=7.0,
            counted=used,
            holds=total,
            free=total - used,
            load_per_stream=0.01,
        )

    async def open(
        self,
        stream: str,
        *,
        live: bool = True,
        delay_positions: int | None = None,
        options: dict[str, str] | None = None,
        turns: messages.TurnRule | None = None,
        track: messages.TrackState | None = None,
        heard_until: int = 0,
        labels: tuple[messages.Saved, int] | None = None,
    ) -> FakeStream:
        await asyncio.sleep(0)
        if self.refuse_open is not None:
            raise self.refuse_open
        self.spec.options.check(options or {})
        if len(self.active) >= self.slots:
            raise AtCapacity(stream, "no room")
        if not self.ready:
            raise EngineUnreachable("no engine")
        opened = FakeStream(self, stream, live)
        opened.turns = turns
        opened.track = SpeechTrack(turns)
        if track is not None:
            opened.track.continue_from(track)
        opened.labels = "speakers" in (options or {})
        self.opened.append({"stream": stream, "live": live, "delay": delay_positions, "options": options})
        self.labels_resumed.append(labels)
        self.streams.append(opened)
        self.active.add(stream)
        return opened

    def forget(self, stream: FakeStream) -> None:
        self.active.discard(stream.id)
