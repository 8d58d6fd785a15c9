"""The Ray actors of a fleet: one around the manager on the head node, one around each supervisor on its node.

A supervisor starts and watches one engine or gateway process on its node (`fleet/supervisors.py`). `RaySupervisors` is
the manager's way to call them. Each actor has a thread that does its work; the decisions are in `fleet/manager.py`.
Calls between actors carry only reports, tables of engines, figures of the fleet and orders, a few a second, independent
of the load of the fleet.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fleet.manager import Manager, ManagerState
from fleet.plan import FleetPlan, plan_from
from fleet.state import FleetError, Kind, Node, Table, Unit, replace_file
from fleet.supervisors import EngineSupervisor, GatewaySupervisor, Place, Records, Supervisor

logger = logging.getLogger(__name__)
# The Ray resource of edge nodes.
EDGE_RESOURCE = "tickertape_edge"
# Timeout for the reports of all supervisors in a round.
ANSWER_S = 2.0
# Seconds for the first answer of a node, where Ray has to start a worker process.
FIRST_ANSWER_S = 60.0


class RaySupervisors:
    """The manager's access to supervisors, which are Ray actors on their nodes. A lost actor is started again."""

    def __init__(
        self, plan: FleetPlan, fingerprint: str, supervisor: type, units_on: Callable[[str, str], list[Unit]]
    ) -> None:
        self.calls = 0
        self._plan = plan
        self._fingerprint = fingerprint
        self._supervisor = ray.remote(supervisor)
        self._units_on = ray.remote(units_on)
        self._ids: dict[str, str] = {}
        self._nodes: dict[str, Node] = {}
        self._actors: dict[str, tuple[Unit, FleetPlan, Any]] = {}

    def nodes(self) -> list[Node]:
        found = [node for node in ray.nodes() if node["Alive"]]
        self._ids = {node["NodeName"]: node["NodeID"] for node in found}
        self._nodes = {node["NodeName"]: as_node(node) for node in found}
        return list(self._nodes.values())

    def units_on_node(self, node: Node) -> list[Unit]:
        """Raises FleetError if the node does not answer."""
        self.calls += 1
        task = self._units_on.options(num_cpus=0, scheduling_strategy=self._on(node.name))
        try:
            units: list[Unit] = ray.get(
                task.remote(str(self._plan.node_folder(node.name)), node.name), timeout=FIRST_ANSWER_S
            )
        except RayError as error:
            raise FleetError(f"node {node.name} does not answer: {error}") from error
        return units

    def start_supervisor(self, unit: Unit, plan: FleetPlan) -> None:
        needs = plan.needs[unit.kind]
        place = Place(unit.node, self._nodes[unit.node].host, self._fingerprint)
        actor = self._supervisor.options(
            # Earlier versions use the same name: after an upgrade of the head, running actors are found by it.
            name=f"keeper-{unit.name}",
            namespace=plan.name,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            num_cpus=needs.cpus,
            num_gpus=needs.gpus,
            # Ray must not restart a supervisor on another node: the manager starts another unit instead.
            scheduling_strategy=self._on(unit.node),
        ).remote(unit, asdict(plan), place)
        self._actors[unit.name] = (unit, plan, actor)

    def reports(
        self, table: Table, outdated: Collection[str], figures: Mapping[str, Any]
    ) -> Mapping[str, Mapping[str, Any]]:
        asked = {
            name: actor.report.remote(table if name in outdated else None, figures)
            for name, (_, _, actor) in self._actors.items()
        }
        self.calls += len(asked)
        if not asked:
            return {}
        ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_S)
        done = set(ready)
        return {
            name: report
            for name, answer in asked.items()
            if answer in done and (report := self._read(name, answer)) is not None
        }

    def drain(self, name: str) -> None:
        if name in self._actors:
            self.calls += 1
            self._actors[name][2].drain.remote()

    def dismiss(self, name: str) -> None:
        known = self._actors.pop(name, None)
        if known is not None:
            self.calls += 1
            try:
                ray.kill(known[2])
            except (RayError, ValueError):
                logger.info("the supervisor of %s had ended already", name)

    def _read(self, name: str, answer: Any) -> dict[str, Any] | None:
        try:
            report: dict[str, Any] = ray.get(answer, timeout=ANSWER_S)
            return report
        except ActorDiedError:
            unit, plan, _ = self._actors[name]
            if unit.node in self._ids:
                logger.info("the supervisor of %s is lost; another one is started", name)
                self.start_supervisor(unit, plan)
        except RayError:
            logger.info("the supervisor of %s does not answer now", name)
        return None

    def _on(self, node: str) -> NodeAffinitySchedulingStrategy:
        return NodeAffinitySchedulingStrategy(self._ids[node], soft=False)


def as_node(node: dict[str, Any]) -> Node:
    resources = node["Resources"]
    return Node(
        node["NodeName"],
        node["NodeManagerAddress"],
        resources.get("CPU", 0.0),
        resources.get("GPU", 0.0),
        resources.get(EDGE_RESOURCE, 0) > 0,
    )


# Seconds between two steps of a supervisor.
STEP_S = 0.5


def units_on(folder: str, node: str) -> list[Unit]:
    """The units that run on this node already; a Ray task that runs on the node."""
    return [record.unit(node) for record in Records(Path(folder)).running()]


class SupervisorActor:
    """The actor of one supervisor. The process that it supervises outlives the actor; see
    `fleet/supervisors.py`."""

    def __init__(self, unit: Unit, plan: dict[str, Any], place: Place) -> None:
        supervisor_class = EngineSupervisor if unit.kind is Kind.ENGINE else GatewaySupervisor
        self._supervisor: Supervisor = supervisor_class(unit, plan_from(plan), place)
        threading.Thread(target=self._work, name="keep", daemon=True).start()

    def report(self, table: Table | None, figures: dict[str, Any]) -> dict[str, Any]:
        if isinstance(self._supervisor, GatewaySupervisor):
            if table is not None:
                self._supervisor.set_table(table)
            self._supervisor.set_figures(figures)
        return self._supervisor.report()

    def drain(self) -> None:
        self._supervisor.drain()

    def _work(self) -> None:
        pause = threading.Event()
        while not pause.wait(STEP_S):
            try:
                self._supervisor.step()
            except Exception:
                logger.exception("a step of the supervisor of %s failed", self._supervisor.unit.name)


class ManagerActor:
    """The actor of the manager. The manager's state is stored in a file on the head's disk."""

    def __init__(self, plan: dict[str, Any], fingerprint: str) -> None:
        fleet_plan = plan_from(plan)
        self._file = fleet_plan.folder / "memory.json"
        state = self._stored_state() or ManagerState.of(fleet_plan)
        self._supervisors = RaySupervisors(state.plan, fingerprint, SupervisorActor, units_on)
        self._manager = Manager(self._supervisors, state, self._store)
        self._lock = threading.Lock()
        self._look_s = fleet_plan.look_s
        threading.Thread(target=self._work, name="manage", daemon=True).start()

    def want(self, plan: dict[str, Any]) -> None:
        with self._lock:
            self._manager.want(plan_from(plan))

    def scale(self, engines: int) -> None:
        with self._lock:
            self._manager.scale(engines)

    def planned(self, engines: int | None) -> dict[str, Any]:
        with self._lock:
            return self._manager.planned(engines)

    def drain(self, name: str) -> None:
        with self._lock:
            self._manager.drain(name)

    def undrain(self, name: str) -> None:
        with self._lock:
            self._manager.undrain(name)

    def upgrade(self) -> int:
        with self._lock:
            return self._manager.upgrade()

    def go_down(self) -> None:
        with self._lock:
            self._manager.go_down()

    def status(self) -> dict[str, Any]:
        with self._lock:
            return self._status()

    def forget(self) -> None:
        """Deletes the stored state: the fleet is down and must not start again by itself."""
        self._file.unlink(missing_ok=True)

    def _work(self) -> None:
        pause = threading.Event()
        while not pause.wait(self._look_s):
            try:
                with self._lock:
                    self._manager.step()
                    # For programs on the head that poll often: a call through Ray takes more than a second.
                    replace_file(self._file.with_name("status.json"), json.dumps(self._status()))
            except Exception:
                logger.exception("a round of the fleet's manager failed")

    def _stored_state(self) -> ManagerState | None:
        try:
            return ManagerState.from_json(json.loads(self._file.read_text()))
        except (OSError, ValueError, KeyError):
            return None

    def _status(self) -> dict[str, Any]:
        is_down = self._manager.is_down
        return {
            **self._manager.status(),
            "is_down": is_down,
            "actor_calls": self._supervisors.calls,
            "pid": os.getpid(),
        }

    def _store(self, state: dict[str, Any]) -> None:
        replace_file(self._file, json.dumps(state))
