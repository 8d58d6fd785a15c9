"""WebRTC calls in the gateway: each call is a session whose audio and text pass through a process of its own.

The process (`realtime/webrtc/call_process.py`) has the network connection to the client. `CallLine` is the gateway's
socket to that process, with the interface of an ASGI WebSocket, so the same `Connection` serves calls and sockets, with
the same limits. `Calls` owns the calls of this gateway from their SDP offer to their end; the HTTP routes are in
`realtime/http/call_routes.py`. Phone calls from Twilio are not WebRTC: they come as WebSockets.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec
from ipaddress import IPv6Address, ip_address
from typing import Any

from audio.formats import MODEL_RATE
from realtime.config import Config
from realtime.dialects.base import encode_json
from realtime.dialects.openai import CallDialect
from realtime.errors import Refusal
from realtime.serving.connection import AsgiMessage
from realtime.serving.inbox import Inbox
from realtime.serving.live_session import LiveSession
from realtime.serving.media_processes import (
    ANSWER,
    AUDIO,
    CALL,
    CALL_PROGRAM,
    CLOSE,
    ENDED,
    EVENT,
    FAULT,
    FRAME,
    JOB,
    LOST,
    MAX_FRAME_BYTES,
    MESSAGE,
    SAMPLES,
    ForkServerClient,
)
from realtime.serving.metrics import Metrics
from realtime.serving.quota import Caller, places_of_one_key
from realtime.serving.registry import Sessions
from realtime.serving.session_factory import OpenSession
from realtime.serving.socket_extras import Part, SocketExtras
from realtime.session.events import Answered
from realtime.session.settings import Settings

log = logging.getLogger("tickertape.calls")

# Seconds for a process to answer an offer. The first call also waits until the library is loaded.
ANSWER_S = 30.0
# Seconds for a process to tell the client that the call has ended, before it is killed.
LEAVE_S = 3.0
RETRY_AFTER_S = 5
READ_BYTES = 64 * 1024
INSTALL = "pip install 'tickertape[webrtc]'"

_program = ForkServerClient(CALL_PROGRAM)


def is_installed() -> bool:
    """Whether the extra is installed. The library itself is loaded by the processes of calls only."""
    return find_spec("aiortc") is not None


class CallLine:
    """The socket to the process of a call, as a WebSocket of ASGI. Binary messages are frames of the process."""

    def __init__(self, line: socket.socket, number: int) -> None:
        self.extras = SocketExtras(abort=self.kill, nothing_waits=lambda: not self._has_frame())
        self.dialect: CallDialect | None = None
        self._line = line
        self._number = number
        self._loop = asyncio.get_running_loop()
        self._bytes = bytearray()
        self._send_lock = asyncio.Lock()
        # A frame was sent only in part, so no other can follow it.
        self._is_broken = False

    async def begin(self, job: Mapping[str, Any]) -> str:
        """Have the process answer an offer; returns the answer. Raises Refusal."""
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._send_frame(JOB, json.dumps(job).encode())
                kind, content = await self._read_frame()
        except TimeoutError:
            raise _failed("The call could not be answered in time; try again.") from None
        except (OSError, EOFError):
            raise _failed("The process of the call has ended; try again.") from None
        if kind == FAULT:
            fault = json.loads(content)
            raise Refusal(**fault, retry_after_s=RETRY_AFTER_S if fault["status"] == 503 else None)
        assert kind == ANSWER
        return content.decode()

    async def receive(self) -> AsgiMessage:
        try:
            kind, content = await self._read_frame()
        except (OSError, EOFError):
            log.info("a WebRTC call ended: its process stopped without giving a reason")
            return {"type": "websocket.disconnect", "code": 1006}
        if kind == MESSAGE:
            return {"type": "websocket.receive", "text": content.decode()}
        if kind == ENDED:
            log.info("a WebRTC call ended: %s", content.decode())
            return {"type": "websocket.disconnect", "code": 1000}
        return {"type": "websocket.receive", "bytes": kind + content}

    async def send(self, message: AsgiMessage) -> None:
        """Raises OSError if the process has ended."""
        if message["type"] == "websocket.send":
            await self._send_frame(EVENT, message["text"].encode())
        elif message["type"] == "websocket.close":
            if self.dialect is not None:
                ended = self.dialect.ended(message["code"], message["reason"])
                await self._send_frame(EVENT, encode_json(ended).encode())
            await self.hang_up()

    async def hang_up(self) -> None:
        """Have the process end the call when it has sent the client all events so far."""
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await self._send_frame(CLOSE, b"")

    async def wait_for_end(self) -> None:
        """Wait until the process has ended, but not for long."""
        with suppress(OSError, EOFError, TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                while True:
                    await self._read_frame()

    def kill(self) -> None:
        """End the process at once. May be called twice."""
        _program.end(self._number)
        # Wakes a reader, which a closed socket would not.
        with suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the process and close the socket. No task may be reading or writing then."""
        self.kill()
        self._line.close()

    async def _send_frame(self, kind: bytes, content: bytes) -> None:
        async with self._send_lock:
            if self._is_broken:
                raise OSError("a frame was sent in part")
            self._is_broken = True
            await self._loop.sock_sendall(self._line, FRAME.pack(kind, len(content)) + content)
            self._is_broken = False

    async def _read_frame(self) -> tuple[bytes, bytes]:
        """The next frame. Raises EOFError and OSError."""
        while not self._has_frame():
            data = await self._loop.sock_recv(self._line, READ_BYTES)
            if not data:
                raise EOFError
            self._bytes += data
        kind, length = FRAME.unpack_from(self._bytes)
        content = bytes(self._bytes[FRAME.size : FRAME.size + length])
        del self._bytes[: FRAME.size + length]
        return kind, content

    def _has_frame(self) -> bool:
        if len(self._bytes) < FRAME.size:
            return False
        length: int = FRAME.unpack_from(self._bytes)[1]
        if length > MAX_FRAME_BYTES:
            raise EOFError
        return len(self._bytes) >= FRAME.size + length


class CallInbox:
    """Passes the messages of a call's process to the session: texts of the client, audio, lost audio, silence."""

    def __init__(self, inbox: Inbox, live: LiveSession, dialect: CallDialect) -> None:
        self._inbox = inbox
        self._live = live
        self._dialect = dialect

    def submit_pending(self) -> None:
        self._inbox.submit_pending()

    def handle_now(self, text: str) -> bool:
        """Always False: a call has no appends."""
        return False

    async def handle(
        self, text: str | None, data: bytes | None, has_left: Callable[[], bool], *, more: bool = False
    ) -> bool:
        """Handle one message; returns whether it was a mistake of the client, as `Inbox.handle` does."""
        if data is None:
            return await self._inbox.handle(text, None, has_left, more=more)
        if data[:1] == AUDIO:
            return await self._inbox.handle(None, data[1:], has_left, more=more)
        (samples,) = SAMPLES.unpack_from(data, 1)
        if data[:1] == LOST:
            start = self._live.session.source_ms
            self._live.send_event(Answered(self._dialect.gap(start, start + samples * 1000 / MODEL_RATE)))
        self._inbox.miss(samples)
        return False

    async def handle_part(self, part: Part, has_left: Callable[[], bool]) -> bool:
        return await self._inbox.handle_part(part, has_left)

    async def end(self, has_left: Callable[[], bool]) -> None:
        await self._inbox.end(has_left)


class Call:
    """One call, from its offer to its end."""

    def __init__(self, caller: Caller) -> None:
        self.id = f"call_{secrets.token_hex(12)}"
        self.caller = caller
        # The SDP answer; an exception if the offer is refused.
        self.answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.line: CallLine | None = None
        self.task: asyncio.Task[None] | None = None


# Serves the session of a call until it ends.
Serve = Callable[[OpenSession, CallInbox, CallLine], Awaitable[None]]


class Calls:
    """All calls of this gateway. A call counts as a session from its offer on, also while it is not connected."""

    def __init__(self, sessions: Sessions, config: Config, metrics: Metrics, serve: Serve) -> None:
        self._sessions = sessions
        self._config = config
        self._metrics = metrics
        self._serve = serve
        self.by_id: dict[str, Call] = {}

    async def begin(
        self, caller: Caller, settings: Settings, offer: str, server_address: str | None
    ) -> tuple[str, str]:
        """Answer an offer; returns the id of the call and the answer. `server_address` is the address of this server
        to which the request was sent. Raises Refusal."""
        job = self._job(offer, server_address)
        self._check_room(caller)
        call = Call(caller)
        self.by_id[call.id] = call
        call.task = asyncio.create_task(self._run(call, settings, job), name=f"call {call.id}")
        try:
            return call.id, await asyncio.shield(call.answer)
        except asyncio.CancelledError:
            call.task.cancel()
            raise

    def _check_room(self, caller: Caller) -> None:
        """Raises Refusal if the server, or this caller, has as many calls as it may have."""
        limit = self._config.webrtc.calls
        share = places_of_one_key(limit, len(self._config.auth.keys))
        if len(self.by_id) >= limit:
            text = f"The server has {limit} calls, and takes no more (webrtc.calls)."
        elif sum(call.caller.name == caller.name for call in self.by_id.values()) >= share:
            text = f"One of several keys may have {share} calls, half of webrtc.calls."
        else:
            return
        self._metrics.refused.labels("calls").inc()
        raise Refusal(503, "too_many_calls", text, retry_after_s=5, kind="server_error")

    def find(self, call_id: str, caller: Caller) -> Call:
        """The call of this caller. Raises a 404 Refusal, also for a call of another caller."""
        call = self.by_id.get(call_id)
        if call is None or call.caller.name != caller.name:
            text = "This gateway process has no such call. A call also ends when the client closes its connection."
            raise Refusal(404, "call_not_found", text, param="id")
        return call

    async def end(self, call: Call) -> None:
        """End a call after its last events were sent; its process is killed after `LEAVE_S`."""
        if call.line is not None:
            await call.line.hang_up()
            asyncio.get_running_loop().call_later(LEAVE_S, call.line.kill)

    async def close(self) -> None:
        """End all calls at once: the server stops."""
        tasks = [call.task for call in self.by_id.values() if call.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _job(self, offer: str, server_address: str | None) -> dict[str, Any]:
        webrtc = self._config.webrtc
        if not webrtc.calls:
            raise Refusal(403, "calls_off", "This server takes no calls; its operator can allow them (webrtc.calls).")
        if not is_installed():
            raise Refusal(
                501, "webrtc_not_installed", f"Calls need an extra of this server: {INSTALL}", kind="server_error"
            )
        bind = _address(server_address)
        if webrtc.addresses:
            bind = "::" if ":" in webrtc.addresses[0] else "0.0.0.0"
        if bind is None:
            text = "This server does not know its address for calls; its operator must set webrtc.addresses."
            raise Refusal(503, "no_address", text, retry_after_s=60, kind="server_error")
        return {
            "offer": offer,
            "bind": bind,
            "addresses": list(webrtc.addresses),
            "ports": webrtc.port_range,
            "connect_s": webrtc.connect_s,
            "message_bytes": self._config.limits.control_bytes,
        }

    async def _run(self, call: Call, settings: Settings, job: Mapping[str, Any]) -> None:
        try:
            async with self._sessions.open(call.caller, settings, [CallDialect]) as (entry,):
                async with _process() as line:
                    answer = await line.begin(job)
                    if self._sessions.draining:
                        raise Refusal(503, "server_shutting_down", "The server is restarting.", retry_after_s=5)
                    assert isinstance(entry.live.dialect, CallDialect)
                    call.line, line.dialect = line, entry.live.dialect
                    log.info("session %s serves WebRTC call %s", entry.live.id, call.id)
                    call.answer.set_result(answer)
                    await self._serve(entry, CallInbox(entry.inbox, entry.live, entry.live.dialect), line)
                    await line.wait_for_end()
        except Refusal as refusal:
            if not call.answer.done():
                call.answer.set_exception(refusal)
        except Exception:
            log.exception("WebRTC call %s failed", call.id)
        finally:
            self.by_id.pop(call.id, None)
            if not call.answer.done():
                call.answer.set_exception(_failed("The call has ended before it was answered."))
            # Marks the exception as seen: the request that waited for the answer may have been cancelled.
            call.answer.exception()


@asynccontextmanager
async def _process() -> AsyncIterator[CallLine]:
    """The process of a call; it ends with the block. Raises Refusal."""
    try:
        line = CallLine(*await _program.connect(CALL))
    except OSError as error:
        raise _failed(f"No process can be started for the call ({error.strerror}); try again.") from error
    try:
        yield line
    finally:
        line.close()


def _failed(text: str) -> Refusal:
    return Refusal(503, "call_failed", text, retry_after_s=RETRY_AFTER_S, kind="server_error")


def _address(server_address: str | None) -> str | None:
    """An address that can be told to clients; None if it is none."""
    try:
        address = ip_address(server_address or "")
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address)
