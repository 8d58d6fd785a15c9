"""The load that an engine reports: steps and messages."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.messages import Open
from engine.server.host import LoadReport, active_at_once
from engine.server.loop import EngineLoop
from engine.server.metering import ENOUGH_STEPS
from tests.engine import fakes

STREAMS = 4
PERIOD_NS = 80_000_000


@pytest.fixture
def loop() -> EngineLoop:
    """Four live streams, and a file. Steps were measured: 8 ms of every 80 ms go to each stream."""
    loop = fakes.build(detects=True)
    loop.submit([Open(f"live {number}") for number in range(STREAMS)], 0)
    loop.submit([Open("file", live=False)], 0)
    for number in range(ENOUGH_STEPS):
        loop.meter.live_cost.add(1, PERIOD_NS / 10, PERIOD_NS, number * PERIOD_NS)
    return loop


def test_messages_are_a_part_of_the_load_and_of_what_a_stream_adds(loop: EngineLoop) -> None:
    """An engine whose thread is busy with messages half of the time has no room for steps of all of it."""
    report = LoadReport(loop, 0.0)
    report.add_time_between_steps(1.0)
    report.measure(loop, [], 0.0, 2.0)
    assert report.status.load == pytest.approx(0.5)
    assert report.status.load_per_stream == pytest.approx(0.1 + 0.5 / STREAMS)
    report.measure(loop, [], 0.0, 4.0)
    assert report.status.load == 0.0 and report.status.load_per_stream == pytest.approx(0.1)


def test_messages_of_files_are_not_charged_to_live_streams(loop: EngineLoop) -> None:
    report = LoadReport(loop, 0.0)
    loop.meter.totals.speech_ns, loop.meter.totals.live_speech_ns = 100_000, 25_000.0
    report.add_time_between_steps(1.0)
    report.measure(loop, [], 0.0, 2.0)
    assert report.status.load == pytest.approx(0.125)


def test_what_a_stream_adds_stays_unknown_until_steps_were_measured(loop: EngineLoop) -> None:
    loop.meter.live_cost.forget()
    report = LoadReport(loop, 0.0)
    report.add_time_between_steps(1.0)
    report.measure(loop, [], 0.0, 2.0)
    assert report.status.load_per_stream == 0.0


def test_a_clock_that_stands_takes_nothing_back(loop: EngineLoop) -> None:
    """Steps are timed by another clock than messages."""
    report = LoadReport(loop, 0.0)
    report.add_time_between_steps(-0.001)
    report.measure(loop, [], 0.0, 2.0)
    assert report.status.load == 0.0


def message_positions(report: LoadReport, loop: EngineLoop, ticks_ms: list[list[float]]) -> list[int]:
    """What gateways are asked for after seconds with ticks of these lengths."""
    found, now = [], report._load_since
    for ticks in ticks_ms:
        for length in ticks:
            report.add_tick(length / 1000)
        now += 1.1
        report.measure(loop, [], 0.0, now)
        found.append(report.status.message_positions)
    return found


def test_while_ticks_are_long_gateways_are_asked_for_longer_messages(loop: EngineLoop) -> None:
    report = LoadReport(loop, 0.0)
    busy, calm, between = [40.0] * 25, [10.0] * 90, [25.0] * 40
    # A position of this model takes 80 ms.
    assert message_positions(report, loop, [calm, between, busy, busy, busy, busy]) == [1, 1, 2, 3, 4, 4]
    assert message_positions(report, loop, [between, calm, between, calm, [], calm]) == [4, 3, 3, 2, 1, 1]


def test_a_second_with_many_idle_ticks_is_as_long_for_audio_as_its_long_ones(loop: EngineLoop) -> None:
    report = LoadReport(loop, 0.0)
    assert message_positions(report, loop, [[0.01] * 5000 + [100.0] * 5]) == [2]


def test_messages_of_a_windowed_model_stay_as_they_are() -> None:
    loop = fakes.build(fakes.WINDOWED, detects=True)
    assert message_positions(LoadReport(loop, 0.0), loop, [[500.0], [500.0]]) == [1, 1]


@pytest.mark.parametrize(
    ("recent", "active", "expected"),
    [(0, 0, 0), (100, 0, 2), (100, 50, 60), (100, 100, 100), (1200, 600, 635), (64, 63, 64)],
)
def test_of_many_conversations_only_some_are_active_at_once(recent: int, active: int, expected: int) -> None:
    assert active_at_once(recent, active) == expected


def test_a_stream_of_a_windowed_model_is_active_between_its_strides() -> None:
    """Its audio waits for a whole stride, and then for the step."""
    spec = fakes.WINDOWED
    stride_ns = spec.stride_positions * spec.samples_per_position * 1_000_000_000 // spec.sample_rate
    waits = SimpleNamespace(queued=False, waiting_since=time.monotonic_ns() - 2 * stride_ns)
    silent = SimpleNamespace(queued=False, waiting_since=time.monotonic_ns() - 10 * stride_ns - 10_000_000_000)
    streams = {f"s{number}": waits if number < 100 else silent for number in range(120)}
    recent = [SimpleNamespace(loop_name=name, opened_at=0.0) for name in streams]
    loop = SimpleNamespace(scheduler=SimpleNamespace(streams=streams, spec=spec))
    found = LoadReport._expected(cast(Any, recent), cast(Any, loop), 100.0)
    assert found == active_at_once(120, 100) > 100
