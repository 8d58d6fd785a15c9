"""Shares of a server's places for callers: uploads, viewers, pulled streams and WebRTC calls.

Where several API keys share a server, one of them has at most half of its places (`places_of_one_key`). `SharedCount`
counts what callers have used, for example uploads in progress and their bytes. `FairPlaces` lets callers wait for a
place in turn, for uploads that are transcribed. Sessions are counted in `quota.py`.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


def places_of_one_key(places: int, keys: int) -> int:
    """How many of the server's places one key may take: where several keys share them, half, rounded up."""
    return places if keys < 2 else -(-places // 2)


class SharedCount:
    """Places, or bytes, that callers share. `used` has those of each caller."""

    def __init__(self, limit: Callable[[], int], share: Callable[[], int], what: str) -> None:
        """`limit` is for all callers, `share` for one; both may change with a reload. `what` names them in a
        refusal."""
        self._limit = limit
        self._share = share
        self._what = what
        self.used: Counter[str] = Counter()

    def reserve(self, caller: str, size: int = 1) -> str | None:
        """Count `size` places of a caller; if a limit forbids it, count nothing and return the reason."""
        limit, share = self._limit(), self._share()
        if self.used.total() + size > limit:
            return f"The server has no room for more than {limit} {self._what}"
        if self.used[caller] + size > share:
            return f"One of several keys may have {share} {self._what}"
        self.used[caller] += size
        return None

    def release(self, caller: str, size: int = 1) -> None:
        self.used[caller] -= size
        if self.used[caller] <= 0:
            del self.used[caller]


class FairPlaces:
    """Places for work that waits. A free place goes to the waiting callers in turn, and one of several keys has at
    most its share: another key waits for one piece of work, not for all that came before."""

    def __init__(self, places: int, keys: Callable[[], int]) -> None:
        self._places = places
        self._keys = keys
        self._used: Counter[str] = Counter()
        # Caller -> its waiting futures. The caller that was served longest ago comes first.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def place(self, caller: str) -> AsyncIterator[None]:
        """Wait for a place, and hold it for the length of the block."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        self._assign_places()
        try:
            await turn
            yield
        finally:
            self._release(caller, turn)

    @property
    def callers(self) -> int:
        """The callers that hold a place or wait for one."""
        return len(self._used.keys() | self._waiting.keys())

    def _release(self, caller: str, turn: asyncio.Future[None]) -> None:
        queue = self._waiting.get(caller, deque())
        if not turn.cancelled():
            self._used[caller] -= 1
            if not self._used[caller]:
                del self._used[caller]
        elif turn in queue:
            queue.remove(turn)
            if not queue:
                del self._waiting[caller]
        self._assign_places()

    def _assign_places(self) -> None:
        share = places_of_one_key(self._places, self._keys())
        while self._used.total() < self._places:
            caller = next((caller for caller in self._waiting if self._used[caller] < share), None)
            if caller is None:
                return
            queue = self._waiting.pop(caller)
            first = queue.popleft()
            if queue:
                self._waiting[caller] = queue
            # A caller that was cancelled meanwhile does not take the place.
            if not first.cancelled():
                first.set_result(None)
                self._used[caller] += 1
