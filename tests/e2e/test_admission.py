"""Admission at a real socket: a client that is refused, fails or leaves does not count as a session."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from realtime.serving.session_factory import SessionFactory
from tests.e2e.conftest import Serve
from tests.e2e.raw_client import greeted_client
from tests.e2e.test_openai_client import wav
from tests.realtime.gateway_doubles import FakeEngine

RAW = "encoding=linear16&sample_rate=16000"
# Each is a number to some reader and none to another.
NO_WHOLE_NUMBERS = (
    "00004800099",
    "016000",
    "1_6000",
    "%2B16000",
    "-16000",
    "16000.0",
    "1e4",
    "0x3e80",
    "%2016000",
    "nan",
)
NO_WHOLE_NUMBERS += ("%D9%A1%D9%A6%D9%A0%D9%A0%D9%A0", "%C2%B2", "9" * 5000, "16000%0A", "%00")


async def refused(url: str, **options: Any) -> tuple[int, str]:
    """The status and the sentence that an upgrade is refused with."""
    with pytest.raises(InvalidStatus) as error:
        async with connect(url, **options):
            pass
    body = json.loads(error.value.response.body)
    return error.value.response.status_code, body.get("err_msg") or body["error"]["message"]


def listen(running: Any, query: str) -> str:
    return f"{running.base_url.replace('http', 'ws', 1)}/listen?{query}"


@pytest.mark.parametrize("channels", [1, 8])
async def test_upgrades_with_bad_numbers_hold_no_place(serve: Serve, channels: int) -> None:
    several = f"&multichannel=true&channels={channels}" if channels > 1 else ""
    async with serve(limits={"max_sessions": 8, "sessions_per_key": 8}) as running:
        for _ in range(9):
            status, said = await refused(listen(running, f"encoding=linear16&sample_rate=00004800099{several}"))
            assert (status, "sample_rate" in said) == (400, True)
        async with greeted_client(running.ws):
            pass


@pytest.mark.parametrize("name", ["sample_rate", "channels", "endpointing", "utterance_end_ms"])
async def test_a_number_of_the_query_that_is_none_is_refused_by_name(serve: Serve, name: str) -> None:
    async with serve() as running:
        for number in NO_WHOLE_NUMBERS:
            status, said = await refused(listen(running, f"encoding=linear16&interim_results=true&{name}={number}"))
            assert status == 400 and f"'{name}' must be" in said, (number[:20], said)
            assert number[:20] not in said, "what the client wrote is not repeated"


async def test_a_pause_between_utterances_that_is_no_number_is_refused(serve: Serve) -> None:
    async with serve() as running, httpx.AsyncClient() as http:
        for number in ("nan", "inf", "-1", "1e999", "00.5", "1_0", "%D9%A1", "9" * 400, "1.2.3", "."):
            answer = await http.post(f"{running.base_url}/listen?utterances=true&utt_split={number}", content=wav(0.2))
            assert answer.status_code == 400 and "'utt_split' must be" in answer.text, (number[:20], answer.text)


async def test_a_boost_that_is_no_number_is_refused(serve: Serve) -> None:
    async with serve() as running:
        for boost in ("nan", "inf", "1_0", "%D9%A1", "1e999", "02", ""):
            status, said = await refused(listen(running, f"{RAW}&keywords=tape:{boost}"))
            assert status == 400 and "boost" in said, boost


async def test_a_temperature_that_is_no_number_is_refused(serve: Serve) -> None:
    async with serve() as running, httpx.AsyncClient() as http:
        for number in ("nan", "inf", "-0.1", "1.01", "\u0661", "1_0", "0x1", "00.5"):
            files = {"file": ("a.wav", wav(0.2), "audio/wav")}
            url = f"{running.base_url}/audio/transcriptions"
            answer = await http.post(url, data={"temperature": number, "model": "m"}, files=files)
            assert answer.status_code == 400 and "'temperature' must be" in answer.text, number


async def test_a_resume_from_an_event_that_has_no_number_is_refused_and_the_session_waits(serve: Serve) -> None:
    async with serve() as running, greeted_client(running.ws) as client:
        token = (await client.update(include=["session.resume"]))["resume"]["token"]
        for after in ("", "01", "1_0", "%D9%A1", "%C2%B2", "nan", "-1", "1.0", "9" * 5000):
            status, said = await refused(f"{running.ws}?resume={token}&after={after}")
            assert status == 400 and "'after' must be" in said, after
        assert len(running.gateway.sessions) == 1


@pytest.mark.parametrize("query", ["", "channels=8&multichannel=true&" + RAW])
async def test_a_session_that_cannot_be_made_takes_no_place(
    serve: Serve, query: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of several channels, the last one fails: those before it go as well."""
    made = 0
    make = SessionFactory.make

    def fail_at_last(self: SessionFactory, *arguments: Any) -> Any:
        nonlocal made
        made += 1
        if made % (8 if query else 1) == 0:
            raise RuntimeError("a bug")
        return make(self, *arguments)

    async with serve(FakeEngine(slots=8), limits={"max_sessions": 8, "sessions_per_key": 8}) as running:
        url = listen(running, query) if query else running.ws
        with monkeypatch.context() as broken:
            broken.setattr(SessionFactory, "make", fail_at_last)
            for _ in range(9):
                with pytest.raises(InvalidStatus) as error:
                    async with connect(url):
                        pass
                assert error.value.response.status_code == 500
        assert len(running.gateway.sessions) == 0
        async with greeted_client(running.ws):
            pass
    assert "a bug" in caplog.text


async def test_a_socket_that_fails_at_once_takes_no_place(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a bug")

    async with serve(limits={"max_sessions": 1}) as running:
        with monkeypatch.context() as broken:
            broken.setattr("realtime.http.websocket_routes.Connection", fail)
            with pytest.raises(InvalidStatus):
                async with connect(running.ws):
                    pass
        async with asyncio.timeout(5):
            while len(running.gateway.sessions):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        async with greeted_client(running.ws):
            pass
