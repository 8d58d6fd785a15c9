"""Builds the gateway's ASGI application: the table of all paths, the middleware, and the responses for errors.

`build_app` makes the objects that the routes share and one route object for each group of paths; the endpoints are in
the other modules of this folder. This module also serves the files of the web page (`realtime/web`).

The middleware is around all routes and keeps no state between requests: the access log (`access_log.py`), the rules for
browsers (`browser_rules.py`), and two classes of this module that clean the headers of responses and read the rest of
refused bodies.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import EngineUnavailable
from realtime.config import Config
from realtime.errors import ClientFault, Refusal
from realtime.http.access_log import AccessLog
from realtime.http.authentication import Authenticator, Context
from realtime.http.browser_rules import BrowserRules, Cors, RequestGuard
from realtime.http.call_routes import WHIP, CallRoutes
from realtime.http.info_routes import WEBHOOKS, Answers, WebhookRoutes
from realtime.http.listen_route import ListenRoute
from realtime.http.openapi import ApiDocs
from realtime.http.prepared_audio_routes import PrepareRoutes
from realtime.http.route_helpers import FLUX, LISTEN, refusal_response
from realtime.http.stream_routes import STREAMS, StreamRoutes
from realtime.http.transcription_routes import UploadRoutes
from realtime.http.upload_forms import FormReader
from realtime.http.viewer_routes import ViewerRoutes
from realtime.http.websocket_routes import TWILIO, WebSocketRoutes
from realtime.serving.engine_api import EngineApi
from realtime.serving.publishing import Publisher
from realtime.serving.pulled_streams import PulledStreams
from realtime.serving.registry import Sessions
from realtime.serving.session_factory import GatewayServices
from realtime.serving.uvicorn_protocols import clean_headers
from realtime.serving.viewer_links import ViewerLinks
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
