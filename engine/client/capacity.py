"""How many streams engines hold, from what their steps were measured to cost.

Only streams that make work count: one that was heard within `COUNTED_SECONDS` (engine.config), or is so new that
nothing is known of it yet. The others are open and cost next to nothing. Backlog counts nowhere: it gets what live
streams leave over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.boundary.codec import Status

# What an engine takes on before it has measured anything.
STREAMS_TO_BEGIN_WITH = 4
# When to try again: soon if an engine is merely busy or starting, later if somebody has to leave first.
RETRY_SOON_S = 1.0
RETRY_LATER_S = 5.0


@dataclass(frozen=True, slots=True)
class EngineShare:
    """One engine that is connected: its streams, and how busy and how late it is."""

    used: int
    total: int
    speaking: int
    load: float
    lag_ms: float
    free: int
    name: str = ""
    address: str = ""
    draining: bool = False
    version: str = ""
    # How long ago it was last heard.
    silent_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineMissing:
    """One engine that should be there and is not, and why, if that is known."""

    name: str
    address: str
    problem: str


@dataclass(frozen=True, slots=True)
class TableReport:
    """The table of engines in force, and what is wrong with its file."""

    number: int
    problem: str


@dataclass(frozen=True, slots=True)
class Capacity:
    """Of all engines together. `used` of `total` places are taken; `counted` streams count as speaking, `holds` could.

    `free` is how many more could speak: less than `holds - counted` where one engine has more than it holds. `load` is
    the share of its time that the least busy engine spends on live streams, `load_per_stream` what one more stream
    would add where it adds most; 0 while nothing has been measured.
    """

    used: int
    total: int
    speaking: int
    load: float
    retry_after_s: float
    counted: int = 0
    holds: int = 0
    free: int = 0
    load_per_stream: float = 0.0
    # Those that are connected, of so many that should be, and those that are not.
    engines: tuple[EngineShare, ...] = ()
    engines_wanted: int = 0
    missing: tuple[EngineMissing, ...] = ()
    table: TableReport | None = None
    # Engines that wait for another one to be lost, and how many of them there should be.
    spares_ready: int = 0
    spares_wanted: int = 0


def streams_held(status: Status, max_load: float) -> int:
    """Streams that may speak at once on an engine without it being busier than `max_load`; 0 is no limit."""
    if not max_load:
        return status.slots_total
    if not status.load_per_stream:
        return min(status.slots_total, STREAMS_TO_BEGIN_WITH)
    # One is always let in: without a stream nothing would be measured again.
    return min(status.slots_total, max(1, int((max_load - status.load_per_step) / status.load_per_stream)))


def streams_free(status: Status, max_load: float) -> int:
    """How many more streams an engine takes that may all speak."""
    if status.draining:
        return 0
    places = status.slots_total - status.slots_used
    return max(0, min(streams_held(status, max_load) - status.counted, places))


def share_of(status: Status, max_load: float) -> EngineShare:
    return EngineShare(
        status.slots_used,
        status.slots_total,
        status.speaking,
        status.load,
        status.lag_ms,
        streams_free(status, max_load),
        draining=status.draining,
    )


def capacity_of(states: Sequence[Status], max_load: float) -> Capacity:
    free = sum(streams_free(state, max_load) for state in states)
    return Capacity(
        used=sum(state.slots_used for state in states),
        total=sum(state.slots_total for state in states),
        speaking=sum(state.speaking for state in states),
        load=min((state.load for state in states), default=1.0),
        retry_after_s=RETRY_LATER_S if states and not free else RETRY_SOON_S,
        counted=sum(state.counted for state in states),
        holds=sum(streams_held(state, max_load) for state in states),
        free=free,
        load_per_stream=max((state.load_per_stream for state in states), default=0.0),
    )
