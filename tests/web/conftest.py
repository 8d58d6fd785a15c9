"""A server, and a browser with a microphone that plays a recording."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import wave
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from engine.weights.store import pull
from realtime.app import listening
from realtime.config import AuthConfig, Config, ServerConfig
from tests.cached_models import skip_unless_cached
from tests.realtime.gateway_doubles import FakeEngine, silence, tone
from tests.web.devtools import Page, find_browser, open_page, running_browser
from tests.web.firefox import find_firefox, running_firefox
from tests.web.page_server import WORDS

ROOT = Path(__file__).parents[2]
READING = "sample-two-cities"


@dataclass(frozen=True, slots=True)
class PageServer:
    """The gateway in the event loop of the test."""

    url: str
    port: int
    engine: FakeEngine


@asynccontextmanager
async def page_server(
    engine: FakeEngine | None = None, *keys: str, origins: tuple[str, ...] = ()
) -> AsyncIterator[PageServer]:
    engine = engine or FakeEngine(words=WORDS)
    config = Config(server=ServerConfig(port=0, drain_s=0.0, allowed_origins=origins), auth=AuthConfig(keys=keys))
    async with listening(engine, config) as running:
        yield PageServer(f"{running.url}/", running.port, engine)


class ServerProcess:
    """The gateway in a process of its own, on a fixed port; it can be killed and started again."""

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


@contextmanager
def server_process(*flags: str) -> Iterator[ServerProcess]:
    server = ServerProcess(*flags)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@asynccontextmanager
async def real_page(chromium: str, folder: Path) -> AsyncIterator[tuple[Page, str]]:
    """A page of a server with a real model, in a browser whose microphone plays a reading; and its address. The page
    must not have reported an error by the end. The smaller model: a browser leaves little of two cores."""
    skip_unless_cached("moonshine-tiny", READING)
    with server_process("--model", "moonshine-tiny") as server, running_browser(chromium, pull(READING)) as address:
        async with open_page(address, folder) as page:
            await page.open(server.url)
            yield page, server.url
            assert page.errors == []


def write_wav(path: Path, pcm: bytes, rate: int = 48_000) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(pcm)
    return path


def spoken(rate: int) -> bytes:
    """Three stretches of sound that the deterministic engine takes for the first three sentences, with pauses."""
    return b"".join(silence(0.9, rate) + tone(seconds, rate) for seconds in (1.25, 1.65, 1.25))


@pytest.fixture(scope="session")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the microphone hears: some speech, then silence."""
    rate = 48_000
    return write_wav(tmp_path_factory.mktemp("sound") / "speech.wav", spoken(rate) + silence(60, rate), rate)


@pytest.fixture(scope="session")
def talk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same speech as a file. Unlike a microphone, a file loses nothing on a busy machine."""
    rate = 16_000
    return write_wav(tmp_path_factory.mktemp("sound") / "talk.wav", spoken(rate) + silence(0.8, rate), rate)


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


@pytest.fixture(scope="session")
def firefox() -> Iterator[str]:
    path = find_firefox()
    if path is None:
        pytest.skip("no Firefox here: install the Debian package 'firefox-esr' to test the page in it")
    with running_firefox(path) as address:
        yield address


@pytest.fixture
async def page(browser: str, tmp_path: Path) -> AsyncIterator[Page]:
    """A tab of 1200 x 800 that must not have reported an error by the end of the test."""
    async with open_page(browser, tmp_path) as opened:
        await opened.size(1200, 800)
        yield opened
        assert not opened.errors


@pytest.fixture
async def server() -> AsyncIterator[PageServer]:
    """Reads files as windowed models do."""
    async with page_server() as running:
        running.engine.file_window_s = 30.0
        yield running
