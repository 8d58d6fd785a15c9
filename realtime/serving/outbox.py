"""The queue of a session's events that wait to be sent to its client.

The live session puts events into its outbox, and the writer of its connection takes them out. If the client reads
slowly, a delta is merged into a waiting delta of the same item: the client gets fewer and longer deltas, and no text is
lost. If the limits on events or bytes are exceeded nevertheless, the outbox is overrun, and the socket is closed. The
size of an event is that of its fields as JSON. Sent events are kept in `event_logs.py`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from realtime.dialects.base import json_bytes
from realtime.session.events import Acknowledged, Delta, Hangup, ServerEvent


class Outbox:
    """A queue of events with one reader; `put` never waits."""

    def __init__(self, max_events: int, max_bytes: int) -> None:
        self.bytes = 0
        self._max_events = max_events
        self._max_bytes = max_bytes
        # (event, its size in bytes as JSON)
        self._events: deque[tuple[ServerEvent, int]] = deque()
        self._hangup: Hangup | None = None
        self._overrun = False
        # Called when the limits are exceeded.
        self.on_overrun: Callable[[], None] | None = None
        # Set when an event or the hang-up was put. The outboxes of several channels share one.
        self.wake = asyncio.Event()

    def __len__(self) -> int:
        return len(self._events)

    @property
    def has_next(self) -> bool:
        """Whether `get` would return without waiting."""
        return bool(self._events) or self._hangup is not None

    @property
    def overrun(self) -> bool:
        """The limits were exceeded; further events are dropped."""
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
        """Close the socket after the events that were put before. Later events are dropped."""
        if self._hangup is None:
            self._hangup = hangup
            self.wake.set()

    async def get(self) -> ServerEvent | Hangup:
        """The next event. The hang-up comes after all events, and again on every later call."""
        while not self.has_next:
            self.wake.clear()
            await self.wake.wait()
        event = self.pop()
        if event is not None:
            return event
        assert self._hangup is not None
        return self._hangup

    def pop(self) -> ServerEvent | None:
        """The next event; None if there is none."""
        if not self._events:
            return None
        event, size = self._events.popleft()
        self.bytes -= size
        return event

    def events(self) -> list[ServerEvent]:
        """All waiting events, without removing them."""
        return [event for event, _ in self._events]
