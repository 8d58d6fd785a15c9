"""What an engine step costs on the host, and whether the cost grows with the age of a session.

    python -m benchmarks.step_cost [--json FILE]

A step is everything but the model: messages in, plan, null execute, commit, detokenize, message out. Sizes that are
compared run interleaved in one process, and their medians are compared, so that noise affects both alike. The cycle
collector is set as in the engine process. `linear` is what Tickertape avoids: a pass over all items of each stream
before the step, as in engines that rebuild a session's feature list at every step.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import tracemalloc
from dataclasses import dataclass
from typing import Any

from benchmarks.engines import NullRunner, room_for, voxtral_spec
from benchmarks.measuring import parser_of, run_command, show
from engine.core.scheduler import Scheduler
from engine.messages import Feed, Item, Open
from engine.server.loop import EngineLoop, calm_collector

RETAIN_EVERYTHING = 1 << 40


@dataclass
class Bench:
    """A loop with streams of one age. `tick` feeds one item to each and runs the step."""

    loop: EngineLoop
    names: list[str]
    # Items that each stream has.
    position: int = 0

    @classmethod
    def start(cls, streams: int, history_positions: int = 64) -> Bench:
        spec = voxtral_spec(history_positions)
        runner = NullRunner(spec)
        loop = EngineLoop(Scheduler(spec, room_for(streams, spec), runner.vocabulary), runner)
        names = [f"stream-{i}" for i in range(streams)]
        loop.submit([Open(name) for name in names], 0)
        loop.step()
        return cls(loop, names)

    def messages(self) -> list[Feed]:
        """The messages for one frame of every stream, as the transport would deliver them."""
        position = self.position
        return [
            Feed(name, [Item(position, 1, position * 1280, b"%d/%d" % (index, position), b"pcm")])
            for index, name in enumerate(self.names)
        ]

    def tick(self, linear: bool = False) -> int:
        """One frame of every stream through one step; nanoseconds of it."""
        messages = self.messages()
        began = time.perf_counter_ns()
        if linear:
            for name in self.names:
                [(item.offset, item.length) for item in self.loop.scheduler.streams[name].timeline._items]
        self.loop.submit(messages, self.position)
        self.loop.step()
        took = time.perf_counter_ns() - began
        self.position += 1
        return took

    def grow(self, items: int) -> None:
        while self.position < items:
            self.tick()


def growth(streams: int, young: int, old: int, history: int, rounds: int) -> dict[str, float]:
    """Median step of young and old streams, interleaved so that other work on the machine affects both."""
    benches = [Bench.start(streams, history), Bench.start(streams, history)]
    for bench, items in zip(benches, (young, old), strict=True):
        bench.grow(items)
        for _ in range(20):
            bench.tick()
    pairs = [(benches[0].tick(), benches[1].tick()) for _ in range(rounds)]
    young_us, old_us = (statistics.median(pair[side] for pair in pairs) / 1e3 for side in (0, 1))
    return {"young_us": young_us, "old_us": old_us, "ratio": old_us / young_us}


def host_time(streams: int, items: int, history: int, rounds: int, linear: bool = False) -> float:
    """Median microseconds per stream and step."""
    bench = Bench.start(streams, history)
    bench.grow(items)
    for _ in range(30):
        bench.tick(linear)
    return statistics.median(bench.tick(linear) for _ in range(rounds)) / streams / 1e3


def memory(items: int) -> int:
    """Bytes of one stream after that many items, without its transcript."""
    tracemalloc.start()
    try:
        empty = tracemalloc.get_traced_memory()[0]
        bench = Bench.start(1)
        bench.grow(items)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - empty
    finally:
        tracemalloc.stop()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    calm_collector()
    few, many, million, rounds = (50, 100, 2_000, 30) if options.small else (1_000, 20_000, 1_000_000, 5_000)
    report: dict[str, Any] = {}
    for streams, old, history, label in (
        (1, million, 64, "pruned"),
        (1, million, RETAIN_EVERYTHING, "retained"),
        (64, many, 64, "pruned"),
    ):
        name = f"step of {streams} streams, {old} over {few} items, timeline {label}"
        report[name] = growth(streams, few, old, history, rounds if streams == 1 else min(rounds, 200))
        show(name, report[name])
    each = {"512 streams": host_time(512, 0, 64, 5 if options.small else 60)}
    for items in (50, 500) if options.small else (1_000, 8_000, 32_000):
        each[f"linear, {items} items"] = host_time(1, items, RETAIN_EVERYTHING, 30, linear=True)
    report["us per stream and step"] = each
    show("Microseconds per stream and step", each)
    held = {f"bytes at {items} items": memory(items) for items in (500 if options.small else 10_000, million)}
    few_bytes, many_bytes = held.values()
    report["memory"] = held | {"ratio": many_bytes / few_bytes}
    show("Bytes one stream holds", report["memory"])
    return report


def main(arguments: list[str] | None = None) -> None:
    run_command(parser_of(__doc__), arguments, measure)


if __name__ == "__main__":
    main()
