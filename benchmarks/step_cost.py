"""What a whole engine step costs on the host, and whether it grows with the age of a session.

    python -m benchmarks.step_cost [--json FILE] [--quick]

A step is everything but the model: messages in, plan, null execute, commit, detokenize, message out. Sizes that are
compared run interleaved in one process, and medians are compared, so a noisy machine moves both alike. The cycle
collector rests as it does in the engine process.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.core.limits import Limits
from engine.core.plan import DecodeResult, StepPlan
from engine.core.scheduler import Scheduler
from engine.messages import Feed, Item, Open
from engine.server.collector import calm_collector
from engine.server.loop import EngineLoop
from engine.spec import KvGroup, ModelSpec
from engine.vocabulary import Vocabulary

RETAIN_EVERYTHING = 1 << 40
PIECES = [b"", b"", *(f" word{i}".encode() for i in range(30))]


def voxtral_like(history_positions: int = 64) -> ModelSpec:
    """The flagship's clock and windows; `history_positions` decides how much of the timeline is kept."""
    return ModelSpec(
        name="null",
        sample_rate=16_000,
        samples_per_position=1280,
        default_delay_positions=6,
        max_delay_positions=30,
        history_positions=history_positions,
        kv_groups=(KvGroup("encoder", 188, 8, 1 << 20), KvGroup("decoder", 1024, 16, 1 << 17)),
    )


def room_for(streams: int, spec: ModelSpec) -> Limits:
    """So many streams, and a frame of each in one step."""
    pages = tuple(group.ring_pages * streams for group in spec.kv_groups)
    embeds = spec.embeds_per_stream * streams + 4096
    return Limits(streams, embeds, pages, step_positions=streams, step_embeds=streams)


def _token_at(position: int) -> int:
    return 2 + position % 30 if position % 5 == 0 else 0


class NullRunner:
    """Answers at once: a word piece every fifth position and blanks between, as in speech."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.vocabulary = Vocabulary(PIECES, word_marker=1)

    def check_open(self, message: Open) -> None:
        pass

    def execute(self, plan: StepPlan) -> list[DecodeResult]:
        return [DecodeResult([_token_at(place) for place in range(task.start, task.end)]) for task in plan.decode]

    def warm_up(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass
class Bench:
    """A loop with streams of one age. `tick` feeds one item to each and runs the step."""

    loop: EngineLoop
    names: list[str]
    position: int = 0
    text: int = 0

    @classmethod
    def start(cls, streams: int, history_positions: int = 64) -> Bench:
        spec = voxtral_like(history_positions)
        runner = NullRunner(spec)
        loop = EngineLoop(Scheduler(spec, room_for(streams, spec), runner.vocabulary), runner)
        names = [f"stream-{i}" for i in range(streams)]
        loop.submit([Open(name) for name in names], 0)
        loop.step()
        return cls(loop, names)

    def messages(self) -> list[Feed]:
        """What the transport would hand over for one frame of every stream."""
        position = self.position
        return [
            Feed(name, [Item(position, 1, position * 1280, b"%d/%d" % (index, position), b"pcm")])
            for index, name in enumerate(self.names)
        ]

    def tick(self) -> int:
        """One frame of every stream through one step; nanoseconds of it."""
        messages = self.messages()
        began = time.perf_counter_ns()
        self.loop.submit(messages, self.position)
        output = self.loop.step()
        took = time.perf_counter_ns() - began
        self.position += 1
        if output is not None:
            self.text += len(output.outputs)
        return took

    def grow(self, items: int) -> None:
        while self.position < items:
            self.tick()


class LinearBench(Bench):
    """What Tickertape avoids: the same step, after a pass over all items of each stream, as engines do that rebuild
    a session's feature list for the worker at every step."""

    def tick(self) -> int:
        began = time.perf_counter_ns()
        for name in self.names:
            timeline = self.loop.scheduler.streams[name].timeline
            [(item.offset, item.length) for item in timeline._items]
        return time.perf_counter_ns() - began + super().tick()


def compare(young: Bench, old: Bench, rounds: int) -> dict[str, float]:
    """Median step of both, interleaved so that whatever else the machine does hits both."""
    for bench in (young, old):
        for _ in range(20):
            bench.tick()
    pairs = [(young.tick(), old.tick()) for _ in range(rounds)]
    young_ns = statistics.median(pair[0] for pair in pairs)
    old_ns = statistics.median(pair[1] for pair in pairs)
    return {"young_us": young_ns / 1e3, "old_us": old_ns / 1e3, "ratio": old_ns / young_ns}


def growth(streams: int, young: int, old: int, history: int, rounds: int) -> dict[str, float]:
    benches = [Bench.start(streams, history), Bench.start(streams, history)]
    for bench, items in zip(benches, (young, old), strict=True):
        bench.grow(items)
    return compare(benches[0], benches[1], rounds)


def host_time(kind: type[Bench], streams: int, items: int, history: int, rounds: int) -> float:
    """Median microseconds per stream and step."""
    bench = kind.start(streams, history)
    while bench.position < items:
        Bench.tick(bench)
    for _ in range(30):
        bench.tick()
    return statistics.median(bench.tick() for _ in range(rounds)) / streams / 1e3


def memory(items: int) -> int:
    """Bytes one stream holds after that many items."""
    tracemalloc.start()
    try:
        empty = tracemalloc.get_traced_memory()[0]
        bench = Bench.start(1)
        bench.grow(items)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - empty
    finally:
        tracemalloc.stop()


def run(quick: bool) -> dict[str, Any]:
    million = 100_000 if quick else 1_000_000
    many = 2_000 if quick else 20_000
    report: dict[str, Any] = {}
    print("Whole step (messages in, plan, null execute, commit, detokenize, message out)\n")
    print(f"{'streams':>8} {'items':>22} {'timeline':>10} {'young us':>10} {'old us':>10} {'ratio':>7}")
    cases = [
        (1, 1_000, million, 64, "pruned"),
        (1, 1_000, million, RETAIN_EVERYTHING, "retained"),
        (64, 1_000, many, 64, "pruned"),
    ]
    for streams, young, old, history, label in cases:
        row = growth(streams, young, old, history, 200 if streams > 1 else 5_000)
        report[f"{streams} streams, {old} over {young} items, {label}"] = row
        print(
            f"{streams:>8} {old:>12,} over {young:>5,} {label:>9} {row['young_us']:>10.1f} {row['old_us']:>10.1f}"
            f" {row['ratio']:>7.3f}"
        )
    print("\nHost time per stream and step, in microseconds\n")
    flat = host_time(Bench, 512, 0, 64, 60)
    report["512 streams, us per stream and step"] = flat
    print(f"  Tickertape, 512 streams                  {flat:8.2f}")
    for items in (1_000, 8_000, 32_000):
        linear = host_time(LinearBench, 1, items, RETAIN_EVERYTHING, 30)
        report[f"linear variant, {items} items, us per stream and step"] = linear
        print(f"  a pass over all items, {items:>6,} items       {linear:8.2f}")
    small, large = memory(10_000), memory(million)
    report["bytes at 10,000 items"], report[f"bytes at {million} items"] = small, large
    print("\nBytes one stream holds (transcript aside)\n")
    print(f"  at 10,000 items {small:,}; at {million:,} items {large:,}; ratio {large / small:.3f}")
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="a tenth of the items, for a first look")
    arguments = parser.parse_args()
    calm_collector()
    report = run(arguments.quick)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
