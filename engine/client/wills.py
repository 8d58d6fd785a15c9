"""A gateway's side of what it entrusts to engines: the last value of each session, and sessions of others to adopt.

A session's value is with the engine that runs its stream; before it has one, with any engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from engine import messages
from engine.client.link import EngineLink
from engine.client.seats import Seat, Seats
from engine.client.stream import EngineStream
from engine.errors import EngineDead

# How long engines are waited for. One that asks the former owner first takes a second, and one that is busy its step.
ANSWER_SECONDS = 20.0
# How long a session that nobody waits for any more is left for the next who asks.
LEFT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Inheritance:
    """A session that came from another gateway. `number` is ours, and higher than that of any owner before.

    The stream, if there was one, hears on from its own sample `goes_on_at`; of the flushes that it was asked for,
    `flushes` are not accounted for.
    """

    number: int
    base: bytes
    chunks: list[bytes]
    entries: list[bytes]
    stream: EngineStream | None = None
    goes_on_at: int = 0
    flushes: int = 0


class WillDesk:
    """`make_stream` makes the gateway's side of a stream that an engine runs already."""

    def __init__(self, make_stream: Callable[[messages.Inherited], EngineStream]) -> None:
        # Called when another gateway asks for a session of ours, and when one of ours is another's by now.
        self.on_wanted: Callable[[str], None] | None = None
        self.on_fenced: Callable[[str], None] | None = None
        self._make_stream = make_stream
        self._asked: dict[str, asyncio.Future[Inheritance | None]] = {}

    def heard(self, seat: Seat, output: messages.SessionOutput) -> None:
        match output:
            case messages.Wanted(key):
                if self.on_wanted is not None:
                    self.on_wanted(key)
            case messages.Fenced(key):
                if self.on_fenced is not None:
                    self.on_fenced(key)
            case messages.Inherited():
                self._inherit(seat, output)

    async def adopt(self, seats: Seats, key: str) -> Inheritance | None:
        """The session from whichever engine has it; None if none of them does. Raises EngineDead if one did not say."""
        silent = False
        # A spare too: what is one here may serve for the gateway that had the session.
        for link in [seat.link for seat in seats.all if seat.link is not None]:
            asked: asyncio.Future[Inheritance | None] = asyncio.get_running_loop().create_future()
            self._asked[key] = asked
            link.send(messages.Adopt("", key))
            await asyncio.wait((asked, link.ended), timeout=ANSWER_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            self._asked.pop(key, None)
            if asked.done() and asked.result() is not None:
                return asked.result()
            silent = silent or not asked.done()
        if silent or not seats.links():
            raise EngineDead("no engine has answered; try again in a few seconds")
        return None

    def _inherit(self, seat: Seat, inherited: messages.Inherited) -> None:
        """At once: the outputs of the stream follow in the same message."""
        asked = self._asked.pop(inherited.key, None)
        found = None
        if inherited.number:
            found = self._take(seat, inherited)
        if asked is not None and not asked.done():
            asked.set_result(found)
        elif found is not None and seat.link is not None:
            # Nobody waits for it any more. It is left for whoever asks next.
            seat.link.send(_left_again(inherited))
            if found.stream is not None:
                found.stream.lay_down()

    def _take(self, seat: Seat, inherited: messages.Inherited) -> Inheritance:
        given = (inherited.number, inherited.base, inherited.chunks, inherited.entries)
        if not inherited.stream:
            return Inheritance(*given)
        stream = self._make_stream(inherited)
        assert seat.link is not None
        seat.streams[stream.id] = stream
        goes_on_at = stream.carried_by(seat.link, inherited)
        return Inheritance(*given, stream, goes_on_at, inherited.flushes - inherited.answered)


def link_for(stream: EngineStream | None, seats: Seats) -> EngineLink | None:
    """Where the value of the session with this stream belongs; None if there is no such place at the moment."""
    if stream is not None:
        return stream.place.link
    return next(iter(seats.links()), None)


def _left_again(inherited: messages.Inherited) -> messages.Entrust:
    return messages.Entrust(
        inherited.stream,
        inherited.key,
        inherited.number,
        inherited.consumed,
        inherited.entries,
        base=inherited.base,
        keep_s=LEFT_SECONDS,
        positions_before=inherited.positions_before,
        samples_before=inherited.samples_before,
        last=True,
    )
