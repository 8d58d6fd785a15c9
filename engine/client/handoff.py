"""A gateway's side of what it entrusts to engines: the last value of each session, and sessions of others to adopt.

A session's value is with the engine that runs its stream; before it has one, with any engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from engine import messages
from engine.client.link import EngineLink
from engine.client.pool import EnginePool, PooledEngine
from engine.client.stream import EngineStream, HandoffTarget
from engine.errors import EngineDead

# How long engines are waited for. One that asks the former owner first takes a second, and one that is busy its step.
ANSWER_SECONDS = 20.0
# When one engine has answered with the session, how long the others are waited for: one from which it has moved may
# still have an older value of it, and its owner a second to give it up.
OTHERS_SECONDS = 1.5
# An engine that was lost, or listed, less than so long ago may still come and have the session.
UNSURE_SECONDS = 10.0
# How long a gateway that stood still waits for the engines to answer, and how often it looks for them.
CONFIRM_SECONDS = 5.0
LOOK_SECONDS = 0.05
# How long a session that nobody waits for any more is left for the next who asks.
LEFT_SECONDS = 60.0

# Sessions that are over and of which an engine that was lost may still have a copy: for how long, and how many of them,
# a gateway knows them.
OVER_SECONDS = 600.0
MOST_OVER = 10_000

HandoffAnswer = messages.Held | messages.Renewed | messages.Claimed


@dataclass(frozen=True, slots=True)
class Owned:
    """A session of this gateway; `place` is where its value is, if any engine has it now."""

    key: str
    number: int
    place: EngineLink | None


@dataclass(frozen=True, slots=True)
class AdoptedSession:
    """A session that came from another gateway. `number` is ours, and higher than that of any owner before.

    The stream, if there was one, hears on from its own sample `goes_on_at`; of the flushes that it was asked for,
    `flushes` are not accounted for.
    """

    number: int
    base: bytes
    chunks: list[bytes]
    entries: list[bytes]
    # The engine that it came from.
    link: EngineLink | None = None
    stream: EngineStream | None = None
    goes_on_at: int = 0
    flushes: int = 0


class HandoffClient:
    """`make_stream` makes the gateway's side of a stream that an engine runs already."""

    def __init__(self, make_stream: Callable[[messages.SessionGiven], EngineStream]) -> None:
        # Called when another gateway asks for a session of ours: whether what it asks for is an outdated copy.
        self.on_wanted: Callable[[str, int], bool] | None = None
        # Called when a session is another's by now, if ours has a lower number.
        self.on_fenced: Callable[[str, int], None] | None = None
        # All sessions that engines know as ours.
        self.sessions: Callable[[], Iterable[Owned]] | None = None
        self._make_stream = make_stream
        self._tags = 0
        # Those who wait for an answer with a tag, and for one to `Adopt`.
        self._awaited: dict[int, asyncio.Future[HandoffAnswer]] = {}
        self._adopting: dict[tuple[PooledEngine, str], asyncio.Future[AdoptedSession | None]] = {}
        # Copies of sessions that are of no use: up to which number, and since when. The oldest comes first.
        self._over: dict[str, tuple[int, float]] = {}

    def heard(self, pooled: PooledEngine, output: messages.SessionOutput) -> None:
        match output:
            case messages.Wanted(key, number):
                is_outdated = self.on_wanted is not None and self.on_wanted(key, number)
                if is_outdated and pooled.link is not None:
                    pooled.link.send(messages.DropHandoff("", key, number))
            case messages.Fenced(key, number):
                if self.on_fenced is not None:
                    self.on_fenced(key, number)
            case messages.Held() | messages.Renewed() | messages.Claimed():
                answered = self._awaited.get(output.tag)
                if answered is not None and not answered.done():
                    answered.set_result(output)
            case messages.SessionGiven():
                self._adopt_saved(pooled, output)

    # Whose sessions ours are.

    def claim(self, pooled: PooledEngine) -> None:
        """Say which sessions we have: the engine says which of them are another's by now. One that was lost and is back
        may have copies of sessions that have ended since."""
        assert pooled.link is not None
        self._send_claim(pooled.link, 0)
        now = asyncio.get_running_loop().time()
        self._over = {key: known for key, known in self._over.items() if now - known[1] <= OVER_SECONDS}
        for key, (number, _) in self._over.items():
            pooled.link.send(messages.DropHandoff("", key, number))

    def note_over(self, key: str, number: int) -> None:
        """What a lost engine may still have of a session, up to this number, is of no use any more."""
        self._over.pop(key, None)
        self._over[key] = (number, asyncio.get_running_loop().time())
        if len(self._over) > MOST_OVER:
            del self._over[next(iter(self._over))]

    async def confirm(self, pool: EnginePool) -> None:
        """Until every engine has said which of our sessions are another's by now; those that were just lost are waited
        for, though not for ever."""
        now = asyncio.get_running_loop().time()
        concerned = [pooled for pooled in pool.all if pooled.link is not None or now - pooled.since < UNSURE_SECONDS]
        with suppress(TimeoutError):
            async with asyncio.timeout(CONFIRM_SECONDS):
                await asyncio.gather(*map(self._confirm_at, concerned))

    async def _confirm_at(self, pooled: PooledEngine) -> None:
        while True:
            link = pooled.link
            if link is not None and await self._answer(link, self._send_claim) is not None:
                return
            await asyncio.sleep(LOOK_SECONDS)

    def _send_claim(self, link: EngineLink, tag: int) -> None:
        owned = [] if self.sessions is None else self.sessions()
        claims = [(session.key, session.number, session.place not in (None, link)) for session in owned]
        link.send(messages.Claim("", tag, claims))

    # Sessions of others.

    async def renew(self, pool: EnginePool, owned: Owned) -> int:
        """The client of a session of ours has come back to us. Returns the session's number from now on: nobody who
        asked for it before gets it. 0 if it is another's by now. Raises EngineDead if the engine that keeps it does not
        say."""
        links = {
            pooled: pooled.link for pooled in pool.all if pooled.link is not None and pooled.link is not owned.place
        }
        asking = self._ask_all(links, owned.key)
        number = owned.number
        if owned.place is not None:
            renewed = await self._answer(owned.place, partial(_send_renewal, owned))
            if not isinstance(renewed, messages.Renewed):
                raise EngineDead(f"the engine at {owned.place.address} has not answered")
            number = renewed.number
        others = await _answers_of(asking.values(), OTHERS_SECONDS)
        for task in asking.values():
            task.cancel()
        return 0 if any(held.number > number for held in others) else number

    async def adopt(
        self, pool: EnginePool, key: str, is_wanted: Callable[[], bool] = lambda: True
    ) -> AdoptedSession | None:
        """The session from the engine that has its newest value; None if none has any. Raises EngineDead if one that
        may have it did not say, or if it cannot be had at the moment.

        `is_wanted` is asked when the number is known under which the session would be adopted, and no later: should
        this process stand still from then on and another gateway adopt the session, the engine refuses ours.
        """
        # A spare too: what is one here may serve for the gateway that had the session.
        links = {pooled: pooled.link for pooled in pool.all if pooled.link is not None}
        asking = self._ask_all(links, key)
        answers = await _answers_of(asking.values())
        found = {pooled: task.result() for pooled, task in asking.items() if _has_session(task)}
        if not found:
            now = asyncio.get_running_loop().time()
            # One that was connected meanwhile has not been asked.
            unsure = [pooled for pooled in pool.all if pooled not in links and now - pooled.since < UNSURE_SECONDS]
            if len(answers) < len(links) or unsure or not links:
                raise EngineDead("not all engines have answered; try again in a few seconds")
            return None
        # An engine from which it has moved knows the number, and not the session.
        at = max(found, key=lambda pooled: (found[pooled].number, found[pooled].whole))
        newest = found[at]
        if not newest.whole:
            raise EngineDead("the gateway that has the session is just coming back; try again in a few seconds")
        if not is_wanted():
            raise EngineDead("nobody waits for the session any more")
        adopted_session = await self._take_from(at, links[at], newest)
        for pooled, task in asking.items():
            if pooled is not at:
                task.add_done_callback(partial(_discard, links[pooled], newest))
        return adopted_session

    def _ask_all(
        self, links: Mapping[PooledEngine, EngineLink], key: str
    ) -> dict[PooledEngine, asyncio.Task[messages.Held]]:
        asking = {pooled: asyncio.create_task(self._ask(link, key)) for pooled, link in links.items()}
        for task in asking.values():
            # One that nobody waits for any more may fail without a word.
            task.add_done_callback(_has_session)
        return asking

    async def _ask(self, link: EngineLink, key: str) -> messages.Held:
        """Raises EngineDead if the engine does not say."""
        held = await self._answer(link, lambda link, tag: link.send(messages.Ask("", key, tag)))
        if not isinstance(held, messages.Held):
            raise EngineDead(f"the engine at {link.address} has not answered")
        return held

    async def _answer(self, link: EngineLink, send: Callable[[EngineLink, int], None]) -> HandoffAnswer | None:
        """What the engine answers; None if the link ends before it does, or it takes too long."""
        self._tags += 1
        tag, answered = self._tags, asyncio.get_running_loop().create_future()
        self._awaited[tag] = answered
        send(link, tag)
        try:
            await asyncio.wait((answered, link.ended), timeout=ANSWER_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._awaited[tag]
        return answered.result() if answered.done() else None

    async def _take_from(self, pooled: PooledEngine, link: EngineLink, held: messages.Held) -> AdoptedSession:
        """Raises EngineDead if the engine does not answer, or another gateway was faster."""
        adopting: asyncio.Future[AdoptedSession | None] = asyncio.get_running_loop().create_future()
        self._adopting[pooled, held.key] = adopting
        link.send(messages.Adopt("", held.key, held.number))
        try:
            await asyncio.wait((adopting, link.ended), timeout=ANSWER_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if self._adopting.get((pooled, held.key)) is adopting:
                del self._adopting[pooled, held.key]
        if not adopting.done():
            raise EngineDead(f"the engine at {link.address} has not answered")
        adopted_session = adopting.result()
        if adopted_session is None:
            raise EngineDead("the session has just moved; try again in a few seconds")
        return adopted_session

    def _adopt_saved(self, pooled: PooledEngine, adopted: messages.SessionGiven) -> None:
        """At once: the outputs of the stream follow in the same message."""
        asked = self._adopting.get((pooled, adopted.key))
        found = None
        if adopted.number:
            found = self._take(pooled, adopted)
        if asked is not None and not asked.done():
            asked.set_result(found)
        elif found is not None and pooled.link is not None:
            # Nobody waits for it any more. It is left for whoever asks next.
            pooled.link.send(_left_again(adopted))
            if found.stream is not None:
                found.stream.lay_down()

    def _take(self, pooled: PooledEngine, adopted: messages.SessionGiven) -> AdoptedSession:
        given = (adopted.number, adopted.base, adopted.chunks, adopted.entries, pooled.link)
        if not adopted.stream:
            return AdoptedSession(*given)
        stream = self._make_stream(adopted)
        assert pooled.link is not None
        pooled.streams[stream.id] = stream
        goes_on_at = stream.carried_by(pooled.link, adopted)
        return AdoptedSession(*given, stream, goes_on_at, adopted.flushes - adopted.answered)


def handoff_target(stream: EngineStream | None, pool: EnginePool) -> HandoffTarget | None:
    """Where the value of the session with this stream belongs; None if there is no such place at the moment."""
    if stream is not None:
        return stream.target
    link = next(iter(pool.links()), None)
    return None if link is None else HandoffTarget(link)


async def _answers_of(
    asking: Collection[asyncio.Task[messages.Held]], patience_s: float | None = None
) -> list[messages.Held]:
    """What those say who answer with so long between them; when one of them has the session, the others are waited for
    a little while."""
    waiting, answers, timeout = set(asking), list[messages.Held](), patience_s
    while waiting:
        done, waiting = await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        answers += [task.result() for task in done if task.exception() is None]
        if not done:
            break
        if any(held.number for held in answers):
            timeout = OTHERS_SECONDS
    return answers


def _send_renewal(owned: Owned, link: EngineLink, tag: int) -> None:
    link.send(messages.Renew("", owned.key, tag, owned.number))


def _has_session(task: asyncio.Task[messages.Held]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None and task.result().number > 0


def _discard(link: EngineLink, newest: messages.Held, task: asyncio.Task[messages.Held]) -> None:
    """Have an engine forget an older value of a session that goes on with a newer one."""
    if _has_session(task) and (older := task.result()).number < newest.number:
        link.send(messages.DropHandoff("", older.key, older.number))


def _left_again(adopted: messages.SessionGiven) -> messages.SaveHandoff:
    return messages.SaveHandoff(
        adopted.stream,
        adopted.key,
        adopted.number,
        adopted.consumed,
        adopted.entries,
        base=adopted.base,
        keep_s=LEFT_SECONDS,
        position_offset=adopted.position_offset,
        sample_offset=adopted.sample_offset,
        last=True,
    )
