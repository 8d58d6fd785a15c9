"""A cut line between a gateway and an engine: streams continue on another engine, with one owner each."""

from __future__ import annotations

import asyncio

import pytest

from engine.boundary import sockets
from engine.client.client import EngineClient
from engine.client.engine_handles import RemoteEngine
from engine.messages import Closed
from tests.engine import fakes
from tests.engine.client.cuttable_line import cuttable_line
from tests.engine.client.test_handoff import entrust
from tests.engine.test_fleet_secret import engine_over_tcp


def used(client: EngineClient) -> list[int]:
    return [share.used for share in client.capacity().engines]


@pytest.mark.parametrize("has_will", [False, True])
async def test_a_stream_goes_on_elsewhere_and_the_engine_forgets_it_when_the_line_is_back(
    has_will: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "ZMQ_HEARTBEAT_MS", 100)
    monkeypatch.setattr(sockets, "ZMQ_HEARTBEAT_TIMEOUT_MS", 1000)
    audio = fakes.speech(4, 5)
    with engine_over_tcp(None) as near, engine_over_tcp(None) as far:
        async with (
            cuttable_line(far) as line,
            fakes.running(RemoteEngine(f"tcp://127.0.0.1:{far}")) as watcher,
            fakes.running(RemoteEngine(line.address), RemoteEngine(f"tcp://127.0.0.1:{near}")) as client,
            asyncio.timeout(60),
        ):
            calm = await fakes.transcribe(watcher, "calm", audio, flush_every=10_000)
            await fakes.until(lambda: len(client.capacity().engines) == 2)
            beyond, here = client.supervisor.pool.all
            here.marked_draining = True
            stream = await client.open("moving")
            here.marked_draining = False
            said = fakes.Transcript()
            reading = asyncio.create_task(said.collect(stream))
            await stream.feed(audio[:3000])
            await fakes.until(lambda: used(watcher) == [1])
            if has_will:
                entrust(client, stream, stream.read_count)
            line.cut()
            await fakes.until(lambda: "moving" in here.streams)
            await stream.feed(audio[3000:])
            await stream.finish()
            await reading
            assert said.last == Closed("moving", len(audio))
            assert (said.text, said.words) == (calm.text, calm.words)
            line.mend()
            await fakes.until(lambda: beyond.link is not None and used(watcher) == [0])
