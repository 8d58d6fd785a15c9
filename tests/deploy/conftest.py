"""Deployment is tested with processes of its own, over an engine that needs no model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.client.pool import Capacity
from engine.client.supervisor import EngineMetrics
from engine.server.main import run_engine
from tests.engine.fakes import build


@pytest.fixture
def engine_figures() -> tuple[EngineMetrics, Capacity]:
    return EngineMetrics(), Capacity(0, 1, 0, 0.0, 1.0)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An engine that runs elsewhere, as the variable that names it."""
    stop = threading.Event()
    address = f"ipc://{tmp_path}/engine"
    thread = threading.Thread(target=run_engine, args=(address, build, stop.is_set))
    thread.start()
    yield {"TICKERTAPE_MODEL_ENGINES": address}
    stop.set()
    thread.join()
