"""Builds sessions, new ones and those adopted from another gateway: core, live session, inbox, handoff and ids.

Only the registry (`registry.py`) calls `SessionFactory`, which owns no session. It also encodes a session's state for
handoffs, and restores it when the session is adopted. `OpenSession` is the registry's entry for a session.
`GatewayServices` are the objects that a gateway shares with other gateways, such as signer, quota and publisher;
`realtime/app.py` makes them.
"""

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
from realtime.serving.connection import Connection
from realtime.serving.engine_api import EngineApi
from realtime.serving.enrolment import SocketEnrolment
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
from realtime.serving.metrics import Metrics
from realtime.serving.publishing import Publisher, SessionPublication
from realtime.serving.quota import Admission, Caller, SessionQuota
from realtime.serving.signed_tokens import Signer
from realtime.serving.webhooks import Webhooks
from realtime.session.core import Session, SessionLimits
from realtime.session.settings import Settings


@dataclass(frozen=True, slots=True)
class GatewayServices:
    """Objects that a gateway shares with other gateways. The defaults are for a single gateway process.

    `handoff_store` saves sessions with the engines: with it gateways can adopt each other's sessions. They share the
    secret of `signer`. `quota` counts the sessions of all gateways. `publisher` publishes sessions to viewers, whose
    links are signed by `link_signer`. `webhooks` sends finals to URLs.
    """

    metrics: Metrics = field(default_factory=Metrics)
    signer: Signer = field(default_factory=Signer)
    handoff_store: HandoffStore | None = None
    quota: SessionQuota | None = None
    publisher: Publisher | None = None
    link_signer: Signer = field(default_factory=Signer)
    webhooks: Webhooks | None = None


@dataclass(slots=True)
class Ids:
    """Makes ids: a random prefix and a counter. The two are saved with a session, so an adopter continues the ids."""

    prefix: str
    number: int = 0

    @classmethod
    def new(cls, name: str) -> Ids:
        """Ids with a new random prefix."""
        return cls(f"{name}_{secrets.token_hex(6)}")

    def __call__(self) -> str:
        self.number += 1
        return f"{self.prefix}{self.number:x}"


log = logging.getLogger("tickertape.sessions")

# Dialects whose sessions can be resumed, and so can be adopted by another process.
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
    # Its share of the quota; set by the registry, which releases it when the session ends.
    admission: Admission | None = None
    connection: Connection | None = None
    # When the socket closed; the session waits to be resumed.
    left_at: float | None = None
    # Seconds of audio received and heard by the model that the metrics have counted.
    received_s: float = 0.0
    heard_s: float = 0.0
    # Sequence number of the last frame that was saved with the handoff.
    handed_off: int = 0
    # Another process continues the session: this one sends no more frames of it.
    is_released: bool = False

    def count_audio(self, metrics: Metrics) -> None:
        """Add the audio since the last call to the metrics.

        Called by the ticker and not for every message, because a Prometheus counter is expensive.
        """
        received_s, heard_s = self.live.session.source_ms / 1000, self.live.session.covered_seconds
        metrics.audio_in.inc(max(0.0, received_s - self.received_s))
        metrics.audio_heard.inc(max(0.0, heard_s - self.heard_s))
        self.received_s, self.heard_s = received_s, heard_s


class SessionFactory:
    """Makes the sessions of one gateway. With a handoff store, each resumable session gets a `SessionHandoff`."""

    def __init__(
        self,
        engine: EngineApi,
        config: Config,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        services: GatewayServices,
    ) -> None:
        self._engine = engine
        self._config = config
        self._metrics = services.metrics
        self._clock = clock
        self._wall_clock = wall_clock
        self._signer = services.signer
        self._handoff_store = services.handoff_store
        self._publisher = services.publisher
        self._webhooks = services.webhooks
        self._enrolment = SocketEnrolment(engine)

    def models(self) -> list[str]:
        """All model names that a client may ask for."""
        return list(dict.fromkeys((*self._own_names(), *self._config.model.aliases)))

    def listed_models(self) -> list[str]:
        """The names of the served model. An alias `publisher/model` is left out if it may mean a different model."""
        own = self._own_names()
        known = {_bare(name) for name in own}
        aliases = [name for name in self._config.model.aliases if "/" not in name or _bare(name) in known]
        return list(dict.fromkeys((*own, *aliases)))

    def _own_names(self) -> list[str]:
        names = (self._engine.spec.name, self._config.model.name)
        return [name for name in names if name != "default"]

    def facts(self, caller: str = "", session_id: str | None = None, created: int | None = None) -> SessionFacts:
        """The facts of a new session, or of an adopted one (with its id and its time of creation)."""
        models, resume_s = self.models(), self._config.session.resume_s
        session_id = session_id or f"sess_{secrets.token_hex(12)}"
        return SessionFacts(
            session_id=session_id,
            created=int(self._wall_clock()) if created is None else created,
            sample_rate=self._engine.spec.sample_rate,
            model=models[0],
            models=frozenset(models),
            # For events without a sequence number: each process that owns the session has its own prefix.
            new_event_id=Ids.new("event"),
            resume_token=self._signer.resume_token(session_id, caller) if resume_s else "",
            resume_seconds=int(resume_s),
            gap_seconds=self._config.limits.gap_s,
        )

    def make(self, caller: Caller, settings: Settings, make_dialect: Callable[[SessionFacts], Dialect]) -> OpenSession:
        facts = self.facts(caller.name)
        dialect = make_dialect(facts)
        may_inject = self._config.server.inject and not caller.is_secret
        start = dialect.start_settings(settings)
        entry = self._entry(facts, dialect, start, caller.name, may_inject, Ids.new("item"), 1)
        entry.live.publication.may_change = entry.live.webhooks.may_change = not caller.is_secret
        return entry

    def adopt(self, session_id: str, caller: str, adopted: AdoptedSession) -> OpenSession:
        """Continue a session of another process. Raises UnreadableValue."""
        saved = decode_live(adopted.base)
        if saved.caller != caller or saved.dialect not in RESUMABLE:
            raise UnreadableValue("the saved session belongs to another caller, or its dialect cannot be resumed")
        facts = self.facts(caller, session_id, saved.created)
        dialect = RESUMABLE[saved.dialect](facts)
        vars(dialect).update(saved.dialect_state)
        entry = self._entry(
            facts, dialect, saved.session.settings, caller, saved.may_inject, Ids(*saved.item_ids), adopted.owner_number
        )  # fmt: skip
        if entry.live.handoff is not None:
            entry.live.handoff.was_adopted(adopted.link)
        entry.inbox.dialect_fixed = saved.dialect_fixed
        try:
            self._restore(entry, saved, adopted)
        except BaseException:
            entry.live.webhooks.close(0.0, moves=True)
            raise
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
        live.publication = SessionPublication(self._publisher, caller, live.id, session.sample_rate, facts.finals)
        if self._webhooks is not None:
            live.webhooks = self._webhooks.of_session(caller, live.id, session.sample_rate, facts.finals)
        inbox = Inbox(live, facts, caller, may_inject, self._enrolment)
        entry = OpenSession(live, inbox, caller, facts, item_ids, self._clock())
        if self._handoff_store is not None and self._config.session.resume_s:
            keep = HandoffSettings(self._config.session.resume_s, self._config.session.resume_bytes)
            live.handoff = SessionHandoff(
                live.id,
                number,
                self._handoff_store,
                keep,
                lambda: live.runner.engine_stream,
                lambda last, all_frames: self._encode_session(entry, last, all_frames),
            )
        return entry

    def _core(self, settings: Settings, item_ids: Ids) -> Session:
        config, spec = self._config.session, self._engine.spec
        limits = SessionLimits(
            stall_seconds=config.stall_s,
            keep_seconds=config.keep_s,
            max_turn_seconds=config.turn_s,
            # With handoffs, audio that the engine has received survives the gateway, so it can be acknowledged.
            ack_margin_samples=None if self._handoff_store is None else spec.look_back_samples,
            has_turn_detector=spec.options.turn_detector,
        )
        return Session(settings, spec.sample_rate, item_ids, limits)

    # Saving and loading a session

    def _encode_session(self, entry: OpenSession, last: bool, all_frames: bool) -> tuple[bytes, bytes]:
        """The encoded session, and the encoded frames sent since the last call; with `all_frames`, all frames kept."""
        live, stream_fields = entry.live, entry.live.runner.save(last)
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
            outbox=[named(event) for event in live.outbox.events()],
            sequence=live.sent.last,
            now=self._clock(),
            **stream_fields,
        )
        frames = live.sent.newest(live.sent.last - (0 if all_frames else entry.handed_off))
        entry.handed_off = live.sent.last
        return encode_live(saved), encode_frames(live.sent.last - len(frames) + 1, frames)

    def _restore(self, entry: OpenSession, saved: SavedLive, adopted: AdoptedSession) -> None:
        """Bring the session to the state that the other process left."""
        # 1. Load the base and the sent frames.
        live, now = entry.live, saved.now
        live.session.load(saved.session, 0.0)
        for chunk in adopted.chunks:
            live.sent.load(*decode_frames(chunk))
        live.sent.last = saved.sequence
        for name, fields in saved.outbox:
            live.outbox.put(plain(name, fields))
        # 2. Handle the entries since the base again, on the clock of the other process.
        for line in adopted.entries:
            now, event = decode_entry(line)
            live.write_again() if event is None else live.handle_again(event, now)
        # 3. Move all times to the clock of this process.
        shift = self._clock() - now
        core = self._core(live.session.settings, entry.item_ids)
        core.load(live.session.save(), shift)
        entry.started_at = saved.started_at + shift
        # 4. Continue with the engine stream.
        live.take_over(saved, adopted, core, np.frombuffer(saved.rest, np.float32))
        entry.received_s, entry.heard_s = core.source_ms / 1000, core.covered_seconds


def _bare(name: str) -> str:
    """A model's name without its publisher or folder, in lower case."""
    return name.rstrip("/").rpartition("/")[2].lower()
