"""What a client has still to be sent: bounded, and kind to a slow reader.

Policy when the client reads too slowly: a delta that waits behind another delta of the same item is merged into it, so
a slow reader gets fewer, longer deltas and no text is lost. When even that grows past the limits, the outbox is
overrun and the socket is closed. Every event counts, with the bytes of its fields as JSON.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from realtime.dialects.base import json_bytes
from realtime.session.events import Acknowledged, Delta, Hangup, ServerEvent


class Outbox:
    """A queue of core events with one reader; putting never waits."""

    def __init__(self, max_events: int, max_bytes: int) -> None:
        self.bytes = 0
        self._max_events = max_events
        self._max_bytes = max_bytes
        # Each event with its size.
        self._events: deque[tuple[ServerEvent, int]] = deque()
        self._hangup: Hangup | None = None
        self._overrun = False
        # Told once when the reader has fallen too far behind.
        self.on_overrun: Callable[[], None] | None = None
        # Set when there is something to take. Outboxes with one reader share one.
        self.wake = asyncio.Event()

    def __len__(self) -> int:
        return len(self._events)

    @property
    def has_next(self) -> bool:
        """The next event, or the end, can be taken without a wait."""
        return bool(self._events) or self._hangup is not None

    @property
    def overrun(self) -> bool:
        """The reader fell too far behind; nothing more is taken."""
        return self._overrun

    def put(self, event: ServerEvent) -> None:
        if self._overrun or self._hangup is not None:
            return
        last, last_size = self._events[-1] if self._events else (None, 0)
        size = json_bytes(event)
        self.bytes += size
        if isinstance(event, Delta) and isinstance(last, Delta) and last.item_id == event.item_id:
            event = replace(event, text=last.text + event.text, words=last.words + event.words)
            size += last_size
            self._events.pop()
        elif isinstance(event, Acknowledged) and isinstance(last, Acknowledged):
            self.bytes -= last_size
            self._events.pop()
        self._events.append((event, size))
        self._overrun = len(self._events) > self._max_events or self.bytes > self._max_bytes
        self.wake.set()
        if self._overrun and self.on_overrun is not None:
            self.on_overrun()

    def hang_up(self, hangup: Hangup) -> None:
        """Close the socket after everything that was put before."""
        if self._hangup is None:
            self._hangup = hangup
            self.wake.set()

    async def get(self) -> ServerEvent | Hangup:
        """The next event; the hang-up comes last and again on every later call."""
        while not self.has_next:
            self.wake.clear()
            await self.wake.wait()
        event = self.take()
        if event is not None:
            return event
        assert self._hangup is not None
        return self._hangup

    def take(self) -> ServerEvent | None:
        """The next event, if one waits."""
        if not self._events:
            return None
        event, size = self._events.popleft()
        self.bytes -= size
        return event

    def waiting(self) -> list[ServerEvent]:
        return [event for event, _ in self._events]
