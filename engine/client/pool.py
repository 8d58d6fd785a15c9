"""How many streams engines hold, from what their steps were measured to cost.

Only streams that make work count: one that was heard within `COUNTED_SECONDS` (engine.options), or is so new that
nothing is known of it yet. The others are open and cost next to nothing. Backlog counts nowhere: it gets what live
streams leave over.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec

from engine.boundary import codec
from engine.boundary.codec import Status
from engine.boundary.sockets import check_address
from engine.client.engine_handles import EngineHandle
from engine.client.link import EngineLink
from engine.client.stream import EngineStream
from engine.errors import AtCapacity, EngineDead

# What an engine takes on before it has measured anything.
STREAMS_TO_BEGIN_WITH = 4
# When to try again: soon if an engine is merely busy or starting, later if somebody has to leave first.
RETRY_SOON_S = 1.0
RETRY_LATER_S = 5.0


@dataclass(frozen=True, slots=True)
class EngineShare:
    """One engine that is connected: its streams, and how busy and how late it is."""

    used: int
    total: int
    speaking: int
    load: float
    lag_ms: float
    free: int
    name: str = ""
    address: str = ""
    draining: bool = False
    version: str = ""
    # How long ago it was last heard.
    silent_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineMissing:
    """One engine that should be there and is not, and why, if that is known."""

    name: str
    address: str
    problem: str


@dataclass(frozen=True, slots=True)
class TableReport:
    """The table of engines in force, and what is wrong with its file."""

    number: int
    problem: str


@dataclass(frozen=True, slots=True)
class Capacity:
    """Of all engines together. `used` of `total` places are taken; `counted` streams count as speaking, `holds` could.

    `free` is how many more could speak: less than `holds - counted` where one engine has more than it holds. `load` is
    the share of its time that the least busy engine spends on live streams, `load_per_stream` what one more stream
    would add where it adds most; 0 while nothing has been measured.
    """

    used: int
    total: int
    speaking: int
    load: float
    retry_after_s: float
    counted: int = 0
    holds: int = 0
    free: int = 0
    load_per_stream: float = 0.0
    # Those that are connected, of so many that should be, and those that are not.
    engines: tuple[EngineShare, ...] = ()
    engines_wanted: int = 0
    missing: tuple[EngineMissing, ...] = ()
    table: TableReport | None = None
    # Engines that wait for another one to be lost, and how many of them there should be.
    spares_ready: int = 0
    spares_wanted: int = 0


def streams_held(status: Status, max_load: float) -> int:
    """Streams that may speak at once on an engine without it being busier than `max_load`; 0 is no limit."""
    if not max_load:
        return status.slots_total
    if not status.load_per_stream:
        return min(status.slots_total, STREAMS_TO_BEGIN_WITH)
    # One is always let in: without a stream nothing would be measured again.
    return min(status.slots_total, max(1, int((max_load - status.load_per_step) / status.load_per_stream)))


def streams_free(status: Status, max_load: float) -> int:
    """How many more streams an engine takes that may all speak."""
    if status.draining:
        return 0
    places = status.slots_total - status.slots_used
    return max(0, min(streams_held(status, max_load) - status.counted, places))


def share_of(status: Status, max_load: float) -> EngineShare:
    return EngineShare(
        status.slots_used,
        status.slots_total,
        status.speaking,
        status.load,
        status.lag_ms,
        streams_free(status, max_load),
        draining=status.draining,
    )


def capacity_of(states: Sequence[Status], max_load: float) -> Capacity:
    free = sum(streams_free(state, max_load) for state in states)
    return Capacity(
        used=sum(state.slots_used for state in states),
        total=sum(state.slots_total for state in states),
        speaking=sum(state.speaking for state in states),
        load=min((state.load for state in states), default=1.0),
        retry_after_s=RETRY_LATER_S if states and not free else RETRY_SOON_S,
        counted=sum(state.counted for state in states),
        holds=sum(streams_held(state, max_load) for state in states),
        free=free,
        load_per_stream=max((state.load_per_stream for state in states), default=0.0),
    )


# The engines of a gateway as places for streams: who sits where, and where a new stream sits best.

# Lag that streams have even where there is plenty of room: they wait for the next stride or step.
USUAL_LAG_MS = 1000.0
# How many streams an engine may be asked about at once: whether it is full is known when it answers.
OPENING_AT_ONCE = 64


class PooledEngine:
    """One engine and, while it lives, the link to it and the streams on it."""

    def __init__(self, engine: EngineHandle, name: str = "") -> None:
        self.engine = engine
        self.name = name or engine.address
        # The table of engines has it no more, or says that it is to be emptied.
        self.delisted = False
        self.emptied = False
        # Why it is not connected, if that is known, and since when it is or is not.
        self.problem = ""
        self.since = asyncio.get_running_loop().time()
        self.link: EngineLink | None = None
        # Whether streams may sit here; an engine that is connected and does not serve is a spare.
        self.serves = False
        self.streams: dict[str, EngineStream] = {}
        # Streams that the engine was asked to take and has not answered about.
        self.opening = 0
        # Which process it was that the last link led to, and the last that was heard of it.
        self.engine_id = ""
        self.last_status = codec.Status()
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.first_try: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def draining(self) -> bool:
        """No new stream sits here, and those that do are to move."""
        return self.delisted or self.emptied or (self.link is not None and self.link.status.draining)

    @property
    def takes_streams(self) -> bool:
        return self.link is not None and self.serves and not self.draining


class EnginePool:
    """All of them; a stream sits on one at most. `spares` of them stay empty until one that serves is lost."""

    def __init__(self, engines: Sequence[EngineHandle], max_load: float, spares: int = 0) -> None:
        self.all = [
            PooledEngine(engine, f"e{number}" if engine.is_ours else "")
            for number, engine in enumerate(engines, start=1)
        ]
        self.spares = spares
        self.max_load = max_load
        self._chance = random.Random()

    def arrived(self, pooled: PooledEngine, link: EngineLink) -> None:
        """The engine is connected."""
        pooled.link, pooled.since = link, asyncio.get_running_loop().time()
        self._promote()

    def lost(self, pooled: PooledEngine) -> PooledEngine | None:
        """The engine is not connected any more; the spare that serves in its place, if there is one."""
        pooled.link, pooled.serves, pooled.since = None, False, asyncio.get_running_loop().time()
        return self._promote()

    def _promote(self) -> PooledEngine | None:
        """Let a connected engine serve if too few do; all that are needed serve after each arrival and each loss."""
        spare = next((pooled for pooled in self.all if pooled.link is not None and not pooled.serves), None)
        serving = sum(pooled.link is not None and pooled.serves for pooled in self.all)
        if spare is None or serving >= len(self.all) - self.spares:
            return None
        spare.serves = True
        return spare

    def links(self) -> list[EngineLink]:
        """To the engines that take streams."""
        return [pooled.link for pooled in self.all if pooled.link is not None and pooled.takes_streams]

    @property
    def spares_ready(self) -> int:
        return sum(pooled.link is not None and not pooled.serves for pooled in self.all)

    def streams(self) -> list[EngineStream]:
        return [stream for pooled in self.all for stream in pooled.streams.values()]

    def shares(self) -> tuple[EngineShare, ...]:
        """Of the engines that are connected and no spares."""
        return tuple(
            replace(
                share_of(pooled.link.status, self.max_load),
                name=pooled.name,
                address=pooled.engine.address,
                draining=pooled.draining,
                version=pooled.link.version,
                silent_s=pooled.link.silent_s,
            )
            for pooled in self.all
            if pooled.link is not None and pooled.serves
        )

    def missing(self) -> tuple[EngineMissing, ...]:
        return tuple(
            EngineMissing(pooled.name, pooled.engine.address, pooled.problem)
            for pooled in self.all
            if pooled.link is None
        )

    def in_order(self) -> list[PooledEngine]:
        """Engines that can take a stream, in the order in which to ask them.

        First those with room, by chance, and the likelier the more room there is: gateways that choose at the same
        time do not all choose the same one. Then those that are behind or full, the best first; they know better.
        """
        ready = [pooled for pooled in self.all if pooled.link is not None and pooled.takes_streams]
        room = {pooled: self._room(pooled) for pooled in ready}
        chances = {pooled: self._chance.random() ** (1 / free) for pooled, free in room.items() if free > 0}
        with_room = sorted(chances, key=lambda pooled: chances[pooled], reverse=True)
        return with_room + [pooled for pooled in self._by_lag(ready) if pooled not in chances]

    def _room(self, pooled: PooledEngine) -> int:
        assert pooled.link is not None
        status = pooled.link.status
        return 0 if status.lag_ms > USUAL_LAG_MS else streams_free(status, self.max_load) - pooled.opening

    def _by_lag(self, pool: Sequence[PooledEngine]) -> list[PooledEngine]:
        """Not behind, not full, with few streams."""

        def order(entry: tuple[codec.Status, PooledEngine]) -> tuple[float, bool, float]:
            status, pooled = entry
            full = status.counted >= streams_held(status, self.max_load)
            return max(0.0, status.lag_ms - USUAL_LAG_MS), full, len(pooled.streams) / max(1, status.slots_total)

        return [
            pooled for _, pooled in sorted(((pooled.link.status, pooled) for pooled in pool if pooled.link), key=order)
        ]

    def place_for_lost(self) -> PooledEngine | None:
        """An engine that seems to have a place for a stream that lost its own: nothing is sent to one that is full."""
        for pooled in self.in_order():
            assert pooled.link is not None
            status = pooled.link.status
            if pooled.opening < OPENING_AT_ONCE and status.slots_used + pooled.opening < status.slots_total:
                return pooled
        return None

    async def open_on(self, pooled: PooledEngine, stream: EngineStream) -> None:
        """Raises what the engine answers, or EngineDead; then the stream is on no engine."""
        link = pooled.link
        if link is None:
            raise EngineDead(f"the engine at {pooled.engine.address} is not running at the moment")
        pooled.streams[stream.id] = stream
        pooled.opening += 1
        try:
            await stream.open_on(link)
        except BaseException as error:
            if isinstance(error, AtCapacity):
                # It knows better than its last report. The next report counts again.
                link.status.slots_used = link.status.slots_total
            if pooled.streams.get(stream.id) is stream:
                del pooled.streams[stream.id]
            raise
        finally:
            pooled.opening -= 1

    def leave(self, stream: EngineStream) -> None:
        """The stream has said its last word."""
        for pooled in self.all:
            if pooled.streams.get(stream.id) is stream:
                del pooled.streams[stream.id]


# The table of a fleet's engines: a file that its keeper replaces whole, and that a gateway looks at now and then.
#
# A gateway goes on with the last good table when the file cannot be read, is not there, or is older than what it has.

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
