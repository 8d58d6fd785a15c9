"""What is wrong with a unit that runs all the same, in words for the operator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

# A report may be on its way for seconds.
CLOCK_S = 5.0


def clock_trouble(node: str, told: float, now: float) -> str:
    """Nothing is decided by comparing clocks, but a client secret holds until a moment that its gateway has named."""
    off = told - now
    if abs(off) <= CLOCK_S:
        return ""
    where = "ahead of" if off > 0 else "behind"
    return f"the clock of node {node} is {abs(off):.0f} s {where} the head's: client secrets hold too long or too short"


def link_troubles(capacities: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Engines that a gateway cannot use, and why: another model, other weights, another secret, no answer."""
    return {
        engine["name"]: engine["problem"]
        for capacity in capacities
        for engine in capacity.get("engines_missing", ())
        if engine.get("problem")
    }
