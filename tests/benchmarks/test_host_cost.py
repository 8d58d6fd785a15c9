"""The benchmark of the engine's thread: its streams produce the expected words."""

from __future__ import annotations

import pytest

from benchmarks.host_cost import Bench


@pytest.mark.parametrize(("silent_every", "silent"), [(0, 0), (1, 6), (2, 3)])
@pytest.mark.parametrize("message_positions", [1, 3])
def test_every_item_is_computed_or_cut(silent_every: int, silent: int, message_positions: int) -> None:
    bench = Bench(6, 2, silent_every, message_positions)
    for _ in range(60):
        bench.round()
    while bench.loop.has_work():
        bench.tick()
    streams = bench.loop.scheduler.streams
    assert len(streams) == 6
    assert sum(stream.computed < 60 for stream in streams.values()) == silent
    # Every handoff is kept, and outputs that were read are forgotten.
    assert len(bench.host.handoffs) == 6
    assert all(len(hosted.outputs) <= 6 for hosted in bench.host.hosted.streams.values())
