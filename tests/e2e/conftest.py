"""A real server on a real socket, over the deterministic engine."""

from __future__ import annotations

import asyncio
import platform
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from blockbuster import BlockBuster, blockbuster_ctx

from realtime.app import Server, listening
from realtime.config import Config, ServerConfig
from realtime.http.upload_forms import Spool
from realtime.serving.isolated_decoder import IsolatedDecoder
from tests.addresses import Addresses
from tests.realtime.gateway_doubles import FakeEngine

# The openai package asks for this once, by way of a subprocess.
platform.processor()


@pytest.fixture(autouse=True)
def blockbuster() -> Any:
    """Nothing may block the event loop. Reading our own modules and the TLS files at start-up is not meant."""
    with blockbuster_ctx() as guard:
        _allow_start_up(guard)
        yield guard


@pytest.fixture(scope="session", autouse=True)
def warm_decoders() -> None:
    """The program that forks decoders takes seconds to start on a busy machine; clients here do not wait that long."""

    async def begin_one() -> None:
        decoder = await IsolatedDecoder.begin()
        await decoder.ask(b"")
        decoder.end()

    asyncio.run(begin_one())


def _allow_start_up(guard: BlockBuster) -> None:
    for function in ("io.TextIOWrapper.read", "io.BufferedReader.read", "os.stat", "io.TextIOWrapper.write"):
        if function in guard.functions:
            guard.functions[function].deactivate()


@dataclass
class Running(Addresses):
    """A server that listens."""

    server: Server
    engine: FakeEngine
    port: int

    @property
    def gateway(self) -> Any:
        return self.server.gateway

    async def answers_others(self) -> None:
        """Until the server has answered a request that came later than all that was sent to it before."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        assert b" 200 " in await reader.read()
        writer.close()

    def metric(self, name: str, **labels: str) -> float:
        return self.gateway.metrics.registry.get_sample_value(f"tickertape_{name}", labels) or 0.0


Serve = Callable[..., Any]


@asynccontextmanager
async def running_server(engine: FakeEngine | None = None, **sections: dict[str, Any]) -> AsyncIterator[Running]:
    """Start a server with some configuration sections changed; `server={"tls_cert": ...}` and the like."""
    config = Config(server=ServerConfig(port=0, drain_s=1.0))
    for name, changes in sections.items():
        config = replace(config, **{name: replace(getattr(config, name), **changes)})
    engine = engine or FakeEngine()
    async with listening(engine, config) as running:
        yield Running(running.server, engine, running.port)


@pytest.fixture
def serve() -> Serve:
    return running_server


@pytest.fixture
def spools(monkeypatch: pytest.MonkeyPatch) -> list[Spool]:
    """The book of uploads of every server that is started from now on."""
    made: list[Spool] = []

    class Seen(Spool):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr("realtime.http.upload_forms.Spool", Seen)
    return made


def pytest_configure() -> None:
    """A shell that starts tests in the background lets them ignore interrupts, and with them all that they start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
