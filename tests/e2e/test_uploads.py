"""Limits of uploads: counted as they arrive, few at once, and cancelled when the client has left."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import numpy as np
import pytest

from realtime.http.upload_forms import IN_MEMORY_BYTES, Spool
from tests.audio.test_containers import write
from tests.audio.test_mp4_filter_files import FILES as MP4_FILES
from tests.audio.test_mp4_filter_files import video
from tests.e2e.conftest import Serve
from tests.e2e.raw_client import greeted_client
from tests.e2e.test_http import error_code
from tests.e2e.test_openai_client import wav
from tests.realtime.gateway_doubles import FakeEngine
from tests.waiting import forever, until

FORM = {"Content-Type": "multipart/form-data; boundary=b"}
PART = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'


def file(seconds: float = 0.2) -> dict[str, Any]:
    return {"file": ("a.wav", wav(seconds), "audio/wav")}


@pytest.mark.parametrize("name", ["language", "model", "prompt", "response_format", "stream"])
async def test_a_field_that_comes_twice_or_is_too_long_is_refused_by_its_name(serve: Serve, name: str) -> None:
    engine = FakeEngine()
    async with serve(engine) as running, httpx.AsyncClient() as http:
        url = f"{running.base_url}/audio/transcriptions"
        response = await http.post(url, data={name: ["json", "json"]}, files=file())
        assert (response.status_code, response.json()["error"]["param"]) == (400, name)
        if name != "prompt":
            response = await http.post(url, data={name: "x" * 1000}, files=file())
            assert (response.status_code, response.json()["error"]["param"]) == (400, name)
        response = await http.post(url, data={name: "x" * 100_000}, files=file())
        assert (response.status_code, error_code(response)) == (400, "invalid_form")
        assert not engine.opened


async def test_an_upload_without_a_length_is_counted_as_it_arrives(serve: Serve) -> None:
    limits = {"upload_bytes": 100_000, "uploads": 1, "uploads_waiting": 0, "spool_bytes": 150_000}
    async with serve(limits=limits) as running, httpx.AsyncClient() as http:

        async def body() -> AsyncIterator[bytes]:
            yield PART
            for _ in range(100):
                yield bytes(10_000)

        url = f"{running.base_url}/audio/transcriptions"
        response = await http.post(url, content=body(), headers=FORM)
        assert (response.status_code, error_code(response)) == (413, "file_too_large")
        # It has given its place and its bytes back.
        for _ in range(2):
            assert (await http.post(url, files=file())).status_code == 200


async def test_files_that_wait_are_bounded_and_the_next_is_told_when_to_come_back(
    serve: Serve, spools: list[Spool]
) -> None:
    engine = FakeEngine()
    engine.feed_delay_s = 1.0
    limits = {"uploads": 1, "uploads_waiting": 1}
    async with serve(engine, limits=limits, server={"inject": True}) as running, httpx.AsyncClient() as http:
        url = f"{running.base_url}/audio/transcriptions"
        running_one = asyncio.create_task(http.post(url, files=file(60.0)))
        await until(lambda: bool(engine.active))
        waiting = asyncio.create_task(http.post(url, files=file()))
        await until(lambda: spools[0].uploads == 2)
        for path in ("transcriptions", "render"):
            response = await http.post(f"{running.base_url}/audio/{path}", files=file())
            assert (response.status_code, error_code(response)) == (503, "server_busy")
            assert int(response.headers["Retry-After"]) > 0
        engine.feed_delay_s = 0.0
        running_one.cancel()
        assert (await waiting).status_code == 200


async def test_one_of_several_keys_leaves_half_of_the_places_for_files_to_others(
    serve: Serve, spools: list[Spool]
) -> None:
    engine = FakeEngine()
    engine.feed_delay_s = 1.0
    mine, other = ({"Authorization": f"Bearer key-{name}-of-two"} for name in "ab")
    auth = {"keys": ("key-a-of-two", "key-b-of-two")}
    async with (
        serve(engine, limits={"uploads": 2, "uploads_waiting": 4}, auth=auth) as running,
        httpx.AsyncClient(timeout=60) as http,
    ):
        url, listen = f"{running.base_url}/audio/transcriptions", f"{running.base_url}/listen"
        held = [asyncio.create_task(http.post(url, files=file(60.0), headers=mine)) for _ in range(3)]
        await until(lambda: spools[0].uploads == 3)
        for response in (
            await http.post(url, files=file(), headers=mine),
            await http.post(listen, content=wav(1.0), headers={**mine, "Content-Type": "audio/wav"}),
        ):
            assert response.status_code == 503 and int(response.headers["Retry-After"]) > 0
            assert "One of several keys may have 3 files at once" in response.text
        await until(lambda: bool(engine.active))
        # One file of the first key runs, and two wait: they keep no place from the file of another key.
        response = await http.post(url, files=file(0.1), headers=other)
        assert response.status_code == 200, response.text
        assert len(engine.active) == 1 and not any(task.done() for task in held)
        for task in held:
            task.cancel()


async def test_bytes_of_all_files_together_are_bounded(serve: Serve, spools: list[Spool]) -> None:
    async with serve(limits={"spool_bytes": 100_000}) as running, httpx.AsyncClient() as http:
        url = f"{running.base_url}/audio/transcriptions"
        arrived, go_on = asyncio.Event(), asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            yield PART + bytes(80_000)
            arrived.set()
            await go_on.wait()
            yield b"\r\n--b--\r\n"

        holding = asyncio.create_task(http.post(url, content=slow(), headers=FORM))
        await arrived.wait()
        await until(lambda: spools[0].bytes >= 80_000)
        response = await http.post(url, files=file(2.0))
        assert (response.status_code, error_code(response)) == (503, "server_busy")
        assert (await http.post(url, files=file(0.2))).status_code == 200
        go_on.set()
        assert (await holding).status_code == 400
        assert (await http.post(url, files=file(2.0))).status_code == 200


async def test_events_of_a_file_obey_the_time_limit(serve: Serve) -> None:
    engine = FakeEngine()
    engine.feed_delay_s = 0.5
    async with serve(engine, limits={"upload_s": 0.5}) as running, httpx.AsyncClient() as http:
        url = f"{running.base_url}/audio/transcriptions"
        response = await http.post(url, files=file(60.0), data={"stream": "true"})
        assert response.status_code in (200, 504) and '"code":"timeout"' in response.text
        assert not engine.active
        assert running.metric("uploads_total", outcome="timeout") == 1


@pytest.mark.parametrize("feed_delay_s", [1.0, 0.1], ids=["before the first event", "after it"])
async def test_events_end_when_their_client_has_left(serve: Serve, feed_delay_s: float) -> None:
    engine = FakeEngine()
    engine.feed_delay_s = feed_delay_s
    async with serve(engine, limits={"uploads": 1, "uploads_waiting": 0}) as running, httpx.AsyncClient() as http:
        url = f"{running.base_url}/audio/transcriptions"

        async def listen() -> None:
            async with http.stream("POST", url, files=file(60.0), data={"stream": "true"}) as response:
                await anext(response.aiter_bytes())
                told.set()
                await forever()

        told = asyncio.Event()
        listening = asyncio.create_task(listen())
        await until(lambda: bool(engine.active))
        if feed_delay_s < 1.0:
            await told.wait()
        assert told.is_set() == (feed_delay_s < 1.0)
        listening.cancel()
        await until(lambda: not engine.active)
        engine.feed_delay_s = 0.0
        assert (await http.post(url, files=file())).status_code == 200


async def test_a_client_that_leaves_while_its_file_arrives_is_no_error(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(limits={"uploads": 1, "uploads_waiting": 0}) as running, httpx.AsyncClient() as http:
        for path in ("audio/transcriptions", "realtime/client_secrets"):
            _, writer = await asyncio.open_connection("127.0.0.1", running.port)
            head = f"POST /v1/{path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {FORM['Content-Type']}\r\n"
            writer.write(head.encode() + b"Content-Length: 10000\r\n\r\n" + PART)
            await asyncio.sleep(0.1)
            writer.close()
            await asyncio.sleep(0.1)
        assert (await http.post(f"{running.base_url}/audio/transcriptions", files=file())).status_code == 200
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


# Files as phones and programs write them


@pytest.mark.parametrize("kind", ["m4a", "m4a, lossless", "mov", "video", "long m4a"])
async def test_a_file_with_its_index_at_the_end_is_read_on_both_routes(serve: Serve, kind: str) -> None:
    if kind == "long m4a":
        data = await asyncio.to_thread(write, "ipod", "aac", 44_100, {}, loud(180.0))
        assert len(data) > IN_MEMORY_BYTES, "it is on disk"
    else:
        data = await asyncio.to_thread(MP4_FILES[kind])
    words = ["w1", "w2", "w3", "w4", "w5"]
    async with serve() as running, httpx.AsyncClient(timeout=60) as http:
        response = await http.post(f"{running.base_url}/audio/transcriptions", files={"file": ("a.m4a", data)})
        assert response.status_code == 200 and response.json()["text"].split()[:5] == words
        response = await http.post(f"{running.base_url}/listen", content=data)
        assert response.status_code == 200, response.text
        spoken = response.json()["results"]["channels"][0]["alternatives"][0]["transcript"].split()
        assert spoken[:5] == words


def loud(seconds: float) -> Any:
    return np.random.default_rng(0).normal(0, 0.2, (1, round(44_100 * seconds))).astype(np.float32).clip(-1, 1)


@pytest.mark.parametrize(
    ("make", "code", "text"),
    [
        (lambda: video(sound=False), "no_audio_track", "The file has no audio track; send one that has sound in it."),
        (lambda: write("mp4", "ac3", 48_000, {}), "format_not_served", "The codec 'ac3' is not served; send Opus, AAC"),
        (lambda: write("aiff", "pcm_s16be", 48_000, {}), "format_not_served", "The format AIFF is not served; send"),
        (lambda: MP4_FILES["m4a"]()[:20_000], "corrupt_audio", "The MP4 file has no index (moov)"),
    ],
)  # fmt: skip
async def test_a_file_that_cannot_be_read_is_refused_in_one_sentence(
    serve: Serve, make: Callable[[], bytes], code: str, text: str
) -> None:
    data = await asyncio.to_thread(make)
    async with serve() as running, httpx.AsyncClient() as http:
        response = await http.post(f"{running.base_url}/audio/transcriptions", files={"file": ("a.mp4", data)})
        assert (response.status_code, error_code(response)) == (400, code)
        assert response.json()["error"]["message"].startswith(text)
        response = await http.post(f"{running.base_url}/listen", content=data)
        assert response.status_code == 400 and response.json()["err_msg"].startswith(text)


async def test_a_socket_cannot_wait_for_an_index_and_names_the_fix(serve: Serve) -> None:
    data = await asyncio.to_thread(MP4_FILES["m4a"])
    async with serve() as running, greeted_client(running.ws) as client:
        audio = {"format": {"type": "audio/webm", "transport": "binary"}}
        await client.send("session.update", session={"audio": {"input": audio}})
        await client.until("session.updated")
        await client.socket.send(data)
        error = (await client.until("error"))[-1]["error"]
        assert "index (moov) at the end" in error["message"] and "-movflags +faststart" in error["message"]


async def test_uploads_are_counted_while_they_last_and_timed_when_they_end(serve: Serve) -> None:
    engine = FakeEngine()
    engine.feed_delay_s = 60.0
    async with serve(engine) as running, httpx.AsyncClient(base_url=running.http, timeout=60) as http:
        sending = asyncio.create_task(http.post("/v1/audio/transcriptions", files={"file": ("a.wav", wav(1.0))}))
        await until(lambda: engine.active)
        assert running.metric("uploads_in_progress") == 1 and running.metric("upload_seconds_count") == 0
        sending.cancel()
        await until(lambda: running.metric("uploads_in_progress") == 0)
        assert running.metric("upload_seconds_count") == 1
        refused = await http.post("/v1/audio/transcriptions", files={"file": ("a.wav", b"nothing")})
        assert refused.status_code == 400
        assert running.metric("upload_seconds_count") == 2 and running.metric("uploads_in_progress") == 0
