"""A gateway of a fleet shows the figures of the whole fleet from its supervisor's file."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from realtime.config import Config, FleetConfig
from realtime.http.routes import build_app
from tests.realtime.gateway_doubles import FakeEngine


async def shown(figures: str | None) -> dict[str, Any]:
    app = build_app(FakeEngine(), Config(fleet=FleetConfig(figures=figures)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        answer: dict[str, Any] = (await client.get("/capacity")).raise_for_status().json()
    return answer


async def test_capacity_has_the_sums_of_the_fleet_and_their_age(tmp_path: Path) -> None:
    path = tmp_path / "fleet.json"
    await asyncio.to_thread(path.write_text, '{"name": "captions", "sessions": 41, "streams_free": 7}')
    fleet = (await shown(str(path)))["fleet"]
    assert fleet.pop("age_s") >= 0.0
    assert fleet == {"name": "captions", "sessions": 41, "streams_free": 7}


@pytest.mark.parametrize("text", [None, "", "[1]", '{"sessions": '])
async def test_figures_that_are_not_there_or_not_whole_are_not_shown(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "fleet.json"
    if text is not None:
        await asyncio.to_thread(path.write_text, text)
    assert (await shown(str(path)))["fleet"] is None
    assert (await shown(None))["fleet"] is None
