"""Preparing audio without transcribing it, and taking items that were prepared elsewhere into the engines' caches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any, BinaryIO

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from engine.client.link import ItemRefused
from engine.client.prepared import Rendered, parse_items
from engine.messages import Item
from realtime.dialects.base import decode_json, encode_json
from realtime.errors import Refusal
from realtime.http.context import Context
from realtime.http.files import decoded
from realtime.http.forms import FormReader, Upload
from realtime.http.pieces import Entries, PiecesResponse, json_pieces
from realtime.session.events import Samples

# The client must cut longer audio itself.
MAX_RENDER_SECONDS = 600
# What all renderings together may hold, from the first sample until the answer has left.
MAX_RENDERED_BYTES = 128 * 1024 * 1024


class PrepareRoutes:
    """`POST /v1/audio/render` and `POST /v1/audio/inject`."""

    def __init__(self, context: Context, forms: FormReader) -> None:
        self._context = context
        self._forms = forms
        # The read-only processor has one cache, so one request at a time uses it, off the event loop.
        self._one_at_a_time = asyncio.Lock()
        # Bytes of all renderings, and of all bodies of items, that are here now.
        self.rendered_bytes = 0
        self._inject_bytes = 0

    async def render(self, request: Request) -> Response:
        """Positions, items with hashes, what is cached and what executing would cost; `?data=false` leaves data out."""
        self._context.caller_of(request)
        self._check_allowed("Audio is not rendered here", "render_not_allowed")
        with_data = request.query_params.get("data") != "false"
        upload = await self._forms.open(request)
        held = _Held(self)
        try:
            samples = await self._decode(upload.file, held)
            await upload.let_file_go()
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
            raise Refusal(403, code, f"{what}; whoever runs the server can allow it with server.inject.")

    async def _decode(self, file: BinaryIO, held: _Held) -> Samples:
        """The whole file at the model's rate."""
        spec = self._context.engine.spec
        # The samples are joined, then cut into items, which have parts of their neighbours in them.
        copies = 2 + (spec.look_back_samples + spec.look_ahead_samples) / spec.samples_per_position
        blocks: list[Samples] = []
        samples = 0
        async with aclosing(decoded(file)) as steps:
            async for block in steps:
                samples += len(block)
                if samples > MAX_RENDER_SECONDS * spec.sample_rate:
                    text = f"At most {MAX_RENDER_SECONDS} seconds can be rendered at once; cut the audio."
                    raise Refusal(413, "audio_too_long", text, param="file")
                held.add(round(copies * block.nbytes))
                blocks.append(block)
        return np.concatenate(blocks)

    async def inject(self, request: Request) -> Response:
        """Items as `render` describes them; the next stream with their hashes sends no data."""
        self._context.caller_of(request)
        self._check_allowed("Items prepared elsewhere are not taken here", "inject_not_allowed")
        async with self._held_body(request) as body:
            try:
                taken = await self._context.engine.inject(await asyncio.to_thread(_items_of, body))
            except ItemRefused as error:
                raise Refusal(400, "item_refused", f"{error}.", param="items") from error
        return Response(encode_json({"injected": taken}), media_type="application/json")

    @asynccontextmanager
    async def _held_body(self, request: Request) -> AsyncIterator[bytes]:
        """The whole body, counted while it arrives and for as long as it is needed."""
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
            text = "Items of others are on their way; try again."
            raise Refusal(503, "inject_busy", text, retry_after_s=1, kind="server_error")


def _items_of(body: bytes) -> list[Item | None]:
    """The items in a body, of which there may be millions. Raises Refusal and ItemRefused."""
    items = decode_json(body).get("items")
    if not isinstance(items, list) or not all(item is None or isinstance(item, dict) for item in items):
        raise Refusal(400, "invalid_value", "'items' must be a list of items as render gives them.", param="items")
    return parse_items(items)


class _Held:
    """The bytes of one rendering, counted from its first sample until its answer has left."""

    def __init__(self, routes: PrepareRoutes) -> None:
        self._routes = routes
        self._bytes = 0

    def add(self, size: int) -> None:
        """Raises Refusal if all renderings together would hold more than they may."""
        if self._routes.rendered_bytes + size > MAX_RENDERED_BYTES:
            text = "Other renderings are being read by their clients; try again."
            raise Refusal(503, "render_busy", text, retry_after_s=1, kind="server_error")
        self._routes.rendered_bytes += size
        self._bytes += size

    async def end(self, upload: Upload) -> None:
        self._routes.rendered_bytes -= self._bytes
        self._bytes = 0
        await upload.close()
