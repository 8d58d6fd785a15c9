"""The gateway's side of session handoff: adopts sessions of other gateways, and tells engines which ones it owns.

A handoff lets a client continue its session at another gateway, for instance after its own was restarted. Each gateway
stores the state of its sessions on the engines (`engine/server/handoff.py`): on the engine that runs the session's
stream or, while it has none, on any. `HandoffClient`, a part of `EngineClient`, asks all engines for a session and
adopts it with its stream. It keeps unanswered questions, adoptions that have not ended, and the sessions that have
ended. The sessions themselves belong to the gateway's registry, which it asks through the callback `sessions`. What the
state contains is decided in `realtime/serving/handoff.py`. A session has an owner number that rises with every
adoption; engines refuse commands with a lower number and answer their sender with `Fenced`.
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
from engine.errors import AdoptionFailed, EngineUnreachable

# How long to wait for an engine's answer. It may first ask the former owner (a second) or be in a long step.
ANSWER_SECONDS = 20.0
# How long to wait for the other engines once one has answered that it has the session. Another one may have an older
# copy, and before it answers, it asks the owner of that copy and waits a second for the answer.
OTHERS_SECONDS = 1.5
# An engine that was lost or listed within this time may still connect and have the session.
UNSURE_SECONDS = 10.0
# How long a gateway whose process was stopped (SIGSTOP) and continued waits for the engines' answers.
CONFIRM_SECONDS = 5.0
# How often that gateway checks whether a lost engine is connected again.
LINK_POLL_SECONDS = 0.05
# How long an engine keeps a session for the next adoption after this gateway's client left during the adoption.
ABANDONED_SECONDS = 60.0

# Ended sessions that a lost engine may still have a copy of: how long they are remembered, and how many.
ENDED_SECONDS = 600.0
MAX_ENDED = 10_000

HandoffAnswer = messages.Held | messages.Renewed | messages.Claimed


@dataclass(frozen=True, slots=True)
class OwnedSession:
    """A session of this gateway."""

    key: str
    owner_number: int
    # The link to the engine that has the session's saved state; None if no engine has it.
    link: EngineLink | None


@dataclass(frozen=True, slots=True)
class AdoptedSession:
    """A session adopted from another gateway. `owner_number` is new and higher than any before.

    If the session had a stream, audio has to be fed from the stream's sample `goes_on_at` on, and `flushes` of its
    flushes are unanswered.
    """

    owner_number: int
    # The saved state, in the encoding of `realtime/serving/handoff.py`.
    base: bytes
    chunks: list[bytes]
    entries: list[bytes]
    # The link to the engine that has the saved state.
    link: EngineLink | None = None
    stream: EngineStream | None = None
    goes_on_at: int = 0
    flushes: int = 0


class HandoffClient:
    """Questions about sessions to all engines, and their answers. A part of `EngineClient`.

    `make_stream` makes the gateway's object for a stream that already runs on an engine.
    """

    def __init__(self, make_stream: Callable[[messages.SessionGiven], EngineStream]) -> None:
        # Called when another gateway asks for a session of ours: returns True if the engine's copy is outdated.
        self.on_wanted: Callable[[str, int], bool] | None = None
        # Called with (key, owner number) when another gateway owns a session.
        self.on_fenced: Callable[[str, int], None] | None = None
        # Returns all sessions that this gateway owns.
        self.sessions: Callable[[], Iterable[OwnedSession]] | None = None
        self._make_stream = make_stream
        self._tags = 0
        # Pending answers by tag, and pending adoptions.
        self._awaited: dict[int, asyncio.Future[HandoffAnswer]] = {}
        self._adopting: dict[tuple[PooledEngine, str], asyncio.Future[AdoptedSession | None]] = {}
        # Sessions that have ended or moved to another engine, the oldest first: (owner number up to which copies are
        # useless, time).
        self.ended: dict[str, tuple[int, float]] = {}

    def on_output(self, pooled: PooledEngine, output: messages.SessionOutput) -> None:
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
                self._on_session_given(pooled, output)

    # Sessions of this gateway.

    def claim(self, pooled: PooledEngine) -> None:
        """Send a newly connected engine the keys of our sessions; it answers which of them others have adopted.

        An engine that was lost may have copies of sessions that have ended since, and gets commands to drop them.
        """
        assert pooled.link is not None
        self._send_claim(pooled.link, 0)
        now = asyncio.get_running_loop().time()
        self.ended = {key: (number, time) for key, (number, time) in self.ended.items() if now - time <= ENDED_SECONDS}
        for key, (number, _) in self.ended.items():
            pooled.link.send(messages.DropHandoff("", key, number))

    def note_ended(self, key: str, number: int) -> None:
        """Remember that copies of a session up to this number are useless: a lost engine may come back with one."""
        self.ended.pop(key, None)
        self.ended[key] = (number, asyncio.get_running_loop().time())
        if len(self.ended) > MAX_ENDED:
            del self.ended[next(iter(self.ended))]

    async def confirm(self, pool: EnginePool) -> None:
        """Wait until every engine has answered which of our sessions others have adopted, at most `CONFIRM_SECONDS`.

        For a gateway whose process was stopped and continued. Engines that were lost a short time ago are waited for,
        too.
        """
        now = asyncio.get_running_loop().time()
        waited_for = [
            pooled for pooled in pool.all if pooled.link is not None or now - pooled.state_since < UNSURE_SECONDS
        ]
        with suppress(TimeoutError):
            async with asyncio.timeout(CONFIRM_SECONDS):
                await asyncio.gather(*map(self._confirm_at, waited_for))

    async def _confirm_at(self, pooled: PooledEngine) -> None:
        while True:
            link = pooled.link
            if link is not None and await self._answer(link, self._send_claim) is not None:
                return
            await asyncio.sleep(LINK_POLL_SECONDS)

    def _send_claim(self, link: EngineLink, tag: int) -> None:
        claims = []
        for session in [] if self.sessions is None else self.sessions():
            is_elsewhere = session.link not in (None, link)
            claims.append((session.key, session.owner_number, is_elsewhere))
        link.send(messages.Claim("", tag, claims))

    # Sessions of other gateways.

    async def renew(self, pool: EnginePool, owned: OwnedSession) -> int:
        """The client of a session of ours has come back: raise the owner number, so that adoptions that began before
        fail.

        Without an engine that has the saved state, the number stays the same.

        Returns the new number; 0 if another gateway has adopted the session. Raises EngineUnreachable if the engine
        that has the session's saved state does not answer.
        """
        links = {
            pooled: pooled.link for pooled in pool.all if pooled.link is not None and pooled.link is not owned.link
        }
        asking = self._ask_all(links, owned.key)
        number = owned.owner_number
        if owned.link is not None:
            renewed = await self._answer(owned.link, partial(_send_renewal, owned))
            if not isinstance(renewed, messages.Renewed):
                raise EngineUnreachable(f"the engine at {owned.link.address} has not answered")
            number = renewed.owner_number
        others = await _answers_of(asking.values(), OTHERS_SECONDS)
        for task in asking.values():
            task.cancel()
        return 0 if any(held.owner_number > number for held in others) else number

    async def adopt(
        self, pool: EnginePool, key: str, is_wanted: Callable[[], bool] = lambda: True
    ) -> AdoptedSession | None:
        """Adopt the session from the engine that has its newest saved state; None if no engine has it.

        Raises EngineUnreachable if an engine that may have it does not answer, AdoptionFailed if it cannot be adopted
        at the moment.

        `is_wanted` is called last before the adoption. If another gateway adopts the session after this call, the
        session's owner number has risen, and the engine refuses our adoption.
        """
        # Spares too: a spare of this gateway may be in use by the gateway that had the session.
        links = {pooled: pooled.link for pooled in pool.all if pooled.link is not None}
        asking = self._ask_all(links, key)
        answers = await _answers_of(asking.values())
        found = {pooled: task.result() for pooled, task in asking.items() if _has_session(task)}
        if not found:
            now = asyncio.get_running_loop().time()
            # An engine that connected meanwhile has not been asked.
            unsure = [
                pooled for pooled in pool.all if pooled not in links and now - pooled.state_since < UNSURE_SECONDS
            ]
            if len(answers) < len(links) or unsure or not links:
                raise EngineUnreachable("not all engines have answered; try again in a few seconds")
            return None
        # An engine from which the session has moved away knows its owner number but does not have its state.
        holder = max(found, key=lambda pooled: (found[pooled].owner_number, found[pooled].whole))
        newest = found[holder]
        if not newest.whole:
            raise AdoptionFailed("the gateway that has the session is just coming back; try again in a few seconds")
        if not is_wanted():
            raise AdoptionFailed("the client of the session has gone")
        adopted_session = await self._adopt_from(holder, links[holder], newest)
        for pooled, task in asking.items():
            if pooled is not holder:
                task.add_done_callback(partial(_discard, links[pooled], newest))
        return adopted_session

    def _ask_all(
        self, links: Mapping[PooledEngine, EngineLink], key: str
    ) -> dict[PooledEngine, asyncio.Task[messages.Held]]:
        asking = {pooled: asyncio.create_task(self._ask(link, key)) for pooled, link in links.items()}
        for task in asking.values():
            # Retrieves the exception of a task that is no longer awaited, so that asyncio does not log it.
            task.add_done_callback(_has_session)
        return asking

    async def _ask(self, link: EngineLink, key: str) -> messages.Held:
        """Whether the engine has the session. Raises EngineUnreachable if it does not answer."""
        held = await self._answer(link, lambda link, tag: link.send(messages.Ask("", key, tag)))
        if not isinstance(held, messages.Held):
            raise EngineUnreachable(f"the engine at {link.address} has not answered")
        return held

    async def _answer(self, link: EngineLink, send: Callable[[EngineLink, int], None]) -> HandoffAnswer | None:
        """Send a question with a new tag; returns the answer, or None if the link ends or `ANSWER_SECONDS` pass
        first."""
        self._tags += 1
        tag, answered = self._tags, asyncio.get_running_loop().create_future()
        self._awaited[tag] = answered
        send(link, tag)
        try:
            await asyncio.wait((answered, link.ended), timeout=ANSWER_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._awaited[tag]
        return answered.result() if answered.done() else None

    async def _adopt_from(self, pooled: PooledEngine, link: EngineLink, held: messages.Held) -> AdoptedSession:
        """Adopt the session from this engine. Raises EngineUnreachable if the engine does not answer, AdoptionFailed if
        another gateway has adopted the session first."""
        adopting: asyncio.Future[AdoptedSession | None] = asyncio.get_running_loop().create_future()
        self._adopting[pooled, held.key] = adopting
        link.send(messages.Adopt("", held.key, held.owner_number))
        try:
            await asyncio.wait((adopting, link.ended), timeout=ANSWER_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if self._adopting.get((pooled, held.key)) is adopting:
                del self._adopting[pooled, held.key]
        if not adopting.done():
            raise EngineUnreachable(f"the engine at {link.address} has not answered")
        adopted_session = adopting.result()
        if adopted_session is None:
            raise AdoptionFailed("another gateway has just adopted the session; try again in a few seconds")
        return adopted_session

    def _on_session_given(self, pooled: PooledEngine, adopted: messages.SessionGiven) -> None:
        """Handle `SessionGiven`. It must run synchronously: the stream's outputs follow in the same message."""
        asked = self._adopting.get((pooled, adopted.key))
        session = self._build_session(pooled, adopted) if adopted.owner_number else None
        if asked is not None and not asked.done():
            asked.set_result(session)
        elif session is not None and pooled.link is not None:
            # The adoption was cancelled. Save the session again for the next adoption.
            pooled.link.send(_save_again(adopted))
            if session.stream is not None:
                session.stream.release()

    def _build_session(self, pooled: PooledEngine, adopted: messages.SessionGiven) -> AdoptedSession:
        given = (adopted.owner_number, adopted.base, adopted.chunks, adopted.entries, pooled.link)
        if not adopted.stream:
            return AdoptedSession(*given)
        stream = self._make_stream(adopted)
        assert pooled.link is not None
        pooled.streams[stream.id] = stream
        goes_on_at = stream.adopt_from(pooled.link, adopted)
        return AdoptedSession(*given, stream, goes_on_at, adopted.flushes - adopted.answered)


def handoff_target(stream: EngineStream | None, pool: EnginePool) -> HandoffTarget | None:
    """The engine that keeps the saved state of a session with this stream; None if there is none at the moment."""
    if stream is not None:
        return stream.target
    link = next(iter(pool.links()), None)
    return None if link is None else HandoffTarget(link)


async def _answers_of(
    asking: Collection[asyncio.Task[messages.Held]], patience_s: float | None = None
) -> list[messages.Held]:
    """Collect answers until none comes for `patience_s`; once an engine has the session, for `OTHERS_SECONDS`."""
    waiting, answers, timeout = set(asking), list[messages.Held](), patience_s
    while waiting:
        done, waiting = await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        answers += [task.result() for task in done if task.exception() is None]
        if not done:
            break
        if any(held.owner_number for held in answers):
            timeout = OTHERS_SECONDS
    return answers


def _send_renewal(owned: OwnedSession, link: EngineLink, tag: int) -> None:
    link.send(messages.Renew("", owned.key, tag, owned.owner_number))


def _has_session(task: asyncio.Task[messages.Held]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None and task.result().owner_number > 0


def _discard(link: EngineLink, newest: messages.Held, task: asyncio.Task[messages.Held]) -> None:
    """Make an engine drop a saved state of the session that is older than the adopted one."""
    if _has_session(task) and (older := task.result()).owner_number < newest.owner_number:
        link.send(messages.DropHandoff("", older.key, older.owner_number))


def _save_again(adopted: messages.SessionGiven) -> messages.SaveHandoff:
    return messages.SaveHandoff(
        adopted.stream,
        adopted.key,
        adopted.owner_number,
        adopted.consumed,
        adopted.entries,
        base=adopted.base,
        keep_s=ABANDONED_SECONDS,
        position_offset=adopted.position_offset,
        sample_offset=adopted.sample_offset,
        last=True,
    )
