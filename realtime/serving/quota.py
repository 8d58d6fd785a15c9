"""Who a session belongs to."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from realtime.config import LimitsConfig
from realtime.session.settings import Settings


@dataclass(frozen=True, slots=True)
class Caller:
    """Who is asking: a name to count by that is not the key itself, and the settings a client secret carries."""

    name: str
    settings: Settings | None = None

    @property
    def is_secret(self) -> bool:
        """A browser that was given a client secret. It may open sockets, and nothing else."""
        return self.settings is not None


# What all gateway processes of a server share: who has how many sessions, and how many sessions wait for a stream.
#
# One process counts for itself. Several leave it to the one that started them, which counts for all.

RATE_WINDOW_S = 60.0
# Callers whose new sessions are counted; beyond so many in a minute, those that came first are counted anew.
MAX_COUNTED_CALLERS = 10_000


@dataclass(frozen=True, slots=True)
class Figures:
    """Of the sessions of one process, or of several. `waiting` have no stream yet, and came lately."""

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
    """Whether one more session may come: if not, `reason` says why and `retry_s` when to try again. `others` are the
    sessions of the other processes."""

    reason: str | None = None
    retry_s: int = 0
    others: Figures = Figures()


class Admission:
    """The right to some sessions of one caller, which are counted for as long as it is held.

    It exists before anything is counted. `release` gives back what it holds, and a second `release` gives back nothing.
    A session that is made gets a part of its own (`part`).
    """

    __slots__ = ("_caller", "_quota", "_sessions")

    def __init__(self, quota: SessionQuota, caller: str) -> None:
        self._quota = quota
        self._caller = caller
        self._sessions = 0

    async def enter(self, sessions: int) -> QuotaDecision:
        """Ask for this number of sessions. They are counted if the answer has no `reason`."""
        answer = await self._quota.enter(self._caller, sessions)
        if answer.reason is None:
            self._sessions += sessions
        return answer

    def enter_again(self) -> None:
        """A session came from another process."""
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
    """`others` are the figures of the other processes, as far as they are known."""

    others: Figures

    async def enter(self, caller: str, sessions: int) -> QuotaDecision:
        """Count this number of sessions of the caller, unless a limit forbids it. Nothing is counted if this raises."""

    def enter_again(self, caller: str) -> None:
        """A session came from another process."""

    def leave(self, caller: str, sessions: int = 1) -> None:
        """So many sessions have gone."""

    def tick(self, own: Figures) -> None:
        """Called now and then."""


class Counts:
    """Sessions at once and new sessions in a minute, by caller and by process."""

    def __init__(self, limits: LimitsConfig, clock: Callable[[], float]) -> None:
        # May be replaced while sessions are counted.
        self.limits = limits
        self._clock = clock
        self._by_process: dict[int, Counter[str]] = {}
        self._arrivals: dict[str, deque[float]] = {}

    def enter(self, process: int, caller: str, sessions: int) -> tuple[str, int] | None:
        """Count so many more sessions; or say which limit they would break, and in how many seconds to try again."""
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
        """Sessions at once, of all callers and processes."""
        return sum(counts.total() for counts in self._by_process.values())

    def forget(self, process: int) -> None:
        """It has ended, and its sessions with it."""
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
    """Of a server that is one process."""

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
