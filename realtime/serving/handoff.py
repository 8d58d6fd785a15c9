"""The last frames a client was sent, numbered, for a client that comes back and has missed some.

The id of a numbered event is made of the session and the number. Numbers go on when another process goes on with the
session, so no id comes twice; and a process that writes an event again, from what the one before it left, gives it the
same id.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from engine import messages
from engine.client.handoff import AdoptedSession, HandoffClient, Owned
from engine.client.link import EngineLink
from engine.client.stream import EngineStream, HandoffTarget
from realtime.dialects.base import encode_json
from realtime.errors import UnreadableValue
from realtime.session import events
from realtime.session.core import SavedSession
from realtime.session.events import Append, Effect, Event, Gap, Measured, Tick
from realtime.session.settings import Settings


class SentLog:
    """Holds the newest frames of a session, at most `max_events` with at most `max_bytes`; older ones are gone."""

    def __init__(self, session_id: str, max_events: int, max_bytes: int) -> None:
        self.bytes = 0
        # The number of the last frame.
        self.sequence = 0
        # Other ids have no second underscore.
        self._id_prefix = f"event_{session_id.removeprefix('sess_')}_"
        self._max_events = max_events
        self._max_bytes = max_bytes
        self._frames: deque[tuple[int, str, int]] = deque()

    def add(self, body: dict[str, Any]) -> str:
        """The frame for this body, with the next number in it; an event that has an id gets one of that number."""
        self.sequence += 1
        numbered = {**body, "seq": self.sequence}
        if "event_id" in body:
            numbered["event_id"] = f"{self._id_prefix}{self.sequence:x}"
        text = encode_json(numbered)
        self._keep(text)
        return text

    def load(self, first: int, frames: list[str]) -> None:
        """Frames that another process sent, from the one with this number on; some of them may be known."""
        for number, text in enumerate(frames, start=first):
            if number > self.sequence:
                self.sequence = number
                self._keep(text)

    def newest(self, count: int) -> list[str]:
        """The last frames, at most so many; fewer if some of them are gone."""
        return [text for number, text, _ in self._frames if number > self.sequence - count]

    def _keep(self, text: str) -> None:
        size = len(text.encode())
        self._frames.append((self.sequence, text, size))
        self.bytes += size
        while len(self._frames) > self._max_events or self.bytes > self._max_bytes:
            self.bytes -= self._frames.popleft()[2]

    def after(self, sequence: int) -> list[str] | None:
        """Frames sent after the one with this number; None if some of them are gone."""
        first = self._frames[0][0] if self._frames else self.sequence + 1
        if not first - 1 <= sequence <= self.sequence:
            return None
        return [text for number, text, _ in self._frames if number > sequence]


# A live session as a value: the core's, and what the serving layer adds to it.
#
# Part of the value: the dialect and its state, ids, events that wait for the client, how far the numbers of the sent
# ones have come (the sent ones themselves travel beside it), and what the engine was yet to be told. Settled instead
# of saved: bytes of an unfinished sample, and what a resampler holds back, which the client sends again or which is
# flushed.

# Goes up whenever an older process could misread a value.
LIVE_VERSION = 5

NOTED = (
    events.Gap,
    messages.Text,
    messages.Speech,
    messages.Opened,
    messages.Flushed,
    messages.Closed,
    messages.Failed,
    messages.Refused,
    events.Tick,
)
_SAID = (
    events.SessionUpdated,
    events.SpeechStarted,
    events.SpeechStopped,
    events.TimedOut,
    events.Committed,
    events.Cleared,
    events.Delta,
    events.Completed,
    events.ItemFailed,
    events.Problem,
    events.Acknowledged,
    events.Answered,
    events.Injected,
    events.Ended,
    events.Closing,
)
_TYPES: dict[str, type] = {kind.__name__: kind for kind in (*NOTED, *_SAID)}
# In the place of an event: the next one that waited for the client was written.
WROTE = "wrote"

Named = tuple[str, Any]


class SavedLive(msgspec.Struct, array_like=True):
    """Times are on the clock of the process that saved it."""

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
    # The number of the last event that was sent.
    sequence: int
    engine_settings: Settings
    streams_opened: int
    # The session's sample up to which audio was fed, where there is no stream to tell.
    fed: int
    # What was decided and not done yet: to begin a new stream here after so many samples, or with other options.
    reanchor: tuple[int, int] | None
    reopen: bool
    now: float
    # Audio that was fed and has not left for the engine, with what must stand before it; float32.
    rest: bytes = b""
    # The stream with the old options was told to end, so audio from here on belongs to the one with the new ones.
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
        raise UnreadableValue(f"not a session's value: {error}") from None
    if saved.version != LIVE_VERSION:
        raise UnreadableValue(f"a session's value of version {saved.version}; this server reads {LIVE_VERSION}")
    return saved


def named(event: Any) -> Named:
    return type(event).__name__, event


def plain(name: str, fields: Any) -> Any:
    """The event of that name."""
    try:
        return msgspec.convert(fields, _TYPES[name])
    except (msgspec.ValidationError, KeyError) as error:
        raise UnreadableValue(f"not an event of a session: {error}") from None


def encode_entry(now: float, name: str, event: Any) -> bytes:
    return _encoder.encode((now, name, event))


def decode_entry(entry: bytes) -> tuple[float, Any]:
    """When it was, and the event; None for `WROTE`. Raises UnreadableValue."""
    try:
        now, name, fields = _entry_decoder.decode(entry)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise UnreadableValue(f"not an entry of a session: {error}") from None
    return now, None if name == WROTE else plain(name, fields)


def encode_frames(first: int, frames: list[str]) -> bytes:
    """Frames that were sent, from the one with this number on."""
    return _encoder.encode((first, frames)) if frames else b""


def decode_frames(chunk: bytes) -> tuple[int, list[str]]:
    try:
        return _frames_decoder.decode(chunk)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise UnreadableValue(f"not the frames of a session: {error}") from None


# The will of a session: what is entrusted to the engine beside its stream, so that another process can go on.
#
# A will is a base, the whole value, and entries since: each event that the session handled, and each that was written
# for the client. Whoever handles the same entries after the same base says the same, to the number. What a client is
# told has left for the engine first, so nobody knows more of a session than its will does.

# A base is due after so many entries: reading them again takes a few milliseconds.
ENTRIES_TO_A_BASE = 256


class HandoffStore(Protocol):
    """Where wills are kept. `EngineClient` fulfils it."""

    handoffs: HandoffClient

    def handoff_target(self, stream: EngineStream | None) -> HandoffTarget | None: ...
    async def adopt(self, key: str, is_wanted: Callable[[], bool]) -> AdoptedSession | None: ...
    async def renew(self, owned: Owned) -> int: ...
    async def confirm(self) -> None: ...


@dataclass(frozen=True, slots=True)
class HandoffSettings:
    """How long a session waits for its client, and how much of what it was sent is kept for it."""

    keep_s: float
    keep_bytes: int


class SessionHandoff:
    """Of one session. `base` makes its value, with the frames that were sent: all that are kept, or those since the
    last value; the `last` value holds the audio that has not left too."""

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
        # Rises with each move to another engine, and never as far as the next owner's.
        self.number = number
        self._engine = engine
        self._settings = settings
        self._stream = stream
        self._base = base
        self._entries: list[bytes] = []
        self._since_base = 0
        # Something happened that is no entry: the next word is a base.
        self._stale = True
        self._link: EngineLink | None = None
        # The engine that is known to have it: what was sent may be lost on the way.
        self._taken_by: EngineLink | None = None
        # Whether any engine was ever given it, and those who are to forget it.
        self._was_placed = False
        self._moving: set[asyncio.Task[None]] = set()
        # The link that asks for the next word when it makes its next batch.
        self._due: EngineLink | None = None
        # Whether an engine that was lost may still have a copy.
        self._left_copy = False
        # Nothing is entrusted any more: the session is over, or another's.
        self._is_closed = False

    def note(self, event: Event, now: float, effects: Sequence[Effect]) -> None:
        """The session has handled this."""
        if isinstance(event, Tick) and not effects:
            return
        if isinstance(event, Append):
            # The sound itself is the engine's.
            event = Gap(len(event.samples), event.source_samples, event.source_ms)
        if not isinstance(event, NOTED):
            self.begin_anew()
            return
        self._entries.append(encode_entry(now, type(event).__name__, event))
        self._since_base += 1
        if isinstance(event, Gap) or not all(isinstance(effect, Measured) for effect in effects):
            self._send_soon()
        # Else it was an output that nobody has heard of yet. The engine keeps it until a later word accounts for it.

    def wrote(self, now: float) -> None:
        """The next event that waited for the client was written."""
        self._entries.append(encode_entry(now, WROTE, None))
        self._since_base += 1
        self._send_soon()

    def begin_anew(self) -> None:
        """Something changed that is no entry."""
        self._stale = True
        self._send_soon()

    async def left(self) -> None:
        """Until all of it has left this process; the first time, until an engine has it. With the first word a client
        is given the token with which it comes back, and any gateway that it comes to must find the session then."""
        if self._taken_by is None and self._due is not None:
            await self._due.taken()
        link = self._due or self._link
        if link is not None:
            await link.flushed()
        if self._link is not None and self._link is not link:
            # It has moved meanwhile.
            await self._link.flushed()

    @property
    def owned(self) -> Owned | None:
        """What engines know of it; None if none has ever heard of it."""
        link = self._taken_by
        is_there = link is not None and link is self._link and link.lost is None
        return Owned(self._key, self.number, link if is_there else None) if self._was_placed else None

    @property
    def has_place(self) -> bool:
        return self._engine.handoff_target(self._stream()) is not None

    def was_adopted(self, link: EngineLink | None) -> None:
        """This engine keeps what another gateway left with it, under our number."""
        self._link = self._taken_by = link
        self._was_placed = True

    async def renew(self) -> bool:
        """The client has come back to this process: nobody who asked for the session before is to get it. Returns
        whether it is still ours. Raises EngineDead if the engine that has it does not say."""
        link = None if self._link is None or self._link.lost is not None else self._link
        number = await self._engine.renew(Owned(self._key, self.number, link))
        if self._is_closed:
            # It was taken from us meanwhile. What that engine has now has a higher number than ours, and no owner.
            if number and link is not None:
                link.send(messages.DropHandoff("", self._key, number))
            return False
        if not number:
            return False
        moves = max(number % messages.NEXT_OWNER, self.number % messages.NEXT_OWNER)
        self.number = max(self.number, number // messages.NEXT_OWNER * messages.NEXT_OWNER + moves)
        if link is not None and link is not self._link:
            # It has moved meanwhile, under a number that is lower than what the former engine has now.
            link.send(messages.DropHandoff("", self._key, number))
            self.begin_anew()
        return True

    def review(self) -> None:
        """Called now and then: a session that has moved, or lost its engine, leaves its value with the new one."""
        target = self._engine.handoff_target(self._stream())
        if target is not None and target.link is not self._link and self._was_placed:
            self.begin_anew()

    def give_up(self) -> None:
        """The last word: the session waits for whoever adopts it."""
        self._stale = True
        self._send(last=True)

    def end(self) -> None:
        """The session is over, or another's."""
        self._is_closed = True
        self.close()

    def close(self) -> None:
        """Nobody is to go on with the session for now: it cannot be resumed."""
        self._due = None
        self._entries = []
        if self._left_copy or (self._link is not None and self._link.lost is not None):
            self._engine.handoffs.note_over(self._key, self.number)
        if self._link is not None:
            self._link.send(messages.DropHandoff("", self._key, self.number))
            self._link = None

    def _send_soon(self) -> None:
        """With the next batch: what happens until then is one word."""
        if self._is_closed:
            return
        if self._due is not None and self._due.lost is None:
            return
        target = self._engine.handoff_target(self._stream())
        link = None if target is None else target.link
        if link is not self._due:
            self._due = link
            if link is not None:
                link.collect(self._send_if_due)
        if link is None:
            self._lose_engine()

    def _send_if_due(self) -> None:
        if self._due is not None:
            self._send()

    def _lose_engine(self) -> None:
        """What was entrusted is lost. The next engine gets a base."""
        self._left_copy = self._left_copy or self._link is not None
        self._entries, self._link, self._stale = [], None, True

    def _send(self, last: bool = False) -> None:
        self._due = None
        stream = self._stream()
        target = self._engine.handoff_target(stream)
        if target is None:
            self._lose_engine()
            return
        entries, self._entries = self._entries, []
        if not (self._stale or entries):
            return
        former, self._link = self._link, target.link
        moves = target.link is not former
        self._left_copy = self._left_copy or (former is not None and former.lost is not None)
        if moves and self._was_placed:
            # Of two engines that have the session, the one with the higher number has it right.
            self.number += 1
        self._was_placed = True
        name = "" if stream is None else stream.id
        word = messages.SaveHandoff(name, self._key, self.number, target.read, entries)
        if self._stale or moves or self._since_base > ENTRIES_TO_A_BASE:
            self._make_base(word, target, last, moves)
        if stream is not None:
            stream.previous_engine.is_handed_off = True
        target.link.send(word)
        if moves:
            self._move(former, target.link, stream)

    def _move(self, former: EngineLink | None, link: EngineLink, stream: EngineStream | None) -> None:
        """Have the former engine forget the session, when the new one has it."""
        number = self.number

        async def move() -> None:
            await link.taken()
            if link.lost is not None:
                return
            self._taken_by = link
            if former is not None:
                former.send(messages.DropHandoff("", self._key, number))
            if self._left_copy:
                # The lost engine is told when it is back, whichever gateway has the session then.
                self._engine.handoffs.note_over(self._key, number - 1)
            if stream is not None:
                stream.previous_engine.release()

        moving = asyncio.create_task(move(), name=f"move session {self._key}")
        self._moving.add(moving)
        moving.add_done_callback(self._moving.discard)

    def _make_base(self, word: messages.SaveHandoff, target: HandoffTarget, last: bool, moves: bool) -> None:
        word.base, word.chunk = self._base(last, moves)
        word.entries, word.last = [], last
        word.keep_s, word.keep_bytes = self._settings.keep_s, self._settings.keep_bytes
        word.position_offset, word.sample_offset = target.before
        self._stale, self._since_base = False, 0
