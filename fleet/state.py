"""Data types of a fleet: nodes and units, desired and actual state, actions, and the table of engines for gateways.

A unit is one engine or gateway process. `fleet/manager.py` compares `ActualState` with `DesiredState` and performs the
resulting actions (`Start`, `DrainUnit`, `Forget`, `Wait`). The supervisor of a gateway writes the table to a file that
the gateway reads (`write_table`). This module has no state of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any


class FleetError(Exception):
    """A fleet operation failed; the text says why, and what to do about it if that is known."""


class FleetFileError(FleetError):
    """The fleet file cannot be read, or has an invalid value."""


# The table that gateways read: name, address and state of each engine and of each gateway.

Table = dict[str, Any]
# How many gateways report an engine's figures to the manager. If all did, the work of a round would grow with the
# product of engines and gateways.
REPORTERS = 3


def table_of(number: int, units: Iterable[Unit], hosts: Mapping[str, str], to_peer_port: int) -> Table:
    """The table with this number.

    Starting engines are listed: gateways wait for them. Gateways that are not up are not listed: the others would wait
    for a gateway that may never start. `to_peer_port`: the port at which a gateway listens to other gateways, minus its
    port for clients.
    """
    ordered = sorted(units, key=lambda unit: unit.number)
    gone = (UnitState.ENDED, UnitState.FAILED)
    return {
        "number": number,
        "engines": [
            _row(unit, hosts, unit.port) for unit in ordered if unit.kind is Kind.ENGINE and unit.state not in gone
        ],
        "gateways": [
            _row(unit, hosts, unit.port + to_peer_port)
            for unit in ordered
            if unit.kind is Kind.GATEWAY and unit.is_up and unit.state not in gone
        ],
    }


def _row(unit: Unit, hosts: Mapping[str, str], port: int) -> dict[str, Any]:
    state = "draining" if unit.state is UnitState.DRAINING else "serving"
    return {"name": unit.name, "address": f"tcp://{hosts[unit.node]}:{port}", "state": state}


def next_table(last: Table, units: Iterable[Unit], hosts: Mapping[str, str], to_peer_port: int) -> Table:
    """Returns the current table: `last` itself if nothing changed, otherwise a new one with a higher number."""
    same = table_of(last["number"], units, hosts, to_peer_port)
    return last if same == last else same | {"number": last["number"] + 1}


def reported_by_others(gateway: str, table: Table) -> frozenset[str]:
    """The engines of the table that this gateway need not report: for each, `REPORTERS` other gateways of the table
    have higher hashes (rendezvous hashing)."""
    rivals = [row["name"] for row in table.get("gateways", ()) if row["name"] != gateway]

    def others_report(engine: str) -> bool:
        own = _hash(gateway, engine)
        return sum(_hash(rival, engine) > own for rival in rivals) >= REPORTERS

    return frozenset(row["name"] for row in table["engines"] if others_report(row["name"]))


def _hash(gateway: str, engine: str) -> bytes:
    return hashlib.blake2b(f"{gateway} {engine}".encode(), digest_size=8).digest()


def write_table(path: Path, table: Table) -> None:
    """Writes the table if it differs from the file: gateways read the file whenever it has changed."""
    text = json.dumps(table, indent=1)
    if not (path.is_file() and path.read_text() == text):
        replace_file(path, text)


def replace_file(path: Path, text: str) -> None:
    """Replaces the file atomically: readers see the old text or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


# Nodes and units, the wanted and the actual state, and the actions that lead from one to the other.


class Kind(StrEnum):
    ENGINE = "engine"
    GATEWAY = "gateway"


class UnitState(StrEnum):
    # The process is being started and does not serve yet.
    STARTING = "starting"
    SERVING = "serving"
    # It takes no new streams or sessions, and ends when those it has are elsewhere.
    DRAINING = "draining"
    # It ended after a drain.
    ENDED = "ended"
    # It cannot be started; its supervisor's report has the error.
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster."""

    # The same name when the machine comes back.
    name: str
    # The address at which other machines reach it.
    host: str
    cpus: float = 0.0
    gpus: float = 0.0
    # Edge nodes run gateways, the others engines. If all nodes that take new work are of one sort, they run both.
    is_edge: bool = False


@dataclass(frozen=True, slots=True)
class Unit:
    """An engine or a gateway: one process with its supervisor."""

    name: str
    kind: Kind
    node: str
    port: int
    # The generation that it was started for; every upgrade raises the wanted one.
    generation: int
    state: UnitState = UnitState.STARTING
    # Streams of an engine, or sessions of a gateway, that would have to continue elsewhere if it were drained.
    busy: int = 0
    # A gateway whose process has answered. It may have no engine and not serve, but other gateways can use it.
    is_up: bool = False

    @property
    def number(self) -> int:
        """The number at the end of the name. It is never used twice, so a higher number means a younger unit."""
        return int(self.name[1:])


@dataclass(frozen=True, slots=True)
class Needs:
    """Resources that one unit takes of its node."""

    cpus: float
    gpus: float
    # The first port to try.
    port: int


@dataclass(frozen=True, slots=True)
class DesiredState:
    """The state that the operator's plan and scaling ask for."""

    engines: int
    gateways: int
    generation: int
    needs: dict[Kind, Needs]
    # Names of nodes and units that are to be drained and get nothing new.
    drained: frozenset[str] = frozenset()

    def count(self, kind: Kind) -> int:
        return self.engines if kind is Kind.ENGINE else self.gateways


@dataclass(frozen=True, slots=True)
class ActualState:
    """The state that the last round of the manager found."""

    nodes: tuple[Node, ...]
    units: tuple[Unit, ...]
    # The number of the next unit.
    next_number: int
    # (host, port) pairs that other programs use.
    taken: frozenset[tuple[str, int]] = frozenset()


@dataclass(frozen=True, slots=True)
class Start:
    unit: Unit


@dataclass(frozen=True, slots=True)
class DrainUnit:
    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Forget:
    """The unit is gone: its supervisor is dismissed too."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Wait:
    """A unit is missing and cannot be started now; the status shows why."""

    why: str


Action = Start | DrainUnit | Forget | Wait
