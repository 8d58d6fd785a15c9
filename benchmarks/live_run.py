"""Plays recordings into a real engine loop at the pace of a microphone, and notes when text came.

With the virtual clock, audio arrives on schedule and every engine step moves time on by what the step took: a step of
200 ms finds 200 ms more audio after it, exactly as live, but nobody waits while the engine is idle. With the wall clock
the same run takes as long as the audio does.
"""

from __future__ import annotations

import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from benchmarks.recordings import SAMPLE_RATE, Part, Session
from benchmarks.scoring import Emissions, TimedWord
from engine.boundary.preparation import make_cutter, prepare
from engine.messages import Closed, Command, Dead, Failed, Feed, Finish, Open, Output, Refused, Speech, Text
from engine.server.loop import EngineLoop
from engine.spec import ModelSpec
from realtime.session.words import timed_word

# What a client sends at a time.
PACKET_SAMPLES = 1280
# How often the cost of a run is noted.
COST_EVERY_SECONDS = 10.0
# Streams do not start in step with each other.
STAGGER_SECONDS = 0.37

T = TypeVar("T")


class RunFailed(Exception):
    """The engine did not get through a session."""


def complain(error: Exception) -> int:
    """Say why there are no figures. Returns the command's exit status: 1 if the engine failed, else 2."""
    failed = isinstance(error, RunFailed)
    print(f"error: the engine failed: {error}" if failed else f"error: {error}", file=sys.stderr)
    return 1 if failed else 2


class VirtualClock:
    """Time that moves by work, and jumps over idleness."""

    def __init__(self) -> None:
        self.now = 0.0
        self.cpu_seconds = 0.0

    def run(self, work: Callable[[], T]) -> T:
        """The smaller of wall and processor time counts: what other programs take from this machine does not."""
        wall, cpu = time.perf_counter(), time.process_time()
        result = work()
        cpu = time.process_time() - cpu
        self.now += min(time.perf_counter() - wall, cpu)
        self.cpu_seconds += cpu
        return result

    def wait_until(self, moment: float) -> None:
        self.now = max(self.now, moment)


class WallClock:
    """Time as it is."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self.cpu_seconds = 0.0

    @property
    def now(self) -> float:
        return time.perf_counter() - self._began

    def run(self, work: Callable[[], T]) -> T:
        cpu = time.process_time()
        result = work()
        self.cpu_seconds += time.process_time() - cpu
        return result

    def wait_until(self, moment: float) -> None:
        time.sleep(max(0.0, moment - self.now))


Clock = VirtualClock | WallClock


@dataclass(frozen=True, slots=True)
class Cost:
    """What a run has cost by a moment, seconds from its start."""

    at: float
    cpu_seconds: float
    resident_bytes: int


@dataclass(slots=True)
class SessionRun:
    """What became of one session. Moments are seconds from its first sample."""

    session: Session
    parts: list[Part]
    seconds: float
    emissions: Emissions = field(default_factory=Emissions)
    probabilities: list[float] = field(default_factory=list)
    frame_seconds: float = 0.0
    # How far the engine was behind the live edge when text came.
    lags: list[float] = field(default_factory=list)
    closed_at: float | None = None
    # The code of the first language that the model told with words.
    language: str = ""


class _Player:
    """One client: sends what its microphone has heard so far."""

    def __init__(self, session: Session, spec: ModelSpec, starts_at: float, options: dict[str, str]) -> None:
        samples, parts = session.load()
        self._options = options
        self.run = SessionRun(session, parts, len(samples) / SAMPLE_RATE)
        self.starts_at = starts_at
        self._samples: NDArray[np.float32] = samples
        self._sent = 0
        self._spec = spec
        self._cutter = make_cutter(spec)
        self._opened = False
        self.finished = False

    @property
    def next_at(self) -> float:
        """When there is something to send."""
        if not self._opened:
            return self.starts_at
        return self.starts_at + min(self._sent + PACKET_SAMPLES, len(self._samples)) / SAMPLE_RATE

    def commands(self, now: float) -> Iterable[Command]:
        name, spec, cutter = self.run.session.name, self._spec, self._cutter
        if not self._opened:
            self._opened = True
            yield Open(name, options=self._options)
        while not self.finished and self.next_at <= now:
            packet = self._samples[self._sent : self._sent + PACKET_SAMPLES]
            self._sent += len(packet)
            items = prepare(cutter, cutter.cut(packet), spec)
            self.finished = self._sent == len(self._samples)
            if self.finished:
                silence = spec.flush_positions_for(spec.default_delay_positions)
                items += prepare(cutter, cutter.flush(silence), spec)
            if items:
                yield Feed(name, items)
            if self.finished:
                yield Finish(name)


def resident_bytes() -> int:
    """Memory this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


class LiveRun:
    """Plays sessions, at most `streams` at a time, until all are through. `options` are the model's, by session."""

    def __init__(
        self, loop: EngineLoop, clock: Clock, streams: int, options: Mapping[str, dict[str, str]] | None = None
    ) -> None:
        self._options = options or {}
        self._loop = loop
        self._clock = clock
        self._streams = streams
        self._spec = loop.scheduler.spec
        self._players: dict[str, _Player] = {}
        self._done: list[SessionRun] = []
        self.costs: list[Cost] = []

    def play(self, sessions: Iterable[Session], progress: Callable[[SessionRun], None]) -> list[SessionRun]:
        waiting, clock = deque(sessions), self._clock
        while waiting or self._players:
            while waiting and len(self._players) < self._streams:
                starts_at = clock.now + STAGGER_SECONDS * len(self._players)
                session = waiting.popleft()
                player = _Player(session, self._spec, starts_at, self._options.get(session.name, {}))
                self._players[player.run.session.name] = player
            outputs = clock.run(self._tick)
            if not self.costs or clock.now >= self.costs[-1].at + COST_EVERY_SECONDS:
                self.costs.append(Cost(clock.now, clock.cpu_seconds, resident_bytes()))
            for output in outputs:
                self._take(output, clock.now, progress)
            if not self._loop.has_work():
                self._wait_for_audio(stuck=not outputs)
        return self._done

    def _wait_for_audio(self, stuck: bool) -> None:
        upcoming = [player.next_at for player in self._players.values() if not player.finished]
        if upcoming:
            self._clock.wait_until(min(upcoming))
        elif self._players and stuck:
            raise RunFailed(f"the engine is idle, but these sessions never ended: {', '.join(self._players)}")

    def _tick(self) -> list[Output]:
        now = self._clock.now
        due = [player for player in self._players.values() if not player.finished and player.next_at <= now]
        self._loop.submit([command for player in due for command in player.commands(now)], int(now * 1e9))
        step = self._loop.step()
        return [] if step is None else step.outputs

    def _take(self, output: Output, now: float, progress: Callable[[SessionRun], None]) -> None:
        if isinstance(output, Dead):
            raise RunFailed(output.message)
        player = self._players.get(output.stream)
        if player is None:
            return
        run, at = player.run, now - player.starts_at
        match output:
            case Text():
                words = [
                    TimedWord(
                        word.text,
                        word.start_sample / SAMPLE_RATE,
                        word.end_sample / SAMPLE_RATE,
                        timed_word(word).confidence,
                    )
                    for word in output.words
                ]
                run.emissions.add(at, output.delta, words)
                if output.delta or words:
                    run.language = run.language or output.language
                run.lags.append(min(at, run.seconds) - output.sample / SAMPLE_RATE)
            case Speech():
                run.probabilities += output.probabilities
                run.frame_seconds = output.frame_samples / SAMPLE_RATE
            case Closed():
                run.closed_at = at
                self._done.append(run)
                del self._players[output.stream]
                progress(run)
            case Failed() | Refused():
                raise RunFailed(output.message)
