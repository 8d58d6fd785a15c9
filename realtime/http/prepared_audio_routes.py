"""Routes for prepared audio: `render` cuts a file into items without transcribing it, `inject` puts items into caches.

An item is audio for some positions of the model, with its hash. Items that were rendered on one server can be injected
at another: they go into the caches of its engines, and the gateway then sends hashes instead of audio for streams with
the same audio. The routes are off unless `server.inject` is set; they own no state.

`items_of` parses the items of a request in pieces: the JSON decoder keeps the interpreter's lock, so a long body is cut
between its items, and the event loop runs in between.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Annotated, Any, BinaryIO, Literal

import numpy as np
from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from engine.client.link import ItemRefused
from engine.client.prepared_audio import Rendered, parse_items
from engine.messages import Item
from realtime.dialects.base import decode_body, encode_json
from realtime.dialects.event_schema import Shape
from realtime.errors import Refusal
from realtime.http.authentication import Context
from realtime.http.file_transcription import decoded
from realtime.http.long_responses import Entries, PiecesResponse, json_pieces
from realtime.http.openapi import JSON, UPLOADED, Operation, Parameter, described
from realtime.http.upload_forms import FormReader, Upload
from realtime.session.events import Samples

# Longest audio in one request.
MAX_RENDER_SECONDS = 600
# Memory of all render requests together, from the first sample until the response is sent.
MAX_RENDERED_BYTES = 128 * 1024 * 1024


class FileForm(Struct):
    file: Annotated[str, Meta(extra_json_schema={"contentMediaType": "application/octet-stream"})]


class PreparedItem(Shape):
    """Audio for some positions of the model, cut and hashed."""

    offset: int
    length: int
    sample: int | None
    bytes: int
    cached: bool
    hash: str | UnsetType = UNSET
    samples: Annotated[int, Meta(description="Of silence, which needs no data.")] | UnsetType = UNSET
    mask: list[bool] | UnsetType = UNSET
    data: Annotated[str, Meta(description="Base64 of float32, of this shape.")] | UnsetType = UNSET
    shape: list[int] | UnsetType = UNSET


class Cost(Shape):
    bytes_to_send: int
    positions_to_encode: int
    positions_to_decode: int


class RenderedAudio(Shape):
    model: str
    samples: int
    positions: int
    payload_bytes: int
    cost: Cost
    items: list[PreparedItem]


class ItemsToInject(Struct):
    items: Annotated[list[dict[str, Any] | None], Meta(description="Items of `render`.")]


class InjectedItems(Shape):
    injected: int


PREPARED = "Prepared audio"


class PrepareRoutes:
    """`POST /v1/audio/render` and `POST /v1/audio/inject`."""

    def __init__(self, context: Context, forms: FormReader) -> None:
        self._context = context
        self._forms = forms
        # The processor has one cache, so only one request at a time uses it (on a thread).
        self._one_at_a_time = asyncio.Lock()
        # Memory of all render requests, and of all inject bodies.
        self.rendered_bytes = 0
        self._inject_bytes = 0

    @described(
        Operation(
            "Cut a file into items without transcribing it",
            PREPARED,
            {200: {JSON: RenderedAudio}},
            body={"multipart/form-data": FileForm},
            parameters=(Parameter("data", "`false` leaves out the data of the items.", Literal["true", "false"]),),
            refusals=(UPLOADED, {403: ("render_not_allowed",), 413: ("audio_too_long",), 503: ("render_busy",)}),
        )
    )
    async def render(self, request: Request) -> Response:
        """Answer with the items of a file: positions, hashes, what is cached, and the cost of a transcription.
        `?data=false` leaves out the data of the items."""
        caller = self._context.caller_of(request)
        self._check_allowed("Rendering is not enabled", "render_not_allowed")
        with_data = request.query_params.get("data") != "false"
        upload = await self._forms.open(request, caller)
        held = _Held(self)
        try:
            samples = await self._decode(upload.file, held)
            await upload.release_file()
            async with self._one_at_a_time:
                rendered, summary = await asyncio.to_thread(self._rendered, samples)
        except BaseException:
            await held.end(upload)
            raise
        pieces = json_pieces(summary | {"items": Entries(rendered.entries(with_data))})
        return PiecesResponse(pieces, "application/json", partial(held.end, upload))

    def _rendered(self, samples: Samples) -> tuple[Rendered, dict[str, Any]]:
        rendered = self._context.engine.render(samples)
        return rendered, rendered.summary()

    def _check_allowed(self, what: str, code: str) -> None:
        if not self._context.config.server.inject:
            raise Refusal(403, code, f"{what}; the server's operator can enable it with server.inject.")

    async def _decode(self, file: BinaryIO, held: _Held) -> Samples:
        """The samples of the whole file at the model's rate. Raises Refusal."""
        spec = self._context.engine.spec
        # Copies of each sample in memory: the blocks, the joined array, and the items, which overlap.
        copies = 2 + (spec.look_back_samples + spec.look_ahead_samples) / spec.samples_per_position
        blocks: list[Samples] = []
        samples = 0
        async with aclosing(decoded(file)) as steps:
            async for block in steps:
                samples += len(block)
                if samples > MAX_RENDER_SECONDS * spec.sample_rate:
                    text = f"At most {MAX_RENDER_SECONDS} seconds can be rendered at once; split the audio."
                    raise Refusal(413, "audio_too_long", text, param="file")
                held.add(round(copies * block.nbytes))
                blocks.append(block)
        return np.concatenate(blocks)

    @described(
        Operation(
            "Put items into the caches of the engines",
            PREPARED,
            {200: {JSON: InjectedItems}},
            body={JSON: ItemsToInject},
            refusals=(
                {
                    400: ("invalid_json", "invalid_value", "item_refused"),
                    403: ("inject_not_allowed",),
                    413: ("body_too_large", "too_many_items"),
                    503: ("engine_not_ready", "inject_busy"),
                },
            ),
        )
    )
    async def inject(self, request: Request) -> Response:
        """Put items from `render` into the engines' caches; later streams with the same hashes send no data."""
        self._context.caller_of(request)
        self._check_allowed("Prepared items are not accepted", "inject_not_allowed")
        async with self._held_body(request) as body:
            try:
                taken = await self._context.engine.inject(await asyncio.to_thread(items_of, body))
            except ItemRefused as error:
                raise Refusal(400, "item_refused", f"{error}.", param="items") from error
        return Response(encode_json({"injected": taken}), media_type="application/json")

    @asynccontextmanager
    async def _held_body(self, request: Request) -> AsyncIterator[bytes]:
        """The whole body; its bytes are counted from their arrival to the end of the block."""
        chunks: list[bytes] = []
        size = 0
        try:
            async for chunk in request.stream():
                size += len(chunk)
                self._inject_bytes += len(chunk)
                self._check_inject_bytes(size)
                chunks.append(chunk)
            yield b"".join(chunks)
        finally:
            self._inject_bytes -= size

    def _check_inject_bytes(self, size: int) -> None:
        most = self._context.limits.inject_bytes
        if size > most:
            raise Refusal(413, "body_too_large", f"Send at most {most} bytes of items at once (limits.inject_bytes).")
        if self._inject_bytes > most:
            text = "Other requests are injecting items; try again."
            raise Refusal(503, "inject_busy", text, retry_after_s=1, kind="server_error")


class _Held:
    """The memory of one render request, counted until its response is sent."""

    def __init__(self, routes: PrepareRoutes) -> None:
        self._routes = routes
        self._bytes = 0

    def add(self, size: int) -> None:
        """Count memory. Raises Refusal if all render requests together would exceed `MAX_RENDERED_BYTES`."""
        if self._routes.rendered_bytes + size > MAX_RENDERED_BYTES:
            text = "Other render requests take all of the memory for rendering; try again."
            raise Refusal(503, "render_busy", text, retry_after_s=1, kind="server_error")
        self._routes.rendered_bytes += size
        self._bytes += size

    async def end(self, upload: Upload) -> None:
        self._routes.rendered_bytes -= self._bytes
        self._bytes = 0
        await upload.close()


# Long lists of items


# Bytes of items that are decoded in one call; a longer item is decoded alone.
PIECE_BYTES = 64 * 1024
# The longest item, in bytes and in JSON values, and the number of items in a long body.
MAX_ITEM_BYTES = 2 * 1024 * 1024
MAX_ITEM_VALUES = 20_000
MAX_ITEMS = 100_000
ITEMS_KEY = b'"items"'
QUOTE, COMMA, LIST_START = b'",['
_BRACKETS = re.compile(rb'["{}\[\]]')
_WITH_COMMAS = re.compile(rb'["{}\[\],]')


def items_of(body: bytes) -> list[Item | None]:
    """Parse the items of a body. Raises Refusal, ClientFault and ItemRefused.

    The JSON decoder keeps the interpreter's lock, so a long body is decoded in pieces: the event loop runs in between.
    """
    body = body.strip()
    if len(body) <= PIECE_BYTES:
        return _parsed(decode_body(body).get("items"))
    start = end = _start_of_items(body)
    items: list[Item | None] = []
    for begin, end in _pieces(body, start):
        items += _parsed(decode_body(b'{"items":[' + body[begin:end] + b"]}").get("items"))
        if len(items) > MAX_ITEMS:
            raise Refusal(413, "too_many_items", f"Send at most {MAX_ITEMS} items at once.", param="items")
    rest = body[: start + 1] + body[end:]
    if len(rest) > PIECE_BYTES or decode_body(rest).get("items") != []:
        raise _not_items()
    return items


def _parsed(items: Any) -> list[Item | None]:
    if not isinstance(items, list) or not all(item is None or isinstance(item, dict) for item in items):
        raise _not_items()
    return parse_items(items)


def _not_items() -> Refusal:
    return Refusal(400, "invalid_value", "'items' must be a list of items as render returns them.", param="items")


def _start_of_items(body: bytes) -> int:
    """The place of the bracket before the items. Raises Refusal."""
    last_text = b""
    for place, depth in _structure(body[:PIECE_BYTES]):
        if body[place] == QUOTE:
            last_text = body[place : place + len(ITEMS_KEY)]
        elif depth == 2 and body[place] == LIST_START and last_text == ITEMS_KEY:
            return place
    raise _not_items()


def _pieces(body: bytes, start: int) -> Iterator[tuple[int, int]]:
    """The list of items that starts here, cut between items; without its brackets. Raises Refusal."""
    begin = last = start + 1
    for place, depth in _structure(body, start, with_commas=True):
        is_end = depth == 0
        is_item = is_end or (depth == 1 and body[place] == COMMA)
        if place - last > PIECE_BYTES:
            _check_long_item(body, last, place, is_item)
        if not is_item:
            continue
        if is_end or place - begin >= PIECE_BYTES:
            if begin > start + 1 and not body[begin:place].strip():
                raise _not_items()
            yield begin, place
            begin = place + 1
        last = place + 1
        if is_end:
            return
    raise _not_items()


def _check_long_item(body: bytes, start: int, end: int, is_complete: bool) -> None:
    if end - start > MAX_ITEM_BYTES or (
        is_complete and sum(body.count(mark, start, end) for mark in (b",", b"{", b"[")) > MAX_ITEM_VALUES
    ):
        text = f"An item has at most {MAX_ITEM_BYTES} bytes and {MAX_ITEM_VALUES} values."
        raise Refusal(400, "item_refused", text, param="items")


def _structure(body: bytes, place: int = 0, with_commas: bool = False) -> Iterator[tuple[int, int]]:
    """Places of brackets and starts of texts, with the depth behind them; and of commas at depth 1, if wanted."""
    depth = 0
    while place < len(body):
        found = (_WITH_COMMAS if with_commas and depth == 1 else _BRACKETS).search(body, place, place + PIECE_BYTES)
        if found is None:
            place += PIECE_BYTES
            continue
        place, mark = found.start(), found[0]
        if mark in b"{[":
            depth += 1
        elif mark in b"}]":
            depth -= 1
        yield place, depth
        place = _end_of_text(body, place) if mark == b'"' else place + 1


def _end_of_text(body: bytes, start: int) -> int:
    """The place behind a text that starts with a quote here."""
    begin = start + 1
    while (quote := body.find(b'"', begin)) >= 0:
        text = body[begin:quote]
        begin = quote + 1
        if (len(text) - len(text.rstrip(b"\\"))) % 2 == 0:
            return begin
    return len(body)
