"""Conditions that must hold after every attack."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.attacks.conftest import HOLD, Beside
from tests.attacks.real_server import Hold, RealServer, peak_growth, watched_memory

MIB = 2**20
# Lines of the log that one attack may cause, and what any of them looks like: the server began it, and no control
# character of a client is in it.
MOST_LOG_LINES = 200
WELL_FORMED = re.compile(
    "(?:[0-9]{4}-[0-9]{2}-[0-9]{2} |(?:INFO|WARNING|ERROR) | {4}[|] )[^\\x00-\\x1f\\x7f-\\x9f\u2028\u2029]*"
)
# What decoders may have at once: the program that forks them, a few MB for each, and four files at their limit.
DECODERS_MIB = 1200
# How long a session, a task or a socket of an attacker may outlive it.
SETTLE_S = 20.0
# The good client has a session, a socket and a handful of tasks of its own, or is between two sessions.
GOOD_SESSIONS = 1
GOOD_TASKS = 8
GOOD_FILES = 4
# Threads of the pool stay; there are as many as asyncio makes, and no more.
POOL_THREADS = 8


@dataclass(frozen=True, slots=True)
class Rest:
    """The open resources of a server without an attack."""

    sessions: int
    tasks: float
    files: int
    threads: int


def at_rest(server: RealServer) -> Rest:
    return Rest(_sessions(server), server.metric("tasks"), server.open_files(), server.threads())


def _sessions(server: RealServer) -> int:
    capacity: dict[str, Any] = server.capacity()
    return max(int(capacity["sessions"]), int(capacity["streams_used"]))


@dataclass(slots=True)
class Cost:
    """What an attack took, once it is over."""

    hold: Hold | None = None

    def report(self, record_property: Callable[[str, object], None]) -> None:
        """Have it printed at the end of the run."""
        assert self.hold is not None
        record_property(HOLD, [self.hold.ms, str(self.hold)])


@contextmanager
def harmless(server: RealServer, beside: Beside, name: str, gateway_mib: float, engine_mib: float) -> Iterator[Cost]:
    """Run what is inside beside the good client, then look at everything that an attack may not change."""
    rest, cost = at_rest(server), Cost()
    complaints, logged = len(server.complaints()), len(server.log_lines())
    began = time.time()
    try:
        with watched_memory(server) as seen:
            yield cost
    finally:
        beside.attacks.append((name, began, time.time()))
        cost.hold = server.longest_hold(began)
    growth = peak_growth(seen)
    assert server.engine_is_the_same(), "the engine was restarted"
    assert growth.gateway <= gateway_mib * MIB, f"the gateway grew by {growth.gateway / MIB:.1f} MiB"
    assert growth.decoders <= DECODERS_MIB * MIB, f"decoders had {growth.decoders / MIB:.1f} MiB at once"
    assert growth.engine <= engine_mib * MIB, f"the engine grew by {growth.engine / MIB:.1f} MiB"
    nothing_is_left(server, rest)
    assert not (said := server.complaints()[complaints:]), said
    lines = server.log_lines()[logged:]
    assert len(lines) <= MOST_LOG_LINES, f"{len(lines)} lines were logged: {lines[-1]}"
    assert [line for line in lines if not WELL_FORMED.fullmatch(line)] == []
    beside.check()


def nothing_is_left(server: RealServer, rest: Rest) -> None:
    """Sessions, streams, tasks, sockets and threads are what they were."""
    _falls_to("sessions", lambda: _sessions(server), max(GOOD_SESSIONS, rest.sessions))
    _falls_to("tasks", lambda: server.metric("tasks"), rest.tasks + GOOD_TASKS)
    _falls_to("open files", server.open_files, rest.files + GOOD_FILES)
    _falls_to("threads", server.threads, rest.threads + POOL_THREADS)


def _falls_to(what: str, count: Callable[[], float], most: float) -> None:
    deadline = time.monotonic() + SETTLE_S
    while (found := count()) > most:
        assert time.monotonic() < deadline, f"{found:g} {what} are left over; at most {most:g} may be"
        time.sleep(0.1)
