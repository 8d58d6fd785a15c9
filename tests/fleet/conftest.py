from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from engine.fleet_secret import fingerprint, make_secret
from fleet.plan import EnginePlan, FleetPlan, GatewayPlan
from fleet.state import Kind, Node, Table, Unit
from fleet.supervisors import EngineSupervisor, GatewaySupervisor, Place, Records, Supervisor

STAND_IN = (sys.executable, str(Path(__file__).with_name("stand_in.py")))
PATIENCE_S = 60.0


def until(condition: Callable[[], Any], what: str = "it") -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.02)
    return found


def two_ports() -> tuple[int, int]:
    """Free ports, far apart from each other, because `free_port` counts upwards from each."""
    with socket.create_server(("127.0.0.1", 0)) as first:
        port = int(first.getsockname()[1])
    base = 20_000 + port % 10_000
    return base, base + 1000


@pytest.fixture
def plan(tmp_path: Path) -> FleetPlan:
    engines, gateways = two_ports()
    made = FleetPlan(
        name="test",
        state_folder=str(tmp_path / "state"),
        look_s=0.1,
        engine=EnginePlan(least=1, most=3, cpus=1.0, port=engines, drain_s=5.0, program=STAND_IN),
        gateway=GatewayPlan(count=1, cpus=1.0, port=gateways, drain_s=5.0, program=STAND_IN),
    )
    make_secret(made.secret_path)
    return made


@pytest.fixture
def supervisor_of(plan: FleetPlan) -> Iterator[Callable[..., Supervisor]]:
    """Makes supervisors; what they started is gone when the test is over."""
    place = Place("n1", "127.0.0.1", fingerprint(plan.read_secret()))

    def make(name: str = "e1", **changed: Any) -> Supervisor:
        kind = Kind.ENGINE if name[0] == "e" else Kind.GATEWAY
        first = plan.engine.port if kind is Kind.ENGINE else plan.gateway.port
        unit = Unit(name, kind, "n1", first + int(name[1:]), 1)
        made = EngineSupervisor if kind is Kind.ENGINE else GatewaySupervisor
        return made(unit, changed.get("plan", plan), changed.get("place", place))

    yield make
    for name in [record.name for record in Records(plan.node_folder("n1")).running()]:
        make(name).end()


class LocalCrew:
    """Supervisors in this process, on nodes that are folders: what `RaySupervisors` does, without Ray."""

    def __init__(self, plan: FleetPlan, nodes: list[Node]) -> None:
        self.plan = plan
        self.there = nodes
        self.supervisors: dict[str, Supervisor] = {}
        self.calls = 0
        self.tables_sent = 0
        self.print = fingerprint(plan.read_secret())

    def nodes(self) -> list[Node]:
        return list(self.there)

    def units_on_node(self, node: Node) -> list[Unit]:
        return [record.unit(node.name) for record in Records(self.plan.node_folder(node.name)).running()]

    def start_supervisor(self, unit: Unit, plan: FleetPlan) -> None:
        (host,) = [node.host for node in self.there if node.name == unit.node]
        made = EngineSupervisor if unit.kind is Kind.ENGINE else GatewaySupervisor
        self.supervisors[unit.name] = made(unit, plan, Place(unit.node, host, self.print))

    def reports(self, table: Table, outdated: Collection[str], figures: Mapping[str, Any]) -> dict[str, Any]:
        for name, supervisor in self.supervisors.items():
            if isinstance(supervisor, GatewaySupervisor):
                if name in outdated:
                    self.tables_sent += 1
                    supervisor.set_table(table)
                supervisor.set_figures(figures)
            supervisor.step()
        self.calls += len(self.supervisors)
        return {name: supervisor.report() for name, supervisor in self.supervisors.items()}

    def drain(self, name: str) -> None:
        self.supervisors[name].drain()

    def dismiss(self, name: str) -> None:
        del self.supervisors[name]
