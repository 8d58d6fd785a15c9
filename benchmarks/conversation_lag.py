"""How late words are while conversations fill one engine, in simulated time and without a GPU.

    python -m benchmarks.conversation_lag [--sessions 1200] [--silent 0.5] [--thread 0.75] [--joins-per-second 40]

Host, loop, scheduler, messages, speech track and admission are real. Two things are simulated. Steps take the time of
an H200 (`benchmarks/rebuild_lag.py`) and overlap with the host. What the engine's thread does is measured on this
machine's processor and multiplied by `--thread`; what it does for a real device and a real detector is added. Gateways
send a message for each 80 ms of a session, and hold audio as `HeldAudio` does (`engine/client/stream.py`).

Each session speaks for a part of 20 s, with pauses of 0.7 s, and is silent for the rest. It is asked for again after a
second if the engine has no room. When all have joined, the lag of spoken frames is counted: from the moment at which a
frame is complete until the engine reports it computed. Frames right after a silence are left out, because they wait for
the speech detector.
"""

from __future__ import annotations

import argparse
import heapq
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.engines import SPEC, NullDetector, room_for
from benchmarks.host_cost import Line
from benchmarks.measuring import parser_of, percentiles, run_command, show
from benchmarks.rebuild_lag import FRAME_S, REBUILT_SPEC, Device, ThreadClock
from engine import messages
from engine.boundary import codec
from engine.boundary.items import KEY_BYTES
from engine.boundary.sockets import Numbering
from engine.client.link import OutgoingBatch
from engine.client.pool import streams_free
from engine.client.stream import HELD_SECONDS
from engine.core.scheduler import Scheduler
from engine.messages import Item, Speech
from engine.options import EngineConfig
from engine.server.host import EngineHost
from engine.server.loop import EngineLoop, calm_collector
from engine.server.main import warm_up
from engine.server.skipped_silence import skip_settings

# Streams that an H200 has places for, and those of them that can compute at once (8-bit keys and values).
STREAMS, ACTIVE = 1313, 781
# A session's period, and of its spoken part: the time from one pause to the next, and the pause.
PERIOD_S, PHRASE_S, PAUSE_S = 20.0, 3.3, 0.7
# Frames that must have been speech before one is counted, and seconds until all sessions have settled.
SPOKEN_BEFORE, SETTLE_S = 7, 5.0
MAX_LOAD, ASK_AGAIN_S, MAX_JOIN_S = 0.95, 1.0, 300.0
QUIET_FRAMES = round(HELD_SECONDS / FRAME_S)


@dataclass
class Session:
    number: int
    name: str
    # When it began, and where in its period.
    begun_at: float
    phase: float
    silent: float
    # Frames that were sent, that wait here, and that are computed.
    sent: int = 0
    held: int = 0
    computed: int = 0

    def speaks(self, frame: int) -> bool:
        moment = (frame * FRAME_S + self.phase) % PERIOD_S - self.silent * PERIOD_S
        return moment >= 0 and moment % PHRASE_S < PHRASE_S - PAUSE_S


class Schedule(NullDetector):
    """Reports speech where a session speaks."""

    overlaps_steps = True

    def __init__(self, sessions: list[Session]) -> None:
        super().__init__(SPEC.sample_rate)
        self._sessions = sessions

    def find(self, batch: list[tuple[str, Any]]) -> list[Speech]:
        found = super().find(batch)
        for speech in found:
            if speech.stream.startswith("warm-up"):
                continue
            session, frame = self._sessions[int(speech.stream[-6:])], speech.sample // SPEC.samples_per_position
            speech.probabilities = [float(session.speaks(frame))] * len(speech.probabilities)
        return found


class Gateway:
    def __init__(self, number: int) -> None:
        self.name = f"gateway-{number}".encode()
        self.batch, self.numbering = OutgoingBatch(), Numbering()

    def frames(self) -> list[Any] | None:
        """The next message, if there is one and the engine takes it."""
        if not (self.batch and self.numbering.may_send):
            return None
        numbers = self.numbering.next_number, self.numbering.accepted
        made = [bytes(frame) for frame in self.batch.frames(*numbers, lambda items: [True] * len(items))]
        self.numbering.keep(made)
        self.batch = OutgoingBatch()
        return made


class Simulation:
    def __init__(self, options: argparse.Namespace, clock: ThreadClock) -> None:
        self._options, self.clock = options, clock
        self.sessions: list[Session] = []
        self._chance = np.random.default_rng(0)
        runner = Device(clock, options.slow)
        scheduler = Scheduler(REBUILT_SPEC, room_for(STREAMS, REBUILT_SPEC), runner.vocabulary)
        self.loop = EngineLoop(
            scheduler,
            runner,
            Schedule(self.sessions),
            skipping=skip_settings(EngineConfig().cut_silence_s),
            clock=clock.ns,
        )
        clock.run(partial(warm_up, self.loop))
        self._line = Line()
        self.host = EngineHost(self.loop, self._line, "engine", clock.seconds)  # type: ignore[arg-type]
        self.host.load.status.active_total = ACTIVE
        self._gateways = {gateway.name: gateway for gateway in map(Gateway, range(options.gateways))}
        for name in self._gateways:
            hello = codec.Hello(codec.WIRE_VERSION, "1", name.decode(), 1 << 26)
            self._line.arriving.append((name, codec.encode(hello)))
        # When each session's next frame is complete, and when those that wait are asked for.
        self._frames: list[tuple[float, int]] = []
        self._asking = deque(number / options.joins_per_second for number in range(options.sessions))
        self._opened_since_report = 0
        self.refusals, self.lags = 0, list[float]()
        self._names: dict[str, str] = {}
        self._payloads: dict[int, Any] = {}
        self._keys = 0

    def run(self) -> tuple[float, float]:
        """Run until all that is counted is counted. Returns the share of that time in which the thread worked, and the
        mean length of a tick."""
        counted_from: float | None = None
        began = worked = reported = 0.0
        ticks = 0
        while True:
            now = self.clock.now
            if now - reported >= 1:
                reported, self._opened_since_report = now, 0
            self._join(now)
            self._complete_frames(now)
            self._tick()
            if counted_from is not None and self.clock.now >= counted_from:
                if not ticks:
                    began, worked = self.clock.now, self.clock.worked
                ticks += 1
            self._count(counts=bool(ticks))
            if counted_from is None and (not self._asking or now > MAX_JOIN_S):
                counted_from = now + SETTLE_S
            if ticks and self.clock.now >= counted_from + self._options.seconds:
                took = self.clock.now - began
                return (self.clock.worked - worked) / took, took / ticks

    def _join(self, now: float) -> None:
        while self._asking and self._asking[0] <= now:
            self._asking.popleft()
            if streams_free(self.host.load.status, MAX_LOAD) > self._opened_since_report:
                self._open(now)
            else:
                self.refusals += 1
                self._asking.append(now + ASK_AGAIN_S)
                self._asking = deque(sorted(self._asking))

    def _open(self, now: float) -> None:
        number = len(self.sessions)
        name = f"item_{number:06d}"
        session = Session(number, name, now, float(self._chance.uniform(0, PERIOD_S)), self._options.silent)
        self.sessions.append(session)
        self._opened_since_report += 1
        batch = self._gateway(session).batch
        batch.add(messages.Open(name), [])
        batch.add(messages.SaveHandoff(name, f"sess_{name}", 1, 0, [], base=b"x" * 2000, keep_s=60.0), [])
        heapq.heappush(self._frames, (now + FRAME_S, number))

    def _gateway(self, session: Session) -> Gateway:
        return self._gateways[f"gateway-{session.number % len(self._gateways)}".encode()]

    def _complete_frames(self, now: float) -> None:
        wanted = self.host.load.status.message_positions
        while self._frames and self._frames[0][0] <= now:
            complete_at, number = heapq.heappop(self._frames)
            session = self.sessions[number]
            session.held += 1
            gate = self.loop.silence_skipper.gate(self._names.get(session.name, ""))
            is_skipped = gate is not None and not gate.is_open
            if is_skipped and not session.speaks(session.sent + session.held):
                due = session.held >= QUIET_FRAMES
            else:
                due = is_skipped or (session.sent + session.held) % wanted == 0
            if due:
                self._send(session)
            heapq.heappush(self._frames, (complete_at + FRAME_S, number))

    def _send(self, session: Session) -> None:
        batch, count = self._gateway(session).batch, session.held
        if count not in self._payloads:
            size = SPEC.look_back_samples + count * SPEC.samples_per_position + SPEC.look_ahead_samples
            self._payloads[count] = self._chance.standard_normal(size).astype(np.float32)
        self._keys += 1
        key, sample = self._keys.to_bytes(KEY_BYTES, "big"), session.sent * SPEC.samples_per_position
        items = [Item(SPEC.prefix_positions + session.sent, count, sample, key, self._payloads[count])]
        batch.add(messages.Feed(session.name, items), items)
        entries = [b"e" * 24, b"f" * 16]
        batch.add(messages.SaveHandoff(session.name, f"sess_{session.name}", 1, 0, entries), [])
        session.sent, session.held = session.sent + count, 0

    def _tick(self) -> None:
        for name, gateway in self._gateways.items():
            if (frames := gateway.frames()) is not None:
                self._line.arriving.append((name, frames))
        if not (self._line.arriving or self.loop.has_work()):
            self.clock.now += 0.0005
        self.clock.run(self.host.tick)
        for name, frames in self._line.left:
            numbering, message = self._gateways[name].numbering, codec.decode([bytes(frames[0])], to_engine=False)
            if isinstance(message, codec.Update):
                numbering.accept(message.seq)
            if isinstance(message, (codec.Update, codec.Beat)):
                numbering.acknowledged(message.ack)
        self._line.left.clear()

    def _count(self, counts: bool) -> None:
        """Note what has been computed."""
        if len(self._names) < len(self.sessions):
            self._names = {hosted.name: name for name, hosted in self.host.hosted.streams.items()}
        now = self.clock.now
        for session in self.sessions:
            name = self._names.get(session.name)
            if name is None:
                continue
            computed = self.loop.progress_of(name) - SPEC.prefix_positions
            if computed <= session.computed:
                continue
            if counts:
                self.lags += [
                    now - session.begun_at - FRAME_S * (frame + 1)
                    for frame in range(session.computed, computed)
                    if session.speaks(frame) and session.speaks(frame - SPOKEN_BEFORE)
                ]
            session.computed = computed


def measure(options: argparse.Namespace) -> dict[str, Any]:
    clock = ThreadClock(options.thread)
    calm_collector()
    with mock.patch.object(time, "monotonic_ns", clock.ns):
        simulation = Simulation(options, clock)
        thread, tick_s = simulation.run()
    figures = {
        "connected": f"{len(simulation.sessions)} of {options.sessions}",
        "refusals": simulation.refusals,
        **percentiles("lag_ms", [1000 * lag for lag in simulation.lags], 50, 95, 99, 100),
        "thread busy": thread,
        "tick, ms": 1000 * tick_s,
        "positions in a message": simulation.host.load.status.message_positions,
    }
    show(f"{options.sessions} sessions, silent for {options.silent:.0%}, thread x {options.thread:g}", figures)
    return figures


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--sessions", type=int, default=1200)
    parser.add_argument("--silent", type=float, default=0.5, help="share of the time")
    parser.add_argument(
        "--thread", type=float, default=0.75, help="time of the thread, as a multiple of this machine's"
    )
    parser.add_argument("--slow", type=float, default=1.0, help="time of a step, as a multiple of an H200's")
    parser.add_argument("--joins-per-second", type=float, default=40.0)
    parser.add_argument("--gateways", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=10.0, help="simulated seconds that are counted")
    run_command(parser, arguments, measure, sessions=12, gateways=2, seconds=2.0)


if __name__ == "__main__":
    main()
