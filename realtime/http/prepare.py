"""Preparing audio without transcribing it, and taking items that were prepared elsewhere into the engines' caches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, BinaryIO

import numpy as np
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import Response

from engine.client.processor import ItemRefused
from engine.client.render import parse_items
from realtime.dialects.json_frames import decode_json, encode_json
from realtime.errors import Refusal
from realtime.http.context import Context
from realtime.http.files import decoded
from realtime.http.forms import FormReader
from realtime.session.events import Samples

# A rendering is answered in one piece; the client must cut longer audio itself.
MAX_RENDER_SECONDS = 600


class PrepareRoutes:
    """`POST /v1/audio/render` and `POST /v1/audio/inject`."""

    def __init__(self, context: Context, forms: FormReader) -> None:
        self._context = context
        self._forms = forms
        # The read-only processor has one cache, so one request at a time uses it, off the event loop.
        self._one_at_a_time = asyncio.Lock()
        # Bytes of all bodies of items that are here now.
        self._inject_bytes = 0

    async def render(self, request: Request) -> Response:
        """Positions, items with hashes, what is cached and what executing would cost; `?data=false` leaves data out."""
        self._context.caller_of(request)
        upload = await self._forms.open(request)
        try:
            file = upload.form.get("file")
            if not isinstance(file, UploadFile):
                raise Refusal(400, "missing_file", "The form has no file in the field 'file'.", param="file")
            samples = await _decode(file.file, self._context.engine.spec.sample_rate)
            with_data = request.query_params.get("data") != "false"
            # Samples that wait are many times as large as their file, so they keep its place.
            async with self._one_at_a_time:
                body = await asyncio.to_thread(self._rendered, samples, with_data)
        finally:
            await upload.close()
        return Response(body, media_type="application/json")

    def _rendered(self, samples: Samples, with_data: bool) -> str:
        return encode_json(self._context.engine.render(samples).as_json(with_data))

    async def inject(self, request: Request) -> Response:
        """Items as `render` describes them; the next stream with their hashes sends no data."""
        self._context.caller_of(request)
        if not self._context.config.server.inject:
            text = (
                "Items prepared elsewhere are not taken here; whoever runs the server can allow it with server.inject."
            )
            raise Refusal(403, "inject_not_allowed", text)
        async with self._held_body(request) as body:
            taken = await self._inject(await asyncio.to_thread(decode_json, body))
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

    async def _inject(self, body: dict[str, Any]) -> int:
        items = body.get("items")
        if not isinstance(items, list) or not all(item is None or isinstance(item, dict) for item in items):
            raise Refusal(400, "invalid_value", "'items' must be a list of items as render gives them.", param="items")
        try:
            return await self._context.engine.inject(await asyncio.to_thread(parse_items, items))
        except ItemRefused as error:
            raise Refusal(400, "item_refused", f"{error}.", param="items") from error


async def _decode(file: BinaryIO, sample_rate: int) -> Samples:
    """The whole file at the model's rate."""
    blocks: list[Samples] = []
    samples = 0
    async with aclosing(decoded(file)) as steps:
        async for block in steps:
            blocks.append(block)
            samples += len(block)
            if samples > MAX_RENDER_SECONDS * sample_rate:
                text = f"At most {MAX_RENDER_SECONDS} seconds can be rendered at once; cut the audio."
                raise Refusal(413, "audio_too_long", text, param="file")
    return np.concatenate(blocks)
