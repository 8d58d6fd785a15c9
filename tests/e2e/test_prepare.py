"""Rendering audio without transcribing it, and injecting items that were prepared elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Serve
from tests.e2e.raw_client import greeted_client
from tests.e2e.test_openai_client import wav
from tests.realtime.gateway_doubles import FakeEngine

INJECTS = {"inject": True}
FILE = {"file": ("a.wav", wav(2.0), "audio/wav")}


@pytest.mark.parametrize(
    ("items", "code"),
    [
        ("x", "invalid_value"),
        ([1], "invalid_value"),
        ([{"offset": 0}], "item_refused"),
        ([{"offset": 0, "length": 1, "sample": 0, "hash": "zz"}], "item_refused"),
        ([{"offset": 0, "length": 1, "sample": 0, "hash": "ab", "data": "AAAA"}], "item_refused"),
        ([{"offset": 0, "length": 1, "sample": 0, "samples": "x"}], "item_refused"),
        ([{"offset": 2**62, "length": 1, "sample": 0}], "item_refused"),
        ([{"offset": True, "length": 1, "sample": 0}], "item_refused"),
        ([{"offset": 0, "length": 1.5, "sample": 0}], "item_refused"),
        ([{"offset": 0, "length": 1, "sample": 0, "data": "AAAAAA==", "shape": [2**40, 2**40]}], "item_refused"),
    ],
)
async def test_bad_items_are_refused_over_http_and_on_the_socket(serve: Serve, items: Any, code: str) -> None:
    engine = FakeEngine()
    async with (
        serve(engine, server=INJECTS) as running,
        httpx.AsyncClient() as http,
        greeted_client(running.ws) as client,
    ):
        response = await http.post(f"{running.base_url}/audio/inject", json={"items": items})
        assert (response.status_code, response.json()["error"]["code"]) == (400, code)
        await client.send("input_audio_buffer.inject", items=items, event_id="e")
        error = (await client.receive())["error"]
        assert (error["code"], error["event_id"]) == (code, "e")
        assert not engine.injected


async def test_numbers_beyond_all_numbers_are_refused(serve: Serve) -> None:
    """Written by hand: a client's library would not."""
    engine = FakeEngine()
    async with serve(engine, server=INJECTS) as running, httpx.AsyncClient() as http:
        for offset in (str(2**70), "9" * 5000, "1e400", "-1"):
            body = f'{{"items": [{{"offset": {offset}, "length": 1, "sample": 0}}]}}'
            response = await http.post(f"{running.base_url}/audio/inject", content=body.encode())
            assert response.status_code == 400, response.text
        assert not engine.injected


async def test_injecting_is_off_unless_configured(serve: Serve) -> None:
    engine = FakeEngine()
    async with serve(engine) as running, httpx.AsyncClient() as http, greeted_client(running.ws) as client:
        response = await http.post(f"{running.base_url}/audio/inject", json={"items": []})
        assert (response.status_code, response.json()["error"]["code"]) == (403, "inject_not_allowed")
        assert "server.inject" in response.json()["error"]["message"]
        await client.send("input_audio_buffer.inject", items=[], event_id="e")
        error = (await client.receive())["error"]
        assert (error["code"], error["event_id"]) == ("inject_not_allowed", "e") and "server.inject" in error["message"]


async def test_a_client_secret_never_injects(serve: Serve) -> None:
    key = {"Authorization": "Bearer a-long-key"}
    async with serve(server=INJECTS, auth={"keys": ("a-long-key",)}) as running, httpx.AsyncClient() as http:
        minted = await http.post(f"{running.base_url}/realtime/client_secrets", headers=key, json={})
        secret = {"Authorization": f"Bearer {minted.json()['value']}"}
        response = await http.post(f"{running.base_url}/audio/inject", headers=secret, json={"items": []})
        assert response.status_code == 403
        async with greeted_client(running.ws, additional_headers=secret) as client:
            await client.send("input_audio_buffer.inject", items=[])
            assert (await client.receive())["error"]["code"] == "inject_not_allowed"
        async with greeted_client(running.ws, additional_headers=key) as client:
            await client.send("input_audio_buffer.inject", items=[])
            assert (await client.receive())["type"] == "input_audio_buffer.injected"


async def test_bodies_of_items_are_counted_while_they_arrive(serve: Serve) -> None:
    """A body beyond the limit is refused although its length was not told, and others' bodies count too."""

    async def long() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 10_000

    async def slow(begun: asyncio.Event, go_on: asyncio.Event) -> AsyncIterator[bytes]:
        yield b" " * 60_000
        begun.set()
        await go_on.wait()
        yield b'{"items": []}'

    limits = {"inject_bytes": 100_000}
    async with serve(server=INJECTS, limits=limits) as running, httpx.AsyncClient() as http:
        url = f"{running.base_url}/audio/inject"
        assert (await http.post(url, content=long())).status_code == 413
        begun, go_on = asyncio.Event(), asyncio.Event()
        waiting = asyncio.create_task(http.post(url, content=slow(begun, go_on)))
        await begun.wait()
        refused = await http.post(url, content=b" " * 60_000)
        while refused.status_code == 400:  # what was sent first is still on its way
            refused = await http.post(url, content=b" " * 60_000)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "inject_busy")
        assert refused.headers["retry-after"] == "1"
        go_on.set()
        assert (await waiting).json() == {"injected": 0}
        full = await http.post(url, content=b'{"items": []}' + b" " * 99_000)
        assert full.status_code == 200, "everything that was held is free again"


async def test_item_whose_hash_is_not_that_of_its_bytes_is_refused(serve: Serve) -> None:
    engine = FakeEngine()
    async with serve(engine, server=INJECTS) as running, httpx.AsyncClient() as http:
        rendered = (await http.post(f"{running.base_url}/audio/render", files=FILE)).json()
        item = next(item for item in rendered["items"] if "data" in item)
        item["hash"] = item["hash"][::-1]
        response = await http.post(f"{running.base_url}/audio/inject", json={"items": [item]})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "item_refused")
        assert not engine.injected


async def test_what_is_rendered_can_be_injected(serve: Serve) -> None:
    engine = FakeEngine()
    async with (
        serve(engine, server=INJECTS) as running,
        httpx.AsyncClient() as http,
        greeted_client(running.ws) as client,
    ):
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
    async with serve(server=INJECTS) as running, httpx.AsyncClient() as http:
        url = f"{running.base_url}/audio/render"
        bad = await http.post(url, files={"file": ("a.wav", b"no audio here", "audio/wav")})
        assert (bad.status_code, bad.json()["error"]["code"]) == (400, "not_audio")
        assert (await http.post(url, data={"x": "y"}, files={"other": b"1"})).json()["error"]["code"] == "missing_file"
        short = (await http.post(url + "?data=false", files=FILE)).json()
        assert short["items"] and not any("data" in item for item in short["items"])
