"""The will of a session: what is entrusted to the engine beside its stream, so that another process can go on.

A will is a base, the whole value, and entries since: each event that the session handled, and each that was written for
the client. Whoever handles the same entries after the same base says the same, to the number. What a client is told has
left for the engine first, so nobody knows more of a session than its will does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine import messages
from engine.client.link import EngineLink
from engine.client.placement import Keeper
from engine.client.stream import EngineStream
from engine.client.wills import Inheritance, Owned, WillDesk
from realtime.serving.saved_live import NOTED, WROTE, encode_entry
from realtime.session.events import Append, Effect, Event, Gap, Measured, Tick

# A base is due after so many entries: reading them again takes a few milliseconds.
ENTRIES_TO_A_BASE = 256


class WillApi(Protocol):
    """Where wills are kept. `EngineClient` fulfils it."""

    wills: WillDesk

    def keeper_for(self, stream: EngineStream | None) -> Keeper | None: ...
    async def adopt(self, key: str, is_wanted: Callable[[], bool]) -> Inheritance | None: ...
    async def renew(self, owned: Owned) -> int: ...
    async def confirm(self) -> None: ...


@dataclass(frozen=True, slots=True)
class WillSettings:
    """How long a session waits for its client, and how much of what it was sent is kept for it."""

    keep_s: float
    keep_bytes: int


class Will:
    """Of one session. `base` makes its value, with the frames that were sent: all that are kept, or those since the
    last value; the `last` value holds the audio that has not left too."""

    def __init__(
        self,
        key: str,
        number: int,
        engine: WillApi,
        settings: WillSettings,
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
        return self._engine.keeper_for(self._stream()) is not None

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
                link.send(messages.Disown("", self._key, number))
            return False
        if not number:
            return False
        moves = max(number % messages.NEXT_OWNER, self.number % messages.NEXT_OWNER)
        self.number = max(self.number, number // messages.NEXT_OWNER * messages.NEXT_OWNER + moves)
        if link is not None and link is not self._link:
            # It has moved meanwhile, under a number that is lower than what the former engine has now.
            link.send(messages.Disown("", self._key, number))
            self.begin_anew()
        return True

    def review(self) -> None:
        """Called now and then: a session that has moved, or lost its engine, leaves its value with the new one."""
        keeper = self._engine.keeper_for(self._stream())
        if keeper is not None and keeper.link is not self._link and self._was_placed:
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
            self._engine.wills.note_over(self._key, self.number)
        if self._link is not None:
            self._link.send(messages.Disown("", self._key, self.number))
            self._link = None

    def _send_soon(self) -> None:
        """With the next batch: what happens until then is one word."""
        if self._is_closed:
            return
        if self._due is not None and self._due.lost is None:
            return
        keeper = self._engine.keeper_for(self._stream())
        link = None if keeper is None else keeper.link
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
        keeper = self._engine.keeper_for(stream)
        if keeper is None:
            self._lose_engine()
            return
        entries, self._entries = self._entries, []
        if not (self._stale or entries):
            return
        former, self._link = self._link, keeper.link
        moves = keeper.link is not former
        self._left_copy = self._left_copy or (former is not None and former.lost is not None)
        if moves and self._was_placed:
            # Of two engines that have the session, the one with the higher number has it right.
            self.number += 1
        self._was_placed = True
        name = "" if stream is None else stream.id
        word = messages.Entrust(name, self._key, self.number, keeper.read, entries)
        if self._stale or moves or self._since_base > ENTRIES_TO_A_BASE:
            self._make_base(word, keeper, last, moves)
        if stream is not None:
            stream.handover.is_entrusted = True
        keeper.link.send(word)
        if moves:
            self._move(former, keeper.link, stream)

    def _move(self, former: EngineLink | None, link: EngineLink, stream: EngineStream | None) -> None:
        """Have the former engine forget the session, when the new one has it."""
        number = self.number

        async def move() -> None:
            await link.taken()
            if link.lost is not None:
                return
            self._taken_by = link
            if former is not None:
                former.send(messages.Disown("", self._key, number))
            if stream is not None:
                stream.handover.release()

        moving = asyncio.create_task(move(), name=f"move session {self._key}")
        self._moving.add(moving)
        moving.add_done_callback(self._moving.discard)

    def _make_base(self, word: messages.Entrust, keeper: Keeper, last: bool, moves: bool) -> None:
        word.base, word.chunk = self._base(last, moves)
        word.entries, word.last = [], last
        word.keep_s, word.keep_bytes = self._settings.keep_s, self._settings.keep_bytes
        word.positions_before, word.samples_before = keeper.before
        self._stale, self._since_base = False, 0
