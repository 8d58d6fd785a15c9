"""Rendering audio without transcribing it, and injecting items that were prepared elsewhere."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Serve
from tests.e2e.raw_client import greeted_client
from tests.e2e.test_openai_client import wav
from tests.realtime.gateway_doubles import FakeEngine

FILE = {"file": ("a.wav", wav(2.0), "audio/wav")}


@pytest.mark.parametrize(
    ("items", "code"),
    [
        ("x", "invalid_value"),
        ([1], "invalid_value"),
        ([{"offset": 0}], "item_refused"),
        ([{"offset": 0, "length": 1, "sample": 0, "hash": "zz"}], "item_refused"),
        ([{"offset": 0, "length": 1, "sample": 0, "hash": "ab", "data": "AAAA"}], "item_refused"),
    ],
)
async def test_bad_items_are_refused_over_http_and_on_the_socket(serve: Serve, items: Any, code: str) -> None:
    engine = FakeEngine()
    async with serve(engine) as running, httpx.AsyncClient() as http, greeted_client(running.ws) as client:
        response = await http.post(f"{running.base_url}/audio/inject", json={"items": items})
        assert (response.status_code, response.json()["error"]["code"]) == (400, code)
        await client.send("input_audio_buffer.inject", items=items, event_id="e")
        error = (await client.receive())["error"]
        assert (error["code"], error["event_id"]) == (code, "e")
        assert not engine.injected


async def test_item_whose_hash_is_not_that_of_its_bytes_is_refused(serve: Serve) -> None:
    engine = FakeEngine()
    async with serve(engine) as running, httpx.AsyncClient() as http:
        rendered = (await http.post(f"{running.base_url}/audio/render", files=FILE)).json()
        item = next(item for item in rendered["items"] if "data" in item)
        item["hash"] = item["hash"][::-1]
        response = await http.post(f"{running.base_url}/audio/inject", json={"items": [item]})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "item_refused")
        assert not engine.injected


async def test_what_is_rendered_can_be_injected(serve: Serve) -> None:
    engine = FakeEngine()
    async with serve(engine) as running, httpx.AsyncClient() as http, greeted_client(running.ws) as client:
        rendered = (await http.post(f"{running.base_url}/audio/render", files=FILE)).json()
        assert rendered["samples"] == 32_000 and rendered["cost"]["positions_to_decode"] == rendered["positions"]
        with_data = [item for item in rendered["items"] if "data" in item]
        response = await http.post(f"{running.base_url}/audio/inject", json={"items": rendered["items"]})
        assert response.json()["injected"] == len(with_data) == len(engine.injected)
        await client.send("input_audio_buffer.inject", items=[None, *with_data[:1]])
        assert (await client.receive())["type"] == "input_audio_buffer.injected"
        # Nothing was executed.
        assert not engine.streams


async def test_render_refuses_what_is_not_audio_and_can_leave_data_out(serve: Serve) -> None:
    async with serve() as running, httpx.AsyncClient() as http:
        url = f"{running.base_url}/audio/render"
        bad = await http.post(url, files={"file": ("a.wav", b"no audio here", "audio/wav")})
        assert (bad.status_code, bad.json()["error"]["code"]) == (400, "not_audio")
        assert (await http.post(url, data={"x": "y"}, files={"other": b"1"})).json()["error"]["code"] == "missing_file"
        short = (await http.post(url + "?data=false", files=FILE)).json()
        assert short["items"] and not any("data" in item for item in short["items"])
