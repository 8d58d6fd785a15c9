"""What keeps an eager client from taking more than its share: a pace for one client, a turnstile for all of them.

A client that sends too many messages is slowed by its pace, not refused. A client whose messages come faster than they
are handled would keep the event loop busy for as long as any of them wait. So a client that has had its share goes
through the turnstile, which lets one client by in each round of the loop: a client that sends a message now and then
waits for one share at most, however many others crowd.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

# How long a client's messages are handled at a stretch.
SHARE_S = 0.0002


class Pace:
    """A token bucket: lets `per_second` messages through on average, and a second's worth at once."""

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

    def may_pass(self) -> bool:
        """Whether a token could be taken without a wait. Takes none."""
        return self._tokens + (self._clock() - self._filled_at) * self._per_second >= 1

    async def wait(self) -> None:
        delay = self.delay()
        if delay:
            await asyncio.sleep(delay)


class FairTurns:
    """One for all sockets of a server."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Until all who came before have had another turn."""
        loop = asyncio.get_running_loop()
        mine: asyncio.Future[None] = loop.create_future()
        self._waiting.append(mine)
        if len(self._waiting) == 1:
            loop.call_soon(self._let_one_by, loop)
        await mine

    def _let_one_by(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting:
            first = self._waiting.popleft()
            if not first.done():
                first.set_result(None)
                break
        if self._waiting:
            loop.call_soon(self._let_one_by, loop)
