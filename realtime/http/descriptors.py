"""Keeps a reserve of file descriptors, so that a server with too many connections still answers health checks.

`DescriptorAwareHttp` is the HTTP protocol class that `realtime/app.py` gives to uvicorn. A new connection gets the
lowest free descriptor number below the limit, so a high number means that nearly all are in use. A connection whose
number is in the reserve gets an answer if it asks for health, readiness, capacity or metrics; any other request is
refused, and the connection is closed.

With TLS, connections are counted before their handshake: the server listens without TLS, and `TlsHandshake` makes the
handshake on each connection, with a deadline.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import ssl
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from realtime.errors import Refusal
from realtime.http.websocket_routes import refusal_response
from realtime.serving.uvicorn_protocols import HttpWithDeadlines

log = logging.getLogger("tickertape.server")

# The reserve is a quarter of all descriptors and at most this many: for files of uploads, links to engines, and
# connections that are about to be refused.
MAX_RESERVED = 128
RETRY_AFTER_S = 5
# Seconds before the warning is logged again.
WARN_INTERVAL_S = 600.0
# Paths for monitoring, which are answered on connections in the reserve too.
MONITORING_PATHS = frozenset({"/health", "/ready", "/capacity", "/metrics"})


class Descriptors:
    """The reserve of one server. `on_refused` is called for each connection that it refuses."""

    def __init__(self, on_refused: Callable[[], None]) -> None:
        self.on_refused = on_refused
        # Connections in the last half of the reserve that have not sent a request yet, the oldest first.
        self.silent: dict[DescriptorAwareHttp | TlsHandshake, None] = {}
        self._warn_again_at = 0.0

    def limit(self) -> int:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    def is_short(self, descriptor: int) -> bool:
        """Whether this descriptor number is in the reserve."""
        limit = self.limit()
        if limit == resource.RLIM_INFINITY or descriptor < limit - reserve_of(limit):
            return False
        self._warn(descriptor, limit)
        return True

    def on_connection(self, connection: DescriptorAwareHttp | TlsHandshake, descriptor: int) -> None:
        """Register a new connection in the reserve. If too many in its upper half have sent no request, the oldest is
        aborted: the next connection must get a descriptor, or the system drops it before it can be answered."""
        limit = self.limit()
        if descriptor >= limit - reserve_of(limit) // 2:
            self.silent[connection] = None
            if len(self.silent) > reserve_of(limit) // 4:
                oldest = next(iter(self.silent))
                del self.silent[oldest]
                oldest.transport.abort()

    def _warn(self, taken: int, limit: int) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._warn_again_at:
            self._warn_again_at = now + WARN_INTERVAL_S
            log.warning(
                "file descriptors run out: %d of %d are in use, and new connections are refused; raise the limit "
                "(LimitNOFILE= of the systemd unit, ulimits of docker-compose.yml, or `ulimit -n`)",
                taken,
                limit,
            )


def reserve_of(limit: int) -> int:
    return min(MAX_RESERVED, limit // 4)


class DescriptorAwareHttp(HttpWithDeadlines):
    """HTTP protocol that keeps the reserve of descriptors free of sessions and uploads."""

    descriptors: Descriptors

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if self.config.ssl is not None and transport.get_extra_info("sslcontext") is None:
            TlsHandshake(self, transport).begin(self.config.ssl)
            return
        super().connection_made(transport)
        number = transport.get_extra_info("socket").fileno()
        self._is_short = self.descriptors.is_short(number)
        if self._is_short:
            self.app = _FromReserve(self.app, self.descriptors.on_refused)
            self.descriptors.on_connection(self, number)

    def connection_lost(self, exc: Exception | None) -> None:
        self.descriptors.silent.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_short and self.cycle is not None:
            self.descriptors.silent.pop(self, None)

    def _should_upgrade(self) -> bool:
        # In the reserve an upgrade is treated as a plain request, and refused.
        return not self._is_short and super()._should_upgrade()


class TlsHandshake(asyncio.Protocol):
    """A connection until its TLS handshake is complete; then `http` gets it. A client that does not complete it within
    `handshake_s` is cut off, and so is the oldest one when descriptors run out."""

    def __init__(self, http: DescriptorAwareHttp, transport: asyncio.Transport) -> None:
        self.transport = transport
        self._http = http
        # What the client sent directly after the handshake, before `http` has the connection; at most one read.
        self._early = b""
        self._is_lost = False

    def begin(self, context: ssl.SSLContext) -> None:
        http = self._http
        # uvicorn calls `shutdown` of its connections when the server stops.
        http.connections.add(self)  # type: ignore[arg-type]
        number = self.transport.get_extra_info("socket").fileno()
        if http.descriptors.is_short(number):
            http.descriptors.on_connection(self, number)
        handshake = http.loop.start_tls(
            self.transport, self, context, server_side=True, ssl_handshake_timeout=http.handshake_s
        )
        # The first step of `start_tls` gives the transport to the TLS protocol, and then waits for one future. It is
        # taken here and not in a task: uvloop begins to read after this method, and the bytes would come to us.
        waiter = handshake.send(None)
        waiter.add_done_callback(lambda _: self._finish(handshake))

    def shutdown(self) -> None:
        self.transport.abort()

    def _finish(self, handshake: Coroutine[Any, Any, asyncio.Transport | None]) -> None:
        http = self._http
        http.connections.discard(self)
        http.descriptors.silent.pop(self, None)
        try:
            handshake.send(None)
        except StopIteration as finished:
            encrypted: asyncio.Transport | None = finished.value
        except OSError:
            # The client left, was too slow, or does not speak TLS.
            self.transport.abort()
            return
        # uvloop reports a connection that was lost in the handshake like one that is complete.
        if encrypted is None or self._is_lost or self.transport.is_closing():
            return
        encrypted.set_protocol(http)
        http.connection_made(encrypted)
        if self._early:
            http.data_received(self._early)

    def data_received(self, data: bytes) -> None:
        self._early += data

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True


def http_with_reserve(handshake_s: float, descriptors: Descriptors) -> type[DescriptorAwareHttp]:
    """The HTTP protocol class for uvicorn, with this deadline and this reserve."""
    return type("DescriptorAwareHttp", (DescriptorAwareHttp,), {"handshake_s": handshake_s, "descriptors": descriptors})


class _FromReserve:
    """ASGI wrapper for connections in the reserve: answers monitoring paths and refuses others. Each answer closes the
    connection."""

    def __init__(self, app: ASGIApp, on_refused: Callable[[], None]) -> None:
        self._app = app
        self._on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), (b"connection", b"close")]}
            await send(message)

        app: Any = self._app
        if scope["path"] not in MONITORING_PATHS:
            self._on_refused()
            text = "The server has no file descriptors left for another connection; try again."
            app = refusal_response(
                scope["path"],
                Refusal(503, "server_busy", text, retry_after_s=RETRY_AFTER_S, kind="server_error"),
            )
        await app(scope, receive, send_last)
