"""The examples for nginx and Caddy in deploy/proxies, run in front of a server: the page, uploads, sockets."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import Serve
from tests.e2e.raw_client import COMPLETED, greeted_client
from tests.e2e.test_openai_client import wav
from tests.realtime.gateway_doubles import silence, tone

EXAMPLES = Path(__file__).parents[2] / "deploy/proxies"


@pytest.fixture(autouse=True)
def blockbuster() -> None:
    """The proxy's files are read and written in the event loop of the test."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@asynccontextmanager
async def proxy(kind: str, server_port: int, folder: Path) -> AsyncIterator[tuple[int, asyncio.subprocess.Process]]:
    """The example with other ports; yields the port of the proxy, when it listens."""
    program = shutil.which(kind) or shutil.which(kind, path="/usr/sbin")
    if program is None:
        pytest.skip(f"{kind} is not installed")
    port = free_port()
    example = EXAMPLES / ("nginx.conf" if kind == "nginx" else "Caddyfile")
    text = example.read_text().replace("8080", str(port)).replace("127.0.0.1:8000", f"127.0.0.1:{server_port}")
    config = folder / example.name
    if kind == "nginx":
        config.write_text(text)
        directives = f"daemon off; pid {folder}/pid; error_log stderr;"
        command = [program, "-p", str(folder), "-c", str(config), "-g", directives]
    else:
        # Several caddies on one machine cannot share the port of the administration.
        config.write_text("{\n\tadmin off\n}\n" + text)
        command = [program, "run", "--config", str(config), "--adapter", "caddyfile"]
    log = (folder / "log").open("wb")
    environment = {**os.environ, "HOME": str(folder), "XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log, env=environment)
    try:
        async with asyncio.timeout(60):
            while True:
                assert process.returncode is None, (folder / "log").read_text()
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    break
                except OSError:
                    await asyncio.sleep(0.05)
        yield port, process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        log.close()


@pytest.mark.parametrize("kind", ["nginx", "caddy"])
async def test_an_example_passes_everything_on(kind: str, serve: Serve, tmp_path: Path) -> None:
    async with (
        serve(server={"trusted_proxies": ("127.0.0.1",)}) as running,
        proxy(kind, running.port, tmp_path) as (port, _),
        httpx.AsyncClient(base_url=f"http://localhost:{port}", timeout=60) as client,
    ):
        assert b"<title>" in (await client.get("/")).content
        answer = await client.post("/v1/audio/transcriptions", files={"file": ("a.wav", wav(1.0))}, data={"model": "m"})
        assert answer.status_code == 200 and "text" in answer.json()
        async with greeted_client(f"ws://localhost:{port}/v1/realtime") as talker:
            await talker.append(tone(1.0) + silence(0.2))
            await talker.send("input_audio_buffer.commit")
            assert (await talker.until(COMPLETED))[-1]["transcript"]


async def test_a_reload_of_nginx_closes_no_socket(serve: Serve, tmp_path: Path) -> None:
    async with (
        serve(server={"trusted_proxies": ("127.0.0.1",)}) as running,
        proxy("nginx", running.port, tmp_path) as (port, process),
        greeted_client(f"ws://localhost:{port}/v1/realtime") as talker,
    ):
        process.send_signal(1)
        async with greeted_client(f"ws://localhost:{port}/v1/realtime"):
            pass
        await talker.send("input_audio_buffer.clear")
        assert (await talker.receive())["type"] == "input_audio_buffer.cleared"
