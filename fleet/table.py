"""The table of engines that gateways read: who is there, where, and who takes nothing new."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fleet.state import Kind, Unit, UnitState

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
