"""`tickertape serve` and `tickertape engine` as processes: they start, say where they are, and stop when told to."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.server.main import run_engine
from tests.e2e.raw_client import raw_client
from tests.engine.fakes import build


@pytest.fixture(autouse=True)
def blockbuster() -> Iterator[None]:
    yield


@pytest.fixture
def engine_address(tmp_path: Path) -> Iterator[str]:
    """An engine that runs elsewhere: for the server it makes no difference that it is a thread of this process."""
    stop = threading.Event()
    address = f"ipc://{tmp_path}/engine"
    thread = threading.Thread(target=run_engine, args=(address, build, stop.is_set))
    thread.start()
    yield address
    stop.set()
    thread.join()


async def start(*arguments: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TICKERTAPE_")}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "realtime.cli", *arguments, stdout=pipe, stderr=pipe, env=environment
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_server_says_where_it_is_and_stops_when_told(engine_address: str, number: signal.Signals) -> None:
    process = await start("serve", "--engine", engine_address, "--port", "0")
    assert process.stdout is not None
    async with asyncio.timeout(60):
        page = (await process.stdout.readline()).decode()
        found = re.search(r"http://127.0.0.1:(\d+)/", page)
        assert found is not None, page
        async with raw_client(f"ws://127.0.0.1:{found[1]}/v1/realtime") as client:
            assert (await client.receive())["type"] == "session.created"
        process.send_signal(number)
        _, said = await process.communicate()
    assert process.returncode == 0, said.decode()
    assert "Traceback" not in said.decode()


async def test_port_in_use_is_said_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = await start("serve", "--engine", "ipc:///nobody/there", "--port", str(port))
        _, said = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert (
        said.decode()
        == f"error: cannot listen on 127.0.0.1 port {port}: Address already in use; choose another --host or --port\n"
    )


async def test_engine_elsewhere_that_is_not_there_is_named(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/nobody"
    process = await start("serve", "--engine", address, "--port", "0")
    _, said = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert address in said.decode().splitlines()[-1] and "Traceback" not in said.decode()
