"""A thousand short sessions through the real gateway: each leaves nothing behind."""

from __future__ import annotations

import asyncio
import sys
import time

import pytest

from tests.e2e.conftest import Running, running_server
from tests.e2e.raw_client import COMPLETED, raw_client
from tests.realtime.gateway_doubles import FakeEngine, silence, tone
from tests.soak.growth import assert_flat, object_count, resident_bytes

SESSIONS = 1_000
AT_ONCE = 4
BATCH = 20


async def one_session(url: str) -> None:
    async with raw_client(url) as client:
        await client.append(tone(0.5) + silence(0.7))
        done = (await client.until(COMPLETED))[-1]
        assert done["transcript"] == "w1"


async def batch(running: Running, count: int) -> float:
    """So many sessions, a few at a time; returns the CPU seconds of one."""
    began = time.process_time()
    for _ in range(count // AT_ONCE):
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(one_session(running.ws))
    while len(running.gateway.sessions):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    # The double keeps what it saw for tests to look at.
    running.engine.streams.clear()
    running.engine.opened.clear()
    return (time.process_time() - began) / count


async def test_sessions_leave_no_objects_behind() -> None:
    async with running_server(FakeEngine()) as running:
        await batch(running, 40)
        before = object_count()
        await batch(running, 40)
        # On a busy machine the last sockets close a little later.
        for _ in range(100):
            if object_count() - before <= 40:
                break
            await asyncio.sleep(0.05)
        assert object_count() - before <= 40, "less than one object for each session"


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_a_thousand_sessions_cost_the_same_from_first_to_last(capsys: pytest.CaptureFixture[str]) -> None:
    sessions: list[float] = []
    seconds: list[float] = []
    resident: list[float] = []
    objects: list[float] = []
    async with running_server(FakeEngine()) as running:
        await batch(running, 5 * BATCH)
        for done in range(BATCH, SESSIONS + 1, BATCH):
            seconds.append(1000 * await batch(running, BATCH))
            sessions.append(done)
            resident.append(resident_bytes() / 2**20)
            objects.append(object_count())
    typical = sorted(seconds)[len(seconds) // 2]
    lines = [
        assert_flat("CPU of a session", sessions, seconds, "ms", harmless=0.05 * typical),
        assert_flat("resident memory", sessions, resident, "MiB", harmless=2.0),
        assert_flat("objects", sessions, objects, "objects", harmless=0.1 * SESSIONS),
    ]
    with capsys.disabled():
        sys.stdout.write(f"\n{SESSIONS} sessions of {typical:.1f} ms CPU: " + "; ".join(lines) + "\n")
