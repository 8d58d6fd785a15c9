"""Corrupted messages between gateway and engine: they affect only their sender, not the streams of other gateways."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from engine.boundary.sockets import GatewaySocket
from engine.client.engine_handles import RemoteEngine
from engine.server.main import run_engine
from tests.attacks.fuzz_boundary import Frames, MadGateway, engine_answers
from tests.engine.fakes import build, running, speech, transcribe
from tests.soak.growth import resident_bytes

MESSAGES = 4_000
LONG_MESSAGES = int(os.environ.get("TICKERTAPE_FUZZ_BOUNDARY", "300000"))
SECONDS = 12.0
MIB = 2**20
GROWTH_MIB = 96


class Engine:
    """A host with a model whose words depend on the audio alone, on a thread of its own."""

    def __init__(self, address: str, windowed: bool) -> None:
        self.address = address
        self.died: BaseException | None = None
        self._stop = threading.Event()
        # A gateway that vanishes keeps its streams until it has been silent for long, and the mad one vanishes often.
        self._build = partial(build, windowed=windowed, detects=True, max_streams=4096)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            run_engine(self.address, self._build, self._stop.is_set)
        except BaseException as error:
            self.died = error

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


@pytest.fixture(params=[False, True], ids=["frames", "windowed"])
def engine(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    running_engine = Engine(f"ipc://{tmp_path}/engine", request.param)
    yield running_engine
    running_engine.stop()


async def spoken(address: str, until: threading.Thread | None = None) -> set[str]:
    """What a good gateway hears of one recording, over and over until a thread has ended."""
    texts = set()
    async with running(RemoteEngine(address)) as client:
        number = 0
        while number < 1 or (until is not None and until.is_alive()):
            number += 1
            transcript = await transcribe(client, f"good {number}", speech(SECONDS, 7), between=_breathe)
            texts.add(transcript.text)
        assert client.metrics().restarts == 0 and client.metrics().streams_recovered == 0
    return texts


async def _breathe(count: int) -> None:
    await asyncio.sleep(0.002 if count % 10 == 0 else 0)


async def recorded_conversation(address: str, monkeypatch: pytest.MonkeyPatch) -> list[Frames]:
    """All that a real gateway says in the life of a stream."""
    recorded: list[Frames] = []
    send = GatewaySocket.send

    def note(self: GatewaySocket, frames: list[object]) -> None:
        recorded.append([bytes(memoryview(frame).cast("B")) for frame in frames])  # type: ignore[call-overload]
        send(self, frames)

    with monkeypatch.context() as patch:
        patch.setattr(GatewaySocket, "send", note)
        # An engine remembers for each gateway what that gateway asks it to, so a mad one is made modest here.
        async with running(RemoteEngine(address), cache_bytes=MIB) as client:
            await transcribe(client, "recorded", speech(2.0, 3))
            stream = await client.open("left", options={"language": "en"})
            await stream.feed(speech(0.5, 4))
            await stream.gap(900)
            await stream.abort()
    assert len(recorded) > 3
    return recorded


@pytest.fixture(autouse=True)
def quiet_log() -> Iterator[None]:
    """The host complains of every message; pytest would keep them all."""
    log = logging.getLogger("engine.server")
    log.setLevel(logging.CRITICAL)
    yield
    log.setLevel(logging.NOTSET)


async def fuzz(engine: Engine, recorded: list[Frames], messages: int, seed: str) -> str:
    calm = await spoken(engine.address)
    assert len(calm) == 1 and calm.pop()
    calm = await spoken(engine.address)
    before = resident_bytes()
    mad = MadGateway(engine.address, recorded, seed)
    attacking = threading.Thread(target=mad.run, args=(messages,))
    began = time.monotonic()
    attacking.start()
    try:
        beside = await spoken(engine.address, attacking)
    finally:
        await asyncio.to_thread(attacking.join)
    took = time.monotonic() - began
    assert engine.died is None
    assert beside == calm, "another gateway's words changed"
    assert await asyncio.to_thread(engine_answers, engine.address, recorded[0])
    grown = (resident_bytes() - before) / MIB
    assert grown < GROWTH_MIB, f"{grown:.0f} MiB more"
    return f"{mad.sent} messages in {took:.0f} s, {grown:+.0f} MiB"


async def test_corrupted_messages_cost_only_their_sender(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = await recorded_conversation(engine.address, monkeypatch)
    await fuzz(engine, recorded, MESSAGES, "short")


@pytest.mark.soak
@pytest.mark.timeout(7200)
async def test_many_corrupted_messages_cost_only_their_sender(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = await recorded_conversation(engine.address, monkeypatch)
    said = await fuzz(engine, recorded, LONG_MESSAGES // 2, "long")
    with capsys.disabled():
        sys.stdout.write(f"\nfuzzed boundary: {said}\n")
