"""The routes with short JSON answers: models, client secrets, webhooks, health, readiness, capacity; and `/metrics`.

`Answers` has an endpoint for each path, and `WebhookRoutes` that of `/v1/webhooks`. They read state of the gateway and
own none, except for `Scrapes`, which caches the answer of `/metrics`. `read_body` and `json_body` read the bounded body
of a request, also for other routes.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.client.pool import EngineShare
from realtime.dialects.base import decode_body
from realtime.dialects.event_schema import BetaSession, BetaSessionOptions, Session, SessionOptions
from realtime.dialects.openai import beta_session, ga_session, merge_beta, merge_ga
from realtime.errors import Refusal
from realtime.http.authentication import Context
from realtime.http.openapi import JSON, JSON_BODY, Operation, described
from realtime.serving.webhooks import Webhooks
from realtime.session.settings import Settings

WEBHOOKS = "/v1/webhooks"
# The longest JSON body of a request, in bytes; bodies with prepared items have a limit of their own.
MAX_JSON_BODY = 64 * 1024


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises a 413 Refusal as soon as it is larger than `max_bytes`."""
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        chunks.append(chunk)
        size += len(chunk)
        if size > max_bytes:
            raise Refusal(413, "body_too_large", f"The body is larger than {max_bytes} bytes.")
    return b"".join(chunks)


async def json_body(request: Request) -> dict[str, Any]:
    """The JSON object of a body; empty if there is no body. Raises Refusal and ClientFault."""
    body = await read_body(request, MAX_JSON_BODY)
    return decode_body(body) if body.strip() else {}


def fleet_figures(path: str | None) -> dict[str, Any] | None:
    """The figures of the whole fleet, from the file that the supervisor of this gateway writes, with their age in
    seconds.

    None if there is no such file. Blocks, so it must not run on the event loop.
    """
    if path is None:
        return None
    try:
        file = Path(path)
        written = file.stat().st_mtime
        found = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    return {**found, "age_s": round(max(0.0, time.time() - written), 1)} if isinstance(found, dict) else None


# A scrape is reused for this many times the duration of making it.
KEPT_TIMES = 10


class Scrapes:
    """A cache for the Prometheus scrape, which needs no key: making scrapes takes at most a tenth of the CPU time,
    regardless of the number of requests. Concurrent requests share one."""

    def __init__(self, make: Callable[[], Awaitable[bytes]], clock: Callable[[], float]) -> None:
        self._make = make
        self._clock = clock
        self._last = b""
        self._good_until = float("-inf")
        self._making: asyncio.Task[bytes] | None = None

    async def read(self) -> bytes:
        """The scrape; raises the error that making it raised."""
        if self._clock() < self._good_until:
            return self._last
        if self._making is None:
            self._making = asyncio.create_task(self._make_anew(), name="figures for a scrape")
        # A request that is cancelled must not cancel the scrape of the others.
        return await asyncio.shield(self._making)

    async def _make_anew(self) -> bytes:
        began = self._clock()
        try:
            self._last = await self._make()
            ended = self._clock()
            self._good_until = ended + KEPT_TIMES * (ended - began)
            return self._last
        finally:
            self._making = None


# Lifetime of a client secret in seconds.
MIN_SECRET_S, DEFAULT_SECRET_S, MAX_SECRET_S = 10, 600, 7200


class Model(Struct, forbid_unknown_fields=True):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    options: Annotated[list[str], Meta(description="The options that the model takes.")]
    languages: list[str]
    detects_language: bool
    turn_detection: Annotated[list[str], Meta(description="What ends turns here.")]


class ModelList(Struct, forbid_unknown_fields=True):
    object: Literal["list"]
    data: list[Model]


class ExpiresAfter(Struct):
    anchor: str | UnsetType = UNSET
    seconds: Annotated[int, Meta(ge=MIN_SECRET_S, le=MAX_SECRET_S)] = DEFAULT_SECRET_S


class SecretRequest(Struct):
    expires_after: ExpiresAfter | None = None
    session: SessionOptions | None = None


class ClientSecret(Struct, forbid_unknown_fields=True):
    value: str
    expires_at: int
    session: Session


class Status(Struct, forbid_unknown_fields=True):
    status: Literal["ok", "ready", "starting", "draining"]


class EngineFigures(Struct, forbid_unknown_fields=True):
    name: str
    address: str
    state: Literal["serving", "draining"]
    streams: int
    streams_used: int
    streams_total: int
    streams_free: int
    streams_parked: int
    speaking: int
    load: float
    lag_ms: int
    model: str
    digest: str
    version: str
    beat_age_s: float


class MissingEngine(Struct, forbid_unknown_fields=True):
    name: str
    address: str
    problem: str


class CapacityFigures(Struct, forbid_unknown_fields=True):
    """How full the server is."""

    gateway: str
    sessions: int
    connected: int
    speaking: int
    streams_used: int
    streams_total: int
    streams_parked: int
    streams_counted: int
    streams_that_hold: int
    streams_free: int
    load: float
    load_per_stream: float
    max_load: float
    retry_after_s: float
    draining: bool
    viewers_total: Annotated[int, Meta(description="Places for viewers of published sessions; 0: publishing is off.")]
    engines_wanted: int
    spares_ready: int
    spares_wanted: int
    engines: list[EngineFigures]
    engines_missing: list[MissingEngine]
    table_number: int | None
    table_problem: str
    fleet: dict[str, Any] | None


MODELS, SECRETS, OPERATION = "Models", "Client secrets", "Operation"


class Answers:
    """The endpoints of models, client secrets, health, capacity and metrics."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._sessions = context.sessions
        self._started = int(time.time())
        self._scrapes = Scrapes(self._context.metrics.scrape, time.monotonic)

    @described(Operation("The served models", MODELS, {200: {JSON: ModelList}}))
    async def models(self, request: Request) -> Response:
        self._context.caller_of(request)
        listed = ModelList("list", [self._model(name) for name in self._sessions.listed_models()])
        return JSONResponse(msgspec.to_builtins(listed))

    @described(Operation("One model", MODELS, {200: {JSON: Model}}, refusals=({404: ("model_not_found",)},)))
    async def model(self, request: Request) -> Response:
        self._context.caller_of(request)
        name = request.path_params["name"]
        if name not in self._sessions.models():
            raise Refusal(404, "model_not_found", f"The model '{name[:200]}' does not exist.", param="model")
        return JSONResponse(msgspec.to_builtins(self._model(name)))

    def _model(self, name: str) -> Model:
        options = self._context.engine.spec.options
        return Model(
            id=name,
            object="model",
            created=self._started,
            owned_by="tickertape",
            options=[*options.names, *(["speakers"] if options.speakers else [])],
            languages=list(options.languages),
            detects_language=options.detects_language,
            turn_detection=["silence", "text", *(["learnt"] if options.turn_detector else [])],
        )

    @described(
        Operation(
            "Issue a short-lived key for a browser, with the settings of its sessions",
            SECRETS,
            {200: {JSON: ClientSecret}},
            body={JSON: SecretRequest},
            body_required=False,
            refusals=(JSON_BODY, {400: ("settings_too_long",)}),
        )
    )
    async def client_secret(self, request: Request) -> Response:
        """Issue a client secret: a short-lived key for a browser, with the initial settings of its sessions."""
        caller = self._context.caller_of(request)
        body = await json_body(request)
        seconds = _secret_seconds(body.get("expires_after"))
        session = body.get("session")
        if not isinstance(session, dict | None):
            raise Refusal(400, "invalid_value", "'session' must be an object.", param="session")
        settings = self._in_force(merge_ga(Settings(), session or {}))
        secret = self._context.authenticator.issue(caller, settings, seconds)
        facts = self._sessions.facts()
        shown = ga_session(settings, facts, secret.expires_at)
        return JSONResponse({"value": secret.value, "expires_at": secret.expires_at, "session": shown})

    @described(
        Operation(
            "The same in the shape of OpenAI's beta",
            SECRETS,
            {200: {JSON: BetaSession}},
            body={JSON: BetaSessionOptions},
            body_required=False,
            refusals=(JSON_BODY, {400: ("settings_too_long",)}),
        )
    )
    async def beta_secret(self, request: Request) -> Response:
        """Issue a client secret in the format of OpenAI's beta, where the body is the settings."""
        caller = self._context.caller_of(request)
        settings = self._in_force(merge_beta(Settings(), await json_body(request)))
        secret = self._context.authenticator.issue(caller, settings, DEFAULT_SECRET_S)
        shown = beta_session(settings, self._sessions.facts())
        shown["client_secret"] = {"value": secret.value, "expires_at": secret.expires_at}
        return JSONResponse(shown)

    def _in_force(self, asked: Settings) -> Settings:
        """The settings as the model supports them. Raises ClientFault."""
        return asked.in_force(self._context.engine.spec)

    @described(Operation("Whether the process answers", OPERATION, {200: {JSON: Status}}, needs_key=False))
    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    @described(
        Operation(
            "Whether the server takes sessions", OPERATION, {200: {JSON: Status}, 503: {JSON: Status}}, needs_key=False
        )
    )
    async def ready(self, request: Request) -> Response:
        if self._sessions.draining or not self._context.engine.ready:
            reason = "draining" if self._sessions.draining else "starting"
            return JSONResponse({"status": reason}, 503, {"Retry-After": "5"})
        return JSONResponse({"status": "ready"})

    @described(Operation("How full the server is", OPERATION, {200: {JSON: CapacityFigures}}, needs_key=False))
    async def capacity(self, request: Request) -> Response:
        capacity, figures = self._context.engine.capacity(), self._sessions.all_figures()
        shown = CapacityFigures(
            gateway=self._context.config.gateway_name,
            sessions=figures.sessions,
            connected=figures.connected,
            speaking=figures.speaking,
            streams_used=capacity.used,
            streams_total=capacity.total,
            streams_parked=capacity.parked,
            streams_counted=capacity.counted,
            streams_that_hold=capacity.holds,
            streams_free=capacity.free,
            load=round(capacity.load, 3),
            load_per_stream=round(capacity.load_per_stream, 4),
            max_load=self._context.limits.max_load,
            retry_after_s=capacity.retry_after_s,
            draining=self._sessions.draining,
            viewers_total=self._context.limits.viewers,
            engines_wanted=capacity.engines_wanted,
            spares_ready=capacity.spares_ready,
            spares_wanted=capacity.spares_wanted,
            engines=[self._engine(engine) for engine in capacity.engines],
            engines_missing=[MissingEngine(engine.name, engine.address, engine.problem) for engine in capacity.missing],
            table_number=None if capacity.table is None else capacity.table.number,
            table_problem="" if capacity.table is None else capacity.table.problem,
            fleet=await asyncio.to_thread(fleet_figures, self._context.config.fleet.figures),
        )
        return JSONResponse(msgspec.to_builtins(shown))

    def _engine(self, engine: EngineShare) -> EngineFigures:
        spec = self._context.engine.spec
        return EngineFigures(
            name=engine.name,
            address=engine.address,
            state="draining" if engine.draining else "serving",
            streams=engine.used,
            streams_used=engine.used,
            streams_total=engine.total,
            streams_free=engine.free,
            streams_parked=engine.parked,
            speaking=engine.speaking,
            load=round(engine.load, 3),
            lag_ms=round(engine.lag_ms),
            model=spec.name,
            digest=spec.weights,
            version=engine.version,
            beat_age_s=round(engine.silent_s, 3),
        )

    @described(
        Operation(
            "The metrics, for Prometheus",
            OPERATION,
            {200: {"text/plain": str}},
            refusals=({503: ("metrics_not_ready",)},),
            needs_key=False,
        )
    )
    async def prometheus(self, request: Request) -> Response:
        try:
            # With several workers the parent makes the sum at each scrape. A scrape cached in one worker could be older
            # than one that another worker has answered since.
            metrics = self._context.metrics
            figures = await (self._scrapes.read() if metrics.of_all is None else metrics.scrape())
        except TimeoutError as error:
            text = "The other processes of the server do not answer; try again."
            raise Refusal(503, "metrics_not_ready", text, retry_after_s=5, kind="server_error") from error
        return Response(figures, media_type="text/plain; version=0.0.4; charset=utf-8")


class WebhooksOfKey(Struct, forbid_unknown_fields=True):
    """The URLs that get the finals of this key's sessions alone, and the secret that signs them."""

    object: Literal["webhooks"]
    on_final: list[str]
    per_session: bool
    signing_secret: str


class WebhookRoutes:
    """Answers requests about webhooks. Off unless the operator has set URLs, or allows clients to name them."""

    def __init__(self, context: Context, webhooks: Webhooks) -> None:
        self._context = context
        self._webhooks = webhooks

    @described(
        Operation(
            "The webhooks of the key",
            "Webhooks",
            {200: {JSON: WebhooksOfKey}},
            refusals=({403: ("webhooks_off", "webhook_secret_not_told")},),
        )
    )
    async def describe(self, request: Request) -> Response:
        caller = self._context.caller_of(request)
        settings = self._context.config.webhooks
        account = self._webhooks.account_of(caller.name)
        if account is None or not (settings.per_session or account.urls):
            text = "Webhooks are off for this key; the server's operator can set webhooks.on_final or per_session."
            raise Refusal(403, "webhooks_off", text)
        if not self._context.authenticator.asks_for_keys:
            # Any client that reaches the server could sign as the server.
            text = "A server without keys does not tell its signing secret; docs/webhooks.md says how to compute it."
            raise Refusal(403, "webhook_secret_not_told", text)
        return JSONResponse(
            {
                "object": "webhooks",
                "on_final": list(account.own_urls),
                "per_session": settings.per_session,
                "signing_secret": self._webhooks.shown_secret(caller.name),
            },
            headers={"Cache-Control": "no-store"},
        )


def _secret_seconds(expires_after: Any) -> int:
    if expires_after is None:
        return DEFAULT_SECRET_S
    seconds = expires_after.get("seconds", DEFAULT_SECRET_S) if isinstance(expires_after, dict) else None
    if isinstance(seconds, bool) or not isinstance(seconds, int) or not MIN_SECRET_S <= seconds <= MAX_SECRET_S:
        text = f"'expires_after.seconds' must be between {MIN_SECRET_S} and {MAX_SECRET_S}."
        raise Refusal(400, "invalid_value", text, param="expires_after.seconds")
    return seconds
