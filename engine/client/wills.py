"""A gateway's side of what it entrusts to engines: the last value of each session, and sessions of others to adopt.

A session's value is with the engine that runs its stream; before it has one, with any engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from engine import messages
from engine.client.link import EngineLink
from engine.client.placement import Keeper
from engine.client.seats import Seat, Seats
from engine.client.stream import EngineStream
from engine.errors import EngineDead

# How long engines are waited for. One that asks the former owner first takes a second, and one that is busy its step.
ANSWER_SECONDS = 20.0
# When one engine has answered with the session, how long the others are waited for: one from which it has moved may
# still have an older value of it, and its owner a second to give it up.
OTHERS_SECONDS = 1.5
# An engine that was lost, or listed, less than so long ago may still come and have the session.
UNSURE_SECONDS = 10.0
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
        self._asked: dict[tuple[Seat, str], asyncio.Future[Inheritance | None]] = {}

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
        """The session from the engine that has its newest value; None if none has any. Raises EngineDead if one that
        may have it did not say."""
        # A spare too: what is one here may serve for the gateway that had the session.
        links = {seat: seat.link for seat in seats.all if seat.link is not None}
        asking = {seat: asyncio.create_task(self._ask(seat, link, key)) for seat, link in links.items()}
        answers = await _answers_of(asking.values())
        found = [answer for answer in answers if answer is not None]
        if found:
            newest = max(found, key=lambda answer: answer.number)
            for seat, task in asking.items():
                task.add_done_callback(partial(_discard, links[seat], key, newest))
            return newest
        now = asyncio.get_running_loop().time()
        unsure = [seat for seat in seats.all if seat.link is None and now - seat.since < UNSURE_SECONDS]
        if len(answers) < len(links) or unsure or not links:
            raise EngineDead("not all engines have answered; try again in a few seconds")
        return None

    async def _ask(self, seat: Seat, link: EngineLink, key: str) -> Inheritance | None:
        """Raises EngineDead if the engine does not say."""
        asked: asyncio.Future[Inheritance | None] = asyncio.get_running_loop().create_future()
        self._asked[seat, key] = asked
        link.send(messages.Adopt("", key))
        try:
            await asyncio.wait((asked, link.ended), timeout=ANSWER_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if self._asked.get((seat, key)) is asked:
                del self._asked[seat, key]
        if not asked.done():
            raise EngineDead(f"the engine at {seat.engine.address} has not answered")
        return asked.result()

    def _inherit(self, seat: Seat, inherited: messages.Inherited) -> None:
        """At once: the outputs of the stream follow in the same message."""
        asked = self._asked.get((seat, inherited.key))
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


def keeper_for(stream: EngineStream | None, seats: Seats) -> Keeper | None:
    """Where the value of the session with this stream belongs; None if there is no such place at the moment."""
    if stream is not None:
        return stream.keeper
    link = next(iter(seats.links()), None)
    return None if link is None else Keeper(link)


async def _answers_of(asking: Collection[asyncio.Task[Inheritance | None]]) -> list[Inheritance | None]:
    """What those who answer say; when one of them has the session, the others are waited for a little while."""
    waiting, answers = set(asking), []
    timeout = None
    while waiting:
        done, waiting = await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        answers += [task.result() for task in done if task.exception() is None]
        if not done:
            break
        if any(answer is not None for answer in answers):
            timeout = OTHERS_SECONDS
    return answers


def _discard(link: EngineLink, key: str, newest: Inheritance, task: asyncio.Task[Inheritance | None]) -> None:
    """Have an engine forget an older value of a session that goes on with a newer one."""
    if task.cancelled() or task.exception() is not None:
        return
    older = task.result()
    if older is not None and older is not newest:
        link.send(messages.Disown("", key, older.number))
        if older.stream is not None:
            older.stream.drop()


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
