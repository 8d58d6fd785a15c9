"""The fleet's file: what the operator wants, read from TOML and checked."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from fleet.state import FleetFileError, Kind, Needs

_NAME = re.compile(r"[a-z][a-z0-9-]{0,30}")
STATE_FOLDER = "~/.local/state/tickertape/fleet"


@dataclass(frozen=True, slots=True)
class EnginePlan:
    # Engines at least and at most; scaling chooses between them.
    least: int = 1
    most: int = 1
    # What one engine takes of its node; a share of a GPU puts several engines on one.
    gpus: float = 0.0
    cpus: float = 1.0
    # The first port to try; each further engine of a host takes the next.
    port: int = 5600
    # How long an engine that is told to stop waits for its streams to move.
    drain_s: float = 60.0
    # What to run in place of `tickertape`, with its arguments behind: a wrapper such as numactl or a container.
    program: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GatewayPlan:
    count: int = 1
    cpus: float = 1.0
    host: str = "127.0.0.1"
    port: int = 8000
    # How long a gateway that is told to stop spreads the goodbyes to its clients over.
    drain_s: float = 10.0
    # What to run in place of `tickertape`, with its arguments behind: a wrapper such as numactl or a container.
    program: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ScalePlan:
    above: float = 0.8
    above_s: float = 30.0
    below: float = 0.5
    below_s: float = 600.0
    cool_down_s: float = 60.0


@dataclass(frozen=True, slots=True)
class FleetPlan:
    # Fleets of different names on one network know nothing of each other.
    name: str = "tickertape"
    # The head of the Ray cluster. `fleet up` starts one there if that is this machine and none answers.
    cluster: str = "127.0.0.1:6379"
    # Whether the head's machine runs engines and gateways too; in a large fleet it had better not.
    head_works: bool = True
    # The same file on every node. `fleet up` makes it for a cluster of its own if it is not there.
    secret_file: str = ""
    # The configuration of `tickertape serve` and `tickertape engine`, at the same path on every node; empty is none.
    config: str = ""
    # Where each node keeps what it must know after a restart, and the logs.
    state_folder: str = STATE_FOLDER
    # Seconds between two looks at everything.
    look_s: float = 1.0
    engine: EnginePlan = field(default_factory=EnginePlan)
    gateway: GatewayPlan = field(default_factory=GatewayPlan)
    scale: ScalePlan = field(default_factory=ScalePlan)

    @property
    def folder(self) -> Path:
        return Path(self.state_folder).expanduser() / self.name

    def node_folder(self, node: str) -> Path:
        """Where a node keeps what runs there; two nodes can share a machine."""
        return self.folder / "nodes" / node

    @property
    def secret_path(self) -> Path:
        return Path(self.secret_file).expanduser() if self.secret_file else self.folder / "secret"

    @property
    def needs(self) -> dict[Kind, Needs]:
        return {
            Kind.ENGINE: Needs(self.engine.cpus, self.engine.gpus, self.engine.port),
            Kind.GATEWAY: Needs(self.gateway.cpus, 0.0, self.gateway.port),
        }

    @property
    def rules(self) -> ScaleRules:
        scale = self.scale
        return ScaleRules(
            self.engine.least,
            self.engine.most,
            scale.above,
            scale.above_s,
            scale.below,
            scale.below_s,
            scale.cool_down_s,
        )


def plan_from(tree: dict[str, Any]) -> FleetPlan:
    """A plan as `dataclasses.asdict` gives it, or as a file has it; not checked."""
    plan: FleetPlan = _build(FleetPlan, tree, "")
    return plan


def read_plan(path: str | Path) -> FleetPlan:
    """Raises FleetFileError."""
    try:
        tree = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise FleetFileError(f"cannot read the fleet's file {str(path)!r}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FleetFileError(f"the fleet's file {str(path)!r} is not valid TOML: {error}") from error
    plan = plan_from(tree)
    # Paths in the file are meant from where the file is, and every process must find them.
    here = Path(path).resolve().parent
    plan = replace(plan, config=_absolute(here, plan.config), secret_file=_absolute(here, plan.secret_file))
    check(plan)
    return plan


def check(plan: FleetPlan) -> None:
    """Raises FleetFileError for what cannot be."""
    if not _NAME.fullmatch(plan.name):
        raise FleetFileError(f"name: {plan.name!r} must be small letters, digits and dashes, 31 at most")
    if not re.fullmatch(r"[^:\s]+:\d{1,5}", plan.cluster):
        raise FleetFileError(f"cluster must be HOST:PORT, not {plan.cluster!r}")
    engine, gateway, scale = plan.engine, plan.gateway, plan.scale
    if not 1 <= engine.least <= engine.most:
        raise FleetFileError(
            f"engine.least ({engine.least}) must be 1 or more, and engine.most ({engine.most}) not less"
        )
    if gateway.count < 1:
        raise FleetFileError(f"gateway.count must be 1 or more, not {gateway.count}")
    if not 0 <= scale.below < scale.above <= 1:
        raise FleetFileError(
            f"scale.below ({scale.below:g}) must be less than scale.above ({scale.above:g}), both shares"
        )
    if 1 < engine.gpus != int(engine.gpus):
        raise FleetFileError(f"engine.gpus must be a share of one GPU or a whole number, not {engine.gpus:g}")
    for name, port in (("engine.port", engine.port), ("gateway.port", gateway.port)):
        if not 1 <= port <= 65_000:
            raise FleetFileError(f"{name} must lie between 1 and 65000, not {port}")
    _check_not_negative(plan)
    if plan.look_s < 0.1:
        raise FleetFileError(f"look_s must be at least 0.1, not {plan.look_s:g}")
    if plan.config and not os.path.isfile(plan.config):
        raise FleetFileError(f"config: there is no file {plan.config!r}")


def _check_not_negative(plan: FleetPlan) -> None:
    for section, part in (("", plan), ("engine.", plan.engine), ("gateway.", plan.gateway), ("scale.", plan.scale)):
        for item in fields(part):
            value = getattr(part, item.name)
            if isinstance(value, int | float) and value < 0:
                raise FleetFileError(f"{section}{item.name} cannot be negative, but is {value}")


def _absolute(here: Path, path: str) -> str:
    return str(here / Path(path).expanduser()) if path else ""


def _build(kind: type, tree: Any, path: str) -> Any:
    if not isinstance(tree, dict):
        raise FleetFileError(f"{path.rstrip('.')} must be a section with keys of its own")
    wanted = get_type_hints(kind)
    values = {}
    for name, value in tree.items():
        if name not in wanted:
            close = difflib.get_close_matches(name, wanted, n=1, cutoff=0.4)
            hint = f"; did you mean {path + close[0]!r}?" if close else ""
            raise FleetFileError(f"unknown key {path + name!r}{hint}")
        values[name] = _value(wanted[name], value, path + name)
    return kind(**values)


def _value(wanted: Any, value: Any, key: str) -> Any:
    if is_dataclass(wanted):
        return _build(wanted, value, f"{key}.")  # type: ignore[arg-type]
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if wanted == tuple[str, ...]:
        if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise FleetFileError(f"{key} must be a list of texts, not {value!r}")
    if type(value) is not wanted:
        kinds = {bool: "true or false", str: "text", int: "a whole number", float: "a number"}
        raise FleetFileError(f"{key} must be {kinds[wanted]}, not {value!r}")
    return value


# How many engines the fleet needs: a pure function of what it carries and of a clock.


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
