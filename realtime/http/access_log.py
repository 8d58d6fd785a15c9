"""The access log: middleware that logs every request and every socket when it ends (`server.access_log`).

The query and the headers are not logged, because they may contain keys and tokens. Bytes are counted for requests only,
because the events of a socket do not pass through the middleware. Requests that are cut off before they are parsed do
not reach the application and have no line, and neither have upgrades that uvicorn's protocol class refuses.
"""

from __future__ import annotations

import logging
import time
from urllib.parse import quote, quote_from_bytes

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.logs import ACCESS_LOG
from realtime.config import ServerConfig

access_log = logging.getLogger(ACCESS_LOG)

# Characters of a path, and of the address of a client, that are logged.
MAX_PATH_CHARACTERS, MAX_CLIENT_CHARACTERS = 200, 64
# Characters that stay as they are in a path and in an address; all others are percent-encoded, so that a client cannot
# forge a field or a line.
PATH_CHARACTERS, CLIENT_CHARACTERS = "/%:@!$&'()*+,;=", ":%[]"


class AccessLog:
    """Middleware that logs requests and sockets while `server.access_log` is set."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or not self._config.access_log:
            await self._app(scope, receive, send)
            return
        entry = _Entry(scope)

        async def send_counted(message: Message) -> None:
            entry.sent(message)
            await send(message)

        async def receive_seen() -> Message:
            message = await receive()
            entry.received(message)
            return message

        try:
            await self._app(scope, receive_seen if scope["type"] == "websocket" else receive, send_counted)
        finally:
            entry.write()


class _Entry:
    """One request or socket. `status` is 0 while nothing is answered; `code` is the close code of a socket."""

    def __init__(self, scope: Scope) -> None:
        self._began = time.monotonic()
        self._is_socket = scope["type"] == "websocket"
        self._method = "SOCKET" if self._is_socket else str(scope["method"])
        # As it was sent: decoded it could contain spaces and line breaks.
        raw: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
        self._path = quote_from_bytes(raw.partition(b"?")[0], PATH_CHARACTERS)[:MAX_PATH_CHARACTERS]
        self._client = quote(str((scope.get("client") or ("-",))[0]), CLIENT_CHARACTERS)[:MAX_CLIENT_CHARACTERS]
        self._status = 0
        self._code = 0
        self._bytes = 0

    def sent(self, message: Message) -> None:
        kind = message["type"]
        if kind in ("http.response.start", "websocket.http.response.start"):
            self._status = int(message["status"])
        elif kind in ("http.response.body", "websocket.http.response.body"):
            self._bytes += len(message.get("body", b""))
        elif kind == "websocket.accept":
            self._status = 101
        elif kind == "websocket.close":
            self._code = self._code or int(message.get("code", 1000))

    def received(self, message: Message) -> None:
        if message["type"] == "websocket.disconnect":
            self._code = self._code or int(message.get("code") or 1006)

    def write(self) -> None:
        seconds = round(time.monotonic() - self._began, 3)
        fields = {"method": self._method, "path": self._path, "status": self._status, "seconds": seconds}
        fields |= {"client": self._client}
        fields |= {"close_code": self._code} if self._is_socket else {"bytes": self._bytes}
        end = f"closed {self._code}" if self._is_socket else f"{self._bytes} bytes"
        access_log.info(
            "%s %s %d %s %.3f s %s",
            *(self._method, self._path, self._status, end, seconds, self._client),
            extra={"fields": fields},
        )
