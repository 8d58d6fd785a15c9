"""Clients that send speech to a server in real time over sockets, from processes of their own.

Used by several benchmarks. `ClientProcesses` starts the processes and collects their results. A `PacedClient` sends
each append when its last sample has been spoken, on an absolute schedule. It resumes its session after a lost
connection, sends lost audio again, and records what happened. A `LagClient` also measures lags: the lag of a word is
the time from sending its last sample to receiving the delta with its text, minus the model's delay; the lag of a final
text counts from the last sample of speech, before the silence that ends the turn. A model with random weights outputs
words in pauses too, which wait until the turn before is completed: only words within speech are scored. No two of these
sessions send the same samples at the same offsets, so that no cache can answer for the model.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measuring import RunFailed, cpu_seconds, percentiles, spawned
from benchmarks.scoring import differing_words, plain_words
from benchmarks.sounds import SAMPLE_RATE, Samples, pcm16, resampled, speech
from realtime.bench.load_test import COMMITTED, SPEECH_STOPPED
from realtime.client import resuming_session
from realtime.client.resuming_session import ResumingSession
from realtime.client.wire_client import COMPLETED, DELTA, CannotConnect, Refused, SessionOptions

# The silence that ends a turn, as sessions ask for it.
TURN_SILENCE_MS = 500
TURNS = {"type": "server_vad", "silence_duration_ms": TURN_SILENCE_MS}
PLAIN_SESSION = SessionOptions(SAMPLE_RATE, TURNS)
# Seconds after which a refused client tries again, as one that respects Retry-After would.
ASK_AGAIN_S = 1.0
# One period of speech and silence, for sessions that are silent for a share of the time.
PERIOD_S = 20.0
SAMPLES_PER_POSITION = 1280
APPEND_MS = 80


@dataclass(frozen=True)
class Orders:
    """The task of the clients of one process."""

    url: str
    sessions: list[int]
    all_sessions: int
    # A WAV file; None: synthetic voices.
    recording: Path | None
    rate: int = SAMPLE_RATE
    append_ms: int = APPEND_MS
    # The model's own delay, which is subtracted from the lag.
    delay_ms: int = 0
    silent_share: float = 0.0
    # Spans of speech in the audio, in seconds: only words within them are scored.
    speech: Sequence[tuple[float, float]] = ()
    language: str | None = None
    # Whether sessions ask for speaker labels, and whether their turns end by `semantic_vad`.
    speakers: bool = False
    semantic: bool = False
    # Added to the number of a session, which chooses its audio, where other processes of clients play too.
    first_number: int = 0
    # For clients that send all of their audio: its seconds, and whether each client has its own part of the sound.
    seconds: float = 0.0
    own_parts: bool = True


@dataclass(frozen=True)
class Schedule:
    """Moments on the machine's monotonic clock. The first session of all processes connects at `begins`, the last one
    `join_s` later. Clients that measure lags count between the other two moments, and then hang up."""

    begins: float
    join_s: float
    counts_from: float = 0.0
    counts_until: float = 0.0
    # From this moment on, the next text of each session is waited for.
    waits_from: float = math.inf

    def joins_at(self, number: int, all_sessions: int) -> float:
        return self.begins + number / all_sessions * self.join_s

    def counts(self, moment: float) -> bool:
        return self.counts_from <= moment < self.counts_until


async def sleep_until(moment: float) -> None:
    await asyncio.sleep(max(0.0, moment - time.monotonic()))


class PacedClient(ResumingSession):
    """Sends its appends at the pace of speech, and resumes its session after a lost connection."""

    def __init__(
        self,
        url: str,
        appends: Iterable[bytes],
        append_ms: int = APPEND_MS,
        options: SessionOptions = PLAIN_SESSION,
    ) -> None:
        super().__init__(url, None, options)
        self.events: list[dict[str, Any]] = []
        self.failure = ""
        # When each append was sent, and how late.
        self.sent_at: list[float] = []
        self.late_ms: list[float] = []
        # Why connections were lost, and seconds from each loss until the session continued.
        self.losses: list[str] = []
        self.resumed_s: list[float] = []
        # Sessions that the server gave it: more than one means that a session was lost.
        self.begun = 0
        self.began_at = 0.0
        self.is_speaking = True
        # Longest time without an acknowledgement of new audio.
        self.longest_wait_s = 0.0
        self._appends = appends
        self._append_s = append_ms / 1000
        self._lost_at: float | None = None
        self._acknowledged_at: float | None = None
        self._marks: list[tuple[int, float, asyncio.Future[float]]] = []

    async def speak(self, hangs_up: bool = False) -> None:
        """Send all appends and wait for the last text, unless the client hangs up after its last append. Raises
        CannotConnect at once if the server refuses the session."""
        speaking = asyncio.create_task(self._speak())
        listening = asyncio.create_task(self.run(self.take, self._line))
        try:
            await asyncio.wait({speaking, listening}, return_when=asyncio.FIRST_COMPLETED)
            self.is_speaking = False
            if listening.done() or not hangs_up:
                await listening
        finally:
            self.is_speaking = False
            speaking.cancel()
            listening.cancel()
            await asyncio.gather(speaking, listening, return_exceptions=True)
            for _, _, acknowledged in self._marks:
                acknowledged.cancel()

    def take(self, event: dict[str, Any]) -> None:
        self.events.append(event)

    def mark(self) -> asyncio.Future[float]:
        """Seconds from now until audio that is spoken after now has been acknowledged."""
        acknowledged = asyncio.get_running_loop().create_future()
        self._marks.append((self.unacknowledged.end + 1, time.monotonic(), acknowledged))
        return acknowledged

    def lag_s(self, end_s: float, came: float) -> float | None:
        """Seconds since the append with the sample at `end_s` was sent; None if it was not sent yet."""
        append = int(end_s / self._append_s - 1e-6)
        return came - self.sent_at[append] if append < len(self.sent_at) else None

    @property
    def text(self) -> str:
        return " ".join(event["transcript"] for event in self.events if event["type"] == COMPLETED)

    @property
    def speakers(self) -> list[str | None]:
        """The speaker of each word of the finals."""
        done = [event for event in self.events if event["type"] == COMPLETED]
        return [word.get("speaker") for event in done for word in event.get("words", ())]

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
        names = ("text", "speakers", "failure", "begun", "resumed_s", "longest_wait_s", "wrong_numbers", "wrong_items")
        return {name: getattr(self, name) for name in names} | {"samples_lost": self.unacknowledged.lost}

    async def _speak(self) -> None:
        due = time.monotonic()
        for append in self._appends:
            due += self._append_s
            await sleep_until(due)
            self.sent_at.append(time.monotonic())
            self.late_ms.append(1000 * (self.sent_at[-1] - due))
            self.append(append)
        self.finish()

    def _line(self, text: str) -> None:
        """Called with an error text when the connection is lost, and with an empty text when it is back."""
        now = time.monotonic()
        if text:
            self.losses.append(text)
            self._lost_at = self._lost_at or now
        elif self._lost_at is not None:
            self.resumed_s.append(now - self._lost_at)
            self._lost_at = None

    def _note(self, event: dict[str, Any]) -> None:
        super()._note(event)
        if event["type"] == "session.updated":
            self.begun += 1
            self.began_at = self.began_at or time.monotonic()

    def _acknowledge(self, sample: int) -> None:
        before = self.unacknowledged.first
        super()._acknowledge(sample)
        if self.unacknowledged.first == before:
            return
        now = time.monotonic()
        if self._acknowledged_at is not None:
            self.longest_wait_s = max(self.longest_wait_s, now - self._acknowledged_at)
        self._acknowledged_at = now
        while self._marks and self._marks[0][0] <= self.unacknowledged.first:
            _, since, acknowledged = self._marks.pop(0)
            if not acknowledged.done():
                acknowledged.set_result(now - since)


# Clients that measure lags


class Track:
    """Audio played in a loop, as bytes of 16-bit samples."""

    def __init__(self, data: bytes) -> None:
        self.samples = len(data) // 2
        # Stored twice, so that every piece is one slice.
        self._bytes = data + data

    def piece(self, start: int, count: int) -> bytes:
        start %= self.samples
        return self._bytes[2 * start : 2 * (start + count)]


@dataclass
class Findings:
    """Of all sessions of a process. `lags` are pairs of seconds since counting began and the lag in milliseconds, of
    words in speech, less the model's delay; words in pauses are counted. `finals` are the same of final texts.
    `next_texts` are the moments of the first text after `Schedule.waits_from`."""

    lags: list[tuple[float, float]] = field(default_factory=list)
    finals: list[tuple[float, float]] = field(default_factory=list)
    next_texts: list[float] = field(default_factory=list)
    in_pauses: int = 0
    appends: int = 0
    late_ms: list[float] = field(default_factory=list)
    refusals: int = 0
    connected: int = 0
    failures: list[str] = field(default_factory=list)


class LagClient(PacedClient):
    """Counts in `findings` by the schedule, and hangs up when the counting is over."""

    def __init__(
        self, number: int, orders: Orders, schedule: Schedule, sounds: tuple[Track, Track], findings: Findings
    ) -> None:
        turns = {"type": "semantic_vad"} if orders.semantic else TURNS
        options = SessionOptions(orders.rate, turns, language=orders.language, speakers=orders.speakers)
        super().__init__(orders.url, self._pieces(), orders.append_ms, options)
        self._orders, self._schedule, self._findings = orders, schedule, findings
        self._spoken, self._quiet = sounds
        random = np.random.default_rng(number)
        grid = SAMPLES_PER_POSITION * orders.rate // SAMPLE_RATE
        # Each session has its own offset within an item, so that no two send the same frames.
        self.start = int(random.integers(0, self._spoken.samples // grid)) * grid + number % grid
        self._silent_from = float(random.uniform(0, PERIOD_S))
        # Which appends were silent, texts without word times yet, and the end of speech of each turn by item.
        self.silent: set[int] = set()
        self.texts: deque[tuple[str, float]] = deque()
        self._speech_ends: dict[str, float] = {}
        self._waits = True

    async def play(self) -> None:
        findings = self._findings
        try:
            await self.speak(hangs_up=True)
        finally:
            counted = [late for at, late in zip(self.sent_at, self.late_ms, strict=True) if self._schedule.counts(at)]
            findings.appends += len(counted)
            findings.late_ms += counted
            findings.connected += self.begun > 0
            findings.failures += self.losses

    def take(self, event: dict[str, Any], now: float | None = None) -> None:
        kind, now = event["type"], now or time.monotonic()
        if kind == DELTA:
            if self._waits and now >= self._schedule.waits_from:
                self._waits = False
                self._findings.next_texts.append(now)
            self.texts.extend((text, now) for text in event["delta"].split())
            for word in event.get("words", ()):
                self.score(word)
        elif kind == SPEECH_STOPPED:
            self._speech_ends[event["item_id"]] = (event["audio_end_ms"] - TURN_SILENCE_MS) / 1000
        elif kind == COMPLETED and event["transcript"] and event["item_id"] in self._speech_ends:
            lag_ms = self._lag_ms(self._speech_ends.pop(event["item_id"]), now)
            self._findings.finals += [] if lag_ms is None else [(self._moment(now), lag_ms)]

    def _pieces(self) -> Iterator[bytes]:
        orders = self._orders
        size, step = orders.rate * orders.append_ms // 1000, orders.append_ms / 1000
        for number in itertools.count():
            if time.monotonic() >= self._schedule.counts_until:
                return
            sound = self._spoken
            if (number * step + self._silent_from) % PERIOD_S < orders.silent_share * PERIOD_S:
                sound = self._quiet
                self.silent.add(number)
            yield sound.piece(self.start + number * size, size)

    def score(self, word: dict[str, Any]) -> None:
        while self.texts:
            text, came = self.texts.popleft()
            if text == word["word"]:
                break
        else:
            return
        lag_ms = self._lag_ms(word["end"], came)
        if lag_ms is not None and self._is_in_speech(word["start"], word["end"]):
            self._findings.lags.append((self._moment(came), round(lag_ms - self._orders.delay_ms, 2)))
        elif lag_ms is not None:
            self._findings.in_pauses += 1

    def _moment(self, came: float) -> float:
        """Seconds since counting began."""
        return round(came - self._schedule.counts_from, 3)

    def _lag_ms(self, end_s: float, came: float) -> float | None:
        """The lag of what ends at `end_s`; None if it does not count."""
        lag_s = self.lag_s(end_s, came)
        return None if lag_s is None or not self._schedule.counts(came) else 1000 * lag_s

    def _is_in_speech(self, start: float, end: float) -> bool:
        """Whether the whole word is within speech, by the detector's spans."""
        appends = range(int(start * 1000 / self._orders.append_ms), int(end * 1000 / self._orders.append_ms - 1e-6) + 1)
        if not self.silent.isdisjoint(appends):
            return False
        place = (self.start / self._orders.rate + start) % (self._spoken.samples / self._orders.rate)
        return any(first <= place and place + end - start <= last for first, last in self._orders.speech)


async def play_lags(orders: Orders, sound: Samples, schedule: Schedule) -> Findings:
    spoken = pcm16(resampled(sound, SAMPLE_RATE, orders.rate))
    quiet = (np.random.default_rng(0).standard_normal(len(spoken) // 2) * 3).astype(np.int16).tobytes()
    findings, sounds = Findings(), (Track(spoken), Track(quiet))

    async def one(number: int) -> None:
        await sleep_until(schedule.joins_at(number, orders.all_sessions))
        while time.monotonic() < schedule.counts_until:
            try:
                return await LagClient(orders.first_number + number, orders, schedule, sounds, findings).play()
            except Refused:
                findings.refusals += 1
                await asyncio.sleep(ASK_AGAIN_S)
            except CannotConnect as error:
                findings.failures.append(str(error))
                return
        findings.failures.append("never let in")

    await asyncio.gather(*map(one, orders.sessions))
    return findings


# Clients that send all of their audio and wait for its last text


def resume_at_once() -> None:
    """Clients retry at once: the server's time is measured, not theirs."""
    resuming_session.FIRST_WAIT_S = 0.1


def appends_of(audio: bytes) -> list[bytes]:
    size = 2 * SAMPLE_RATE * APPEND_MS // 1000
    return [audio[start : start + size] for start in range(0, len(audio), size)]


def own_part(sound: bytes, number: int, seconds: float) -> bytes:
    """This session's part of the audio, always the same for the same session."""
    start = int(np.random.default_rng(number).integers(0, len(sound) // 2))
    return looped(sound[2 * start :] + sound[: 2 * start], seconds)


def looped(sound: bytes, seconds: float) -> bytes:
    wanted = 2 * int(seconds * SAMPLE_RATE)
    return (sound * -(-wanted // len(sound)))[:wanted]


async def play_whole(orders: Orders, sound: Samples, schedule: Schedule) -> list[dict[str, Any]]:
    resume_at_once()
    data = pcm16(sound)

    async def one(number: int) -> dict[str, Any]:
        audio = own_part(data, number, orders.seconds) if orders.own_parts else looped(data, orders.seconds)
        client = PacedClient(orders.url, appends_of(audio), options=replace(PLAIN_SESSION, speakers=orders.speakers))
        await sleep_until(schedule.joins_at(number, orders.all_sessions))
        try:
            await client.speak()
        except CannotConnect as error:
            client.failure = str(error)
        return client.outcome()

    return await asyncio.gather(*map(one, orders.sessions))


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


def speaker_summary(outcomes: Sequence[dict[str, Any]], calm: Sequence[dict[str, Any]]) -> dict[str, int]:
    """The words of finals that have a speaker, and how many speakers are not those of a calm run, for sessions with as
    many words as in that."""
    pairs = [
        pair
        for outcome, reference in zip(outcomes, calm, strict=True)
        if len(outcome["speakers"]) == len(reference["speakers"])
        for pair in zip(outcome["speakers"], reference["speakers"], strict=True)
    ]
    return {
        "speakers": len({now for now, _ in pairs} - {None}),
        "words_with_speaker": sum(now is not None for now, _ in pairs),
        "speakers_that_differ": sum(now != before for now, before in pairs),
    }


# Processes of clients


def run_clients(play: Callable[..., Any], orders: Orders, pipe: Connection) -> None:
    """Main function of a process: prepares, reports that it is ready, and plays by each schedule that it gets."""
    sound = speech(orders.recording)
    pipe.send("ready")
    # The cycle collector would only walk the objects of all sessions.
    gc.freeze()
    while True:
        pipe.send(asyncio.run(play(orders, sound, pipe.recv())))


class ClientProcesses:
    """Sessions distributed over client processes, which are ready when the constructor returns; they play as often as
    they are told to begin. A context manager that stops them."""

    def __init__(self, play: Callable[..., Any], sessions: int, processes: int, **orders: Any) -> None:
        self._stack = ExitStack()
        shares = [list(range(index, sessions, processes)) for index in range(min(processes, sessions))]
        made = [
            self._stack.enter_context(
                spawned(run_clients, play, Orders(sessions=share, all_sessions=sessions, **orders))
            )
            for share in shares
        ]
        self._pipes, self._pids = [pipe for pipe, _ in made], [pid for _, pid in made]
        self.findings()  # each says that it is ready

    def __enter__(self) -> ClientProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def begin(self, schedule: Schedule) -> None:
        for pipe in self._pipes:
            pipe.send(schedule)

    def cpu_seconds(self) -> float:
        return sum(map(cpu_seconds, self._pids))

    def findings(self) -> list[Any]:
        """The results of all processes, when all have finished."""
        try:
            return [pipe.recv() for pipe in self._pipes]
        except EOFError as error:
            raise RunFailed("a process of clients ended; its error is above") from error
