"""What a load on the whole server came to, for `benchmarks.gpu_server`: from what its clients found to figures."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.speech_sound import SAMPLE_RATE

# A lag that grows by more than this in a minute does not stay.
MAX_GROWTH_MS_PER_MIN = 100.0


@dataclass(frozen=True)
class Objective:
    """What a load must keep, in milliseconds. A model that answers every frame is held to the lag of its words (99th
    percentile), less its own delay; one that hears windows again and again to how far the engine is behind and to when
    texts are final (95th percentiles)."""

    lag_ms: float
    delay_ms: int
    windowed: bool


FRAMES = Objective(lag_ms=250.0, delay_ms=480, windowed=False)
WINDOWS = Objective(lag_ms=1500.0, delay_ms=0, windowed=True)


@dataclass(frozen=True)
class Load:
    """So many sessions, how they send, and for which share of the time each of them is silent."""

    sessions: int
    rate: int = SAMPLE_RATE
    append_ms: int = 80
    silent: float = 0.0

    @classmethod
    def parse(cls, text: str, rate: int, append_ms: int, silent: float) -> Load:
        """SESSIONS[:RATE[:APPEND_MS[:SILENT_SHARE]]]; the others stand for what is not said."""
        said = text.split(":")
        usual = [str(rate), str(append_ms), str(silent)]
        sessions, *others = [*said, *usual[len(said) - 1 :]]
        return cls(int(sessions), int(others[0]), int(others[1]), float(others[2]))

    def __str__(self) -> str:
        silent = f", each silent for {self.silent:.0%} of the time" if self.silent else ""
        return f"{self.sessions} sessions, {self.rate // 1000} kHz, appends of {self.append_ms} ms{silent}"


@dataclass(frozen=True)
class Said:
    """What the server told of itself at one moment: sessions that it holds, and how far its engine is behind."""

    holds: int
    behind_ms: float


@dataclass
class Result:
    """One measurement. Times in milliseconds, processor time in cores."""

    load: Load
    connected: int
    refusals: int
    # Sessions that the server itself says it holds, at the end of the time.
    said_to_hold: int
    failures: list[str]
    seconds: float
    # Words that were scored, and words in pauses, which were not.
    words: int
    words_in_pauses: int
    lag_p50: float
    lag_p95: float
    lag_p99: float
    lag_max: float
    growth_per_min: float
    # Audio that the engine has and has not read, of the stream that is furthest behind, by the engine's own count.
    behind_p50: float
    behind_p95: float
    # From the end of speech to the final text of a turn, which waits for the turn's silence.
    finals: int
    final_p50: float
    final_p95: float
    appends: int
    append_late_p99: float
    engine_cores: float
    # Of each process of the gateways, the busiest first.
    gateway_cores: list[float]
    client_cores: float
    gateway_us_per_append: float
    engine_us_per_append: float
    events: dict[str, int]

    def holds(self, objective: Objective) -> bool:
        whole = self.connected == self.load.sessions and not self.failures and self.words > 0
        late = [self.behind_p95, self.final_p95] if objective.windowed else [self.lag_p99]
        in_time = all(each <= objective.lag_ms for each in late)
        return whole and in_time and self.growth_per_min <= MAX_GROWTH_MS_PER_MIN


def summary(
    load: Load, seconds: float, findings: list[dict[str, Any]], cores: dict[str, float], said: list[Said]
) -> Result:
    """`said` is what the server told of itself; `cores` are those of the engine, of the clients, and of each process of
    the gateways."""
    pairs = [tuple(pair) for found in findings for pair in found["lags"]]
    moments, lags = np.array(pairs or [(0.0, float("nan"))]).T
    grows = len(pairs) > 1 and np.ptp(moments) > 0
    slope = float(np.polyfit(moments, lags, 1)[0]) * 60 if grows else 0.0
    appends = sum(found["appends"] for found in findings)
    late = [value for found in findings for value in found["late_ms"]]
    events: Counter[str] = Counter()
    for found in findings:
        events.update(found["events"])
    p50, p95, p99 = (float(np.percentile(lags, share)) for share in (50, 95, 99))
    finals = [value for found in findings for value in found["finals"]]
    behind = [capacity.behind_ms for capacity in said]
    gateways = sorted((used for name, used in cores.items() if name.startswith("gateway")), reverse=True)
    each = 1e6 * seconds / max(1, appends)
    return Result(
        load=load,
        connected=sum(found["connected"] for found in findings),
        refusals=sum(found["refusals"] for found in findings),
        said_to_hold=said[-1].holds if said else 0,
        failures=[text for found in findings for text in found["failures"]][:20],
        seconds=seconds,
        words=len(pairs),
        words_in_pauses=sum(found["in_pauses"] for found in findings),
        lag_p50=p50,
        lag_p95=p95,
        lag_p99=p99,
        lag_max=float(lags.max()),
        growth_per_min=slope,
        behind_p50=_percentile(behind, 50),
        behind_p95=_percentile(behind, 95),
        finals=len(finals),
        final_p50=_percentile(finals, 50),
        final_p95=_percentile(finals, 95),
        appends=appends,
        append_late_p99=_percentile(late, 99),
        engine_cores=cores["engine"],
        gateway_cores=gateways,
        client_cores=cores["clients"],
        gateway_us_per_append=sum(gateways) * each,
        engine_us_per_append=cores["engine"] * each,
        events=dict(events),
    )


def _percentile(values: list[float], share: float) -> float:
    return float(np.percentile(values, share)) if values else float("nan")


def print_result(result: Result, objective: Objective) -> None:
    gateways = " + ".join(f"{cores:.2f}" for cores in result.gateway_cores)
    print(
        f"whole server, {result.load}, {result.seconds:.0f} s: {'holds' if result.holds(objective) else 'FAILS'}\n"
        f"  connected {result.connected}, refusals {result.refusals}, failures {len(result.failures)}"
        f"{' (' + result.failures[0] + ')' if result.failures else ''}; the server says that it holds "
        f"{result.said_to_hold}\n"
        f"  lag of {result.words} words in speech, model delay taken off ({result.words_in_pauses} in pauses):\n"
        f"  p50 {result.lag_p50:.0f} p95 {result.lag_p95:.0f} "
        f"p99 {result.lag_p99:.0f} max {result.lag_max:.0f} ms, {result.growth_per_min:+.0f} ms a minute\n"
        f"  the engine is behind by p50 {result.behind_p50:.0f} p95 {result.behind_p95:.0f} ms; {result.finals} final "
        f"texts p50 {result.final_p50:.0f} p95 {result.final_p95:.0f} ms after the end of speech\n"
        f"  cores: engine {result.engine_cores:.2f}, gateways {gateways}, clients {result.client_cores:.2f}\n"
        f"  processor time per append: gateway {result.gateway_us_per_append:.0f} us, engine "
        f"{result.engine_us_per_append:.0f} us; appends late p99 {result.append_late_p99:.1f} ms",
        flush=True,
    )
