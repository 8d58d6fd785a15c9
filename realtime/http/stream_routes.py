"""The routes of streams that the server pulls (`/v1/streams`): create, list, read, delete, and follow their events.

They check requests and write server-sent events; the streams themselves are in `realtime/serving/pulled_streams.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from realtime.dialects.base import decode_body, encode_json
from realtime.dialects.event_schema import Shape
from realtime.errors import Refusal
from realtime.http.authentication import Context
from realtime.http.info_routes import MAX_JSON_BODY, read_body
from realtime.http.openapi import EVENTS, JSON, JSON_BODY, Operation, Parameter, described
from realtime.serving.pulled_streams import PulledStream, PulledStreams, stream_settings
from realtime.serving.quota import Caller
from realtime.text_values import whole_number

STREAMS = "/v1/streams"
# Readers of one stream at once.
MAX_READERS = 100
MAX_EVENT_NUMBER = 10**15
# Events in one write, and their bytes; a larger event is written alone.
EVENTS_AT_ONCE = 64
MAX_WRITE_BYTES = 64 * 1024
# Seconds between comments that keep a connection without events open, and between checks whether the server stops.
KEEPALIVE_S, POLL_S = 15.0, 1.0
FIELDS = ("url", "language")


class StreamRequest(Struct):
    url: str
    language: str | None = None


class Stream(Shape):
    """A stream that the server pulls."""

    id: str
    object: Literal["stream"]
    url: str
    created_at: int
    status: Literal["connecting", "live", "waiting", "ended", "failed"]
    message: str | None
    seconds: float
    missing_seconds: float
    last_event: int


class StreamList(Shape):
    object: Literal["list"]
    data: list[Stream]


class DeletedStream(Shape):
    id: str
    object: Literal["stream"]
    deleted: bool


PULLED = "Streams that the server pulls"
OFF = {403: ("streams_not_allowed",)}
UNKNOWN = {404: ("stream_not_found",)}
EventNumber = Annotated[int, Meta(ge=0, le=MAX_EVENT_NUMBER)]
StreamEvents = Annotated[str, Meta(description="The data of each event is a PulledStreamEvent of /events.schema.json.")]


class _EventResponse(StreamingResponse):
    """The events of a stream for one reader, which is counted from here to the end of the response, also if the reader
    leaves before the first event."""

    def __init__(self, stream: PulledStream, events: AsyncIterator[bytes], **options: Any) -> None:
        super().__init__(events, **options)
        self._stream = stream
        stream.readers += 1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stream.readers -= 1


class StreamRoutes:
    """Answers requests about pulled streams. Off unless `server.stream_hosts` lists a host."""

    def __init__(self, context: Context, streams: PulledStreams) -> None:
        self._context = context
        self._streams = streams

    @described(
        Operation(
            "Pull a stream and transcribe it",
            PULLED,
            {201: {JSON: Stream}},
            body={JSON: StreamRequest},
            refusals=(JSON_BODY, OFF, {400: ("host_not_allowed",), 429: ("too_many_streams",)}),
        )
    )
    async def create(self, request: Request) -> Response:
        caller = self._caller(request)
        body = decode_body(await read_body(request, MAX_JSON_BODY))
        for name in body:
            if name not in FIELDS:
                text = f"'{name[:100]}' is not known; send {' and '.join(map(repr, FIELDS))}."
                raise Refusal(400, "invalid_value", text, param=name[:100])
        url, language = body.get("url"), body.get("language")
        if not isinstance(url, str) or not (language is None or isinstance(language, str)):
            raise Refusal(400, "invalid_value", "'url' must be a string, and 'language' too.", param="url")
        asked, engine = stream_settings(language), self._context.engine
        stream = self._streams.begin(url, caller, asked.in_force(engine.spec) if engine.ready else asked)
        return _json(stream.to_json(), 201)

    @described(Operation("The streams of the key", PULLED, {200: {JSON: StreamList}}, refusals=(OFF,)))
    async def all(self, request: Request) -> Response:
        caller = self._caller(request)
        return _json({"object": "list", "data": [stream.to_json() for stream in self._streams.of(caller)]})

    @described(Operation("One stream", PULLED, {200: {JSON: Stream}}, refusals=(OFF, UNKNOWN)))
    async def one(self, request: Request) -> Response:
        return _json(self._find(request).to_json())

    @described(Operation("End a stream", PULLED, {200: {JSON: DeletedStream}}, refusals=(OFF, UNKNOWN)))
    async def delete(self, request: Request) -> Response:
        stream = self._find(request)
        await self._streams.delete(stream)
        return _json({"id": stream.id, "object": "stream", "deleted": True})

    @described(
        Operation(
            "The events of a stream",
            PULLED,
            {200: {EVENTS: StreamEvents}},
            parameters=(
                Parameter("after", "Continue after this event.", EventNumber),
                Parameter("Last-Event-ID", "The same, as browsers send it.", EventNumber, "header"),
            ),
            refusals=(OFF, UNKNOWN, {400: ("invalid_value",), 503: ("too_many_readers",)}),
        )
    )
    async def events(self, request: Request) -> Response:
        """The kept events after `Last-Event-ID` (or `after`), then new ones as they come."""
        stream = self._find(request)
        given = request.headers.get("last-event-id") or request.query_params.get("after") or "0"
        try:
            after = whole_number("after", given, 0, MAX_EVENT_NUMBER)
        except ValueError as error:
            raise Refusal(400, "invalid_value", str(error), param="after") from None
        if stream.readers >= MAX_READERS:
            text = f"A stream has at most {MAX_READERS} readers at once."
            raise Refusal(503, "too_many_readers", text, retry_after_s=10)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return _EventResponse(
            stream, self._event_stream(stream, after), media_type="text/event-stream", headers=headers
        )

    async def _event_stream(self, stream: PulledStream, after: int) -> AsyncIterator[bytes]:
        log, clock = stream.events, asyncio.get_running_loop().time
        yield b": events of a stream\n\n"
        written_at = clock()
        while not self._context.draining:
            # No await between these two: an event that comes later wakes the wait below.
            found = log.after(after, EVENTS_AT_ONCE)
            if not found and log.is_closed:
                return
            if found:
                after, write = _write_of(found)
                written_at = clock()
                yield write
                continue
            if clock() - written_at >= KEEPALIVE_S:
                written_at = clock()
                yield b": quiet\n\n"
            await log.wait(POLL_S)

    def _find(self, request: Request) -> PulledStream:
        return self._streams.find(request.path_params["id"], self._caller(request))

    def _caller(self, request: Request) -> Caller:
        """The caller. Raises Refusal if there is none, or streams are off."""
        caller = self._context.caller_of(request)
        if not self._context.config.server.stream_hosts:
            text = "This server pulls no streams; its operator can allow hosts with server.stream_hosts."
            raise Refusal(403, "streams_not_allowed", text)
        if not self._streams.is_alone:
            text = "Streams need a server with one gateway process (server.workers = 1, and no fleet)."
            raise Refusal(403, "streams_not_allowed", text)
        return caller


def _write_of(events: list[tuple[int, str]]) -> tuple[int, bytes]:
    """The number of the last event that one write has room for, and the write."""
    last, write = 0, b""
    for number, frame in events:
        event = f"id: {number}\ndata: {frame}\n\n".encode()
        if write and len(write) + len(event) > MAX_WRITE_BYTES:
            break
        last, write = number, write + event
    return last, write


def _json(body: dict[str, object], status: int = 200) -> Response:
    return Response(encode_json(body), status, media_type="application/json")
