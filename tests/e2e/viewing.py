"""Viewers of published sessions for tests: over server-sent events and over the socket, with one way to read both."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

from websockets.asyncio.client import ClientConnection, connect

from tests.e2e.event_checks import check_event
from tests.e2e.raw_client import RawClient
from tests.realtime.gateway_doubles import silence, tone

PATIENCE_S = 60.0


class Viewing(Protocol):
    async def event(self) -> dict[str, Any]: ...


class SocketViewer:
    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    async def event(self) -> dict[str, Any]:
        async with asyncio.timeout(PATIENCE_S):
            frame = await self.socket.recv()
        check_event("/v1/sessions/", frame)
        return dict(json.loads(frame))


class StreamViewer:
    """Reads server-sent events with nothing but a socket, so that every byte of the framing counts."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.status = 0
        self.head = ""
        self._text = b""
        self._is_chunked = False

    async def begin(self, port: int, path: str, version: str = "1.1", headers: str = "", method: str = "GET") -> None:
        self.writer.write(f"{method} {path} HTTP/{version}\r\nHost: 127.0.0.1:{port}\r\n{headers}\r\n".encode())
        async with asyncio.timeout(PATIENCE_S):
            self.head = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
        self.status = int(self.head.split()[1])
        self._is_chunked = "transfer-encoding: chunked" in self.head

    async def _more(self) -> bytes:
        """The next bytes of the body; empty at its end."""
        async with asyncio.timeout(PATIENCE_S):
            if not self._is_chunked:
                return await self.reader.read(65536)
            size = int((await self.reader.readuntil(b"\r\n")).strip(), 16)
            data = await self.reader.readexactly(size + 2)
        assert data.endswith(b"\r\n")
        return data[:-2]

    async def event(self) -> dict[str, Any]:
        while True:
            while b"\n\n" not in self._text:
                more = await self._more()
                if not more:
                    raise EOFError
                self._text += more
            block, _, self._text = self._text.partition(b"\n\n")
            fields = dict(line.split(": ", 1) for line in block.decode().splitlines() if not line.startswith(":"))
            if fields:
                check_event("/v1/sessions/", fields["data"])
                event = dict(json.loads(fields["data"]))
                assert event["type"] == fields["event"]
                return event


def path_of(name: str, token: str = "") -> str:
    return f"/v1/sessions/{name}/events" + (f"?token={token}" if token else "")


@asynccontextmanager
async def socket_viewer(port: int, name: str, token: str = "", **options: Any) -> AsyncIterator[SocketViewer]:
    async with connect(f"ws://127.0.0.1:{port}{path_of(name, token)}", proxy=None, **options) as socket:
        yield SocketViewer(socket)


@asynccontextmanager
async def stream_viewer(
    port: int, name: str, token: str = "", version: str = "1.1", headers: str = "", method: str = "GET"
) -> AsyncIterator[StreamViewer]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    viewer = StreamViewer(reader, writer)
    try:
        await viewer.begin(port, path_of(name, token), version, headers, method)
        yield viewer
    finally:
        writer.transport.abort()


async def until(viewer: Viewing, kind: str, **fields: Any) -> list[dict[str, Any]]:
    """Events up to and including the first of this type with these fields."""
    events: list[dict[str, Any]] = []
    while True:
        events.append(await viewer.event())
        last = events[-1]
        if last["type"] == kind and all(last.get(name) == value for name, value in fields.items()):
            return events


async def publish(client: RawClient, name: str | None) -> dict[str, Any]:
    """Publish a session; the answer, which may be an error."""
    await client.send("session.update", session={"type": "transcription", "publish": name})
    while True:
        event = await client.receive()
        if event["type"] in ("session.updated", "error"):
            return event


async def say(client: RawClient, seconds: float = 1.3) -> None:
    """A turn with a word for each 0.4 s."""
    await client.append(tone(seconds) + silence(0.9))
