"""One process of clients for `benchmarks.gpu_server`: sessions that speak in real time and note when words come back.

Audio goes out when its last sample has been spoken, on an absolute schedule. A word's lag is the time from the moment
its last sample was sent to the moment the delta with its text came, less the model's delay; that of a final text
counts from the last sample of speech, before the silence that ended the turn. A model with random weights says words in
pauses too, which wait for the turn before them to be completed: only words within speech are scored. No two sessions
send the same samples on the same grid, so that no cache can answer for the model. Orders come on stdin; when all is
prepared, `ready` goes to stdout; then the schedule comes, and the findings go out at the end, all of it line by line.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from benchmarks.speech_sound import SAMPLE_RATE, resampled, speech
from realtime.bench.record import SPEECH_STOPPED
from realtime.client.wire_client import COMPLETED, DELTA

# The silence that ends a turn, as sessions ask for it.
TURN_SILENCE_MS = 500
# A refused client asks again after so long, as one that heeds Retry-After would.
ASK_AGAIN_S = 1.0
# People take turns: one period of speech and silence.
PERIOD_S = 20.0
SAMPLES_PER_POSITION = 1280


@dataclass(frozen=True)
class Orders:
    """What one process of clients is to do."""

    urls: list[str]
    sessions: list[int]
    all_sessions: int
    rate: int
    append_ms: int
    delay_ms: int
    silent_share: float
    recording: str | None
    # Where somebody speaks in the sound, in seconds: only words there are scored.
    speech: list[tuple[float, float]]
    # That sessions tell the model to expect.
    language: str | None = None


@dataclass(frozen=True)
class Schedule:
    """Moments on the machine's monotonic clock. The first session of all processes connects at `begins`, the last one
    `join_s` later; what happens between the other two is counted, and then all hang up."""

    begins: float
    join_s: float
    counts_from: float
    counts_until: float


class Track:
    """Sound that goes round, as bytes of 16-bit samples."""

    def __init__(self, samples: NDArray[np.int16]) -> None:
        self.samples = len(samples)
        # Twice, so that a piece never has to be put together.
        self._bytes = memoryview(np.concatenate([samples, samples]).tobytes())

    def piece(self, start: int, count: int) -> memoryview:
        start %= self.samples
        return self._bytes[2 * start : 2 * (start + count)]


@dataclass
class Findings:
    """Of all sessions of a process. `lags` are pairs of seconds since counting began and the lag in milliseconds, of
    words in speech, less the model's delay; words in pauses are counted. `finals` are those of final texts."""

    lags: list[tuple[float, float]] = field(default_factory=list)
    finals: list[float] = field(default_factory=list)
    in_pauses: int = 0
    appends: int = 0
    late_ms: list[float] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)
    refusals: int = 0
    connected: int = 0
    failures: list[str] = field(default_factory=list)


class Client:
    """One session."""

    def __init__(
        self, number: int, orders: Orders, schedule: Schedule, sounds: tuple[Track, Track], findings: Findings
    ) -> None:
        self._number = number
        self._orders = orders
        self._schedule = schedule
        self._findings = findings
        self._url = orders.urls[number % len(orders.urls)]
        self._speech, self._quiet = sounds
        chance = np.random.default_rng(number)
        grid = SAMPLES_PER_POSITION * orders.rate // SAMPLE_RATE
        # A place of its own on the grid of items: what others send, this one never sends in the same frames.
        self._start = int(chance.integers(0, self._speech.samples // grid)) * grid + number % grid
        self._silent_from = float(chance.uniform(0, PERIOD_S))
        # When each append was sent, which were of a time of silence, and the texts whose words were not named yet.
        self._sent: list[float] = []
        self._silent: set[int] = set()
        self._texts: deque[tuple[str, float]] = deque()
        # Where the speech of a turn ended, in seconds, by the turn's item.
        self._speech_ends: dict[str, float] = {}

    async def run(self) -> None:
        schedule = self._schedule
        await _sleep_until(schedule.begins + self._number / self._orders.all_sessions * schedule.join_s)
        while time.monotonic() < schedule.counts_until:
            try:
                socket = await connect(self._url, compression=None, max_size=1 << 24, proxy=None, open_timeout=30)
            except InvalidStatus:
                self._findings.refusals += 1
                await asyncio.sleep(ASK_AGAIN_S)
                continue
            except (OSError, TimeoutError) as error:
                self._findings.failures.append(f"{type(error).__name__}: {error}")
                return
            async with socket:
                await self._converse(socket)
            return
        self._findings.failures.append("never let in")

    async def _converse(self, socket: ClientConnection) -> None:
        detection = {"type": "server_vad", "silence_duration_ms": TURN_SILENCE_MS}
        audio: dict[str, Any] = {
            "format": {"type": "audio/pcm", "rate": self._orders.rate},
            "turn_detection": detection,
        }
        if self._orders.language:
            audio["transcription"] = {"language": self._orders.language}
        session = {
            "type": "transcription",
            "audio": {"input": audio},
            "include": ["item.input_audio_transcription.words", "session.resume", "input_audio_buffer.acks"],
        }
        await socket.send(json.dumps({"type": "session.update", "session": session}))
        self._findings.connected += 1
        listener = asyncio.create_task(self._listen(socket))
        try:
            await self._speak(socket)
        except ConnectionClosed as error:
            self._findings.failures.append(f"closed: {error}")
        finally:
            listener.cancel()
            await asyncio.gather(listener, return_exceptions=True)

    async def _speak(self, socket: ClientConnection) -> None:
        orders, schedule, findings = self._orders, self._schedule, self._findings
        size, step = orders.rate * orders.append_ms // 1000, orders.append_ms / 1000
        spoken, place = time.monotonic(), self._start
        while spoken < schedule.counts_until:
            spoken += step
            await _sleep_until(spoken)
            sound = self._speech
            if self._is_silent(spoken):
                sound = self._quiet
                self._silent.add(len(self._sent))
            now = time.monotonic()
            self._sent.append(now)
            if schedule.counts_from <= now < schedule.counts_until:
                findings.appends += 1
                findings.late_ms.append(1000 * (now - spoken))
            text = base64.b64encode(sound.piece(place, size)).decode()
            place += size
            await socket.send(f'{{"type":"input_audio_buffer.append","audio":"{text}"}}')

    def _is_silent(self, moment: float) -> bool:
        return (moment + self._silent_from) % PERIOD_S < self._orders.silent_share * PERIOD_S

    async def _listen(self, socket: ClientConnection) -> None:
        async for frame in socket:
            now = time.monotonic()
            self._take(json.loads(frame), now)

    def _take(self, event: dict[str, Any], now: float) -> None:
        kind = event["type"]
        self._findings.events[kind] += 1
        if kind == DELTA:
            self._texts.extend((text, now) for text in event["delta"].split())
            for word in event.get("words", ()):
                self._note(word)
        elif kind == SPEECH_STOPPED:
            self._speech_ends[event["item_id"]] = (event["audio_end_ms"] - TURN_SILENCE_MS) / 1000
        elif kind == COMPLETED and event["transcript"] and event["item_id"] in self._speech_ends:
            self._findings.finals += self._lag_ms(self._speech_ends.pop(event["item_id"]), now)

    def _note(self, word: dict[str, Any]) -> None:
        while self._texts:
            text, came = self._texts.popleft()
            if text == word["word"]:
                break
        else:
            return
        for lag_ms in self._lag_ms(word["end"], came):
            if self._is_in_speech(word["start"], word["end"]):
                moment, lag_ms = came - self._schedule.counts_from, lag_ms - self._orders.delay_ms
                self._findings.lags.append((round(moment, 3), round(lag_ms, 2)))
            else:
                self._findings.in_pauses += 1

    def _lag_ms(self, end: float, came: float) -> list[float]:
        """From the moment the sample at `end` was sent; none if it does not count."""
        append = int(end * 1000 / self._orders.append_ms - 1e-6)
        if append >= len(self._sent) or not self._schedule.counts_from <= came < self._schedule.counts_until:
            return []
        return [1000 * (came - self._sent[append])]

    def _is_in_speech(self, start: float, end: float) -> bool:
        """Whether somebody speaks from the first to the last moment of a word, by the detector that heard the sound."""
        appends = range(int(start * 1000 / self._orders.append_ms), int(end * 1000 / self._orders.append_ms - 1e-6) + 1)
        if not self._silent.isdisjoint(appends):
            return False
        place = (self._start / self._orders.rate + start) % (self._speech.samples / self._orders.rate)
        return any(first <= place and place + end - start <= last for first, last in self._orders.speech)


async def _sleep_until(moment: float) -> None:
    await asyncio.sleep(max(0.0, moment - time.monotonic()))


def sounds_of(orders: Orders) -> tuple[Track, Track]:
    """Speech, and a room in which nobody speaks."""
    sound = speech(None if orders.recording is None else Path(orders.recording))
    spoken = (np.clip(resampled(sound, SAMPLE_RATE, orders.rate), -1, 1) * 32767).astype(np.int16)
    quiet = (np.random.default_rng(0).standard_normal(len(spoken)) * 3).astype(np.int16)
    return Track(spoken), Track(quiet)


async def play(orders: Orders, schedule: Schedule, sounds: tuple[Track, Track]) -> Findings:
    findings = Findings()
    clients = [Client(number, orders, schedule, sounds, findings) for number in orders.sessions]
    await asyncio.gather(*(client.run() for client in clients))
    return findings


def main() -> None:
    orders = Orders(**json.loads(sys.stdin.readline()))
    sounds = sounds_of(orders)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    schedule = Schedule(**json.loads(sys.stdin.readline()))
    # All sessions begin with the same few objects; the collector would only walk them.
    gc.freeze()
    findings = asyncio.run(play(orders, schedule, sounds))
    sys.stdout.write(json.dumps(vars(findings)) + "\n")


if __name__ == "__main__":
    main()
