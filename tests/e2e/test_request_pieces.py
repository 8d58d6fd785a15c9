"""Requests are parsed in pieces: nothing that one client sends at once keeps the others waiting for all of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import h11
import httpx
import pytest

from realtime.serving import uvicorn_protocols
from realtime.serving.uvicorn_protocols import HTTP_PIECE_BYTES
from tests.e2e.conftest import Serve
from tests.e2e.raw_client import COMPLETED, greeted_client
from tests.e2e.test_upload_storage import HEAD, answer, chunk
from tests.e2e.test_uploads import PART, file
from tests.realtime.gateway_doubles import silence, tone


@contextmanager
def events_between_turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The largest number of request events that are handled before another client's turn; every piece is one turn."""
    counted, most = 0, [0]
    next_event = h11.Connection.next_event

    def counting(self: h11.Connection) -> Any:
        nonlocal counted
        counted += 1
        return next_event(self)

    async def others() -> None:
        nonlocal counted
        while True:
            most[0], counted = max(most[0], counted), 0
            await asyncio.sleep(0)

    monkeypatch.setattr(h11.Connection, "next_event", counting)
    monkeypatch.setattr(uvicorn_protocols, "PARSING_S", -1.0)
    task = asyncio.create_task(others())
    try:
        yield most
    finally:
        task.cancel()


@pytest.mark.parametrize("chunks", [5_000, 50_000])
async def test_a_body_of_tiny_chunks_is_read_in_turns(
    serve: Serve, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve() as running, httpx.AsyncClient() as http:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(HEAD.format(path="/v1/audio/transcriptions").encode() + chunk(PART))
        with events_between_turns(monkeypatch) as most:
            writer.write(b"1\r\nx\r\n" * chunks + chunk(b"\r\n--b--\r\n") + b"0\r\n\r\n")
            status, body = await answer(reader)
        assert (status, body["error"]["code"]) == (400, "not_audio"), "all of it was read"
        # A byte in a chunk of its own takes six.
        assert most[0] <= HTTP_PIECE_BYTES / 6 + 10
        writer.close()
        assert (await http.post(f"{running.base_url}/audio/transcriptions", files=file())).status_code == 200


@pytest.mark.parametrize("parsing_s", [-1.0, 10.0], ids=["a piece at a time", "all at once"])
async def test_a_body_is_the_same_however_it_is_parsed(
    serve: Serve, parsing_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uvicorn_protocols, "PARSING_S", parsing_s)
    async with serve() as running, httpx.AsyncClient() as http:
        url = f"{running.base_url}/audio/transcriptions"
        for seconds in (0.9, 40.0):
            response = await http.post(url, files=file(seconds))
            assert response.status_code == 200 and response.json()["usage"]["seconds"] == seconds
        # Requests that come together are answered one by one.
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 500)
        read = b""
        async with asyncio.timeout(20):
            while read.count(b'"ok"') < 500:
                read += await reader.read(65_536)
        assert read.count(b"HTTP/1.1 200") == 500
        writer.close()


async def test_a_socket_whose_head_came_in_pieces_is_read(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_protocols, "PARSING_S", -1.0)
    # Longer than a piece of a request, and shorter than one of a socket, which would pause and go on by itself.
    headers = {f"X-Filler-{number}": "x" * 900 for number in range(3)}
    async with serve() as running, greeted_client(running.ws, additional_headers=headers) as client:
        for _ in range(3):
            await client.append(tone(1.0) + silence(0.8))
            assert (await client.until(COMPLETED))[-1]["transcript"]
