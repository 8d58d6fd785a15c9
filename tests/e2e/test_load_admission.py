"""Admission by measured load: real sockets and a real engine loop around a model whose steps have a known cost."""

from __future__ import annotations

import asyncio
import io
import time
import wave
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest

from engine.client.client import ClientSettings, EngineClient
from engine.client.engine_handles import EngineThread
from engine.core.plan import DecodeResult, StepPlan
from engine.core.scheduler import Limits, Scheduler
from engine.messages import Open
from engine.runner.base import SynchronousRunner, never
from engine.server.loop import EngineLoop
from engine.spec import ModelSpec, Vocabulary
from realtime.app import RunningServer, listening
from realtime.config import Config, ServerConfig
from tests.e2e.raw_client import RawClient, greeted_client
from tests.e2e.test_limits import refusal
from tests.realtime.gateway_doubles import tone

# Of 80 ms the model may take 95 %: (76 - 10) / 14.5 is between 4 and 5 streams.
STEP_SECONDS, STREAM_SECONDS, HOLDS = 0.010, 0.0145, 4
# An upload lasts longer than its test: so few positions in a step, and each of its steps takes real time.
STEP_POSITIONS, UPLOAD_STEP_SECONDS = 8, 0.02
SPEC = ModelSpec(name="costly", sample_rate=16_000, samples_per_position=1280)


class EngineClock:
    """Time of the engine's loop as this test wants it: it passes while the model computes, and at no other time."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


@dataclass
class CostlyRunner(SynchronousRunner):
    """One word per position; a pass takes a time of its own and one for each stream in it, by the engine's clock. There
    is a pass for each further position of a stream."""

    clock: EngineClock
    spec: ModelSpec = SPEC
    vocabulary: Vocabulary = Vocabulary([b"", b" word"])

    def check_open(self, message: Open) -> None:
        """Every option is fine."""

    def compute(self, plan: StepPlan, time_is_up: Callable[[], bool] = never) -> list[DecodeResult]:
        if plan.decode:
            if len(plan.decode) > plan.live:
                time.sleep(UPLOAD_STEP_SECONDS)
            lengths = [task.end - task.start for task in plan.decode]
            self.clock.now_ns += int(1e9 * (STEP_SECONDS * max(lengths) + STREAM_SECONDS * sum(lengths)))
        return [DecodeResult(tokens=[1] * (task.end - task.start)) for task in plan.decode]


def build() -> EngineLoop:
    clock = EngineClock()
    runner = CostlyRunner(clock)
    scheduler = Scheduler(
        SPEC, Limits(max_streams=32, cache_embeds=2000, step_positions=STEP_POSITIONS), runner.vocabulary
    )
    return EngineLoop(scheduler, runner, clock=clock)


@pytest.fixture
def blockbuster() -> None:
    """Here the model sleeps in a thread of this process, which is what it is meant to do."""


@pytest.fixture(autouse=True)
def messages_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What messages cost depends on what else this machine does; the model's cost is what is asked about here."""
    monkeypatch.setattr("engine.server.host.LoadReport.add_time_between_steps", lambda report, seconds: None)


@pytest.fixture(autouse=True)
def short_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.server.main.MEASURED_STREAMS", 3)


@asynccontextmanager
async def costly_server(warm: bool = True) -> AsyncIterator[tuple[RunningServer, EngineClient]]:
    client = EngineClient([EngineThread(build, warm)], ClientSettings())
    await client.start()
    try:
        async with listening(client, Config(server=ServerConfig(port=0, drain_s=0.0))) as server:
            yield server, client
    finally:
        await client.close()


def ws(server: RunningServer) -> str:
    return f"ws://127.0.0.1:{server.port}/v1/realtime"


async def speak(client: RawClient) -> None:
    """At the pace of speech, until cancelled; what comes back is read and dropped."""

    async def read() -> None:
        async for _ in client.socket:
            pass

    async with asyncio.TaskGroup() as group:
        group.create_task(read())
        while True:
            await client.append(tone(0.08))
            await asyncio.sleep(0.08)


@asynccontextmanager
async def speakers(server: RunningServer, count: int) -> AsyncIterator[list[asyncio.Task[None]]]:
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(greeted_client(ws(server))) for _ in range(count)]
        tasks = [asyncio.create_task(speak(client)) for client in clients]
        try:
            yield tasks
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def seen(server: RunningServer) -> dict[str, Any]:
    async with httpx.AsyncClient() as http:
        answer: dict[str, Any] = (await http.get(f"{server.url}/capacity")).json()
        return answer


async def seen_when(server: RunningServer, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """What the server says of its capacity, as soon as it says this."""
    while not holds(shown := await seen(server)):  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    return shown


async def test_as_many_as_hold_are_admitted_and_the_next_is_refused() -> None:
    async with costly_server() as (server, _):
        async with speakers(server, HOLDS) as speaking:
            assert (await refusal(ws(server))).status_code == 503
            shown = await seen_when(server, lambda shown: shown["streams_counted"] == HOLDS and shown["load"] > 0.3)
            assert all(not task.done() for task in speaking)
            response = await refusal(ws(server))
            assert response.status_code == 503 and int(response.headers["Retry-After"]) >= 1
            assert shown["streams_that_hold"] == HOLDS and shown["streams_free"] == 0
            assert shown["load_per_stream"] == pytest.approx(STREAM_SECONDS / 0.08, rel=0.3)
            assert shown["load"] <= 1.0 and shown["max_load"] == 0.95
        # Sessions that left made room.
        await seen_when(server, lambda shown: shown["streams_free"] == HOLDS)
        async with speakers(server, HOLDS):
            assert (await refusal(ws(server))).status_code == 503


async def test_without_a_measurement_the_first_few_are_admitted_and_more_when_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.client.pool.UNMEASURED_STREAMS", 2)
    async with costly_server(warm=False) as (server, _), speakers(server, 2):
        assert (await refusal(ws(server))).status_code == 503
        await seen_when(server, lambda shown: shown["streams_that_hold"] >= HOLDS - 1)
        async with greeted_client(ws(server)):
            pass


async def test_a_burst_of_connects_is_counted_before_anybody_has_spoken() -> None:
    async with costly_server() as (server, _), AsyncExitStack() as stack:
        results = await asyncio.gather(
            *(stack.enter_async_context(greeted_client(ws(server))) for _ in range(12)), return_exceptions=True
        )
        assert sum(isinstance(result, RawClient) for result in results) == HOLDS


class SinceMoment:
    """Takes the place of the seconds after which silence takes no room: `now - seconds` is this moment at any time. How
    busy the machine is does not matter then: the pauses of clients that speak are never longer than that."""

    def __init__(self) -> None:
        self.moment = 0.0

    def __rsub__(self, now: float) -> float:
        return self.moment


async def test_whoever_is_silent_takes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    counted_since = SinceMoment()
    monkeypatch.setattr("engine.server.host.COUNTED_SECONDS", counted_since)
    monkeypatch.setattr("realtime.serving.registry.COUNTED_SECONDS", counted_since)

    def all_are_silent(shown: dict[str, Any]) -> bool:
        found = shown["streams_counted"] == 0 and shown["streams_free"] == HOLDS
        if not found:
            counted_since.moment = time.monotonic()
        return found

    async with costly_server() as (server, _), AsyncExitStack() as stack:
        quiet = [await stack.enter_async_context(greeted_client(ws(server))) for _ in range(HOLDS)]
        await quiet[0].append(tone(0.2))
        await seen_when(server, lambda shown: shown["streams_counted"] == 1)
        assert (await refusal(ws(server))).status_code == 503, "they spoke or came a moment ago"
        await seen_when(server, all_are_silent)
        async with speakers(server, HOLDS):
            shown = await seen_when(server, lambda shown: shown["streams_counted"] == HOLDS)
            assert shown["connected"] == 2 * HOLDS
            assert (await refusal(ws(server))).status_code == 503


async def test_an_upload_turns_no_live_session_away() -> None:
    async with costly_server() as (server, _), httpx.AsyncClient(timeout=60) as http:
        noise = np.random.default_rng(0).integers(-3000, 3000, 16_000 * 300, np.int16)
        form = {"file": ("talk.wav", wav(noise.tobytes())), "model": (None, "default")}
        upload = asyncio.create_task(http.post(f"{server.url}/v1/audio/transcriptions", files=form))
        await seen_when(server, lambda shown: shown["streams_used"] == 1)
        async with speakers(server, HOLDS - 1):
            shown = await seen_when(server, lambda shown: shown["streams_counted"] == HOLDS - 1)
            assert not upload.done()
            assert shown["streams_used"] == HOLDS and shown["streams_free"] >= 1
            async with greeted_client(ws(server)):
                pass
        upload.cancel()
        await asyncio.gather(upload, return_exceptions=True)


def wav(samples: bytes) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(16_000)
        writer.writeframes(samples)
    return file.getvalue()
