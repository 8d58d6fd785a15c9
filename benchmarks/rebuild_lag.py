"""How late live streams are while others are rebuilt beside them, in simulated time and without a GPU.

    python -m benchmarks.rebuild_lag [--live 300] [--rebuilt 130] [--slow 1.6] [--host-ms 12] [--at-a-time 4]
                                     [--thread 0.75] [--away 30] [--spread 160]

Host, loop, scheduler, messages and the gateways' send queues are real. Steps overlap as on a device: on a simulated
clock each takes the time that an H200 needs for such a step (docs/voxtral.md), times `--slow`, because two engines on
one card take turns. The host takes `--host-ms` between two steps, or, with `--thread`, that part of the time that its
thread takes on this machine, while steps run. Lag is from the moment a frame is complete until the
engine reports it computed. At second 2 the streams that are to be rebuilt come, each with a full window of audio, whose
tokens are known, or with up to `--spread` positions less, the shortest first. Three frames in ten have a word.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.engines import SPEC, NullDetector, NullRunner, room_for
from benchmarks.host_cost import Line
from benchmarks.measuring import parser_of, run_command, show
from benchmarks.random_weights import WORDS_IN_TEN_FRAMES
from engine import messages
from engine.boundary import codec
from engine.boundary.replay import JOINED_POSITIONS
from engine.boundary.sockets import Numbering
from engine.client.link import SAMPLE_BYTES, OutgoingBatch, Queued, SendQueue
from engine.client.recovery import MAX_MIGRATING
from engine.client.stream import REPLAY_ITEMS
from engine.core.plan import DecodeResult, StepPlan
from engine.core.scheduler import Scheduler
from engine.messages import Item
from engine.runner.base import never
from engine.runner.frames.memory import EMBEDS_PER_STREAM, REPLAY_POSITIONS
from engine.runner.frames.runner import (
    CHUNK_PASS_MS,
    LONGEST_CHUNK,
    MOST_CHUNKS,
    REBUILD_POSITIONS,
    chunk_passes,
)
from engine.server.host import EngineHost
from engine.server.loop import EngineLoop
from realtime.bench.statistics import percentile

FRAME_S = 0.08
# Positions that are rebuilt of each stream: the decoder's window.
WINDOW = 1024
# Positions of a turn, 5 s: the replay has a flush after each.
TURN = 62
REBUILT_SPEC = replace(SPEC, replay_positions=REPLAY_POSITIONS, embeds_per_stream=EMBEDS_PER_STREAM)
# Seconds of a step of live streams, and for each of them.
LIVE_STEP_S, LIVE_STREAM_S = 0.005, 72e-6
REBUILD_FROM_S = 2.0
# Seconds of the thread for a step and for each of its positions, beside what is measured here: launches on the device,
# a real speech detector.
LAUNCH_S, LAUNCH_POSITION_S = 0.0006, 8e-6
# Samples of an item of one position.
SAMPLES = SPEC.look_back_samples + SPEC.samples_per_position + SPEC.look_ahead_samples
PAYLOAD = np.random.default_rng(0).standard_normal(SAMPLES, np.float32)
# By the positions of an item, from 1 on.
PAYLOADS = [np.resize(PAYLOAD, SAMPLES + further * SPEC.samples_per_position) for further in range(JOINED_POSITIONS)]


class Clock:
    """Simulated time. Whatever the thread does takes `work_s`."""

    def __init__(self, work_s: float = 0.0) -> None:
        self.now = 0.0
        self._work_s = work_s

    def ns(self) -> int:
        return int(1e9 * self.now)

    def seconds(self) -> float:
        return self.now

    def run(self, work: Callable[[], None]) -> None:
        work()
        self.now += self._work_s


class ThreadClock(Clock):
    """Simulated time, which goes on while the thread works, by `factor` of the time that it takes here."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        # Seconds in which the thread worked.
        self.worked = 0.0
        self._factor = factor
        self._mark: int | None = None

    def count(self) -> None:
        """Add the thread's time since the last call."""
        if self._mark is not None:
            now = time.thread_time_ns()
            self.work(self._factor * (now - self._mark) / 1e9)
            self._mark = now

    def work(self, seconds: float) -> None:
        self.now += seconds
        self.worked += seconds

    def seconds(self) -> float:
        self.count()
        return self.now

    def ns(self) -> int:
        return int(1e9 * self.seconds())

    def run(self, work: Callable[[], None]) -> None:
        self._mark = time.thread_time_ns()
        work()
        self.count()
        self._mark = None


class CostlyRunner(NullRunner):
    """Steps overlap as on a device: a step begins when the one before it is over, and whoever waits for its results
    moves the clock to its end."""

    overlaps_steps = True

    def __init__(self, clock: Clock, slow: float) -> None:
        super().__init__(REBUILT_SPEC)
        self._clock, self._slow = clock, slow
        # When the device has finished all steps.
        self._free_at = 0.0

    def launch(self, plan: StepPlan, time_is_up: Callable[[], bool] = never) -> Callable[[], list[DecodeResult]]:
        done_at = self._free_at = max(self._free_at, self._clock.now) + self._slow * self._cost(plan)
        results = self.compute(plan)

        def wait() -> list[DecodeResult]:
            self._clock.now = max(self._clock.now, done_at)
            return results

        return wait

    @staticmethod
    def _cost(plan: StepPlan) -> float:
        lengths = [task.end - task.start for task in plan.decode]
        if plan.rebuilt_positions:
            # A chunk that is not full takes as long as a full one.
            parts = chunk_passes([-(-length // LONGEST_CHUNK) for length in lengths], MOST_CHUNKS)
            recorded = [next(size for size in CHUNK_PASS_MS if size >= len(streams)) for streams in parts]
            return sum(CHUNK_PASS_MS[size] / 1000 for size in recorded)
        # A further position of a stream that catches up is a further pass.
        passes = [sum(length > number for length in lengths) for number in range(max(lengths, default=0))]
        return sum(LIVE_STEP_S + LIVE_STREAM_S * streams for streams in passes)


class Device(CostlyRunner):
    """A runner whose launches take time of the thread."""

    def __init__(self, clock: ThreadClock, slow: float) -> None:
        super().__init__(clock, slow)
        self._thread = clock

    def launch(self, plan: StepPlan, time_is_up: Callable[[], bool] = never) -> Callable[[], list[DecodeResult]]:
        self._thread.count()
        # The positions of a rebuilt stream are one batch.
        rows = len(plan.decode) if plan.rebuilt_positions else sum(task.end - task.start for task in plan.decode)
        self._thread.work(LAUNCH_S + LAUNCH_POSITION_S * rows)
        wait = super().launch(plan, time_is_up)

        def results() -> list[DecodeResult]:
            self._thread.count()
            return wait()

        return results


@dataclass
class Session:
    """One stream of a gateway. `known`: positions of its replay."""

    name: str
    known: int = 0
    # The end of its first turn, a position. Each turn has `TURN` positions.
    turn_end: int = TURN
    flushes: int = 0
    sent: int = 0
    begun_at: float = 0.0
    # By position: when the frame was complete.
    complete_at: dict[int, float] = field(default_factory=dict)
    computed: int = 0
    # Commands behind the replay.
    waiting: list[Queued] = field(default_factory=list)
    # New frames up to the first one with a word.
    until_word: int = 1
    # When the first frame after the replay was computed, and the first one with a word.
    continued_at: float | None = None
    spoke_at: float | None = None

    @property
    def is_rebuilt(self) -> bool:
        return self.sent < self.known

    def next_piece(self) -> Queued | None:
        """The next piece of the replay, for the `SendQueue`: a part of a turn, or the flush at its end."""
        first = self.sent
        if first == self.turn_end < self.known:
            self.turn_end += TURN
            self.flushes += 1
            return messages.Flush(self.name, self.flushes, first * SPEC.samples_per_position), []
        self.sent = end = min(first + REPLAY_ITEMS, max(first, self.known) + len(self.waiting))
        if first < self.turn_end < self.known:
            self.sent = end = min(end, self.turn_end)
        if first == end:
            return None
        known = min(max(first, self.known), end)
        # Frames that came meanwhile are joined, too.
        self.waiting = self.waiting[end - known :]
        return messages.Feed(self.name, []), [*self._items(first, known), *self._items(known, end)]

    def frame(self, position: int) -> Queued:
        return messages.Feed(self.name, []), self._items(position, position + 1)

    def _items(self, start: int, end: int) -> list[Item]:
        items = []
        for position in range(start, end, JOINED_POSITIONS):
            length = min(JOINED_POSITIONS, end - position)
            key = f"{self.name[-6:]}{position:010d}".encode()
            items.append(Item(position, length, position * SPEC.samples_per_position, key, PAYLOADS[length - 1]))
        return items


class Gateway:
    """The send queue of one gateway, and what it has heard."""

    def __init__(self, number: int) -> None:
        self.name = f"gateway-{number}".encode()
        self.queue, self.numbering = SendQueue(), Numbering()
        self.sessions: dict[str, Session] = {}

    def batches(self) -> list[list[Any]]:
        made = []
        while self.numbering.may_send and self.queue.has_more:
            batch = OutgoingBatch()
            self.queue.fill(self.numbering.next_number, lambda queued, batch=batch: batch.add(*queued))
            if not batch:
                break
            numbers = self.numbering.next_number, self.numbering.accepted
            frames = [bytes(frame) for frame in batch.frames(*numbers, lambda items: [True] * len(items))]
            self.numbering.keep(frames)
            made.append(frames)
        return made

    def hear(self, message: Any, now: float) -> list[float]:
        """Returns the lags of the frames that are computed by now, of streams that are not rebuilt."""
        lags: list[float] = []
        if isinstance(message, codec.Update):
            self.numbering.accept(message.seq)
            for output in message.outputs:
                if isinstance(output, messages.Opened) and self.sessions[output.stream].known:
                    self.queue.add_source(self.sessions[output.stream])
            for progress in message.progress:
                lags += self._computed(self.sessions[progress.stream], progress.computed, now)
        if isinstance(message, (codec.Update, codec.Beat)):
            for batch in self.numbering.acknowledged(message.ack):
                self.queue.acknowledged(batch)
        self.queue.allow_replays(message.status.replay_positions, SPEC.samples_per_position * SAMPLE_BYTES)
        return lags

    @staticmethod
    def _computed(session: Session, computed: int, now: float) -> list[float]:
        frames = [session.complete_at.pop(position, now) for position in range(session.computed, computed)]
        session.computed = computed
        if session.known:
            if computed > session.known and session.continued_at is None:
                session.continued_at = now
            if computed >= session.known + session.until_word and session.spoke_at is None:
                session.spoke_at = now
            return []
        return [now - complete_at for complete_at in frames]


class Simulation:
    def __init__(self, options: argparse.Namespace, clock: Clock) -> None:
        self.clock, self._options = clock, options
        limits = room_for(options.live + options.rebuilt, REBUILT_SPEC, step_positions=REBUILD_POSITIONS)
        limits = replace(limits, rebuild_positions=REBUILD_POSITIONS)
        runner = CostlyRunner(clock, options.slow)
        if isinstance(clock, ThreadClock):
            runner = Device(clock, options.slow)
        scheduler = Scheduler(REBUILT_SPEC, limits, runner.vocabulary)
        loop = EngineLoop(scheduler, runner, NullDetector(SPEC.sample_rate), clock=self.clock.ns)
        self._line = Line()
        self._host = EngineHost(loop, self._line, "engine", self.clock.seconds)  # type: ignore[arg-type]
        self.gateways = [Gateway(number) for number in range(options.gateways)]
        self._random = np.random.default_rng(1)
        self._by_name = {gateway.name: gateway for gateway in self.gateways}
        # By session: when its next frame is complete, and the position of that frame.
        self._frames: dict[str, tuple[float, int]] = {}
        # (time, lag) of each frame of streams that are not rebuilt.
        self.lags: list[tuple[float, float]] = []
        for gateway in self.gateways:
            hello = codec.Hello(codec.WIRE_VERSION, "1", gateway.name.decode(), 0)
            self._line.arriving.append((gateway.name, codec.encode(hello)))
        self._tick()
        for number in range(options.live):
            self._open(number, known=0)

    def run(self) -> None:
        waiting = list(range(self._options.live, self._options.live + self._options.rebuilt))
        while self.clock.now < REBUILD_FROM_S + self._options.seconds:
            if self.clock.now >= REBUILD_FROM_S:
                under_way: dict[Gateway, int] = defaultdict(int)
                for gateway in self.gateways:
                    under_way[gateway] = sum(s.known > 0 and not s.continued_at for s in gateway.sessions.values())
                for number in list(waiting):
                    gateway = self.gateways[number % len(self.gateways)]
                    if under_way[gateway] < self._options.at_a_time:
                        under_way[gateway] += 1
                        waiting.remove(number)
                        rank = (number - self._options.live) / self._options.rebuilt
                        self._open(number, known=WINDOW - round(self._options.spread * (1.0 - rank)))
            self._send_frames()
            self._tick()

    def _open(self, number: int, known: int) -> None:
        gateway, name = self.gateways[number % len(self.gateways)], f"item_{number:06d}"
        session = Session(name, known, turn_end=1 + number % TURN, begun_at=self.clock.now)
        session.until_word = int(self._random.geometric(WORDS_IN_TEN_FRAMES / 10))
        gateway.sessions[name] = session
        away_s = self._options.away if known else 0.0
        self._frames[name] = self.clock.now - away_s + FRAME_S * (number % 97) / 97, known
        gateway.queue.put((messages.Open(name, forced_tokens=[1] * known), []))

    def _send_frames(self) -> None:
        for gateway in self.gateways:
            for name, session in gateway.sessions.items():
                complete_at, position = self._frames[name]
                while complete_at <= self.clock.now:
                    session.complete_at[position] = complete_at
                    frame = session.frame(position)
                    if session.sent < session.known or session.waiting:
                        session.waiting.append(frame)
                    else:
                        gateway.queue.put(frame)
                    complete_at, position = complete_at + FRAME_S, position + 1
                self._frames[name] = complete_at, position

    def _tick(self) -> None:
        for gateway in self.gateways:
            self._line.arriving.extend((gateway.name, frames) for frames in gateway.batches())
        self.clock.run(self._host.tick)
        for name, frames in self._line.left:
            message = codec.decode([bytes(frames[0])], to_engine=False)
            lags = self._by_name[name].hear(message, self.clock.now)
            self.lags += [(self.clock.now, lag) for lag in lags]
        self._line.left.clear()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    clock = ThreadClock(options.thread) if options.thread else Clock(options.host_ms / 1000)
    with mock.patch.object(time, "monotonic_ns", clock.ns):
        simulation = Simulation(options, clock)
        simulation.run()
    sessions = [s for gateway in simulation.gateways for s in gateway.sessions.values() if s.known]
    pauses = [s.continued_at - s.begun_at for s in sessions if s.continued_at is not None]
    silences = [s.spoke_at - s.begun_at for s in sessions if s.spoke_at is not None]
    figures = {
        "lag of live streams, ms": {
            when: _percentiles([1000 * lag for at, lag in simulation.lags if begin <= at < end])
            for when, begin, end in (("before", 1.0, REBUILD_FROM_S), ("meanwhile", REBUILD_FROM_S, 1e9))
        },
        "pause of a rebuilt stream, s": _percentiles(pauses),
        "until its next word, s": _percentiles(silences),
        "rebuilt": f"{len(pauses)} of {options.rebuilt}",
    }
    show(f"{options.live} live streams, {options.slow:g} times the time of an H200", figures)
    return figures


def _percentiles(values: list[float]) -> dict[str, float]:
    return {f"p{share}": percentile(values, share) for share in (50, 99, 100)} if values else {}


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--live", type=int, default=300)
    parser.add_argument("--rebuilt", type=int, default=130)
    parser.add_argument("--gateways", type=int, default=6)
    parser.add_argument("--slow", type=float, default=1.6)
    parser.add_argument("--host-ms", type=float, default=12.0, help="time of the host between two steps")
    parser.add_argument("--thread", type=float, help="instead: its measured time, times this")
    parser.add_argument("--away", type=float, default=0.0, help="seconds of audio that came while there was no engine")
    parser.add_argument("--spread", type=int, default=0, help="the shortest replay has so many positions less")
    parser.add_argument("--at-a-time", type=int, default=MAX_MIGRATING, help="rebuilt streams of a gateway at a time")
    parser.add_argument("--seconds", type=float, default=16.0, help="simulated seconds from the first rebuild on")
    run_command(parser, arguments, measure, live=12, rebuilt=4, gateways=2, seconds=2.0)


if __name__ == "__main__":
    main()
