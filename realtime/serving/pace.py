"""A token bucket that makes a too eager client wait: it is slowed, not refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Pace:
    """Lets `per_second` messages through on average, and a second's worth at once."""

    def __init__(self, per_second: float, clock: Callable[[], float]) -> None:
        self._per_second = per_second
        self._clock = clock
        self._tokens = max(1.0, per_second)
        self._filled_at = clock()

    def delay(self) -> float:
        """Take one token; how long to wait before going on."""
        now = self._clock()
        self._tokens = min(max(1.0, self._per_second), self._tokens + (now - self._filled_at) * self._per_second)
        self._filled_at = now
        self._tokens -= 1
        return max(0.0, -self._tokens / self._per_second)

    async def wait(self) -> None:
        delay = self.delay()
        if delay:
            await asyncio.sleep(delay)
