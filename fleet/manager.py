"""Fleet-wide figures, added up from what each gateway says of itself and of the engines it sees; and what is wrong with
units that run all the same, in words for the operator.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from fleet.plan import Decision, FleetPlan, Load, ScaleMemory, decide, plan_from
from fleet.reconcile import reconcile
from fleet.state import (
    Action,
    Actual,
    DrainEngine,
    FleetError,
    Forget,
    Kind,
    Node,
    Start,
    Table,
    Unit,
    UnitState,
    Wait,
    Wanted,
    next_table,
)

# An engine that no gateway has heard for so long does not serve; beats come every second or so.
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


# The fleet's manager: looks at what there is, decides by pure functions, and has it done.
#
# It holds no stream and no session. What it must know after its own death is one small value, which its owner stores;
# what runs where is read off the nodes.

logger = logging.getLogger(__name__)
Report = Mapping[str, Any]
# A node that could not start a unit is tried again after so long.
AVOID_S = 60.0
# A keeper that has not answered for so long is named in the status; one that is just hired takes a few seconds.
SILENT_S = 5.0
MOST_NOTES = 50


class Crew(Protocol):
    """Whoever can put keepers on nodes and speak to them."""

    def nodes(self) -> list[Node]:
        """Those that are there now."""

    def found_on(self, node: Node) -> list[Unit]:
        """What runs on a node already: somebody kept it before."""

    def hire(self, unit: Unit, plan: FleetPlan) -> None:
        """A keeper for this unit, on its node."""

    def reports(self, table: Table, figures: Mapping[str, Any]) -> Mapping[str, Report]:
        """Of all keepers that answer now; gateways get the table and the fleet's figures on the way."""

    def drain(self, name: str) -> None: ...

    def dismiss(self, name: str) -> None:
        """The keeper goes. What it kept has ended, or its node is gone."""


@dataclass(slots=True)
class Memory:
    """What outlives the manager."""

    plan: FleetPlan
    scale: ScaleMemory
    generation: int = 1
    next_number: int = 1
    drained: frozenset[str] = frozenset()
    table: Table = field(default_factory=lambda: {"number": 0, "engines": []})
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
    def from_json(cls, tree: dict[str, Any]) -> Memory:
        return cls(
            plan_from(tree["plan"]),
            ScaleMemory(tree["wanted"]),
            tree["generation"],
            tree["next_number"],
            frozenset(tree["drained"]),
            tree["table"],
            tree["is_going_down"],
        )

    @classmethod
    def of(cls, plan: FleetPlan) -> Memory:
        return cls(plan, ScaleMemory(plan.engine.least))


class Manager:
    """`step` is called again and again by one thread; the rest says what the operator wants, or how things are."""

    def __init__(
        self,
        crew: Crew,
        memory: Memory,
        store: Callable[[dict[str, Any]], None],
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._crew = crew
        self._memory = memory
        self._store = store
        self._clock = clock
        self._wall_clock = wall_clock
        self._stored: dict[str, Any] = {}
        self._nodes: dict[str, Node] = {}
        self._units: dict[str, Unit] = {}
        self._reports: Mapping[str, Report] = {}
        # When each keeper last answered, or was hired.
        self._heard_at: dict[str, float] = {}
        self._seen: dict[str, dict[str, Any]] = {}
        self._troubles: dict[str, str] = {}
        # The process as which an engine was last seen to serve.
        self._served_as: dict[str, Any] = {}
        self._refused = 0
        self._refused_before: dict[str, int] = {}
        self._taken: set[tuple[str, int]] = set()
        self._avoided: dict[str, float] = {}
        self._notes: list[str] = []
        self._waits: list[str] = []
        self._looks = 0

    # What the operator wants

    def want(self, plan: FleetPlan) -> None:
        """Another plan: bounds and counts hold at once, and what is started from now on is started as it says."""
        self._memory.plan = plan
        self._memory.is_going_down = False

    def scale(self, engines: int) -> None:
        plan = self._memory.plan.engine
        if not plan.least <= engines <= plan.most:
            raise FleetError(f"the fleet's file allows {plan.least} to {plan.most} engines, not {engines}")
        self._memory.scale = ScaleMemory(engines, changed_at=self._clock())
        self._note(f"the operator wants {engines} engines")

    def drain(self, name: str) -> None:
        if name not in self._units and name not in self._nodes:
            known = ", ".join(sorted([*self._nodes, *self._units])) or "nothing"
            raise FleetError(f"the fleet has no node, engine or gateway {name!r}; it has {known}")
        self._memory.drained |= {name}
        self._note(f"the operator drains {name}")

    def undrain(self, name: str) -> None:
        self._memory.drained -= {name}

    def upgrade(self) -> int:
        """Everything is replaced, one at a time; returns the number of the new generation."""
        self._memory.generation += 1
        self._note(f"upgrade to generation {self._memory.generation}")
        return self._memory.generation

    def go_down(self) -> None:
        self._memory.is_going_down = True

    @property
    def is_down(self) -> bool:
        return self._memory.is_going_down and not self._units

    # What is done

    def step(self) -> None:
        self._looks += 1
        self._look()
        decision = self._scaling()
        if decision.why:
            self._note(f"{decision.memory.wanted} engines wanted: {decision.why}")
        self._memory.scale = decision.memory
        actions = reconcile(self._wanted(decision.memory.wanted), self._actual())
        self._waits = [action.why for action in actions if isinstance(action, Wait)]
        for action in actions:
            self._do(action)
        self._memory.table = next_table(self._memory.table, self._units.values(), self._hosts())
        self._remember()

    def planned(self, engines: int | None = None) -> dict[str, Any]:
        """What the next step would do, with so many engines or with as many as scaling asks for; nothing is done."""
        decision = self._scaling()
        wanted = decision.memory.wanted if engines is None else engines
        actions = reconcile(self._wanted(wanted), self._actual())
        return {
            "engines_now": sum(unit.kind is Kind.ENGINE for unit in self._units.values()),
            "engines_wanted": wanted,
            "why": decision.why if engines is None else "asked for",
            "actions": [_told(action) for action in actions],
        }

    def status(self) -> dict[str, Any]:
        capacities = self._capacities()
        memory = self._memory
        return {
            "name": memory.plan.name,
            "generation": memory.generation,
            "engines_wanted": memory.scale.wanted,
            "gateways_wanted": memory.plan.gateway.count,
            "drained": sorted(memory.drained),
            "is_going_down": memory.is_going_down,
            "table_number": memory.table["number"],
            "looks": self._looks,
            "capacity": fleet_capacity(capacities),
            "nodes": [asdict(node) for node in self._nodes.values()],
            "units": [self._shown(unit) for unit in sorted(self._units.values(), key=lambda unit: unit.number)],
            "waits_for": self._waits,
            "notes": self._notes[-MOST_NOTES:],
        }

    # How

    def _look(self) -> None:
        nodes = {node.name: node for node in self._crew.nodes()}
        for name in nodes.keys() - self._nodes.keys():
            self._take_in(nodes, name)
        # A machine that went has been emptied; should it come back, it is there to work.
        self._memory.drained -= self._nodes.keys() - nodes.keys()
        self._nodes = nodes
        # Those of the look before: a call carries both ways what there is.
        figures = {"name": self._memory.plan.name, **fleet_capacity(self._capacities())}
        self._reports = self._crew.reports(self._memory.table, figures)
        self._heard_at |= dict.fromkeys(self._reports.keys() & self._units.keys(), self._clock())
        self._seen = engines_seen(self._capacities().values())
        self._refused = self._newly_refused()
        now = self._wall_clock()
        clocks = {name: clock_trouble(report["node"], report["time"], now) for name, report in self._reports.items()}
        self._troubles = clocks | link_troubles(self._capacities().values())
        for name, unit in list(self._units.items()):
            self._units[name] = self._as_reported(unit, self._reports.get(name))

    def _take_in(self, nodes: dict[str, Node], name: str) -> None:
        """A node is new, or is back: whoever runs there already belongs to us."""
        try:
            found = self._crew.found_on(nodes[name])
        except FleetError as error:
            self._note(str(error))
            del nodes[name]
            return
        for unit in found:
            if unit.name not in self._units:
                self._note(f"{unit.name} runs on {name} already")
                self._hire(unit)

    def _newly_refused(self) -> int:
        """Sessions that gateways refused for want of room since they were last heard."""
        new = 0
        for name, report in self._reports.items():
            count = report.get("refused")
            if count is None:
                continue
            before = self._refused_before.get(name, count)
            # A gateway that was started again counts from nothing.
            new += count - before if count >= before else count
            self._refused_before[name] = count
        return new

    def _as_reported(self, unit: Unit, report: Report | None) -> Unit:
        """A keeper that does not answer leaves things as they were: its node tells whether they are gone."""
        if report is None:
            return unit
        state = UnitState(report["state"])
        if unit.kind is Kind.ENGINE:
            seen = self._seen.get(unit.name)
            busy = unit.busy if seen is None else seen["streams"]
            # Gateways tell whether an engine serves. Should all of them be away, it is not worse for that.
            if seen is not None:
                self._served_as[unit.name] = report["pid"]
            if state is UnitState.STARTING and self._served_as.get(unit.name) == report["pid"] is not None:
                state = UnitState.SERVING
        else:
            busy = (report.get("capacity") or {}).get("sessions", 0)
        if unit.state is UnitState.DRAINING and state in (UnitState.STARTING, UnitState.SERVING):
            # It was asked to, and the word is on its way.
            self._crew.drain(unit.name)
            state = UnitState.DRAINING
        if state is UnitState.FAILED:
            self._note_failure(unit, report)
        return replace(unit, state=state, busy=busy)

    def _note_failure(self, unit: Unit, report: Report) -> None:
        self._note(f"{unit.name} cannot start on {unit.node}: {report['error']}")
        if report["blame"] == "port":
            self._taken.add((self._nodes[unit.node].host, unit.port))
        else:
            self._avoided[unit.node] = self._clock() + AVOID_S

    def _scaling(self) -> Decision:
        capacities = self._capacities()
        load = load_of(capacities.values(), self._refused)
        return decide(self._memory.plan.rules, self._memory.scale, load, self._clock())

    def _wanted(self, engines: int) -> Wanted:
        memory, plan = self._memory, self._memory.plan
        if memory.is_going_down:
            return Wanted(0, 0, memory.generation, plan.needs)
        return Wanted(engines, plan.gateway.count, memory.generation, plan.needs, memory.drained)

    def _actual(self) -> Actual:
        now = self._clock()
        self._avoided = {name: until for name, until in self._avoided.items() if until > now}
        # A node to avoid keeps what it has and gets nothing new: it seems to have no room.
        nodes = tuple(
            replace(node, cpus=0.0, gpus=0.0) if node.name in self._avoided else node for node in self._nodes.values()
        )
        return Actual(nodes, tuple(self._units.values()), self._memory.next_number, frozenset(self._taken))

    def _do(self, action: Action) -> None:
        if isinstance(action, Start):
            self._note(f"{action.unit.name} starts on {action.unit.node}")
            self._hire(action.unit)
            self._remember()
        elif isinstance(action, DrainEngine):
            self._note(f"{action.name} drains: {action.why}")
            self._units[action.name] = replace(self._units[action.name], state=UnitState.DRAINING)
            self._crew.drain(action.name)
        elif isinstance(action, Forget):
            self._note(f"{action.name} is gone: {action.why}")
            del self._units[action.name]
            self._served_as.pop(action.name, None)
            self._refused_before.pop(action.name, None)
            self._heard_at.pop(action.name, None)
            self._memory.drained -= {action.name}
            self._crew.dismiss(action.name)

    def _hire(self, unit: Unit) -> None:
        self._memory.next_number = max(self._memory.next_number, unit.number + 1)
        self._units[unit.name] = unit
        self._heard_at[unit.name] = self._clock()
        self._crew.hire(unit, self._memory.plan)

    def _remember(self) -> None:
        if (now := self._memory.as_json()) != self._stored:
            self._store(now)
            self._stored = now

    def _capacities(self) -> dict[str, Report]:
        found = {name: report.get("capacity") for name, report in self._reports.items()}
        return {name: capacity for name, capacity in found.items() if capacity}

    def _hosts(self) -> dict[str, str]:
        return {node.name: node.host for node in self._nodes.values()}

    def _shown(self, unit: Unit) -> dict[str, Any]:
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
        silent_s = self._clock() - self._heard_at[unit.name]
        if silent_s < SILENT_S:
            return ""
        text = f"its keeper has not answered for {silent_s:.0f} s: {unit.node} stands still, is cut off or is gone"
        return f"{text}; its sessions go on elsewhere"

    def _note(self, text: str) -> None:
        logger.info("%s", text)
        self._notes = [*self._notes[-MOST_NOTES:], text]


def _told(action: Action) -> str:
    match action:
        case Start(unit):
            return f"start {unit.kind} {unit.name} on {unit.node} port {unit.port}"
        case DrainEngine(name, why):
            return f"drain {name}: {why}"
        case Forget(name, why):
            return f"forget {name}: {why}"
        case Wait(why):
            return f"wait: {why}"
