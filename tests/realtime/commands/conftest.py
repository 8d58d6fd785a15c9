"""Commands own their event loop and may block it: no other task runs on it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.weights import registry
from realtime.commands import file_transcription as local
from tests.realtime.gateway_doubles import FakeEngine


@pytest.fixture(autouse=True)
def blockbuster() -> Iterator[None]:
    yield


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the configuration of the user who runs the tests, and with a separate cache."""
    import os

    for name in os.environ:
        if name.startswith("TICKERTAPE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TICKERTAPE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """Commands that want an engine in this process get the deterministic one."""
    fake = FakeEngine()

    @asynccontextmanager
    async def fake_engine(
        model: str, device: str, live: bool = True, speakers: bool = True
    ) -> AsyncIterator[FakeEngine]:
        yield fake

    monkeypatch.setattr(local, "local_engine", fake_engine)
    monkeypatch.setattr(registry, "options_of", lambda model: fake.spec.options)
    return fake


def sound(seconds: float) -> NDArray[np.float32]:
    """What the fake engine takes for speech: a word for every 0.4 s."""
    return (0.3 * np.sin(np.arange(round(16_000 * seconds)) * 0.17)).astype(np.float32)


def write_wav(path: Path, samples: NDArray[np.float32]) -> Path:
    data = (samples * 32767).astype("<i2").tobytes()
    head = b"RIFF" + (36 + len(data)).to_bytes(4, "little") + b"WAVEfmt " + (16).to_bytes(4, "little")
    fields = ((1, 2), (1, 2), (16_000, 4), (32_000, 4), (2, 2), (16, 2))
    body = b"".join(value.to_bytes(size, "little") for value, size in fields)
    path.write_bytes(head + body + b"data" + len(data).to_bytes(4, "little") + data)
    return path
