"""The whole control plane without Ray: a manager, supervisors in this process, and real processes below them."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from fleet.manager import Manager, ManagerState
from fleet.plan import FleetPlan
from fleet.state import FleetError, Node
from fleet.supervisors import GatewaySupervisor, Records, kill_process_group
from tests.fleet.conftest import LocalCrew, until

Told = dict[str, Any]


@pytest.fixture
def supervisors(plan: FleetPlan) -> Iterator[LocalCrew]:
    made = LocalCrew(plan, [Node("n1", "127.0.0.1", 2.0), Node("n2", "127.0.0.1", 2.0)])
    yield made
    for folder in (plan.folder / "nodes").glob("*"):
        for record in Records(folder).running():
            kill_process_group(record)


class Stored:
    value: Told = {}

    def __call__(self, value: Told) -> None:
        self.value = json.loads(json.dumps(value))


def manager_of(plan: FleetPlan, supervisors: LocalCrew, stored: Stored | None = None) -> Manager:
    return Manager(supervisors, ManagerState.of(plan), stored or Stored())


def serving(status: Told) -> dict[str, str]:
    return {unit["name"]: unit["node"] for unit in status["units"] if unit["state"] == "serving"}


def run(manager: Manager, wanted: Callable[[Told], bool]) -> Told:
    def look() -> Told | None:
        manager.step()
        status = manager.status()
        return status if wanted(status) else None

    found: Told = until(look, "what was wanted")
    return found


def test_a_fleet_comes_up_and_goes_down(plan: FleetPlan, supervisors: LocalCrew) -> None:
    manager = manager_of(plan, supervisors)
    status = run(manager, lambda status: len(serving(status)) == 2)
    assert {unit["kind"] for unit in status["units"]} == {"engine", "gateway"}
    assert (status["capacity"]["streams_possible"], status["table_number"]) == (10, 2), status["notes"]
    manager.go_down()
    until(lambda: manager.step() or manager.is_down, "going down")
    assert not supervisors.units_on_node(supervisors.there[0]) and not supervisors.units_on_node(supervisors.there[1])


def test_gateways_are_told_the_figures_of_the_whole_fleet(plan: FleetPlan, supervisors: LocalCrew) -> None:
    manager = manager_of(replace(plan, gateway=replace(plan.gateway, count=2)), supervisors)
    status = run(manager, lambda status: len(serving(status)) == 3)
    manager.step()
    for supervisor in supervisors.supervisors.values():
        if isinstance(supervisor, GatewaySupervisor):
            assert json.loads(supervisor.figures_path.read_text()) == {"name": "test", **status["capacity"]}
    assert status["capacity"]["gateways"] == 2 and status["capacity"]["streams_possible"] == 10


def test_a_table_is_sent_to_each_gateway_once(plan: FleetPlan, supervisors: LocalCrew) -> None:
    """Not in every round: rounds times gateways times engines would be its cost."""
    manager = manager_of(replace(plan, gateway=replace(plan.gateway, count=2)), supervisors)
    status = run(manager, lambda status: len(serving(status)) == 3)
    manager.step()
    sent = supervisors.tables_sent
    assert sent <= 2 * status["table_number"] + 2
    for _ in range(5):
        manager.step()
    assert supervisors.tables_sent == sent
    (lost,) = [supervisor for name, supervisor in supervisors.supervisors.items() if name == "g1"]
    assert isinstance(lost, GatewaySupervisor)
    lost.table_path.unlink()
    manager.step()
    manager.step()
    assert lost.table_path.is_file() and supervisors.tables_sent == sent + 1


def test_the_status_names_a_supervisor_that_does_not_answer(
    plan: FleetPlan, supervisors: LocalCrew, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its machine stands still, and Ray has not missed it yet."""
    now = 100.0
    manager = Manager(supervisors, ManagerState.of(plan), Stored(), clock=lambda: now)
    run(manager, lambda status: len(serving(status)) == 2)
    reports = supervisors.reports
    monkeypatch.setattr(
        supervisors, "reports", lambda *given: {n: r for n, r in reports(*given).items() if n[0] == "g"}
    )
    for passed, sees in ((1.0, False), (11.0, True)):
        now += passed
        manager.step()
        (engine,) = [unit for unit in manager.status()["units"] if unit["kind"] == "engine"]
        said = f"its supervisor has not answered for 12 s: {engine['node']} stands still, is cut off or is gone"
        assert (said in engine["error"]) is sees
        # What it kept counts as it was: a machine that goes on has lost nothing.
        assert engine["state"] == "serving"
    monkeypatch.undo()
    manager.step()
    assert not any(unit["error"] for unit in manager.status()["units"])


def test_a_manager_without_memory_finds_what_runs(plan: FleetPlan, supervisors: LocalCrew) -> None:
    first = run(manager_of(plan, supervisors), lambda status: len(serving(status)) == 2)
    pids = {unit["name"]: unit["pid"] for unit in first["units"]}
    supervisors.supervisors.clear()
    again = run(manager_of(plan, supervisors), lambda status: len(serving(status)) == 2)
    assert {unit["name"]: unit["pid"] for unit in again["units"]} == pids


def test_memory_survives_as_a_value(plan: FleetPlan, supervisors: LocalCrew) -> None:
    stored = Stored()
    manager = manager_of(plan, supervisors, stored)
    run(manager, lambda status: len(serving(status)) == 2)
    manager.scale(2)
    manager.upgrade()
    manager.drain("n2")
    manager.step()
    memory = ManagerState.from_json(stored.value)
    assert memory.plan == plan and memory.scale.wanted == 2 and memory.generation == 2
    assert memory.drained == {"n2"} and memory.table["number"] >= 1 and memory.next_number > 2


def test_a_lost_node_loses_nothing_that_is_wanted(plan: FleetPlan, supervisors: LocalCrew) -> None:
    manager = manager_of(plan, supervisors)
    before = serving(run(manager, lambda status: len(serving(status)) == 2))
    lost = supervisors.there.pop()
    for name in [name for name, node in before.items() if node == lost.name]:
        supervisors.supervisors[name].end()
    after = run(manager, lambda status: len(serving(status)) == 2 and set(serving(status).values()) == {"n1"})
    assert len(after["units"]) == 2


def test_scaling_by_hand_stays_within_the_file(plan: FleetPlan, supervisors: LocalCrew) -> None:
    manager = manager_of(plan, supervisors)
    run(manager, lambda status: len(serving(status)) == 2)
    with pytest.raises(FleetError, match="allows 1 to 3 engines, not 4"):
        manager.scale(4)
    planned = manager.planned(3)
    assert planned["engines_now"] == 1 and len(planned["actions"]) == 2
    assert all(action.startswith("start engine") for action in planned["actions"])
    assert len(manager.status()["units"]) == 2
    manager.scale(3)
    run(manager, lambda status: len(serving(status)) == 4)
    assert manager.planned()["actions"] == []


def test_an_upgrade_replaces_everything(plan: FleetPlan, supervisors: LocalCrew) -> None:
    manager = manager_of(plan, supervisors)
    first = run(manager, lambda status: len(serving(status)) == 2)
    manager.upgrade()
    after = run(
        manager,
        lambda status: (
            len(status["units"]) == 2
            and {unit["generation"] for unit in status["units"]} == {2}
            and len(serving(status)) == 2
        ),
    )
    assert not {unit["name"] for unit in first["units"]} & {unit["name"] for unit in after["units"]}


def test_a_drained_node_is_empty_and_stays_so(plan: FleetPlan, supervisors: LocalCrew) -> None:
    manager = manager_of(plan, supervisors)
    run(manager, lambda status: len(serving(status)) == 2)
    manager.drain("n1")
    run(manager, lambda status: set(serving(status).values()) == {"n2"} and len(status["units"]) == 2)
    with pytest.raises(FleetError, match="no node, engine or gateway 'n9'; it has"):
        manager.drain("n9")
    left = supervisors.there.pop(0)
    manager.step()
    supervisors.there.insert(0, left)
    manager.step()
    assert manager.status()["drained"] == []


def test_a_node_with_another_secret_gets_nothing_and_says_why(plan: FleetPlan, supervisors: LocalCrew) -> None:
    supervisors.print = "another"
    manager = manager_of(plan, supervisors)
    status = run(manager, lambda status: len(status["waits_for"]) == 2 and not status["units"])
    assert any("has another secret" in note for note in status["notes"])
    steps = len(status["notes"])
    for _ in range(5):
        manager.step()
    assert len(manager.status()["notes"]) == steps


def test_an_engine_that_gateways_will_not_have_serves_nobody_and_the_reason_is_shown(
    plan: FleetPlan, supervisors: LocalCrew
) -> None:
    problem = "the engine at tcp://127.0.0.1:5600 runs other weights than the others"
    folder = plan.node_folder("n1")
    folder.mkdir(parents=True)
    (folder / "problem").write_text(problem)
    supervisors.there = supervisors.there[:1]
    status = run(
        manager_of(plan, supervisors), lambda status: any(unit["error"] == problem for unit in status["units"])
    )
    (engine,) = [unit for unit in status["units"] if unit["kind"] == "engine"]
    assert (engine["error"], engine["state"]) == (problem, "starting")
    assert status["capacity"]["streams_possible"] == 0


@pytest.mark.parametrize(("off_s", "said"), [(-90.0, "90 s ahead of"), (90.0, "90 s behind"), (1.0, "")])
def test_a_clock_that_is_off_is_shown_and_hinders_nothing(
    plan: FleetPlan, supervisors: LocalCrew, off_s: float, said: str
) -> None:
    """The head's is off by so much here: to it, all others are off by the same the other way."""
    manager = Manager(supervisors, ManagerState.of(plan), Stored(), wall_clock=lambda: time.time() + off_s)
    status = run(manager, lambda status: len(serving(status)) == 2)
    errors = [unit["error"] for unit in status["units"]]
    if said:
        assert all(error.startswith("the clock of node n") and said in error for error in errors), errors
    else:
        assert errors == ["", ""]


def test_a_killed_engine_comes_back_under_its_name(plan: FleetPlan, supervisors: LocalCrew) -> None:
    manager = manager_of(plan, supervisors)
    status = run(manager, lambda status: len(serving(status)) == 2)
    (engine,) = [unit for unit in status["units"] if unit["kind"] == "engine"]
    os.kill(engine["pid"], signal.SIGKILL)
    after = run(
        manager,
        lambda status: len(serving(status)) == 2 and engine["pid"] not in [unit["pid"] for unit in status["units"]],
    )
    assert engine["name"] in serving(after) and after["table_number"] == status["table_number"]


def test_calls_to_supervisors_do_not_depend_on_sessions(plan: FleetPlan, supervisors: LocalCrew) -> None:
    """A look is one call to each supervisor, whatever they carry."""
    manager = manager_of(plan, supervisors)
    run(manager, lambda status: len(serving(status)) == 2)
    before = supervisors.calls
    for _ in range(10):
        manager.step()
    assert supervisors.calls - before == 10 * 2


def test_more_engines_than_fit_wait(plan: FleetPlan, supervisors: LocalCrew) -> None:
    wide = replace(plan, engine=replace(plan.engine, least=5, most=5))
    manager = manager_of(wide, supervisors)
    status = run(manager, lambda status: len(serving(status)) == 4)
    assert status["waits_for"] == ["no node has 1 CPU left for one more engine"]


def test_a_refusal_brings_one_more_engine(plan: FleetPlan, supervisors: LocalCrew) -> None:
    """What was refused before the manager looked for the first time is none of its business."""
    manager = manager_of(plan, supervisors)
    run(manager, lambda status: len(serving(status)) == 2)
    gateway = next(
        supervisor for supervisor in supervisors.supervisors.values() if isinstance(supervisor, GatewaySupervisor)
    )
    gateway.table_path.with_name("refused").write_text("4")
    status = run(manager, lambda status: len(serving(status)) == 3)
    assert status["engines_wanted"] == 2 and any("refused for lack of room" in note for note in status["notes"])
