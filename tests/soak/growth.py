"""Measures growth of memory, objects and the time of a step, with 95 % intervals."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from pathlib import Path

from realtime.bench.statistics import trend


def resident_bytes() -> int:
    """Memory of this process after garbage collection."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def object_count() -> int:
    """Objects that the collector tracks, after it has freed unreachable cycles."""
    gc.collect()
    return len(gc.get_objects())


def assert_flat(what: str, xs: Sequence[float], ys: Sequence[float], unit: str, harmless: float) -> str:
    """No growth from the first to the last x: the interval of the slope reaches zero or less, or even its high end
    would add less than `harmless` over the whole run. Returns the figure in words."""
    found = trend(xs, ys)
    assert found is not None, f"{what}: too few points"
    length = xs[-1] - xs[0]
    total, low, high = found.slope * length, found.low * length, found.high * length
    said = f"{what}: {total:+.4g} {unit} over the whole run (95 %: {low:+.4g} to {high:+.4g})"
    assert low <= 0 or high < harmless, said
    return said
