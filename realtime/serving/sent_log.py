"""The last frames a client was sent, numbered, for a client that comes back and has missed some.

The id of a numbered event is made of the session and the number. Numbers go on when another process goes on with the
session, so no id comes twice; and a process that writes an event again, from what the one before it left, gives it the
same id.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from realtime.dialects.json_frames import encode_json


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
