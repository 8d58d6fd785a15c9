"""Real workers behind one port: killed, replaced and stopped under sessions that lose nothing."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus

from engine.client.engine_handles import EngineProcess
from realtime.config import AuthConfig, Config, LimitsConfig, ServerConfig
from realtime.workers import parent as parents
from realtime.workers.parent import Parent, WorkerFailed, reserved_port
from realtime.workers.worker_link import LONGEST_LINE
from tests.e2e.raw_client import greeted_client
from tests.engine import fakes
from tests.realtime.workers import engines
from tests.realtime.workers.clients import SpeakingClient

pytestmark = pytest.mark.timeout(240)
SESSIONS = 6
CONFIG = Config(server=ServerConfig(port=0, drain_s=1.0, workers=2), limits=LimitsConfig(max_load=0))


@asynccontextmanager
async def engine() -> AsyncIterator[EngineProcess]:
    process = fakes.process(engines.windowed)
    async with fakes.running(process):
        yield process


@asynccontextmanager
async def workers(config: Config = CONFIG) -> AsyncIterator[Parent]:
    async with engine() as process, reserved_port("127.0.0.1", 0) as held:
        parent = Parent(config, config.server.workers, [process.address], held)
        try:
            await parent.start()
            yield parent
        finally:
            await parent.stop(lambda: True)


def url_of(parent: Parent) -> str:
    return f"ws://127.0.0.1:{parent.port}/v1/realtime"


async def get(parent: Parent, path: str) -> str:
    def fetch() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{parent.port}{path}", timeout=10) as answer:
            return str(answer.read().decode())

    return await asyncio.to_thread(fetch)


def kill(parent: Parent, number: int) -> None:
    os.kill(parent.workers[number].process.pid, signal.SIGKILL)


async def test_workers_that_are_killed_and_replaced_under_sessions_change_no_word() -> None:
    audio = engines.talk(8, 1)
    async with workers() as parent:
        calm = SpeakingClient(lambda: url_of(parent), audio)
        await calm.speak()
        calm.check()
        assert len(calm.text) == 4
        speakers = [SpeakingClient(lambda: url_of(parent), audio) for _ in range(SESSIONS)]
        for speaker in speakers:
            speaker.hold_at(4.0)
        speaking = asyncio.gather(*(speaker.speak() for speaker in speakers))
        # Each has said something: before that, nothing of a session is with the engine yet.
        await fakes.until(lambda: all(speaker.text for speaker in speakers))
        # A worker that is killed takes with it what it counted in its last moment.
        while await opened(parent) != SESSIONS + 1:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        first, second = sorted(parent.workers)
        kill(parent, first)
        await fakes.until(lambda: len(parent.workers) == 2 and first not in parent.workers)
        await asyncio.gather(*(worker.wait_until_ready() for worker in parent.workers.values()))
        await parent.restart()
        assert len(parent.workers) == 2 and min(parent.workers) > second
        for speaker in speakers:
            speaker.hold_at(None)
        await speaking
        for speaker in speakers:
            speaker.check()
            assert speaker.text == calm.text
        assert sum(speaker.losses for speaker in speakers) >= SESSIONS, "each lost at least one of the two"
        assert await opened(parent) == SESSIONS + 1, "all workers count together, also those that are gone"


@pytest.mark.parametrize("dies", ["before its turn", "while its replacement starts"])
async def test_a_worker_that_dies_in_a_rolling_restart_is_replaced_once(dies: str) -> None:
    async with workers() as parent:
        first, second = sorted(parent.workers)
        rolling = parent.restart()
        if dies == "before its turn":
            await fakes.until(lambda: len(parent.workers) == 3)
        else:
            await fakes.until(lambda: len(parent.workers) == 3 and first not in parent.workers)
        kill(parent, second)
        await rolling
        await fakes.until(lambda: len(parent.workers) == 2 and min(parent.workers) > second)
        await asyncio.gather(*(worker.wait_until_ready() for worker in parent.workers.values()))
        assert len(parent.workers) == 2, "as many as before, all new"


async def opened(parent: Parent) -> float:
    lines = (await get(parent, "/metrics")).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("tickertape_sessions_opened_total{"))


async def test_limits_figures_and_secrets_are_those_of_the_server_not_of_a_worker() -> None:
    config = replace(CONFIG, limits=replace(CONFIG.limits, sessions_per_key=3), auth=AuthConfig(keys=("the-real-key",)))
    async with workers(config) as parent:
        url = url_of(parent)
        bearer = {"Authorization": f"Bearer {await asyncio.to_thread(mint, parent)}"}
        async with AsyncExitStack() as sockets:
            for _ in range(3):
                last = await sockets.enter_async_context(greeted_client(url, additional_headers=bearer))
            assert await status_of(url, bearer) == 429
            while json.loads(await get(parent, "/capacity"))["sessions"] != 3:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            await last.socket.close()
            while await status_of(url, bearer) == 429:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


def mint(parent: Parent) -> str:
    """A client secret, of any worker."""
    address = f"http://127.0.0.1:{parent.port}/v1/realtime/client_secrets"
    request = urllib.request.Request(address, b"{}", {"Authorization": "Bearer the-real-key"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return str(json.loads(answer.read())["value"])


async def status_of(url: str, headers: dict[str, str]) -> int:
    try:
        async with greeted_client(url, additional_headers=headers):
            return 101
    except InvalidStatus as refused:
        return refused.response.status_code


async def test_a_worker_that_cannot_start_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parents.sys, "executable", "/bin/false")
    with pytest.raises(ExceptionGroup) as failed:
        async with reserved_port("127.0.0.1", 0) as held:
            parent = Parent(CONFIG, 2, ["ipc:///tmp/nobody"], held)
            try:
                await parent.start()
            finally:
                await parent.stop(lambda: True)
    assert failed.group_contains(WorkerFailed, match="before it was ready")


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


async def test_a_port_in_use_is_a_clear_error_even_if_it_is_ours(taken: int) -> None:
    with pytest.raises(OSError, match="in use"):
        async with reserved_port("127.0.0.1", taken):
            pass
    ours = socket.create_server(("127.0.0.1", 0), reuse_port=True)
    with ours, pytest.raises(OSError, match="in use"):
        async with reserved_port("127.0.0.1", ours.getsockname()[1]):
            pass


async def test_a_worker_ends_with_its_parent() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "realtime.workers.worker", str(theirs.fileno()), pass_fds=(theirs.fileno(),)
        )
    ours.close()
    assert await process.wait() != 0


# Both sides read lines with the same code, and each has its own for messages.
@pytest.mark.parametrize(
    ("side", "message"),
    [
        ("worker", b"x" * (LONGEST_LINE + 1) + b"\n"),
        ("worker", b'{"type": "unknown"}\n'),
        ("parent", b'{"type": "unknown"}\n'),
    ],
    ids=["worker-long", "worker-unknown", "parent-unknown"],
)
async def test_a_worker_that_is_not_heard_or_hears_nothing_is_replaced(side: str, message: bytes) -> None:
    async with workers(replace(CONFIG, server=replace(CONFIG.server, workers=1))) as parent:
        (number,) = parent.workers
        connection = parent.workers[number].connection
        if side == "worker":
            connection._writer.write(message)
        else:
            connection._reader.feed_data(message)
        await fakes.until(lambda: len(parent.workers) == 1 and number not in parent.workers)
        (worker,) = parent.workers.values()
        await worker.wait_until_ready()
        async with greeted_client(url_of(parent)):
            pass


async def test_a_worker_that_cannot_be_started_for_a_while_is_started_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The system has no processes or no memory left: it says so to every try, until some are free again."""
    tries: list[int] = []
    start = asyncio.create_subprocess_exec

    async def scarce(*arguments: Any, **options: Any) -> asyncio.subprocess.Process:
        tries.append(len(tries))
        if len(tries) <= 3:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return await start(*arguments, **options)

    monkeypatch.setattr(parents, "FIRST_BACKOFF_S", 0.05)
    async with workers() as parent:
        open_files = len(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(asyncio, "create_subprocess_exec", scarce)
        dead = min(parent.workers)
        kill(parent, dead)
        await fakes.until(lambda: len(tries) == 4 and len(parent.workers) == 2)
        await asyncio.gather(*(worker.wait_until_ready() for worker in parent.workers.values()))
        assert len(os.listdir("/proc/self/fd")) <= open_files + 2, "what a try had opened is closed again"
        said = [record.getMessage() for record in caplog.records if "cannot be started" in record.getMessage()]
        assert len(said) == 1 and "Resource temporarily unavailable" in said[0]
        # The same in a rolling restart: it ends, and the old workers stay.
        tries.clear()
        before = set(parent.workers)
        await parent.restart()
        assert set(parent.workers) == before and "the rolling restart was stopped" in caplog.text
        # Or one that ends before it listens.
        monkeypatch.setattr(parents.sys, "executable", "/bin/false")
        await parent.restart()
        assert set(parent.workers) == before
    assert not parent.workers


async def test_a_server_whose_worker_cannot_be_started_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: Any, **__: Any) -> asyncio.subprocess.Process:
        raise MemoryError

    async with workers() as parent:
        monkeypatch.setattr(asyncio, "create_subprocess_exec", never)
        kill(parent, min(parent.workers))
        await fakes.until(lambda: len(parent.workers) == 1)
        async with asyncio.timeout(30):
            await parent.stop(lambda: True)
