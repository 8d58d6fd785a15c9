"""Routes for prepared audio: render a file into items without transcribing it, and inject items into engine caches."""

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
from engine.client.prepared_audio import Rendered, parse_items
from engine.messages import Item
from realtime.dialects.base import decode_body, encode_json
from realtime.errors import Refusal
from realtime.http.authentication import Context
from realtime.http.file_transcription import decoded
from realtime.http.long_responses import Entries, PiecesResponse, json_pieces
from realtime.http.upload_forms import FormReader, Upload
from realtime.session.events import Samples

# Longest audio in one request.
MAX_RENDER_SECONDS = 600
# Memory of all render requests together, from the first sample until the response is sent.
MAX_RENDERED_BYTES = 128 * 1024 * 1024


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

    async def render(self, request: Request) -> Response:
        """Answer with the items of a file: positions, hashes, what is cached, and the cost of a transcription.
        `?data=false` leaves out the data of the items."""
        self._context.caller_of(request)
        self._check_allowed("Rendering is not enabled", "render_not_allowed")
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

    async def inject(self, request: Request) -> Response:
        """Put items from `render` into the engines' caches; later streams with the same hashes send no data."""
        self._context.caller_of(request)
        self._check_allowed("Prepared items are not accepted", "inject_not_allowed")
        async with self._held_body(request) as body:
            try:
                taken = await self._context.engine.inject(await asyncio.to_thread(_items_of, body))
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


def _items_of(body: bytes) -> list[Item | None]:
    """Parse the items of a body; slow, because there may be millions. Raises Refusal and ItemRefused."""
    items = decode_body(body).get("items")
    if not isinstance(items, list) or not all(item is None or isinstance(item, dict) for item in items):
        raise Refusal(400, "invalid_value", "'items' must be a list of items as render returns them.", param="items")
    return parse_items(items)


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
