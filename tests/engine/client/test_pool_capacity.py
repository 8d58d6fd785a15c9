"""From measured costs to the number of streams that hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from engine.boundary.codec import Status
from engine.client.engine_handles import RemoteEngine
from engine.client.link import EngineLink
from engine.client.pool import RETRY_LATER_S, RETRY_SOON_S, UNMEASURED_STREAMS, EnginePool, capacity_of
from engine.client.stream import EngineStream


def status(counted: int = 0, per_step: float = 0.0, per_stream: float = 0.0, used: int | None = None) -> Status:
    state = Status(slots_total=64, active_total=64, slots_used=counted if used is None else used)
    state.counted, state.load_per_step, state.load_per_stream = counted, per_step, per_stream
    return state


def test_no_engine_has_no_room() -> None:
    capacity = capacity_of([], 0.85)
    assert (capacity.total, capacity.holds, capacity.free, capacity.load) == (0, 0, 0, 1.0)


def test_an_engine_that_measured_nothing_takes_the_first_few() -> None:
    assert capacity_of([status()], 0.85).free == UNMEASURED_STREAMS
    assert capacity_of([status(counted=UNMEASURED_STREAMS)], 0.85).free == 0


def test_as_many_as_fit_under_the_load() -> None:
    capacity = capacity_of([status(counted=3, per_step=0.1, per_stream=0.15)], 0.85)
    assert (capacity.counted, capacity.holds, capacity.free) == (3, 5, 2)
    assert capacity.retry_after_s == RETRY_SOON_S


def test_places_are_a_limit_too() -> None:
    capacity = capacity_of([status(counted=1, per_stream=0.001, used=63)], 0.85)
    assert (capacity.holds, capacity.free) == (64, 1)


def test_zero_leaves_the_load_out() -> None:
    assert capacity_of([status(counted=10, per_stream=0.5)], 0.0).free == 54


def test_an_engine_that_is_too_slow_takes_one_stream_so_that_it_measures_again() -> None:
    capacity = capacity_of([status(counted=1, per_step=0.9, per_stream=0.1)], 0.85)
    assert (capacity.holds, capacity.free, capacity.retry_after_s) == (1, 0, RETRY_LATER_S)
    assert capacity_of([status(per_step=0.9, per_stream=0.1)], 0.85).free == 1


@pytest.mark.parametrize("max_load", [0.5, 0.95, 1.0])
@pytest.mark.parametrize("per_step", [0.05, 0.9, 0.96, 1.2])
def test_short_ticks_leave_room_whatever_the_cost_of_steps(max_load: float, per_step: float) -> None:
    """An engine that steps without a pause measures that it is full, whatever a stream costs."""
    state = status(counted=100, per_step=per_step, per_stream=0.01)
    state.active_total = state.slots_total = 1000
    state.tick_streams, holds = 100, []
    for share in (0.0, 0.5 * max_load, 0.99 * max_load, max_load, 3.0):
        state.tick_share = share
        holds.append(capacity_of([state], max_load).holds)
    by_cost = max(1, int((max_load - per_step) / 0.01))
    assert holds == [120, 110, 100, by_cost, by_cost]
    state.tick_share, state.counted = 0.5 * max_load, 109
    assert capacity_of([state], max_load).free == 1, "what was measured holds for the streams of that time"
    state.active_total = 105
    assert capacity_of([state], max_load).holds == 105


def test_room_on_one_engine_is_not_used_up_by_another_that_has_too_many() -> None:
    capacity = capacity_of([status(counted=9, per_stream=0.2), status(counted=1, per_stream=0.2)], 0.85)
    assert (capacity.counted, capacity.holds, capacity.free) == (10, 8, 3)


async def test_new_streams_go_where_there_is_room_and_not_where_streams_wait() -> None:
    pool = EnginePool([RemoteEngine(f"tcp://127.0.0.1:{port}") for port in (1, 2, 3, 4)], max_load=0.85)
    behind, full, busy, free = pool.all
    for pooled, state, streams in (
        (behind, status(per_stream=0.1), 0),
        (full, status(counted=8, per_stream=0.1), 0),
        (busy, status(counted=5, per_stream=0.1), 6),
        (free, status(counted=1, per_stream=0.1), 2),
    ):
        # Within the usual, waiting says nothing: a stream waits for the rest of its stride.
        state.lag_ms = 5000.0 if pooled is behind else 400.0 if pooled is free else 0.0
        pool.connected(pooled, cast(EngineLink, SimpleNamespace(status=state)))
        pooled.streams = dict.fromkeys(map(str, range(streams)), cast(EngineStream, None))
    orders = [pool.in_order() for _ in range(400)]
    assert all(order[2:] == [full, behind] for order in orders)
    # Seven streams have room on one of them and three on the other: by chance 280 and 120 times, give or take 30.
    assert 200 < sum(order[0] is free for order in orders) < 360
    free.marked_draining = True
    assert pool.in_order() == [busy, full, behind], "one that drains is not asked"
