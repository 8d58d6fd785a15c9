"""How many engines the fleet needs: a pure function of what it carries and of a clock."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class ScaleRules:
    """A share is counted streams over possible ones, of all engines that serve."""

    least: int = 1
    most: int = 1
    # One more engine when the share has been above this for so long, or when anybody was refused.
    above: float = 0.8
    above_s: float = 30.0
    # One less when it has been below this for so long.
    below: float = 0.5
    below_s: float = 600.0
    # Nothing changes again for so long after a change: an engine takes a while to start and to fill.
    cool_down_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Load:
    """What the fleet carries now."""

    counted: int
    possible: int
    # Engines that serve, and sessions that were refused for want of room since the last look.
    engines: int
    refused: int = 0

    @property
    def share(self) -> float:
        return self.counted / self.possible if self.possible else 0.0


@dataclass(frozen=True, slots=True)
class ScaleMemory:
    """What the decision remembers from one look to the next."""

    wanted: int
    high_since: float | None = None
    low_since: float | None = None
    changed_at: float | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    memory: ScaleMemory
    # Why the number changed; empty if it did not.
    why: str = ""


def decide(rules: ScaleRules, memory: ScaleMemory, load: Load, now: float) -> Decision:
    within = min(max(memory.wanted, rules.least), rules.most)
    if within != memory.wanted:
        why = f"the fleet may have {rules.least} to {rules.most} engines"
        return Decision(ScaleMemory(within, changed_at=now), why)
    high = load.share > rules.above
    low = load.share < rules.below
    noted = replace(
        memory,
        high_since=(memory.high_since if memory.high_since is not None else now) if high else None,
        low_since=(memory.low_since if memory.low_since is not None else now) if low and not load.refused else None,
    )
    if noted.changed_at is not None and now - noted.changed_at < rules.cool_down_s:
        return Decision(noted)
    # An engine that is wanted and does not serve yet is the answer to what is seen now, refusals among it.
    if load.engines < noted.wanted:
        return Decision(noted)
    why = _reason_for_more(rules, noted, load, now)
    if why and noted.wanted < rules.most:
        return Decision(ScaleMemory(noted.wanted + 1, changed_at=now), why)
    why = _reason_for_fewer(rules, noted, load, now)
    if why and noted.wanted > rules.least:
        return Decision(ScaleMemory(noted.wanted - 1, changed_at=now), why)
    return Decision(noted)


def _reason_for_more(rules: ScaleRules, memory: ScaleMemory, load: Load, now: float) -> str:
    if load.refused:
        return "sessions were refused for want of room"
    if memory.high_since is not None and now - memory.high_since >= rules.above_s:
        return (
            f"{load.share:.0%} of the possible streams are taken, more than {rules.above:.0%} for {rules.above_s:g} s"
        )
    return ""


def _reason_for_fewer(rules: ScaleRules, memory: ScaleMemory, load: Load, now: float) -> str:
    if memory.low_since is None or now - memory.low_since < rules.below_s:
        return ""
    # With one engine less the share must not be high at once, or the fleet would swing.
    if load.engines > 1 and load.counted > rules.above * load.possible * (load.engines - 1) / load.engines:
        return ""
    return f"{load.share:.0%} of the possible streams are taken, less than {rules.below:.0%} for {rules.below_s:g} s"
