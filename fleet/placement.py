"""Where the next unit goes: a pure function of the nodes and of the units they have."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from fleet.state import Kind, Needs, Node, Unit, UnitState, Wanted

# Sums of fractions such as 0.1 miss a whole by a little.
_ALMOST = 1e-6


def place(
    kind: Kind, wanted: Wanted, nodes: Iterable[Node], units: Collection[Unit], taken: Collection[tuple[str, int]] = ()
) -> tuple[Node, int] | str:
    """The node and port for one more unit, or the reason why there is no place.

    Units are spread: a node with fewer of the same kind that stay comes first, so that the loss of one machine takes
    little; then the one with fewer that leave, then the one with more room, then the first by name.
    """
    needs = wanted.needs[kind]
    open_nodes = [node for node in nodes if node.name not in wanted.drained]
    # A machine with both would take both holders of a session when it goes: where there are edges, the two keep apart.
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


def _stays(unit: Unit, wanted: Wanted) -> bool:
    """Neither drained nor about to be replaced."""
    is_leaving = unit.state is UnitState.DRAINING or unit.name in wanted.drained
    return unit.generation == wanted.generation and not is_leaving


def room_on(node: Node, wanted: Wanted, units: Iterable[Unit]) -> tuple[float, float]:
    """CPUs and GPUs that the units of a node leave over."""
    cpus, gpus = node.cpus, node.gpus
    for unit in units:
        if unit.node == node.name:
            cpus -= wanted.needs[unit.kind].cpus
            gpus -= wanted.needs[unit.kind].gpus
    return cpus, gpus


def free_port(
    host: str, first: int, nodes: Iterable[Node], units: Iterable[Unit], taken: Collection[tuple[str, int]]
) -> int:
    """The lowest port from `first` on that no unit of this host has: two nodes can share a host."""
    names = {node.name for node in nodes if node.host == host}
    used = {unit.port for unit in units if unit.node in names} | {port for where, port in taken if where == host}
    port = first
    while port in used:
        port += 1
    return port


def _fits(needs: Needs, cpus: float, gpus: float) -> bool:
    return needs.cpus <= cpus + _ALMOST and needs.gpus <= gpus + _ALMOST
