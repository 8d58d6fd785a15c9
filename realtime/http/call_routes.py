"""The HTTP routes of WebRTC calls: WHIP (RFC 9725), and the calls of OpenAI's Realtime API.

They read a client's SDP offer and settings, answer with the server's SDP, and end calls. The calls themselves are in
`realtime/serving/webrtc_calls.py`.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from realtime.dialects.base import decode_body, encode_json
from realtime.dialects.event_schema import SessionOptions, Shape
from realtime.dialects.openai import MAX_NAME, merge_beta, merge_ga
from realtime.errors import Refusal
from realtime.http.authentication import Context
from realtime.http.info_routes import MAX_JSON_BODY, read_body
from realtime.http.openapi import JSON, Operation, Parameter, described
from realtime.http.upload_forms import FormParser
from realtime.http.websocket_routes import check_once, refusal_response
from realtime.serving.media_processes import MAX_OFFER_BYTES
from realtime.serving.quota import Caller
from realtime.serving.webrtc_calls import Call, Calls
from realtime.session.settings import Settings

WHIP = "/v1/whip"
SDP, FORM = "application/sdp", "multipart/form-data"
# A form is parsed in pieces of this size in bytes; between them the event loop runs.
PIECE_BYTES = 8 * 1024

Description = Annotated[str, Meta(description="A session description, SDP.")]


class CallForm(Struct):
    sdp: Description
    session: Annotated[SessionOptions | None, Meta(description="The settings of the session, as JSON.")] = None


class EndedCall(Shape):
    id: str
    object: Literal["realtime.call"]
    ended: bool


TAG = "WebRTC calls"
MODEL = Parameter("model", "Any name means the served model.")
BEGIN = {
    400: ("invalid_offer", "invalid_form", "invalid_json", "invalid_value", "invalid_query_parameter"),
    403: ("calls_off", "publish_not_allowed", "publishing_off", "webhook_not_allowed", "webhooks_off"),
    409: ("name_taken",),
    413: ("body_too_large",),
    415: ("unsupported_media_type",),
    429: ("too_many_sessions", "rate_limit_exceeded", "too_many_webhooks"),
    501: ("webrtc_not_installed",),
    503: ("engine_not_ready", "server_shutting_down", "too_many_calls", "call_failed", "no_udp_port", "no_address"),
}
UNKNOWN = {404: ("call_not_found",)}


class CallRoutes:
    """Answers offers, and ends calls."""

    def __init__(self, context: Context, calls: Calls) -> None:
        self._context = context
        self._calls = calls

    @described(
        Operation(
            "Publish audio by WebRTC and read its events on a data channel (WHIP)",
            TAG,
            {201: {SDP: Description}},
            "`Location` is the call; DELETE ends it. The events are those of the OpenAI socket.",
            body={SDP: Description},
            parameters=(MODEL,),
            refusals=(BEGIN,),
            takes_secrets=True,
        )
    )
    async def whip(self, request: Request) -> Response:
        caller = self._caller(request)
        _expect(request, SDP)
        return await self._begin(request, caller, await self._offer(request), None)

    @described(
        Operation(
            "The same for clients of OpenAI's Realtime API",
            TAG,
            {201: {SDP: Description}},
            "`Location` is the call. An API key may send the session's settings in a form.",
            body={SDP: Description, FORM: CallForm},
            parameters=(MODEL,),
            refusals=(BEGIN,),
            takes_secrets=True,
        )
    )
    async def create(self, request: Request) -> Response:
        caller = self._caller(request)
        if _expect(request, SDP, FORM) == SDP:
            return await self._begin(request, caller, await self._offer(request), None)
        offer, session = await _form(request)
        return await self._begin(request, caller, offer, session)

    @described(Operation("End a call", TAG, {200: {JSON: EndedCall}}, refusals=(UNKNOWN,), takes_secrets=True))
    async def end(self, request: Request) -> Response:
        call = self._find(request)
        await self._calls.end(call)
        return Response(encode_json({"id": call.id, "object": "realtime.call", "ended": True}), media_type=JSON)

    @described(
        Operation(
            "Not served: trickled candidates",
            TAG,
            {},
            "The server needs no candidates of clients; clients go on without them.",
            refusals=(UNKNOWN, {405: ("trickle_not_needed",)}),
            takes_secrets=True,
        )
    )
    async def trickle(self, request: Request) -> Response:
        """Refuse with 405, as RFC 9725 requires of a server without trickle ICE and ICE restarts."""
        self._find(request)
        text = "Candidates are not taken: the server answers from wherever the client checks; there is no ICE restart."
        response = refusal_response(request.url.path, Refusal(405, "trickle_not_needed", text))
        response.headers["Allow"] = "DELETE"
        return response

    async def _begin(self, request: Request, caller: Caller, offer: str, session: str | None) -> Response:
        check_once(request.query_params, ("model",))
        settings = self._settings(caller, session, request.query_params.get("model"))
        server = request.scope.get("server")
        call_id, answer = await self._calls.begin(caller, settings, offer, server[0] if server else None)
        place = f"{request.url.path.rstrip('/')}/{call_id}"
        return Response(answer, 201, {"Location": place}, media_type=SDP)

    def _settings(self, caller: Caller, session: str | None, model: str | None) -> Settings:
        """The settings of a call. A client secret brings its own; further ones change these, as on a socket."""
        settings = caller.settings or Settings()
        if model is not None:
            settings = merge_beta(settings, {"input_audio_transcription": {"model": model[:MAX_NAME]}})
        if session is not None:
            settings = merge_ga(settings, decode_body(session.encode()))
        engine = self._context.engine
        return settings.in_force(engine.spec) if engine.ready else settings

    async def _offer(self, request: Request) -> str:
        return _text(await read_body(request, MAX_OFFER_BYTES))

    def _caller(self, request: Request) -> Caller:
        """The caller, also one with a client secret. Raises Refusal."""
        return self._context.caller(request.headers, [], request.client.host if request.client else "")

    def _find(self, request: Request) -> Call:
        return self._calls.find(request.path_params["id"], self._caller(request))


def _expect(request: Request, *kinds: str) -> str:
    """The media type of the body. Raises Refusal if it is none of these."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in kinds:
        text = f"Send the offer as {' or '.join(kinds)}."
        raise Refusal(415, "unsupported_media_type", text, param="content-type")
    return kind


def _text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError:
        raise Refusal(400, "invalid_offer", "The offer is not UTF-8.", param="sdp") from None


async def _form(request: Request) -> tuple[str, str | None]:
    """The offer and the settings of a form. Raises Refusal."""
    body = await read_body(request, MAX_OFFER_BYTES + MAX_JSON_BODY)
    parser = FormParser(request.headers.get("content-type", ""), lambda size, is_reference: None)
    try:
        for start in range(0, len(body), PIECE_BYTES):
            parser.feed(body[start : start + PIECE_BYTES])
            await asyncio.sleep(0)
        parser.finish()
    finally:
        parser.close()
    offers = parser.form.texts("sdp", MAX_OFFER_BYTES)
    sessions = parser.form.texts("session", MAX_JSON_BODY)
    if len(offers) != 1 or len(sessions) > 1:
        raise Refusal(400, "invalid_form", "The form needs one text 'sdp', and may have one 'session'.", param="sdp")
    return offers[0], sessions[0] if sessions else None
