"""Limits for busy clients of sockets: the rate of their messages (`Pace`), and their time on the event loop.

A client that sends too many messages is slowed by its `Pace` and not refused. A client whose messages arrive faster
than they are handled would occupy the event loop without end, so after `SHARE_S` it waits in `FairTurns`, which lets
one client continue in each iteration of the loop. A client that sends rarely then waits for one share at most.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

# Seconds for which one client's messages are handled without yielding.
SHARE_S = 0.0002


class Pace:
    """A token bucket: `per_second` messages on average, with bursts of one second's worth."""

    def __init__(self, per_second: float, clock: Callable[[], float]) -> None:
        self._per_second = per_second
        self._clock = clock
        self._tokens = max(1.0, per_second)
        self._filled_at = clock()

    def delay(self) -> float:
        """Take one token; returns the seconds to wait."""
        now = self._clock()
        self._tokens = min(max(1.0, self._per_second), self._tokens + (now - self._filled_at) * self._per_second)
        self._filled_at = now
        self._tokens -= 1
        return max(0.0, -self._tokens / self._per_second)

    def may_pass(self) -> bool:
        """Whether a token is available now; takes none."""
        return self._tokens + (self._clock() - self._filled_at) * self._per_second >= 1

    async def wait(self) -> None:
        delay = self.delay()
        if delay:
            await asyncio.sleep(delay)


class FairTurns:
    """A queue of busy clients, shared by all sockets of a gateway."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Wait until every client that called this before has continued."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        if len(self._waiting) == 1:
            loop.call_soon(self._release_one, loop)
        await turn

    def _release_one(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting:
            first = self._waiting.popleft()
            if not first.done():
                first.set_result(None)
                break
        if self._waiting:
            loop.call_soon(self._release_one, loop)
