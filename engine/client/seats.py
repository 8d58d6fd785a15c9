"""The engines of a gateway as places for streams: who sits where, and where a new stream sits best."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from engine.boundary import codec
from engine.client.capacity import streams_held
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

    def __init__(self, engine: EngineHandle) -> None:
        self.engine = engine
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


class Seats:
    """All of them; a stream sits on one at most. `spares` of them stay empty until one that serves is lost."""

    def __init__(self, engines: Sequence[EngineHandle], max_load: float, spares: int = 0) -> None:
        self.all = [Seat(engine) for engine in engines]
        self.spares = spares
        self._max_load = max_load

    def arrived(self, seat: Seat, link: EngineLink) -> None:
        """The engine is connected."""
        seat.link = link
        self._promote()

    def lost(self, seat: Seat) -> Seat | None:
        """The engine is not connected any more; the spare that serves in its place, if there is one."""
        seat.link, seat.serves = None, False
        return self._promote()

    def _promote(self) -> Seat | None:
        """Let a connected engine serve if too few do; all that are needed serve after each arrival and each loss."""
        spare = next((seat for seat in self.all if seat.link is not None and not seat.serves), None)
        if spare is None or len(self.links()) >= len(self.all) - self.spares:
            return None
        spare.serves = True
        return spare

    def links(self) -> list[EngineLink]:
        """To the engines that serve."""
        return [seat.link for seat in self.all if seat.link is not None and seat.serves]

    @property
    def spares_ready(self) -> int:
        return sum(seat.link is not None and not seat.serves for seat in self.all)

    def streams(self) -> list[EngineStream]:
        return [stream for seat in self.all for stream in seat.streams.values()]

    def by_lag(self) -> list[Seat]:
        """Engines that can take a stream, the best first: not behind, not full, with few streams."""

        def order(entry: tuple[codec.Status, Seat]) -> tuple[float, bool, float]:
            status, seat = entry
            full = status.counted >= streams_held(status, self._max_load)
            return max(0.0, status.lag_ms - USUAL_LAG_MS), full, len(seat.streams) / max(1, status.slots_total)

        ready = [(seat.link.status, seat) for seat in self.all if seat.link is not None and seat.serves]
        return [seat for _, seat in sorted(ready, key=order)]

    def place_for_lost(self) -> Seat | None:
        """An engine that seems to have a place for a stream that lost its own: nothing is sent to one that is full."""
        for seat in self.by_lag():
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
