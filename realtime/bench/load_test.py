"""A load test of a running server, step by step: searches the largest load, runs it for longer, repeats clients alone.

`tickertape bench` runs a `LoadTest`. It plays clients (`clients.py`), reads the records that they write (`read_run`),
computes the figures, compares the texts alone and under load (`words.py`), and writes the results and a plot (`draw`,
SVG without a plotting library: time to final by the number of streams, and lag over time in the long run). The figures:

- Time to final: from the end of speech to the final transcript. The end of speech is the server's end of the turn minus
  its silence setting, so the wait for silence is part of the time, as it is for a user.
- Lag: from the end of the last word of a delta to its arrival, if the server sends word times; else from the end of a
  turn to the event that reports it. Its trend shows whether lag grows during a run.
- Failure: anything that a user would notice: no connection, an error, a turn without a final, a broken session.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from realtime.bench.clients import Bank, ClientPlan, Target, play_all, playlist
from realtime.bench.statistics import Trend, percentile, trend
from realtime.bench.words import error_rate
from realtime.client.wire_client import COMPLETED, DELTA, FAILED, LAST_COMMIT

# The records of runs

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


# The search for the largest load


def largest(meets: Callable[[int], bool], maximum: int) -> int:
    """The largest n up to `maximum` with `meets(n)`, by doubling and bisection; 0 if `meets(1)` is False.

    Assumes that fewer streams are never harder.
    """
    good, bad = 0, 1
    while bad <= maximum and meets(bad):
        good, bad = bad, min(2 * bad, maximum) if bad < maximum else maximum + 1
    while bad - good > 1:
        middle = (good + bad) // 2
        if meets(middle):
            good = middle
        else:
            bad = middle
    return good


# The plot

# Sizes in pixels: of the picture, of a panel, and the panels' distance from the top.
WIDTH, HEIGHT = 860, 360
PANEL_WIDTH, PANEL_HEIGHT, TOP = 330, 240, 60
# Seconds of the run that are one point of the lag.
BUCKET_S = 5.0


STYLE = """\
text{font:12px system-ui,sans-serif;fill:#333}.title{font-size:14px;font-weight:600}
.axis{stroke:#888}.grid{stroke:#ddd}.limit{stroke:#c33;stroke-dasharray:4 4}
.p50{stroke:#27c;fill:none;stroke-width:2}.p95{stroke:#e80;fill:none;stroke-width:2}
.p50dot{fill:#27c}.p95dot{fill:#e80}.missed{fill:#c33}
@media (prefers-color-scheme:dark){svg{background:#181a1f}text{fill:#ddd}.grid{stroke:#333}}"""
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Panel:
    """Axes at `left`, for x from 0 to `max_x` and y from 0 to `max_y`."""

    left: float
    max_x: float
    max_y: float

    def place(self, point: Point) -> Point:
        x, y = point
        return (
            self.left + PANEL_WIDTH * x / self.max_x,
            TOP + PANEL_HEIGHT * (1 - min(y, self.max_y) / self.max_y),
        )

    def frame(self, title: str, x_label: str, y_label: str) -> list[str]:
        bottom, middle = TOP + PANEL_HEIGHT, self.left + PANEL_WIDTH / 2
        parts = [
            f'<text class="title" x="{self.left}" y="{TOP - 28}">{escape(title)}</text>',
            f'<text x="{self.left}" y="{TOP - 10}">{escape(y_label)}</text>',
            f'<text x="{middle}" y="{bottom + 38}" text-anchor="middle">{escape(x_label)}</text>',
        ]
        for step in range(5):
            share = step / 4
            y = bottom - PANEL_HEIGHT * share
            x = self.left + PANEL_WIDTH * share
            parts += [
                f'<line class="grid" x1="{self.left}" x2="{self.left + PANEL_WIDTH}" y1="{y}" y2="{y}"/>',
                f'<text x="{self.left - 8}" y="{y + 4}" text-anchor="end">{self.max_y * share:.2g}</text>',
                f'<text x="{x}" y="{bottom + 18}" text-anchor="middle">{self.max_x * share:.3g}</text>',
            ]
        parts.append(f'<line class="axis" x1="{self.left}" x2="{self.left}" y1="{TOP}" y2="{bottom}"/>')
        return parts

    def line(self, points: Sequence[Point], kind: str) -> str:
        placed = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(self.place, points))
        return f'<polyline class="{kind}" points="{placed}"/>'

    def dots(self, points: Sequence[Point], kind: str) -> list[str]:
        return [f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in map(self.place, points)]

    def limit(self, y: float) -> str:
        left, height = self.place((0, y))
        return f'<line class="limit" x1="{left}" x2="{left + PANEL_WIDTH}" y1="{height:.1f}" y2="{height:.1f}"/>'


def draw(runs: Sequence[RunRecord], held: RunRecord, objective: Objective) -> str:
    """The plot as an SVG document: `runs` by their number of streams, and the long run `held` over time."""
    parts = [*_final_panel(runs, objective), *_lag_panel(held), *_legend()]
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{STYLE}</style>\n{body}\n</svg>\n'


def _final_panel(runs: Sequence[RunRecord], objective: Objective) -> list[str]:
    ordered = sorted(runs, key=lambda run: run.streams)
    lines: dict[str, list[Point]] = {"p50": [], "p95": []}
    missed: list[Point] = []
    for run in ordered:
        for kind, share in (("p50", 50), ("p95", 95)):
            value = percentile(run.finals, share)
            if value is not None:
                lines[kind].append((run.streams, value))
        value = percentile(run.finals, 95)
        if value is not None and objective.missed(run):
            missed.append((run.streams, value))
    max_x = max(run.streams for run in ordered)
    panel = Panel(60, max_x, _round_up(max(objective.final_p95_s * 1.5, *_heights(lines["p95"]))))
    parts = panel.frame("Time to final", "streams at once", "seconds")
    for kind, points in lines.items():
        parts += [panel.line(points, kind), *panel.dots(points, f"{kind}dot")]
    return [*parts, *panel.dots(missed, "missed"), panel.limit(objective.final_p95_s)]


def _lag_panel(held: RunRecord) -> list[str]:
    buckets: dict[int, list[float]] = {}
    for t, lag in held.lags:
        buckets.setdefault(int(t // BUCKET_S), []).append(lag)
    lines = {
        kind: [((bucket + 0.5) * BUCKET_S, percentile(lags, share) or 0.0) for bucket, lags in sorted(buckets.items())]
        for kind, share in (("p50", 50), ("p95", 95))
    }
    max_x = (max(buckets, default=0) + 1) * BUCKET_S
    panel = Panel(490, max_x, _round_up(max(1.0, *_heights(lines["p95"]))))
    parts = panel.frame(f"Lag while {held.streams} streams are held", "seconds into the run", "seconds")
    for kind, points in lines.items():
        parts.append(panel.line(points, kind))
    return parts


def _heights(points: Sequence[Point]) -> list[float]:
    return [y for _, y in points] or [0.0]


def _round_up(value: float) -> float:
    """An axis limit that gives four round steps."""
    for limit in (1, 2, 3, 4, 6, 8, 10, 20, 40, 60, 80, 100):
        if value <= limit:
            return float(limit)
    return value


def _legend() -> list[str]:
    y = HEIGHT - 14
    return [
        f'<circle class="p50dot" cx="70" cy="{y - 4}" r="4"/><text x="80" y="{y}">p50</text>',
        f'<circle class="p95dot" cx="130" cy="{y - 4}" r="4"/><text x="140" y="{y}">p95</text>',
        f'<circle class="missed" cx="190" cy="{y - 4}" r="4"/><text x="200" y="{y}">objective missed</text>',
        f'<line class="limit" x1="320" x2="345" y1="{y - 4}" y2="{y - 4}"/><text x="352" y="{y}">objective</text>',
    ]


# The load test

# Clients start at random times within this many seconds, so that they are not in step.
PHASES_S = 1.0
# Pause between two recordings.
PAUSE_S = 1.0


class LoadTest:
    """Runs the load test. `options` are those of `tickertape bench`; `report` gets progress messages."""

    def __init__(
        self,
        target: Target,
        bank: Bank,
        objective: Objective,
        options: argparse.Namespace,
        processes: int,
        report: Callable[[str], None],
    ) -> None:
        self._target = target
        self._bank = bank
        self._objective = objective
        self._options = options
        self._processes = processes
        self._report = report
        self._runs: list[RunRecord] = []

    def measure(self) -> Result:
        options = self._options
        self._play(1, options.seconds, "warm-up")
        self._runs.clear()
        if options.streams:
            streams = options.streams
        else:
            streams = largest(self._meets, options.most)
        if streams == 0:
            return Result(self._target, self._objective, self._runs, self._runs[-1], None, self._settings())
        held = self._hold(streams)
        words = None if held.failures else self._compare(held)
        return Result(self._target, self._objective, self._runs, held, words, self._settings())

    def _meets(self, streams: int) -> bool:
        run = self._play(streams, self._options.seconds, f"search-{streams}")
        return not self._objective.missed(run)

    def _hold(self, streams: int) -> RunRecord:
        """The long run; if it misses the objective, it is repeated with a little less load."""
        while True:
            held = self._play(streams, self._options.hold, f"hold-{streams}")
            if self._options.streams or streams == 1 or not self._objective.missed(held):
                return held
            streams -= max(1, streams // 10)

    def _play(self, streams: int, seconds: float, name: str) -> RunRecord:
        phases = random.Random(name)
        plans = [
            ClientPlan(client, phases.uniform(0, PHASES_S), playlist(self._bank, client, seconds, PAUSE_S))
            for client in range(streams)
        ]
        return self._run(plans, name, self._options.warm_up)

    def _run(self, plans: list[ClientPlan], name: str, warm_up_s: float) -> RunRecord:
        longest = max(plan.playlist.samples for plan in plans) / self._bank.rate
        self._report(f"{name}: {len(plans)} streams for {longest:.0f} s")
        paths = play_all(self._target, self._bank, plans, self._processes, self._options.output, name)
        run = read_run(paths, [plan.client for plan in plans], self._target.silence_ms / 1000, warm_up_s)
        self._runs.append(run)
        missed = self._objective.missed(run)
        self._report(f"  {summary(run)}: {'; '.join(missed) if missed else 'objective met'}")
        return run

    def _compare(self, held: RunRecord) -> WordErrors:
        """Repeat some clients of the long run alone, and compare their text: load must not change it."""
        count = min(self._options.alone, held.streams)
        alone: list[str] = []
        for client in range(count):
            plan = ClientPlan(client, 0.0, playlist(self._bank, client, self._options.hold, PAUSE_S))
            run = self._run([plan], f"alone-{client}", self._options.warm_up)
            alone.append(run.clients[0].text)
        loaded = [client.text for client in held.clients]
        references = [playlist(self._bank, client, self._options.hold, PAUSE_S).text for client in range(held.streams)]
        changed = error_rate(list(zip(alone, loaded[:count], strict=True)))
        if any(text is None for text in references):
            return WordErrors(count, None, None, None, changed)
        known = [text or "" for text in references]
        return WordErrors(
            count,
            error_rate(list(zip(known[:count], alone, strict=True))),
            error_rate(list(zip(known[:count], loaded[:count], strict=True))),
            error_rate(list(zip(known, loaded, strict=True))),
            changed,
        )

    def _settings(self) -> dict[str, Any]:
        options = self._options
        return {
            "seconds": options.seconds,
            "hold": options.hold,
            "warm_up": options.warm_up,
            "chunk_ms": options.chunk_ms,
            "silence_ms": options.silence_ms,
            "rate": self._bank.rate,
            "recordings": len(self._bank.clips),
            "manifest": options.manifest.name if options.manifest else None,
            "generator_processes": self._processes,
            "generator_machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        }


@dataclass(frozen=True, slots=True)
class WordErrors:
    """Word error rates, alone and under load, of the clients that were repeated alone.

    `all_loaded` is the rate of all clients under load. `changed` is the share of words that differ between alone and
    under load.
    """

    clients: int
    alone: float | None
    loaded: float | None
    all_loaded: float | None
    changed: float | None

    @property
    def equal(self) -> bool:
        return not self.changed


@dataclass(slots=True)
class Result:
    target: Target
    objective: Objective
    runs: list[RunRecord]
    held: RunRecord
    words: WordErrors | None
    settings: dict[str, Any]
    missed: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.missed = self.objective.missed(self.held)

    @property
    def good(self) -> bool:
        return not self.missed and self.words is not None and self.words.equal

    def text(self) -> str:
        """The result as lines of text."""
        figures = self.held.figures()
        final, lag, late = figures["time_to_final_s"], figures["lag_s"], figures["generator_late_ms"]
        slope = figures["lag_slope_ms_per_minute"]
        lines = [
            f"streams           {self.held.streams}" + ("" if not self.missed else f"   NOT MET: {self.missed[0]}"),
            f"time to final     {_row(final)} s   ({figures['finals']} finals)",
            f"word error rate   {self._words_text()}",
            f"lag               {_row(lag)} s",
            "lag slope         "
            + (
                "too few points"
                if slope is None
                else f"{slope['slope']:+.1f} ms a minute (95 %: {slope['low']:+.1f} to {slope['high']:+.1f})"
            ),
            f"failures          {figures['failures']}",
            f"generator late    {_row(late, 1)} ms, at most {_number(late['max'], 1)} ms",
        ]
        return "\n".join(lines)

    def _words_text(self) -> str:
        words = self.words
        if words is None:
            return "not compared: there was no load without failures"
        same = "the same words" if words.equal else f"{words.changed:.2%} of the words differ"
        clients = f"{words.clients} client{'s' if words.clients > 1 else ''}"
        if words.alone is None or words.loaded is None:
            return f"no reference text; {clients} alone and under load: {same}"
        return (
            f"{words.alone:.2%} alone, {words.loaded:.2%} at {self.held.streams} streams ({clients}: {same}); "
            f"all clients {words.all_loaded:.2%}"
        )

    def write(self, folder: Path) -> None:
        words = self.words
        body = {
            "streams": self.held.streams,
            "good": self.good,
            "missed": self.missed,
            "held": self.held.figures(),
            "words": None
            if words is None
            else {
                "clients": words.clients,
                "wer_alone": words.alone,
                "wer_loaded": words.loaded,
                "wer_all_loaded": words.all_loaded,
                "changed": words.changed,
                "equal": words.equal,
            },
            "objective": {"final_p95_s": self.objective.final_p95_s, "lag_p95_s": self.objective.lag_p95_s},
            "runs": [run.figures() for run in self.runs],
            "settings": self.settings,
        }
        (folder / "results.json").write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
        (folder / "plot.svg").write_text(draw(self.runs, self.held, self.objective), encoding="utf-8")


def summary(run: RunRecord) -> str:
    figures = run.figures()
    return f"time to final {_row(figures['time_to_final_s'])} s, lag {_row(figures['lag_s'])} s"


def _row(values: dict[str, float | None], digits: int = 2) -> str:
    return ", ".join(f"{name} {_number(values[name], digits)}" for name in ("p50", "p95", "p99"))


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
