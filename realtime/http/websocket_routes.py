"""The WebSocket endpoints of OpenAI's, vLLM's, Deepgram's and Twilio's clients.

Each endpoint authenticates the client, reads its query, opens or resumes the session by the registry, and runs a
`Connection` until the socket closes. `WebSocketRoutes` also serves WebRTC calls, and starts and stops what runs as long
as the gateway does: the registry's ticker, viewers, pulled streams and webhooks. The sockets of viewers are in
`viewer_routes.py`. `refusal_response` writes refusals for all routes: Deepgram's clients expect them in another format.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Literal
from uuid import uuid4

from anyio import open_file
from msgspec import Meta
from starlette.applications import Starlette
from starlette.datastructures import QueryParams
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketState

from realtime.dialects.base import SessionFacts, decode_json, encode_json
from realtime.dialects.deepgram import (
    CONTAINERS,
    MAX_CHANNELS,
    MAX_PAUSE_MS,
    RAW,
    READ_ONCE,
    DeepgramDialect,
    Listening,
    error_body,
    read_socket_query,
)
from realtime.dialects.deepgram_flux import FLUX_READ_ONCE, FluxDialect, read_flux_query
from realtime.dialects.event_schema import EagerThreshold, EotThreshold, EotTimeout, PublishedName, WebhookUrl, one_of
from realtime.dialects.openai import MAX_NAME, BetaDialect, OpenAIDialect, merge_beta
from realtime.dialects.twilio import CallStart, TwilioDialect, read_start
from realtime.errors import ClientFault, CloseCode, Refusal
from realtime.http.authentication import Context, asks_for_beta, offered_key, select_subprotocol
from realtime.http.openapi import Codes, Operation, Parameter, described
from realtime.serving.connection import CLOSE_GRACE_S, ChannelGroup, ChannelInbox, Connection
from realtime.serving.inbox import Inbox
from realtime.serving.live_session import LiveSession
from realtime.serving.pulled_streams import PulledStreams
from realtime.serving.quota import Caller, FairTurns, Pace
from realtime.serving.session_factory import OpenSession
from realtime.serving.socket_extras import EXTENSION, PART, SocketExtras
from realtime.serving.uvicorn_protocols import header_text
from realtime.serving.viewers import Audience
from realtime.serving.webhooks import Webhooks
from realtime.serving.webrtc_calls import CallInbox, CallLine, Calls
from realtime.session.events import Hangup
from realtime.session.settings import MAX_RATE, MIN_RATE, Settings
from realtime.text_values import whole_number

log = logging.getLogger("tickertape.server")

# The path of Deepgram's clients, for sockets and files.
LISTEN = "/v1/listen"
# The path of the clients of Deepgram Flux.
FLUX = "/v2/listen"
# The path of Twilio Media Streams.
TWILIO = "/v1/twilio"
# The messages of Twilio that start a call: `connected` and `start`.
MESSAGES_TO_START = 2
# Seconds for the last words of a call whose socket is closed.
FINISH_S = 15.0
# The longest reason in a close frame, in bytes.
REASON_BYTES = 123
# The largest `after` of a resume request: more events than a session can send.
MAX_SEQUENCE = 10**15
# A resume request that has waited in a socket for longer (seconds) is refused: its client may have resumed elsewhere
# without this process knowing.
STALE_S = 3.0
# Bytes per sample of the raw formats.
SAMPLE_BYTES = {"audio/pcm": 2, "audio/pcmu": 1, "audio/pcma": 1}

# What clients may send in the query; docs/wire.md explains the values.
Flag = Literal["true", "false"]
Encoding = Annotated[str, one_of((*RAW, *(name for name in CONTAINERS if name)))]
AUDIO_PARAMETERS = (
    Parameter("encoding", "The format of raw samples; left out for a container.", Encoding),
    Parameter("sample_rate", "Of raw samples, in Hz.", Annotated[int, Meta(ge=MIN_RATE, le=MAX_RATE)]),
    Parameter("model", "Any name means the served model."),
)
LISTEN_PARAMETERS = (
    *AUDIO_PARAMETERS,
    Parameter("language", "A code, or `multi`."),
    Parameter("keyterm", "A word to expect.", repeated=True),
    Parameter("keywords", "A word to expect, as `word:boost`.", repeated=True),
    Parameter("punctuate", "Punctuation and capitals.", Flag),
    Parameter("smart_format", "Numbers, dates and money as people write them.", Flag),
    Parameter("numerals", "Numbers as digits.", Flag),
    Parameter("profanity_filter", "Masks profanity.", Flag),
    Parameter("paragraphs", "Adds paragraphs (files only).", Flag),
    Parameter("redact", "A kind of text to redact, or `name:NAME`.", repeated=True),
    Parameter("replace", "`find:text`", repeated=True),
    Parameter("search", "A term to find.", repeated=True),
    Parameter("diarize", "Who speaks.", Flag),
    Parameter("multichannel", "Each channel is transcribed on its own (sockets only).", Flag),
    Parameter("channels", "Of raw samples.", Annotated[int, Meta(ge=1, le=MAX_CHANNELS)]),
)
PUBLISH_PARAMETER = Parameter("publish", "Publishes the session under this name.", PublishedName)
WEBHOOK_PARAMETER = Parameter("on_final", "A URL that gets the session's finals as webhooks.", WebhookUrl)
Pause = Annotated[int, Meta(ge=0, le=MAX_PAUSE_MS)]
SOCKET_PARAMETERS = (
    *LISTEN_PARAMETERS,
    PUBLISH_PARAMETER,
    WEBHOOK_PARAMETER,
    Parameter("interim_results", "Results before they are final.", Flag),
    Parameter("vad_events", "Sends SpeechStarted.", Flag),
    Parameter("endpointing", "The pause in milliseconds that ends a turn, `true` or `false`.", Pause | Flag),
    Parameter("utterance_end_ms", "The pause in milliseconds before UtteranceEnd.", Pause | Literal["false"]),
)
FLUX_PARAMETERS = (
    *AUDIO_PARAMETERS,
    PUBLISH_PARAMETER,
    WEBHOOK_PARAMETER,
    Parameter("language_hint", "A language that may be spoken.", repeated=True),
    Parameter("keyterm", "A word to expect.", repeated=True),
    Parameter("eot_threshold", "A turn ends at this probability.", EotThreshold),
    Parameter("eager_eot_threshold", "A probable end is announced at this probability.", EagerThreshold),
    Parameter("eot_timeout_ms", "This much silence ends every turn.", EotTimeout),
)
REALTIME_PARAMETERS = (
    Parameter("model", "Any name means the served model."),
    Parameter("intent", "`transcription`; has no effect."),
    Parameter("resume", "The token of a session to resume."),
    Parameter("after", "The `seq` of the last event received.", Annotated[int, Meta(ge=0, le=MAX_SEQUENCE)]),
)
# Refusals before the upgrade.
REFUSED_SOCKETS: Codes = {
    400: ("invalid_value", "invalid_query_parameter", "host_not_allowed"),
    403: ("publish_not_allowed", "publishing_off", "webhook_not_allowed", "webhooks_off"),
    404: ("not_found", "resume_token_unknown"),
    409: ("name_taken",),
    410: ("resume_too_late", "session_gone"),
    426: ("upgrade_required",),
    429: ("too_many_sessions", "rate_limit_exceeded", "too_many_webhooks"),
    503: ("engine_not_ready", "server_shutting_down", "request_too_old"),
}

# Refusals of a phone call after the upgrade, whose sentences are the reasons of close frames.
CLOSED_CALLS: Codes = {400: ("no_start",), 408: ("no_start",), 413: ("message_too_large",), 499: ("client_gone",)}


def _socket(summary: str, messages: str, parameters: tuple[Parameter, ...], deepgram: bool = True) -> Operation:
    text = f"A WebSocket. Its messages are those of {messages} in /events.schema.json. A client secret is a key here."
    return Operation(
        summary,
        "Sockets",
        {101: {}},
        text,
        parameters=parameters,
        refusals=(REFUSED_SOCKETS,),
        takes_secrets=True,
        deepgram=deepgram,
    )


@dataclass(frozen=True, slots=True)
class _AdmittedSocket:
    """An admitted socket: its session (one for each channel), and the first frames and headers to send."""

    entries: tuple[OpenSession, ...]
    first_frames: list[str]
    subprotocol: str | None
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    # A call: the socket is accepted already, and when it closes the last words still reach viewers.
    is_call: bool = False


_Enter = Callable[[WebSocket], AbstractAsyncContextManager[_AdmittedSocket]]


class WebSocketRoutes:
    """The endpoints of sockets; `lifespan` starts and stops what runs as long as the gateway does."""

    def __init__(self, context: Context) -> None:
        self.config = context.config
        self.metrics = context.metrics
        self.sessions = context.sessions
        # Set by `build_app`.
        self.audience: Audience | None = None
        self.context = context
        self._fair_turns = FairTurns()
        # Streams that this gateway pulls, which end with it.
        self.streams: PulledStreams | None = None
        self.webhooks: Webhooks | None = None
        self.calls: Calls | None = None

    @described(
        _socket(
            "Live transcription, for OpenAI's and vLLM's clients",
            "OpenAIClientEvent, OpenAIServerEvent and VllmServerEvent",
            REALTIME_PARAMETERS,
            deepgram=False,
        )
    )
    async def realtime(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The endpoint of OpenAI's and vLLM's clients. Plain ASGI: Starlette's wrapper costs time per message."""
        await self._serve_socket(self._enter, scope, receive, send)

    @described(
        _socket(
            "Live transcription, for Deepgram's clients",
            "DeepgramClientMessage and DeepgramServerMessage",
            SOCKET_PARAMETERS,
        )
    )
    async def deepgram(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The endpoint of Deepgram's clients."""
        await self._serve_socket(self._enter_listen, scope, receive, send)

    @described(
        _socket(
            "Live turns, for the clients of Deepgram Flux", "FluxClientMessage and FluxServerMessage", FLUX_PARAMETERS
        )
    )
    async def flux(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The endpoint of the clients of Deepgram Flux."""
        await self._serve_socket(self._enter_flux, scope, receive, send)

    @described(
        Operation(
            "Phone calls of Twilio Media Streams",
            "Sockets",
            {101: {}},
            "A WebSocket with Twilio's messages; the server sends none. The key is the custom parameter `key` of the "
            "stream. A wrong `start`, or one without a key, closes the socket; the reason says what to mend.",
            refusals=({401: ("invalid_signature",), 426: ("upgrade_required",)}, CLOSED_CALLS),
            takes_secrets=True,
        )
    )
    async def twilio(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The endpoint of Twilio Media Streams."""
        await self._serve_socket(self._enter_twilio, scope, receive, send)

    async def _serve_socket(self, enter: _Enter, scope: Scope, receive: Receive, send: Send) -> None:
        websocket = WebSocket(scope, receive, send)
        entered = False
        # Many sockets that open at once are admitted one by one, with turns for open sockets between them.
        await self._fair_turns.wait()
        try:
            async with enter(websocket) as admitted:
                entered = True
                await self._run_socket(admitted, scope, receive, send)
        except (Refusal, ClientFault) as error:
            if entered:
                raise
            if websocket.application_state is WebSocketState.CONNECTING:
                await websocket.send_denial_response(refusal_response(scope["path"], error))
            else:
                await _close_refused(websocket, error)

    async def _run_socket(self, admitted: _AdmittedSocket, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve an admitted socket from the handshake to its end, then detach its sessions."""
        await self._run_line(admitted, *_joined(admitted.entries), (receive, send, _extras(scope)))

    async def serve_call(self, entry: OpenSession, inbox: CallInbox, line: CallLine) -> None:
        """Serve a WebRTC call, whose line is used as a socket that is accepted already."""
        greeting = entry.live.dialect.created(entry.live.session.settings)
        frames = [encode_json(greeting)] if greeting else []
        admitted = _AdmittedSocket((entry,), frames, None, is_call=True)
        await self._run_line(admitted, entry.live, inbox, (line.receive, line.send, line.extras))

    async def _run_line(
        self,
        admitted: _AdmittedSocket,
        live: LiveSession | ChannelGroup,
        inbox: Inbox | ChannelInbox | CallInbox,
        line: tuple[Receive, Send, SocketExtras],
    ) -> None:
        """Serve sessions over `line`: the socket of a client, or that to the process of a WebRTC call."""
        receive, send, _ = line
        if self.sessions.pause_detector is not None:
            line = self.sessions.pause_detector.guard(
                *line, lambda: not any(entry.is_released for entry in admitted.entries)
            )
        connection = Connection(live, inbox, *line, self._fair_turns)
        limits = self.config.limits
        paces = (self._pace(limits.messages_per_second), self._pace(limits.mistakes_per_second))
        try:
            self.sessions.attach(admitted.entries, connection)
            if not admitted.is_call:
                await receive()
                accept = {"type": "websocket.accept", "subprotocol": admitted.subprotocol, "headers": admitted.headers}
                await send(accept)
            hangup = await connection.run(admitted.first_frames, *paces)
            if hangup is not None:
                self.metrics.closed.labels(hangup.cause).inc()
            elif admitted.is_call:
                await _finish(live, inbox)
        except* OSError:
            log.debug("session %s: the client left during the handshake", live.id)
        except* Exception:
            self.metrics.closed.labels("internal").inc()
            log.exception("session %s failed", live.id)
            await connection.close(Hangup(CloseCode.INTERNAL, "internal error", "internal"))
        finally:
            await self.sessions.detach(admitted.entries, connection)

    @staticmethod
    def _pace(per_second: float) -> Pace | None:
        return Pace(per_second, time.monotonic) if per_second else None

    @asynccontextmanager
    async def _enter(self, websocket: WebSocket) -> AsyncIterator[_AdmittedSocket]:
        """Open or resume the session of a socket. Raises Refusal. A new session ends with the block unless it has got
        a socket."""
        query = websocket.query_params
        offered: list[str] = websocket.scope.get("subprotocols", [])
        address = websocket.client.host if websocket.client else ""
        check_once(query, ("model", "resume", "after"))
        if "call_id" in query:
            raise Refusal(
                404,
                "not_found",
                "A call has no socket here ('call_id'); its events come on its data channel.",
                param="call_id",
            )
        caller = self.context.caller(websocket.headers, offered, address)
        selected = select_subprotocol(offered)
        if "resume" in query:
            extras = _extras(websocket.scope)
            entry, missed = await self._resume(query["resume"], query.get("after", "0"), caller, extras)
            yield _AdmittedSocket((entry,), missed, selected)
            return
        beta = asks_for_beta(websocket.headers, offered)
        settings = caller.settings or Settings()
        if "model" in query:
            settings = merge_beta(settings, {"input_audio_transcription": {"model": query["model"][:MAX_NAME]}})
        settings = self._in_force(settings)
        async with self.sessions.open(caller, settings, [BetaDialect if beta else OpenAIDialect]) as entries:
            live = entries[0].live
            greeting = live.dialect.created(live.session.settings)
            yield _AdmittedSocket(entries, [encode_json(greeting)] if greeting else [], selected)

    @asynccontextmanager
    async def _enter_listen(self, websocket: WebSocket) -> AsyncIterator[_AdmittedSocket]:
        """Open the sessions of a Deepgram client, whose options are all in the query. Raises Refusal."""
        offered: list[str] = websocket.scope.get("subprotocols", [])
        query = websocket.query_params
        check_once(query, READ_ONCE)
        caller = self.context.caller(websocket.headers, offered, websocket.client.host if websocket.client else "")
        listening = Listening(read_socket_query(query, query.multi_items()))
        settings = self._in_force(listening.query.settings)
        dialects = [partial(_deepgram, listening, channel) for channel in range(listening.query.channels)]
        header = (b"dg-request-id", listening.request_id.encode())
        async with self.sessions.open(caller, settings, dialects) as entries:
            yield _AdmittedSocket(entries, [], select_subprotocol(offered), [header])

    @asynccontextmanager
    async def _enter_flux(self, websocket: WebSocket) -> AsyncIterator[_AdmittedSocket]:
        """Open the session of a client of Deepgram Flux. Raises Refusal."""
        offered: list[str] = websocket.scope.get("subprotocols", [])
        query = websocket.query_params
        check_once(query, FLUX_READ_ONCE)
        caller = self.context.caller(websocket.headers, offered, websocket.client.host if websocket.client else "")
        settings = self._in_force(read_flux_query(query, query.multi_items()))
        request_id = str(uuid4())
        dialect = partial(FluxDialect, request_id=request_id)
        async with self.sessions.open(caller, settings, [dialect]) as entries:
            greeting = entries[0].live.dialect.created(settings)
            header = (b"dg-request-id", request_id.encode())
            frames = [encode_json(greeting)] if greeting else []
            yield _AdmittedSocket(entries, frames, select_subprotocol(offered), [header])

    @asynccontextmanager
    async def _enter_twilio(self, websocket: WebSocket) -> AsyncIterator[_AdmittedSocket]:
        """Open the sessions of a phone call, one for each track. Raises Refusal.

        Twilio can give a key only in `start`, so the socket is accepted before its client is known. Until then it may
        send two short messages within `server.handshake_s`, and nothing but this socket is held for it.
        """
        offered: list[str] = websocket.scope.get("subprotocols", [])
        address = websocket.client.host if websocket.client else ""
        self.context.check_twilio(websocket.headers, websocket.url.path)
        has_key = offered_key(websocket.headers, offered) is not None
        caller = self.context.caller(websocket.headers, offered, address) if has_key else None
        await websocket.accept(select_subprotocol(offered))
        try:
            start = await self._call_start(websocket)
        except (Refusal, ClientFault):
            self.metrics.refused.labels("start").inc()
            raise
        if caller is None and start.key is None and self.context.authenticator.asks_for_keys:
            self.metrics.refused.labels("auth").inc()
            text = "A key is required: give the stream the custom parameter 'key'."
            raise Refusal(401, "invalid_api_key", text)
        caller = caller or self.context.caller_with(start.key, address)
        settings = self._in_force(start.settings)
        dialects = [partial(TwilioDialect, track=track, tracks=start.tracks) for track in start.tracks]
        async with self.sessions.open(caller, settings, dialects) as entries:
            yield _AdmittedSocket(entries, [], None, is_call=True)

    async def _call_start(self, websocket: WebSocket) -> CallStart:
        """The `start` message of a call. Raises Refusal and ClientFault."""
        try:
            async with asyncio.timeout(self.config.server.handshake_s):
                for _ in range(MESSAGES_TO_START):
                    message = await websocket.receive()
                    if message["type"] != "websocket.receive":
                        raise Refusal(499, "client_gone", "The client left before its call started.")
                    text = message.get("text") or message.get("bytes") or b""
                    if PART in message or len(text) > self.config.limits.control_bytes:
                        raise Refusal(413, "message_too_large", "'start' is too long; send fewer custom parameters.")
                    body = decode_json(text)
                    if body.get("event") == "start":
                        return read_start(body)
                    if body.get("event") != "connected":
                        break
        except TimeoutError:
            raise Refusal(408, "no_start", "No 'start' message came in time.") from None
        raise Refusal(400, "no_start", "The first messages must be 'connected' and 'start', as Twilio sends them.")

    def _in_force(self, asked: Settings) -> Settings:
        """The settings as the model supports them. Raises ClientFault. Without a ready engine they are returned as they
        are, because admission is refused anyway."""
        engine = self.context.engine
        return asked.in_force(engine.spec) if engine.ready else asked

    async def _resume(
        self, token: str, after: str, caller: Caller, extras: SocketExtras
    ) -> tuple[OpenSession, list[str]]:
        if extras.waited_s() > STALE_S:
            self.metrics.refused.labels("left").inc()
            raise Refusal(503, "request_too_old", "The request waited too long; try again.", retry_after_s=1)
        # Checked before `find`, which may take the session from another socket or process.
        try:
            last = whole_number("after", after, 0, MAX_SEQUENCE)
        except ValueError as error:
            text = f"{error} It is the 'seq' of the last event received."
            raise Refusal(400, "invalid_value", text, param="after") from None
        entry = await self.sessions.find(token, caller, extras.has_closed)
        missed = entry.live.frames_after(last)
        if missed is None:
            raise Refusal(
                410,
                "resume_too_late",
                "The events after this one are not kept any more; start a new session.",
                param="after",
            )
        self.metrics.resumed.inc()
        entry.inbox.reconnected()
        entry.inbox.may_inject = entry.inbox.may_inject and not caller.is_secret
        entry.live.publication.may_change = entry.live.webhooks.may_change = not caller.is_secret
        return entry, [entry.live.greeting_again(), *missed]

    def reloaded(self) -> None:
        """Apply a configuration that was read again."""
        self.context.authenticator.use_keys(key.reveal() for key in self.config.auth.keys)
        if self.streams is not None:
            self.streams.end_without_key()
        if self.webhooks is not None:
            self.webhooks.reloaded()

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        # Use a thread and a file once now: their libraries load much code at first use, which would block all clients.
        await asyncio.to_thread(bool)
        async with await open_file(os.devnull):
            pass
        if self.webhooks is not None:
            await self.webhooks.start()
        if self.streams is not None:
            await self.streams.open()
        tickers = [asyncio.create_task(self.sessions.run_ticker(), name="ticker")]
        if self.audience is not None:
            tickers.append(asyncio.create_task(self.audience.run(), name="viewers"))
        try:
            yield
        finally:
            if self.streams is not None:
                await self.streams.close()
            await self.sessions.drain(0.0)
            if self.calls is not None:
                await self.calls.close()
            if self.webhooks is not None:
                await self.webhooks.close(0.0)
            for ticker in tickers:
                ticker.cancel()
            await asyncio.gather(*tickers, return_exceptions=True)


def check_once(query: QueryParams, names: tuple[str, ...]) -> None:
    """Raise Refusal for a repeated parameter, because one of its values would be ignored silently."""
    for name in names:
        if len(query.getlist(name)) > 1:
            raise Refusal(
                400, "invalid_query_parameter", f"'{name}' was sent more than once; send it once.", param=name
            )


def _extras(scope: Scope) -> SocketExtras:
    return scope.get("extensions", {}).get(EXTENSION) or SocketExtras()


def _deepgram(listening: Listening, channel: int, facts: SessionFacts) -> DeepgramDialect:
    return DeepgramDialect(facts, listening, channel)


async def _finish(live: LiveSession | ChannelGroup, inbox: Inbox | ChannelInbox | CallInbox) -> None:
    """Wait for the last words of a client that has left; viewers get them."""
    with suppress(TimeoutError):
        async with asyncio.timeout(FINISH_S):
            await inbox.end(lambda: False)
            while not isinstance(await live.next_frames(), Hangup):
                pass


async def _close_refused(websocket: WebSocket, error: Refusal | ClientFault) -> None:
    """Close a socket that was accepted before it could be refused. The reason is the sentence of the refusal."""
    if websocket.client_state is WebSocketState.DISCONNECTED:
        return
    log.warning("%s: refused after the upgrade: %s", websocket.url.path, error.message)
    later = isinstance(error, Refusal) and error.status in (429, 503)
    reason = error.message.encode()[:REASON_BYTES].decode(errors="ignore")
    closing = websocket.close(CloseCode.TRY_LATER if later else CloseCode.POLICY, reason)
    try:
        await asyncio.wait_for(closing, CLOSE_GRACE_S)
    except TimeoutError:
        _extras(websocket.scope).abort()
    except (OSError, RuntimeError):
        log.debug("%s: the client left before it was refused", websocket.url.path)


def _joined(entries: tuple[OpenSession, ...]) -> tuple[LiveSession | ChannelGroup, Inbox | ChannelInbox]:
    """The session and inbox of a connection; for several channels, their groups."""
    first = entries[0]
    if len(entries) == 1:
        return first.live, first.inbox
    audio_format = first.live.session.settings.format
    inboxes = [entry.inbox for entry in entries]
    inbox = ChannelInbox(inboxes, SAMPLE_BYTES[audio_format.type], interleaved=audio_format.binary)
    return ChannelGroup([entry.live for entry in entries]), inbox


def refusal_response(path: str, error: Refusal | ClientFault) -> Response:
    """A refusal as an HTTP response, in the format that clients of this path expect."""
    if isinstance(error, ClientFault):
        error = Refusal(400, error.code, error.message, error.param)
    if path not in (LISTEN, FLUX):
        return JSONResponse(error.body(), error.status, error.headers())
    request_id = str(uuid4())
    headers = {"dg-request-id": request_id, "dg-error": header_text(error.message)}
    return JSONResponse(error_body(error, request_id), error.status, error.headers() | headers)
