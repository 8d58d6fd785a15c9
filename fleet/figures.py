"""Fleet-wide figures, added up from what each gateway says of itself and of the engines it sees; and what is wrong with
units that run all the same, in words for the operator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fleet.scale import Load

# An engine that no gateway has heard for so long does not serve; beats come every second or so.
SILENT_S = 5.0
# A report may be on its way for seconds.
CLOCK_S = 5.0
Capacity = Mapping[str, Any]


def engines_seen(capacities: Iterable[Capacity]) -> dict[str, dict[str, Any]]:
    """Each engine as the gateway that heard it last sees it: engines tell every gateway the same of themselves."""
    seen: dict[str, dict[str, Any]] = {}
    for capacity in capacities:
        for engine in capacity.get("engines", ()):
            name, age = engine.get("name"), engine.get("beat_age_s")
            if name is None or age is None or age > SILENT_S:
                continue
            if name not in seen or age < seen[name]["beat_age_s"]:
                seen[name] = dict(engine)
    return seen


def load_of(capacities: Iterable[Capacity], refused: int) -> Load:
    """What the engines that serve carry; those that drain are on their way out."""
    serving = [engine for engine in engines_seen(capacities).values() if engine.get("state") == "serving"]
    counted = sum(engine["streams"] for engine in serving)
    possible = sum(engine["streams"] + engine["streams_free"] for engine in serving)
    return Load(counted, possible, len(serving), refused)


def fleet_capacity(capacities: Mapping[str, Capacity]) -> dict[str, Any]:
    """The fleet as one server: what `/capacity` of all gateways says together. The key is the gateway's name."""
    engines = engines_seen(capacities.values())
    load = load_of(capacities.values(), 0)
    return {
        "gateways": len(capacities),
        "engines": len(engines),
        "sessions": sum(capacity.get("sessions", 0) for capacity in capacities.values()),
        "streams": sum(engine["streams"] for engine in engines.values()),
        "streams_possible": load.possible,
        "streams_free": max(0, load.possible - load.counted),
        "share": round(load.share, 3),
        "load": round(max((engine["load"] for engine in engines.values()), default=0.0), 3),
    }


def clock_trouble(node: str, told: float, now: float) -> str:
    """Nothing is decided by comparing clocks, but a client secret holds until a moment that its gateway has named."""
    off = told - now
    if abs(off) <= CLOCK_S:
        return ""
    where = "ahead of" if off > 0 else "behind"
    return f"the clock of node {node} is {abs(off):.0f} s {where} the head's: client secrets hold too long or too short"


def link_troubles(capacities: Iterable[Capacity]) -> dict[str, str]:
    """Engines that a gateway cannot use, and why: another model, other weights, another secret, no answer."""
    return {
        engine["name"]: engine["problem"]
        for capacity in capacities
        for engine in capacity.get("engines_missing", ())
        if engine.get("problem")
    }
