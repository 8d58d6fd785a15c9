"""What can go wrong with a fleet; every text says what to do about it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any


class FleetError(Exception):
    """The fleet cannot do what it was asked for."""


class FleetFileError(FleetError):
    """The fleet's file cannot be read, or asks for something that cannot be."""


# The table of engines that gateways read: who is there, where, and who takes nothing new.

Table = dict[str, Any]


def engine_table(number: int, units: Iterable[Unit], hosts: Mapping[str, str]) -> Table:
    """Engines in the order of their names. One that starts is listed: gateways wait for it on its address."""
    return {
        "number": number,
        "engines": [
            {
                "name": unit.name,
                "address": f"tcp://{hosts[unit.node]}:{unit.port}",
                "state": "draining" if unit.state is UnitState.DRAINING else "serving",
            }
            for unit in sorted(units, key=lambda unit: unit.number)
            if unit.kind is Kind.ENGINE and unit.state not in (UnitState.ENDED, UnitState.FAILED)
        ],
    }


def next_table(last: Table, units: Iterable[Unit], hosts: Mapping[str, str]) -> Table:
    """The table as it should be; its number rises when something else in it changes."""
    same = engine_table(last["number"], units, hosts)
    return last if same["engines"] == last["engines"] else same | {"number": last["number"] + 1}


def write_table(path: Path, table: Table) -> None:
    """Only one that is another: gateways read what has changed."""
    text = json.dumps(table, indent=1)
    if not (path.is_file() and path.read_text() == text):
        write_whole(path, text)


def write_whole(path: Path, text: str) -> None:
    """Whoever reads it sees the old one or the new one, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".new")
    beside.write_text(text)
    os.replace(beside, path)


# What a fleet has and what it should have, as plain data; and the actions that lead from one to the other.


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
class DrainEngine:
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


Action = Start | DrainEngine | Forget | Wait
