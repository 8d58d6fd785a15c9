"""One client's socket: a reader and a writer around a session host. The shell moves bytes; the session decides.

The reader never sends and the writer never reads, so a client that does not read cannot stop its own audio. Policies:

- the reader takes the next message only when the session has room, so a fast sender is slowed by TCP;
- the writer's queue is the session's outbox (see there); when it overruns, the socket is closed with 1008, and cut if
  the client does not even read that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from realtime.dialects.base import AudioText, Dialect, GapRequest, Nothing, SessionFacts, event_id_of
from realtime.dialects.openai import BetaDialect, OpenAIDialect
from realtime.dialects.vllm import VllmDialect
from realtime.errors import ClientFault, CloseCode
from realtime.events import Clear, Commit, Configure, Hangup, Problem
from realtime.host import SessionHost
from realtime.intake import Intake
from realtime.metrics import Metrics
from realtime.wire import Json, decode_base64, decode_json

log = logging.getLogger("tickertape.connection")

AsgiMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
SendMessage = Callable[[AsgiMessage], Awaitable[None]]

# Messages longer than this are parsed off the event loop; audio is decoded in pieces of at most this size.
LARGE_MESSAGE = 256 * 1024
PIECE_BYTES = 64 * 1024
# How long a client that overran its outbox may take to read the close frame.
CLOSE_GRACE_S = 5.0


class Inbox:
    """Client messages -> core events. Knows the dialect and the audio format of the moment; survives a reconnect."""

    def __init__(self, host: SessionHost, facts: SessionFacts, metrics: Metrics) -> None:
        self._host = host
        self._facts = facts
        self._metrics = metrics
        self._intake = Intake(host.session.settings.format)
        self._dialect_fixed = False

    def close(self) -> None:
        self._intake.close()

    def reconnected(self) -> None:
        """A new socket begins with a whole sample: bytes of an unfinished one were lost with the old socket."""
        self._host.submit(self._intake.flush())
        self._intake.close()
        self._intake = Intake(self._host.session.settings.format)

    async def take(self, text: str | None, data: bytes | None) -> None:
        """Handle one message of the client; its mistakes are answered, never raised."""
        event_id = None
        try:
            if data is not None and self._host.session.settings.format.binary:
                await self._audio(data)
                return
            message = await self._parse(text if text is not None else data or b"")
            event_id = event_id_of(message)
            await self._handle(message)
        except ClientFault as fault:
            self._host.outbox.put(Problem(fault.code, fault.message, fault.param, fault.event_id or event_id))

    async def _parse(self, raw: str | bytes) -> Json:
        if len(raw) > LARGE_MESSAGE:
            return await asyncio.to_thread(decode_json, raw)
        return decode_json(raw)

    async def _handle(self, message: Json) -> None:
        session = self._host.session
        self._choose_dialect(message)
        request = self._host.dialect.read(message, session.settings)
        match request:
            case AudioText(data):
                large = len(data) > LARGE_MESSAGE
                await self._audio(await asyncio.to_thread(decode_base64, data) if large else decode_base64(data))
            case Configure():
                await self._configure(request)
            case GapRequest(samples):
                self._host.submit(self._intake.flush())
                self._host.submit(self._intake.gap(samples))
            case Commit() | Clear():
                # The resampler's last samples belong to what is committed or cleared.
                self._host.submit(self._intake.flush())
                self._host.submit(request)
            case Nothing():
                pass

    async def _configure(self, request: Configure) -> None:
        if request.settings.format != self._intake.format:
            old, self._intake = self._intake, Intake(request.settings.format)
            self._host.submit(old.flush())
            old.close()
        self._host.submit(request)

    async def _audio(self, data: bytes) -> None:
        view = memoryview(data)
        for start in range(0, len(data), PIECE_BYTES):
            piece = view[start : start + PIECE_BYTES]
            if self._intake.needs_thread:
                append = await asyncio.to_thread(self._intake.push, piece)
            else:
                append = self._intake.push(piece)
            self._metrics.audio_in.inc(append.source_ms / 1000)
            self._host.submit(append)
            await self._host.room()
            if start:
                await asyncio.sleep(0)

    def _choose_dialect(self, message: Json) -> None:
        """Clients do not say which dialect they speak; their first telling message does."""
        if self._dialect_fixed:
            return
        kind = message.get("type")
        dialect: Dialect | None = None
        if (kind == "session.update" and "session" not in message) or (
            kind == "input_audio_buffer.commit" and "final" in message
        ):
            dialect = VllmDialect(self._facts)
        elif kind == "transcription_session.update" and type(self._host.dialect) is OpenAIDialect:
            dialect = BetaDialect(self._facts)
        elif kind in ("session.update", "transcription_session.update"):
            self._dialect_fixed = True
        if dialect is not None:
            self._dialect_fixed = True
            self._host.dialect = dialect
            settings = dialect.start_settings(self._host.session.settings)
            if settings.format != self._intake.format:
                self._intake = Intake(settings.format)
            self._host.adopt(settings)


class Connection:
    """Runs one socket until either side has had enough."""

    def __init__(
        self, host: SessionHost, inbox: Inbox, receive: Receive, send: SendMessage, abort: Callable[[], None]
    ) -> None:
        self.host = host
        self.last_message_at = host.clock()
        self._inbox = inbox
        self._receive = receive
        self._send = send
        self._abort = abort
        self._writer: asyncio.Task[None] | None = None
        self._hangup: Hangup | None = None
        self._pace: Callable[[], Awaitable[None]] | None = None

    async def run(self, first_frames: list[str], pace: Callable[[], Awaitable[None]] | None = None) -> bool:
        """Serve the socket; True if the client left by itself, False if the server closed it."""
        self._pace = pace
        self.host.outbox.on_overrun = lambda: self.hang_up(Hangup(CloseCode.POLICY, "the client does not read"))
        left = False
        try:
            async with asyncio.TaskGroup() as group:
                self._writer = group.create_task(self._write(first_frames), name=f"writer {self.host.id}")
                reader = group.create_task(self._read(), name=f"reader {self.host.id}")
                await asyncio.wait((self._writer, reader), return_when=asyncio.FIRST_COMPLETED)
                left = reader.done() and not reader.cancelled()
                reader.cancel()
                self._writer.cancel()
        finally:
            self.host.outbox.on_overrun = None
        if self._hangup is not None and not left:
            await self._close(self._hangup)
        return left

    def hang_up(self, hangup: Hangup) -> None:
        """Close this socket now, ahead of what waits to be sent."""
        if self._hangup is None:
            self._hangup = hangup
            if self._writer is not None:
                self._writer.cancel()

    async def _read(self) -> None:
        while True:
            message = await self._receive()
            if message["type"] != "websocket.receive":
                return
            self.last_message_at = self.host.clock()
            await self._inbox.take(message.get("text"), message.get("bytes"))
            await self.host.room()
            if self._pace is not None:
                await self._pace()

    async def _write(self, first_frames: list[str]) -> None:
        for frame in first_frames:
            await self._send({"type": "websocket.send", "text": frame})
        while True:
            frames = await self.host.next_frames()
            if isinstance(frames, Hangup):
                self._hangup = frames
                return
            for frame in frames:
                await self._send({"type": "websocket.send", "text": frame})

    async def _close(self, hangup: Hangup) -> None:
        log.info("session %s: closed by the server with %d: %s", self.host.id, hangup.code, hangup.reason)
        closing = self._send({"type": "websocket.close", "code": int(hangup.code), "reason": hangup.reason})
        try:
            await asyncio.wait_for(closing, CLOSE_GRACE_S)
        except TimeoutError:
            self._abort()
