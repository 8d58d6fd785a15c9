"""Statistics for load tests: percentiles, and the slope of a least-squares line with its confidence interval.

Pure functions. The slope shows whether lag grows during a run. `load_test.py` and `benchmarks/` use them. Some of the
benchmarks run where the packages of the server are not installed, so this module imports none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

# Half of a 95 % confidence interval, in standard errors.
NORMAL_95 = 1.96
# With fewer points there is no trend.
MIN_POINTS = 8


@dataclass(frozen=True, slots=True)
class Trend:
    """Slope in units of y per unit of x, with its 95 % confidence interval."""

    slope: float
    low: float
    high: float

    @property
    def grows(self) -> bool:
        """The slope is significantly above zero."""
        return self.low > 0


def trend(xs: Sequence[float], ys: Sequence[float]) -> Trend | None:
    """The least-squares trend; None with too few points."""
    count = len(xs)
    if count != len(ys):
        raise ValueError(f"{count} x values but {len(ys)} y values")
    if count < MIN_POINTS:
        return None
    mean_x, mean_y = sum(xs) / count, sum(ys) / count
    spread = sum((x - mean_x) ** 2 for x in xs)
    if spread == 0:
        return None
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    residual = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in zip(xs, ys, strict=True))
    half = NORMAL_95 * sqrt(residual / (count - 2) / spread)
    return Trend(slope, slope - half, slope + half)


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The percentile `percent` (0 to 100), with linear interpolation; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
