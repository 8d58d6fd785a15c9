"""Two gateways with two engines: engines drain and die, gateways stop, and the words of each session stay the same."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.client import client as clients
from engine.client import handoff, recovery
from engine.client.client import ClientSettings, EngineClient
from engine.client.stream import EngineStream
from engine.server.main import run_engine
from realtime.app import listening
from realtime.config import Config, LimitsConfig, ServerConfig, SessionConfig
from realtime.serving.metrics import Metrics
from realtime.serving.session_factory import GatewayServices
from realtime.serving.signed_tokens import Signer
from tests.engine import fakes
from tests.engine.client.test_fleet_table import put
from tests.realtime.workers import engines
from tests.realtime.workers.clients import SpeakingClient
from tests.realtime.workers.test_moving import Place, status_of
from tests.waiting import PATIENCE_S


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "TABLE_POLL_SECONDS", 0.02)
    monkeypatch.setattr(recovery, "MIGRATION_POLL_SECONDS", 0.02)
    monkeypatch.setattr(recovery, "PAUSE_WAIT_SECONDS", 0.1)
    monkeypatch.setattr(handoff, "UNSURE_SECONDS", 0.5)


class Engine:
    """In a thread of this process, behind a socket that breaks when it ends."""

    def __init__(self, address: str, windowed: bool) -> None:
        self.address = address
        self._stop = threading.Event()
        build = partial(engines.build, windowed=windowed)
        self._thread = threading.Thread(target=run_engine, args=(address, build, self._stop.is_set, False))
        self._thread.start()

    async def stop(self) -> None:
        self._stop.set()
        await asyncio.to_thread(self._thread.join)


class Fleet:
    """Two of each, and a client that speaks and comes back where `at` says."""

    def __init__(self, places: list[Place], threads: list[Engine], path: Path) -> None:
        self.places, self.engines, self.path = places, threads, path
        self.at = 0
        self.draining: set[int] = set()
        self.number = 0
        self.list()

    def list(self) -> None:
        self.number += 1
        rows = [
            {
                "name": f"e{number}",
                "address": engine.address,
                "state": "draining" if number in self.draining else "serving",
            }
            for number, engine in enumerate(self.engines)
        ]
        put(self.path, {"number": self.number, "engines": rows})

    def streams(self, number: int) -> int:
        """Of all gateways on one engine."""
        pool = [pooled for place in self.places for pooled in place.client.supervisor.pool.all]
        return sum(len(pooled.streams) for pooled in pool if pooled.engine.address == self.engines[number].address)

    @property
    def home(self) -> int:
        """The engine that has the stream."""
        (number,) = [number for number in range(2) if self.streams(number)]
        return number

    def has_will_at(self, number: int) -> bool:
        handoffs = [entry.live.handoff for place in self.places for entry in place.entries]
        links = [handoff._link.address for handoff in handoffs if handoff is not None and handoff._link is not None]
        return links == [self.engines[number].address]

    async def moved_to(self, number: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await fakes.until(
                lambda: self.streams(number) == 1 and not self.streams(1 - number) and self.has_will_at(number)
            )

    async def drain_engine(self) -> None:
        home = self.home
        self.draining = {home}
        self.list()
        await self.moved_to(1 - home)

    async def kill_engine(self) -> None:
        home = self.home
        await self.engines[home].stop()
        await self.moved_to(1 - home)

    async def drain_gateway(self) -> None:
        sessions = self.places[self.at].gateway.sessions
        self.at = 1 - self.at
        sessions.hands_over = True
        await sessions.drain(1.0)
        await self.back()

    async def leave_gateway(self) -> None:
        """The client's socket breaks, and it comes back at the other gateway."""
        old = self.places[self.at]
        self.at = 1 - self.at
        old.cut()
        await self.back()

    async def back(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await fakes.until(
                lambda: len(self.places[self.at].entries) == 1 and self.places[self.at].gateway.sessions.connected == 1
            )


@asynccontextmanager
async def fleet(tmp_path: Path, windowed: bool) -> AsyncIterator[Fleet]:
    path, signer = tmp_path / "table.json", Signer()
    config = Config(
        server=ServerConfig(port=0, drain_s=1.0), limits=LimitsConfig(max_load=0), session=SessionConfig(resume_s=60.0)
    )
    async with AsyncExitStack() as stack:
        threads = [Engine(f"ipc://{tmp_path}/e{number}", windowed) for number in range(2)]
        for thread in threads:
            stack.push_async_callback(thread.stop)
        found: list[Place] = []
        for _ in range(2):
            client = EngineClient([], ClientSettings(table=str(path)))
            await client.start()
            stack.push_async_callback(client.close)
            around = GatewayServices(Metrics(), signer, client)
            running = await stack.enter_async_context(listening(client, config, around))
            url = running.url.replace("http", "ws", 1) + "/v1/realtime"
            found.append(Place(url, client, running.server.gateway))
        group = Fleet(found, threads, path)
        async with asyncio.timeout(PATIENCE_S):
            await fakes.until(lambda: all(len(place.client.capacity().engines) == 2 for place in found))
        yield group


STORIES: list[list[str]] = [
    ["drain_engine"],
    ["kill_engine", "leave_gateway"],
    ["drain_gateway", "drain_engine"],
    ["drain_engine", "leave_gateway", "drain_engine"],
]


@pytest.fixture(scope="module")
def audio() -> bytes:
    return engines.talk(6, 1)


@pytest.mark.parametrize("story", STORIES, ids="-".join)
@pytest.mark.parametrize("windowed", [True, False])
async def test_a_session_says_the_same_whatever_happens_around_it(
    tmp_path: Path, audio: bytes, windowed: bool, story: list[str]
) -> None:
    if not windowed and story[-1] == "drain_engine" and len(story) > 1:
        pytest.skip("a frame-synchronous stream of another gateway stays until its window was heard anew")
    # Where a frame-synchronous model is flushed decides what it says, and that depends on when a pause is noticed.
    detection: dict[str, Any] = {} if windowed else {"turn_detection": None}
    async with fleet(tmp_path, windowed) as group:
        calm = SpeakingClient(lambda: group.places[0].url, audio, **detection)
        await calm.speak()
        moving = SpeakingClient(lambda: group.places[group.at].url, audio, **detection)
        moving.hold_at(1.0)
        speaking = asyncio.create_task(moving.speak())
        async with asyncio.timeout(PATIENCE_S):
            await fakes.until(lambda: len(moving.events) >= 3 and group.streams(0) + group.streams(1) == 1)
        for number, chapter in enumerate(story):
            # A stream that another gateway had leaves its engine when a turn has ended since.
            moving.hold_at(1.0 + 2.0 * number)
            await getattr(group, chapter)()
        moving.hold_at(None)
        await speaking
        moving.check()
        assert calm.text and moving.text == calm.text


async def test_a_stream_that_is_handed_off_is_not_ended_by_what_it_says_before_the_last_save_has_left(
    tmp_path: Path, audio: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    aborted: list[str] = []

    async def abort(stream: EngineStream) -> None:
        aborted.append(stream.id)

    async with fleet(tmp_path, True) as group:
        moving = SpeakingClient(lambda: group.places[group.at].url, audio)
        moving.hold_at(1.0)
        speaking = asyncio.create_task(moving.speak())
        async with asyncio.timeout(PATIENCE_S):
            await fakes.until(lambda: len(moving.events) >= 3 and group.streams(0) + group.streams(1) == 1)
        (entry,) = group.places[0].entries
        assert entry.live.handoff is not None
        left, may_leave = entry.live.handoff.wait_until_sent, asyncio.Event()

        async def left_late() -> None:
            await may_leave.wait()
            await left()

        monkeypatch.setattr(entry.live.handoff, "wait_until_sent", left_late)
        monkeypatch.setattr(EngineStream, "abort", abort)
        draining = asyncio.create_task(group.drain_gateway())
        async with asyncio.timeout(PATIENCE_S):
            await fakes.until(lambda: entry.is_released)
        # As an output does.
        entry.live.runner.queue.wake()
        for _ in range(50):
            await asyncio.sleep(0)
        assert not aborted
        may_leave.set()
        await draining
        moving.hold_at(None)
        await speaking
        moving.check()


async def test_a_session_whose_gateway_and_engine_are_gone_is_answered_with_410(tmp_path: Path, audio: bytes) -> None:
    async with fleet(tmp_path, True) as group:
        lost = SpeakingClient(lambda: group.places[0].url, audio)
        lost.hold_at(3.0)
        speaking = asyncio.create_task(lost.speak())
        async with asyncio.timeout(PATIENCE_S):
            await fakes.until(lambda: len(lost.events) >= 3 and group.streams(0) + group.streams(1) == 1)
            token = lost.token
        speaking.cancel()
        # The gateway goes without a word, and the engine with all it had.
        for entry in group.places[0].entries:
            entry.live.handoff = None
        home = group.home
        await group.places[0].client.close()
        await group.engines[home].stop()
        url = f"{group.places[1].url}?resume={token}&after=0"
        statuses = []
        async with asyncio.timeout(PATIENCE_S):
            while not statuses or statuses[-1] == 503:
                statuses.append(await status_of(url))
        assert statuses[-1] == 410
