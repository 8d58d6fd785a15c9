"""The registry of all sessions of a gateway: admission, resuming, adoption from other gateways, time limits, drain.

A gateway process has one `Sessions`; every route that opens a session asks it. Admission is decided before a socket is
accepted, so a refusal is an HTTP response. One periodic task, the ticker, serves all sessions. What a single session
does is in `live_session.py`.

If there are several gateways, a `PauseDetector` notices when this process stood still. A process that was stopped
(SIGSTOP), or got no CPU time, does not notice that time has passed. Meanwhile its clients may have resumed at another
gateway: an engine gives a session away if its owner does not answer for `RELEASE_SECONDS`. So after a standstill of
nearly that length the gateway asks the engines which sessions it still owns. Until they answer, it reads nothing from
clients, sends them nothing and resumes no session. Every read and send is checked, because after a standstill any of
them may run before a timer does.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from engine.client.handoff import OwnedSession
from engine.errors import AdoptionFailed, EngineUnavailable
from engine.options import COUNTED_SECONDS
from realtime.config import Config
from realtime.dialects.base import Dialect, SessionFacts
from realtime.errors import CloseCode, IllegalEvent, Refusal, UnreadableValue
from realtime.serving.connection import Connection
from realtime.serving.engine_api import EngineApi
from realtime.serving.quota import Admission, Caller, Figures, LocalQuota, SessionQuota
from realtime.serving.session_factory import GatewayServices, OpenSession, SessionFactory
from realtime.serving.socket_extras import SocketExtras, TextHandler
from realtime.session.events import Configure, Hangup
from realtime.session.settings import Settings

log = logging.getLogger("tickertape.sessions")

# Seconds between two ticks.
TICK_S = 0.25
# Longest pause in seconds between two handoffs of a drain, so that a server with few sessions does not drain slowly.
HANDOFF_PAUSE_S = 0.02
TAKEN_OVER = Hangup(CloseCode.TAKEN_OVER, "resumed on another connection", "taken_over")
RESTARTING = Hangup(CloseCode.RESTART, "the server is restarting", "drain")


@dataclass(slots=True)
class _Adoption:
    """An adoption in progress; `waiting` has one `has_left` for each request that waits for the session."""

    waiting: list[Callable[[], bool]]
    task: asyncio.Task[OpenSession | None] | None = None
    # The highest number with which another process was found to own the session meanwhile.
    fenced: int = 0


class Sessions:
    """The sessions of one gateway, by id. One ticker serves all of them, so an idle session needs no task."""

    def __init__(
        self,
        engine: EngineApi,
        config: Config,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        services: GatewayServices | None = None,
    ) -> None:
        services = services or GatewayServices()
        self.engine = engine
        self.draining = False
        self._config = config
        self._metrics = services.metrics
        self._clock = clock
        self._signer = services.signer
        self._factory = SessionFactory(engine, config, clock, wall_clock, services)
        self._handoff_store = services.handoff_store
        self.entries: dict[str, OpenSession] = {}
        # Adoptions in progress by session id, and tasks that finish the release of sessions to other processes.
        self._adoptions: dict[str, _Adoption] = {}
        self._releases: set[asyncio.Task[None]] = set()
        self.quota: SessionQuota = services.quota or LocalQuota(config.limits, clock)
        # Whether a drain leaves resumable sessions to other processes.
        self.hands_over = False
        self.pause_detector: PauseDetector | None = None
        if self._handoff_store is not None:
            self.pause_detector = PauseDetector(clock, self._handoff_store.confirm)
            handoff_client = self._handoff_store.handoffs
            handoff_client.on_wanted, handoff_client.on_fenced, handoff_client.sessions = (
                self._on_claim,
                self._on_fenced,
                self._owned_handoffs,
            )

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def connected(self) -> int:
        return sum(entry.connection is not None for entry in self.entries.values())

    @property
    def speaking(self) -> int:
        return sum(entry.live.session.speaking for entry in self.entries.values())

    def models(self) -> list[str]:
        return self._factory.models()

    def listed_models(self) -> list[str]:
        return self._factory.listed_models()

    def facts(self) -> SessionFacts:
        """The facts for answers about a session that is not open yet."""
        return self._factory.facts()

    # Admission

    @asynccontextmanager
    async def open(
        self, caller: Caller, settings: Settings, dialects: Sequence[Callable[[SessionFacts], Dialect]]
    ) -> AsyncIterator[tuple[OpenSession, ...]]:
        """Open sessions of this caller, one for each dialect. Raises Refusal if they are not admitted.

        At the end of the block, also after an exception, sessions that never got a socket are ended, and the quota of
        sessions that were not made is released.
        """
        self._check_name(caller, settings)
        admission = Admission(self.quota, caller.name)
        entries: list[OpenSession] = []
        try:
            await self._admit(admission, len(dialects))
            for make_dialect in dialects:
                entry = self._factory.make(caller, settings, make_dialect)
                self._metrics.opened.labels(entry.live.dialect.name).inc()
                entry.admission = admission.part()
                self.entries[entry.live.id] = entry
                entries.append(entry)
            for entry in entries if settings.on_final is not None else ():
                self._send_finals(entry, settings.on_final)
            for entry in entries:
                # A dialect with several channels has a name for each of them.
                if (name := entry.live.session.settings.publish) is not None:
                    await self._publish(entry, name)
            yield tuple(entries)
        finally:
            admission.release()
            await self.end(*(entry for entry in entries if entry.connection is None and entry.left_at is None))

    def _check_name(self, caller: Caller, settings: Settings) -> None:
        """Raise Refusal if a client secret asks for another name or webhook than its own."""
        if caller.settings is not None and settings.publish != caller.settings.publish:
            self._metrics.refused.labels("publish").inc()
            text = "A session of a client secret is published only under the name that its secret was made with."
            raise Refusal(403, "publish_not_allowed", text, param="publish")
        if caller.settings is not None and settings.on_final != caller.settings.on_final:
            self._metrics.refused.labels("webhook").inc()
            text = "A session of a client secret has only the webhook that its secret was made with."
            raise Refusal(403, "webhook_not_allowed", text, param="on_final")

    def _send_finals(self, entry: OpenSession, url: str | None) -> None:
        """Send the finals of a new session to a URL. Raises Refusal."""
        fault = entry.live.webhooks.change(url)
        if fault is not None:
            self._metrics.refused.labels("webhook").inc()
            status = {"webhooks_off": 403, "too_many_webhooks": 429}.get(fault.code, 400)
            raise Refusal(status, fault.code, fault.message, param="on_final")

    async def _publish(self, entry: OpenSession, name: str) -> None:
        """Publish a new session. Raises Refusal."""
        fault = await entry.live.publication.change(name)
        if fault is not None:
            self._metrics.refused.labels("publish").inc()
            status = {"name_taken": 409, "publishing_off": 403}.get(fault.code, 503)
            raise Refusal(status, fault.code, fault.message, param="publish")

    async def _admit(self, admission: Admission, sessions: int) -> None:
        """Count this number of sessions in the quota. Raises Refusal."""
        if self.draining:
            raise self._refusal("draining", 503, "server_shutting_down", "The server is restarting.", 5)
        if not self.engine.ready:
            raise self._refusal("not_ready", 503, "engine_not_ready", "The engine is not ready yet.", 5)
        self._check_capacity(self.quota.others, sessions)
        answer = await admission.enter(sessions)
        limits = self._config.limits
        match answer.reason:
            case "sessions_per_key":
                text = f"At most {limits.sessions_per_key} sessions may be open at once."
                raise self._refusal("sessions_per_key", 429, "too_many_sessions", text, answer.retry_s)
            case "rate":
                text = f"At most {limits.new_sessions_per_minute} sessions may be opened in a minute."
                raise self._refusal("rate", 429, "rate_limit_exceeded", text, answer.retry_s)
            case "capacity":
                raise self._busy()
        self._check_capacity(answer.others, sessions)

    def _check_capacity(self, others: Figures, sessions: int) -> None:
        """Raise Refusal if the engines have no room. A session that has not sent audio yet has no stream, but it needs
        a place in an engine; while it is new it also counts as a speaker."""
        capacity, figures = self.engine.capacity(), self.figures() + others
        places, speakers = capacity.total - capacity.used, capacity.free
        if figures.streamless + sessions > places or figures.waiting + sessions > speakers:
            raise self._busy()

    def _busy(self) -> Refusal:
        # Spread at random, so that clients that were refused at the same time do not all come back at the same time.
        retry_s = max(1, round(self.engine.capacity().retry_after_s * random.uniform(1.0, 2.0)))
        return self._refusal("capacity", 503, "server_busy", "The server is at capacity; try again.", retry_s)

    def figures(self) -> Figures:
        """The figures of this process."""
        entries = self.entries.values()
        streamless = [entry for entry in entries if not entry.live.has_stream]
        waiting = sum(entry.started_at > self._clock() - COUNTED_SECONDS for entry in streamless)
        return Figures(len(entries), self.connected, self.speaking, len(streamless), waiting)

    def all_figures(self) -> Figures:
        """The figures of all processes of the server."""
        return self.figures() + self.quota.others

    def _refusal(self, reason: str, status: int, code: str, message: str, retry_s: int) -> Refusal:
        self._metrics.refused.labels(reason).inc()
        kind = "rate_limit_error" if status == 429 else "server_error"
        return Refusal(status, code, message, retry_after_s=retry_s, kind=kind)

    # Resuming and ending

    async def find(self, token: str, caller: Caller, has_left: Callable[[], bool] = lambda: False) -> OpenSession:
        """The session of a resume token; it is adopted if another process has it. Raises Refusal.

        A token is valid only for the caller that it was given to. A client that `has_left` gets no session, because it
        may have resumed it on another connection since.
        """
        session_id = self._signer.session_of(token, caller.name)
        entry = None
        if session_id is not None:
            try:
                entry = await self._owned_or_adopted(session_id, caller.name, has_left)
            except EngineUnavailable as error:
                # The session may still exist in an engine that does not answer: not 410.
                raise self._refusal(
                    "not_ready", 503, "engine_not_ready", "The engine of this session does not answer; try again.", 1
                ) from error
            if has_left():
                raise self._refusal("left", 503, "client_left", "The connection was closed; try again.", 1)
        if entry is None or not entry.live.resumable:
            if session_id is not None and self._handoff_store is not None and self.draining:
                # The session may be on its way to another process: not 410.
                raise self._refusal("draining", 503, "server_shutting_down", "The server is restarting.", 1)
            self._metrics.refused.labels("resume").inc()
            if session_id is not None and self._handoff_store is not None:
                raise Refusal(410, "session_gone", "This session is over; start a new one.")
            raise Refusal(404, "resume_token_unknown", "There is no session to resume with this token.")
        return entry

    def attach(self, entries: Sequence[OpenSession], connection: Connection) -> None:
        """Give sessions their connection. A connection that a session still has is closed with `TAKEN_OVER`."""
        for entry in entries:
            if entry.connection is not None:
                entry.connection.hang_up(TAKEN_OVER)
            entry.connection, entry.left_at = connection, None

    async def detach(self, entries: Sequence[OpenSession], connection: Connection) -> None:
        """The socket is closed. A resumable session waits for its client unless that closed with 1000; others end."""
        ended = []
        for entry in entries:
            if entry.connection is not connection:
                continue
            entry.connection = None
            may_return = entry.live.resumable and not connection.closed_normally
            # During a drain a session waits only if it can be handed off.
            if may_return and self._config.session.resume_s and (not self.draining or self.hands_over):
                entry.left_at = self._clock()
            else:
                ended.append(entry)
        await self.end(*ended)

    async def end(self, *entries: OpenSession) -> None:
        """End sessions. All of them are removed and stopped before the first await, so that a cancellation cannot leave
        one of them running."""
        ended = [entry for entry in entries if self._remove(entry)]
        for entry in ended:
            if entry.live.handoff is not None:
                entry.live.handoff.end()
            entry.live.stop()
        for entry in ended:
            await entry.live.close()

    def _remove(self, entry: OpenSession) -> bool:
        if self.entries.pop(entry.live.id, None) is None:
            return False
        if entry.admission is not None:
            entry.admission.release()
        entry.live.publication.close()
        entry.live.webhooks.close(entry.live.session.source_ms / 1000)
        entry.count_audio(self._metrics)
        entry.inbox.close()
        return True

    # Handoff between processes

    async def _owned_or_adopted(self, session_id: str, caller: str, has_left: Callable[[], bool]) -> OpenSession | None:
        """The session of this process if it still owns it; else the session is adopted. Raises EngineUnavailable."""
        if self._handoff_store is None or self.draining:
            return self.entries.get(session_id)
        assert self.pause_detector is not None
        await self.pause_detector.wait_for_ownership()
        entry = self.entries.get(session_id)
        if entry is not None and entry.live.resumable and (handoff := entry.live.handoff) is not None:
            # Another gateway may have adopted it without our knowing yet, or may claim it at this moment.
            if not await handoff.renew():
                self._on_fenced(session_id, handoff.number + 1)
        entry = self.entries.get(session_id)
        return entry if entry is not None else await self._adopt_saved(session_id, caller, has_left)

    async def _adopt_saved(self, session_id: str, caller: str, has_left: Callable[[], bool]) -> OpenSession | None:
        """Adopt a session of another process. Concurrent requests for the same session share one adoption."""
        adoption = self._adoptions.get(session_id)
        if adoption is None:
            self._adoptions[session_id] = adoption = _Adoption([has_left])
            adoption.task = asyncio.create_task(self._adopt(session_id, caller, adoption), name=f"adopt {session_id}")
            adoption.task.add_done_callback(lambda _: self._adoptions.pop(session_id, None))
        else:
            adoption.waiting.append(has_left)
        assert adoption.task is not None
        return await asyncio.shield(adoption.task)

    async def _adopt(self, session_id: str, caller: str, adoption: _Adoption) -> OpenSession | None:
        assert self._handoff_store is not None
        adopted = await self._handoff_store.adopt(
            session_id, lambda: not all(has_left() for has_left in adoption.waiting)
        )
        if adopted is None:
            return None
        if adoption.fenced > adopted.owner_number:
            # This process was stopped between the two messages of the engine.
            if adopted.stream is not None:
                adopted.stream.abort_everywhere()
            raise AdoptionFailed("another gateway has just adopted the session; try again in a few seconds")
        try:
            entry = self._factory.adopt(session_id, caller, adopted)
        except Exception as error:
            if adopted.stream is not None:
                await adopted.stream.abort()
            if not isinstance(error, UnreadableValue | IllegalEvent):
                raise
            log.error("session %s cannot be adopted: %s", session_id, error)
            return None
        # Until its client is attached, it waits like a session whose client has left.
        entry.left_at = self._clock()
        entry.admission = Admission(self.quota, caller)
        self.entries[session_id] = entry
        entry.admission.enter_again()
        await self._publish_again(entry)
        self._send_finals_again(entry)
        return entry

    async def _publish_again(self, entry: OpenSession) -> None:
        """Continue to publish an adopted session. If another session has its name, its client is told that it is not
        published any more."""
        live = entry.live
        fault = await live.publication.change(live.session.settings.publish)
        if fault is not None:
            log.warning("session %s is not published any more: %s", live.id, fault.message)
            live.submit(Configure(replace(live.session.settings, publish=None)))

    def _send_finals_again(self, entry: OpenSession) -> None:
        """Continue to send the finals of an adopted session to the URL that its client has named."""
        live = entry.live
        fault = live.webhooks.change(live.session.settings.on_final)
        if fault is not None:
            log.warning("session %s has no webhook any more: %s", live.id, fault.message)
            live.submit(Configure(replace(live.session.settings, on_final=None)))

    def _owned_handoffs(self) -> list[OwnedSession]:
        """The handoffs that engines have from this process."""
        handoffs = [entry.live.handoff for entry in self.entries.values() if entry.live.resumable]
        return [owned for handoff in handoffs if handoff is not None and (owned := handoff.owned) is not None]

    def _on_claim(self, session_id: str, number: int) -> bool:
        """Another process claims a session, because its client resumes there. Returns whether the claim is for an
        outdated copy.

        After a standstill nothing is given up until the owners are known: the claim may have come over a connection
        that is lost by now, and the last save would be lost too. The engine uses the copy it has, or asks again.
        """
        entry = self.entries.get(session_id)
        if (
            entry is None
            or entry.live.handoff is None
            or (self.pause_detector is not None and self.pause_detector.ownership_is_unknown)
        ):
            return False
        if entry.live.handoff.number > number:
            return True
        if _can_be_saved(entry):
            self._save_and_release(entry, TAKEN_OVER)
        return False

    def _save_and_release(self, entry: OpenSession, hangup: Hangup) -> None:
        """Save a session for the last time and release it. Without an await: it must not change after the last save."""
        handoff = entry.live.handoff
        assert handoff is not None
        entry.inbox.submit_all_pending()
        handoff.send_last_save()
        self._release(entry, hangup)

    def _on_fenced(self, session_id: str, number: int) -> None:
        """Another process owns a session with this number: if it is higher than ours, the session ends here."""
        entry, adoption = self.entries.get(session_id), self._adoptions.get(session_id)
        if adoption is not None:
            adoption.fenced = max(adoption.fenced, number)
        if entry is not None and entry.live.handoff is not None and entry.live.handoff.number < number:
            log.warning("session %s was taken over by another process; it ends here", session_id)
            entry.live.handoff.end()
            self._release(entry, TAKEN_OVER, is_fenced=True)

    def _release(self, entry: OpenSession, hangup: Hangup, is_fenced: bool = False) -> None:
        entry.live.publication.close(moves=True)
        entry.live.webhooks.close(0.0, moves=True)
        self._remove(entry)
        entry.is_released = True
        entry.live.release(is_fenced)
        releasing = asyncio.create_task(self._finish_release(entry, hangup), name=f"leave {entry.live.id}")
        self._releases.add(releasing)
        releasing.add_done_callback(self._releases.discard)

    async def _finish_release(self, entry: OpenSession, hangup: Hangup) -> None:
        # The last save leaves before the client is disconnected and resumes elsewhere.
        assert entry.live.handoff is not None
        try:
            await entry.live.handoff.wait_until_sent()
        except Exception:
            log.exception("the last save of session %s failed; the session is released nevertheless", entry.live.id)
        finally:
            # Also if the save has failed: the client must not stay on a socket that nothing serves.
            if entry.connection is not None:
                entry.connection.hang_up(hangup)
            await entry.live.close()

    # The ticker

    async def run_ticker(self) -> None:
        """Tick every session, enforce time limits, and measure the lag of the event loop; runs until cancelled."""
        while True:
            due = self._clock() + TICK_S
            await asyncio.sleep(TICK_S)
            self._metrics.loop_lag.observe(max(0.0, self._clock() - due))
            try:
                if self.pause_detector is not None:
                    self.pause_detector.tick()
                await self.tick()
            except Exception:
                log.exception("a tick of the session registry failed; the ticker continues")

    async def tick(self) -> None:
        now = self._clock()
        ownership_is_unknown = self.pause_detector is not None and self.pause_detector.ownership_is_unknown
        for entry in [] if ownership_is_unknown else list(self.entries.values()):
            await self._tick_live(entry)
            if entry.connection is None and entry.left_at is not None:
                if not entry.live.resumable or now - entry.left_at >= self._config.session.resume_s:
                    await self.end(entry)
            else:
                self._check_time(entry, now)
        self.quota.tick(self.figures())
        self._update_gauges()

    async def _tick_live(self, entry: OpenSession) -> None:
        """Tick one session. If that raises, the session ends and the others are not affected."""
        try:
            entry.live.tick()
        except Exception:
            log.exception("session %s failed", entry.live.id)
            if entry.connection is not None:
                entry.connection.hang_up(Hangup(CloseCode.INTERNAL, "internal error", "internal"))
            await self.end(entry)

    def _check_time(self, entry: OpenSession, now: float) -> None:
        limits, connection = self._config.limits, entry.connection
        if connection is None:
            return
        if limits.idle_s and now - connection.last_message_at >= limits.idle_s:
            connection.hang_up(Hangup(CloseCode.POLICY, f"nothing was sent for {limits.idle_s:g} s", "idle"))
        elif limits.session_s and now - entry.started_at >= limits.session_s:
            connection.hang_up(Hangup(CloseCode.POLICY, f"the session lasted {limits.session_s:g} s", "duration"))

    def _update_gauges(self) -> None:
        entries = self.entries.values()
        for entry in entries:
            entry.count_audio(self._metrics)
        self._metrics.sessions.set(len(entries))
        self._metrics.connected.set(self.connected)
        self._metrics.speaking.set(self.speaking)
        self._metrics.queued.set(sum(entry.live.queued_seconds for entry in entries))
        self._metrics.outbox.set(sum(len(entry.live.outbox) for entry in entries))

    # Drain

    async def drain(self, seconds: float) -> None:
        """Admit no new sessions, hand off resumable sessions, let turns finish within this time, then end the rest."""
        # 1. Sessions that cannot be handed off finish their turns.
        self.draining = True
        deadline = self._clock() + seconds
        movable: list[OpenSession] = []
        staying: list[OpenSession] = []
        for entry in self.entries.values():
            (movable if self.hands_over and _can_move(entry) else staying).append(entry)
        for entry in staying:
            if entry.connection is None:
                await self.end(entry)
            else:
                entry.live.drain(deadline)
        # 2. The others are handed off.
        await self._hand_over(movable, deadline)
        await asyncio.gather(*self._releases, return_exceptions=True)
        # 3. Wait for the turns; those cut off at the deadline get 2 s for their last text.
        while self.entries and self._clock() < deadline + 2.0:
            await asyncio.sleep(0.05)
            for entry in list(self.entries.values()):
                await self._tick_live(entry)
        # 4. End what is left.
        for entry in list(self.entries.values()):
            if self.hands_over and _can_move(entry):
                # Its adoption was in progress when the drain began.
                self._save_and_release(entry, RESTARTING)
                continue
            if entry.connection is not None:
                entry.connection.hang_up(RESTARTING)
            await self.end(entry)
        await asyncio.gather(*self._releases, return_exceptions=True)

    async def _hand_over(self, entries: list[OpenSession], deadline: float) -> None:
        """Hand off sessions one after the other, so that their clients do not all reconnect at once. A session that is
        migrating between engines is waited for."""
        pause_s = min(self._config.server.drain_spread_s / max(1, len(entries)), HANDOFF_PAUSE_S)
        for entry in entries:
            while _can_move(entry) and not _can_be_saved(entry) and self._clock() < deadline:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            if entry.live.id in self.entries and _can_move(entry):
                self._save_and_release(entry, RESTARTING)
            await asyncio.sleep(pause_s)


def _can_move(entry: OpenSession) -> bool:
    return entry.live.resumable and entry.live.handoff is not None


def _can_be_saved(entry: OpenSession) -> bool:
    return entry.live.handoff is not None and entry.live.handoff.can_be_saved


# Standstills of this process


# Seconds between two ticks that count as a standstill: less than the time after which engines take a session from an
# owner that does not answer, and more than the lag of a busy event loop.
STANDSTILL_S = 0.75

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class PauseDetector:
    """Notices a standstill by the time between two ticks of the ticker, from the first tick on. `confirm` asks the
    engines which sessions are still ours."""

    def __init__(self, clock: Callable[[], float], confirm: Callable[[], Awaitable[None]]) -> None:
        self._clock = clock
        self._confirm = confirm
        self._ticked_at: float | None = None
        # Whether there was a standstill after the engines were last asked.
        self._must_ask = False
        self._asking: asyncio.Task[None] | None = None
        self._over = asyncio.Event()

    @property
    def ownership_is_unknown(self) -> bool:
        """Whether another process may own some of our sessions by now."""
        return self._asking is not None or self._is_late(self._clock())

    async def wait_for_ownership(self) -> None:
        """Wait until the engines have said which sessions are still ours."""
        while self.ownership_is_unknown:
            self._over.clear()
            await self._over.wait()

    def tick(self) -> None:
        """Called by the ticker; starts to ask the engines if the last call was too long ago."""
        now = self._clock()
        if self._is_late(now):
            assert self._ticked_at is not None
            log.warning(
                "this process stood still for %.1f s; asking the engines which sessions it still owns",
                now - self._ticked_at,
            )
            self._must_ask = True
            if self._asking is None:
                self._asking = asyncio.create_task(self._ask(), name="whose sessions")
        self._ticked_at = now

    def guard(
        self, receive: Receive, send: Send, extras: SocketExtras, is_ours: Callable[[], bool]
    ) -> tuple[Receive, Send, SocketExtras]:
        """Wrap a socket so that reads and sends wait while the owner of its session is not known; closing does not
        wait.

        Messages of a session that is not ours any more are dropped: the new owner sends them.
        """

        async def receive_guarded() -> Message:
            message = await receive()
            if self.ownership_is_unknown:
                await self.wait_for_ownership()
            return message

        async def send_guarded(message: Message) -> None:
            if message["type"] == "websocket.send":
                if self.ownership_is_unknown:
                    await self.wait_for_ownership()
                if not is_ours():
                    return
            await send(message)

        def send_now(text: str) -> bool:
            return not self.ownership_is_unknown and is_ours() and extras.send_now(text)

        def offer_to(handler: TextHandler) -> None:
            extras.offer_to(lambda text: not self.ownership_is_unknown and handler(text))

        return receive_guarded, send_guarded, replace(extras, send_now=send_now, offer_to=offer_to)

    def _is_late(self, now: float) -> bool:
        return self._ticked_at is not None and now - self._ticked_at > STANDSTILL_S

    async def _ask(self) -> None:
        try:
            while self._must_ask:
                self._must_ask = False
                await self._confirm()
                # Another standstill after the engines answered makes their answers worthless.
                self._must_ask = self._must_ask or self._is_late(self._clock())
        except Exception:
            log.exception("the engines could not be asked which sessions this process still owns")
        finally:
            self._asking = None
            self._over.set()
