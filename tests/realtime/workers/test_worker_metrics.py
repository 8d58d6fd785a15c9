"""`/metrics` of a server with several workers: the same at every worker, also after workers have died."""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack

import pytest

from realtime.workers.parent import Parent
from tests.e2e.raw_client import greeted_client
from tests.engine import fakes
from tests.realtime.workers import engines
from tests.realtime.workers.clients import SpeakingClient
from tests.realtime.workers.test_worker import get, kill, url_of, workers

pytestmark = pytest.mark.timeout(240)
# Each scrape is a connection of its own, and the system spreads them: hardly all of them go to one of two workers.
SCRAPES = 24
COUNTER = re.compile(r"^(tickertape_\w+(?:_total|_count|_sum|_bucket)(?:\{[^}]*\})?) (\S+)$", re.MULTILINE)


async def counters(parent: Parent) -> dict[str, float]:
    return {name: float(value) for name, value in COUNTER.findall(await get(parent, "/metrics"))}


async def gauge(parent: Parent, name: str) -> float:
    found = re.search(rf"^tickertape_{name} (\S+)$", await get(parent, "/metrics"), re.MULTILINE)
    assert found is not None
    return float(found[1])


async def opened(parent: Parent, sessions: int) -> None:
    """Wait until so many are counted: what a worker counts is known to the others a moment later."""
    while (await counters(parent)).get('tickertape_sessions_opened_total{dialect="openai"}') != sessions:  # noqa: ASYNC110
        await asyncio.sleep(0.05)


async def scrape_and_check(parent: Parent, before: dict[str, float]) -> dict[str, float]:
    """No counter of any scrape is below that of one before."""
    for _ in range(SCRAPES):
        now = await counters(parent)
        backwards = {name: (value, now.get(name)) for name, value in before.items() if now.get(name, -1.0) < value}
        assert not backwards, backwards
        before = now
    return before


async def test_no_counter_goes_backwards_whichever_worker_answers_and_whichever_dies() -> None:
    audio = engines.talk(3, 1)
    async with workers() as parent:
        await asyncio.gather(*(SpeakingClient(lambda: url_of(parent), audio).speak() for _ in range(6)))
        await opened(parent, 6)
        before = await scrape_and_check(parent, {})
        assert before["tickertape_mm_cache_queries_total"] > 0
        for _ in range(2):
            dead = min(parent.workers)
            kill(parent, dead)
            await fakes.until(lambda dead=dead: len(parent.workers) == 2 and dead not in parent.workers)
            before = await scrape_and_check(parent, before)
            await asyncio.gather(*(worker.wait_until_ready() for worker in parent.workers.values()))
        await parent.restart()
        before = await scrape_and_check(parent, before)
        await asyncio.gather(*(SpeakingClient(lambda: url_of(parent), audio).speak() for _ in range(2)))
        await opened(parent, 8)
        after = await scrape_and_check(parent, before)
        assert after["tickertape_mm_cache_queries_total"] > before["tickertape_mm_cache_queries_total"]


async def test_gauges_are_sums_over_the_workers_that_live() -> None:
    async with workers() as parent, AsyncExitStack() as sockets:
        for _ in range(6):
            await sockets.enter_async_context(greeted_client(url_of(parent)))
        while await gauge(parent, "sessions_connected") != 6:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        assert {await gauge(parent, "sessions_connected") for _ in range(SCRAPES)} == {6.0}


async def test_what_a_scrape_reads_does_not_grow_with_the_workers_that_have_died() -> None:
    async with workers() as parent:
        await counters(parent)
        sizes = []
        for _ in range(4):
            dead = min(parent.workers)
            kill(parent, dead)
            await fakes.until(lambda dead=dead: len(parent.workers) == 2 and dead not in parent.workers)
            await asyncio.gather(*(worker.wait_until_ready() for worker in parent.workers.values()))
            await counters(parent)
            sizes.append((len(parent.totals), len(COUNTER.findall(await get(parent, "/metrics")))))
        kept, lines = zip(*sizes, strict=True)
        # A worker that has just come has not reported everything. Three that are kept would be three times as much.
        one_report = kept[0] // 4
        assert kept[-1] < kept[0] + one_report and len(set(lines)) == 1, sizes
