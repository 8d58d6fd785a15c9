"""What a fleet has and what it should have, as plain data; and the actions that lead from one to the other."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    ENGINE = "engine"
    GATEWAY = "gateway"


class UnitState(StrEnum):
    # The process was asked for and does not serve yet.
    STARTING = "starting"
    SERVING = "serving"
    # It takes nothing new, and ends when what it has is elsewhere.
    DRAINING = "draining"
    # It ended because it was asked to.
    ENDED = "ended"
    # It cannot be started; its keeper says why.
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster, by the name that it keeps when it comes back."""

    name: str
    # Where the other machines reach it.
    host: str
    cpus: float = 0.0
    gpus: float = 0.0
    # Whether gateways belong here, and engines elsewhere. If no node says so, every node will do for both.
    is_edge: bool = False


@dataclass(frozen=True, slots=True)
class Unit:
    """An engine or a gateway: one process, and the keeper that looks after it."""

    name: str
    kind: Kind
    node: str
    port: int
    # Which wish of the operator it was started for; it rises with every upgrade.
    generation: int
    state: UnitState = UnitState.STARTING
    # What would have to move if it were drained: streams of an engine, sessions of a gateway.
    busy: int = 0

    @property
    def number(self) -> int:
        """Names end with a number that is never used twice, so a higher one is younger."""
        return int(self.name[1:])


@dataclass(frozen=True, slots=True)
class Needs:
    """What one unit takes of its node."""

    cpus: float
    gpus: float
    # The first port to try.
    port: int


@dataclass(frozen=True, slots=True)
class Wanted:
    engines: int
    gateways: int
    generation: int
    needs: dict[Kind, Needs]
    # Names of nodes and units that are to be emptied, and stay empty.
    drained: frozenset[str] = frozenset()

    def count(self, kind: Kind) -> int:
        return self.engines if kind is Kind.ENGINE else self.gateways


@dataclass(frozen=True, slots=True)
class Actual:
    nodes: tuple[Node, ...]
    units: tuple[Unit, ...]
    # The number of the next unit.
    next_number: int
    # (host, port) that something else has taken.
    taken: frozenset[tuple[str, int]] = frozenset()


@dataclass(frozen=True, slots=True)
class Start:
    unit: Unit


@dataclass(frozen=True, slots=True)
class Drain:
    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Forget:
    """The unit is gone: its keeper too may go."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing can be done now, and a person may want to know why."""

    why: str


Action = Start | Drain | Forget | Wait
