"""Builds the gateway's ASGI application: the table of all paths, the middleware, and the responses for errors.

`build_app` makes the objects that the routes share and one route object for each group of paths; the endpoints are in
the other modules of this folder. This module also serves the files of the web page (`realtime/web`).

The middleware is around all routes and keeps no state between requests. `_CleanHeaders` escapes control
characters in the headers of responses, and `RefusedBodies` reads the rest of refused bodies.

`AccessLog` logs every request and every socket when it ends (`server.access_log`). The query and the headers are not
logged, because they may contain keys and tokens. Bytes are counted for requests only, because the events of a socket do
not pass through the middleware. Requests that are cut off before they are parsed do not reach the application and have
no line, and neither have upgrades that uvicorn's protocol class refuses.

`BrowserRules` protect a server without keys from other websites, whose pages can make a browser send requests to any
address that it reaches. `Origin` names the page's website: origins other than the server's own are refused unless they
are listed (`server.allowed_origins`). `Host` is the name in the request's URL: a website can make its own name resolve
to this machine, and the browser then treats the server as part of that website (DNS rebinding). Programs other than
browsers send no `Origin`, and a name or address of this machine as `Host`. With keys neither check is needed, because a
website does not know a key: then all origins are allowed, unless some are listed. `RequestGuard` applies the rules, and
also refuses requests with too many query parameters. `Cors` adds the CORS headers for the origins that are allowed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_from_bytes

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from engine.errors import EngineUnavailable
from engine.logs import ACCESS_LOG
from realtime.config import Config, ServerConfig, is_loopback
from realtime.errors import ClientFault, Refusal
from realtime.http.authentication import Authenticator, Context
from realtime.http.call_routes import WHIP, CallRoutes
from realtime.http.info_routes import WEBHOOKS, Answers, WebhookRoutes
from realtime.http.listen_route import ListenRoute
from realtime.http.openapi import ApiDocs
from realtime.http.prepared_audio_routes import PrepareRoutes
from realtime.http.stream_routes import STREAMS, StreamRoutes
from realtime.http.transcription_routes import UploadRoutes
from realtime.http.upload_forms import FormReader
from realtime.http.viewer_routes import ViewerRoutes
from realtime.http.websocket_routes import FLUX, LISTEN, TWILIO, WebSocketRoutes, refusal_response
from realtime.serving.engine_api import EngineApi
from realtime.serving.metrics import Metrics
from realtime.serving.publishing import Publisher
from realtime.serving.pulled_streams import PulledStreams
from realtime.serving.registry import Sessions
from realtime.serving.session_factory import GatewayServices
from realtime.serving.signed_tokens import ViewerLinks
from realtime.serving.uvicorn_protocols import clean_headers
from realtime.serving.viewers import Audience
from realtime.serving.webhooks import Webhooks
from realtime.serving.webrtc_calls import Calls

FOLDER = Path(__file__).parents[1] / "web"
# The files of the web page; only files that exist at the start are served.
FILES = tuple(sorted(file for file in FOLDER.glob("*") if file.is_file()))
# The page may connect only to its own server, and must not be shown in a frame.
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'self'; connect-src 'self' ws: wss: blob:; media-src 'self' blob:; img-src 'self' data: blob:; "
        "style-src 'self' 'unsafe-inline'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def page_routes() -> list[Route]:
    """One route for each file of the web page, and `/` for `index.html`."""
    named = {f"/{file.name}": file for file in FILES}
    if "/index.html" in named:
        named["/"] = named["/index.html"]
    routes = [Route(path, _serve(file), include_in_schema=False) for path, file in named.items()]
    if "/watch.html" in named:
        # The name is read by the page.
        routes.append(Route("/watch/{name}", _serve(named["/watch.html"]), include_in_schema=False))
    return routes


def _serve(file: Path) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return FileResponse(file, headers=HEADERS)

    return endpoint


def build_app(engine: EngineApi, config: Config, services: GatewayServices | None = None) -> Starlette:
    """The whole gateway as an ASGI application over a running engine."""
    services = services or GatewayServices()
    publisher = services.publisher or Publisher.alone(config.session.resume_s)
    services = replace(services, publisher=publisher if config.limits.viewers else None)
    authenticator = Authenticator([key.reveal() for key in config.auth.keys], services.signer)
    webhooks = Webhooks(config, services.metrics, time.time, authenticator.name_of)
    services = replace(services, webhooks=webhooks)
    sessions = Sessions(engine, config, time.monotonic, time.time, services)
    context = Context(engine, config, services.metrics, authenticator, sessions)
    gateway = WebSocketRoutes(context)
    gateway.webhooks = webhooks
    gateway.audience = Audience(publisher, services.metrics)
    links = ViewerLinks(services.link_signer, publisher.revocations, authenticator.vouches_for)
    viewers = ViewerRoutes(context, gateway.audience, publisher, links)
    is_alone = services.handoff_store is None
    gateway.streams = PulledStreams(sessions, config, time.time, authenticator.vouches_for, is_alone)
    gateway.calls = Calls(sessions, config, services.metrics, gateway.serve_call)
    calls = CallRoutes(context, gateway.calls)
    streams = StreamRoutes(context, gateway.streams)
    handlers: dict[Any, Any] = {
        Refusal: _on_refusal,
        ClientFault: _on_fault,
        EngineUnavailable: _on_no_engine,
        ClientDisconnect: _on_client_gone,
        404: _on_not_found,
        405: _on_wrong_method,
    }
    rules = BrowserRules(config.server, lambda: authenticator.asks_for_keys)
    guard = Middleware(RequestGuard, rules, services.metrics)
    routes = [
        *_sockets(gateway),
        *_viewers(viewers),
        *_answers(context),
        *_streams(streams),
        *_calls(calls),
        *page_routes(),
    ]
    routes.append(Route(WEBHOOKS, WebhookRoutes(context, webhooks).describe, methods=["GET"]))
    api_docs = ApiDocs(routes)
    routes += api_docs.routes()
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(AccessLog, config.server),
            Middleware(_CleanHeaders),
            Middleware(RefusedBodies),
            guard,
            Middleware(Cors, rules),
        ],
        exception_handlers=handlers,
        lifespan=gateway.lifespan,
    )
    app.state.gateway = gateway
    app.state.api_docs = api_docs
    return app


def _sockets(gateway: WebSocketRoutes) -> list[BaseRoute]:
    paths = {
        "/v1/realtime": gateway.realtime,
        "/realtime": gateway.realtime,
        LISTEN: gateway.deepgram,
        FLUX: gateway.flux,
        TWILIO: gateway.twilio,
    }
    sockets = [WebSocketRoute(path, _AsgiEndpoint(serve)) for path, serve in paths.items()]
    return [*sockets, *(Route(path, _upgrade_required, methods=["GET"], include_in_schema=False) for path in paths)]


def _viewers(viewers: ViewerRoutes) -> list[BaseRoute]:
    session = "/v1/sessions/{name}"
    return [
        WebSocketRoute(f"{session}/events", _AsgiEndpoint(viewers.socket)),
        Route(f"{session}/events", _AsgiEndpoint(viewers.stream), methods=["GET"]),
        Route(f"{session}/captions.m3u8", viewers.playlist),
        Route(f"{session}/captions/{{number}}.vtt", viewers.segment),
        Route(f"{session}/links", viewers.make_link, methods=["POST"]),
        Route(f"{session}/links", viewers.revoke_links, methods=["DELETE"]),
        Route(f"{session}/links/{{link}}", viewers.revoke_link, methods=["DELETE"]),
    ]


async def _upgrade_required(request: Request) -> Response:
    """Answer a plain request on a WebSocket path; usually a proxy has dropped the upgrade headers."""
    text = (
        "This address is a WebSocket: connect to it with ws:// or wss://. If the client did, a proxy on the way drops "
        "the headers 'Upgrade' and 'Connection'; configure it to pass them on."
    )
    answer = refusal_response(request.url.path, Refusal(426, "upgrade_required", text))
    answer.headers["Upgrade"], answer.headers["Connection"] = "websocket", "Upgrade"
    return answer


def _answers(context: Context) -> list[Route]:
    answers, forms = Answers(context), FormReader(context)
    uploads, prepare = UploadRoutes(context, forms), PrepareRoutes(context, forms)
    listen = ListenRoute(context, forms, uploads)
    routes: list[Route] = []
    for prefix in ("/v1", ""):
        routes += [
            Route(f"{prefix}/models", answers.models),
            Route(f"{prefix}/models/{{name:path}}", answers.model),
            Route(f"{prefix}/audio/transcriptions", uploads.transcriptions, methods=["POST"]),
            Route(f"{prefix}/audio/translations", uploads.translations, methods=["POST"]),
            Route(f"{prefix}/audio/render", prepare.render, methods=["POST"]),
            Route(f"{prefix}/audio/inject", prepare.inject, methods=["POST"]),
            Route(f"{prefix}/realtime/client_secrets", answers.client_secret, methods=["POST"]),
            Route(f"{prefix}/realtime/transcription_sessions", answers.beta_secret, methods=["POST"]),
        ]
    return [
        *routes,
        Route(LISTEN, listen.transcribe, methods=["POST"]),
        Route("/health", answers.health),
        Route("/ready", answers.ready),
        Route("/capacity", answers.capacity),
        Route("/metrics", answers.prometheus),
    ]


def _streams(streams: StreamRoutes) -> list[Route]:
    return [
        Route(STREAMS, streams.all, methods=["GET"]),
        Route(STREAMS, streams.create, methods=["POST"]),
        Route(f"{STREAMS}/{{id}}", streams.one, methods=["GET"]),
        Route(f"{STREAMS}/{{id}}", streams.delete, methods=["DELETE"]),
        Route(f"{STREAMS}/{{id}}/events", streams.events, methods=["GET"]),
    ]


def _calls(calls: CallRoutes) -> list[Route]:
    routes: list[Route] = []
    for path, begin in ((WHIP, calls.whip), ("/v1/realtime/calls", calls.create), ("/realtime/calls", calls.create)):
        routes += [
            Route(path, begin, methods=["POST"]),
            Route(f"{path}/{{id}}", calls.end, methods=["DELETE"]),
            Route(f"{path}/{{id}}", calls.trickle, methods=["PATCH"]),
        ]
        if begin == calls.create:
            routes.append(Route(f"{path}/{{id}}/hangup", calls.end, methods=["POST"]))
    return routes


class _CleanHeaders:
    """Middleware that escapes control characters in all response headers, also those of other middleware. For sockets
    the protocol class does this."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_cleaned(message: Message) -> None:
            if "headers" in message:
                message["headers"] = clean_headers(message["headers"])
            await send(message)

        await self._app(scope, receive, send_cleaned)


# Body of a refused request that is read and dropped.
MAX_DROPPED_BYTES = 64 * 2**20
MAX_DROPPED_SECONDS = 2.0


class RefusedBodies:
    """Middleware that reads and drops the rest of the body after a request was refused.

    Closing a connection with unread bytes resets it, and a client that is still sending would see the reset instead of
    the response. On connections that stay open uvicorn reads the rest; this is for requests with `Connection: close`.
    The bytes and the time for it are bounded.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (b"connection", b"close") not in scope["headers"]:
            await self._app(scope, receive, send)
            return
        arrived = is_refused = False

        async def receive_counted() -> Message:
            nonlocal arrived
            message = await receive()
            arrived = not message.get("more_body", False)
            return message

        async def send_and_read(message: Message) -> None:
            nonlocal is_refused
            is_refused = is_refused or message.get("status", 0) >= 400
            is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if is_refused and is_last and not arrived:
                await send({**message, "more_body": True})
                await self._drop_body(receive_counted)
                message = {"type": "http.response.body"}
            await send(message)

        await self._app(scope, receive_counted, send_and_read)

    async def _drop_body(self, receive: Receive) -> None:
        dropped, more = 0, True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MAX_DROPPED_SECONDS):
                while more and dropped < MAX_DROPPED_BYTES:
                    message = await receive()
                    dropped += len(message.get("body", b""))
                    more = message.get("more_body", False)


class _AsgiEndpoint:
    """Wraps an ASGI function in an object, because Starlette passes plain ASGI arguments only to objects."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        if hasattr(app, "operation"):
            self.operation = app.operation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


async def _on_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return refusal_response(request.url.path, error)


async def _on_fault(request: Request, error: Exception) -> Response:
    assert isinstance(error, ClientFault)
    return refusal_response(request.url.path, error)


async def _on_client_gone(request: Request, error: Exception) -> Response:
    """The client does not get this response; it keeps a client that leaves early from being logged as an error."""
    text = "The client left before its request was complete."
    return refusal_response(request.url.path, Refusal(499, "client_gone", text))


async def _on_no_engine(request: Request, error: Exception) -> Response:
    text = "The engine is not ready yet."
    refusal = Refusal(503, "engine_not_ready", text, retry_after_s=5, kind="server_error")
    return refusal_response(request.url.path, refusal)


async def _on_not_found(request: Request, error: Exception) -> Response:
    path = request.url.path
    return refusal_response(path, Refusal(404, "not_found", f"This server has no {request.method} {path[:200]}."))


async def _on_wrong_method(request: Request, error: Exception) -> Response:
    return refusal_response(
        request.url.path, Refusal(405, "method_not_allowed", f"This path does not allow {request.method}.")
    )


# The access log


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


# The rules for browsers


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
