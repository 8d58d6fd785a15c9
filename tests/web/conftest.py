"""A server in its own process and a browser with a microphone that plays a recording."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import wave
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.realtime.gateway_doubles import silence, tone
from tests.web.devtools import Page, find_browser, open_page, running_browser

ROOT = Path(__file__).parents[2]


class PageServer:
    """The gateway on a fixed port; it can be killed and started again."""

    def __init__(self, *flags: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/"
        self._flags = flags
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.web.page_server", str(self.port), *self._flags]
        self._process = subprocess.Popen(command, cwd=ROOT)
        for _ in range(600):
            assert self._process.poll() is None, "the server did not start"
            try:
                if httpx.get(self.url + "ready", trust_env=False).is_success:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise TimeoutError("the server was not ready within a minute")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def capacity(self) -> dict[str, Any]:
        shown: dict[str, Any] = httpx.get(self.url + "capacity", trust_env=False).json()
        return shown


@contextmanager
def page_server(*flags: str) -> Iterator[PageServer]:
    server = PageServer(*flags)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def write_wav(path: Path, pcm: bytes, rate: int = 48_000) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(pcm)
    return path


@pytest.fixture(scope="session")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three stretches of sound that the deterministic engine takes for 5, 6 and 4 words, with pauses between them."""
    rate = 48_000
    turns = (silence(0.8, rate) + tone(seconds, rate) for seconds in (2.05, 2.45, 1.65))
    return write_wav(tmp_path_factory.mktemp("sound") / "speech.wav", b"".join(turns) + silence(60, rate), rate)


@pytest.fixture(scope="session")
def chromium() -> str:
    path = find_browser()
    if path is None:
        pytest.skip("no Chromium here: install the Debian package 'chromium' to test the page")
    return path


@pytest.fixture(scope="session")
def browser(chromium: str, speech: Path) -> Iterator[str]:
    with running_browser(chromium, speech) as address:
        yield address


@pytest.fixture
async def page(browser: str, tmp_path: Path) -> AsyncIterator[Page]:
    """A tab of 1200 x 800 that must not have reported an error by the end of the test."""
    async with open_page(browser, tmp_path) as opened:
        await opened.size(1200, 800)
        yield opened
        assert not opened.errors


@pytest.fixture(scope="session")
def server() -> Iterator[PageServer]:
    """For tests that leave it as it was."""
    with page_server() as running:
        yield running
