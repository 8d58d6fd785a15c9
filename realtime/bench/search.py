"""The largest number of streams that meets the objective: double until it fails, then bisect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from realtime.bench.record import RunRecord
from realtime.bench.trend import percentile


@dataclass(frozen=True, slots=True)
class Objective:
    """What a run must keep; times in seconds, the slope in milliseconds of lag a minute."""

    final_p95_s: float
    lag_p95_s: float
    slope_ms_per_minute: float = 100.0
    # Chunks that the generator itself sends later than this make a run worthless.
    generator_p99_ms: float = 100.0

    def missed(self, run: RunRecord) -> list[str]:
        """What was not kept, in words; empty if all was."""
        missed = []
        if run.failures:
            missed.append(f"{len(run.failures)} failures, the first: {run.failures[0]}")
        final = percentile(run.finals, 95)
        if final is None:
            missed.append("no finals at all")
        elif final > self.final_p95_s:
            missed.append(f"time to final p95 {final:.2f} s is above {self.final_p95_s:g} s")
        lag = percentile([value for _, value in run.lags], 95)
        if lag is not None and lag > self.lag_p95_s:
            missed.append(f"lag p95 {lag:.2f} s is above {self.lag_p95_s:g} s")
        growth = run.lag_trend
        # Only where even the low end of the interval says so: short runs say little about growth.
        if growth is not None and growth.low > self.slope_ms_per_minute:
            missed.append(f"lag grows by {growth.slope:.0f} ms a minute")
        late = percentile([value for client in run.clients for value in client.late_ms], 99)
        if late is not None and late > self.generator_p99_ms:
            missed.append(f"the generator itself was late (p99 {late:.0f} ms); give it more processes or a machine")
        return missed


def largest(meets: Callable[[int], bool], most: int) -> int:
    """The largest n up to `most` with `meets(n)`, 0 if not even one; assumes that fewer streams are never harder."""
    good, bad = 0, 1
    while bad <= most and meets(bad):
        good, bad = bad, min(2 * bad, most) if bad < most else most + 1
    while bad - good > 1:
        middle = (good + bad) // 2
        if meets(middle):
            good = middle
        else:
            bad = middle
    return good
