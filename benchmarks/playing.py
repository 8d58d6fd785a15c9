"""Plays recordings into an engine loop in simulated time, as live speech or as uploads, and records the text.

Used by the benchmarks of accuracy and turns. Time is virtual: live audio arrives on
schedule, and every engine step advances time by its own duration. After a step of 200 ms there are 200 ms more audio,
as in real time, but no time passes while the engine is idle. Uploads are sent as fast as the engine takes them, with as
much audio waiting as with a gateway. Speech detection, windows and batches are those of a server; there are no sockets.
"""

from __future__ import annotations

import atexit
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TypeVar

import numpy as np

from benchmarks.measuring import RunFailed, resident_bytes
from benchmarks.recordings import Part, Session
from benchmarks.scoring import Emissions, Word
from benchmarks.sounds import SAMPLE_RATE
from engine import messages
from engine.boundary.items import make_cutter, prepare
from engine.client.client import ClientSettings
from engine.messages import Command, Output, TurnRule
from engine.options import EngineConfig
from engine.server.loop import EngineLoop
from engine.server.main import build_loop, warm_up
from engine.spec import ModelSpec
from realtime.session.boundaries import turn_rule
from realtime.session.core import Session as Core
from realtime.session.events import Append, Completed, End, Event, FlushEngine, Send
from realtime.session.settings import Settings
from realtime.session.words import timed_word

# Samples per message of a live client, and per read of a file by a gateway.
PACKET_SAMPLES, PIECE_SAMPLES = 1280, SAMPLE_RATE
# Seconds between two records of a run's cost.
COST_EVERY_SECONDS = 10.0
# Streams start at different times.
STAGGER_SECONDS = 0.37

T = TypeVar("T")


def warm_loop(model: str, streams: int, threads: int = 1) -> EngineLoop:
    loop = build_loop(EngineConfig(model, "cpu", max_streams=streams, threads=threads))
    warm_up(loop)
    # Threads that compute must not outlive the interpreter.
    atexit.register(loop.close)
    return loop


class VirtualClock:
    """Virtual time: advances by the duration of work and skips idle time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.cpu_seconds = 0.0

    def run(self, work: Callable[[], T]) -> T:
        """Advances by the smaller of wall and processor time, so that other programs do not count."""
        wall, cpu = time.perf_counter(), time.process_time()
        result = work()
        cpu = time.process_time() - cpu
        self.now += min(time.perf_counter() - wall, cpu)
        self.cpu_seconds += cpu
        return result

    def wait_until(self, moment: float) -> None:
        self.now = max(self.now, moment)


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a run up to a moment, in seconds from its start."""

    at: float
    cpu_seconds: float
    resident_bytes: int


@dataclass(slots=True)
class Played:
    """The result of one session. Times are seconds from its first sample."""

    session: Session
    parts: list[Part]
    seconds: float
    emissions: Emissions = field(default_factory=Emissions)
    probabilities: list[float] = field(default_factory=list)
    frame_seconds: float = 0.0
    # Seconds between the live edge and the engine when text came.
    lags: list[float] = field(default_factory=list)
    closed_at: float | None = None
    # With a session core: the finals of its turns, and when each came.
    finals: list[tuple[Completed, float]] = field(default_factory=list)

    def take(self, output: Output, at: float) -> None:
        if isinstance(output, messages.Text):
            spans = [(word, word.start_sample / SAMPLE_RATE, word.end_sample / SAMPLE_RATE) for word in output.words]
            words = [Word(word.text, start, end, timed_word(word).confidence) for word, start, end in spans]
            self.emissions.add(at, output.delta, words)
            self.lags.append(min(at, self.seconds) - output.sample / SAMPLE_RATE)
        elif isinstance(output, messages.Speech):
            self.probabilities += output.probabilities
            self.frame_seconds = output.frame_samples / SAMPLE_RATE
        elif isinstance(output, messages.Closed):
            self.closed_at = at


class Player:
    """One client: sends the audio recorded so far, or as much of a file as may wait in the engine."""

    def __init__(
        self,
        session: Session,
        spec: ModelSpec,
        starts_at: float,
        live: bool = True,
        turns: TurnRule | None = None,
        options: dict[str, str] | None = None,
    ) -> None:
        self._samples, parts = session.load()
        if not live:
            parts = [Part(parts[0].clip, 0.0, math.inf)]
        self.played = Played(session, parts, len(self._samples) / SAMPLE_RATE)
        self.starts_at = starts_at
        # When the next command is due: in virtual time, and in positions that the engine has computed.
        self.next_at = starts_at
        self._fed = 0
        self._ahead = int(ClientSettings().ahead_seconds * spec.sample_rate / spec.samples_per_position)
        self._live, self._spec = live, spec
        self._commands = self._make_commands(messages.Open(session.name, live, options=options or {}, turns=turns))
        self.finished = False

    def due(self, now: float, computed: int) -> Iterator[Command]:
        while not self.finished and (self.next_at <= now if self._live else self._fed - computed < self._ahead):
            command = next(self._commands)
            self.finished = isinstance(command, messages.Finish)
            if command is not None:
                yield command

    def take(self, output: Output, now: float) -> None:
        self.played.take(output, now - self.starts_at)

    def _make_commands(self, opened: messages.Open) -> Iterator[Command | None]:
        """A command for each piece of audio, or None where a piece completes no item."""
        samples, spec = self._samples, self._spec
        cutter, size = make_cutter(spec), PACKET_SAMPLES if self._live else PIECE_SAMPLES
        self.next_at = self.starts_at + min(size, len(samples)) / SAMPLE_RATE
        yield opened
        for start in range(0, len(samples), size):
            items = prepare(cutter, cutter.cut(samples[start : start + size]), spec)
            if start + size >= len(samples):
                silence = spec.flush_positions_for(spec.default_delay_positions)
                items += prepare(cutter, cutter.flush(silence), spec)
            else:
                self.next_at = self.starts_at + min(start + 2 * size, len(samples)) / SAMPLE_RATE
            if items:
                self._fed = items[-1].offset + items[-1].length
            yield messages.Feed(opened.stream, items) if items else None
        yield messages.Finish(opened.stream)


class SessionPlayer(Player):
    """A live client with the gateway's session core behind it: turns end as on a server, and have finals."""

    def __init__(self, session: Session, spec: ModelSpec, starts_at: float, settings: Settings) -> None:
        numbers = count()
        self._core = Core(settings.in_force(spec), spec.sample_rate, lambda: f"item_{next(numbers)}")
        self._tags = count(1)
        self._asked: deque[Command] = deque()
        turns = turn_rule(self._core.settings.turn_detection, spec.sample_rate)
        super().__init__(session, spec, starts_at, turns=turns, options=self._core.settings.engine_options())

    def due(self, now: float, computed: int) -> Iterator[Command]:
        for command in super().due(now, computed):
            if isinstance(command, messages.Feed):
                heard = sum(item.covered_samples(self._spec.samples_per_position) for item in command.items)
                self._handle(Append(np.zeros(heard, np.float32), heard, heard * 1000 / SAMPLE_RATE), now)
            elif isinstance(command, messages.Finish):
                self._handle(End(), now)
            yield command
            yield from self._flushes()
        yield from self._flushes()

    def _flushes(self) -> Iterator[Command]:
        while self._asked and not self.finished:
            yield self._asked.popleft()

    def take(self, output: Output, now: float) -> None:
        super().take(output, now)
        if not isinstance(output, messages.StreamState):
            self._handle(output, now)  # type: ignore[arg-type]

    def _handle(self, event: Event, now: float) -> None:
        for effect in self._core.handle(event, now):
            if isinstance(effect, FlushEngine):
                self._asked.append(messages.Flush(self.played.session.name, next(self._tags), effect.pause))
            elif isinstance(effect, Send) and isinstance(effect.event, Completed):
                self.played.finals.append((effect.event, now - self.starts_at))


class Run:
    """Plays sessions, at most `streams` of them at a time, live or as uploads. `turns` is the rule by which the turns
    of live ones end. With `settings`, live ones have the gateway's session core, and finals."""

    def __init__(
        self,
        loop: EngineLoop,
        streams: int,
        live: bool = True,
        turns: TurnRule | None = None,
        settings: Settings | None = None,
    ) -> None:
        self._loop, self._spec = loop, loop.scheduler.spec
        self._streams, self._live, self._turns, self._settings = streams, live, turns, settings
        self._players: dict[str, Player] = {}
        self.clock = VirtualClock()
        self.costs: list[Cost] = []

    def play(self, sessions: Iterable[Session]) -> list[Played]:
        """Until all sessions are through; in the order in which they end."""
        clock, waiting, done = self.clock, deque(sessions), list[Played]()
        while waiting or self._players:
            while waiting and len(self._players) < self._streams:
                session = waiting.popleft()
                self._players[session.name] = self._player(session)
            # With a gateway, another process prepares the audio of files: that time does not count.
            files = [] if self._live else self._due()
            outputs = clock.run(partial(self._tick, files))
            if not self.costs or clock.now >= self.costs[-1].at + COST_EVERY_SECONDS:
                self.costs.append(Cost(clock.now, clock.cpu_seconds, resident_bytes()))
            for output in outputs:
                done += self._take(output)
            if not self._loop.has_work() and self._loop.waits_for_results:
                clock.run(partial(time.sleep, 0.005))
            elif not self._loop.has_work():
                self._wait_for_audio(stuck=not outputs and not files)
        return done

    def _player(self, session: Session) -> Player:
        starts_at = self.clock.now + STAGGER_SECONDS * len(self._players) * self._live
        if self._live and self._settings is not None:
            return SessionPlayer(session, self._spec, starts_at, self._settings)
        return Player(session, self._spec, starts_at, self._live, self._turns)

    def _due(self) -> list[Command]:
        found: list[Command] = []
        for name, player in self._players.items():
            stream = self._loop.scheduler.streams.get(name)
            found += player.due(self.clock.now, 0 if stream is None else stream.computed)
        return found

    def _tick(self, files: list[Command]) -> list[Output]:
        self._loop.submit(self._due() if self._live else files, int(self.clock.now * 1e9))
        step = self._loop.step()
        return [] if step is None else step.outputs

    def _wait_for_audio(self, stuck: bool) -> None:
        upcoming = [player.next_at for player in self._players.values() if self._live and not player.finished]
        if upcoming:
            self.clock.wait_until(min(upcoming))
        elif self._players and stuck:
            raise RunFailed(f"the engine is idle, but these sessions never ended: {', '.join(self._players)}")

    def _take(self, output: Output) -> list[Played]:
        """The session that ended with this output, if one did."""
        if isinstance(output, messages.Dead | messages.Failed | messages.Refused):
            raise RunFailed(output.message)
        player = self._players.get(getattr(output, "stream", ""))
        if player is None:
            return []
        player.take(output, self.clock.now)
        if not isinstance(output, messages.Closed):
            return []
        del self._players[player.played.session.name]
        return [player.played]
