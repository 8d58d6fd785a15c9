"""A session's events for its client: the queue of those that wait to be sent, and logs of those that were sent.

The live session puts events into its `Outbox`, and the writer of its connection takes them out. If the client reads
slowly, a delta is merged into a waiting delta of the same item: the client gets fewer and longer deltas, and no text is
lost. If the limits on events or bytes are exceeded nevertheless, the outbox is overrun, and the socket is closed. The
size of an event is that of its fields as JSON.

The logs have the newest sent events, so that a reader that lost its connection can get the events it missed. A frame is
an event as JSON text. Frames are numbered from 1, and the oldest ones are dropped. `SentLog` has the events of a
session, for its client when it resumes. `EventLog` has the events of a stream that the server pulls, for any number of
readers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from realtime.dialects.base import encode_json, json_bytes
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


# Logs of the events that were sent


class FrameLog:
    """The newest frames with their numbers; at most `max_frames`, and `max_bytes` of them."""

    def __init__(self, max_frames: int, max_bytes: int) -> None:
        self.bytes = 0
        # Number of the last frame.
        self.last = 0
        self._max_frames = max_frames
        self._max_bytes = max_bytes
        # (number, frame, bytes)
        self._frames: deque[tuple[int, str, int]] = deque()

    def after(self, number: int, limit: int | None = None) -> list[tuple[int, str]]:
        """Up to `limit` frames after the one with this number, with their numbers; dropped frames are missing."""
        frames: list[tuple[int, str]] = []
        # From the end: most readers miss a few frames only.
        for at, frame, _ in reversed(self._frames):
            if at <= number:
                break
            frames.append((at, frame))
        frames.reverse()
        return frames[:limit]

    def _append(self, number: int, frame: str) -> None:
        size = len(frame.encode())
        self.last = number
        self._frames.append((number, frame, size))
        self.bytes += size
        while len(self._frames) > self._max_frames or self.bytes > self._max_bytes:
            self.bytes -= self._frames.popleft()[2]


class SentLog(FrameLog):
    """The sent frames of a session.

    The id of a numbered event is made of the session id and the sequence number. An adopter continues the numbers, so
    no id is used twice, and an event that it writes again gets the same id.
    """

    def __init__(self, session_id: str, max_frames: int, max_bytes: int) -> None:
        super().__init__(max_frames, max_bytes)
        # Ids of events without a number have no second underscore, so the two cannot collide.
        self._id_prefix = f"event_{session_id.removeprefix('sess_')}_"

    def add(self, body: dict[str, Any]) -> str:
        """Number the event, keep it and return it as a frame. If it has an `event_id`, that is replaced."""
        number = self.last + 1
        numbered = {**body, "seq": number}
        if "event_id" in body:
            numbered["event_id"] = f"{self._id_prefix}{number:x}"
        frame = encode_json(numbered)
        self._append(number, frame)
        return frame

    def load(self, first: int, frames: list[str]) -> None:
        """Add frames that another process sent; `first` is the number of the first. Known frames are skipped."""
        for number, frame in enumerate(frames, start=first):
            if number > self.last:
                self._append(number, frame)

    def newest(self, count: int) -> list[str]:
        """The last `count` frames; fewer if some of them were dropped."""
        return [frame for _, frame in self.after(self.last - count)]

    def missed(self, number: int) -> list[str] | None:
        """Frames sent after the one with this number; None if some of them were dropped."""
        first = self._frames[0][0] if self._frames else self.last + 1
        if not first - 1 <= number <= self.last:
            return None
        return [frame for _, frame in self.after(number)]


class EventLog(FrameLog):
    """The events of a pulled stream. Readers wait for the next one."""

    def __init__(self, max_frames: int, max_bytes: int) -> None:
        super().__init__(max_frames, max_bytes)
        self.is_closed = False
        self._news = asyncio.Event()

    def add(self, frame: str) -> None:
        self._append(self.last + 1, frame)
        self._wake()

    def close(self) -> None:
        self.is_closed = True
        self._wake()

    async def wait(self, seconds: float) -> None:
        """Wait for another event, or for this time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
