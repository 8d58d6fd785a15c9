"""What a gateway has around it, beside its engine and its configuration."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from engine.client.handoff import AdoptedSession
from realtime.config import Config
from realtime.dialects.base import Dialect, SessionFacts
from realtime.dialects.openai import BetaDialect, OpenAIDialect
from realtime.dialects.vllm import VllmDialect
from realtime.errors import UnreadableValue
from realtime.metrics.gateway import Metrics
from realtime.serving.connection import Connection
from realtime.serving.engine_api import EngineApi
from realtime.serving.handoff import (
    LIVE_VERSION,
    HandoffSettings,
    HandoffStore,
    SavedLive,
    SessionHandoff,
    decode_entry,
    decode_frames,
    decode_live,
    encode_frames,
    encode_live,
    named,
    plain,
)
from realtime.serving.inbox import Inbox
from realtime.serving.live_session import LiveLimits, LiveSession
from realtime.serving.quota import Admission, Caller, SessionQuota
from realtime.serving.tokens import Signer
from realtime.session.core import Session, SessionLimits
from realtime.session.settings import Settings


@dataclass(frozen=True, slots=True)
class GatewayServices:
    """A gateway that is alone needs none of it said.

    `heirs`: other gateways may go on with its sessions, and it with theirs; they share the signer's secret. `house`:
    who counts the sessions of all.
    """

    metrics: Metrics = field(default_factory=Metrics)
    signer: Signer = field(default_factory=Signer)
    claimants: HandoffStore | None = None
    quota: SessionQuota | None = None


# Ids that are unique and cheap to make, and can be gone on with elsewhere.


@dataclass(slots=True)
class Ids:
    """The next one is the prefix and the next number."""

    prefix: str
    number: int = 0

    @classmethod
    def anew(cls, name: str) -> Ids:
        """Nobody else has this prefix."""
        return cls(f"{name}_{secrets.token_hex(6)}")

    def __call__(self) -> str:
        self.number += 1
        return f"{self.prefix}{self.number:x}"


# Makes sessions: new ones, and those that another process began.

log = logging.getLogger("tickertape.sessions")

# Dialects of sessions that can be resumed, and so be gone on with elsewhere.
RESUMABLE: dict[str, Callable[[SessionFacts], Dialect]] = {
    kind.name: kind for kind in (OpenAIDialect, BetaDialect, VllmDialect)
}


@dataclass(slots=True)
class OpenSession:
    """One session and, while it has a socket, its connection."""

    live: LiveSession
    inbox: Inbox
    caller: str
    facts: SessionFacts
    item_ids: Ids
    started_at: float
    # Its part of what is counted; the registry gives it, and has it released when the session ends.
    admission: Admission | None = None
    connection: Connection | None = None
    # When the socket went away; the session waits to be resumed.
    left_at: float | None = None
    received_s: float = 0.0
    heard_s: float = 0.0
    # The last frame that its will has.
    handed_off: int = 0
    # Another process has it, or whoever adopts it: nothing of it is told here any more.
    is_let_go: bool = False

    def count_audio(self, metrics: Metrics) -> None:
        """Add what came and what was heard since the last call.

        Called now and then, not with every message: a counter costs as much as everything else about a message.
        """
        received_s, heard_s = self.live.session.source_ms / 1000, self.live.session.heard_seconds
        metrics.audio_in.inc(max(0.0, received_s - self.received_s))
        metrics.audio_heard.inc(max(0.0, heard_s - self.heard_s))
        self.received_s, self.heard_s = received_s, heard_s


class SessionFactory:
    """Of one gateway. Where it has heirs, its sessions leave their wills with them."""

    def __init__(
        self,
        engine: EngineApi,
        config: Config,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        around: GatewayServices,
    ) -> None:
        self._engine = engine
        self._config = config
        self._metrics = around.metrics
        self._clock = clock
        self._wall_clock = wall_clock
        self._signer = around.signer
        self._claimants = around.claimants

    def models(self) -> list[str]:
        """All names that a client may ask for."""
        return list(dict.fromkeys((*self._own_names(), *self._config.model.aliases)))

    def listed_models(self) -> list[str]:
        """Those that name the model that is served. `publisher/model` names a published model, which may be another."""
        own = self._own_names()
        known = {_bare(name) for name in own}
        aliases = [name for name in self._config.model.aliases if "/" not in name or _bare(name) in known]
        return list(dict.fromkeys((*own, *aliases)))

    def _own_names(self) -> list[str]:
        names = (self._engine.spec.name, self._config.model.name)
        return [name for name in names if name != "default"]

    def facts(self, caller: str = "", session_id: str | None = None, created: int | None = None) -> SessionFacts:
        """The facts of one more session, or of one that was begun elsewhere."""
        models, resume_s = self.models(), self._config.session.resume_s
        session_id = session_id or f"sess_{secrets.token_hex(12)}"
        return SessionFacts(
            session_id=session_id,
            created=int(self._wall_clock()) if created is None else created,
            sample_rate=self._engine.spec.sample_rate,
            model=models[0],
            models=frozenset(models),
            # Of events without a number: each process that has the session makes ids of its own.
            new_event_id=Ids.anew("event"),
            resume_token=self._signer.resume_token(session_id, caller) if resume_s else "",
            resume_seconds=int(resume_s),
            gap_seconds=self._config.limits.gap_s,
        )

    def make(self, caller: Caller, settings: Settings, make_dialect: Callable[[SessionFacts], Dialect]) -> OpenSession:
        facts = self.facts(caller.name)
        dialect = make_dialect(facts)
        may_inject = self._config.server.inject and not caller.is_secret
        start = dialect.start_settings(settings)
        return self._entry(facts, dialect, start, caller.name, may_inject, Ids.anew("item"), 1)

    def go_on(self, session_id: str, caller: str, adopted: AdoptedSession) -> OpenSession:
        """A session that another process began. Raises UnreadableValue."""
        saved = decode_live(adopted.base)
        if saved.caller != caller or saved.dialect not in RESUMABLE:
            raise UnreadableValue("the value of somebody else's session")
        facts = self.facts(caller, session_id, saved.created)
        dialect = RESUMABLE[saved.dialect](facts)
        vars(dialect).update(saved.dialect_state)
        entry = self._entry(
            facts, dialect, saved.session.settings, caller, saved.may_inject, Ids(*saved.item_ids), adopted.number
        )  # fmt: skip
        if entry.live.handoff is not None:
            entry.live.handoff.was_adopted(adopted.link)
        entry.inbox.dialect_fixed = saved.dialect_fixed
        self._reenact(entry, saved, adopted)
        return entry

    def _entry(
        self,
        facts: SessionFacts,
        dialect: Dialect,
        settings: Settings,
        caller: str,
        may_inject: bool,
        item_ids: Ids,
        number: int,
    ) -> OpenSession:
        limits = self._config.limits
        live_limits = LiveLimits(
            max_audio_in_flight_s=limits.audio_in_flight_s,
            max_outbox_events=limits.outbox_events,
            max_outbox_bytes=limits.outbox_characters or limits.outbox_bytes,
            max_log_events=self._config.session.resume_events,
            max_log_bytes=self._config.session.resume_bytes,
            max_control_bytes=limits.control_bytes,
        )
        session = self._core(settings, item_ids)
        live = LiveSession(facts.session_id, session, dialect, self._engine, live_limits, self._metrics, self._clock)
        entry = OpenSession(live, Inbox(live, facts, may_inject), caller, facts, item_ids, self._clock())
        if self._claimants is not None and self._config.session.resume_s:
            keep = HandoffSettings(self._config.session.resume_s, self._config.session.resume_bytes)
            live.handoff = SessionHandoff(
                live.id,
                number,
                self._claimants,
                keep,
                lambda: live.runner.engine_stream,
                lambda last, whole: self._value(entry, last, whole),
            )
        return entry

    def _core(self, settings: Settings, item_ids: Ids) -> Session:
        config, spec = self._config.session, self._engine.spec
        limits = SessionLimits(
            stall_seconds=config.stall_s,
            keep_seconds=config.keep_s,
            max_turn_seconds=config.turn_s,
            # Where the engine is the second holder, audio is safe when it has heard it.
            ack_margin_samples=None if self._claimants is None else spec.look_back_samples,
        )
        return Session(settings, spec.sample_rate, item_ids, limits)

    # Sessions as values

    def _value(self, entry: OpenSession, last: bool, whole: bool) -> tuple[bytes, bytes]:
        """The session's value, and the frames that were sent since the last one was made, or all that are kept."""
        live, engine_side = entry.live, entry.live.runner.save(last)
        state = {name: value for name, value in vars(live.dialect).items() if name != "facts"}
        saved = SavedLive(
            version=LIVE_VERSION,
            session=live.session.save(),
            caller=entry.caller,
            created=entry.facts.created,
            started_at=entry.started_at,
            may_inject=entry.inbox.may_inject,
            dialect=live.dialect.name,
            dialect_state=state,
            dialect_fixed=entry.inbox.dialect_fixed,
            item_ids=(entry.item_ids.prefix, entry.item_ids.number),
            outbox=[named(event) for event in live.outbox.waiting()],
            sequence=live.sent.sequence,
            now=self._clock(),
            **engine_side,
        )
        frames = live.sent.newest(live.sent.sequence - (0 if whole else entry.handed_off))
        entry.handed_off = live.sent.sequence
        return encode_live(saved), encode_frames(live.sent.sequence - len(frames) + 1, frames)

    def _reenact(self, entry: OpenSession, saved: SavedLive, adopted: AdoptedSession) -> None:
        """Handle again what the other process handled after it made the value, by its clock; then go on by ours."""
        live, now = entry.live, saved.now
        live.session.load(saved.session, 0.0)
        for chunk in adopted.chunks:
            live.sent.load(*decode_frames(chunk))
        live.sent.sequence = saved.sequence
        for name, fields in saved.outbox:
            live.outbox.put(plain(name, fields))
        for line in adopted.entries:
            now, event = decode_entry(line)
            live.write_again() if event is None else live.handle_again(event, now)
        shift = self._clock() - now
        core = self._core(live.session.settings, entry.item_ids)
        core.load(live.session.save(), shift)
        entry.started_at = saved.started_at + shift
        live.take_over(saved, adopted, core, np.frombuffer(saved.rest, np.float32))
        entry.received_s, entry.heard_s = core.source_ms / 1000, core.heard_seconds


def _bare(name: str) -> str:
    """A model's name without its publisher, or the folder it is in."""
    return name.rstrip("/").rpartition("/")[2].lower()
