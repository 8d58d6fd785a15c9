"""What a running server says of itself, read from `/ready`, `/capacity` and `/metrics`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from realtime.client.http_client import Answer, HttpServer
from realtime.commands.terminal import CommandFailed

SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
PREFIX = "tickertape_"
# What `/capacity` of every server has.
ROOM = (
    *("sessions", "connected", "speaking", "load", "max_load"),
    *("streams_used", "streams_total", "streams_counted", "streams_that_hold", "streams_free"),
)


@dataclass(frozen=True, slots=True)
class Quantile:
    """An estimate in seconds. `is_beyond`: the value is larger than the last bound of the histogram, which this is."""

    seconds: float
    is_beyond: bool = False


@dataclass(frozen=True, slots=True)
class Histogram:
    """Upper bounds, and how many observations lie at or below each."""

    counts: Mapping[float, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return max(self.counts.values(), default=0)

    def since(self, before: Histogram) -> Histogram:
        """What was observed after `before`; all of it if the server was started again in between."""
        if before.total > self.total:
            return self
        return Histogram({bound: count - before.counts.get(bound, 0) for bound, count in self.counts.items()})

    def quantile(self, share: float) -> Quantile | None:
        """The value that this share of the observations does not exceed; None if nothing was observed."""
        wanted, lower, below = share * self.total, 0.0, 0.0
        if not self.total:
            return None
        for bound, count in sorted(self.counts.items()):
            if count >= wanted and count > below:
                if bound == float("inf"):
                    return Quantile(lower, is_beyond=True)
                return Quantile(lower + (bound - lower) * (wanted - below) / (count - below))
            lower, below = bound, count
        return Quantile(lower)

    def quantiles(self) -> dict[str, Quantile | None]:
        return {name: self.quantile(share) for name, share in SHARES.items()}

    def as_json(self) -> dict[str, float | None]:
        """A quantile is null if nothing was counted, or if it is larger than `last_bound`."""
        values = {
            name: None if value is None or value.is_beyond else round(value.seconds, 3)
            for name, value in self.quantiles().items()
        }
        bounds = [bound for bound in self.counts if bound != float("inf")]
        return {**values, "count": int(self.total), "last_bound": max(bounds, default=None)}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A server at one moment. Figures of `/metrics` count from its start."""

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


def readiness(server: HttpServer) -> tuple[bool, str]:
    """Whether the server takes sessions, and the word it has for its state. Raises CannotConnect, CommandFailed."""
    answer = server.get("/ready")
    return answer.status == 200, str(_object(server, "/ready", answer, 200, 503).get("status"))


def look(server: HttpServer) -> Snapshot:
    """Raises CannotConnect if nobody answers, CommandFailed if the answer is of no use."""
    _, status = readiness(server)
    capacity = _object(server, "/capacity", server.get("/capacity"), 200)
    if any(not isinstance(capacity.get(name), int | float) for name in ROOM):
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
    except (ValueError, KeyError) as error:
        raise CommandFailed(f"{server.url}/metrics cannot be read: {error}") from error
    lag, final = (Histogram(found) for found in counts.values())
    return Snapshot(status, capacity, lag, final, restarts, refused)


def _object(server: HttpServer, path: str, answer: Answer, *statuses: int) -> dict[str, Any]:
    try:
        body = answer.json() if answer.status in statuses else None
    except ValueError:
        body = None
    if isinstance(body, dict):
        return body
    if answer.status in statuses:
        raise CommandFailed(f"{server.url}{path} does not answer as a Tickertape server does")
    raise CommandFailed(f"{server.url}{path} {answer.refusal}")
