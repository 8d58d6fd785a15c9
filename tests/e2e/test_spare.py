"""`model.spare` through the whole server: two engine processes, one serves, a kill, and sessions go on."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from engine.client.engine_handles import EngineProcess
from engine.options import EngineConfig
from realtime import app
from realtime.config import load_config
from tests.e2e.raw_client import DELTA, greeted_client
from tests.engine import fakes
from tests.realtime.gateway_doubles import tone


async def spares(http: httpx.AsyncClient, count: int) -> dict[str, Any]:
    """What the server says of its capacity, as soon as so many spares are ready."""
    while (capacity := (await http.get("/capacity")).json())["spares_ready"] != count:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    return dict(capacity)


@pytest.fixture
def blockbuster() -> None:
    """Starting a process writes to pipes."""


async def test_a_server_with_a_spare_says_so_and_goes_on_after_a_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[EngineProcess] = []

    def fake_engine(config: EngineConfig) -> EngineProcess:
        assert config.share_of == 2, "each has half of the device"
        engines.append(fakes.process(fakes.build))
        return engines[-1]

    monkeypatch.setattr(app, "EngineProcess", fake_engine)
    config = load_config(
        environment={"TICKERTAPE_MODEL_SPARE": "true"},
        flags={"server.port": 0, "server.drain_s": 0, "limits.max_load": 0},
    )
    async with asyncio.timeout(60), app.running_server(config) as server:
        await server.wait_until_ready()
        async with httpx.AsyncClient(base_url=server.url, trust_env=False) as http:
            capacity = await spares(http, 1)
            assert capacity["engines_wanted"] == capacity["spares_wanted"] == len(capacity["engines"]) == 1
            async with greeted_client(server.url.replace("http", "ws", 1) + "/v1/realtime") as client:
                await client.update(turn_detection=None)
                await client.append(tone(0.5))
                await client.until(DELTA)
                fakes.kill(engines[0].pid)
                await spares(http, 0)
                assert (await http.get("/ready")).status_code == 200
                await client.append(tone(0.5, amplitude=0.1))
                await client.until(DELTA)
            await spares(http, 1)
            counted = (await http.get("/metrics")).text
            assert "tickertape_engine_spares 1.0" in counted and "tickertape_engine_restarts_total 1.0" in counted
