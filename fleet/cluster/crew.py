"""Keepers as Ray actors: hired on their node, asked all at once, hired again when they are lost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fleet.errors import FleetError
from fleet.keepers.keeper import Place
from fleet.plan import FleetPlan
from fleet.state import Node, Unit
from fleet.table import Table

logger = logging.getLogger(__name__)
EDGE = "tickertape_edge"
ANSWER_S = 2.0
# A node's first task starts a process there.
FIRST_ANSWER_S = 60.0


class RayCrew:
    def __init__(
        self, plan: FleetPlan, fingerprint: str, keeper: type, units_on: Callable[[str, str], list[Unit]]
    ) -> None:
        self.calls = 0
        self._plan = plan
        self._fingerprint = fingerprint
        self._keeper = ray.remote(keeper)
        self._units_on = ray.remote(units_on)
        self._ids: dict[str, str] = {}
        self._nodes: dict[str, Node] = {}
        self._hired: dict[str, tuple[Unit, FleetPlan, Any]] = {}

    def nodes(self) -> list[Node]:
        found = [node for node in ray.nodes() if node["Alive"]]
        self._ids = {node["NodeName"]: node["NodeID"] for node in found}
        self._nodes = {node["NodeName"]: as_node(node) for node in found}
        return list(self._nodes.values())

    def found_on(self, node: Node) -> list[Unit]:
        """Raises FleetError if the node does not say."""
        self.calls += 1
        task = self._units_on.options(num_cpus=0, scheduling_strategy=self._on(node.name))
        try:
            units: list[Unit] = ray.get(
                task.remote(str(self._plan.node_folder(node.name)), node.name), timeout=FIRST_ANSWER_S
            )
        except RayError as error:
            raise FleetError(f"node {node.name} does not answer: {error}") from error
        return units

    def hire(self, unit: Unit, plan: FleetPlan) -> None:
        needs = plan.needs[unit.kind]
        place = Place(unit.node, self._nodes[unit.node].host, self._fingerprint)
        actor = self._keeper.options(
            name=f"keeper-{unit.name}",
            namespace=plan.name,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            num_cpus=needs.cpus,
            num_gpus=needs.gpus,
            # A keeper without its node is of no use: the fleet hires another one elsewhere.
            scheduling_strategy=self._on(unit.node),
        ).remote(unit, asdict(plan), place)
        self._hired[unit.name] = (unit, plan, actor)

    def reports(self, table: Table, figures: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
        asked = {name: actor.report.remote(table, figures) for name, (_, _, actor) in self._hired.items()}
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
        if name in self._hired:
            self.calls += 1
            self._hired[name][2].drain.remote()

    def dismiss(self, name: str) -> None:
        hired = self._hired.pop(name, None)
        if hired is not None:
            self.calls += 1
            try:
                ray.kill(hired[2])
            except (RayError, ValueError):
                logger.info("the keeper of %s was gone already", name)

    def _read(self, name: str, answer: Any) -> dict[str, Any] | None:
        try:
            report: dict[str, Any] = ray.get(answer, timeout=ANSWER_S)
            return report
        except ActorDiedError:
            unit, plan, _ = self._hired[name]
            if unit.node in self._ids:
                logger.info("the keeper of %s is lost; another one goes on", name)
                self.hire(unit, plan)
        except RayError:
            logger.info("the keeper of %s does not answer now", name)
        return None

    def _on(self, node: str) -> NodeAffinitySchedulingStrategy:
        return NodeAffinitySchedulingStrategy(self._ids[node], soft=False)


def as_node(node: dict[str, Any]) -> Node:
    has = node["Resources"]
    return Node(
        node["NodeName"], node["NodeManagerAddress"], has.get("CPU", 0.0), has.get("GPU", 0.0), has.get(EDGE, 0) > 0
    )
