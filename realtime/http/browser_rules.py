"""The rules for browsers (CORS, `Origin`, `Host`), and the middleware that refuses requests by them.

`BrowserRules` protect a server without keys from other websites, whose pages can make a browser send requests to any
address that it reaches. `Origin` names the page's website: origins other than the server's own are refused unless they
are listed (`server.allowed_origins`). `Host` is the name in the request's URL: a website can make its own name resolve
to this machine, and the browser then treats the server as part of that website (DNS rebinding). Programs other than
browsers send no `Origin`, and a name or address of this machine as `Host`. With keys neither check is needed, because a
website does not know a key: then all origins are allowed, unless some are listed.

`RequestGuard` applies the rules, and also refuses requests with too many query parameters. `Cors` adds the CORS headers
for the origins that are allowed.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from realtime.config import ServerConfig, is_loopback
from realtime.errors import Refusal
from realtime.http.route_helpers import refusal_response
from realtime.serving.metrics import Metrics

# Parameters of one query: enough for all keywords that a stream may have, and all other parameters.
MAX_QUERY_PARAMETERS = 600
DEFAULT_PORTS = {"http": "80", "ws": "80", "https": "443", "wss": "443"}
ANY = "*"


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
