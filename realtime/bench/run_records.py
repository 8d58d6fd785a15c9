"""The records of a load test's runs: reads what the clients wrote, computes the figures, and checks the objective.

- Time to final: from the end of speech to the final transcript. The end of speech is the server's end of the turn minus
  its silence setting, so the wait for silence is part of the time, as it is for a user.
- Lag: from the end of the last word of a delta to its arrival, if the server sends word times; else from the end of a
  turn to the event that reports it. Its trend shows whether lag grows during a run.
- Failure: anything that a user would notice: no connection, an error, a turn without a final, a broken session.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from realtime.bench.statistics import Trend, percentile, trend
from realtime.client.wire_client import COMPLETED, DELTA, FAILED, LAST_COMMIT

SPEECH_STOPPED = "input_audio_buffer.speech_stopped"
COMMITTED = "input_audio_buffer.committed"


@dataclass(slots=True)
class ClientRecord:
    """The record of one client. Points are (arrival, value): seconds since the client's first sample, and seconds."""

    client: int
    # Points of the time to final, of the lag of words, and of the lag of turns.
    finals: list[tuple[float, float]] = field(default_factory=list)
    word_lags: list[tuple[float, float]] = field(default_factory=list)
    turn_lags: list[tuple[float, float]] = field(default_factory=list)
    transcripts: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    # How late the generator sent each chunk.
    late_ms: list[float] = field(default_factory=list)
    ended: bool = False
    # By item id: the end of speech of turns without final, in seconds; and turns that were committed and have no final.
    _speech_ends: dict[str, float] = field(default_factory=dict)
    _without_final: set[str] = field(default_factory=set)

    @property
    def text(self) -> str:
        return " ".join(self.transcripts)

    def add(self, entry: dict[str, Any], silence_s: float) -> None:
        if "event" in entry:
            self._add_event(entry["t"], entry["event"], silence_s)
        elif "failure" in entry:
            self.failures.append(entry["failure"])
        elif "late_ms" in entry:
            self.late_ms = entry["late_ms"]
        elif "end" in entry:
            self.ended = True

    def close(self) -> None:
        """Called after the last entry: turns that are still open become failures."""
        self.failures += [f"no final for the turn {item}" for item in sorted(self._without_final)]
        if not self.ended:
            self.failures.append("the generator stopped before the client was done")

    def _add_event(self, t: float, event: dict[str, Any], silence_s: float) -> None:
        kind = event.get("type")
        if kind == DELTA and event.get("words"):
            self.word_lags.append((t, t - event["words"][-1]["end"]))
        elif kind == SPEECH_STOPPED:
            end = event["audio_end_ms"] / 1000
            self.turn_lags.append((t, t - end))
            self._speech_ends[event["item_id"]] = end - silence_s
        elif kind == COMMITTED:
            self._without_final.add(event["item_id"])
        elif kind == COMPLETED:
            item = event["item_id"]
            self._without_final.discard(item)
            speech_end = self._speech_ends.pop(item, None)
            # A turn without text was noise; it has no time to final.
            if speech_end is not None and event["transcript"]:
                self.finals.append((t, t - speech_end))
            if event["transcript"]:
                self.transcripts.append(event["transcript"])
        elif kind == FAILED:
            self._without_final.discard(event["item_id"])
            self.failures.append(f"a turn failed: {event['error'].get('message')}")
        elif kind == "error" and event["error"].get("event_id") != LAST_COMMIT:
            self.failures.append(f"an error: {event['error'].get('message')}")


@dataclass(slots=True)
class RunRecord:
    """The record of one run with `streams` clients at once."""

    streams: int
    clients: list[ClientRecord]
    warm_up_s: float

    @property
    def finals(self) -> list[float]:
        return [value for client in self.clients for t, value in client.finals if t >= self.warm_up_s]

    @property
    def lags(self) -> list[tuple[float, float]]:
        """(time, lag) in seconds, from word times if the server sends them."""
        words = [point for client in self.clients for point in client.word_lags]
        points = words or [point for client in self.clients for point in client.turn_lags]
        return [point for point in points if point[0] >= self.warm_up_s]

    @property
    def failures(self) -> list[str]:
        return [f"client {client.client}: {reason}" for client in self.clients for reason in client.failures]

    @property
    def lag_trend(self) -> Trend | None:
        """The trend of the lag, in milliseconds per minute."""
        points = self.lags
        return trend([t / 60 for t, _ in points], [1000 * lag for _, lag in points])

    def figures(self) -> dict[str, Any]:
        lags = [lag for _, lag in self.lags]
        late = [value for client in self.clients for value in client.late_ms]
        lag_trend = self.lag_trend
        return {
            "streams": self.streams,
            "finals": len(self.finals),
            "time_to_final_s": _percentiles(self.finals),
            "lag_s": _percentiles(lags),
            "lag_slope_ms_per_minute": None
            if lag_trend is None
            else {"slope": lag_trend.slope, "low": lag_trend.low, "high": lag_trend.high},
            "failures": len(self.failures),
            "first_failures": self.failures[:5],
            "generator_late_ms": {**_percentiles(late), "max": max(late, default=None)},
        }


def _percentiles(values: list[float]) -> dict[str, float | None]:
    return {f"p{share}": percentile(values, share) for share in (50, 95, 99)}


def read_run(paths: Iterable[Path], clients: Sequence[int], silence_s: float, warm_up_s: float) -> RunRecord:
    """Read the files of a run. A client without entries counts as failed."""
    records = {client: ClientRecord(client) for client in clients}
    for path in paths:
        with path.open(encoding="utf-8") as file:
            for line in file:
                entry = json.loads(line)
                records[entry["client"]].add(entry, silence_s)
    for record in records.values():
        record.close()
    return RunRecord(len(records), list(records.values()), warm_up_s)


@dataclass(frozen=True, slots=True)
class Objective:
    """The limits that a run must meet."""

    final_p95_s: float
    lag_p95_s: float
    slope_ms_per_minute: float = 100.0
    # If the generator sends chunks later than this (p99), the run is not valid.
    generator_p99_ms: float = 100.0

    def missed(self, run: RunRecord) -> list[str]:
        """The limits that were missed, as texts; empty if the objective was met."""
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
        # The lower end of the confidence interval counts, because short runs say little about growth.
        if growth is not None and growth.low > self.slope_ms_per_minute:
            missed.append(f"lag grows by {growth.slope:.0f} ms a minute")
        late = percentile([value for client in run.clients for value in client.late_ms], 99)
        if late is not None and late > self.generator_p99_ms:
            missed.append(
                f"the generator itself was late (p99 {late:.0f} ms); use more --processes or another machine for it"
            )
        return missed
