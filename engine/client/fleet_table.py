"""Reads the table file of a fleet (`TableFile`): names, addresses and states of its engines and gateways.

The supervisor of each gateway replaces the file atomically (`write_table` in `fleet/state.py`). Each gateway polls it:
`EngineClient` connects to the engines, and `realtime/serving/fleet_publishing.py` to the other gateways. The last good
table stays in use while the file is missing, unreadable or older.
"""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from stat import S_ISREG
from typing import Literal

import msgspec

from engine.boundary.sockets import check_address, check_gateway_address

logger = logging.getLogger(__name__)

# How often a gateway reads the file's time and size.
TABLE_POLL_SECONDS = 0.5
# Far more than a table of thousands of engines needs.
MAX_TABLE_BYTES = 4 * 1024 * 1024


class EngineEntry(msgspec.Struct, frozen=True):
    """One engine of the table. A draining engine takes no new streams, and its streams migrate."""

    name: str
    address: str
    state: Literal["serving", "draining"] = "serving"


class GatewayEntry(msgspec.Struct, frozen=True):
    """One gateway of the table, with the address at which it listens to the others."""

    name: str
    address: str
    state: Literal["serving", "draining"] = "serving"


class Table(msgspec.Struct, frozen=True):
    """The engines and the gateways of a fleet. `number` rises with each table that is written."""

    number: int
    engines: list[EngineEntry]
    gateways: list[GatewayEntry] = []


_decoder = msgspec.json.Decoder(Table)


class TableFile:
    """Reads the table file. `number`: the number of the table in use. `problem`: what is wrong with the file now."""

    def __init__(self, path: str | Path) -> None:
        self.number = 0
        self.problem = ""
        self._path = Path(path)
        # Inode, mtime and size of the file read last: a replaced file differs.
        self._last_read: tuple[int, int, int] | None = None

    def poll(self) -> Table | None:
        """Return the table if it is newer than the one in use, else None. Blocks on file I/O: do not call it on an
        event loop."""
        try:
            stat = self._path.stat()
            mark = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            if mark == self._last_read:
                return None
            if not S_ISREG(stat.st_mode):
                raise ValueError("it is not a regular file")
            table = _read(self._path)
        except (OSError, ValueError) as error:
            self._last_read = None
            self._complain(f"the engine table {self._path} cannot be used: {error}")
            return None
        self._last_read = mark
        if table.number < self.number:
            self._complain(f"the engine table {self._path} has number {table.number}, older than {self.number}")
            return None
        self.problem = ""
        if table.number == self.number:
            return None
        self.number = table.number
        return table

    def _complain(self, problem: str) -> None:
        """Log each problem once."""
        if problem != self.problem:
            logger.error("%s; the last good one (number %d) stays in force", problem, self.number)
        self.problem = problem


def _read(path: Path) -> Table:
    """Read and check the table. Raises OSError or ValueError."""
    with path.open("rb") as file:
        data = file.read(MAX_TABLE_BYTES + 1)
    if len(data) > MAX_TABLE_BYTES:
        raise ValueError(f"it is longer than {MAX_TABLE_BYTES} bytes")
    table = _decoder.decode(data)
    names = [entry.name for entry in table.engines] + [entry.name for entry in table.gateways]
    if len(set(names)) < len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise ValueError(f"the name {twice!r} is used twice; engines and gateways need different names")
    if table.number < 1:
        raise ValueError(f"its number is {table.number}; the first is 1")
    for engine in table.engines:
        check_address(engine.address)
    for gateway in table.gateways:
        check_gateway_address(gateway.address)
    return table
