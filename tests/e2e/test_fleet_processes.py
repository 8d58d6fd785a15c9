"""Two gateways and two engines as processes, with the embedded model: any of them goes, and no word changes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from audio.containers import read_file
from engine.weights.store import cache_folder
from realtime.client import lasting_session
from realtime.commands.pull import SAMPLE
from tests.engine import fakes
from tests.engine.client.test_table import put
from tests.realtime.workers.clients import Speaker
from tests.realtime.workers.engines import RATE

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(1200)]

SECONDS = 12
BREAK_S = 3.0
VAD = {"type": "server_vad", "silence_duration_ms": 500}


@pytest.fixture(autouse=True)
def blockbuster() -> None:
    """Not here: what starts processes and writes tables may block."""


@pytest.fixture(scope="module")
def audio() -> bytes:
    folder = cache_folder() / SAMPLE
    if not folder.exists():
        pytest.skip("the recording is not there; `tickertape pull` fetches it")
    sound = next(file for file in folder.iterdir() if file.suffix == ".wav")
    samples = np.concatenate(list(read_file(sound)))[: SECONDS * RATE]
    return (np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


class Part:
    """A gateway or an engine, started anew after it has gone."""

    def __init__(self, folder: Path, *command: str) -> None:
        self.port = free_port()
        self.log = folder / f"{command[0]}-{self.port}.log"
        self._command = [word.replace("PORT", str(self.port)) for word in command]
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "realtime.cli", *self._command,
                stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    async def end(self, number: signal.Signals) -> int:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(number)
        return await self.process.wait()

    def figures(self) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/capacity", timeout=5) as answer:
                return dict(json.loads(answer.read()))
        except OSError:
            return {}


class Fleet:
    def __init__(self, engines: list[Part], gateways: list[Part]) -> None:
        self.engines, self.gateways = engines, gateways
        self.at = 0

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.gateways[self.at].port}/v1/realtime"

    async def whole(self) -> None:
        """Until every gateway has both engines."""
        for part in [*self.engines, *self.gateways]:
            if part.process is None or part.process.returncode is not None:
                await part.start()
        async with asyncio.timeout(600):
            for gateway in self.gateways:
                while len((await asyncio.to_thread(gateway.figures)).get("engines", [])) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.2)

    async def home(self) -> int:
        """The engine with the stream."""
        async with asyncio.timeout(120):
            while True:
                figures = await asyncio.to_thread(self.gateways[self.at].figures)
                found = [engine["name"] for engine in figures.get("engines", []) if engine["streams"]]
                if len(found) == 1:
                    return int(found[0])
                await asyncio.sleep(0.1)

    async def kill_engine(self) -> None:
        await self.engines[await self.home()].end(signal.SIGKILL)

    async def drain_engine(self) -> None:
        home = await self.home()
        assert await self.engines[home].end(signal.SIGTERM) == 0
        assert await self.home() != home

    async def kill_gateway(self) -> None:
        self.at = 1 - self.at
        await self.gateways[1 - self.at].end(signal.SIGKILL)

    async def drain_gateway(self) -> None:
        self.at = 1 - self.at
        await self.gateways[1 - self.at].end(signal.SIGTERM)


@asynccontextmanager
async def running_fleet(folder: Path) -> AsyncIterator[Fleet]:
    secret = folder / "secret"
    secret.write_text("the secret of a fleet of processes")
    table = folder / "table.json"
    key = ("--fleet-secret-file", str(secret))
    engine = ("engine", "--listen", "tcp://127.0.0.1:PORT", "--threads", "1", "--max-streams", "4", *key)
    gateway = (
        "serve",
        "--engine-table",
        str(table),
        "--port",
        "PORT",
        "--workers",
        "1",
        "--limits.max-load",
        "0",
        *key,
    )
    group = Fleet([Part(folder, *engine) for _ in range(2)], [Part(folder, *gateway) for _ in range(2)])
    rows = [
        {"name": str(number), "address": f"tcp://127.0.0.1:{part.port}"} for number, part in enumerate(group.engines)
    ]
    put(table, {"number": 1, "engines": rows})
    try:
        await group.whole()
        yield group
    finally:
        for part in [*group.gateways, *group.engines]:
            if part.process is not None:
                await part.end(signal.SIGKILL)


@asynccontextmanager
async def speaking(fleet: Fleet, audio: bytes) -> AsyncIterator[Speaker]:
    """A session that is in the middle of its audio, and then hears the rest. At the pace of speech: words of a stream
    that gets its audio faster depend on how far behind it is."""
    go_on = asyncio.Event()
    speaker = Speaker(lambda: fleet.url, audio, VAD)
    task = asyncio.create_task(speaker.speak(pieces=150, pause_s=SECONDS / 150, go_on=go_on))
    await fakes.until(lambda: any("delta" in event["type"] for event in speaker.events) or task.done())
    yield speaker
    go_on.set()
    await task


async def test_no_word_changes_whichever_part_goes(
    audio: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lasting_session, "FIRST_WAIT_S", 0.05)
    async with running_fleet(tmp_path) as fleet:
        async with speaking(fleet, audio) as calm:
            # As long a break as when something happens: a model may take one for the end of what is said.
            await asyncio.sleep(BREAK_S)
        calm.check()
        assert calm.text
        for what in ("drain_engine", "kill_engine", "drain_gateway", "kill_gateway"):
            await fleet.whole()
            async with asyncio.timeout(300), speaking(fleet, audio) as speaker:
                await asyncio.gather(getattr(fleet, what)(), asyncio.sleep(BREAK_S))
            speaker.check()
            assert speaker.text == calm.text, what
