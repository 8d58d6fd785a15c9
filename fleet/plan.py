"""The fleet file (TOML) of the operator: its sections and keys (`FleetPlan`); and the scaling rule (`decide`).

The commands of `tickertape fleet` read and check the file (`read_plan`). The manager and the actors get the plan as a
dict (`plan_from`). The manager calls `decide` once per round: it says how many engines the fleet should have, as a pure
function of the rules, the load and the time, and the manager keeps the `ScaleState` that it returns. This plan has
nothing to do with `tickertape plan`, which plans the capacity of one machine, nor with the plan of an engine step.
"""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from engine.fleet_secret import read_secret
from engine.toml_file import read_toml
from fleet.state import FleetError, FleetFileError, Kind, Needs

_NAME = re.compile(r"[a-z][a-z0-9-]{0,30}")
STATE_FOLDER = "~/.local/state/tickertape/fleet"


@dataclass(frozen=True, slots=True)
class EnginePlan:
    # Smallest and largest number of engines; scaling chooses between them.
    least: int = 1
    most: int = 1
    # Resources of one engine; with a share of a GPU several engines use one.
    gpus: float = 0.0
    cpus: float = 1.0
    # The first port to try; each further engine of a host takes the next.
    port: int = 5600
    # Seconds in which the streams of a draining engine must migrate.
    drain_s: float = 60.0
    # A command that runs instead of `tickertape` and gets its arguments: a wrapper such as numactl or a container.
    program: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GatewayPlan:
    count: int = 1
    cpus: float = 1.0
    host: str = "127.0.0.1"
    port: int = 8000
    # The port at which a gateway with the port above listens to other gateways. A gateway with a higher port uses a
    # port that is higher by the same number.
    peer_port: int = 5700
    # Seconds over which a draining gateway closes the sockets of its clients.
    drain_s: float = 10.0
    # As for engines.
    program: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ScalePlan:
    """The section [scale]; `ScaleRules` explains the values."""

    above: float = 0.8
    above_s: float = 30.0
    below: float = 0.5
    below_s: float = 600.0
    cool_down_s: float = 60.0


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The fleet file."""

    # Fleets with different names on one network are independent of each other.
    name: str = "tickertape"
    # HOST:PORT of the head of the Ray cluster. `fleet up` starts it if the host is this machine and none answers.
    cluster: str = "127.0.0.1:6379"
    # Whether the head's machine runs engines and gateways too; in a large fleet it should not.
    head_works: bool = True
    # The same file on every node. If empty, `fleet up` makes one for a cluster that it starts.
    secret_file: str = ""
    # The configuration of `tickertape serve` and `tickertape engine`, at the same path on every node; empty: no file.
    config: str = ""
    # Folder of each node for logs and for the state that survives restarts.
    state_folder: str = STATE_FOLDER
    # Seconds between two rounds of the manager.
    look_s: float = 1.0
    engine: EnginePlan = field(default_factory=EnginePlan)
    gateway: GatewayPlan = field(default_factory=GatewayPlan)
    scale: ScalePlan = field(default_factory=ScalePlan)

    @property
    def folder(self) -> Path:
        return Path(self.state_folder).expanduser() / self.name

    def node_folder(self, node: str) -> Path:
        """The folder for the records and logs of one node; two nodes can share a machine."""
        return self.folder / "nodes" / node

    @property
    def secret_path(self) -> Path:
        return Path(self.secret_file).expanduser() if self.secret_file else self.folder / "secret"

    def read_secret(self) -> bytes:
        """The secret, read as engines and gateways do. Raises FleetError."""
        try:
            return read_secret(self.secret_path)
        except ValueError as error:
            raise FleetError(f"{error}; it must be the same file on every node") from error

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
    """Builds a plan from a parsed fleet file or from `dataclasses.asdict`. Checks keys and types, but not values."""
    plan: FleetPlan = _build(FleetPlan, tree, "")
    return plan


def read_plan(path: str | Path) -> FleetPlan:
    """Reads and checks a fleet file. Raises FleetFileError."""
    try:
        tree = read_toml(path)
    except OSError as error:
        raise FleetFileError(f"cannot read the fleet file {str(path)!r}: {error.strerror}") from error
    except ValueError as error:  # `BadTomlFile`, or a path with NUL in it.
        raise FleetFileError(f"the fleet file {str(path)!r} {error}") from error
    plan = plan_from(tree)
    # Paths are relative to the file's folder. They become absolute, because processes with other folders use them.
    here = Path(path).resolve().parent
    plan = replace(plan, config=_absolute(here, plan.config), secret_file=_absolute(here, plan.secret_file))
    check(plan)
    return plan


def check(plan: FleetPlan) -> None:
    """Raises FleetFileError for an invalid value."""
    if not _NAME.fullmatch(plan.name):
        raise FleetFileError(f"name: {plan.name!r} must be 1 to 31 small letters, digits and dashes, a letter first")
    if not re.fullmatch(r"[^:\s]+:\d{1,5}", plan.cluster):
        raise FleetFileError(f"cluster must be HOST:PORT, not {plan.cluster!r}")
    engine, gateway, scale = plan.engine, plan.gateway, plan.scale
    if not 1 <= engine.least <= engine.most:
        raise FleetFileError(
            f"engine.least ({engine.least}) must be 1 or more, and engine.most ({engine.most}) at least as large"
        )
    if gateway.count < 1:
        raise FleetFileError(f"gateway.count must be 1 or more, not {gateway.count}")
    if not 0 <= scale.below < scale.above <= 1:
        raise FleetFileError(
            f"scale.below ({scale.below:g}) must be less than scale.above ({scale.above:g}), both between 0 and 1"
        )
    if 1 < engine.gpus != int(engine.gpus):
        raise FleetFileError(f"engine.gpus must be a share of one GPU or a whole number, not {engine.gpus:g}")
    for name, port in (
        ("engine.port", engine.port),
        ("gateway.port", gateway.port),
        ("gateway.peer_port", gateway.peer_port),
    ):
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
        raise FleetFileError(f"{path.rstrip('.')} must be a section with keys")
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


# The scaling rule


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
