"""A spare engine: it waits without streams, takes over when the other one dies, and is replaced. Real processes."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from engine.client import supervisor
from engine.client.client import ClientSettings, EngineClient
from engine.client.engine_handles import EngineProcess
from engine.errors import AtCapacity, EngineDead
from engine.messages import Closed
from engine.server.loop import EngineLoop
from tests.engine import fakes


class Pair:
    """A client with one engine that serves and a spare."""

    def __init__(self, client: EngineClient, engines: list[EngineProcess]) -> None:
        self.client = client
        self.engines = engines

    @property
    def pool(self) -> list[supervisor.PooledEngine]:
        return self.client.supervisor.pool.all

    @property
    def serving(self) -> EngineProcess:
        (pooled,) = [pooled for pooled in self.pool if pooled.serves]
        return self.engines[self.pool.index(pooled)]

    @property
    def spare(self) -> EngineProcess:
        (other,) = [engine for engine in self.engines if engine is not self.serving]
        return other

    async def both_ready(self) -> None:
        async with asyncio.timeout(30):
            await fakes.until(lambda: self.client.ready and self.client.capacity().spares_ready == 1)


@asynccontextmanager
async def pair(*engines: EngineProcess) -> AsyncIterator[Pair]:
    async with fakes.running(*engines, spares=1) as client:
        yield Pair(client, list(engines))


def two(**options: object) -> list[EngineProcess]:
    return [fakes.process(partial(fakes.build, **options)) for _ in range(2)]


async def test_the_spare_has_no_streams_and_counts_for_nothing() -> None:
    async with pair(*two(max_streams=3)) as both:
        await both.both_ready()
        capacity = both.client.capacity()
        assert (capacity.total, capacity.engines_wanted, capacity.spares_wanted) == (3, 1, 1)
        streams = [await both.client.open(f"s{number}") for number in range(3)]
        assert [len(pooled.streams) for pooled in both.pool if not pooled.serves] == [0]
        with pytest.raises(AtCapacity):
            await both.client.open("one too many")
        for stream in streams:
            await stream.abort()


@pytest.mark.parametrize("windowed", [False, True])
async def test_it_takes_over_at_once_and_another_one_waits(windowed: bool) -> None:
    audio = fakes.speech(8, 1)
    async with pair(*two(windowed=windowed)) as both:
        await both.both_ready()
        calm = await fakes.transcribe(both.client, "calm", audio)
        first, second = both.serving, both.spare
        spare_pid = second.pid

        async def kill_once(count: int) -> None:
            if count == 30:
                fakes.kill(first.pid)
                await fakes.until(lambda: both.client.ready and both.serving is second)

        killed = await fakes.transcribe(both.client, "killed", audio, kill_once)
        assert killed.words == calm.words and isinstance(killed.last, Closed)
        # The process that waited went on: it was not started for this.
        assert second.pid == spare_pid
        await both.both_ready()
        assert both.spare is first and both.client.metrics().restarts == 1
        assert both.client.metrics().streams_recovered == 1
        assert isinstance((await fakes.transcribe(both.client, "later", fakes.speech(1, 2))).last, Closed)


async def test_the_next_spare_is_started_when_the_streams_are_recovered(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair(*two()) as both:
        await both.both_ready()
        first, recovered_at_start = both.serving, []
        start = first.start

        async def recorded_start() -> None:
            recovered_at_start.append(both.client.metrics().streams_recovered)
            await start()

        monkeypatch.setattr(first, "start", recorded_start)

        async def kill_once(count: int) -> None:
            if count == 30:
                fakes.kill(first.pid)
                await fakes.until(lambda: both.serving is not first)

        audio = fakes.speech(8, 1)
        await asyncio.gather(
            fakes.transcribe(both.client, "a", audio, kill_once), fakes.transcribe(both.client, "b", audio)
        )
        await both.both_ready()
        assert recovered_at_start == [2]


async def test_again_and_again() -> None:
    audio = fakes.speech(12, 1)
    async with pair(*two()) as both:
        calm = await fakes.transcribe(both.client, "calm", audio)
        kills = 0

        async def kill_now_and_then(count: int) -> None:
            nonlocal kills
            if count % 25 == 0:
                await both.both_ready()
                victim = both.serving
                fakes.kill(victim.pid)
                kills += 1
                await fakes.until(lambda: both.client.ready and both.serving is not victim)

        killed = await fakes.transcribe(both.client, "killed", audio, kill_now_and_then)
        assert killed.words == calm.words and kills >= 4
        await both.both_ready()
        assert both.client.metrics().restarts == kills


async def test_a_dead_spare_is_replaced_and_nobody_notices() -> None:
    audio = fakes.speech(6, 1)
    async with pair(*two()) as both:
        await both.both_ready()
        serving, dead = both.serving, both.spare.pid

        async def kill_the_spare(count: int) -> None:
            if count == 20:
                fakes.kill(dead)
                await fakes.until(lambda: both.client.capacity().spares_ready == 0)
                await both.both_ready()

        transcript = await fakes.transcribe(both.client, "a", audio, kill_the_spare)
        assert isinstance(transcript.last, Closed) and both.serving is serving and both.spare.pid != dead
        assert both.client.metrics().streams_recovered == 0


async def test_both_at_once_is_as_without_a_spare() -> None:
    audio = fakes.speech(6, 1)
    async with pair(*two()) as both:
        await both.both_ready()
        calm = await fakes.transcribe(both.client, "calm", audio)

        async def kill_both(count: int) -> None:
            if count == 20:
                for engine in both.engines:
                    fakes.kill(engine.pid)
                await fakes.until(lambda: not both.client.ready)

        killed = await fakes.transcribe(both.client, "killed", audio, kill_both)
        assert killed.words == calm.words
        await both.both_ready()
        assert both.client.metrics().restarts == 2


async def test_a_stream_that_kills_engines_is_ended_and_the_others_go_on() -> None:
    poison = fakes.speech(4, 1)
    poison[3000] = fakes.POISON
    async with pair(*two(die_with=signal.SIGABRT)) as both:
        await both.both_ready()
        good = asyncio.create_task(fakes.transcribe(both.client, "good", fakes.speech(4, 2)))
        await fakes.transcribe(both.client, "bad", poison)
        assert isinstance((await good).last, Closed)
        assert both.client.metrics().crashing_streams == 1


def only_once(marker: Path) -> EngineLoop:
    """An engine that starts if no other one has."""
    if marker.exists():
        raise MemoryError("there is no room for a second engine")
    marker.touch()
    return fakes.build()


async def test_a_spare_that_cannot_start_is_told_and_serving_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "SPARE_RETRY_S", 0.05)
    build = partial(only_once, tmp_path / "taken")
    async with pair(fakes.process(build), fakes.process(build)) as both:
        first = both.serving
        async with asyncio.timeout(30):
            await fakes.until(lambda: caplog.text.count("the spare engine cannot be used; the serving") >= 2)
        assert "before it was ready; its log says why" in caplog.text
        assert both.client.ready and both.client.capacity().spares_ready == 0
        assert isinstance((await fakes.transcribe(both.client, "a", fakes.speech(1, 1))).last, Closed)
        # Now there is room, and it comes.
        (tmp_path / "taken").unlink()
        await both.both_ready()
        assert both.serving is first


async def test_an_engine_that_cannot_start_is_an_error_with_a_spare_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    client = EngineClient([fakes.process(no_engine), fakes.process(no_engine)], ClientSettings(spares=1))
    with pytest.raises(EngineDead, match="before it was ready"):
        await asyncio.wait_for(client.start(), 30)


def no_engine() -> EngineLoop:
    raise FileNotFoundError("no weights here")
