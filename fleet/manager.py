"""The fleet's manager: in each round it collects reports, decides how many units run where, and starts and drains them.

A unit is one engine or gateway process. `ManagerActor` in `fleet/cluster/actors.py` runs the manager on the head node.
The manager holds no stream and no session. The only state that must survive a restart is `ManagerState`, which the
actor stores; the running processes are read from the records of the nodes. `Supervisors` is the manager's access to
nodes and supervisors.

How many engines there should be is decided in `plan.py`. `reconcile` decides which units start or are drained next,
and `place` decides where. Both are pure functions and come first here. The functions after them add up the reports of
gateways and name problems for the operator.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from fleet.plan import Decision, FleetPlan, Load, ScaleState, decide, plan_from
from fleet.state import (
    Action,
    ActualState,
    DesiredState,
    DrainUnit,
    FleetError,
    Forget,
    Kind,
    Needs,
    Node,
    Start,
    Table,
    Unit,
    UnitState,
    Wait,
    next_table,
)

logger = logging.getLogger(__name__)

# Tolerance for sums of fractions such as 0.1.
_TOLERANCE = 1e-6
# What a supervisor reports (`Supervisor.report`), and the answer of a gateway to `/capacity`.
Report = Mapping[str, Any]
Capacity = Mapping[str, Any]
# Seconds until a node that could not start a unit is tried again.
AVOID_S = 60.0
# Reports of gateways on an engine count until this many seconds after its last heartbeat: then its load and room are
# left out. A supervisor that has not answered for this long is named in the status; a new supervisor takes a few
# seconds.
SILENT_S = 5.0
# The newest notes that the status shows.
NOTES_KEPT = 50
# Differences of clocks in seconds that are not reported: a report may take that long to arrive.
CLOCK_DIFFERENCE_S = 5.0


def place(
    kind: Kind,
    wanted: DesiredState,
    nodes: Iterable[Node],
    units: Collection[Unit],
    taken: Collection[tuple[str, int]] = (),
) -> tuple[Node, int] | str:
    """Returns the node and port for one more unit, or the reason why there is no room for it.

    Units are spread, so that the loss of one machine takes few of them. The order of nodes: fewest units of this kind
    that stay, then fewest units of this kind at all, then most free GPUs, then most free CPUs, then the name.
    """
    needs = wanted.needs[kind]
    open_nodes = [node for node in nodes if node.name not in wanted.drained]
    # A session is lost if its gateway and its engine are lost together: with edge nodes the two kinds are separated,
    # unless no open node is left for this kind.
    proper = [node for node in open_nodes if node.is_edge == (kind is Kind.GATEWAY)]
    if any(node.is_edge for node in open_nodes) and proper:
        open_nodes = proper
    if not open_nodes:
        return "the fleet has no node that takes new work"
    if needs.gpus > 0 and not any(node.gpus > 0 for node in open_nodes):
        return f"an {kind} needs {needs.gpus:g} GPU, and no node has one: set engine.gpus to 0 to run on CPUs"
    rooms = {node.name: room_on(node, wanted, units) for node in open_nodes}
    fitting = [node for node in open_nodes if _fits(needs, *rooms[node.name])]
    if not fitting:
        asked = f"{needs.cpus:g} CPU" + (f" and {needs.gpus:g} GPU" if needs.gpus else "")
        return f"no node has {asked} left for one more {kind}"

    def order(node: Node) -> tuple[int, int, float, float, str]:
        same = [unit for unit in units if unit.kind is kind and unit.node == node.name]
        cpus, gpus = rooms[node.name]
        return sum(_stays(unit, wanted) for unit in same), len(same), -gpus, -cpus, node.name

    chosen = min(fitting, key=order)
    return chosen, free_port(chosen.host, needs.port, nodes, units, taken)


def _stays(unit: Unit, wanted: DesiredState) -> bool:
    """Whether the unit is neither drained nor about to be replaced."""
    is_draining = unit.state is UnitState.DRAINING or unit.name in wanted.drained
    return unit.generation == wanted.generation and not is_draining


def room_on(node: Node, wanted: DesiredState, units: Iterable[Unit]) -> tuple[float, float]:
    """Free CPUs and GPUs of a node."""
    cpus, gpus = node.cpus, node.gpus
    for unit in units:
        if unit.node == node.name:
            cpus -= wanted.needs[unit.kind].cpus
            gpus -= wanted.needs[unit.kind].gpus
    return cpus, gpus


def free_port(
    host: str, first: int, nodes: Iterable[Node], units: Iterable[Unit], taken: Collection[tuple[str, int]]
) -> int:
    """The lowest free port of the host from `first` on; two nodes can share a host."""
    names = {node.name for node in nodes if node.host == host}
    used = {unit.port for unit in units if unit.node in names} | {port for where, port in taken if where == host}
    port = first
    while port in used:
        port += 1
    return port


def _fits(needs: Needs, cpus: float, gpus: float) -> bool:
    return needs.cpus <= cpus + _TOLERANCE and needs.gpus <= gpus + _TOLERANCE


# Reconciliation. A unit is not drained while fewer than the wanted number would serve afterwards. There are two
# exceptions, a unit or node that the operator drains and an upgrade: a unit is drained before its replacement serves if
# there is no room for both. Units of a kind are replaced one at a time.

PREFIX = {Kind.ENGINE: "e", Kind.GATEWAY: "g"}


def reconcile(wanted: DesiredState, actual: ActualState) -> list[Action]:
    """The actions to perform now."""
    actions: list[Action] = []
    alive = {node.name for node in actual.nodes}
    kept: list[Unit] = []
    for unit in actual.units:
        if unit.node not in alive:
            actions.append(Forget(unit.name, f"its node {unit.node} is gone"))
        elif unit.state in (UnitState.ENDED, UnitState.FAILED):
            actions.append(Forget(unit.name, f"it has {unit.state}"))
        else:
            kept.append(unit)
    number = actual.next_number
    # Gateways first: they are few, and engines are useless without one.
    for kind in (Kind.GATEWAY, Kind.ENGINE):
        step, number = _reconcile_kind(kind, wanted, actual, kept, number)
        actions += step
        kept += [action.unit for action in step if isinstance(action, Start)]
    return actions


def _reconcile_kind(
    kind: Kind, wanted: DesiredState, actual: ActualState, kept: list[Unit], number: int
) -> tuple[list[Action], int]:
    same_kind = [unit for unit in kept if unit.kind is kind]
    leaving = [unit for unit in same_kind if _is_asked_to_leave(unit, wanted) and unit.state is not UnitState.DRAINING]
    staying = [unit for unit in same_kind if unit.state is not UnitState.DRAINING and unit not in leaving]
    outdated = [unit for unit in staying if unit.generation != wanted.generation]
    count = wanted.count(kind)
    # An upgrade starts one unit more than wanted, so that no old unit is drained before a new one serves.
    is_replacing = bool(outdated) and len(staying) == count and _all_serve(staying)
    missing = count - len(staying) + (1 if is_replacing else 0)
    actions: list[Action] = []
    units = list(kept)
    no_place = ""
    for _ in range(missing):
        found = place(kind, wanted, actual.nodes, units, actual.taken)
        if isinstance(found, str):
            no_place = found
            break
        node, port = found
        started = Unit(f"{PREFIX[kind]}{number}", kind, node.name, port, wanted.generation)
        number += 1
        units.append(started)
        actions.append(Start(started))
    if no_place and not is_replacing:
        actions.append(Wait(no_place))
    actions += _departures(kind, wanted, same_kind, leaving, staying, bool(no_place))
    return actions, number


def _departures(
    kind: Kind, wanted: DesiredState, same_kind: list[Unit], leaving: list[Unit], staying: list[Unit], is_full: bool
) -> list[Action]:
    """The units to drain now."""
    count = wanted.count(kind)
    serving = [unit for unit in staying if unit.state is UnitState.SERVING]
    # 1. Units that the operator drains: when the others suffice, or when there is no room for replacements.
    if leaving and (len(serving) >= count or is_full):
        return [DrainUnit(unit.name, "the operator drains it") for unit in leaving]
    # 2. Otherwise one unit of a kind at a time.
    if any(unit.state is UnitState.DRAINING for unit in same_kind) or leaving:
        return []
    outdated = [unit for unit in staying if unit.generation != wanted.generation]
    excess = len(staying) - count
    if excess > 0 and not outdated and (idle := [unit for unit in staying if unit.state is UnitState.STARTING]):
        return [DrainUnit(drain_order(idle, wanted.generation)[0].name, "the fleet needs fewer")]
    if excess > 0 and len(serving) > count:
        why = "it is replaced" if outdated else "the fleet needs fewer"
        return [DrainUnit(drain_order(serving, wanted.generation)[0].name, why)]
    if outdated and excess <= 0 and is_full and _all_serve(staying):
        return [
            DrainUnit(drain_order(outdated, wanted.generation)[0].name, "it is replaced, without room for both at once")
        ]
    return []


def drain_order(units: Iterable[Unit], generation: int) -> list[Unit]:
    """The order of draining: units of older generations first, then the least busy, then the youngest."""
    return sorted(units, key=lambda unit: (unit.generation == generation, unit.busy, -unit.number))


def _is_asked_to_leave(unit: Unit, wanted: DesiredState) -> bool:
    return unit.name in wanted.drained or unit.node in wanted.drained


def _all_serve(units: Iterable[Unit]) -> bool:
    return all(unit.state is UnitState.SERVING for unit in units)


def engines_seen(capacities: Iterable[Capacity]) -> dict[str, dict[str, Any]]:
    """Engines with a recent heartbeat, each from the gateway with its latest heartbeat.

    Engines report the same values to every gateway.
    """
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
    """The load of serving engines; draining engines do not count."""
    serving = [engine for engine in engines_seen(capacities).values() if engine.get("state") == "serving"]
    counted = sum(engine["streams"] for engine in serving)
    possible = sum(engine["streams"] + engine["streams_free"] for engine in serving)
    return Load(counted, possible, len(serving), refused)


def fleet_capacity(capacities: Mapping[str, Capacity]) -> dict[str, Any]:
    """`/capacity` of all gateways (by gateway name) added up, as if the fleet were one server."""
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


def clock_trouble(node: str, node_time: float, now: float) -> str:
    """A warning if the clocks of node and head differ (seconds since the epoch), or an empty text.

    No decision compares clocks, but client secrets contain an expiry time.
    """
    off = node_time - now
    if abs(off) <= CLOCK_DIFFERENCE_S:
        return ""
    where = "ahead of" if off > 0 else "behind"
    return f"the clock of node {node} is {abs(off):.0f} s {where} the head's: client secrets hold too long or too short"


def link_troubles(capacities: Iterable[Capacity]) -> dict[str, str]:
    """Engines that a gateway cannot use, with the reason: another model, other weights, another secret, no answer."""
    return {
        engine["name"]: engine["problem"]
        for capacity in capacities
        for engine in capacity.get("engines_missing", ())
        if engine.get("problem")
    }


class Supervisors(Protocol):
    """The manager's access to nodes and supervisors; `RaySupervisors` in production."""

    def nodes(self) -> list[Node]:
        """The nodes that are alive now."""

    def units_on_node(self, node: Node) -> list[Unit]:
        """The units that run on a node already, from earlier supervisors. Raises FleetError."""

    def start_supervisor(self, unit: Unit, plan: FleetPlan) -> None:
        """Start a supervisor for this unit on its node."""

    def reports(self, table: Table, outdated: Collection[str], figures: Mapping[str, Any]) -> Mapping[str, Report]:
        """The reports of all supervisors that answer now.

        The same calls send the figures to all gateways, and the table to those gateways that have an outdated one.
        """

    def drain(self, name: str) -> None: ...

    def dismiss(self, name: str) -> None:
        """End the supervisor of a unit that has ended or whose node is gone."""


@dataclass(slots=True)
class ManagerState:
    """The state that survives a restart of the manager."""

    plan: FleetPlan
    scale: ScaleState
    generation: int = 1
    next_number: int = 1
    drained: frozenset[str] = frozenset()
    table: Table = field(default_factory=lambda: {"number": 0, "engines": [], "gateways": []})
    is_going_down: bool = False

    def as_json(self) -> dict[str, Any]:
        return {
            "plan": asdict(self.plan),
            "wanted": self.scale.wanted,
            "generation": self.generation,
            "next_number": self.next_number,
            "drained": sorted(self.drained),
            "table": self.table,
            "is_going_down": self.is_going_down,
        }

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> ManagerState:
        return cls(
            plan_from(tree["plan"]),
            ScaleState(tree["wanted"]),
            tree["generation"],
            tree["next_number"],
            frozenset(tree["drained"]),
            tree["table"],
            tree["is_going_down"],
        )

    @classmethod
    def of(cls, plan: FleetPlan) -> ManagerState:
        return cls(plan, ScaleState(plan.engine.least))


class Manager:
    """One thread calls `step` in a loop; the other methods take orders of the operator or return the state."""

    def __init__(
        self,
        supervisors: Supervisors,
        state: ManagerState,
        store: Callable[[dict[str, Any]], None],
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._supervisors = supervisors
        self._state = state
        self._store = store
        self._clock = clock
        self._wall_clock = wall_clock
        self._stored: dict[str, Any] = {}
        self._nodes: dict[str, Node] = {}
        self._units: dict[str, Unit] = {}
        self._reports: Mapping[str, Report] = {}
        # Time of the last answer of each supervisor, or of its start.
        self._answered_at: dict[str, float] = {}
        self._seen: dict[str, dict[str, Any]] = {}
        self._troubles: dict[str, str] = {}
        # By engine: its process id when a gateway last reported that it serves.
        self._served_as: dict[str, Any] = {}
        self._refused = 0
        self._refused_before: dict[str, int] = {}
        self._taken: set[tuple[str, int]] = set()
        self._avoided: dict[str, float] = {}
        self._notes: list[str] = []
        self._waits: list[str] = []
        self._rounds = 0

    # Orders of the operator

    def want(self, plan: FleetPlan) -> None:
        """Apply another plan. Its bounds and counts apply at once; running processes keep the settings of their
        start."""
        self._state.plan = plan
        self._state.is_going_down = False

    def scale(self, engines: int) -> None:
        plan = self._state.plan.engine
        if not plan.least <= engines <= plan.most:
            raise FleetError(f"the fleet file allows {plan.least} to {plan.most} engines, not {engines}")
        self._state.scale = ScaleState(engines, changed_at=self._clock())
        self._note(f"the operator wants {engines} engines")

    def drain(self, name: str) -> None:
        if name not in self._units and name not in self._nodes:
            known = ", ".join(sorted([*self._nodes, *self._units])) or "nothing"
            raise FleetError(f"the fleet has no node, engine or gateway {name!r}; it has {known}")
        self._state.drained |= {name}
        self._note(f"the operator drains {name}")

    def undrain(self, name: str) -> None:
        self._state.drained -= {name}

    def upgrade(self) -> int:
        """Replace all units, one at a time; returns the number of the new generation."""
        self._state.generation += 1
        self._note(f"upgrade to generation {self._state.generation}")
        return self._state.generation

    def go_down(self) -> None:
        self._state.is_going_down = True

    @property
    def is_down(self) -> bool:
        return self._state.is_going_down and not self._units

    # Rounds and reports

    def step(self) -> None:
        """One round: collect reports, scale, reconcile, update the table of engines, store the state."""
        self._rounds += 1
        self._collect_reports()
        decision = self._scaling()
        if decision.why:
            self._note(f"{decision.scaling.wanted} engines wanted: {decision.why}")
        self._state.scale = decision.scaling
        actions = reconcile(self._wanted(decision.scaling.wanted), self._actual())
        self._waits = [action.why for action in actions if isinstance(action, Wait)]
        for action in actions:
            self._perform(action)
        plan = self._state.plan.gateway
        to_peer_port = plan.peer_port - plan.port
        self._state.table = next_table(self._state.table, self._units.values(), self._hosts(), to_peer_port)
        self._store_state()

    def planned(self, engines: int | None = None) -> dict[str, Any]:
        """The actions of the next round with `engines` engines (None: as many as scaling wants); starts none."""
        decision = self._scaling()
        wanted = decision.scaling.wanted if engines is None else engines
        actions = reconcile(self._wanted(wanted), self._actual())
        return {
            "engines_now": sum(unit.kind is Kind.ENGINE for unit in self._units.values()),
            "engines_wanted": wanted,
            "why": decision.why if engines is None else "asked for",
            "actions": [_description(action) for action in actions],
        }

    def status(self) -> dict[str, Any]:
        capacities = self._capacities()
        state = self._state
        return {
            "name": state.plan.name,
            "generation": state.generation,
            "engines_wanted": state.scale.wanted,
            "gateways_wanted": state.plan.gateway.count,
            "drained": sorted(state.drained),
            "is_going_down": state.is_going_down,
            "table_number": state.table["number"],
            "looks": self._rounds,
            "capacity": fleet_capacity(capacities),
            "nodes": [asdict(node) for node in self._nodes.values()],
            "units": [self._unit_status(unit) for unit in sorted(self._units.values(), key=lambda unit: unit.number)],
            "waits_for": self._waits,
            "notes": self._notes[-NOTES_KEPT:],
        }

    # The parts of a round

    def _collect_reports(self) -> None:
        """Collect nodes and reports, and bring the units up to date."""
        nodes = {node.name: node for node in self._supervisors.nodes()}
        for name in nodes.keys() - self._nodes.keys():
            self._adopt_units(nodes, name)
        # A node that is gone is no longer drained: if it comes back, it takes work again.
        self._state.drained -= self._nodes.keys() - nodes.keys()
        self._nodes = nodes
        # The figures of the round before: the call that asks for reports also carries the figures.
        figures = {"name": self._state.plan.name, **fleet_capacity(self._capacities())}
        self._reports = self._supervisors.reports(self._state.table, self._outdated(), figures)
        self._answered_at |= dict.fromkeys(self._reports.keys() & self._units.keys(), self._clock())
        self._seen = engines_seen(self._capacities().values())
        self._refused = self._newly_refused()
        now = self._wall_clock()
        clocks = {name: clock_trouble(report["node"], report["time"], now) for name, report in self._reports.items()}
        self._troubles = clocks | link_troubles(self._capacities().values())
        for name, unit in list(self._units.items()):
            self._units[name] = self._as_reported(unit, self._reports.get(name))

    def _outdated(self) -> set[str]:
        """The gateways whose last report does not name the current table."""
        number = self._state.table["number"]
        gateways = {name for name, unit in self._units.items() if unit.kind is Kind.GATEWAY}
        return {name for name in gateways if self._reports.get(name, {}).get("table") != number}

    def _adopt_units(self, nodes: dict[str, Node], name: str) -> None:
        """A node is new or has come back: add the units that run there already."""
        try:
            found = self._supervisors.units_on_node(nodes[name])
        except FleetError as error:
            self._note(str(error))
            del nodes[name]
            return
        for unit in found:
            if unit.name not in self._units:
                self._note(f"{unit.name} runs on {name} already")
                self._start_supervisor(unit)

    def _newly_refused(self) -> int:
        """Sessions that gateways refused for lack of room since their last reports."""
        new = 0
        for name, report in self._reports.items():
            count = report.get("refused")
            if count is None:
                continue
            before = self._refused_before.get(name, count)
            # A restarted gateway counts from 0.
            new += count - before if count >= before else count
            self._refused_before[name] = count
        return new

    def _as_reported(self, unit: Unit, report: Report | None) -> Unit:
        """The unit with the state of its report. Without a report it keeps its state until its node is gone."""
        if report is None:
            return unit
        state = UnitState(report["state"])
        if unit.kind is Kind.ENGINE:
            seen = self._seen.get(unit.name)
            busy = unit.busy if seen is None else seen["streams"]
            # Gateways report whether an engine serves. Without such a report the engine keeps its last state.
            if seen is not None:
                self._served_as[unit.name] = report["pid"]
            if (
                state is UnitState.STARTING
                and report["pid"] is not None
                and self._served_as.get(unit.name) == report["pid"]
            ):
                state = UnitState.SERVING
        else:
            busy = (report.get("capacity") or {}).get("sessions", 0)
        if unit.state is UnitState.DRAINING and state in (UnitState.STARTING, UnitState.SERVING):
            # The supervisor has not handled the drain call yet: repeat it.
            self._supervisors.drain(unit.name)
            state = UnitState.DRAINING
        if state is UnitState.FAILED:
            self._note_failure(unit, report)
        return replace(unit, state=state, busy=busy, is_up=report.get("is_up", False))

    def _note_failure(self, unit: Unit, report: Report) -> None:
        self._note(f"{unit.name} cannot start on {unit.node}: {report['error']}")
        if report["blame"] == "port":
            self._taken.add((self._nodes[unit.node].host, unit.port))
        else:
            self._avoided[unit.node] = self._clock() + AVOID_S

    def _scaling(self) -> Decision:
        capacities = self._capacities()
        load = load_of(capacities.values(), self._refused)
        return decide(self._state.plan.rules, self._state.scale, load, self._clock())

    def _wanted(self, engines: int) -> DesiredState:
        state, plan = self._state, self._state.plan
        if state.is_going_down:
            return DesiredState(0, 0, state.generation, plan.needs)
        return DesiredState(engines, plan.gateway.count, state.generation, plan.needs, state.drained)

    def _actual(self) -> ActualState:
        now = self._clock()
        self._avoided = {name: until for name, until in self._avoided.items() if until > now}
        # An avoided node keeps its units and gets no new ones: it appears here without free resources.
        nodes = tuple(
            replace(node, cpus=0.0, gpus=0.0) if node.name in self._avoided else node for node in self._nodes.values()
        )
        return ActualState(nodes, tuple(self._units.values()), self._state.next_number, frozenset(self._taken))

    def _perform(self, action: Action) -> None:
        if isinstance(action, Start):
            self._note(f"{action.unit.name} starts on {action.unit.node}")
            self._start_supervisor(action.unit)
            self._store_state()
        elif isinstance(action, DrainUnit):
            self._note(f"{action.name} drains: {action.why}")
            self._units[action.name] = replace(self._units[action.name], state=UnitState.DRAINING)
            self._supervisors.drain(action.name)
        elif isinstance(action, Forget):
            self._note(f"{action.name} is gone: {action.why}")
            del self._units[action.name]
            self._served_as.pop(action.name, None)
            self._refused_before.pop(action.name, None)
            self._answered_at.pop(action.name, None)
            self._state.drained -= {action.name}
            self._supervisors.dismiss(action.name)

    def _start_supervisor(self, unit: Unit) -> None:
        self._state.next_number = max(self._state.next_number, unit.number + 1)
        self._units[unit.name] = unit
        self._answered_at[unit.name] = self._clock()
        self._supervisors.start_supervisor(unit, self._state.plan)

    def _store_state(self) -> None:
        if (now := self._state.as_json()) != self._stored:
            self._store(now)
            self._stored = now

    def _capacities(self) -> dict[str, Report]:
        found = {name: report.get("capacity") for name, report in self._reports.items()}
        return {name: capacity for name, capacity in found.items() if capacity}

    def _hosts(self) -> dict[str, str]:
        return {node.name: node.host for node in self._nodes.values()}

    def _unit_status(self, unit: Unit) -> dict[str, Any]:
        report, seen = self._reports.get(unit.name, {}), self._seen.get(unit.name, {})
        capacity = report.get("capacity") or {}
        return {
            "name": unit.name,
            "kind": str(unit.kind),
            "node": unit.node,
            "port": unit.port,
            "state": str(unit.state),
            "generation": unit.generation,
            "busy": unit.busy,
            "load": seen.get("load", capacity.get("load")),
            "version": seen.get("version", capacity.get("version")),
            "model": seen.get("model"),
            "table_number": capacity.get("table_number"),
            "pid": report.get("pid"),
            "restarts": report.get("restarts", 0),
            "error": report.get("error") or self._troubles.get(unit.name, "") or self._silence(unit),
        }

    def _silence(self, unit: Unit) -> str:
        silent_s = self._clock() - self._answered_at[unit.name]
        if silent_s < SILENT_S:
            return ""
        text = f"its supervisor has not answered for {silent_s:.0f} s: {unit.node} stands still, is cut off or is gone"
        return f"{text}; its sessions continue elsewhere"

    def _note(self, text: str) -> None:
        logger.info("%s", text)
        self._notes = [*self._notes[-NOTES_KEPT:], text]


def _description(action: Action) -> str:
    match action:
        case Start(unit):
            return f"start {unit.kind} {unit.name} on {unit.node} port {unit.port}"
        case DrainUnit(name, why):
            return f"drain {name}: {why}"
        case Forget(name, why):
            return f"forget {name}: {why}"
        case Wait(why):
            return f"wait: {why}"
