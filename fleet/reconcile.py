"""Compares the desired with the actual engine and gateway processes (units) of a fleet: which to start or drain next.

Pure functions, called by the manager in every round. `reconcile` returns only the actions for now; `place` chooses the
node and port of one more unit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from fleet.state import (
    Action,
    ActualState,
    DesiredState,
    DrainUnit,
    Forget,
    Kind,
    Needs,
    Node,
    Start,
    Unit,
    UnitState,
    Wait,
)

# Tolerance for sums of fractions such as 0.1.
_ALMOST = 1e-6


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
    # A session is lost if its gateway and its engine are lost together: with edge nodes the two kinds are separated.
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
    is_leaving = unit.state is UnitState.DRAINING or unit.name in wanted.drained
    return unit.generation == wanted.generation and not is_leaving


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
    return needs.cpus <= cpus + _ALMOST and needs.gpus <= gpus + _ALMOST


# Reconciliation. A unit is not drained while fewer than the wanted number would serve afterwards. The exception is a
# unit or node that the operator drains: it is drained before its replacement serves if there is no room for both.
# Units of a kind are replaced one at a time.

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
    mine = [unit for unit in kept if unit.kind is kind]
    leaving = [unit for unit in mine if _is_asked_to_leave(unit, wanted) and unit.state is not UnitState.DRAINING]
    staying = [unit for unit in mine if unit.state is not UnitState.DRAINING and unit not in leaving]
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
    actions += _departures(kind, wanted, mine, leaving, staying, bool(no_place))
    return actions, number


def _departures(
    kind: Kind, wanted: DesiredState, mine: list[Unit], leaving: list[Unit], staying: list[Unit], is_full: bool
) -> list[Action]:
    """The units to drain now."""
    count = wanted.count(kind)
    serving = [unit for unit in staying if unit.state is UnitState.SERVING]
    # 1. Units that the operator drains: when the others suffice, or when there is no room for replacements.
    if leaving and (len(serving) >= count or is_full):
        return [DrainUnit(unit.name, "the operator drains it") for unit in leaving]
    # 2. Otherwise one unit of a kind at a time.
    if any(unit.state is UnitState.DRAINING for unit in mine) or leaving:
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
