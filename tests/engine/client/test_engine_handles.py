"""The engine as a thread and as a process: warmed up before it is ready, ended when it is stopped."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import multiprocessing.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from engine.client.client import ClientSettings, EngineClient
from engine.client.engine_handles import EngineHandle, EngineThread
from engine.errors import EngineDead
from engine.messages import Closed
from engine.server.loop import EngineLoop
from engine.server.main import Build, run_engine, warm_up
from tests.engine import fakes
from tests.waiting import until


def no_weights() -> EngineLoop:
    raise FileNotFoundError("no weights here")


@pytest.mark.parametrize("kind", [EngineThread, fakes.process])
async def test_an_engine_that_cannot_start_says_so_at_once(kind: Callable[[Build], EngineHandle]) -> None:
    client = EngineClient([kind(no_weights)])
    with pytest.raises(EngineDead, match="before it was ready"):
        await asyncio.wait_for(client.start(), 30)


@pytest.mark.parametrize(
    "error", [BlockingIOError(11, "Resource temporarily unavailable"), EOFError("unexpected EOF"), RuntimeError("no")]
)
async def test_an_engine_process_that_cannot_be_forked_is_one_sentence(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `ulimit -u`: the fork fails, the fork server has ended of it, or no thread can be started."""
    engine = fakes.process(no_weights)

    def start(self: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(multiprocessing.get_context("forkserver").Process, "start", start)
        with pytest.raises(EngineDead, match=r"the engine process cannot be started \(.*\); raise the limits"):
            await engine.start()
    # The next try is not disturbed by the failed one.
    await engine.start()
    await engine.stop(at_once=True)


async def test_the_log_says_how_an_engine_process_ended_and_the_likely_cause(caplog: pytest.LogCaptureFixture) -> None:
    """Whether the end of the process or of its connection is noticed first."""
    engine = fakes.process(fakes.build)
    client = EngineClient([engine])
    await client.start()
    try:
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        await until(lambda: client.metrics().restarts)
    finally:
        await client.close()
    (said,) = [line for line in caplog.messages if "signal SIGKILL" in line]
    assert "killed from outside, or by the system for lack of memory" in said


def test_an_address_that_is_none_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ValueError, match="not an engine address"):
        run_engine("somewhere", no_weights, lambda: True)


def test_warm_up_runs_a_whole_stream_and_leaves_the_engine_empty() -> None:
    loop = fakes.build()
    warm_up(loop)
    assert loop.runner.is_warm  # type: ignore[attr-defined]
    assert loop.scheduler.streams == {} and not loop.has_work()
    loop.scheduler.check_integrity()


def test_a_model_that_fails_its_warm_up_is_not_ready() -> None:
    loop = fakes.build()
    loop.runner.launch = lambda plan, time_is_up: 1 / 0  # type: ignore[assignment, method-assign]
    with pytest.raises(EngineDead, match="warm-up failed"):
        warm_up(loop)


async def first_and_later(warm: bool) -> tuple[float, float]:
    """Seconds of the first request, and of the quickest of nine others."""
    engine = EngineThread(partial(fakes.build, warm_up_seconds=0.3), warm=warm)
    async with fakes.running(engine) as client:
        took = []
        for i in range(10):
            began = time.perf_counter()
            await fakes.transcribe(client, f"s{i}", fakes.speech(0.5, i))
            took.append(time.perf_counter() - began)
    return took[0], min(took[1:])


async def test_the_first_user_does_not_pay_for_the_warm_up() -> None:
    """The fake needs 0.3 s before its first step; a whole request otherwise takes a fraction of that."""
    first, _ = await first_and_later(warm=True)
    cold, _ = await first_and_later(warm=False)
    assert cold >= 0.3
    assert first < cold


async def test_durations_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        async with fakes.running(EngineThread(fakes.build)):
            pass
    for words in (
        "the model is loaded after",
        "the model is warm after",
        "main item checker is warm",
        "preparing item checker",
    ):
        assert words in caplog.text


async def test_not_ready_before_it_is_started() -> None:
    assert not EngineClient([EngineThread(fakes.build)], ClientSettings()).ready


async def test_a_process_over_tcp_serves_and_stops_when_asked() -> None:
    engine = fakes.process(fakes.build, address="tcp://127.0.0.1:45913")
    async with fakes.running(engine) as client:
        pid = engine.pid
        assert pid is not None
        transcript = await fakes.transcribe(client, "a", fakes.speech(2, 1))
        assert isinstance(transcript.last, Closed) and transcript.words
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not await asyncio.to_thread(Path(f"/proc/{pid}").exists)


async def test_the_folder_of_the_socket_is_removed() -> None:
    engine = fakes.process(fakes.build)
    folder = Path(engine.address.removeprefix("ipc://")).parent
    async with fakes.running(engine):
        assert await asyncio.to_thread(folder.exists)
    assert not await asyncio.to_thread(folder.exists)


async def test_an_engine_starts_again_when_its_folder_and_that_of_the_fork_server_were_deleted() -> None:
    """As by `rm -r /tmp/*`, or by a program that removes old files there."""
    engine = fakes.process(fakes.build)
    async with fakes.running(engine) as client:
        folder = Path(engine.address.removeprefix("ipc://")).parent
        for deleted in (folder, Path(multiprocessing.util.get_temp_dir())):
            await asyncio.to_thread(shutil.rmtree, deleted)
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        await until(lambda: client.metrics().restarts)
        transcript = await fakes.transcribe(client, "a", fakes.speech(2, 1))
        assert isinstance(transcript.last, Closed) and transcript.words
        assert await asyncio.to_thread(lambda: folder.stat().st_mode & 0o777) == 0o700


async def test_a_folder_of_somebody_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fakes.process(fakes.build)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(EngineDead, match="belongs to another user; delete it"):
        await engine.start()
    monkeypatch.undo()
    await engine.stop()


GATEWAY = """
import asyncio, sys

from tests.engine import fakes

async def main():
    engine = fakes.process(fakes.build)
    async with fakes.running(engine):
        print(engine.pid, flush=True)
        await asyncio.sleep(60)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_an_engine_does_not_outlive_its_gateway(tmp_path: Path) -> None:
    script = tmp_path / "gateway.py"
    script.write_text(GATEWAY)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in ["", *sys.path])}
    gateway = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, env=environment, text=True)
    assert gateway.stdout is not None
    pid = int(gateway.stdout.readline())
    gateway.send_signal(signal.SIGKILL)
    gateway.wait()
    gateway.stdout.close()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and Path(f"/proc/{pid}/stat").exists():
        if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
            break
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{pid}").exists()
