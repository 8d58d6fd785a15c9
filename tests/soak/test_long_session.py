"""One session of a day, in compressed time, through the real loop: late steps cost as much as early ones."""

from __future__ import annotations

import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from engine.boundary.items import make_cutter, prepare
from engine.messages import Dead, Failed, Feed, Flush, Flushed, Open, Text
from engine.server.loop import EngineLoop
from tests.engine.fakes import POSITION, RATE, build
from tests.soak.growth import assert_flat, object_count, resident_bytes

POSITIONS_PER_HOUR = 3600 * RATE // POSITION
TURN_POSITIONS = 250
HOURS = 24
# So often the old session is compared with a young one.
CHECKS = 96
COMPARED_STEPS = 400


class Session:
    """A session that speaks without end, with a turn every 20 seconds."""

    def __init__(self, loop: EngineLoop, seed: int) -> None:
        self._loop = loop
        self._cutter = make_cutter(loop.scheduler.spec)
        self._chunks = np.random.default_rng(seed).standard_normal((64, POSITION), dtype=np.float32)
        self._position = 0
        self.letters = 0
        self.flushed = 0
        loop.submit([Open("long")], 0)

    def play(self, positions: int) -> list[int]:
        """CPU nanoseconds of each step."""
        loop, cutter, times = self._loop, self._cutter, []
        spec = loop.scheduler.spec
        for _ in range(positions):
            self._position += 1
            chunk = self._chunks[self._position % 64].copy()
            # No two positions of a day sound the same.
            chunk[0] = self._position
            items = prepare(cutter, cutter.cut(chunk), spec)
            began = time.thread_time_ns()
            loop.submit([Feed("long", items)], self._position)
            self._step()
            if self._position % TURN_POSITIONS == 0:
                rest = prepare(cutter, cutter.flush(spec.flush_positions_for(spec.default_delay_positions)), spec)
                loop.submit([Feed("long", rest), Flush("long", self._position)], self._position)
                while loop.has_work():
                    self._step()
            times.append(time.thread_time_ns() - began)
        return times

    def _step(self) -> None:
        result = self._loop.step()
        for output in [] if result is None else result.outputs:
            assert not isinstance(output, Dead | Failed), output
            if isinstance(output, Text):
                self.letters += len(output.delta)
            elif isinstance(output, Flushed):
                self.flushed += 1


def started(windowed: bool, seed: int) -> Session:
    session = Session(build(windowed=windowed, max_streams=2), seed)
    # Until all rings and caches are full.
    session.play(1_000)
    return session


@pytest.mark.parametrize("windowed", [False, True], ids=["frames", "windowed"])
def test_a_session_holds_no_more_after_eight_minutes_than_after_three(windowed: bool) -> None:
    session = started(windowed, seed=1)
    tracemalloc.start()
    try:
        session.play(1_000)
        objects, held = object_count(), tracemalloc.get_traced_memory()[0]
        session.play(4_000)
        assert object_count() - objects <= 20
        assert tracemalloc.get_traced_memory()[0] - held <= 16_384
    finally:
        tracemalloc.stop()
    assert session.letters > 1_000 and session.flushed == 24


@pytest.mark.soak
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("windowed", [False, True], ids=["frames", "windowed"])
def test_a_day_costs_the_same_from_first_to_last_hour(windowed: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Old and young sessions are compared side by side, so that what else the machine does hits both alike."""
    session = started(windowed, seed=1)
    hours, ratios, resident = [], [], []
    per_check = HOURS * POSITIONS_PER_HOUR // CHECKS
    for check in range(CHECKS):
        session.play(per_check - COMPARED_STEPS)
        hours.append((check + 1) * HOURS / CHECKS)
        ratios.append(_compare(session, lambda: started(windowed, seed=2)))
        resident.append(resident_bytes() / 2**20)
    warm = CHECKS // 12
    lines = [
        assert_flat("step time against a young session", hours, ratios, "of a step", harmless=0.02),
        assert_flat("resident memory", hours[warm:], resident[warm:], "MiB", harmless=1.0),
    ]
    with capsys.disabled():
        sys.stdout.write(f"\n{HOURS} hours, {'windowed' if windowed else 'frames'}: " + "; ".join(lines) + "\n")


def _compare(old: Session, make_young: Callable[[], Session]) -> float:
    """Median step time of the old session over that of a young one, their steps taken in turns."""
    young = make_young()
    old_times: list[int] = []
    young_times: list[int] = []
    for _ in range(COMPARED_STEPS // 50):
        old_times += old.play(50)
        young_times += young.play(50)
    return statistics.median(old_times) / statistics.median(young_times)
