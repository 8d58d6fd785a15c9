"""A plain WebSocket client for tests that specify exact messages."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

from tests.e2e.event_checks import check_event

COMPLETED = "conversation.item.input_audio_transcription.completed"
DELTA = "conversation.item.input_audio_transcription.delta"


class RawClient:
    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    async def send(self, kind: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def append(self, audio: bytes, **fields: Any) -> None:
        await self.send("input_audio_buffer.append", audio=base64.b64encode(audio).decode(), **fields)

    async def update(self, **audio_input: Any) -> dict[str, Any]:
        """A GA session.update of `audio.input`; returns the session that came back."""
        include = audio_input.pop("include", None)
        session: dict[str, Any] = {"type": "transcription", "audio": {"input": audio_input}}
        if include is not None:
            session["include"] = include
        await self.send("session.update", session=session)
        return (await self.until("session.updated"))[-1]["session"]

    async def receive(self) -> dict[str, Any]:
        async with asyncio.timeout(10):
            frame = await self.socket.recv()
        assert isinstance(frame, str), "events must come in text frames"
        if self.socket.request is not None:
            check_event(self.socket.request.path, frame)
        return json.loads(frame)

    async def until(self, kind: str, count: int = 1) -> list[dict[str, Any]]:
        """Events up to and including the `count`-th of this type."""
        events: list[dict[str, Any]] = []
        while count:
            events.append(await self.receive())
            count -= events[-1]["type"] == kind
        return events


@asynccontextmanager
async def raw_client(url: str, **options: Any) -> AsyncIterator[RawClient]:
    async with connect(url, **{"compression": None, **options}) as socket:
        yield RawClient(socket)


@asynccontextmanager
async def greeted_client(url: str, **options: Any) -> AsyncIterator[RawClient]:
    """A client whose session.created has been taken off the wire."""
    async with raw_client(url, **options) as client:
        assert (await client.receive())["type"] == "session.created"
        yield client
