"""Logs of the newest sent events, so that a reader that lost its connection can get the events it missed.

A frame is an event as JSON text. Frames are numbered from 1, and the oldest ones are dropped. `SentLog` has the events
of a session, for its client when it resumes. `EventLog` has the events of a stream that the server pulls, for any
number of readers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import Any

from realtime.dialects.base import encode_json


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
