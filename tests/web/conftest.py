"""A server in its own process and a browser with a microphone that plays a recording."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import wave
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.realtime.gateway_doubles import silence, tone
from tests.web.devtools import browser_page, find_browser

ROOT = Path(__file__).parents[2]


class PageServer:
    """The gateway on a fixed port; it can be killed and started again."""

    def __init__(self, *flags: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/"
        self._flags = flags
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.web.page_server", str(self.port), *self._flags, cwd=ROOT
        )
        async with asyncio.timeout(60), httpx.AsyncClient(trust_env=False) as client:
            while True:
                try:
                    await client.get(self.url + "health")
                    return
                except httpx.TransportError:
                    assert self._process.returncode is None, "the server did not start"
                    await asyncio.sleep(0.1)

    async def stop(self, with_signal: int = signal.SIGKILL) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(with_signal)
            await self._process.wait()

    async def capacity(self) -> dict[str, Any]:
        async with httpx.AsyncClient(trust_env=False) as client:
            return (await client.get(self.url + "capacity")).json()


@asynccontextmanager
async def page_server(*flags: str) -> AsyncIterator[PageServer]:
    server = PageServer(*flags)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@pytest.fixture
def serve_page() -> Callable[..., Any]:
    return page_server


@pytest.fixture(scope="session")
def browser() -> str:
    path = find_browser()
    if path is None:
        pytest.skip("no Chromium here: install the Debian package 'chromium' to test the page")
    return path


@pytest.fixture
def open_browser(browser: str) -> Callable[..., Any]:
    def opened(sound: Path | None = None, **options: Any) -> Any:
        return browser_page(browser, sound, **options)

    return opened


def write_wav(path: Path, pcm: bytes, rate: int = 48_000) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(pcm)
    return path


@pytest.fixture(scope="session")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three stretches of sound that the deterministic engine takes for speech, with pauses between them."""
    rate = 48_000
    turns = (silence(0.7, rate) + tone(seconds, rate) for seconds in (3.6, 6.0, 3.6))
    return write_wav(tmp_path_factory.mktemp("sound") / "speech.wav", b"".join(turns) + silence(60, rate))
