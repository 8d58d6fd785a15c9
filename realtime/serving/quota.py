"""Limits on what callers use: their sessions, places for other work, the rate of messages, time on the event loop.

A caller is an API key, or a client address on a server without keys. The registry asks a `SessionQuota` before it opens
sessions, and each session has an `Admission` until it ends. `LocalQuota` counts for a server with a single gateway
process; with several workers the parent counts (`realtime/workers/worker_link.py`). Room in the engines is checked by
the registry, not here.

Uploads, viewers, pulled streams and WebRTC calls take places. Where several API keys share a server, one of them has at
most half of its places (`places_of_one_key`). `SharedCount` counts what callers have used, for example uploads in
progress and their bytes. `FairPlaces` lets callers wait for a place in turn, for uploads that are transcribed.

A client that sends too many messages is slowed by its `Pace` and not refused. A client whose messages arrive faster
than they are handled would occupy the event loop without end, so after `SHARE_S` it waits in `FairTurns`, which lets
one client continue in each iteration of the loop. A client that sends rarely then waits for one share at most.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from realtime.config import LimitsConfig
from realtime.session.settings import Settings


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request: a name to count by, which is not the API key, and the settings of its client secret."""

    name: str
    settings: Settings | None = None

    @property
    def is_secret(self) -> bool:
        """The caller has a client secret, for example a browser. It may open sockets and do nothing else."""
        return self.settings is not None


# Seconds over which new sessions are counted.
RATE_WINDOW_S = 60.0
# Callers whose new sessions are counted; beyond this number the count of the oldest caller is dropped.
MAX_COUNTED_CALLERS = 10_000


@dataclass(frozen=True, slots=True)
class Figures:
    """Numbers of sessions of one process or of several. `streamless` have no engine stream yet; `waiting` are those of
    them that began recently."""

    sessions: int = 0
    connected: int = 0
    speaking: int = 0
    streamless: int = 0
    waiting: int = 0

    def __add__(self, other: Figures) -> Figures:
        return Figures(
            self.sessions + other.sessions,
            self.connected + other.connected,
            self.speaking + other.speaking,
            self.streamless + other.streamless,
            self.waiting + other.waiting,
        )


@dataclass(frozen=True, slots=True)
class QuotaDecision:
    """Whether new sessions are admitted: if not, `reason` names the limit and `retry_s` the seconds until a retry.
    `others` are the figures of the other processes."""

    reason: str | None = None
    retry_s: int = 0
    others: Figures = Figures()


class Admission:
    """The sessions of one caller that are counted in the quota until `release`.

    It begins empty; `enter` counts sessions. `release` uncounts them, and has no effect the second time. Each session
    that is made gets its own admission with `part`.
    """

    __slots__ = ("_caller", "_quota", "_sessions")

    def __init__(self, quota: SessionQuota, caller: str) -> None:
        self._quota = quota
        self._caller = caller
        self._sessions = 0

    async def enter(self, sessions: int) -> QuotaDecision:
        """Ask for this number of sessions. They are counted if the decision has no `reason`."""
        answer = await self._quota.enter(self._caller, sessions)
        if answer.reason is None:
            self._sessions += sessions
        return answer

    def enter_again(self) -> None:
        """Count an adopted session; limits do not apply to it."""
        self._quota.enter_again(self._caller)
        self._sessions += 1

    def part(self) -> Admission:
        """An admission for one session, taken out of this one."""
        assert self._sessions, "each session is admitted before it is made"
        part = Admission(self._quota, self._caller)
        self._sessions, part._sessions = self._sessions - 1, 1
        return part

    def release(self) -> None:
        sessions, self._sessions = self._sessions, 0
        if sessions:
            self._quota.leave(self._caller, sessions)


class SessionQuota(Protocol):
    """Counts the sessions of a server. `others` are the last known figures of the other processes."""

    others: Figures

    async def enter(self, caller: str, sessions: int) -> QuotaDecision:
        """Count this number of sessions of the caller, unless a limit forbids it. Nothing is counted if this raises."""

    def enter_again(self, caller: str) -> None:
        """Count an adopted session; limits do not apply to it."""

    def leave(self, caller: str, sessions: int = 1) -> None:
        """Uncount this number of sessions."""

    def tick(self, own: Figures) -> None:
        """Called by the ticker with the figures of this process."""


class Counts:
    """Open sessions and new sessions per minute, by caller and by process."""

    def __init__(self, limits: LimitsConfig, clock: Callable[[], float]) -> None:
        # May be replaced while sessions are counted.
        self.limits = limits
        self._clock = clock
        self._by_process: dict[int, Counter[str]] = {}
        self._arrivals: dict[str, deque[float]] = {}

    def enter(self, process: int, caller: str, sessions: int) -> tuple[str, int] | None:
        """Count new sessions; or return the limit that they would exceed, and the seconds until a retry."""
        limits = self.limits
        most, per_caller = limits.max_sessions, limits.sessions_per_key
        if per_caller and sum(counts[caller] for counts in self._by_process.values()) + sessions > per_caller:
            return "sessions_per_key", 10
        if most and self.total() + sessions > most:
            return "capacity", 0
        wait_s = self._count_arrivals(caller, sessions)
        if wait_s:
            return "rate", wait_s
        self.add(process, caller, sessions)
        return None

    def add(self, process: int, caller: str, sessions: int = 1) -> None:
        self._by_process.setdefault(process, Counter())[caller] += sessions

    def leave(self, process: int, caller: str, sessions: int = 1) -> None:
        counts = self._by_process.get(process, Counter())
        counts[caller] -= sessions
        if counts[caller] <= 0:
            del counts[caller]

    def total(self) -> int:
        """Open sessions of all callers and processes."""
        return sum(counts.total() for counts in self._by_process.values())

    def forget(self, process: int) -> None:
        """Drop the counts of a process that has ended."""
        self._by_process.pop(process, None)

    def tick(self) -> None:
        now = self._clock()
        for name in [name for name, recent in self._arrivals.items() if not recent or recent[-1] < now - RATE_WINDOW_S]:
            del self._arrivals[name]

    def _count_arrivals(self, caller: str, sessions: int) -> int:
        limit = self.limits.new_sessions_per_minute
        if not limit:
            return 0
        now = self._clock()
        if caller not in self._arrivals and len(self._arrivals) >= MAX_COUNTED_CALLERS:
            del self._arrivals[next(iter(self._arrivals))]
        recent = self._arrivals.setdefault(caller, deque())
        while recent and recent[0] <= now - RATE_WINDOW_S:
            recent.popleft()
        if len(recent) + sessions > limit:
            return max(1, round(recent[0] + RATE_WINDOW_S - now)) if recent else round(RATE_WINDOW_S)
        recent.extend([now] * sessions)
        return 0


class LocalQuota:
    """The quota of a server with a single process."""

    others = Figures()

    def __init__(self, limits: LimitsConfig, clock: Callable[[], float]) -> None:
        self.counts = Counts(limits, clock)

    async def enter(self, caller: str, sessions: int) -> QuotaDecision:
        refused = self.counts.enter(0, caller, sessions)
        return QuotaDecision() if refused is None else QuotaDecision(*refused)

    def enter_again(self, caller: str) -> None:
        self.counts.add(0, caller)

    def leave(self, caller: str, sessions: int = 1) -> None:
        self.counts.leave(0, caller, sessions)

    def tick(self, own: Figures) -> None:
        self.counts.tick()


# Shares of the server's places


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


# The rate of messages, and time on the event loop


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
