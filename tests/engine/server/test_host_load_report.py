"""The load that an engine reports: steps and messages."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.messages import Open
from engine.server.host import MANY_STREAMS, MAX_MESSAGE_POSITIONS, LoadReport, active_at_once
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


Second = tuple[list[float], float, float]
"""The lengths of its ticks, for how long they waited for the device, and the length of further ticks in which streams
were rebuilt; in milliseconds."""


def message_positions(report: LoadReport, loop: EngineLoop, seconds: list[Second]) -> list[int]:
    """What gateways are asked for after each of these seconds."""
    found, now = [], report._load_since
    for ticks, waited, rebuilding in seconds:
        for length in ticks:
            report.add_tick(length / 1000, waited / len(ticks) / 1000, rebuilds=False)
        report.add_tick(rebuilding / 1000, rebuilding / 1000, rebuilds=True)
        now += 1.0
        report.measure(loop, [], 0.0, now)
        found.append(report.status.message_positions)
    return found


@pytest.fixture
def on_device(loop: EngineLoop) -> EngineLoop:
    cast(Any, loop.runner).overlaps_steps = True
    return loop


BUSY, CALM, BETWEEN = ([50.0] * 19, 50.0, 0.0), ([10.0] * 99, 500.0, 0.0), ([20.0] * 48, 160.0, 0.0)


def test_while_the_thread_is_busy_gateways_are_asked_for_longer_messages(on_device: EngineLoop) -> None:
    report = LoadReport(on_device, 0.0)
    assert message_positions(report, on_device, [CALM, BETWEEN, BUSY, BUSY, BUSY, BUSY]) == [1, 1, 2, 3, 4, 4]
    assert report.is_busy, "silence is skipped sooner"
    assert message_positions(report, on_device, [BETWEEN, CALM, BETWEEN, CALM, ([], 0.0, 0.0), CALM]) == [
        4,
        3,
        3,
        2,
        2,
        1,
    ]
    assert not report.is_busy


def test_a_thread_that_waits_for_a_slow_device_is_not_busy(on_device: EngineLoop) -> None:
    assert message_positions(LoadReport(on_device, 0.0), on_device, [([200.0] * 5, 900.0, 0.0)] * 3) == [1, 1, 1]


def test_a_thread_that_is_busy_in_short_ticks_has_time(on_device: EngineLoop) -> None:
    """With more work its ticks become longer and fewer. Longer messages would only make the words late."""
    assert message_positions(LoadReport(on_device, 0.0), on_device, [([10.0] * 99, 10.0, 0.0)] * 3) == [1, 1, 1]


def test_the_thread_is_judged_without_the_ticks_in_which_streams_were_rebuilt(on_device: EngineLoop) -> None:
    report, busy, mostly_rebuilding = LoadReport(on_device, 0.0), ([50.0] * 11, 30.0, 400.0), ([50.0] * 2, 0.0, 900.0)
    assert message_positions(report, on_device, [busy, busy, mostly_rebuilding, busy]) == [2, 3, 3, 4]


@pytest.mark.parametrize(
    ("rebuilding", "on_time", "asked"),
    [(MANY_STREAMS - 1, 0, 1), (MANY_STREAMS, 0, MAX_MESSAGE_POSITIONS), (MANY_STREAMS, 1, 1)],
)
def test_messages_are_long_at_once_while_all_of_many_streams_are_late(
    rebuilding: int, on_time: int, asked: int, on_device: EngineLoop
) -> None:
    report = LoadReport(on_device, 0.0)
    on_device.scheduler.rebuilding = {f"lost {number}" for number in range(rebuilding)}
    on_device.scheduler.recovering = {f"live {number}" for number in range(on_time, STREAMS)}
    report.measure(on_device, [], 0.0, 0.01)
    assert report.status.message_positions == asked
    on_device.scheduler.rebuilding = set()
    assert message_positions(report, on_device, [CALM] * 3)[-1] == 1


def test_messages_for_a_model_on_the_processor_stay_as_they_are(loop: EngineLoop) -> None:
    """There the thread computes the model itself; a windowed model computes when a stride is complete."""
    assert message_positions(LoadReport(loop, 0.0), loop, [BUSY, BUSY]) == [1, 1]
    windowed = fakes.build(True, detects=True)
    cast(Any, windowed.runner).overlaps_steps = True
    assert message_positions(LoadReport(windowed, 0.0), windowed, [BUSY, BUSY]) == [1, 1]


@pytest.mark.parametrize(("counted", "told"), [(MANY_STREAMS - 1, 0), (100, 100)])
def test_the_length_of_ticks_is_told_with_the_streams_that_it_holds_for(
    counted: int, told: int, loop: EngineLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A position takes 80 ms. Many short ticks without work count little."""
    monkeypatch.setattr(LoadReport, "_expected", lambda *_: counted)
    streams = [SimpleNamespace(live=True, speaking=True, last_active_at=0.0)] * MANY_STREAMS
    report = LoadReport(loop, 0.0)
    report.measure(loop, cast(Any, streams), 0.0, 0.5)
    for seconds in [0.02] * 40 + [0.0001] * 500:
        report.add_tick(seconds, 0.0, rebuilds=False)
    report.measure(loop, cast(Any, streams), 0.0, 2.0)
    assert report.status.tick_share == pytest.approx(0.25, rel=0.1) and report.status.tick_streams == told
    assert not report.is_busy or counted > 0.7 * report.status.active_total
    for _ in range(10):
        report.add_tick(0.07, 0.0, rebuilds=False)
    report.measure(loop, cast(Any, streams), 0.0, 4.0)
    assert report.is_busy, "a tick takes most of a position's time"
    report.measure(loop, cast(Any, streams), 0.0, 6.0)
    assert report.status.tick_streams == 0, "there were none"


def test_an_engine_whose_places_are_taken_skips_silence_sooner(
    loop: EngineLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = [130, 144, 144, 120, 120, 100, 100]
    left = iter(counts)
    monkeypatch.setattr(LoadReport, "_expected", lambda *_: next(left))
    streams = [SimpleNamespace(live=True, speaking=True, last_active_at=0.0)] * MANY_STREAMS
    report, found = LoadReport(loop, 0.0), []
    report.status.active_total = 200
    loop.meter.live_cost.forget()
    for now in range(1, len(counts) + 1):
        report.measure(loop, cast(Any, streams), 0.0, 1.1 * now)
        found.append(report.is_busy)
    # The shares are of the count before.
    assert found == [False, False, True, True, True, True, False]


def test_a_small_engine_may_be_full_and_computes_silence_as_usual(
    loop: EngineLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoadReport, "_expected", lambda *_: MANY_STREAMS - 1)
    report, streams = LoadReport(loop, 0.0), [SimpleNamespace(live=True, speaking=True, last_active_at=0.0)]
    report.status.active_total = MANY_STREAMS - 1
    for now in (2.0, 4.0, 6.0):
        report.measure(loop, cast(Any, streams * MANY_STREAMS), 0.0, now)
        assert not report.is_busy


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
