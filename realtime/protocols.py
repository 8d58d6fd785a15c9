"""uvicorn's protocols with what a public realtime server needs on top: deadlines for slow handshakes, a liveness check
that spares clients which send but do not read, and a way to cut a socket whose peer reads nothing at all.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

ABORT_EXTENSION = "tickertape.abort"


class RealtimeWebSocket(WebSocketsSansIOProtocol):
    """A WebSocket that counts any byte from its peer as a sign of life, not only pongs.

    A client that only sends stops reading after a few messages and then answers no ping; it is alive all the same.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._heard_at = 0.0

    def data_received(self, data: bytes) -> None:
        self._heard_at = self.loop.time()
        super().data_received(data)

    def keepalive_timeout(self) -> None:
        silent_for = self.loop.time() - self._heard_at
        timeout = self.ping_timeout
        if timeout is not None and silent_for < timeout or self.read_paused:
            # Reading is paused while the session is busy: silence is then our own doing.
            self.pong_timer = None
            self.pending_ping_payload = None
            self.schedule_ping()
            return
        super().keepalive_timeout()

    async def run_asgi(self) -> None:
        extensions: dict[str, Any] = self.scope["extensions"]
        extensions[ABORT_EXTENSION] = self.transport.abort
        await super().run_asgi()


class PatientHttp(H11Protocol):
    """HTTP that gives a new connection only so long to send its request head."""

    handshake_s = 10.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._deadline: asyncio.TimerHandle | None = self.loop.call_later(self.handshake_s, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        self._in_time()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None:
            self._in_time()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._in_time()
        super().handle_websocket_upgrade(event)

    def _in_time(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self._deadline = None
        self.transport.abort()


def patient_http(handshake_s: float) -> type[PatientHttp]:
    """The HTTP protocol with this deadline; uvicorn takes a class."""
    return type("PatientHttp", (PatientHttp,), {"handshake_s": handshake_s})
