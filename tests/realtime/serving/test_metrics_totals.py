"""Sums of figures over several processes: they never decrease, and cost the same after any number of dead processes."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from realtime.serving.metrics import Metrics, Totals, report


def reported(metrics: Metrics) -> msgspec.Raw:
    return report(metrics.families())


def value(totals: Totals, name: str) -> float:
    found = re.search(rf"^tickertape_{re.escape(name)} (\S+)$", totals.exposition().decode(), re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def process(refused: int = 0, sessions: int = 0, lags: Iterable[float] = ()) -> Metrics:
    metrics = Metrics()
    for _ in range(refused):
        metrics.refused.labels("auth").inc()
    metrics.sessions.set(sessions)
    for lag in lags:
        metrics.lag.observe(lag)
    return metrics


def test_counters_and_histograms_are_sums_over_the_living_and_the_dead_and_gauges_over_the_living() -> None:
    totals = Totals()
    totals.add_report(1, reported(process(refused=3, sessions=5, lags=[0.1, 0.1])))
    totals.add_report(2, reported(process(refused=4, sessions=7, lags=[0.1])))
    figures = ('refused_total{reason="auth"}', "sessions", "lag_seconds_count", 'lag_seconds_bucket{le="0.12"}')
    assert [value(totals, name) for name in figures] == [7, 12, 3, 3]
    totals.forget(1)
    assert [value(totals, name) for name in figures] == [7, 7, 3, 3]
    totals.add_report(3, reported(process(refused=1, sessions=1)))
    totals.add_report(2, reported(process(refused=5, sessions=2, lags=[0.1])))
    assert [value(totals, name) for name in figures] == [9, 3, 3, 3]
    totals.forget(2)
    totals.forget(3)
    assert [value(totals, name) for name in figures[::2]] == [9, 3], "also when none of them lives"
    assert "_created" not in totals.exposition().decode(), "a moment of one process is not one of the server"


def test_what_all_processes_see_alike_is_not_added_up_and_does_not_go_down() -> None:
    def seen(steps: int, streams: int) -> msgspec.Raw:
        families: list[Metric] = [
            CounterMetricFamily("tickertape_steps", "", value=steps),
            GaugeMetricFamily("tickertape_engine_streams", "", value=streams),
        ]
        return report((family, True) for family in families)

    totals = Totals()
    totals.add_report(1, seen(100, 3))
    totals.add_report(2, seen(101, 3))
    assert (value(totals, "steps_total"), value(totals, "engine_streams")) == (101, 3)
    totals.add_report(3, seen(20, 2))  # it came after an engine had died, and has not seen what that one did
    totals.forget(1)
    totals.forget(2)
    assert (value(totals, "steps_total"), value(totals, "engine_streams")) == (101, 2)


def test_a_value_that_is_no_number_is_left_out() -> None:
    totals = Totals()
    broken = GaugeMetricFamily("tickertape_load", "", value=float("nan"))
    totals.add_report(1, report([(broken, True)]))
    assert b"tickertape_load " not in totals.exposition().replace(b"# HELP tickertape_load ", b"").replace(
        b"# TYPE tickertape_load ", b""
    )


def test_what_is_kept_and_read_does_not_grow_with_the_number_of_deaths() -> None:
    totals = Totals()
    sizes = []
    for number in range(1, 201):
        totals.add_report(number, reported(process(refused=1, sessions=1, lags=[0.1])))
        sizes.append((len(totals), len(re.sub(rb"[\d.]+$", b"", totals.exposition()))))
        totals.forget(number)
    assert value(totals, 'refused_total{reason="auth"}') == 200
    assert sizes[-1][0] == sizes[1][0], "as many numbers as after the first death"
    assert abs(sizes[-1][1] - sizes[1][1]) < 100, "the same lines, with longer numbers"
