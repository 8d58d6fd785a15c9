"""Two gateways and two engines as processes: any of them goes, and no word changes.

What a model says depends a little on how far behind a busy machine is, so the engines are scripted;
`benchmarks.survival fleet` does the same with a model.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from realtime.client import resuming_session, wire_client
from realtime.serving.fleet_publishing import home_of
from tests.e2e.viewing import socket_viewer, stream_viewer, until
from tests.engine import fakes
from tests.engine.client.test_fleet_table import put
from tests.realtime.workers.clients import VAD, SpeakingClient
from tests.realtime.workers.engines import RATE, talk
from tests.realtime.workers.test_viewers import Reading, Speaker

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def blockbuster() -> None:
    """Not here: what starts processes and writes tables may block."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


class Part:
    """A gateway or an engine, started anew after it has gone."""

    def __init__(self, folder: Path, module: str, *command: str) -> None:
        self.port = free_port()
        self.log = folder / f"{module}-{self.port}.log"
        self._module = module
        self._command = [word.replace("PORT", str(self.port)) for word in command]
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", self._module, *self._command, stdout=log, stderr=log
            )

    def stop(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGCONT)

    async def rest(self) -> None:
        """Until none of its threads has anything to do: what it has sent is the system's to deliver."""
        assert self.process is not None
        async with asyncio.timeout(60):
            while not all(map(_sleeps, _threads_of(self.process.pid))):  # noqa: ASYNC110
                await asyncio.sleep(0.001)

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


def _threads_of(pid: int) -> list[Path]:
    """Of a process and of those that it started."""
    threads = list(Path(f"/proc/{pid}/task").iterdir())
    children = [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    return [*threads, *(thread for child in children for thread in _threads_of(child))]


def _sleeps(thread: Path) -> bool:
    return (thread / "stat").read_text().rpartition(")")[2].split()[0] == "S"


class Fleet:
    def __init__(self, engines: list[Part], gateways: list[Part], table: Path) -> None:
        self.engines, self.gateways = engines, gateways
        self.at = 0
        self._table = table
        self._tables = 0
        self._peer_ports = [free_port() for _ in gateways]

    def tell(self, *gateways: int) -> None:
        """Write a table with all engines and these gateways."""
        self._tables += 1
        local = "tcp://127.0.0.1"
        engines = [{"name": str(n), "address": f"{local}:{part.port}"} for n, part in enumerate(self.engines)]
        peers = [{"name": f"g{n}", "address": f"{local}:{self._peer_ports[n]}"} for n in gateways]
        put(self._table, {"number": self._tables, "engines": engines, "gateways": peers})

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.gateways[self.at].port}/v1/realtime"

    async def whole(self) -> None:
        """Until every gateway has both engines."""
        for part in [*self.engines, *self.gateways]:
            if part.process is None or part.process.returncode is not None:
                await part.start()
        async with asyncio.timeout(300):
            for gateway in self.gateways:
                while len((await asyncio.to_thread(gateway.figures)).get("engines", [])) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)

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
        """When it has sent what it told: a client is told what has been handed to the thread that sends to the engine,
        and one that knows more than the engine is refused (docs/fleet.md)."""
        await self.gateways[self.at].rest()
        self.at = 1 - self.at
        await self.gateways[1 - self.at].end(signal.SIGKILL)

    async def drain_gateway(self) -> None:
        self.at = 1 - self.at
        await self.gateways[1 - self.at].end(signal.SIGTERM)

    # Processes that are stopped for so long and go on. The speaker says nothing new meanwhile.

    async def stop_engine(self, speaker: SpeakingClient, seconds: float) -> None:
        """The engine with the stream; after a long wait its streams continue on the other one."""
        await self._stop(self.engines[await self.home()], seconds)

    async def stop_other_engine(self, speaker: SpeakingClient, seconds: float) -> None:
        await self._stop(self.engines[1 - await self.home()], seconds)

    async def stop_gateway_patiently(self, speaker: SpeakingClient, seconds: float) -> None:
        """The client waits for its gateway."""
        await self._stop(self.gateways[self.at], seconds)

    async def stop_gateway(self, speaker: SpeakingClient, seconds: float) -> None:
        """The client leaves for the other gateway."""
        stopped = asyncio.create_task(self._stop(self.gateways[self.at], seconds))
        self.at = 1 - self.at
        speaker.leave()
        await self._back(speaker, stopped)

    async def stop_gateway_with_a_request(self, speaker: SpeakingClient, seconds: float) -> None:
        """The client first tries to come back to the gateway that is stopped, where its request waits."""
        stopped = asyncio.create_task(self._stop(self.gateways[self.at], seconds))
        tries = len(speaker.lines)
        speaker.leave()
        await fakes.until(lambda: any("did not answer" in line for line in speaker.lines[tries:]))
        self.at = 1 - self.at
        await self._back(speaker, stopped)

    async def _stop(self, part: Part, seconds: float) -> None:
        part.stop()
        try:
            await asyncio.sleep(seconds)
        finally:
            part.go_on()

    async def _back(self, speaker: SpeakingClient, stopped: asyncio.Task[None]) -> None:
        """Until the client is at this gateway, the other one has gone on, and that has nothing of the client left."""
        await fakes.until(lambda: speaker.lines[-1] == "")
        await stopped
        woken = self.gateways[1 - self.at]
        async with asyncio.timeout(30):
            while (await asyncio.to_thread(woken.figures)).get("sessions") != 0:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        await self.whole()


@asynccontextmanager
async def running_fleet(folder: Path) -> AsyncIterator[Fleet]:
    secret = folder / "secret"
    secret.write_text("the secret of a fleet of processes")
    table = folder / "table.json"
    key = ("--fleet-secret-file", str(secret))
    engine = ("tests.realtime.workers.engine_process", "--listen", "tcp://127.0.0.1:PORT", *key)
    gateway = ("realtime.cli", "serve", "--engine-table", str(table), "--port", "PORT", "--workers", "1", *key)
    gateway += ("--limits.max-load", "0")
    gateways = [Part(folder, *gateway, "--fleet.gateway", f"g{number}") for number in range(2)]
    group = Fleet([Part(folder, *engine) for _ in range(2)], gateways, table)
    group.tell(0, 1)
    try:
        await group.whole()
        yield group
    finally:
        for part in [*group.gateways, *group.engines]:
            if part.process is not None:
                part.go_on()
                await part.end(signal.SIGKILL)


async def speak_through(fleet: Fleet, what: str, speaker: SpeakingClient, *, hold_at: float) -> None:
    """Speak while a part of the fleet goes: `what` is called when there are words, and the audio waits at `hold_at`."""
    await fleet.whole()
    speaker.hold_at(hold_at)
    task = asyncio.create_task(speaker.speak())
    async with asyncio.timeout(120):
        await fakes.until(lambda: len(speaker.text) > 0 or task.done())
        await getattr(fleet, what)()
        speaker.hold_at(None)
        await task


async def test_no_word_changes_whichever_part_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming_session, "FIRST_WAIT_S", 0.05)
    audio = talk(6, 1)
    async with running_fleet(tmp_path) as fleet:
        calm = SpeakingClient(lambda: fleet.url, audio)
        await calm.speak()
        calm.check()
        assert calm.text
        for what in ("drain_engine", "kill_engine", "drain_gateway", "kill_gateway"):
            speaker = SpeakingClient(lambda: fleet.url, audio)
            await speak_through(fleet, what, speaker, hold_at=3.0)
            speaker.check()
            assert speaker.text == calm.text, what


def conversation(*seconds: float) -> bytes:
    """16-bit samples: stretches of two voices in turn, each followed by 0.6 s of silence."""
    parts = []
    for number, length in enumerate(seconds):
        for loudness, size in ((0.6 + 0.28 * (number % 2), int(length * RATE)), (0.01, int(0.6 * RATE))):
            noise = np.random.default_rng(number).uniform(0.9, 1.1, size)
            parts.append(loudness * noise * (-1) ** np.arange(size))
    return (np.concatenate(parts) * 32_000).astype("<i2").tobytes()


@pytest.mark.parametrize("change", [False, True], ids=["turns by pauses", "turns by speakers"])
async def test_no_label_changes_whichever_part_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: bool
) -> None:
    monkeypatch.setattr(resuming_session, "FIRST_WAIT_S", 0.05)
    audio = conversation(3.0, 3.0, 5.0, 2.0)
    # No pause is so long: only speakers end these turns.
    detection = {**VAD, "silence_duration_ms": 5000, "speaker_change": True} if change else VAD
    async with running_fleet(tmp_path) as fleet:
        calm = SpeakingClient(lambda: fleet.url, audio, detection, speakers=True)
        await calm.speak()
        assert [speaker for _, speaker, _ in calm.spoken] == ["A", "B", "A", "B"]
        for what in ("kill_engine", "kill_gateway", "kill_gateway", "drain_gateway"):
            speaker = SpeakingClient(lambda: fleet.url, audio, detection, speakers=True)
            # Within the third stretch, long after the second: no final waits for labels, which it does by the clock.
            await speak_through(fleet, what, speaker, hold_at=10.2)
            assert speaker.spoken == calm.spoken, what


@pytest.mark.parametrize("home", [0, 1])
async def test_viewers_at_any_gateway_read_all_words_also_when_the_speakers_gateway_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: int
) -> None:
    """Whether the name's home is the gateway that dies or the other one."""
    monkeypatch.setattr(resuming_session, "FIRST_WAIT_S", 0.05)
    name = next(name for n in range(100) if home_of(("", name := f"talk{n}"), ["g0", "g1"]) == f"g{home}")
    async with running_fleet(tmp_path) as fleet, AsyncExitStack() as stack:
        speaker = Speaker(lambda: fleet.url, talk(8, 1), name)
        speaker.hold_at(4.0)
        speaking = asyncio.create_task(speaker.speak())
        await fakes.until(lambda: bool(speaker.text) or speaking.done())
        there, here = fleet.gateways
        at_both = [
            Reading(await stack.enter_async_context(make(gateway.port, name)))
            for gateway in (there, here)
            for make in (socket_viewer, stream_viewer)
        ]
        await fakes.until(lambda: all(reading.lines for reading in at_both))
        # A link of one gateway opens the session at the other one, and is revoked at both.
        async with httpx.AsyncClient(trust_env=False) as http:
            path = f"/v1/sessions/{name}/links"
            link = (await http.post(f"http://127.0.0.1:{there.port}{path}")).json()
            async with stream_viewer(here.port, name, link["token"]) as viewer:
                assert (await viewer.event())["type"] == "snapshot"
                await http.delete(f"http://127.0.0.1:{there.port}{path}/{link['id']}")
                await until(viewer, "closed")
        await fleet.kill_gateway()
        fleet.tell(1)
        speaker.hold_at(None)
        await speaking
        assert len(speaker.text) == 4
        for reading in at_both[2:]:
            await fakes.until(lambda: reading.lines == speaker.text)  # noqa: B023
            await fakes.until(lambda: reading.events[-1]["type"] == "end")  # noqa: B023
            assert "begin" not in [event["type"] for event in reading.events]
        for reading in at_both:
            reading.task.cancel()


STOPS = (
    "stop_gateway",
    "stop_gateway_with_a_request",
    "stop_gateway_patiently",
    "stop_engine",
    "stop_other_engine",
)


# Connections between processes outlast the first, and not the second.
@pytest.mark.parametrize("seconds", [3.0, 10.0])
async def test_no_word_changes_whichever_part_is_stopped_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    monkeypatch.setattr(resuming_session, "FIRST_WAIT_S", 0.05)
    # Longer than it takes to get a session from a gateway that does not answer.
    monkeypatch.setattr(wire_client, "OPEN_TIMEOUT_S", 2.0)
    audio = talk(8, 1)
    async with running_fleet(tmp_path) as fleet:
        calm = SpeakingClient(lambda: fleet.url, audio)
        await calm.speak()
        calm.check()
        for what in STOPS:
            await fleet.whole()
            speaker = SpeakingClient(lambda: fleet.url, audio)
            speaker.hold_at(3.0)
            task = asyncio.create_task(speaker.speak())
            async with asyncio.timeout(180):
                await fakes.until(lambda: len(speaker.text) > 0 or task.done())  # noqa: B023
                await getattr(fleet, what)(speaker, seconds)
                # The next words are told where the client is now, and the last ones after everything has come to rest.
                heard = len(speaker.text)
                speaker.hold_at(6.0)
                await fakes.until(lambda: len(speaker.text) > heard or task.done())  # noqa: B023
                speaker.hold_at(None)
                await task
            speaker.check()
            assert speaker.text == calm.text, what
