"""What the engine's one thread spends on each 80 ms of a served session, without the model and the detector.

    python -m benchmarks.host_cost [--streams 600] [--gateways 6] [--rounds 60] [--silent-every 1]
                                   [--message-positions 4]

Everything between the socket and the runner is real: codec, caches, handoffs, the loop with overlapping steps, skipped
silence, scheduler, numbered answers. Runner and detector answer at once, and messages are made before the measurement.
Every session sends one item a round and the changes of its handoff, as a gateway does for clients that can resume; a
round is read in five steps, as in real time. With --message-positions N it sends the audio of N positions in every Nth
round, joined, as to a busy engine. Words come every fifth item, as in speech. The figure is processor time of
one thread: compare it within one run, or on one machine.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.engines import SPEC, NullDetector, NullRunner, room_for
from benchmarks.measuring import parser_of, run_command
from engine import messages
from engine.boundary import codec
from engine.boundary.items import hash_payload
from engine.client.link import OutgoingBatch
from engine.core.scheduler import Scheduler
from engine.messages import Item, Speech
from engine.options import EngineConfig
from engine.server.host import EngineHost
from engine.server.loop import EngineLoop, calm_collector
from engine.server.skipped_silence import skip_settings

# Steps in 80 ms.
STEPS = 5


class LaunchingRunner(NullRunner):
    """Steps overlap as on a device: results are collected later."""

    overlaps_steps = True


class LaunchingDetector(NullDetector):
    """The same for the detector. One of `silent_every` streams has no speech; 0: all have."""

    overlaps_steps = True

    def __init__(self, silent_every: int) -> None:
        super().__init__(SPEC.sample_rate)
        self._silent_every = silent_every

    def find(self, batch: list[tuple[str, Any]]) -> list[Speech]:
        found = super().find(batch)
        for speech in found:
            if self._silent_every and int(speech.stream[-6:]) % self._silent_every == 0:
                speech.probabilities = [0.0] * len(speech.probabilities)
        return found


@dataclass
class Line:
    """An engine's socket whose other ends are here."""

    arriving: deque[tuple[bytes, list[Any]]] = field(default_factory=deque)
    left: list[tuple[bytes, list[Any]]] = field(default_factory=list)

    def wait(self, seconds: float) -> bool:
        return bool(self.arriving)

    def receive(self) -> tuple[bytes, list[Any]] | None:
        return self.arriving.popleft() if self.arriving else None

    def send(self, name: bytes, frames: list[Any]) -> bool:
        self.left.append((name, frames))
        return True


class Gateway:
    """The messages of one gateway for its streams, and the numbers of the answers that it has read."""

    def __init__(self, number: int, streams: list[int]) -> None:
        self.name = f"gateway-{number}".encode()
        self.streams = [f"item_{stream:020d}" for stream in streams]
        self._read: Counter[str] = Counter()
        self._sent = self._taken = 0
        self._random = np.random.default_rng(number)

    def hello(self) -> list[Any]:
        return codec.encode(codec.Hello(codec.WIRE_VERSION, "1", self.name.decode(), 1 << 26))

    def opens(self) -> list[Any]:
        batch = OutgoingBatch()
        for stream in self.streams:
            batch.add(messages.Open(stream), [])
            batch.add(messages.SaveHandoff(stream, f"sess_{stream}", 1, 0, [], base=b"x" * 2000, keep_s=60.0), [])
        return self._frames(batch)

    def round(self, streams: list[str], positions: range) -> list[Any]:
        """The audio of these positions of these streams, and the changes of their handoffs."""
        batch, first, count = OutgoingBatch(), positions.start, len(positions)
        size = count * SPEC.samples_per_position + SPEC.look_back_samples + SPEC.look_ahead_samples
        for stream in streams:
            payload = self._random.standard_normal(size, np.float32)
            items = [Item(first, count, first * SPEC.samples_per_position, hash_payload(payload), payload)]
            batch.add(messages.Feed(stream, items), items)
            batch.add(messages.SaveHandoff(stream, f"sess_{stream}", 1, self._read[stream], [b"e" * 24, b"f" * 16]), [])
        return self._frames(batch)

    def hear(self, frames: list[Any]) -> None:
        update = codec.decode([bytes(frames[0])], to_engine=False)
        if isinstance(update, codec.Update):
            self._taken = update.seq
            self._read.update(output.stream for output in update.outputs)

    def _frames(self, batch: OutgoingBatch) -> list[Any]:
        self._sent += 1
        frames = batch.frames(self._sent, self._taken, lambda items: [True] * len(items))
        return [bytes(frame) for frame in frames]


class Bench:
    def __init__(self, streams: int, gateways: int, silent_every: int = 0, message_positions: int = 1) -> None:
        runner = LaunchingRunner(SPEC)
        scheduler = Scheduler(SPEC, room_for(streams, SPEC), runner.vocabulary)
        cut = skip_settings(EngineConfig().cut_silence_s)
        self.loop = EngineLoop(scheduler, runner, LaunchingDetector(silent_every), skipping=cut)
        self.line, self.now = Line(), 0.0
        self.host = EngineHost(self.loop, self.line, "engine", lambda: self.now)  # type: ignore[arg-type]
        self.gateways = [Gateway(number, list(range(number, streams, gateways))) for number in range(gateways)]
        self._by_name = {gateway.name: gateway for gateway in self.gateways}
        self.rounds, self._message_positions = 0, message_positions
        for frames in (Gateway.hello, Gateway.opens):
            self.line.arriving.extend((gateway.name, frames(gateway)) for gateway in self.gateways)
            self.tick()

    def tick(self) -> int:
        """Nanoseconds of one turn of the engine's thread."""
        self.now += 0.08 / STEPS
        began = time.thread_time_ns()
        self.host.tick()
        took = time.thread_time_ns() - began
        for name, frames in self.line.left:
            self._by_name[name].hear(frames)
        self.line.left.clear()
        return took

    def round(self) -> int:
        """80 ms: with messages of N positions, a message of one in N streams."""
        took, count = 0, self._message_positions
        first = self.rounds // count * count
        for step in range(self.rounds % count * STEPS, self.rounds % count * STEPS + STEPS):
            for gateway in self.gateways:
                due = gateway.streams[step :: STEPS * count]
                self.line.arriving.append((gateway.name, gateway.round(due, range(first, first + count))))
            took += self.tick()
        self.rounds += 1
        return took


def measure(options: argparse.Namespace) -> dict[str, Any]:
    bench = Bench(options.streams, options.gateways, options.silent_every, options.message_positions)
    calm_collector()
    for _ in range(60 if options.silent_every else 10):  # silence is skipped only after some seconds
        bench.round()
    rounds = sorted(bench.round() for _ in range(options.rounds))
    # The lower end, because other work on the machine can only add to it.
    each = rounds[len(rounds) // 10] / options.streams / 1e3
    print(f"{options.streams} streams, {STEPS} steps in 80 ms: {each:.1f} us an item ({len(rounds)} rounds)")
    return {"streams": options.streams, "us_per_item": each}


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--streams", type=int, default=600)
    parser.add_argument("--gateways", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=60, help="rounds of 80 ms that are counted")
    parser.add_argument("--silent-every", type=int, default=0, help="one of N streams has no speech; 0: all have")
    parser.add_argument("--message-positions", type=int, default=1, help="positions in one message of a stream")
    run_command(parser, arguments, measure, streams=12, gateways=2, rounds=10)


if __name__ == "__main__":
    main()
