"""Trends and percentiles: growth is distinguished from noise."""

from __future__ import annotations

import pytest

from realtime.bench.statistics import percentile, trend


def test_trend_needs_points_and_matching_lengths() -> None:
    assert trend([1.0] * 5, [1.0] * 5) is None and trend([2.0] * 20, list(range(20))) is None
    with pytest.raises(ValueError, match="2 x values but 1 y values"):
        trend([1.0, 2.0], [1.0])


def test_trend_tells_growth_from_noise() -> None:
    xs = [float(x) for x in range(100)]
    noise = [((7919 * x) % 100) / 50 - 1 for x in range(100)]
    flat = trend(xs, noise)
    growing = trend(xs, [0.1 * x + error for x, error in zip(xs, noise, strict=True)])
    assert flat is not None and not flat.grows and flat.low < 0 < flat.high
    assert growing is not None and growing.grows and growing.low < 0.1 < growing.high


@pytest.mark.parametrize(("values", "expected"), [([], None), ([3.0], 3.0), ([1.0, 2.0, 3.0, 4.0], 2.5)])
def test_percentile(values: list[float], expected: float | None) -> None:
    assert percentile(values, 50) == expected
