"""Reads `/ready`, `/capacity` and `/metrics` of a running server, and shows them as a screen or log lines.

Used by `tickertape status`. `StatusView` keeps the snapshots of the last minute, from which the shown percentiles are
computed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from realtime.client.wire_client import CannotConnect, HttpAnswer, HttpClient
from realtime.commands.terminal import CommandFailed, harmless

# Percentiles that are shown.
SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
# The prefix of the server's metrics.
PREFIX = "tickertape_"
# Numbers that `/capacity` must contain.
CAPACITY_FIELDS = (
    *("sessions", "connected", "speaking", "load", "max_load"),
    *("streams_used", "streams_total", "streams_counted", "streams_that_hold", "streams_free"),
)
# Numbers that each of its engines must have, and texts of each engine that is missing.
ENGINE_FIELDS = ("streams_used", "streams_total", "speaking", "load", "lag_ms")
MISSING_ENGINE_FIELDS = ("name", "address", "problem")
# Larger numbers are not figures of a server.
TOO_LARGE = 1e12


@dataclass(frozen=True, slots=True)
class Quantile:
    """An estimate in seconds. With `is_beyond`, the value is larger than `seconds`, the histogram's last bound."""

    seconds: float
    is_beyond: bool = False


@dataclass(frozen=True, slots=True)
class Histogram:
    """Upper bounds, and the number of observations at or below each."""

    counts: Mapping[float, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return max(self.counts.values(), default=0)

    def since(self, before: Histogram) -> Histogram:
        """The observations after `before`; all of them if the server was restarted in between."""
        if before.total > self.total:
            return self
        return Histogram({bound: count - before.counts.get(bound, 0) for bound, count in self.counts.items()})

    def quantile(self, share: float) -> Quantile | None:
        """The value that this share of the observations does not exceed; None without observations."""
        # `lower` is the bound below which `below` observations are.
        rank, lower, below = share * self.total, 0.0, 0.0
        if not self.total:
            return None
        for bound, count in sorted(self.counts.items()):
            if count >= rank and count > below:
                if bound == float("inf"):
                    return Quantile(lower, is_beyond=True)
                return Quantile(lower + (bound - lower) * (rank - below) / (count - below))
            lower, below = bound, count
        return Quantile(lower)

    def quantiles(self) -> dict[str, Quantile | None]:
        return {name: self.quantile(share) for name, share in SHARES.items()}

    def as_json(self) -> dict[str, float | None]:
        """The quantiles; null without observations, or if the value is larger than `last_bound`."""
        values = {
            name: None if value is None or value.is_beyond else round(value.seconds, 3)
            for name, value in self.quantiles().items()
        }
        bounds = [bound for bound in self.counts if bound != float("inf")]
        return {**values, "count": int(self.total), "last_bound": max(bounds, default=None)}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a server at one moment. Values from `/metrics` count from its start."""

    status: str
    capacity: Mapping[str, Any]
    lag: Histogram
    final: Histogram
    restarts: int
    refused: Mapping[str, int]

    def as_json(self, url: str) -> dict[str, Any]:
        return {
            "url": url,
            "status": self.status,
            **self.capacity,
            "lag_seconds": self.lag.as_json(),
            "final_seconds": self.final.as_json(),
            "engine_restarts": self.restarts,
            "refused": dict(self.refused),
        }


def readiness(server: HttpClient) -> tuple[bool, str]:
    """Whether the server takes sessions, and the name of its state. Raises CannotConnect and CommandFailed."""
    answer = server.get("/ready")
    return answer.status == 200, str(_object(server, "/ready", answer, 200, 503).get("status"))


def read_snapshot(server: HttpClient) -> Snapshot:
    """The current state of the server. Raises CannotConnect if it does not answer, CommandFailed if the answer is
    invalid."""
    _, status = readiness(server)
    capacity = _object(server, "/capacity", server.get("/capacity"), 200)
    if not _is_capacity(capacity):
        raise CommandFailed(f"{server.url}/capacity does not answer as a Tickertape server does")
    metrics = server.get("/metrics")
    if metrics.status != 200:
        raise CommandFailed(f"{server.url}/metrics {metrics.refusal}")
    counts: dict[str, dict[float, float]] = {"lag_seconds": {}, "final_seconds": {}}
    refused: dict[str, int] = {}
    restarts = 0
    try:
        for family in text_string_to_metric_families(metrics.body.decode()):
            for sample in family.samples:
                name = sample.name.removeprefix(PREFIX)
                if name.endswith("_bucket") and name.removesuffix("_bucket") in counts:
                    counts[name.removesuffix("_bucket")][float(sample.labels["le"])] = sample.value
                elif name == "refused_total":
                    refused[sample.labels["reason"]] = int(sample.value)
                elif name == "engine_restarts_total":
                    restarts = int(sample.value)
    except (ValueError, KeyError, OverflowError) as error:
        raise CommandFailed(f"{server.url}/metrics cannot be read: {error}") from error
    lag, final = (Histogram(found) for found in counts.values())
    return Snapshot(status, capacity, lag, final, restarts, refused)


def _is_capacity(given: Mapping[str, Any]) -> bool:
    """Whether the fields that are shown have the types and ranges of a Tickertape server."""
    numbers = [given.get(name) for name in CAPACITY_FIELDS] + [
        given.get(name, 0) for name in ("load_per_stream", "engines_wanted")
    ]
    engines, missing = given.get("engines", []), given.get("engines_missing", [])
    if not isinstance(engines, list) or not isinstance(missing, list):
        return False
    if not all(isinstance(engine, dict) for engine in (*engines, *missing)):
        return False
    numbers += [engine.get(name) for engine in engines for name in ENGINE_FIELDS]
    named = all(isinstance(engine.get(name), str) for engine in missing for name in MISSING_ENGINE_FIELDS)
    return named and all(isinstance(number, int | float) and abs(number) < TOO_LARGE for number in numbers)


def _object(server: HttpClient, path: str, answer: HttpAnswer, *statuses: int) -> dict[str, Any]:
    try:
        body = answer.json() if answer.status in statuses else None
    except ValueError:
        body = None
    if isinstance(body, dict):
        return body
    if answer.status in statuses:
        raise CommandFailed(f"{server.url}{path} does not answer as a Tickertape server does")
    raise CommandFailed(f"{server.url}{path} {answer.refusal}")


# Lag and time to final are those of the last seconds; after the first snapshot, those since the server's start.
RECENT_S = 60.0
NO_VALUE = "n/a"
# Descriptions of the states of a server that is not ready.
STATES = {
    "starting": "starting: it takes no sessions until an engine has loaded its model",
    "draining": "draining: it takes no new sessions and lets the running turns finish",
}


class StatusView:
    """Renders the snapshots of the last minute."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._snapshots: deque[tuple[float, Snapshot]] = deque()
        self._problem: tuple[str, str] | None = None

    def add(self, snapshot: Snapshot, now: float) -> None:
        self._problem = None
        self._snapshots.append((now, snapshot))
        while now - self._snapshots[0][0] > RECENT_S:
            self._snapshots.popleft()

    def add_failure(self, reason: str, clock: str) -> bool:
        """Record that the server did not answer; returns whether it is the first time since the last answer."""
        is_first = self._problem is None
        if self._problem is None:
            self._problem = (reason, clock)
        return is_first

    def screen(self, clock: str) -> Group:
        _, now = self._snapshots[-1]
        lines = Table.grid(padding=(0, 2))
        style = "dim" if self._problem else ""
        for name, text in self._rows(now):
            lines.add_row(Text(name, "dim"), Text(harmless(text), style))
        state = harmless(STATES.get(now.status, now.status))
        head = Text.assemble((self._url, "bold"), "  ", (state, _colour(now.status)), "  ", (clock, "dim"))
        if self._problem is None:
            return Group(head, lines)
        reason, since = self._problem
        problem = Text(f"no answer since {since}: {harmless(reason)}; trying again", "red")
        return Group(head, lines, problem)

    def line(self, clock: str) -> str:
        _, now = self._snapshots[-1]
        capacity, lag, final = now.capacity, self._recent("lag"), self._recent("final")
        load = f"{capacity['load']:.2f}" if capacity.get("engines") else NO_VALUE
        return (
            f"{clock} {harmless(now.status)} sessions={capacity['sessions']} connected={capacity['connected']} "
            f"speaking={capacity['speaking']} free={capacity['streams_free']} load={load} "
            f"lag_p95={_seconds(lag.quantile(0.95))} final_p95={_seconds(final.quantile(0.95))} "
            f"engines={len(capacity.get('engines', ()))}/{capacity.get('engines_wanted', 0)}"
        )

    def _rows(self, now: Snapshot) -> list[tuple[str, str]]:
        capacity = now.capacity
        engines, wanted = capacity.get("engines", ()), capacity.get("engines_wanted", 0)
        rows = [
            (
                "sessions",
                f"{capacity['sessions']} open, {capacity['connected']} connected, {capacity['speaking']} speaking",
            ),
            ("streams", _streams(capacity)),
            ("load", _load(capacity)),
            ("lag", _spread(self._recent("lag"), "from received to processed audio", "no audio came")),
            ("finals", _spread(self._recent("final"), "from the end of a turn to its final text", "no turn ended")),
            (
                "engines",
                f"{len(engines)} of {wanted} connected, {_count(now.restarts, 'restart')}",
            ),
        ]
        for number, engine in enumerate(engines, start=1):
            text = (
                f"{engine['streams_used']} of {_count(engine['streams_total'], 'stream')} open, {engine['speaking']} "
                f"speaking, load {engine['load']:.0%}, {engine['lag_ms'] / 1000:.2f} s of audio not processed yet"
            )
            rows.append((f"  {number}", text))
        rows += [
            ("  missing", f"{engine['name'] or engine['address']}: {engine['problem'] or 'no answer'}")
            for engine in capacity.get("engines_missing", ())
        ]
        if now.refused:
            rows.append(("refused", ", ".join(f"{count} ({reason})" for reason, count in sorted(now.refused.items()))))
        return rows

    def _recent(self, name: str) -> Histogram:
        (_, first), (_, now) = self._snapshots[0], self._snapshots[-1]
        latest: Histogram = getattr(now, name)
        # With a single snapshot, the values are those since the server's start.
        return latest if first is now else latest.since(getattr(first, name))


def watch(server: HttpClient, interval_s: float, sleep: Callable[[float], None] = time.sleep) -> None:
    """Show the status until interrupted. Raises CannotConnect or CommandFailed if the first snapshot fails."""
    console = Console()
    view = StatusView(server.url)
    view.add(read_snapshot(server), time.monotonic())
    if not console.is_terminal:
        return _print_lines(server, view, console, interval_s, sleep)
    with Live(view.screen(_clock()), console=console, auto_refresh=False) as live:
        while True:
            sleep(interval_s)
            _refresh(server, view)
            live.update(view.screen(_clock()), refresh=True)


def _print_lines(
    server: HttpClient, view: StatusView, console: Console, interval_s: float, sleep: Callable[[float], None]
) -> None:
    text = view.line(_clock())
    while True:
        if text:
            console.print(text, soft_wrap=True, highlight=False, markup=False)
        sleep(interval_s)
        failure = _refresh(server, view)
        if failure is None:
            text = view.line(_clock())
        else:
            reason, is_first = failure
            text = f"{_clock()} no answer: {harmless(reason)}; trying again" if is_first else ""


def _refresh(server: HttpClient, view: StatusView) -> tuple[str, bool] | None:
    """Take a snapshot. Returns None, or the error and whether it is the first since the last answer."""
    try:
        view.add(read_snapshot(server), time.monotonic())
    except (CannotConnect, CommandFailed) as error:
        return str(error), view.add_failure(str(error), _clock())
    return None


def _clock() -> str:
    return time.strftime("%H:%M:%S")


def _colour(status: str) -> str:
    return "green" if status == "ready" else "yellow"


def _streams(capacity: Mapping[str, Any]) -> str:
    used = f"{capacity['streams_used']} of {capacity['streams_total']} open"
    more = f"{_count(capacity['streams_free'], 'more session')} can start"
    if not capacity.get("load_per_stream"):
        return f"{used}; {more}; how many can speak at once is not measured yet"
    return f"{used}; {capacity['streams_counted']} speaking, {capacity['streams_that_hold']} can speak at once; {more}"


def _load(capacity: Mapping[str, Any]) -> str:
    if not capacity.get("engines"):
        return f"{NO_VALUE}: no engine is connected"
    limit = f"; new sessions are refused above {capacity['max_load']:.0%}" if capacity["max_load"] else ""
    return f"the engine is busy {capacity['load']:.0%} of the time{limit}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _seconds(value: Quantile | None) -> str:
    if value is None:
        return NO_VALUE
    return f">{value.seconds:g}" if value.is_beyond else f"{value.seconds:.2f}"


def _spread(histogram: Histogram, about: str, nothing: str) -> str:
    if not histogram.total:
        return f"{NO_VALUE}: {nothing} in the last minute"
    shown = ", ".join(f"{name} {_seconds(value).replace('>', '> ')} s" for name, value in histogram.quantiles().items())
    return f"{shown} {about}"
