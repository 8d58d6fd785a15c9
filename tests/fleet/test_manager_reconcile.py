"""Reconciliation converges, keeps enough units serving on the way, and rests when there is nothing to do."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.manager import drain_order, reconcile
from fleet.state import ActualState, DesiredState, DrainUnit, Forget, Kind, Needs, Node, Start, Unit, UnitState, Wait

NEEDS = {Kind.ENGINE: Needs(1.0, 1.0, 5600), Kind.GATEWAY: Needs(1.0, 0.0, 8000)}
SERVING = UnitState.SERVING


class World:
    """Does what reconciliation says, a step at a time: what starts serves at the next look, what drains ends then."""

    def __init__(self, nodes: tuple[Node, ...], units: tuple[Unit, ...] = ()) -> None:
        self.actual = ActualState(nodes, units, 1 + max((unit.number for unit in units), default=0))

    def step(self, wanted: DesiredState) -> list[object]:
        actions = reconcile(wanted, self.actual)
        after = {UnitState.STARTING: SERVING, UnitState.DRAINING: UnitState.ENDED}
        units = {unit.name: replace(unit, state=after.get(unit.state, unit.state)) for unit in self.actual.units}
        number = self.actual.next_number
        for action in actions:
            if isinstance(action, Start):
                assert action.unit.name not in units
                units[action.unit.name] = action.unit
                number = max(number, action.unit.number + 1)
            elif isinstance(action, DrainUnit):
                assert units[action.name].state is not UnitState.ENDED
                units[action.name] = replace(units[action.name], state=UnitState.DRAINING)
            elif isinstance(action, Forget):
                del units[action.name]
        self.actual = replace(self.actual, units=tuple(units.values()), next_number=number)
        return list(actions)

    def settle(self, wanted: DesiredState) -> None:
        for _ in range(60):
            all_serve = all(unit.state is SERVING for unit in self.actual.units)
            if all(isinstance(action, Wait) for action in self.step(wanted)) and all_serve:
                return
        raise AssertionError("it never comes to rest")

    def serving(self, kind: Kind) -> list[Unit]:
        return [unit for unit in self.actual.units if unit.kind is kind and unit.state is SERVING]


def nodes(count: int, cpus: float = 4.0, gpus: float = 2.0) -> tuple[Node, ...]:
    return tuple(Node(f"n{number}", f"10.0.0.{number}", cpus, gpus) for number in range(count))


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 4), st.integers(0, 9), st.integers(0, 6))
def test_a_fleet_comes_to_what_is_wanted_as_far_as_there_is_room(machines: int, engines: int, gateways: int) -> None:
    world = World(nodes(machines))
    wanted = DesiredState(engines, gateways, 1, NEEDS)
    world.settle(wanted)
    there = [unit.node for unit in world.serving(Kind.GATEWAY)]
    assert len(there) == min(gateways, 4 * machines)
    room = sum(min(2, 4 - there.count(node.name)) for node in nodes(machines))
    assert len(world.serving(Kind.ENGINE)) == min(engines, room)
    ports = [(unit.node, unit.port) for unit in world.actual.units]
    assert len(ports) == len(set(ports))


def test_any_change_of_mind_ends_well() -> None:
    for seed in range(60):
        chance = random.Random(seed)
        machines = nodes(chance.randint(1, 4), cpus=8.0)
        world = World(machines)
        for generation in range(1, 4):
            drained = frozenset(node.name for node in machines if chance.random() < 0.4)
            wanted = DesiredState(chance.randint(1, 6), chance.randint(1, 3), generation, NEEDS, drained)
            for _ in range(chance.randint(0, 4)):
                world.step(wanted)
            world.settle(wanted)
            assert all(unit.generation == generation and unit.node not in drained for unit in world.actual.units), seed
            room = 2 * (len(machines) - len(drained))
            assert len(world.serving(Kind.ENGINE)) == min(wanted.engines, room), seed


def test_an_upgrade_spreads_what_had_come_together() -> None:
    """As after the loss of a node that is back: both gateways and both engines are on the other one."""
    for first in ("n0", "n1"):
        together = tuple(
            Unit(f"{name}{number}", kind, first, port + number, 1, SERVING)
            for name, kind, port in (("g", Kind.GATEWAY, 8000), ("e", Kind.ENGINE, 5600))
            for number in (1, 2)
        )
        world = World(nodes(2, cpus=8.0, gpus=4.0), together)
        for generation in (2, 3):
            world.settle(DesiredState(2, 2, generation, NEEDS))
            for kind in Kind:
                assert {unit.node for unit in world.serving(kind)} == {"n0", "n1"}


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 5))
def test_an_upgrade_with_room_to_spare_never_serves_with_fewer(engines: int) -> None:
    world = World(nodes(3))
    world.settle(DesiredState(engines, 1, 1, NEEDS))
    for _ in range(40):
        world.step(DesiredState(engines, 1, 2, NEEDS))
        assert len(world.serving(Kind.ENGINE)) >= engines
        assert len([unit for unit in world.actual.units if unit.kind is Kind.ENGINE]) <= engines + 2
    assert {unit.generation for unit in world.actual.units} == {2}


def test_an_upgrade_of_a_full_fleet_takes_one_away_at_a_time() -> None:
    world = World(nodes(2))
    world.settle(DesiredState(4, 1, 1, NEEDS))
    for _ in range(40):
        world.step(DesiredState(4, 1, 2, NEEDS))
        assert len(world.serving(Kind.ENGINE)) >= 3
    assert {unit.generation for unit in world.actual.units} == {2}


def test_an_upgrade_whose_first_engine_does_not_start_stops_there() -> None:
    world = World(nodes(3))
    world.settle(DesiredState(2, 1, 1, NEEDS))
    old = {unit.name for unit in world.serving(Kind.ENGINE)}
    for _ in range(10):
        world.step(DesiredState(2, 1, 2, NEEDS))
        stuck = tuple(
            replace(unit, state=UnitState.STARTING) if unit.generation == 2 and unit.kind is Kind.ENGINE else unit
            for unit in world.actual.units
        )
        world.actual = replace(world.actual, units=stuck)
    assert {unit.name for unit in world.serving(Kind.ENGINE)} == old
    assert len([unit for unit in world.actual.units if unit.kind is Kind.ENGINE]) == 3


def test_units_of_a_lost_node_are_forgotten_and_started_elsewhere_in_one_step() -> None:
    world = World(nodes(2))
    world.settle(DesiredState(2, 2, 1, NEEDS))
    world.actual = replace(world.actual, nodes=world.actual.nodes[:1])
    actions = world.step(DesiredState(2, 2, 1, NEEDS))
    assert sum(isinstance(action, Forget) for action in actions) == 2
    started = [action.unit for action in actions if isinstance(action, Start)]
    assert {unit.node for unit in started} == {"n0"} and len(started) == 2


def test_a_drained_node_is_left_only_when_others_serve() -> None:
    world = World(nodes(2))
    world.settle(DesiredState(2, 2, 1, NEEDS))
    wanted = DesiredState(2, 2, 1, NEEDS, frozenset({"n1"}))
    for _ in range(20):
        world.step(wanted)
        assert len(world.serving(Kind.ENGINE)) >= 2 and len(world.serving(Kind.GATEWAY)) >= 2
    assert {unit.node for unit in world.actual.units} == {"n0"}


def test_without_a_place_it_says_why_and_waits() -> None:
    actual = ActualState(nodes(1, gpus=0.0), (), 1)
    actions = reconcile(DesiredState(1, 0, 1, NEEDS), actual)
    assert [type(action) for action in actions] == [Wait]
    assert "no node has one" in actions[0].why  # type: ignore[union-attr]


def test_the_emptiest_leaves_first_but_an_old_one_before_it() -> None:
    units = [
        Unit("e1", Kind.ENGINE, "n0", 5600, 1, SERVING, busy=9),
        Unit("e2", Kind.ENGINE, "n0", 5601, 2, SERVING, busy=0),
        Unit("e3", Kind.ENGINE, "n0", 5602, 2, SERVING, busy=4),
        Unit("e4", Kind.ENGINE, "n0", 5603, 2, SERVING, busy=0),
    ]
    assert [unit.name for unit in drain_order(units, 2)] == ["e1", "e4", "e2", "e3"]
