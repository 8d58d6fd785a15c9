"""File descriptors run out: new connections are refused in time, and those who watch the server are still answered.

The system gives a new connection the lowest number that is free, and no number that reaches the limit. So a high number
says that all lower ones are taken. The highest numbers are a reserve, which no session and no upload ever takes: a
connection in it is answered if it asks how the server is, is refused otherwise, and is closed afterwards.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from realtime.errors import Refusal
from realtime.http.gateway import refused
from realtime.serving.websocket import PatientHttp

log = logging.getLogger("tickertape.server")

# A quarter of all descriptors is kept, and no more than this: for files that uploads wait in, links to engines, and
# connections that are about to be refused.
MOST_RESERVED = 128
RETRY_AFTER_S = 5
# The log says it again after so long.
SAY_AGAIN_S = 600.0
# Asked by those who watch the server, and answered from the reserve too.
WATCHED = frozenset({"/health", "/ready", "/capacity", "/metrics"})


def raise_limit() -> None:
    """Let this process, and those it starts, open as many files as the system lets it ask for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        log.warning("the limit on open files stays at %d: %s", soft, error)


class Descriptors:
    """The reserve of one server. `on_refused` is called for each connection that it refuses."""

    def __init__(self, on_refused: Callable[[], None]) -> None:
        self.on_refused = on_refused
        # Connections in the last half of the reserve that have not sent a request yet, the oldest first.
        self.silent: dict[SparingHttp, None] = {}
        self._say_again_at = 0.0

    def limit(self) -> int:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    def is_short(self, descriptor: int) -> bool:
        """Whether a connection with this number is in the reserve."""
        limit = self.limit()
        if limit == resource.RLIM_INFINITY or descriptor < limit - reserve_of(limit):
            return False
        self._say(descriptor, limit)
        return True

    def came(self, connection: SparingHttp, descriptor: int) -> None:
        """A connection in the reserve. In its last half few may wait without a word, and those who came first go: the
        next one must find a free number, or the system cuts it off before it can be answered."""
        limit = self.limit()
        if descriptor >= limit - reserve_of(limit) // 2:
            self.silent[connection] = None
            if len(self.silent) > reserve_of(limit) // 4:
                oldest = next(iter(self.silent))
                del self.silent[oldest]
                oldest.transport.abort()

    def _say(self, taken: int, limit: int) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._say_again_at:
            self._say_again_at = now + SAY_AGAIN_S
            log.warning(
                "file descriptors run out: %d of %d are taken, and new connections are refused; raise the limit "
                "(LimitNOFILE= of the systemd unit, ulimits of docker-compose.yml, or `ulimit -n`)",
                taken,
                limit,
            )


def reserve_of(limit: int) -> int:
    return min(MOST_RESERVED, limit // 4)


class SparingHttp(PatientHttp):
    """HTTP that does not let sessions and uploads have the last descriptors."""

    descriptors: Descriptors

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        number = transport.get_extra_info("socket").fileno()
        self._is_short = self.descriptors.is_short(number)
        if self._is_short:
            self.app = _FromReserve(self.app, self.descriptors.on_refused)
            self.descriptors.came(self, number)

    def connection_lost(self, exc: Exception | None) -> None:
        self.descriptors.silent.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_short and self.cycle is not None:
            self.descriptors.silent.pop(self, None)

    def _should_upgrade(self) -> bool:
        # A socket is refused like any other request.
        return not self._is_short and super()._should_upgrade()


def sparing_http(handshake_s: float, descriptors: Descriptors) -> type[SparingHttp]:
    """The HTTP protocol with this deadline and this reserve; uvicorn takes a class."""
    return type("SparingHttp", (SparingHttp,), {"handshake_s": handshake_s, "descriptors": descriptors})


class _FromReserve:
    """Answers those who watch the server, and refuses all others. Every answer closes its connection."""

    def __init__(self, app: ASGIApp, on_refused: Callable[[], None]) -> None:
        self._app = app
        self._on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), (b"connection", b"close")]}
            await send(message)

        app: Any = self._app
        if scope["path"] not in WATCHED:
            self._on_refused()
            text = "The server has no file descriptors left for another connection; try again."
            app = refused(
                scope["path"],
                Refusal(503, "server_busy", text, retry_after_s=RETRY_AFTER_S, kind="server_error"),
            )
        await app(scope, receive, send_last)
