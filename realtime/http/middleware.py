"""ASGI middleware around all routes: bounds on requests, the access log, and the rules for browsers (CORS, `Origin`,
`Host`).

`routes.py` puts all of them around the application; none keeps state between requests. `RequestGuard` refuses requests
with too many query parameters, and `Cors` answers for the origins that are allowed.

`AccessLog` (`server.access_log`) logs every request and every socket when it ends. The query and the headers are not
logged, because they may contain keys and tokens. Bytes are counted for requests only, because the events of a socket do
not pass through the middleware. Requests that are cut off before they are parsed do not reach the application and have
no line, and neither have upgrades that uvicorn's protocol class refuses.

`BrowserRules` protect a server without keys from other websites, whose pages can make a browser send requests to any
address that it reaches. `Origin` names the page's website: origins other than the server's own are refused unless they
are listed (`server.allowed_origins`). `Host` is the name in the request's URL: a website can make its own name resolve
to this machine, and the browser then treats the server as part of that website (DNS rebinding). Programs other than
browsers send no `Origin`, and a name or address of this machine as `Host`. With keys neither check is needed, because a
website does not know a key: then all origins are allowed, unless some are listed.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from ipaddress import ip_address
from urllib.parse import quote, quote_from_bytes

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from engine.logs import ACCESS_LOG
from realtime.config import ServerConfig, is_loopback
from realtime.errors import Refusal
from realtime.http.websocket_routes import refusal_response
from realtime.serving.metrics import Metrics

log = logging.getLogger(ACCESS_LOG)

# Characters of a path, and of the address of a client, that are logged.
MOST_PATH, MOST_CLIENT = 200, 64
# Characters that stay as they are in a path and in an address; all others are percent-encoded, so that a client cannot
# forge a field or a line.
PATH_CHARACTERS, CLIENT_CHARACTERS = "/%:@!$&'()*+,;=", ":%[]"
# Enough for all keywords that a stream may have, and all other parameters.
MAX_QUERY_PARAMETERS = 600
DEFAULT_PORTS = {"http": "80", "ws": "80", "https": "443", "wss": "443"}
ANY = "*"


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
        self._path = quote_from_bytes(raw.partition(b"?")[0], PATH_CHARACTERS)[:MOST_PATH]
        self._client = quote(str((scope.get("client") or ("-",))[0]), CLIENT_CHARACTERS)[:MOST_CLIENT]
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
        log.info(
            "%s %s %d %s %.3f s %s",
            *(self._method, self._path, self._status, end, seconds, self._client),
            extra={"fields": fields},
        )


class BrowserRules:
    """The rules. `asks_for_keys` is called for each request, because keys can change while the server runs."""

    def __init__(self, server: ServerConfig, asks_for_keys: Callable[[], bool]) -> None:
        self._origins = frozenset(origin.lower() for origin in server.allowed_origins)
        self._hosts = frozenset(_name(host) for host in server.allowed_hosts)
        self._asks_for_keys = asks_for_keys
        # Whether other machines can reach the server; they use its address or its name.
        self._is_reachable = not is_loopback(server.host)
        own = socket.gethostname().lower()
        self._own_names = {server.host.lower(), own, f"{own}.local"} if self._is_reachable else set()

    def check(self, headers: Headers) -> None:
        """Raise a 403 Refusal, with the header's name as `param`, if the request is not allowed. The text contains
        nothing from the request."""
        host, origins = headers.get("host"), headers.getlist("origin")
        if host is not None and not self._asks_for_keys() and not self._is_ours(_name(host)):
            text = (
                "A server without keys can be reached only by names and addresses of its own machine; its operator can "
                "add this name to server.allowed_hosts."
            )
            raise Refusal(403, "host_not_allowed", text, param="host")
        if origins and not self.any_page() and not (len(origins) == 1 and self._is_allowed(origins[0], host or "")):
            text = (
                "Pages of other websites may not use this server; its operator can add this page's origin to "
                "server.allowed_origins."
            )
            raise Refusal(403, "origin_not_allowed", text, param="origin")

    @property
    def listed(self) -> list[str]:
        return sorted(self._origins)

    def any_page(self) -> bool:
        """Whether pages of every origin are allowed."""
        return ANY in self._origins or (self._asks_for_keys() and not self._origins)

    def _is_allowed(self, origin: str, host: str) -> bool:
        scheme, _, place = origin.lower().partition("://")
        port = DEFAULT_PORTS.get(scheme)
        # The scheme is not compared, because a proxy that terminates TLS changes it.
        same = port is not None and (_name(place), _port(place) or port) == (_name(host), _port(host) or port)
        return same or origin.lower() in self._origins

    def _is_ours(self, name: str) -> bool:
        if name in self._hosts or ANY in self._hosts or name in self._own_names:
            return True
        # An IP address is no DNS name of a website, and names below `localhost` always mean this machine.
        return is_loopback(name) or name.endswith(".localhost") or (self._is_reachable and _is_address(name))


class Cors:
    """CORS headers by the rules of the moment, which change with the keys."""

    def __init__(self, app: ASGIApp, rules: BrowserRules) -> None:
        self._rules = rules
        self._for_any = self._cors(app, [ANY])
        self._for_listed = self._cors(app, rules.listed)

    @staticmethod
    def _cors(app: ASGIApp, origins: list[str]) -> CORSMiddleware:
        # The id of a WebRTC call is in `Location`.
        return CORSMiddleware(app, origins, allow_methods=[ANY], allow_headers=[ANY], expose_headers=["Location"])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        cors = self._for_any if self._rules.any_page() else self._for_listed
        await cors(scope, receive, send)


class RequestGuard:
    """Middleware that refuses requests and sockets before any route: by the rules for browsers, and if the query has
    more parameters than any request needs."""

    def __init__(self, app: ASGIApp, rules: BrowserRules, metrics: Metrics) -> None:
        self._app = app
        self._rules = rules
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            try:
                self._rules.check(Headers(scope=scope))
                _check_query(scope["query_string"])
            except Refusal as refusal:
                self._metrics.refused.labels(refusal.param).inc()
                response = refusal_response(scope["path"], refusal)
                if scope["type"] == "websocket":
                    await WebSocket(scope, receive, send).send_denial_response(response)
                else:
                    await response(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _check_query(query: bytes) -> None:
    """Raise Refusal for a query that takes long to parse."""
    if query.count(b"&") >= MAX_QUERY_PARAMETERS:
        text = f"The query has more than {MAX_QUERY_PARAMETERS} parameters."
        raise Refusal(400, "invalid_query_parameter", text, param="query")


def _name(place: str) -> str:
    """The name or address of `name:port`, `[address]:port` or a name alone."""
    if place.startswith("["):
        address, _, rest = place[1:].partition("]")
        return address.lower() if rest[:1] in ("", ":") else place.lower()
    name = place if place.count(":") > 1 else place.partition(":")[0]
    return name.removesuffix(".").lower()


def _port(place: str) -> str:
    return place.rpartition("]")[2].partition(":")[2]


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
