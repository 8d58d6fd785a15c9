"""Engines that come and go by a table: connected to, drained, left, refused; a bad table changes nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from engine.client import client as clients
from engine.client.client import ClientSettings, EngineClient
from engine.client.engine_handles import EngineThread
from engine.errors import EngineUnreachable
from tests.engine import fakes
from tests.engine.client.test_fleet_table import put

Listed = tuple[str, EngineThread] | tuple[str, EngineThread, str]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "TABLE_POLL_SECONDS", 0.01)


class Fleet:
    """A gateway's client over a table that a test writes."""

    def __init__(self, client: EngineClient, path: Path) -> None:
        self.client, self.path, self.number = client, path, 0

    def list(self, engines: Sequence[Listed]) -> None:
        self.number += 1
        rows = [{"name": row[0], "address": row[1].address, "state": (*row, "serving")[2]} for row in engines]
        put(self.path, {"number": self.number, "engines": rows})

    async def connected(self, *names: str) -> None:
        async with asyncio.timeout(20):
            await fakes.until(lambda: sorted(share.name for share in self.client.capacity().engines) == sorted(names))

    def streams(self, name: str) -> int:
        (pooled,) = [pooled for pooled in self.client.supervisor.pool.all if pooled.name == name]
        return len(pooled.streams)


@asynccontextmanager
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    path = tmp_path / "table.json"
    client = EngineClient([], ClientSettings(table=str(path)))
    await client.start()
    try:
        yield Fleet(client, path)
    finally:
        await client.close()


@asynccontextmanager
async def engines(*build: partial[object]) -> AsyncIterator[list[EngineThread]]:
    threads = [EngineThread(one, warm=False) for one in build]  # type: ignore[arg-type]
    for thread in threads:
        await thread.start()
    try:
        yield threads
    finally:
        for thread in threads:
            await thread.stop()


PLAIN = partial(fakes.build)


async def test_engines_are_connected_to_drained_and_left_as_the_table_says(tmp_path: Path) -> None:
    async with engines(PLAIN, PLAIN) as (one, two), fleet(tmp_path) as group:
        client = group.client
        with pytest.raises(EngineUnreachable):
            await client.open("too soon")
        group.list([("e1", one)])
        await group.connected("e1")
        await client.wait_until_ready()
        stream = await client.open("s1")
        group.list([("e1", one, "draining"), ("e2", two)])
        await group.connected("e1", "e2")
        async with asyncio.timeout(20):
            await fakes.until(lambda: client.capacity().engines[0].draining)
        for number in range(5):
            await client.open(f"new{number}")
        assert group.streams("e2") >= 5, "nothing new goes to one that drains"
        await stream.abort()
        group.list([("e2", two)])
        await group.connected("e2")
        table = client.capacity().table
        assert table is not None and (table.number, table.problem) == (3, "")


async def test_a_table_that_cannot_be_read_leaves_the_engines_as_they_are(tmp_path: Path) -> None:
    async with engines(PLAIN) as (one,), fleet(tmp_path) as group:
        group.list([("e1", one)])
        await group.connected("e1")
        group.path.unlink()

        def problem() -> str:
            table = group.client.capacity().table
            assert table is not None
            return table.problem

        async with asyncio.timeout(20):
            await fakes.until(lambda: "No such file" in problem())
        await group.client.wait_until_ready()
        assert (await group.client.open("s")).is_open


async def test_an_engine_with_other_weights_is_refused_and_not_mixed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with engines(partial(fakes.build, weights="a"), partial(fakes.build, weights="b")) as (one, two):
        async with fleet(tmp_path) as group:
            group.list([("e1", one)])
            await group.connected("e1")
            with caplog.at_level(logging.ERROR):
                group.list([("e1", one), ("e2", two)])
                async with asyncio.timeout(20):
                    await fakes.until(lambda: any(gone.problem for gone in group.client.capacity().missing))
                tries = time.monotonic() + 1.0
                await fakes.until(lambda: time.monotonic() > tries)
            (missing,) = group.client.capacity().missing
            assert missing.name == "e2" and "other weights (b, not a)" in missing.problem
            assert caplog.text.count("other weights") == 1, "said once, however often it is tried"
            for number in range(5):
                await group.client.open(f"s{number}")
            assert group.streams("e1") == 5
