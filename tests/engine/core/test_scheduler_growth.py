"""A stream's millionth item costs what its first did: counted in objects and lengths, not in seconds."""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter

from benchmarks.step_cost import Bench
from engine.messages import Abort


def objects_held() -> Counter[str]:
    gc.collect()
    return Counter(type(thing).__name__ for thing in gc.get_objects())


def test_objects_do_not_accumulate() -> None:
    bench = Bench.start(1)
    bench.grow(12_000)
    young = objects_held()
    bench.grow(60_000)
    old = objects_held()
    grown = {name: count - young[name] for name, count in old.items() if count - young[name] > 40}
    # The timeline lets old items go in handfuls, so a few more may be held at one moment than at another.
    assert {name: count for name, count in grown.items() if name not in {"Item", "list"} or count > 150} == {}


def test_no_list_of_a_stream_grows() -> None:
    bench = Bench.start(1)
    sizes = []
    for items in (5_000, 50_000):
        bench.grow(items)
        stream = bench.loop.scheduler.streams["stream-0"]
        timeline, clock = stream.timeline, stream.clock
        sizes.append([len(timeline._items), len(timeline._masked), len(clock._positions), len(stream.cached)])
        sizes[-1] += [len(ring.pages) for ring in stream.rings]
        sizes[-1] += [len(stream.flushes), len(stream.text._unsent), len(stream.new_pages)]
        sizes[-1].append(len(bench.loop.scheduler.cache.entries))
    young, old = sizes
    assert all(now <= before + 64 for before, now in zip(young, old, strict=True)), (young, old)


def test_a_parked_stream_is_not_looked_at() -> None:
    """Calls made by a step of one busy stream, with and without a thousand parked ones beside it."""

    def calls_per_step(parked: int) -> int:
        bench = Bench.start(1 + parked)
        bench.names = bench.names[:1]
        bench.grow(40)
        calls = 0

        def count(*_: object) -> None:
            nonlocal calls
            calls += 1

        messages = bench.messages()
        sys.setprofile(count)
        bench.loop.submit(messages, bench.position)
        bench.loop.step()
        sys.setprofile(None)
        return calls

    assert calls_per_step(1_000) == calls_per_step(0)


def test_a_retained_timeline_costs_no_more_calls() -> None:
    """With everything kept, an old step makes exactly the calls a young one makes."""

    def calls_of_five_steps(items: int) -> int:
        bench = Bench.start(1, history_positions=1 << 40)
        bench.grow(items)
        calls = 0

        def count(*_: object) -> None:
            nonlocal calls
            calls += 1

        for _ in range(5):
            messages = bench.messages()
            sys.setprofile(count)
            bench.loop.submit(messages, bench.position)
            bench.loop.step()
            sys.setprofile(None)
            bench.position += 1
        return calls

    assert calls_of_five_steps(40_000) == calls_of_five_steps(8_000)


def test_a_closed_stream_leaves_no_cycle_for_the_collector() -> None:
    bench = Bench.start(1)
    bench.grow(40)
    stream = bench.loop.scheduler.streams["stream-0"]
    timeline = weakref.ref(stream.timeline)
    del stream
    gc.collect()
    gc.disable()
    try:
        bench.loop.submit([Abort("stream-0")], 0)
        bench.loop.step()
        assert timeline() is None
    finally:
        gc.enable()
