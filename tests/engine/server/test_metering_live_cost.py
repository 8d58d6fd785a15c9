"""The cost of a live stream, estimated from steps of known cost."""

from __future__ import annotations

import random

import pytest

from engine.core.plan import DecodeTask, StepPlan
from engine.server.metering import ENOUGH_STEPS, LiveCost, StepMeter
from engine.spec import ModelSpec

PERIOD_NS = 80_000_000


def measured(steps: list[tuple[int, float]]) -> LiveCost:
    cost = LiveCost()
    for number, (streams, milliseconds) in enumerate(steps):
        cost.add(streams, milliseconds * 1e6, streams * PERIOD_NS, number * PERIOD_NS)
    return cost


def test_nothing_is_known_before_a_few_steps() -> None:
    cost = measured([(1, 8.0)] * (ENOUGH_STEPS - 1))
    assert cost.shares() == (0.0, 0.0)
    cost.add(1, 8e6, PERIOD_NS, 0)
    assert cost.shares() != (0.0, 0.0)


def test_a_stream_that_was_always_alone_is_charged_with_everything() -> None:
    per_step, per_stream = measured([(1, 8.0)] * 50).shares()
    assert per_step == 0.0 and per_stream == pytest.approx(0.1)


def test_what_a_batch_shares_is_told_from_what_each_stream_adds() -> None:
    dice = random.Random(1)
    sizes = [dice.randint(1, 30) for _ in range(500)]
    per_step, per_stream = measured([(n, 4.0 + 0.2 * n + dice.gauss(0, 0.2)) for n in sizes]).shares()
    assert per_step == pytest.approx(4 / 80, rel=0.1) and per_stream == pytest.approx(0.2 / 80, rel=0.1)


def test_two_streams_without_anything_shared_cost_twice_as_much() -> None:
    dice = random.Random(2)
    sizes = [dice.randint(1, 2) for _ in range(300)]
    per_step, per_stream = measured([(n, n * dice.uniform(5, 15)) for n in sizes]).shares()
    assert per_step + 4 * per_stream == pytest.approx(4 * 10 / 80, rel=0.15)


def test_a_machine_that_slows_down_is_noticed() -> None:
    cost = measured([(1, 8.0)] * 1000)
    for number in range(1000, 2500):
        cost.add(1, 16e6, PERIOD_NS, number * PERIOD_NS)
    assert cost.shares()[1] == pytest.approx(0.2, rel=0.02)


def test_what_was_long_ago_is_soon_forgotten() -> None:
    """The machine was busy with something else, so few were let in; what they measure must count quickly."""
    cost = measured([(1, 80.0)] * 1000)
    an_hour_later = 3600 * 10**9
    for number in range(20):
        cost.add(1, 8e6, PERIOD_NS, an_hour_later + number * 8 * 10**8)
    assert cost.shares()[1] < 0.6


def test_a_step_that_grows_cheaper_with_more_streams_still_costs_something() -> None:
    """By chance, or because longer windows ran alone: no figure may promise room without end."""
    per_step, per_stream = measured([(1, 12.0), (2, 8.0)] * 100).shares()
    assert per_stream > 0 and per_step >= 0
    assert per_step + 1.5 * per_stream == pytest.approx(10 / 80, rel=0.05)


def test_a_stream_that_steps_more_often_than_its_audio_needs_costs_more() -> None:
    """At a pause a windowed model hears its window after a part of a stride."""
    cost = LiveCost()
    for number in range(100):
        cost.add(1, 8e6, PERIOD_NS / (1 + number % 2), number * PERIOD_NS)
    assert cost.shares()[1] == pytest.approx(0.1 / 0.75, rel=0.05)


@pytest.mark.parametrize("longest", [1, 4])
def test_steps_of_several_passes_measure_what_single_ones_do(longest: int) -> None:
    """A pass takes 4 ms and 0.2 ms for each stream; streams that are behind take part in further passes."""
    dice, now = random.Random(3), 0
    meter = StepMeter(ModelSpec("frames", 16_000, 1280), lambda: now)
    meter.begin()
    for _ in range(500):
        lengths = [dice.randint(1, longest) for _ in range(dice.randint(1, 30))]
        tasks = [DecodeTask(slot, "s", 0, 0, length, [], [], final=False) for slot, length in enumerate(lengths)]
        began, now = now, now + int(1e6 * (4 * max(lengths) + 0.2 * sum(lengths)))
        meter.lap()
        meter.account(StepPlan(0, decode=tasks, live=len(tasks)), began)
    per_step, per_stream = meter.live_cost.shares()
    assert per_step == pytest.approx(4 / 80, rel=0.1) and per_stream == pytest.approx(0.2 / 80, rel=0.1)
