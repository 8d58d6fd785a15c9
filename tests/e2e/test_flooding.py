"""Messages that are cheap to send and expensive to hold: nothing accumulates, and other clients do not wait."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import os
import socket as socket_module
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from socket import SO_RCVBUF, SO_SNDBUF, SOL_SOCKET
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from realtime.serving import connection
from realtime.serving.uvicorn_protocols import PIECE_BYTES, RealtimeWebSocket
from tests.e2e.conftest import Running, Serve
from tests.e2e.raw_client import greeted_client
from tests.realtime.gateway_doubles import tone

TEXT, CONTINUED, PING = 1, 0, 9


def frame(opcode: int, payload: bytes = b"", final: bool = True) -> bytes:
    """A client's frame with a mask of zeros."""
    head = bytes([opcode | (0x80 if final else 0)])
    if len(payload) < 126:
        head += bytes([0x80 | len(payload)])
    elif len(payload) < 65536:
        head += bytes([0x80 | 126]) + struct.pack("!H", len(payload))
    else:
        head += bytes([0x80 | 127]) + struct.pack("!Q", len(payload))
    return head + bytes(4) + payload


@asynccontextmanager
async def bare_socket(running: Running) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A socket after its handshake, with nothing between the test and its bytes."""
    bare = socket_module.socket()
    bare.setsockopt(SOL_SOCKET, SO_RCVBUF, 4096)
    bare.setblocking(False)
    await asyncio.get_running_loop().sock_connect(bare, ("127.0.0.1", running.port))
    reader, writer = await asyncio.open_connection(sock=bare, limit=2**16)
    key = base64.b64encode(os.urandom(16)).decode()
    writer.write(
        f"GET /v1/realtime HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n".encode()
    )
    await reader.readuntil(b"\r\n\r\n")
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def server_side() -> list[RealtimeWebSocket]:
    return [
        thing for thing in gc.get_objects() if issubclass(type(thing), RealtimeWebSocket) and not thing.disconnected
    ]


async def send_for(writer: asyncio.StreamWriter, data: bytes, seconds: float) -> int:
    """Send without end; how many bytes the server took."""
    sent, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        writer.write(data)
        try:
            async with asyncio.timeout(until + 0.1 - time.monotonic()):
                await writer.drain()
        except TimeoutError:
            break
        sent += len(data)
    return sent


async def test_pongs_do_not_pile_up_for_a_client_that_does_not_read(serve: Serve) -> None:
    async with serve() as running, bare_socket(running) as (reader, writer):
        (socket,) = server_side()
        # The kernel would take megabytes for a peer on the same machine.
        socket.transport.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_SNDBUF, 4096)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        for _ in range(100):
            writer.write(frame(PING, b"x" * 125) * 100)
            await writer.drain()
        writer.write(frame(PING, b"newest"))
        async with asyncio.timeout(15):
            while not socket._unsent_pong.endswith(b"newest"):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert socket.transport.get_write_buffer_size() < 80_000
        # When it reads again, the newest ping has its answer.
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        got = b""
        async with asyncio.timeout(15):
            while not got.endswith(b"\x8a\x06newest"):
                got += await reader.read(2**16)
        assert len(got) < 600_000, "pings in between have no answer"


@pytest.mark.parametrize("flood", ["pings", "empty fragments", "tiny fragments", "tiny messages"])
async def test_tiny_frames_neither_pile_up_nor_keep_others_waiting(serve: Serve, flood: str) -> None:
    pieces = {
        "pings": frame(PING),
        "empty fragments": frame(CONTINUED, final=False),
        "tiny fragments": frame(CONTINUED, b"x", final=False),
        "tiny messages": frame(TEXT, b"x"),
    }
    limits = {"mistakes_per_second": 0.0}
    async with serve(limits=limits) as running, bare_socket(running) as (_, writer), greeted_client(running.ws) as good:
        if "fragments" in flood:
            writer.write(frame(TEXT, final=False))
        flooding = asyncio.create_task(send_for(writer, pieces[flood] * 10_000, 1.5))
        waits = []
        while not flooding.done():
            began = time.monotonic()
            await good.update(format={"type": "audio/pcm", "rate": 24_000})
            waits.append(time.monotonic() - began)
            await asyncio.sleep(0.02)
        held = [len(socket._mailbox._messages) for socket in server_side()]
        most = 32 + PIECE_BYTES // len(frame(TEXT, b""))
        assert max(held) <= most, "no more than the bytes of one piece hold"
        assert sorted(waits)[len(waits) // 2] < 0.5, "others wait for the flood"
        await good.append(tone(1.0))
        await good.until("input_audio_buffer.speech_started")


async def test_a_message_that_is_not_audio_is_short(serve: Serve) -> None:
    async with serve(limits={"control_bytes": 1000}) as running, greeted_client(running.ws) as client:
        for body in (
            {"type": "session.update", "session": {"x": "y" * 1000}},
            {"type": "session.update", "session": {"x": [[]] * 400}},
            {"type": "input_audio_buffer.inject", "items": [{}] * 400},
            {"type": "input_audio_buffer.append", "audio": "", "more": [{}] * 400},
        ):
            await client.socket.send(json.dumps(body))
            error = (await client.receive())["error"]
            assert error["code"] == "message_too_large" and "1000 bytes (limits.control_bytes)" in error["message"]
        # Audio may be long, wherever its fields stand.
        audio = base64.b64encode(tone(1.0)).decode()
        await client.socket.send(json.dumps({"event_id": "e", "audio": audio, "type": "input_audio_buffer.append"}))
        await client.until("input_audio_buffer.speech_started")


LONG = "x" * 100_000


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"transcription": {"prompt": LONG[:17_000]}}, "prompt"),
        ({"transcription": {"model": LONG[:300]}}, "model"),
        ({"transcription": {"keywords": [LONG[:300]]}}, "keywords"),
        ({"transcription": {"keywords": ["x"] * 501}}, "keywords"),
        ({"transcription": {"keywords": ["x" * 200] * 200}}, "keywords"),
        ({"noise_reduction": {"type": LONG[:300]}}, "noise_reduction.type"),
        ({"noise_reduction": [1, 2]}, "noise_reduction"),
    ],
)
async def test_settings_that_would_be_echoed_at_length_are_refused(serve: Serve, changes: Any, param: str) -> None:
    async with serve() as running, greeted_client(running.ws) as client:
        await client.send("session.update", event_id="e", session={"audio": {"input": changes}})
        error = (await client.receive())["error"]
        assert (error["code"], error["event_id"]) == ("invalid_value", "e") and error["param"].endswith(param)


async def test_what_is_not_known_is_not_echoed(serve: Serve) -> None:
    async with serve() as running, greeted_client(running.ws) as client:
        shown = await client.update(
            noise_reduction={"type": "near_field", "junk": LONG[:20_000]},
            turn_detection={"type": "server_vad", "create_response": False, "junk": [LONG[:20_000]]},
        )
        assert len(json.dumps(shown)) < 1000
        assert shown["audio"]["input"]["noise_reduction"] is None
        assert shown["audio"]["input"]["turn_detection"]["create_response"] is False
        await client.send("input_audio_buffer.commit", event_id="x" * 513)
        error = (await client.receive())["error"]
        assert error["param"] == "event_id" and error["event_id"] is None


async def test_a_client_that_does_not_read_its_echoes_is_closed(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small messages whose answers are long: what waits is counted in bytes."""
    monkeypatch.setattr(connection, "CLOSE_GRACE_S", 0.2)
    limits = {"outbox_events": 100_000, "outbox_bytes": 500_000}
    async with serve(limits=limits) as running, greeted_client(running.ws, max_queue=1) as client:
        await client.update(transcription={"prompt": "p" * 16_000})
        client.socket.transport.pause_reading()  # type: ignore[attr-defined]
        (entry,) = running.gateway.sessions.entries.values()
        most = 0
        with pytest.raises((ConnectionClosed, TimeoutError)):
            async with asyncio.timeout(5):
                while True:
                    await client.send("session.update", session={})
                    await asyncio.sleep(0)
                    most = max(most, entry.live.outbox.bytes)
        assert 400_000 < most < 550_000
        async with asyncio.timeout(10):
            while not running.metric("closed_total", reason="slow_reader"):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
