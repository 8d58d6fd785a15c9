"""Clients that send speech in real time over sockets, from their own processes. Used by several benchmarks.

A `PacedClient` measures lags. It sends audio when its last sample has been spoken, on an absolute schedule. A word's
lag is the time from sending its last sample to receiving the delta with its text, minus the model's delay; the lag of
a final text counts from the last sample of speech, before the silence that ends the turn. A model with random weights
outputs words in pauses too, which wait until the turn before is completed: only words within speech are scored. No two
sessions send the same samples at the same offsets, so that no cache can answer for the model.

A `ResumingClient` resumes its session after a lost connection, sends lost audio again, waits for its last words, and
records what happened.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from websockets.exceptions import ConnectionClosed

from benchmarks.measuring import RunFailed, cpu_seconds, percentiles
from benchmarks.scoring import differing_words, plain_words
from benchmarks.sounds import SAMPLE_RATE, Samples, pcm16, resampled, speech
from realtime.bench.record import COMMITTED, SPEECH_STOPPED
from realtime.client import lasting_session
from realtime.client.lasting_session import INCLUDE, LastingSession
from realtime.client.wire_client import (
    COMPLETED,
    DELTA,
    CannotConnect,
    Refused,
    SessionOptions,
    WireSession,
    open_session,
)

# The silence that ends a turn, as sessions ask for it.
TURN_SILENCE_MS = 500
TURNS = {"type": "server_vad", "silence_duration_ms": TURN_SILENCE_MS}
# Seconds after which a refused client tries again, as one that respects Retry-After would.
ASK_AGAIN_S = 1.0
# One period of speech and silence, for sessions that are silent for a share of the time.
PERIOD_S = 20.0
SAMPLES_PER_POSITION = 1280
PACKET_S = 0.08


@dataclass(frozen=True)
class Orders:
    """The task of the clients of one process."""

    urls: list[str]
    sessions: list[int]
    all_sessions: int
    # A WAV file; None: synthetic voices.
    recording: Path | None
    rate: int = SAMPLE_RATE
    append_ms: int = 80
    # The model's own delay, which is subtracted from the lag.
    delay_ms: int = 0
    silent_share: float = 0.0
    # Spans of speech in the audio, in seconds: only words within them are scored.
    speech: Sequence[tuple[float, float]] = ()
    language: str | None = None
    # Of resuming clients: for how long each speaks, and whether each has a part of the sound of its own.
    seconds: float = 0.0
    own_parts: bool = True


@dataclass(frozen=True)
class Schedule:
    """Moments on the machine's monotonic clock. The first session of all processes connects at `begins`, the last one
    `join_s` later. Paced clients count what happens between the other two, and then hang up."""

    begins: float
    join_s: float
    counts_from: float = 0.0
    counts_until: float = 0.0

    def joins_at(self, number: int, all_sessions: int) -> float:
        return self.begins + number / all_sessions * self.join_s


async def sleep_until(moment: float) -> None:
    await asyncio.sleep(max(0.0, moment - time.monotonic()))


# Clients that measure lags


class Track:
    """Audio played in a loop, as bytes of 16-bit samples."""

    def __init__(self, data: bytes) -> None:
        self.samples = len(data) // 2
        # Stored twice, so that every piece is one slice.
        self._bytes = memoryview(data + data)

    def piece(self, start: int, count: int) -> memoryview:
        start %= self.samples
        return self._bytes[2 * start : 2 * (start + count)]


@dataclass
class Findings:
    """Of all sessions of a process. `lags` are pairs of seconds since counting began and the lag in milliseconds, of
    words in speech, less the model's delay; words in pauses are counted. `finals` are lags of final texts."""

    lags: list[tuple[float, float]] = field(default_factory=list)
    finals: list[float] = field(default_factory=list)
    in_pauses: int = 0
    appends: int = 0
    late_ms: list[float] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)
    refusals: int = 0
    connected: int = 0
    failures: list[str] = field(default_factory=list)


class PacedClient:
    """One session."""

    def __init__(
        self, number: int, orders: Orders, schedule: Schedule, sounds: tuple[Track, Track], findings: Findings
    ) -> None:
        self._number = number
        self._orders = orders
        self._schedule = schedule
        self._findings = findings
        self._speech, self._quiet = sounds
        random = np.random.default_rng(number)
        grid = SAMPLES_PER_POSITION * orders.rate // SAMPLE_RATE
        # Each session has its own offset within an item, so that no two send the same frames.
        self._start = int(random.integers(0, self._speech.samples // grid)) * grid + number % grid
        self._silent_from = float(random.uniform(0, PERIOD_S))
        # Send times of appends, which appends were silent, and texts without word times yet.
        self._sent: list[float] = []
        self._silent: set[int] = set()
        self._texts: deque[tuple[str, float]] = deque()
        # End of speech of each turn in seconds, by item.
        self._speech_ends: dict[str, float] = {}

    async def run(self) -> None:
        orders, schedule, findings = self._orders, self._schedule, self._findings
        await sleep_until(schedule.joins_at(self._number, orders.all_sessions))
        while time.monotonic() < schedule.counts_until:
            try:
                async with open_session(orders.urls[self._number % len(orders.urls)]) as session:
                    await self._converse(session)
                return
            except Refused:
                findings.refusals += 1
                await asyncio.sleep(ASK_AGAIN_S)
            except CannotConnect as error:
                findings.failures.append(str(error))
                return
            except ConnectionClosed as error:
                findings.failures.append(f"closed: {error}")
                return
        findings.failures.append("never let in")

    async def _converse(self, session: WireSession) -> None:
        await session.configure(SessionOptions(self._orders.rate, TURNS, language=self._orders.language), INCLUDE)
        self._findings.connected += 1
        listener = asyncio.create_task(self._listen(session))
        try:
            await self._speak(session)
        finally:
            listener.cancel()
            await asyncio.gather(listener, return_exceptions=True)

    async def _speak(self, session: WireSession) -> None:
        orders, schedule, findings = self._orders, self._schedule, self._findings
        size, step = orders.rate * orders.append_ms // 1000, orders.append_ms / 1000
        spoken, place = time.monotonic(), self._start
        while spoken < schedule.counts_until:
            spoken += step
            await sleep_until(spoken)
            sound = self._speech
            if (spoken + self._silent_from) % PERIOD_S < orders.silent_share * PERIOD_S:
                sound = self._quiet
                self._silent.add(len(self._sent))
            now = time.monotonic()
            self._sent.append(now)
            if schedule.counts_from <= now < schedule.counts_until:
                findings.appends += 1
                findings.late_ms.append(1000 * (now - spoken))
            await session.append(sound.piece(place, size))
            place += size

    async def _listen(self, session: WireSession) -> None:
        async for event in session.events():
            self._take(event, time.monotonic())

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
        """The lag since the sample at `end` was sent; empty if it does not count."""
        append = int(end * 1000 / self._orders.append_ms - 1e-6)
        if append >= len(self._sent) or not self._schedule.counts_from <= came < self._schedule.counts_until:
            return []
        return [1000 * (came - self._sent[append])]

    def _is_in_speech(self, start: float, end: float) -> bool:
        """Whether the whole word is within speech, by the detector's spans."""
        appends = range(int(start * 1000 / self._orders.append_ms), int(end * 1000 / self._orders.append_ms - 1e-6) + 1)
        if not self._silent.isdisjoint(appends):
            return False
        place = (self._start / self._orders.rate + start) % (self._speech.samples / self._orders.rate)
        return any(first <= place and place + end - start <= last for first, last in self._orders.speech)


async def play_paced(orders: Orders, sound: Samples, schedule: Schedule) -> Findings:
    spoken = pcm16(resampled(sound, SAMPLE_RATE, orders.rate))
    quiet = (np.random.default_rng(0).standard_normal(len(spoken) // 2) * 3).astype(np.int16).tobytes()
    findings, sounds = Findings(), (Track(spoken), Track(quiet))
    clients = [PacedClient(number, orders, schedule, sounds, findings) for number in orders.sessions]
    await asyncio.gather(*(client.run() for client in clients))
    return findings


# Clients that resume after lost connections


class ResumingClient(LastingSession):
    """Sends its audio at the pace of speech, resumes after a lost connection, and waits for the last word."""

    def __init__(self, url: str, audio: bytes) -> None:
        super().__init__(url, None, SessionOptions(SAMPLE_RATE, TURNS))
        self.events: list[dict[str, Any]] = []
        self.failure = ""
        # Seconds from each loss of the connection until the session continued.
        self.resumed_s: list[float] = []
        # Sessions that the server gave it: more than one means that a session was lost.
        self.begun = 0
        self.began_at = 0.0
        self.is_speaking = True
        # Longest time without an acknowledgement of new audio.
        self.longest_wait_s = 0.0
        self._audio = audio
        self._lost_at: float | None = None
        self._heard_at: float | None = None
        self._marks: list[tuple[int, float, asyncio.Future[float]]] = []

    async def speak(self) -> None:
        """Raises CannotConnect at once if the server refuses the session."""
        speaking = asyncio.create_task(self._say())
        telling = asyncio.create_task(self.run(self.events.append, self._line))
        try:
            await asyncio.wait({speaking, telling}, return_when=asyncio.FIRST_COMPLETED)
            self.is_speaking = False
            await telling
        finally:
            self.is_speaking = False
            speaking.cancel()
            for _, _, heard in self._marks:
                heard.cancel()

    def mark(self) -> asyncio.Future[float]:
        """Seconds from now until audio that is spoken after now has been acknowledged."""
        heard = asyncio.get_running_loop().create_future()
        self._marks.append((self.kept.end + 1, time.perf_counter(), heard))
        return heard

    @property
    def text(self) -> str:
        return " ".join(event["transcript"] for event in self.events if event["type"] == COMPLETED)

    @property
    def wrong_numbers(self) -> int:
        """Event numbers that are missing or came twice."""
        numbers = [event["seq"] for event in self.events if "seq" in event]
        return sum(number != place for place, number in enumerate(numbers, 1))

    @property
    def wrong_items(self) -> int:
        """Items that were completed more or less than once."""
        done = [event["item_id"] for event in self.events if event["type"] == COMPLETED]
        committed = {event["item_id"] for event in self.events if event["type"] == COMMITTED}
        return len(done) - len(set(done)) + len(committed ^ set(done))

    def outcome(self) -> dict[str, Any]:
        """The result as data."""
        names = ("text", "failure", "begun", "resumed_s", "longest_wait_s", "wrong_numbers", "wrong_items")
        return {name: getattr(self, name) for name in names} | {"samples_lost": self.kept.lost}

    async def _say(self) -> None:
        size, due = int(PACKET_S * SAMPLE_RATE) * 2, time.perf_counter()
        for start in range(0, len(self._audio), size):
            due += PACKET_S
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            self.append(self._audio[start : start + size])
        self.finish()

    def _line(self, text: str) -> None:
        """Called with an error text when the connection is lost, and with an empty text when it is back."""
        now = time.perf_counter()
        if text:
            self._lost_at = self._lost_at or now
        elif self._lost_at is not None:
            self.resumed_s.append(now - self._lost_at)
            self._lost_at = None

    def _note(self, event: dict[str, Any]) -> None:
        super()._note(event)
        if event["type"] == "session.updated":
            self.begun += 1
            self.began_at = self.began_at or time.perf_counter()

    def _confirm(self, sample: int) -> None:
        before = self.kept.first
        super()._confirm(sample)
        if self.kept.first == before:
            return
        now = time.perf_counter()
        if self._heard_at is not None:
            self.longest_wait_s = max(self.longest_wait_s, now - self._heard_at)
        self._heard_at = now
        while self._marks and self._marks[0][0] <= self.kept.first:
            _, since, heard = self._marks.pop(0)
            if not heard.done():
                heard.set_result(now - since)


def resume_at_once() -> None:
    """Clients retry at once: the server's time is measured, not theirs."""
    lasting_session.FIRST_WAIT_S = 0.1


def own_part(sound: bytes, number: int, seconds: float) -> bytes:
    """This session's part of the audio, always the same for the same session."""
    start = int(np.random.default_rng(number).integers(0, len(sound) // 2))
    return looped(sound[2 * start :] + sound[: 2 * start], seconds)


def looped(sound: bytes, seconds: float) -> bytes:
    wanted = 2 * int(seconds * SAMPLE_RATE)
    return (sound * -(-wanted // len(sound)))[:wanted]


async def play_resuming(orders: Orders, sound: Samples, schedule: Schedule) -> list[dict[str, Any]]:
    resume_at_once()
    data = pcm16(sound)
    part = own_part if orders.own_parts else lambda data, number, seconds: looped(data, seconds)
    clients = [ResumingClient(orders.urls[0], part(data, number, orders.seconds)) for number in orders.sessions]

    async def one(number: int, client: ResumingClient) -> None:
        await sleep_until(schedule.joins_at(number, orders.all_sessions))
        try:
            await client.speak()
        except CannotConnect as error:
            client.failure = str(error)

    await asyncio.gather(*map(one, orders.sessions, clients))
    return [client.outcome() for client in clients]


def summary(outcomes: Sequence[dict[str, Any]], references: Sequence[str]) -> dict[str, Any]:
    """Figures of resuming clients. Their texts are compared with the references."""
    texts = [outcome["text"] for outcome in outcomes]
    waits = [wait for outcome in outcomes for wait in outcome["resumed_s"]]
    differ, words = differing_words(texts, references)
    pairs = zip(texts, references, strict=True)
    return {
        "sessions": len(outcomes),
        # Sessions that did not finish, and sessions that had to start again (410).
        "lost": sum(bool(outcome["failure"]) or outcome["begun"] > 1 for outcome in outcomes),
        # Lost connections, and seconds from each loss until the client had its session again.
        "connections_lost": len(waits),
        **percentiles("reconnected_s", waits, 50, 100),
        # Longest time without an acknowledgement of new audio.
        "longest_wait_s": max((outcome["longest_wait_s"] for outcome in outcomes), default=0.0),
        "words": words,
        "words_that_differ": differ,
        "sessions_that_differ": sum(plain_words(text) != plain_words(reference) for text, reference in pairs),
        "wrong_numbers": sum(outcome["wrong_numbers"] for outcome in outcomes),
        "wrong_items": sum(outcome["wrong_items"] for outcome in outcomes),
        # Samples that a client dropped because no server accepted them.
        "samples_lost": sum(outcome["samples_lost"] for outcome in outcomes),
        "failures": [outcome["failure"] for outcome in outcomes if outcome["failure"]][:20],
    }


# Processes of clients


def run_clients(play: Callable[..., Any], orders: Orders, pipe: Connection) -> None:
    """Main function of a process: prepares, reports that it is ready, gets a schedule, plays, and sends its results."""
    sound = speech(orders.recording)
    pipe.send("ready")
    schedule = pipe.recv()
    # The cycle collector would only walk the objects of all sessions.
    gc.freeze()
    pipe.send(asyncio.run(play(orders, sound, schedule)))


class ClientProcesses:
    """Sessions distributed over client processes, which are ready when the constructor returns."""

    def __init__(self, play: Callable[..., Any], sessions: int, processes: int, **orders: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for index in range(min(processes, sessions)):
            ours, theirs = context.Pipe()
            mine = Orders(sessions=list(range(index, sessions, processes)), all_sessions=sessions, **orders)
            process = context.Process(target=run_clients, args=(play, mine, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._receive()

    def begin(self, schedule: Schedule) -> None:
        for pipe in self._pipes:
            pipe.send(schedule)

    def cpu_seconds(self) -> float:
        return sum(cpu_seconds(process.pid or 0) for process in self._processes)

    def findings(self) -> list[Any]:
        """The results of all processes, when all have finished."""
        return self._receive()

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()
            process.join()

    def _receive(self) -> list[Any]:
        try:
            return [pipe.recv() for pipe in self._pipes]
        except EOFError as error:
            raise RunFailed("a process of clients ended; its error is above") from error
