"""Requests that never end: deadlines for the head, the pace of the body, and reading the answer."""

from __future__ import annotations

import asyncio
import socket
import time

import httpx
import pytest

from tests.e2e.conftest import Serve
from tests.e2e.raw_client import greeted_client

SERVER = {"handshake_s": 0.4}
WHOLE = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
UPLOAD = (
    b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=b\r\n"
)
SECRET = b"POST /v1/realtime/client_secrets HTTP/1.1\r\nHost: localhost\r\n"
TRICKLE = [b"X"] * 200


async def cut_after(port: int, begin: bytes, pieces: list[bytes]) -> float | None:
    """Seconds until the server cuts a connection on which a piece comes every 50 ms; None if it does not."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    begun = time.monotonic()

    async def trickle() -> None:
        writer.write(begin)
        for piece in pieces:
            await asyncio.sleep(0.05)
            writer.write(piece)

    sending = asyncio.create_task(trickle())
    try:
        async with asyncio.timeout(3):
            while await reader.read(65_536):
                pass
        return time.monotonic() - begun
    except ConnectionError:
        return time.monotonic() - begun
    except TimeoutError:
        return None
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.close()


@pytest.mark.parametrize(
    "begin",
    [
        b"",
        b"GET /health HTTP/1.1\r\nX: ",
        WHOLE + b"GET /health HTTP/1.1\r\nX: ",
        UPLOAD + b"Content-Length: 100000\r\n\r\n",
        SECRET + b"Content-Length: 1000\r\n\r\n",
        WHOLE + SECRET + b"Content-Length: 1000\r\n\r\n",
        # This one is refused at once, and goes on.
        b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n",
    ],
    ids=["nothing", "head", "second head", "upload", "body", "second body", "refused body"],
)
async def test_what_trickles_is_cut_off(serve: Serve, begin: bytes) -> None:
    async with serve(server=SERVER) as running:
        seconds = await cut_after(running.port, begin, TRICKLE)
        assert seconds is not None and seconds < 2.5


async def test_a_second_head_has_its_own_deadline(serve: Serve) -> None:
    async with serve(server=SERVER) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        for _ in range(9):
            writer.write(WHOLE)
            assert b"200 OK" in await reader.readuntil(b"}")
            await asyncio.sleep(0.1)
        writer.write(b"GET /health HTTP/1.1\r\nX: ")
        async with asyncio.timeout(2):
            for _ in range(100):
                writer.write(b"X")
                await asyncio.sleep(0.05)
                if reader.at_eof() or writer.transport.is_closing():
                    break
        assert reader.at_eof() or writer.transport.is_closing()
        writer.close()


async def test_a_body_that_brings_enough_is_waited_for_and_so_is_a_long_answer(serve: Serve) -> None:
    async with serve(server=SERVER) as running:
        begin = (
            UPLOAD + b"Content-Length: 100000\r\n\r\n--b\r\nContent-Disposition: form-data; name=x; filename=x\r\n\r\n"
        )
        assert await cut_after(running.port, begin, [bytes(200)] * 100) is None
        async with httpx.AsyncClient() as http, greeted_client(running.ws) as client:
            # The deadline passes for another connection, which says nothing, and so it has for this one.
            assert await cut_after(running.port, b"", []) is not None
            await client.send("input_audio_buffer.clear")
            assert (await client.receive())["type"] == "input_audio_buffer.cleared"
            assert (await http.get(f"{running.http}/health")).status_code == 200


async def test_an_answer_that_nobody_reads_is_given_up(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realtime.serving.uvicorn_protocols.UNREAD_TIMES", 1)
    async with serve(server=SERVER) as running:
        small = socket.socket()
        small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        small.setblocking(False)
        await asyncio.get_running_loop().sock_connect(small, ("127.0.0.1", running.port))
        _, writer = await asyncio.open_connection(sock=small, limit=1)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        for _ in range(4000):
            writer.write(b"GET /app.js HTTP/1.1\r\nHost: localhost\r\n\r\n")
        for _ in range(300):
            await asyncio.sleep(0.05)
            if not running.server.server_state.connections:
                break
        assert not running.server.server_state.connections
        writer.transport.abort()


REFUSED = {
    "an unknown address": ("POST /v1/nothing", 404),
    "a wrong method": ("PUT /v1/models", 405),
    "what is switched off": ("POST /v1/audio/render", 403),
    "no form": ("POST /v1/audio/transcriptions", 400),
    "a body that is too large": ("POST /v1/realtime/client_secrets", 413),
}


@pytest.mark.parametrize("request_line, status", REFUSED.values(), ids=REFUSED)
async def test_a_request_that_is_refused_before_its_body_has_come_is_answered(
    serve: Serve, request_line: str, status: int
) -> None:
    """A client that is still sending reads why it is refused; its connection is not reset under it."""
    body = bytes(3 * 2**20)
    head = f"{request_line} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    async with serve() as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(head.encode() + body)
        await writer.drain()
        answer = await reader.read()
        writer.close()
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()) and b'"error"' in answer
