"""All sessions of the gateway: who is admitted, who may resume, who is told to leave.

Admission is decided before a socket is accepted: a refusal costs the client one round trip and the others nothing.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.config import COUNTED_SECONDS
from realtime.config import Config
from realtime.dialects.base import Dialect, SessionFacts
from realtime.errors import CloseCode, Refusal
from realtime.metrics.gateway import Metrics
from realtime.serving.caller import Caller
from realtime.serving.connection import Connection
from realtime.serving.engine_api import EngineApi
from realtime.serving.inbox import Inbox
from realtime.serving.live_session import LiveLimits, LiveSession
from realtime.session.core import Session, SessionLimits
from realtime.session.events import Hangup
from realtime.session.settings import Settings

log = logging.getLogger("tickertape.sessions")

TICK_S = 0.25
RATE_WINDOW_S = 60.0
# Callers whose new sessions are counted; beyond so many in a minute, those that came first are counted anew.
MAX_COUNTED_CALLERS = 10_000


@dataclass(slots=True)
class Entry:
    """One session and, while it has a socket, its connection."""

    live: LiveSession
    inbox: Inbox
    caller: str
    token: str
    started_at: float
    connection: Connection | None = None
    # When the socket went away; the session waits to be resumed.
    left_at: float | None = None
    received_s: float = 0.0
    heard_s: float = 0.0

    def count_audio(self, metrics: Metrics) -> None:
        """Add what came and what was heard since the last call.

        Called now and then, not with every message: a counter costs as much as everything else about a message.
        """
        received_s, heard_s = self.live.session.source_ms / 1000, self.live.session.heard_seconds
        metrics.audio_in.inc(received_s - self.received_s)
        metrics.audio_heard.inc(heard_s - self.heard_s)
        self.received_s, self.heard_s = received_s, heard_s


class Sessions:
    """The registry. One ticker serves every session, so an idle one costs no task of its own."""

    def __init__(
        self,
        engine: EngineApi,
        config: Config,
        metrics: Metrics,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self.engine = engine
        self.draining = False
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._wall_clock = wall_clock
        self._entries: dict[str, Entry] = {}
        self._by_token: dict[str, Entry] = {}
        self._per_caller: Counter[str] = Counter()
        self._arrivals: dict[str, deque[float]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def connected(self) -> int:
        return sum(entry.connection is not None for entry in self._entries.values())

    @property
    def speaking(self) -> int:
        return sum(entry.live.session.speaking for entry in self._entries.values())

    def models(self) -> list[str]:
        names = [self.engine.spec.name, self._config.model.name, *self._config.model.aliases]
        return list(dict.fromkeys(name for name in names if name != "default"))

    # Admission

    def admit(self, caller: Caller, sessions: int = 1) -> None:
        """Raise a Refusal if new sessions of this caller cannot be served well now. Changes nothing but the rate."""
        limits = self._config.limits
        if self.draining:
            raise self._refusal("draining", 503, "server_shutting_down", "The server is restarting.", 5)
        if not self.engine.ready:
            raise self._refusal("not_ready", 503, "engine_not_ready", "The engine is not ready yet.", 5)
        if limits.sessions_per_key and self._per_caller[caller.name] + sessions > limits.sessions_per_key:
            text = f"At most {limits.sessions_per_key} sessions may be open at once."
            raise self._refusal("sessions_per_key", 429, "too_many_sessions", text, 10)
        capacity = self.engine.capacity()
        # Sessions without a stream have yet to send audio. Their places are taken all the same, and while they are
        # new they are expected to speak.
        waiting = [entry for entry in self._entries.values() if not entry.live.has_stream]
        expected = sum(entry.started_at > self._clock() - COUNTED_SECONDS for entry in waiting)
        full = capacity.used + len(waiting) + sessions > capacity.total or expected + sessions > capacity.free
        if full or (limits.max_sessions and len(self._entries) + sessions > limits.max_sessions):
            retry_s = max(1, round(capacity.retry_after_s))
            raise self._refusal("capacity", 503, "server_busy", "The server is at capacity; try again.", retry_s)
        self._count_arrivals(caller, sessions)

    def _count_arrivals(self, caller: Caller, sessions: int) -> None:
        limit = self._config.limits.new_sessions_per_minute
        if not limit:
            return
        now = self._clock()
        if caller.name not in self._arrivals and len(self._arrivals) >= MAX_COUNTED_CALLERS:
            del self._arrivals[next(iter(self._arrivals))]
        recent = self._arrivals.setdefault(caller.name, deque())
        while recent and recent[0] <= now - RATE_WINDOW_S:
            recent.popleft()
        if len(recent) + sessions > limit:
            wait_s = max(1, round(recent[0] + RATE_WINDOW_S - now)) if recent else round(RATE_WINDOW_S)
            text = f"At most {limit} sessions may be opened in a minute."
            raise self._refusal("rate", 429, "rate_limit_exceeded", text, wait_s)
        recent.extend([now] * sessions)

    def _refusal(self, reason: str, status: int, code: str, message: str, retry_s: int) -> Refusal:
        self._metrics.refused.labels(reason).inc()
        kind = "rate_limit_error" if status == 429 else "server_error"
        return Refusal(status, code, message, retry_after_s=retry_s, kind=kind)

    # Life of a session

    def create(self, caller: Caller, settings: Settings, make_dialect: Callable[[SessionFacts], Dialect]) -> Entry:
        """A new session, admitted before."""
        config = self._config
        facts = self.facts()
        session_id, token = facts.session_id, facts.resume_token
        dialect = make_dialect(facts)
        session = Session(
            dialect.start_settings(settings),
            self.engine.spec.sample_rate,
            _counter(f"item_{secrets.token_hex(6)}"),
            SessionLimits(
                stall_seconds=config.session.stall_s,
                keep_seconds=config.session.keep_s,
                max_turn_seconds=config.session.turn_s,
            ),
        )
        limits = LiveLimits(
            max_audio_in_flight_s=config.limits.audio_in_flight_s,
            max_outbox_events=config.limits.outbox_events,
            max_outbox_bytes=config.limits.outbox_characters or config.limits.outbox_bytes,
            max_log_events=config.session.resume_events,
            max_log_bytes=config.session.resume_bytes,
            max_control_bytes=config.limits.control_bytes,
        )
        live = LiveSession(session_id, session, dialect, self.engine, limits, self._metrics, self._clock)
        inbox = Inbox(live, facts, may_inject=config.server.inject and not caller.is_secret)
        entry = Entry(live, inbox, caller.name, token, self._clock())
        self._entries[session_id] = entry
        self._per_caller[caller.name] += 1
        if token:
            self._by_token[token] = entry
        self._metrics.opened.labels(dialect.name).inc()
        return entry

    def facts(self) -> SessionFacts:
        """The facts of one more session."""
        models = self.models()
        resume_s = self._config.session.resume_s
        return SessionFacts(
            session_id=f"sess_{secrets.token_hex(12)}",
            created=int(self._wall_clock()),
            sample_rate=self.engine.spec.sample_rate,
            model=models[0],
            models=frozenset(models),
            new_event_id=_counter(f"event_{secrets.token_hex(6)}"),
            resume_token=f"rt_{secrets.token_urlsafe(24)}" if resume_s else "",
            resume_seconds=int(resume_s),
            gap_seconds=self._config.limits.gap_s,
        )

    def find(self, token: str, caller: Caller) -> Entry:
        """The session a resume token belongs to. Tokens work for the caller they were given to, and for nobody else."""
        entry = self._by_token.get(token)
        if entry is None or entry.caller != caller.name or not entry.live.resumable:
            self._metrics.refused.labels("resume").inc()
            raise Refusal(404, "resume_token_unknown", "There is no session to resume with this token.")
        return entry

    def attach(self, entry: Entry, connection: Connection) -> None:
        """Give a session its socket; a socket it still has is closed: the client has come back on another one."""
        if entry.connection is not None:
            entry.connection.hang_up(Hangup(CloseCode.TAKEN_OVER, "resumed on another connection", "taken_over"))
        entry.connection, entry.left_at = connection, None

    async def detach(self, entry: Entry, connection: Connection) -> None:
        """The socket is gone. A session that can be resumed waits, unless its client said goodbye; any other ends."""
        if entry.connection is not connection:
            return
        entry.connection = None
        may_return = entry.live.resumable and not connection.said_goodbye
        if may_return and self._config.session.resume_s and not self.draining:
            entry.left_at = self._clock()
            return
        await self.end(entry)

    async def end(self, entry: Entry) -> None:
        if self._entries.pop(entry.live.id, None) is None:
            return
        entry.count_audio(self._metrics)
        self._by_token.pop(entry.token, None)
        self._per_caller[entry.caller] -= 1
        if self._per_caller[entry.caller] <= 0:
            del self._per_caller[entry.caller]
        entry.inbox.close()
        await entry.live.close()

    # Time

    async def run_ticker(self) -> None:
        """Tick every session, enforce what depends on time, and measure how late the event loop is."""
        while True:
            due = self._clock() + TICK_S
            await asyncio.sleep(TICK_S)
            self._metrics.loop_lag.observe(max(0.0, self._clock() - due))
            try:
                await self.tick()
            except Exception:
                log.exception("a tick failed; the next one comes all the same")

    async def tick(self) -> None:
        now = self._clock()
        for entry in list(self._entries.values()):
            await self._tick_live(entry)
            if entry.connection is None and entry.left_at is not None:
                if not entry.live.resumable or now - entry.left_at >= self._config.session.resume_s:
                    await self.end(entry)
            else:
                self._check_time(entry, now)
        for name in [name for name, recent in self._arrivals.items() if not recent or recent[-1] < now - RATE_WINDOW_S]:
            del self._arrivals[name]
        self._update_gauges()

    async def _tick_live(self, entry: Entry) -> None:
        """Let time pass for one session. One that fails at it ends, and the others do not notice."""
        try:
            entry.live.tick()
        except Exception:
            log.exception("session %s failed", entry.live.id)
            if entry.connection is not None:
                entry.connection.hang_up(Hangup(CloseCode.INTERNAL, "internal error", "internal"))
            await self.end(entry)

    def _check_time(self, entry: Entry, now: float) -> None:
        limits, connection = self._config.limits, entry.connection
        if connection is None:
            return
        if limits.idle_s and now - connection.last_message_at >= limits.idle_s:
            connection.hang_up(Hangup(CloseCode.POLICY, f"nothing was sent for {limits.idle_s:g} s", "idle"))
        elif limits.session_s and now - entry.started_at >= limits.session_s:
            connection.hang_up(Hangup(CloseCode.POLICY, f"the session lasted {limits.session_s:g} s", "duration"))

    def _update_gauges(self) -> None:
        entries = self._entries.values()
        for entry in entries:
            entry.count_audio(self._metrics)
        self._metrics.sessions.set(len(entries))
        self._metrics.connected.set(self.connected)
        self._metrics.speaking.set(self.speaking)
        self._metrics.queued.set(sum(entry.live.queued_seconds for entry in entries))
        self._metrics.outbox.set(sum(len(entry.live.outbox) for entry in entries))

    # The end

    async def drain(self, seconds: float) -> None:
        """Take no new sessions, let running turns finish for so many seconds, then end what is left."""
        self.draining = True
        deadline = self._clock() + seconds
        for entry in list(self._entries.values()):
            if entry.connection is None:
                await self.end(entry)
            else:
                entry.live.drain(deadline)
        # Turns that are cut off at the deadline still need a moment to come out.
        while self._entries and self._clock() < deadline + 2.0:
            await asyncio.sleep(0.05)
            for entry in list(self._entries.values()):
                await self._tick_live(entry)
        for entry in list(self._entries.values()):
            if entry.connection is not None:
                entry.connection.hang_up(Hangup(CloseCode.RESTART, "the server is restarting", "drain"))
            await self.end(entry)


def _counter(prefix: str) -> Callable[[], str]:
    """Ids that are unique to the process and cheap to make."""
    number = 0

    def next_id() -> str:
        nonlocal number
        number += 1
        return f"{prefix}{number:x}"

    return next_id
