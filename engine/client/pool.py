"""The engines that a gateway knows (`EnginePool`): their capacity, and the order in which they are asked for a stream.

The pool is state without tasks of its own; the supervisor changes it, and `EngineClient`, recovery and migration ask
it. It knows which engines are connected, which are spares, which streams run on which, and in what order a new stream
is offered to them. Capacity is computed from the cost of steps that the engines measure. Only streams that cause work
are counted: streams with speech within `COUNTED_SECONDS` (engine.options), and new streams that have not been measured
yet. Other open streams cost almost nothing. Uploads are not counted: they use the time that live streams leave free.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.boundary import codec
from engine.boundary.codec import Status
from engine.client.engine_handles import EngineHandle
from engine.client.link import EngineLink
from engine.client.stream import EngineStream
from engine.errors import AtCapacity, EngineUnreachable

# Active streams that an engine takes before it has measured what a stream costs.
UNMEASURED_STREAMS = 4
# A frame-synchronous engine with many streams steps without a pause, so its measured load is close to 1 long before it
# is full. It is full when a tick takes as long as a position. Until then it has room for more streams than it has: for
# this share of them if ticks take no time, and for less the longer they are.
GROWTH = 0.2
# Seconds until a refused client should try again: soon if engines are starting, later if all are full.
RETRY_SOON_S = 1.0
RETRY_LATER_S = 5.0


@dataclass(frozen=True, slots=True)
class EngineShare:
    """One connected engine in a report of capacity: its streams, its load and its lag."""

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
    # Seconds since its last message.
    silent_s: float = 0.0
    # Silent streams whose state is in host memory.
    parked: int = 0


@dataclass(frozen=True, slots=True)
class EngineMissing:
    """An engine that should be connected and is not, and the reason, if known."""

    name: str
    address: str
    problem: str


@dataclass(frozen=True, slots=True)
class TableReport:
    """The number of the engine table in use, and the problem with its file, if any."""

    number: int
    problem: str


@dataclass(frozen=True, slots=True)
class Capacity:
    """Capacity of all engines together."""

    # Slots that have a stream, and all slots.
    used: int
    total: int
    # Streams with speech now.
    speaking: int
    # Share of its time that the least busy engine spends on live streams.
    load: float
    # When a refused client should try again.
    retry_after_s: float
    # Silent streams whose state is in host memory.
    parked: int = 0
    # Active streams now, and at most.
    counted: int = 0
    holds: int = 0
    # Further active streams that the engines can take, summed up per engine. More than `holds - counted` if an engine
    # is above its limit, less if one is draining or has too few free slots.
    free: int = 0
    # Load that one more stream adds on the engine where it adds most; 0 while nothing has been measured.
    load_per_stream: float = 0.0
    # Connected engines, the number that should be connected, and those that are missing.
    engines: tuple[EngineShare, ...] = ()
    engines_wanted: int = 0
    missing: tuple[EngineMissing, ...] = ()
    table: TableReport | None = None
    # Spare engines that are ready, and how many there should be.
    spares_ready: int = 0
    spares_wanted: int = 0


def active_capacity(status: Status, max_load: float) -> int:
    """The most active streams that an engine can have within `max_load`; a `max_load` of 0 is no limit."""
    if not max_load:
        return status.active_total
    if not status.load_per_stream:
        return min(status.active_total, UNMEASURED_STREAMS)
    by_cost = int((max_load - status.load_per_step) / status.load_per_stream)
    room = max(0.0, 1 - status.tick_share / max_load)
    by_ticks = int(status.tick_streams * (1 + GROWTH * room)) if room else 0
    # At least one: without a stream nothing would ever be measured again.
    return min(status.active_total, max(1, by_cost, by_ticks))


def streams_free(status: Status, max_load: float) -> int:
    """How many further streams an engine can take if all of them are active."""
    if status.draining:
        return 0
    free_slots = status.slots_total - status.slots_used
    return max(0, min(active_capacity(status, max_load) - status.counted, free_slots))


def share_of(status: Status, max_load: float) -> EngineShare:
    """The report of one engine, without its name and address."""
    return EngineShare(
        status.slots_used,
        status.slots_total,
        status.speaking,
        status.load,
        status.lag_ms,
        streams_free(status, max_load),
        draining=status.draining,
        parked=status.parked,
    )


def capacity_of(states: Sequence[Status], max_load: float) -> Capacity:
    """The capacity of these engines together, without the engines one by one."""
    free = sum(streams_free(state, max_load) for state in states)
    return Capacity(
        used=sum(state.slots_used for state in states),
        total=sum(state.slots_total for state in states),
        speaking=sum(state.speaking for state in states),
        load=min((state.load for state in states), default=1.0),
        retry_after_s=RETRY_LATER_S if states and not free else RETRY_SOON_S,
        parked=sum(state.parked for state in states),
        counted=sum(state.counted for state in states),
        holds=sum(active_capacity(state, max_load) for state in states),
        free=free,
        load_per_stream=max((state.load_per_stream for state in states), default=0.0),
    )


# Normal lag of streams on an engine with room: they wait for the next stride or step.
USUAL_LAG_MS = 1000.0
# Most unanswered opens at one engine: only its answer shows whether it is full.
MAX_UNANSWERED_OPENS = 64


class PooledEngine:
    """One engine, and while it is connected, the link to it and the streams on it."""

    def __init__(self, engine: EngineHandle, name: str = "") -> None:
        self.engine = engine
        self.name = name or engine.address
        # It was removed from the fleet's table.
        self.delisted = False
        # The fleet's table marks it as draining.
        self.marked_draining = False
        # Why it is not connected, if known.
        self.problem = ""
        # Time of the event loop at which it was connected, lost or added.
        self.state_since = asyncio.get_running_loop().time()
        self.link: EngineLink | None = None
        # Whether it takes streams; a connected engine that does not serve is a spare.
        self.serves = False
        self.streams: dict[str, EngineStream] = {}
        # Number of unanswered opens.
        self.opening = 0
        # Id and last status of the engine process of the last link.
        self.engine_id = ""
        self.last_status = codec.Status()
        # Done when the connection is lost; its result is the reason.
        self.loss: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        # Done when the first attempt to start the engine and connect to it has ended.
        self.first_try: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def draining(self) -> bool:
        """Whether it takes no new streams, and its streams are to migrate."""
        return self.delisted or self.marked_draining or (self.link is not None and self.link.status.draining)

    @property
    def takes_streams(self) -> bool:
        return self.link is not None and self.serves and not self.draining


class EnginePool:
    """All engines of a gateway; a stream is on at most one. `spares` engines stay empty until a serving one is lost."""

    def __init__(self, engines: Sequence[EngineHandle], max_load: float, spares: int = 0) -> None:
        self.all = [
            PooledEngine(engine, f"e{number}" if engine.is_ours else "")
            for number, engine in enumerate(engines, start=1)
        ]
        self.spares = spares
        self.max_load = max_load
        self._random = random.Random()

    def connected(self, pooled: PooledEngine, link: EngineLink) -> None:
        """The engine has been connected."""
        pooled.link, pooled.state_since = link, asyncio.get_running_loop().time()
        self._promote()

    def disconnected(self, pooled: PooledEngine) -> PooledEngine | None:
        """The engine has been lost. Returns the spare that serves in its place, if there is one."""
        pooled.link, pooled.serves, pooled.state_since = None, False, asyncio.get_running_loop().time()
        return self._promote()

    def _promote(self) -> PooledEngine | None:
        """Let a spare serve if too few engines do. Called at each arrival and loss, so one promotion is enough."""
        spare = next((pooled for pooled in self.all if pooled.link is not None and not pooled.serves), None)
        serving = sum(pooled.link is not None and pooled.serves for pooled in self.all)
        if spare is None or serving >= len(self.all) - self.spares:
            return None
        spare.serves = True
        return spare

    def links(self) -> list[EngineLink]:
        """Links to the engines that take streams."""
        return [pooled.link for pooled in self.all if pooled.link is not None and pooled.takes_streams]

    @property
    def spares_ready(self) -> int:
        return sum(pooled.link is not None and not pooled.serves for pooled in self.all)

    def streams(self) -> list[EngineStream]:
        return [stream for pooled in self.all for stream in pooled.streams.values()]

    def shares(self) -> tuple[EngineShare, ...]:
        """Shares of the connected engines, without spares."""
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

        First those with room, in random order weighted by their room, so that gateways that choose at the same time
        do not all choose the same one. Then those that seem late or full, the best first: our report may be outdated.
        """
        ready = [pooled for pooled in self.all if pooled.link is not None and pooled.takes_streams]
        room = {pooled: self._room(pooled) for pooled in ready}
        # Weighted random order without replacement: sort by random ** (1 / weight).
        keys = {pooled: self._random.random() ** (1 / free) for pooled, free in room.items() if free > 0}
        with_room = sorted(keys, key=lambda pooled: keys[pooled], reverse=True)
        return with_room + [pooled for pooled in self._by_lag(ready) if pooled not in keys]

    def _room(self, pooled: PooledEngine) -> int:
        assert pooled.link is not None
        status = pooled.link.status
        return 0 if status.lag_ms > USUAL_LAG_MS else streams_free(status, self.max_load) - pooled.opening

    def _by_lag(self, pool: Sequence[PooledEngine]) -> list[PooledEngine]:
        """Sort by lag, then engines that are not full, then those with few streams."""

        def order(entry: tuple[codec.Status, PooledEngine]) -> tuple[float, bool, float]:
            status, pooled = entry
            full = status.counted >= active_capacity(status, self.max_load)
            return max(0.0, status.lag_ms - USUAL_LAG_MS), full, len(pooled.streams) / max(1, status.slots_total)

        return [
            pooled for _, pooled in sorted(((pooled.link.status, pooled) for pooled in pool if pooled.link), key=order)
        ]

    def engine_with_free_slot(self) -> PooledEngine | None:
        """An engine for a stream that must be reopened: the first in order with a free slot; None if all seem full."""
        for pooled in self.in_order():
            assert pooled.link is not None
            status = pooled.link.status
            if pooled.opening < MAX_UNANSWERED_OPENS and status.slots_used + pooled.opening < status.slots_total:
                return pooled
        return None

    async def open_on(self, pooled: PooledEngine, stream: EngineStream) -> None:
        """Open the stream on this engine.

        Raises the engine's error, or EngineUnavailable; then the stream is on no engine.
        """
        link = pooled.link
        if link is None:
            raise EngineUnreachable(f"the engine at {pooled.engine.address} is not running at the moment")
        pooled.streams[stream.id] = stream
        pooled.opening += 1
        try:
            await stream.open_on(link)
        except BaseException as error:
            if isinstance(error, AtCapacity):
                # The last report was outdated: treat the engine as full until the next one.
                link.status.slots_used = link.status.slots_total
            if pooled.streams.get(stream.id) is stream:
                del pooled.streams[stream.id]
            raise
        finally:
            pooled.opening -= 1

    def remove(self, stream: EngineStream) -> None:
        """The stream has ended: remove it from its engine."""
        for pooled in self.all:
            if pooled.streams.get(stream.id) is stream:
                del pooled.streams[stream.id]
