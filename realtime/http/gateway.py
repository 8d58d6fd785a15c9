"""HTTP and WebSocket routes on one port: auth, refusals before the upgrade, health and metrics."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from realtime.config import Config
from realtime.dialects.deepgram import DeepgramDialect, settings_from_query
from realtime.dialects.json_frames import decode_json, encode_json
from realtime.dialects.openai import BetaDialect, OpenAIDialect
from realtime.dialects.openai_session import beta_session, ga_session, merge_beta, merge_ga
from realtime.errors import ClientFault, CloseCode, Refusal
from realtime.http.auth import BETA_PROTOCOL, Gatekeeper, select_subprotocol
from realtime.http.context import Context
from realtime.http.forms import FormReader
from realtime.http.page import page_routes
from realtime.http.prepare import PrepareRoutes
from realtime.http.uploads import UploadRoutes
from realtime.metrics.gateway import Metrics
from realtime.serving.caller import Caller
from realtime.serving.connection import Connection
from realtime.serving.engine_api import EngineApi
from realtime.serving.registry import Entry, Sessions
from realtime.serving.throttle import Pace, Turnstile
from realtime.serving.uvicorn_patch import ABORT_EXTENSION, NOTHING_WAITS_EXTENSION
from realtime.session.events import Hangup
from realtime.session.settings import Settings

log = logging.getLogger("tickertape.server")

MIN_SECRET_S, DEFAULT_SECRET_S, MAX_SECRET_S = 10, 600, 7200
MAX_JSON_BODY = 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Entrance:
    """How a socket is let in: its session, and what it is told first."""

    entry: Entry
    first_frames: list[str]
    subprotocol: str | None
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)


class Gateway:
    """What all routes share."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.engine = context.engine
        self.config = context.config
        self.metrics = context.metrics
        self.sessions = context.sessions
        self.started = int(time.time())
        self._turnstile = Turnstile()
        forms = FormReader(context)
        self.uploads = UploadRoutes(context, forms)
        self.prepare = PrepareRoutes(context, forms)

    # Realtime sockets

    async def realtime(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI endpoint: sockets are served without Starlette's wrapper, which costs time per message."""
        await self._serve_socket(self._enter, scope, receive, send)

    async def listen(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._serve_socket(self._enter_listen, scope, receive, send)

    async def _serve_socket(
        self, enter: Callable[[WebSocket], _Entrance], scope: Scope, receive: Receive, send: Send
    ) -> None:
        websocket = WebSocket(scope, receive, send)
        try:
            entrance = enter(websocket)
        except Refusal as refusal:
            await websocket.send_denial_response(_refused(refusal))
            return
        entry = entrance.entry
        extensions = scope.get("extensions", {})
        abort = extensions.get(ABORT_EXTENSION, _no_abort)
        nothing_waits = extensions.get(NOTHING_WAITS_EXTENSION, _unknown)
        connection = Connection(entry.live, entry.inbox, receive, send, abort, nothing_waits, self._turnstile)
        self.sessions.attach(entry, connection)
        limits = self.config.limits
        paces = (self._pace(limits.messages_per_second), self._pace(limits.mistakes_per_second))
        try:
            await receive()
            accept = {"type": "websocket.accept", "subprotocol": entrance.subprotocol, "headers": entrance.headers}
            await send(accept)
            hangup = await connection.run(entrance.first_frames, *paces)
            if hangup is not None:
                self.metrics.closed.labels(hangup.cause).inc()
        except* OSError:
            log.debug("session %s: the client left during the handshake", entry.live.id)
        except* Exception:
            self.metrics.closed.labels("internal").inc()
            log.exception("session %s failed", entry.live.id)
            await connection.close(Hangup(CloseCode.INTERNAL, "internal error", "internal"))
        finally:
            await self.sessions.detach(entry, connection)

    @staticmethod
    def _pace(per_second: float) -> Pace | None:
        return Pace(per_second, time.monotonic) if per_second else None

    def _enter(self, websocket: WebSocket) -> _Entrance:
        """Find or make the session of a socket that asks to be opened; raises Refusal."""
        query = websocket.query_params
        offered: list[str] = websocket.scope.get("subprotocols", [])
        address = websocket.client.host if websocket.client else ""
        if "call_id" in query:
            raise Refusal(404, "not_found", "Calls are not served here.", param="call_id")
        caller = self.context.caller(websocket.headers, offered, address)
        selected = select_subprotocol(offered)
        if "resume" in query:
            return _Entrance(*self._resume(query["resume"], query.get("after", "0"), caller), selected)
        self.sessions.admit(caller)
        beta = websocket.headers.get("openai-beta") == "realtime=v1" or BETA_PROTOCOL in offered
        settings = caller.settings or Settings()
        if "model" in query:
            settings = merge_beta(settings, {"input_audio_transcription": {"model": query["model"]}})
        entry = self.sessions.create(caller, settings, BetaDialect if beta else OpenAIDialect)
        greeting = entry.live.dialect.created(entry.live.session.settings)
        return _Entrance(entry, [encode_json(greeting)] if greeting else [], selected)

    def _enter_listen(self, websocket: WebSocket) -> _Entrance:
        """The same for Deepgram's clients, who say everything in the query."""
        offered: list[str] = websocket.scope.get("subprotocols", [])
        query = websocket.query_params
        caller = self.context.caller(websocket.headers, offered, websocket.client.host if websocket.client else "")
        settings = settings_from_query(query)
        self.sessions.admit(caller)
        entry = self.sessions.create(caller, settings, lambda facts: DeepgramDialect(facts, query))
        header = (b"dg-request-id", entry.live.id.encode())
        return _Entrance(entry, [], select_subprotocol(offered), [header])

    def _resume(self, token: str, after: str, caller: Caller) -> tuple[Entry, list[str]]:
        entry = self.sessions.find(token, caller)
        if not after.isascii() or not after.isdigit() or len(after) > 18:
            raise Refusal(400, "invalid_value", "'after' must be the 'seq' of the last event received.", param="after")
        missed = entry.live.frames_after(int(after))
        if missed is None:
            raise Refusal(410, "resume_too_late", "Events after this one are gone; start a new session.", param="after")
        self.metrics.resumed.inc()
        entry.inbox.reconnected()
        return entry, [entry.live.greeting_again(), *missed]

    # HTTP

    async def models(self, request: Request) -> Response:
        self.context.caller_of(request)
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self.sessions.models()]})

    async def model(self, request: Request) -> Response:
        self.context.caller_of(request)
        name = request.path_params["name"]
        if name not in self.sessions.models():
            raise Refusal(404, "model_not_found", f"The model '{name[:200]}' does not exist.", param="model")
        return JSONResponse(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self.started, "owned_by": "tickertape"}

    async def client_secret(self, request: Request) -> Response:
        """A short-lived key for a browser, with the settings its sessions begin with."""
        caller = self.context.caller_of(request)
        body = await _json_body(request)
        seconds = _secret_seconds(body.get("expires_after"))
        session = body.get("session")
        settings = merge_ga(Settings(), session if isinstance(session, dict) else {})
        secret = self.context.gatekeeper.issue(caller, settings, seconds)
        facts = self.sessions.facts()
        shown = ga_session(settings, facts, secret.expires_at)
        return JSONResponse({"value": secret.value, "expires_at": secret.expires_at, "session": shown})

    async def beta_secret(self, request: Request) -> Response:
        """The same for clients of the beta: the settings are the body itself."""
        caller = self.context.caller_of(request)
        settings = merge_beta(Settings(), await _json_body(request))
        secret = self.context.gatekeeper.issue(caller, settings, DEFAULT_SECRET_S)
        shown = beta_session(settings, self.sessions.facts())
        shown["client_secret"] = {"value": secret.value, "expires_at": secret.expires_at}
        return JSONResponse(shown)

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        if self.sessions.draining or not self.engine.ready:
            reason = "draining" if self.sessions.draining else "starting"
            return JSONResponse({"status": reason}, 503, {"Retry-After": "5"})
        return JSONResponse({"status": "ready"})

    async def capacity(self, request: Request) -> Response:
        capacity = self.engine.capacity()
        return JSONResponse(
            {
                "sessions": len(self.sessions),
                "connected": self.sessions.connected,
                "speaking": self.sessions.speaking,
                "streams_used": capacity.used,
                "streams_total": capacity.total,
                "streams_counted": capacity.counted,
                "streams_that_hold": capacity.holds,
                "streams_free": capacity.free,
                "load": round(capacity.load, 3),
                "load_per_stream": round(capacity.load_per_stream, 4),
                "max_load": self.config.limits.max_load,
                "retry_after_s": capacity.retry_after_s,
                "draining": self.sessions.draining,
            }
        )

    async def prometheus(self, request: Request) -> Response:
        return Response(self.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    # Life

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        ticker = asyncio.create_task(self.sessions.run_ticker(), name="ticker")
        try:
            yield
        finally:
            await self.sessions.drain(0.0)
            ticker.cancel()
            await asyncio.gather(ticker, return_exceptions=True)


def build_app(engine: EngineApi, config: Config, metrics: Metrics | None = None) -> Starlette:
    """The whole gateway as an ASGI application over a running engine."""
    metrics = metrics or Metrics()
    gatekeeper = Gatekeeper(config.auth.keys, config.auth.max_client_secrets)
    sessions = Sessions(engine, config, metrics, time.monotonic, time.time)
    gateway = Gateway(Context(engine, config, metrics, gatekeeper, sessions))
    sockets = {"/v1/realtime": gateway.realtime, "/realtime": gateway.realtime, "/v1/listen": gateway.listen}
    routes: list[Any] = [WebSocketRoute(path, _AsgiEndpoint(serve)) for path, serve in sockets.items()]
    for prefix in ("/v1", ""):
        routes += [
            Route(f"{prefix}/models", gateway.models),
            Route(f"{prefix}/models/{{name:path}}", gateway.model),
            Route(f"{prefix}/audio/transcriptions", gateway.uploads.transcriptions, methods=["POST"]),
            Route(f"{prefix}/audio/render", gateway.prepare.render, methods=["POST"]),
            Route(f"{prefix}/audio/inject", gateway.prepare.inject, methods=["POST"]),
            Route(f"{prefix}/realtime/client_secrets", gateway.client_secret, methods=["POST"]),
            Route(f"{prefix}/realtime/transcription_sessions", gateway.beta_secret, methods=["POST"]),
        ]
    routes += [
        Route("/health", gateway.health),
        Route("/ready", gateway.ready),
        Route("/capacity", gateway.capacity),
        Route("/metrics", gateway.prometheus),
        *page_routes(),
    ]
    handlers: dict[Any, Any] = {Refusal: _on_refusal, ClientFault: _on_fault, 404: _on_not_found, 405: _on_wrong_method}
    cors = Middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])
    app = Starlette(routes=routes, middleware=[cors], exception_handlers=handlers, lifespan=gateway.lifespan)
    app.state.gateway = gateway
    return app


class _AsgiEndpoint:
    """Starlette passes scope, receive and send to an object as they are."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def _no_abort() -> None:
    """Under another server than ours there is no way to cut a socket."""


def _unknown() -> bool:
    """Under another server nothing is known of messages that wait."""
    return True


def _refused(refusal: Refusal) -> Response:
    return JSONResponse(refusal.body(), refusal.status, refusal.headers())


async def _on_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return _refused(error)


async def _on_fault(request: Request, error: Exception) -> Response:
    assert isinstance(error, ClientFault)
    return _refused(Refusal(400, error.code, error.message, error.param))


async def _on_not_found(request: Request, error: Exception) -> Response:
    return _refused(Refusal(404, "not_found", f"There is no {request.method} {request.url.path[:200]} here."))


async def _on_wrong_method(request: Request, error: Exception) -> Response:
    return _refused(Refusal(405, "method_not_allowed", f"{request.method} is not possible here."))


async def _json_body(request: Request) -> dict[str, Any]:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_JSON_BODY:
            raise Refusal(413, "body_too_large", "The body is too large.")
    return decode_json(body) if body.strip() else {}


def _secret_seconds(expires_after: Any) -> int:
    if expires_after is None:
        return DEFAULT_SECRET_S
    seconds = expires_after.get("seconds", DEFAULT_SECRET_S) if isinstance(expires_after, dict) else None
    if isinstance(seconds, bool) or not isinstance(seconds, int) or not MIN_SECRET_S <= seconds <= MAX_SECRET_S:
        text = f"'expires_after.seconds' must lie between {MIN_SECRET_S} and {MAX_SECRET_S}."
        raise Refusal(400, "invalid_value", text, param="expires_after.seconds")
    return seconds
