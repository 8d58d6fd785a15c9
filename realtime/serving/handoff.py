"""Saves a session with the engine that runs its stream, so that another gateway can adopt the session.

If there are several gateways, each resumable session has a `SessionHandoff`. It sends to the engine a full copy of the
session now and then (`SavedLive`), and an entry for each event since. The first part of this module encodes and decodes
both, and the sent frames. The engine stores the bytes without reading them (`engine/server/handoff.py`), and
`session_factory.py` rebuilds an adopted session from them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from engine import messages
from engine.client.handoff import AdoptedSession, HandoffClient, OwnedSession
from engine.client.link import EngineLink
from engine.client.stream import EngineStream, HandoffTarget
from realtime.errors import UnreadableValue
from realtime.session import events
from realtime.session.core import SavedSession
from realtime.session.events import Append, Effect, Event, Gap, Measured, Tick
from realtime.session.settings import Settings

# The encoding of a saved session


# Version of the encoding. Increase it whenever an older process could misread a value.
LIVE_VERSION = 11

# Events that become entries of a handoff. After any other event a new base is saved.
RECORDED = (
    events.Gap,
    messages.Text,
    messages.Speech,
    messages.Labels,
    messages.Opened,
    messages.Flushed,
    messages.Revised,
    messages.Closed,
    messages.Failed,
    messages.Refused,
    events.Tick,
)
# Events that may be in the outbox.
_OUTBOX_EVENTS = (
    events.SessionUpdated,
    events.SpeechStarted,
    events.EagerTurnEnd,
    events.TurnResumed,
    events.PauseScored,
    events.SpeechStopped,
    events.TimedOut,
    events.Committed,
    events.Cleared,
    events.Delta,
    events.Completed,
    events.WordsLabelled,
    events.ItemFailed,
    events.Problem,
    events.Acknowledged,
    events.Answered,
    events.Injected,
    events.Ended,
    events.Closing,
)
_TYPES: dict[str, type] = {kind.__name__: kind for kind in (*RECORDED, *_OUTBOX_EVENTS)}
# Name of the entry for: the next event of the outbox was encoded as frames.
WROTE = "wrote"

# The class name of an event, and the event.
Named = tuple[str, Any]


class SavedLive(msgspec.Struct, array_like=True):
    """A live session as a value: the session core, and the state that the serving layer adds to it.

    Times are on the clock of the process that saved it. Sent frames are encoded separately, in chunks. Bytes of an
    incomplete sample are not saved: the client sends them again. Samples in the resampler are submitted before the last
    save.
    """

    version: int
    session: SavedSession
    caller: str
    created: int
    started_at: float
    may_inject: bool
    dialect: str
    dialect_state: dict[str, Any]
    dialect_fixed: bool
    item_ids: tuple[str, int]
    outbox: list[Named]
    # Sequence number of the last sent frame.
    sequence: int
    engine_settings: Settings
    streams_opened: int
    # The session's sample up to which audio was fed; used if there is no stream that knows it.
    fed: int
    # Decided and not carried out yet: begin a new stream at (session sample, samples since then).
    reanchor: tuple[int, int] | None
    # Decided and not carried out yet: change the stream's options.
    reopen: bool
    now: float
    # float32 audio that was fed and not sent to the engine yet, including the audio that must precede it.
    rest: bytes = b""
    # The stream with the old options is finishing; audio from here on belongs to a stream with the new options.
    runs_out: bool = False


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(SavedLive)
_entry_decoder = msgspec.msgpack.Decoder(tuple[float, str, Any])
_frames_decoder = msgspec.msgpack.Decoder(tuple[int, list[str]])


def encode_live(saved: SavedLive) -> bytes:
    return _encoder.encode(saved)


def decode_live(value: bytes) -> SavedLive:
    """Raises UnreadableValue."""
    try:
        saved = _decoder.decode(value)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise UnreadableValue(f"the saved session cannot be decoded: {error}") from None
    if saved.version != LIVE_VERSION:
        raise UnreadableValue(
            f"the saved session has version {saved.version}, and this server reads version {LIVE_VERSION}"
        )
    return saved


def named(event: Any) -> Named:
    return type(event).__name__, event


def plain(name: str, fields: Any) -> Any:
    """The event with this class name and these fields. Raises UnreadableValue."""
    try:
        return msgspec.convert(fields, _TYPES[name])
    except (msgspec.ValidationError, KeyError) as error:
        raise UnreadableValue(f"an event of the saved session cannot be decoded: {error}") from None


def encode_entry(now: float, name: str, event: Any) -> bytes:
    return _encoder.encode((now, name, event))


def decode_entry(entry: bytes) -> tuple[float, Any]:
    """The time and the event of an entry; the event is None for `WROTE`. Raises UnreadableValue."""
    try:
        now, name, fields = _entry_decoder.decode(entry)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise UnreadableValue(f"an entry of the saved session cannot be decoded: {error}") from None
    return now, None if name == WROTE else plain(name, fields)


def encode_frames(first: int, frames: list[str]) -> bytes:
    """A chunk of sent frames; `first` is the sequence number of the first one."""
    return _encoder.encode((first, frames)) if frames else b""


def decode_frames(chunk: bytes) -> tuple[int, list[str]]:
    """The sequence number of the first frame, and the frames. Raises UnreadableValue."""
    try:
        return _frames_decoder.decode(chunk)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise UnreadableValue(f"the sent frames of the saved session cannot be decoded: {error}") from None


# Saving a session with its engine

# A new base is saved after this many entries; it bounds the time an adopter needs to handle them again.
ENTRIES_TO_A_BASE = 256


class HandoffStore(Protocol):
    """Where handoffs are saved, and from where sessions are adopted. `EngineClient` implements it."""

    handoffs: HandoffClient

    def handoff_target(self, stream: EngineStream | None) -> HandoffTarget | None: ...
    async def adopt(self, key: str, is_wanted: Callable[[], bool]) -> AdoptedSession | None: ...
    async def renew(self, owned: OwnedSession) -> int: ...
    async def confirm(self) -> None: ...


@dataclass(frozen=True, slots=True)
class HandoffSettings:
    """For how many seconds a session waits for its client, and how many bytes of its sent frames are kept."""

    keep_s: float
    keep_bytes: int


class SessionHandoff:
    """Saves one session with the engine that has its stream, so that another process can adopt it.

    A handoff is a base (the session's whole value) and the entries since: each event that the session handled, and each
    event that was written for the client. An adopter that handles the same entries after the same base produces the
    same frames with the same numbers. A frame is sent to the client only after its entries have left for the engine, so
    a client never knows more of its session than the handoff does.

    `base(last, whole)` returns the encoded session, and a chunk of sent frames: the frames since the last call, or with
    `whole` all frames in the log. With `last`, the session includes audio that was not sent to the engine yet.
    """

    def __init__(
        self,
        key: str,
        number: int,
        engine: HandoffStore,
        settings: HandoffSettings,
        stream: Callable[[], EngineStream | None],
        base: Callable[[bool, bool], tuple[bytes, bytes]],
    ) -> None:
        self._key = key
        # Owner number: the copy with the highest one is valid. It grows by 1 with each move to another engine, and by
        # `messages.NEXT_OWNER` with each adoption or renewal.
        self.number = number
        self._engine = engine
        self._settings = settings
        self._stream = stream
        self._base = base
        self._entries: list[bytes] = []
        self._entries_since_base = 0
        # The next save is a base: the state has changed in a way that no entry describes.
        self._needs_base = True
        # The engine that the last save was sent to.
        self._link: EngineLink | None = None
        # The engine that has confirmed a save. A save that was only sent may be lost.
        self._confirmed_by: EngineLink | None = None
        # Whether a save was ever sent to an engine.
        self._was_sent = False
        # Tasks that wait to make a former engine drop its copy.
        self._move_tasks: set[asyncio.Task[None]] = set()
        # The link that will call `_send_if_scheduled` when it makes its next batch.
        self._scheduled: EngineLink | None = None
        # Whether an engine that was lost may still have an outdated copy.
        self._has_outdated_copy = False
        # The engine stream at the time of the last save of this process.
        self.last_saved_stream: EngineStream | None = None
        # Nothing is saved any more: the session has ended, or another process owns it.
        self._is_closed = False

    def record(self, event: Event, now: float, effects: Sequence[Effect]) -> None:
        """Record an event that the session has handled."""
        if isinstance(event, Tick) and not effects:
            return
        if isinstance(event, Append):
            # The engine has the samples; the entry needs only their number.
            event = Gap(len(event.samples), event.source_samples, event.source_ms)
        if not isinstance(event, RECORDED):
            self.save_base()
            return
        self._entries.append(encode_entry(now, type(event).__name__, event))
        self._entries_since_base += 1
        stream = self._stream()
        if isinstance(event, Gap) and stream is not None and stream.holds_audio:
            stream.on_held_sent = self._send_entries  # the entry leaves with the audio
        elif isinstance(event, Gap) or not all(isinstance(effect, Measured) for effect in effects):
            self._send_soon()
        # Else an engine output without visible effect: the engine keeps it until a later save acknowledges it.

    def record_written(self, now: float) -> None:
        """Record that the next event of the outbox was encoded as frames."""
        self._entries.append(encode_entry(now, WROTE, None))
        self._entries_since_base += 1
        self._send_soon()

    def save_base(self) -> None:
        """Save a new base: the state changed in a way that no entry describes."""
        self._needs_base = True
        self._send_soon()

    async def wait_until_sent(self) -> None:
        """Wait until all recorded entries are sent to the engine; the first time, until an engine has confirmed them.

        The first frame gives the client its resume token, and from then on any gateway must find the session.
        """
        if self._confirmed_by is None and self._scheduled is not None:
            await self._scheduled.wait_acknowledged()
        link = self._scheduled or self._link
        if link is not None:
            await link.wait_sent()
        if self._link is not None and self._link is not link:
            # The session has moved to another engine meanwhile.
            await self._link.wait_sent()

    @property
    def owned(self) -> OwnedSession | None:
        """Key, owner number and engine of the handoff; None if it was never sent to an engine."""
        link = self._confirmed_by
        is_reachable = link is not None and link is self._link and link.lost is None
        return OwnedSession(self._key, self.number, link if is_reachable else None) if self._was_sent else None

    @property
    def can_be_saved(self) -> bool:
        return self._engine.handoff_target(self._stream()) is not None

    def was_adopted(self, link: EngineLink | None) -> None:
        """The session was adopted: this engine has its handoff, with our owner number."""
        self._link = self._confirmed_by = link
        self._was_sent = True

    async def renew(self) -> bool:
        """Raise the owner number, because the client has come back to this process: earlier claims become invalid.

        Returns whether the session is still ours. Raises EngineUnreachable if the engine that has it does not answer.
        """
        link = None if self._link is None or self._link.lost is not None else self._link
        number = await self._engine.renew(OwnedSession(self._key, self.number, link))
        if self._is_closed:
            # Another process has taken the session meanwhile. The renewed copy has no owner: drop it.
            if number and link is not None:
                link.send(messages.DropHandoff("", self._key, number))
            return False
        if not number:
            return False
        moves = max(number % messages.NEXT_OWNER, self.number % messages.NEXT_OWNER)
        self.number = max(self.number, number // messages.NEXT_OWNER * messages.NEXT_OWNER + moves)
        if link is not None and link is not self._link:
            # The session has moved meanwhile, with a number below the one that the former engine has just got. The
            # higher number says so to the former engine: until the new one has the save, the session is not gone.
            link.send(messages.DropHandoff("", self._key, self.number))
            self.save_base()
        return True

    def check_engine(self) -> None:
        """Called by the ticker: save a base if the session's stream is on another engine than the last save."""
        target = self._engine.handoff_target(self._stream())
        if target is not None and target.link is not self._link and self._was_sent:
            self.save_base()

    def send_last_save(self) -> None:
        """Send the last save of this process. From then on the session waits in the engine to be adopted."""
        self._needs_base = True
        self.last_saved_stream = self._stream()
        self._send(last=True)

    def end(self) -> None:
        """Drop the handoff for good: the session has ended, or another process owns it."""
        self._is_closed = True
        self.close()

    def close(self) -> None:
        """Drop the handoff because the session cannot be resumed at present."""
        self._scheduled = None
        self._entries = []
        if self._has_outdated_copy or (self._link is not None and self._link.lost is not None):
            self._engine.handoffs.note_ended(self._key, self.number)
        if self._link is not None:
            self._link.send(messages.DropHandoff("", self._key, self.number))
            self._link = None

    def _send_soon(self) -> None:
        """Send a save with the link's next batch; entries recorded until then go into the same message."""
        if self._is_closed:
            return
        if self._scheduled is not None and self._scheduled.lost is None:
            return
        target = self._engine.handoff_target(self._stream())
        link = None if target is None else target.link
        if link is not self._scheduled:
            self._scheduled = link
            if link is not None:
                link.collect(self._send_if_scheduled)
        if link is None:
            self._lose_engine()

    def _send_entries(self) -> None:
        """The audio of entries that wait is being sent. There are none if the handoff was dropped meanwhile."""
        if self._entries:
            self._send_soon()

    def _send_if_scheduled(self) -> None:
        if self._scheduled is not None:
            self._send()

    def _lose_engine(self) -> None:
        """No engine is reachable: the saved state is lost, and the next engine gets a base."""
        self._has_outdated_copy = self._has_outdated_copy or self._link is not None
        self._entries, self._link, self._needs_base = [], None, True

    def _send(self, last: bool = False) -> None:
        self._scheduled = None
        stream = self._stream()
        target = self._engine.handoff_target(stream)
        if target is None:
            self._lose_engine()
            return
        entries, self._entries = self._entries, []
        if not (self._needs_base or entries):
            return
        former, self._link = self._link, target.link
        moves = target.link is not former
        self._has_outdated_copy = self._has_outdated_copy or (former is not None and former.lost is not None)
        if moves and self._was_sent:
            # If two engines have a copy of the session, the one with the higher number is valid.
            self.number += 1
        self._was_sent = True
        name = "" if stream is None else stream.id
        save = messages.SaveHandoff(name, self._key, self.number, target.read_count, entries)
        if self._needs_base or moves or self._entries_since_base > ENTRIES_TO_A_BASE:
            self._add_base(save, target, last, moves)
        if stream is not None:
            stream.previous_engine.has_handoff = True
        target.link.send(save)
        if moves:
            self._move(former, target.link, stream)

    def _move(self, former: EngineLink | None, link: EngineLink, stream: EngineStream | None) -> None:
        """Make the former engine drop its copy once the new one has confirmed the save."""
        number = self.number

        async def move() -> None:
            await link.wait_acknowledged()
            if link.lost is not None:
                return
            self._confirmed_by = link
            if former is not None:
                former.send(messages.DropHandoff("", self._key, number))
            if self._has_outdated_copy:
                # The gateway tells the lost engine to drop its outdated copy as soon as that engine is back.
                self._engine.handoffs.note_ended(self._key, number - 1)
            if stream is not None:
                stream.previous_engine.release()

        moving = asyncio.create_task(move(), name=f"move session {self._key}")
        self._move_tasks.add(moving)
        moving.add_done_callback(self._move_tasks.discard)

    def _add_base(self, save: messages.SaveHandoff, target: HandoffTarget, last: bool, moves: bool) -> None:
        save.base, save.chunk = self._base(last, moves)
        save.entries, save.last = [], last
        save.keep_s, save.keep_bytes = self._settings.keep_s, self._settings.keep_bytes
        save.position_offset, save.sample_offset = target.offsets
        self._needs_base, self._entries_since_base = False, 0
