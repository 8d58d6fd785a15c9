"""Clocks that jump: limits, deadlines and waiting sessions use a monotonic clock."""

from __future__ import annotations

import ast
import asyncio
import logging
import time
from pathlib import Path

import httpx
import pytest
from websockets.exceptions import InvalidStatus

from tests.e2e.conftest import Serve
from tests.e2e.raw_client import greeted_client, raw_client

ROOT = Path(__file__).parents[2]
DAY = 86_400.0
KEY = "the-real-key"
# Who looks at the clock on the wall, and why a jump of it does no harm.
WALL_CLOCK = {
    "realtime/text_values.py": "shown to clients",
    "realtime/http/authentication.py": "client secrets say until when they are valid, also at other gateways",
    "realtime/http/info_routes.py": "shown to clients and operators",
    "realtime/http/routes.py": "handed to those two",
    "realtime/serving/signed_tokens.py": "links expire at a time of day",
    "realtime/serving/fleet_publishing.py": "links that were issued before the fleet began are not valid",
    "realtime/serving/viewers.py": "caption segments have the time of day, which players need",
    "realtime/http/viewer_routes.py": "the same",
    "realtime/serving/metrics.py": "the time of the start, for operators",
}


class Wall:
    """A wall clock that can be set."""

    def __init__(self) -> None:
        self._true = time.time
        self.ahead = 0.0

    def __call__(self) -> float:
        return self._true() + self.ahead


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Wall:
    clock = Wall()
    monkeypatch.setattr(time, "time", clock)
    return clock


def test_nothing_but_what_is_listed_looks_at_the_clock_on_the_wall() -> None:
    found = set()
    for package in ("realtime", "engine", "audio"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    name = f"{node.value.id}.{node.attr}"
                    if name in ("time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today"):
                        found.add(path.relative_to(ROOT).as_posix())
                elif isinstance(node, ast.ImportFrom) and node.module == "time":
                    assert not {"time", "time_ns"} & {alias.name for alias in node.names}, path
    assert found == set(WALL_CLOCK)


async def status_of(url: str, key: str) -> int:
    try:
        async with greeted_client(url, additional_headers={"Authorization": f"Bearer {key}"}):
            return 101
    except InvalidStatus as refused:
        return refused.response.status_code


@pytest.mark.parametrize("jump", [DAY, -DAY], ids=["forwards", "backwards"])
async def test_a_jump_of_the_clock_changes_no_limit(serve: Serve, wall: Wall, jump: float) -> None:
    limits = {"new_sessions_per_minute": 2, "idle_s": 3600.0, "session_s": 3600.0, "upload_s": 60.0}
    async with serve(limits=limits, auth={"keys": (KEY,)}, session={"resume_s": 60.0}) as running:
        headers = {"Authorization": f"Bearer {KEY}"}
        async with greeted_client(running.ws, additional_headers=headers) as client:
            session = await client.update(include=["session.resume"])
            wall.ahead = jump
            # Several ticks, in which a session that is idle, too old or not resumed would be ended.
            beats = running.metric("loop_lag_seconds_count")
            while running.metric("loop_lag_seconds_count") < beats + 3:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            assert (await client.update(turn_detection=None))["type"] == "transcription"
            await client.socket.close(4000)
        wall.ahead = -jump
        again = f"{running.ws}?resume={session['resume']['token']}&after=0"
        async with raw_client(again, additional_headers=headers) as client:
            assert (await client.receive())["type"] == "session.resumed"
        assert [await status_of(running.ws, KEY) for _ in range(2)] == [101, 429], "two in a minute, by the true one"
        wall.ahead = jump
        assert await status_of(running.ws, KEY) == 429
        async with httpx.AsyncClient(base_url=running.http, headers=headers) as http:
            sending = asyncio.create_task(http.post("/v1/audio/transcriptions", content=slow(wall, jump), headers=FORM))
            assert (await sending).json()["error"]["code"] != "upload_too_slow"


FORM = {"Content-Type": "multipart/form-data; boundary=x"}


async def slow(wall: Wall, jump: float):  # type: ignore[no-untyped-def]
    yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
    wall.ahead += jump
    yield b"no audio\r\n--x--\r\n"


async def test_client_secrets_go_by_the_clock_on_the_wall(serve: Serve, wall: Wall) -> None:
    """They say until when they are valid, and any gateway that shares the secret takes them."""
    async with serve(auth={"keys": (KEY,)}) as running, httpx.AsyncClient(base_url=running.http) as http:
        answer = await http.post("/v1/realtime/client_secrets", json={}, headers={"Authorization": f"Bearer {KEY}"})
        secret = answer.json()["value"]
        # It took the clock when it was loaded, before the test put its own in the place.
        running.gateway.context.authenticator._clock = wall
        assert await status_of(running.ws, secret) == 101
        wall.ahead = DAY
        assert await status_of(running.ws, secret) == 401
        wall.ahead = -DAY
        assert await status_of(running.ws, secret) == 101


@pytest.mark.parametrize("years", [8100, -100, -2100])
async def test_a_clock_beyond_all_dates_breaks_nothing(serve: Serve, wall: Wall, years: int) -> None:
    async with serve(auth={"keys": (KEY,)}) as running:
        headers = {"Authorization": f"Bearer {KEY}"}
        async with greeted_client(running.ws, additional_headers=headers) as client:
            wall.ahead = years * 365.25 * DAY
            before = running.server.server_state.default_headers
            # uvicorn writes the Date header once a second.
            async with asyncio.timeout(30):
                while running.server.server_state.default_headers == before:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert (await client.update(turn_detection=None))["type"] == "transcription"
            assert await status_of(running.ws, KEY) == 101
            assert await status_of(running.ws, "a-wrong-key") == 401
            listen = running.ws.replace("/v1/realtime", "/v1/listen")
            async with raw_client(listen, additional_headers={"Authorization": f"Token {KEY}"}) as deepgram:
                await deepgram.socket.send('{"type": "CloseStream"}')
                assert (await deepgram.receive())["type"] == "Metadata"
            async with httpx.AsyncClient(base_url=running.http, headers=headers) as http:
                for path in ("/", "/health", "/ready", "/capacity", "/metrics", "/v1/models"):
                    assert (await http.get(path)).status_code == 200, path
                secret = (await http.post("/v1/realtime/client_secrets", json={})).json()["value"]
                assert await status_of(running.ws, secret) == 101
        logging.getLogger("tickertape").warning("a line with the time in it")
