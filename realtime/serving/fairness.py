"""Fair shares of the event loop.

A client whose messages come faster than they are handled would keep the loop busy for as long as any of them wait. So
whoever has had its turn goes through a turnstile that lets one client by in each round of the loop: those that send a
message now and then wait for one turn at most, however many others push.
"""

from __future__ import annotations

import asyncio
from collections import deque

# How long a client's messages are handled at a stretch.
TURN_S = 0.0002


class Turnstile:
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
