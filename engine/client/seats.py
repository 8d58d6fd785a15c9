"""The engines of a gateway as places for streams: who sits where, and where a new stream sits best."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

from engine.boundary import codec
from engine.client.capacity import EngineMissing, EngineShare, share_of, streams_free, streams_held
from engine.client.handles import EngineHandle
from engine.client.link import EngineLink
from engine.client.stream import EngineStream
from engine.errors import AtCapacity, EngineDead

# Lag that streams have even where there is plenty of room: they wait for the next stride or step.
USUAL_LAG_MS = 1000.0
# How many streams an engine may be asked about at once: whether it is full is known when it answers.
OPENING_AT_ONCE = 16


class Seat:
    """One engine and, while it lives, the link to it and the streams on it."""

    def __init__(self, engine: EngineHandle, name: str = "") -> None:
        self.engine = engine
        self.name = name or engine.address
        # The table of engines has it no more, or says that it is to be emptied.
        self.dismissed = False
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
        return self.dismissed or self.emptied or (self.link is not None and self.link.status.draining)

    @property
    def takes_streams(self) -> bool:
        return self.link is not None and self.serves and not self.draining


class Seats:
    """All of them; a stream sits on one at most. `spares` of them stay empty until one that serves is lost."""

    def __init__(self, engines: Sequence[EngineHandle], max_load: float, spares: int = 0) -> None:
        self.all = [
            Seat(engine, f"e{number}" if engine.is_ours else "") for number, engine in enumerate(engines, start=1)
        ]
        self.spares = spares
        self.max_load = max_load
        self._chance = random.Random()

    def arrived(self, seat: Seat, link: EngineLink) -> None:
        """The engine is connected."""
        seat.link, seat.since = link, asyncio.get_running_loop().time()
        self._promote()

    def lost(self, seat: Seat) -> Seat | None:
        """The engine is not connected any more; the spare that serves in its place, if there is one."""
        seat.link, seat.serves, seat.since = None, False, asyncio.get_running_loop().time()
        return self._promote()

    def _promote(self) -> Seat | None:
        """Let a connected engine serve if too few do; all that are needed serve after each arrival and each loss."""
        spare = next((seat for seat in self.all if seat.link is not None and not seat.serves), None)
        serving = sum(seat.link is not None and seat.serves for seat in self.all)
        if spare is None or serving >= len(self.all) - self.spares:
            return None
        spare.serves = True
        return spare

    def links(self) -> list[EngineLink]:
        """To the engines that take streams."""
        return [seat.link for seat in self.all if seat.link is not None and seat.takes_streams]

    @property
    def spares_ready(self) -> int:
        return sum(seat.link is not None and not seat.serves for seat in self.all)

    def streams(self) -> list[EngineStream]:
        return [stream for seat in self.all for stream in seat.streams.values()]

    def shares(self) -> tuple[EngineShare, ...]:
        """Of the engines that are connected and no spares."""
        return tuple(
            replace(
                share_of(seat.link.status, self.max_load),
                name=seat.name,
                address=seat.engine.address,
                draining=seat.draining,
                version=seat.link.version,
                silent_s=seat.link.silent_s,
            )
            for seat in self.all
            if seat.link is not None and seat.serves
        )

    def missing(self) -> tuple[EngineMissing, ...]:
        return tuple(
            EngineMissing(seat.name, seat.engine.address, seat.problem) for seat in self.all if seat.link is None
        )

    def in_order(self) -> list[Seat]:
        """Engines that can take a stream, in the order in which to ask them.

        First those with room, by chance, and the likelier the more room there is: gateways that choose at the same
        time do not all choose the same one. Then those that are behind or full, the best first; they know better.
        """
        ready = [seat for seat in self.all if seat.link is not None and seat.takes_streams]
        room = {seat: self._room(seat) for seat in ready}
        chances = {seat: self._chance.random() ** (1 / free) for seat, free in room.items() if free > 0}
        with_room = sorted(chances, key=lambda seat: chances[seat], reverse=True)
        return with_room + [seat for seat in self._by_lag(ready) if seat not in chances]

    def _room(self, seat: Seat) -> int:
        assert seat.link is not None
        status = seat.link.status
        return 0 if status.lag_ms > USUAL_LAG_MS else streams_free(status, self.max_load) - seat.opening

    def _by_lag(self, seats: Sequence[Seat]) -> list[Seat]:
        """Not behind, not full, with few streams."""

        def order(entry: tuple[codec.Status, Seat]) -> tuple[float, bool, float]:
            status, seat = entry
            full = status.counted >= streams_held(status, self.max_load)
            return max(0.0, status.lag_ms - USUAL_LAG_MS), full, len(seat.streams) / max(1, status.slots_total)

        return [seat for _, seat in sorted(((seat.link.status, seat) for seat in seats if seat.link), key=order)]

    def place_for_lost(self) -> Seat | None:
        """An engine that seems to have a place for a stream that lost its own: nothing is sent to one that is full."""
        for seat in self.in_order():
            assert seat.link is not None
            status = seat.link.status
            if seat.opening < OPENING_AT_ONCE and status.slots_used + seat.opening < status.slots_total:
                return seat
        return None

    async def open_on(self, seat: Seat, stream: EngineStream) -> None:
        """Raises what the engine answers, or EngineDead; then the stream is on no engine."""
        link = seat.link
        if link is None:
            raise EngineDead(f"the engine at {seat.engine.address} is not running at the moment")
        seat.streams[stream.id] = stream
        seat.opening += 1
        try:
            await stream.open_on(link)
        except BaseException as error:
            if isinstance(error, AtCapacity):
                # It knows better than its last report. The next report counts again.
                link.status.slots_used = link.status.slots_total
            if seat.streams.get(stream.id) is stream:
                del seat.streams[stream.id]
            raise
        finally:
            seat.opening -= 1

    def leave(self, stream: EngineStream) -> None:
        """The stream has said its last word."""
        for seat in self.all:
            if seat.streams.get(stream.id) is stream:
                del seat.streams[stream.id]
