"""The scaling rule of a fleet (`decide`): how many engines it should have, as a pure function of load and time.

The manager calls it once per round and keeps the `ScaleState` that it returns. The rules come from the section [scale]
of the fleet file (`fleet/plan.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class ScaleRules:
    """Bounds and thresholds of scaling. A share is counted streams divided by possible ones, of all serving engines."""

    # Smallest and largest number of engines.
    least: int = 1
    most: int = 1
    # One more engine after `above_s` seconds with a share above this, or when a session was refused.
    above: float = 0.8
    above_s: float = 30.0
    # One engine less after `below_s` seconds with a share below this.
    below: float = 0.5
    below_s: float = 600.0
    # Seconds without a change after a change: an engine takes a while to start and to fill.
    cool_down_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Load:
    """The load of the fleet now: counted and possible streams of serving engines."""

    counted: int
    possible: int
    # Serving engines, and sessions refused for lack of room since the last round.
    engines: int
    refused: int = 0

    @property
    def share(self) -> float:
        return self.counted / self.possible if self.possible else 0.0


@dataclass(frozen=True, slots=True)
class ScaleState:
    """State of scaling from one round to the next; times in seconds of the manager's clock."""

    # The number of engines that there should be.
    wanted: int
    # Since when the share has been above `above`, or below `below`; None if it is not.
    high_since: float | None = None
    low_since: float | None = None
    # When the wanted number changed last.
    changed_at: float | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    scaling: ScaleState
    # Why the wanted number changed; empty if it did not.
    why: str = ""


def decide(rules: ScaleRules, state: ScaleState, load: Load, now: float) -> Decision:
    """Changes the wanted number of engines by at most one, or brings it within the bounds."""
    within = min(max(state.wanted, rules.least), rules.most)
    if within != state.wanted:
        why = f"the fleet may have {rules.least} to {rules.most} engines"
        return Decision(ScaleState(within, changed_at=now), why)
    high = load.share > rules.above
    low = load.share < rules.below
    updated = replace(
        state,
        high_since=(state.high_since if state.high_since is not None else now) if high else None,
        low_since=(state.low_since if state.low_since is not None else now) if low and not load.refused else None,
    )
    if updated.changed_at is not None and now - updated.changed_at < rules.cool_down_s:
        return Decision(updated)
    # An engine is still starting. It will take the present load, so present refusals are no reason for another one.
    if load.engines < updated.wanted:
        return Decision(updated)
    why = _reason_for_more(rules, updated, load, now)
    if why and updated.wanted < rules.most:
        return Decision(ScaleState(updated.wanted + 1, changed_at=now), why)
    why = _reason_for_fewer(rules, updated, load, now)
    if why and updated.wanted > rules.least:
        return Decision(ScaleState(updated.wanted - 1, changed_at=now), why)
    return Decision(updated)


def _reason_for_more(rules: ScaleRules, state: ScaleState, load: Load, now: float) -> str:
    if load.refused:
        return "sessions were refused for lack of room"
    if state.high_since is not None and now - state.high_since >= rules.above_s:
        return (
            f"{load.share:.0%} of the possible streams are taken, more than {rules.above:.0%} for {rules.above_s:g} s"
        )
    return ""


def _reason_for_fewer(rules: ScaleRules, state: ScaleState, load: Load, now: float) -> str:
    if state.low_since is None or now - state.low_since < rules.below_s:
        return ""
    # With one engine less the share must not exceed `above` at once, or the fleet would oscillate.
    if load.engines > 1 and load.counted > rules.above * load.possible * (load.engines - 1) / load.engines:
        return ""
    return f"{load.share:.0%} of the possible streams are taken, less than {rules.below:.0%} for {rules.below_s:g} s"
