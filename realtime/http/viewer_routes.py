"""The routes of published sessions: words as server-sent events, on a read-only socket, as HLS captions; viewer links.

They admit viewers: one needs the key of the session's owner or a viewer link; on a server without keys every client may
read what is published. `realtime/serving/viewers.py` writes the words to admitted viewers, and
`realtime/serving/signed_tokens.py` makes the links.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Iterator
from typing import Annotated, Any
from urllib.parse import quote

import msgspec
from msgspec import Meta, Struct
from starlette.datastructures import Headers, QueryParams
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket

from realtime.dialects.event_schema import PublishedName, Shape
from realtime.errors import ClientFault, CloseCode, Refusal
from realtime.http.authentication import Context, offered_key, select_subprotocol
from realtime.http.info_routes import json_body
from realtime.http.openapi import EVENTS, JSON, JSON_BODY, Codes, Operation, Parameter, described
from realtime.http.websocket_routes import check_once, refusal_response
from realtime.serving.publishing import Key, Publisher, owner_of
from realtime.serving.quota import places_of_one_key
from realtime.serving.signed_tokens import DEFAULT_LINK_S, LINK_PREFIX, MAX_LINK_S, MIN_LINK_S, Link, ViewerLinks
from realtime.serving.socket_extras import EXTENSION, SocketExtras, ViewerLine
from realtime.serving.viewers import RESTARTING, Audience, CaptionSegments, Framing, Message, Viewer
from realtime.session.settings import NAME_RULE, PUBLISHED_NAME

log = logging.getLogger("tickertape.viewers")

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    # For nginx, which otherwise collects a response before it passes it on.
    (b"x-accel-buffering", b"no"),
]
# Seconds in which a viewer must read the end of its stream; then its connection is aborted.
CLOSE_GRACE_S = 5.0
SEGMENT_NUMBER = re.compile("[0-9]{1,12}")
READ_ONLY = "this socket is read-only"


class LinkLifetime(Struct):
    seconds: Annotated[int, Meta(ge=MIN_LINK_S, le=MAX_LINK_S)] = DEFAULT_LINK_S


class LinkRequest(Struct):
    expires_after: LinkLifetime | None = None


class ViewerLink(Shape):
    """A link for the viewers of a published session, and the addresses that it opens."""

    id: str
    name: str
    token: str
    expires_at: int
    watch: str
    events: str
    captions: str


class RevokedLinks(Shape):
    name: str
    revoked: Annotated[str, Meta(description="The id of a link, or `all`.")]


PUBLISHED = "Published sessions"
NAME = Parameter("name", "The name of the session.", PublishedName, "path")
READING = (NAME, Parameter("token", "A viewer link, instead of a key."))
OFF: Codes = {400: ("invalid_value",), 403: ("publishing_off",)}
REFUSED_VIEWERS: tuple[Codes, ...] = (
    OFF,
    {400: ("invalid_query_parameter",), 401: ("viewer_link_invalid",), 503: ("too_many_viewers",)},
)
ViewerEvents = Annotated[str, Meta(description="The data of each event is a ViewerEvent of /events.schema.json.")]


class ViewerRoutes:
    """The endpoints for viewers, and for owners who make and revoke links."""

    def __init__(self, context: Context, audience: Audience, publisher: Publisher, links: ViewerLinks) -> None:
        self._context = context
        self._audience = audience
        self._publisher = publisher
        self._links = links

    @described(
        Operation(
            "The words of a published session",
            PUBLISHED,
            {101: {}, 200: {EVENTS: ViewerEvents}},
            "With an upgrade a read-only WebSocket, without one server-sent events; the events are the same.",
            parameters=READING,
            refusals=(*REFUSED_VIEWERS, {501: ("not_supported",)}),
        )
    )
    async def stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The words as server-sent events, until the viewer leaves or may not read any more."""
        with self._admitted(Request(scope, receive)) as (key, link):
            await self._stream(scope, receive, send, key, link)

    async def _stream(self, scope: Scope, receive: Receive, send: Send, key: Key, link: Link | None) -> None:
        line = _line(scope)
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        if scope["method"] == "HEAD":
            await send({"type": "http.response.body"})
            return
        framing = Framing.PLAIN if scope["http_version"] == "1.0" else Framing.CHUNKED
        reason = await self._view(Viewer(framing, line.write, line.abort, self._allows(key, link)), key, receive)
        if reason:
            line.write(Message(0, {"type": "closed", "reason": reason}).frame(framing))
            await self._end(send({"type": "http.response.body"}), line)

    async def socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The words on a socket that takes no messages."""
        websocket = WebSocket(scope, receive, send)
        try:
            with self._admitted(websocket) as (key, link):
                await self._socket(scope, receive, send, key, link)
        except (Refusal, ClientFault) as error:
            await websocket.send_denial_response(refusal_response(scope["path"], error))

    async def _socket(self, scope: Scope, receive: Receive, send: Send, key: Key, link: Link | None) -> None:
        line = _line(scope)
        await receive()
        try:
            await send({"type": "websocket.accept", "subprotocol": select_subprotocol(scope.get("subprotocols", []))})
        except OSError:
            return  # the viewer left during the handshake
        viewer = Viewer(Framing.SOCKET, line.write, line.abort, self._allows(key, link))
        reason = await self._view(viewer, key, receive)
        if reason:
            code = CloseCode.RESTART if reason == RESTARTING else CloseCode.POLICY
            await self._end(send({"type": "websocket.close", "code": int(code), "reason": reason}), line)

    async def _view(self, viewer: Viewer, key: Key, receive: Receive) -> str:
        """Serve a viewer. Returns why the server ends the connection; empty if the viewer left."""
        channel = self._audience.join(key, viewer)
        listening = asyncio.create_task(_until_gone(receive, viewer))
        try:
            await asyncio.wait((listening, viewer.closed), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._audience.leave(channel, viewer)
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
        return viewer.closed.result() if viewer.closed.done() else ""

    async def _end(self, ending: Any, line: ViewerLine) -> None:
        try:
            await asyncio.wait_for(ending, CLOSE_GRACE_S)
        except TimeoutError:
            line.abort()
        except OSError:
            pass  # the viewer is gone

    # Captions for HLS players

    @described(
        Operation(
            "The playlist of WebVTT segments, for HLS",
            PUBLISHED,
            {200: {"application/vnd.apple.mpegurl": str}},
            parameters=READING,
            refusals=REFUSED_VIEWERS,
        )
    )
    async def playlist(self, request: Request) -> Response:
        """The playlist of WebVTT segments."""
        segments = self._segments(request)
        token = request.query_params.get("token")
        query = "" if token is None else f"?token={quote(token, safe='')}"
        text = segments.playlist(time.time(), query)
        return Response(text, media_type="application/vnd.apple.mpegurl", headers={"Cache-Control": "no-store"})

    @described(
        Operation(
            "A WebVTT segment",
            PUBLISHED,
            {200: {"text/vtt": str}},
            parameters=READING,
            refusals=(*REFUSED_VIEWERS, {404: ("segment_unknown",)}),
        )
    )
    async def segment(self, request: Request) -> Response:
        segments = self._segments(request)
        number = SEGMENT_NUMBER.fullmatch(request.path_params["number"])
        text = None if number is None else segments.segment(int(number[0]), time.time())
        if text is None:
            raise Refusal(404, "segment_unknown", "This segment is not in the playlist.")
        return Response(text, media_type="text/vtt", headers={"Cache-Control": "no-store"})

    def _segments(self, request: Request) -> CaptionSegments:
        """The captions of a name; from the first request on they are made. Raises Refusal."""
        key, _ = self._reads(request)
        if key not in self._audience.channels:
            self._check_place(key[0])
        return self._audience.captions(key)

    # Who may read

    @contextlib.contextmanager
    def _admitted(self, connection: HTTPConnection) -> Iterator[tuple[Key, Link | None]]:
        """A place for a viewer: the name that it reads, with its owner, and the link it came with. Raises Refusal."""
        (owner, name), link = self._reads(connection)
        self._check_place(owner)
        with self._audience.place(owner):
            yield (owner, name), link

    def _check_place(self, owner: str) -> None:
        """Raises Refusal if the server, or the owner of the session, has as many viewers as it may have."""
        config = self._context.config
        most = config.limits.viewers
        share = places_of_one_key(most, len(config.auth.keys))
        if self._audience.is_closing or not self._audience.has_place(owner, most, share):
            self._context.metrics.refused.labels("viewers").inc()
            text = "The server has no room for more viewers; try again."
            raise Refusal(503, "too_many_viewers", text, retry_after_s=10, kind="server_error")

    def _reads(self, connection: HTTPConnection) -> tuple[Key, Link | None]:
        self._check_on()
        name = _name(connection)
        token = _token(connection.query_params, connection.headers, connection.scope)
        if token is None or not token.startswith(LINK_PREFIX):
            return (self._owner(connection), name), None
        link = self._links.read(token, name)
        if link is None:
            self._context.metrics.refused.labels("auth").inc()
            text = "The viewer link is not valid: it has expired, was revoked, or belongs to another name or server."
            raise Refusal(401, "viewer_link_invalid", text)
        return (link.owner, name), link

    def _allows(self, key: Key, link: Link | None) -> Any:
        if link is None:
            # The key with which the viewer came may be removed while it reads.
            return lambda: self._context.authenticator.vouches_for(key[0])
        return lambda: self._links.is_valid(link, key[1])

    def _owner(self, connection: HTTPConnection) -> str:
        """The owner whose sessions a caller with a key may read. Raises Refusal."""
        address = connection.client.host if connection.client else ""
        caller = self._context.caller(connection.headers, connection.scope.get("subprotocols", []), address)
        if caller.is_secret:
            self._context.metrics.refused.labels("auth").inc()
            text = "A client secret opens realtime sockets only; use a viewer link to read a published session."
            raise Refusal(403, "client_secret_not_allowed", text)
        return owner_of(caller.name)

    def _check_on(self) -> None:
        if not self._context.limits.viewers:
            text = "Publishing is off on this server; its operator can set limits.viewers."
            raise Refusal(403, "publishing_off", text)

    # Links

    @described(
        Operation(
            "Make a link for viewers",
            PUBLISHED,
            {200: {JSON: ViewerLink}},
            body={JSON: LinkRequest},
            body_required=False,
            parameters=(NAME,),
            refusals=(OFF, JSON_BODY),
        )
    )
    async def make_link(self, request: Request) -> Response:
        """Make a link for viewers. The name need not be published yet."""
        self._check_on()
        name, owner = _name(request), self._owner(request)
        seconds = _link_seconds((await json_body(request)).get("expires_after"))
        token, link = self._links.make(owner, name, seconds)
        made = ViewerLink(
            id=link.id,
            name=name,
            token=token,
            expires_at=link.expires_at,
            # The part after '#' is not sent to servers and proxies.
            watch=f"/watch/{name}#{token}",
            events=f"/v1/sessions/{name}/events?token={token}",
            captions=f"/v1/sessions/{name}/captions.m3u8?token={token}",
        )
        return JSONResponse(msgspec.to_builtins(made))

    @described(
        Operation("Revoke all links", PUBLISHED, {200: {JSON: RevokedLinks}}, parameters=(NAME,), refusals=(OFF,))
    )
    async def revoke_links(self, request: Request) -> Response:
        """Revoke all links of a name that were made so far."""
        return self._revoke(request, None)

    @described(
        Operation(
            "Revoke a link",
            PUBLISHED,
            {200: {JSON: RevokedLinks}},
            parameters=(NAME,),
            refusals=(OFF, {404: ("link_unknown",)}),
        )
    )
    async def revoke_link(self, request: Request) -> Response:
        return self._revoke(request, request.path_params["link"])

    def _revoke(self, request: Request, link_id: str | None) -> Response:
        self._check_on()
        name, owner = _name(request), self._owner(request)
        revocation = self._links.revocation(owner, name, link_id)
        if revocation is None:
            raise Refusal(404, "link_unknown", "This is not the id of a viewer link.", param="link")
        self._publisher.revoke(revocation)
        return JSONResponse({"name": name, "revoked": link_id or "all"})


def _name(connection: HTTPConnection) -> str:
    name: str = connection.path_params["name"]
    if not PUBLISHED_NAME.fullmatch(name):
        raise Refusal(400, "invalid_value", NAME_RULE, param="name")
    return name


def _token(query: QueryParams, headers: Headers, scope: Scope) -> str | None:
    check_once(query, ("token",))
    return query.get("token") or offered_key(headers, scope.get("subprotocols", []))


def _line(scope: Scope) -> ViewerLine:
    extras: SocketExtras | None = scope.get("extensions", {}).get(EXTENSION)
    if extras is None or extras.as_viewer is None:
        raise Refusal(501, "not_supported", "This server cannot serve viewers.", kind="server_error")
    return extras.as_viewer()


async def _until_gone(receive: Receive, viewer: Viewer) -> None:
    """Wait until the viewer leaves, or sends a message on a socket."""
    with contextlib.suppress(OSError):
        while True:
            message = await receive()
            if message["type"] == "websocket.receive":
                viewer.close(READ_ONLY)
            if message["type"] != "http.request":
                return


def _link_seconds(expires_after: Any) -> int:
    if expires_after is None:
        return DEFAULT_LINK_S
    seconds = expires_after.get("seconds", DEFAULT_LINK_S) if isinstance(expires_after, dict) else None
    if isinstance(seconds, bool) or not isinstance(seconds, int) or not MIN_LINK_S <= seconds <= MAX_LINK_S:
        text = f"'expires_after.seconds' must be between {MIN_LINK_S} and {MAX_LINK_S}."
        raise Refusal(400, "invalid_value", text, param="expires_after.seconds")
    return seconds
