"""The will of a session: what is entrusted to the engine beside its stream, so that another process can go on.

A will is a base, the whole value, and entries since: each event that the session handled, and each that was written for
the client. Whoever handles the same entries after the same base says the same, to the number. What a client is told has
left for the engine first, so nobody knows more of a session than its will does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine import messages
from engine.client.link import EngineLink
from engine.client.stream import EngineStream
from engine.client.wills import Inheritance, WillDesk
from realtime.serving.saved_live import NOTED, WROTE, encode_entry
from realtime.session.events import Append, Effect, Event, Gap, Measured, Tick

# A base is due after so many entries: reading them again takes a few milliseconds.
ENTRIES_TO_A_BASE = 256


class WillApi(Protocol):
    """Where wills are kept. `EngineClient` fulfils it."""

    wills: WillDesk

    def link_for(self, stream: EngineStream | None) -> EngineLink | None: ...
    async def adopt(self, key: str) -> Inheritance | None: ...


@dataclass(frozen=True, slots=True)
class WillSettings:
    """How long a session waits for its client, and how much of what it was sent is kept for it."""

    keep_s: float
    keep_bytes: int


class Will:
    """Of one session. `base` makes its value, with the frames that were sent since the last one."""

    def __init__(
        self,
        key: str,
        number: int,
        engine: WillApi,
        settings: WillSettings,
        stream: Callable[[], EngineStream | None],
        base: Callable[[bool], tuple[bytes, bytes]],
    ) -> None:
        self._key = key
        self._number = number
        self._engine = engine
        self._settings = settings
        self._stream = stream
        self._base = base
        self._entries: list[bytes] = []
        self._since_base = 0
        # Something happened that is no entry: the next word is a base.
        self._stale = True
        self._link: EngineLink | None = None
        # The link that asks for the next word when it makes its next batch.
        self._due: EngineLink | None = None

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
        """Until all of it has left this process."""
        link = self._due or self._link
        if link is not None:
            await link.flushed()

    def give_up(self) -> None:
        """The last word: the session waits for whoever adopts it."""
        self._stale = True
        self._send(last=True)

    def close(self) -> None:
        """The session is over."""
        self._due = None
        self._entries = []
        if self._link is not None:
            self._link.send(messages.Disown("", self._key, self._number))
            self._link = None

    def _send_soon(self) -> None:
        """With the next batch: what happens until then is one word."""
        if self._due is not None and self._due.lost is None:
            return
        link = self._engine.link_for(self._stream())
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
        self._entries, self._link, self._stale = [], None, True

    def _send(self, last: bool = False) -> None:
        self._due = None
        stream = self._stream()
        link = self._engine.link_for(stream)
        if link is None:
            self._lose_engine()
            return
        entries, self._entries = self._entries, []
        if not (self._stale or entries):
            return
        if self._link is not None and link is not self._link:
            self._link.send(messages.Disown("", self._key, self._number))
        word = messages.Entrust(
            "" if stream is None else stream.id, self._key, self._number, 0 if stream is None else stream.read, entries
        )
        if self._stale or link is not self._link or self._since_base > ENTRIES_TO_A_BASE:
            self._make_base(word, stream, last)
        self._link = link
        link.send(word)

    def _make_base(self, word: messages.Entrust, stream: EngineStream | None, last: bool) -> None:
        word.base, word.chunk = self._base(last)
        word.entries, word.last = [], last
        word.keep_s, word.keep_bytes = self._settings.keep_s, self._settings.keep_bytes
        if stream is not None:
            word.positions_before, word.samples_before = stream.before
        self._stale, self._since_base = False, 0
