"""The table of a fleet's engines: a file that its keeper replaces whole, and that a gateway looks at now and then.

A gateway goes on with the last good table when the file cannot be read, is not there, or is older than what it has.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

import msgspec

from engine.boundary.sockets import check_address

logger = logging.getLogger(__name__)

# How often a gateway looks.
LOOK_SECONDS = 0.5
# A table of thousands of engines is far smaller.
MOST_TABLE_BYTES = 4 * 1024 * 1024


class TableEntry(msgspec.Struct, frozen=True):
    """One engine. One that drains takes nothing new, and its streams move."""

    name: str
    address: str
    state: Literal["serving", "draining"] = "serving"


class Table(msgspec.Struct, frozen=True):
    """`number` rises with each table that a keeper writes."""

    number: int
    engines: list[TableEntry]


_decoder = msgspec.json.Decoder(Table)


class TableFile:
    """Reads one file. `number` is that of the table in force, `problem` what is wrong with the file now."""

    def __init__(self, path: str | Path) -> None:
        self.number = 0
        self.problem = ""
        self._path = Path(path)
        # Which file was read last: one that was replaced is another.
        self._seen: tuple[int, int, int] | None = None

    def look(self) -> Table | None:
        """A newer table than the last one, if there is one. Reads a file, so not for an event loop."""
        try:
            stat = self._path.stat()
            mark = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            if mark == self._seen:
                return None
            table = _read(self._path)
        except (OSError, ValueError) as error:
            self._seen = None
            self._complain(f"the engine table {self._path} cannot be used: {error}")
            return None
        self._seen = mark
        if table.number < self.number:
            self._complain(f"the engine table {self._path} has number {table.number}, older than {self.number}")
            return None
        self.problem = ""
        if table.number == self.number:
            return None
        self.number = table.number
        return table

    def _complain(self, problem: str) -> None:
        """Once for each problem."""
        if problem != self.problem:
            logger.error("%s; the last good one (number %d) stays in force", problem, self.number)
        self.problem = problem


def _read(path: Path) -> Table:
    """Raises OSError or ValueError."""
    with path.open("rb") as file:
        data = file.read(MOST_TABLE_BYTES + 1)
    if len(data) > MOST_TABLE_BYTES:
        raise ValueError(f"it is longer than {MOST_TABLE_BYTES} bytes")
    table = _decoder.decode(data)
    names = [entry.name for entry in table.engines]
    if len(set(names)) < len(names):
        raise ValueError("two engines have the same name")
    if table.number < 1:
        raise ValueError(f"its number is {table.number}; the first is 1")
    for entry in table.engines:
        check_address(entry.address)
    return table
