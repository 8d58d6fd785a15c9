"""Placement spreads units, respects the resources of nodes, and says why there is no room."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.manager import place, room_on
from fleet.state import DesiredState, Kind, Needs, Node, Unit

ENGINE, GATEWAY = Kind.ENGINE, Kind.GATEWAY


def wanted(gpus: float = 1.0, cpus: float = 1.0, drained: frozenset[str] = frozenset()) -> DesiredState:
    return DesiredState(9, 9, 1, {ENGINE: Needs(cpus, gpus, 5600), GATEWAY: Needs(1.0, 0.0, 8000)}, drained)


def fill(plan: DesiredState, kind: Kind, nodes: list[Node], most: int) -> list[Unit]:
    units: list[Unit] = []
    for number in range(1, most + 1):
        found = place(kind, plan, nodes, units)
        if isinstance(found, str):
            break
        units.append(Unit(f"e{number}", kind, found[0].name, found[1], 1))
    return units


@settings(deadline=None, max_examples=20)
@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 4)), min_size=1, max_size=5), st.sampled_from([0.25, 0.5, 1.0])
)
def test_no_node_is_ever_given_more_than_it_has(sizes: list[tuple[int, int]], gpus: float) -> None:
    nodes = [Node(f"n{number}", f"h{number}", cpus, has) for number, (cpus, has) in enumerate(sizes)]
    plan = wanted(gpus)
    units = fill(plan, ENGINE, nodes, 50)
    for node in nodes:
        assert min(room_on(node, plan, units)) > -1e-6
    assert len(units) == sum(min(cpus, int(has / gpus)) for cpus, has in sizes)


def test_engines_are_spread_over_nodes() -> None:
    nodes = [Node("a", "a", 8, 4), Node("b", "b", 8, 2)]
    assert [unit.node for unit in fill(wanted(), ENGINE, nodes, 6)] == ["a", "b", "a", "b", "a", "a"]


def test_gateways_go_to_edge_nodes_if_there_are_any() -> None:
    nodes = [Node("gpu", "gpu", 64, 8), Node("edge", "edge", 2, is_edge=True)]
    assert {unit.node for unit in fill(wanted(), GATEWAY, nodes, 5)} == {"edge"}
    assert place(GATEWAY, wanted(), nodes, fill(wanted(), GATEWAY, nodes, 2)) == (
        "no node has 1 CPU left for one more gateway"
    )
    assert {unit.node for unit in fill(wanted(), GATEWAY, nodes[:1], 2)} == {"gpu"}


def test_engines_keep_away_from_edges_unless_there_is_nothing_else() -> None:
    nodes = [Node("edge", "edge", 9, 9, is_edge=True), Node("gpu", "gpu", 2, 2)]
    assert {unit.node for unit in fill(wanted(), ENGINE, nodes, 5)} == {"gpu"}
    assert {unit.node for unit in fill(wanted(), ENGINE, nodes[:1], 5)} == {"edge"}


def test_two_nodes_of_one_host_share_its_ports() -> None:
    nodes = [Node("a", "h", 2, 2), Node("b", "h", 2, 2), Node("c", "other", 2, 2)]
    units = fill(wanted(), ENGINE, nodes, 6)
    where = {node.name: node.host for node in nodes}
    addresses = [(where[unit.node], unit.port) for unit in units]
    assert len(set(addresses)) == 6
    assert {port for host, port in addresses if host == "other"} == {5600, 5601}


def test_a_port_that_something_else_has_is_left_out() -> None:
    found = place(ENGINE, wanted(), [Node("a", "h", 2, 2)], [], {("h", 5600), ("other", 5601)})
    assert not isinstance(found, str) and found[1] == 5601


def test_drained_nodes_take_nothing() -> None:
    plan = wanted(drained=frozenset({"a"}))
    assert place(ENGINE, plan, [Node("a", "a", 2, 2)], []) == "the fleet has no node that takes new work"


def test_a_fleet_without_a_gpu_says_so() -> None:
    said = place(ENGINE, wanted(), [Node("a", "a", 2)], [])
    assert said == "an engine needs 1 GPU, and no node has one: set engine.gpus to 0 to run on CPUs"
