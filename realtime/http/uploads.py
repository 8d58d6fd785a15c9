"""The HTTP side of file transcription: multipart form in; JSON, text, subtitles or server-sent events out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from engine.options import TRANSLATE
from realtime.errors import Refusal
from realtime.http.context import Context
from realtime.http.files import (
    Transcriber,
    Transcript,
    UploadRequest,
    read_request,
    sse,
    sse_delta,
    sse_done,
    write_answer,
)
from realtime.http.forms import FormReader, Upload, client_gone
from realtime.http.pieces import PiecesResponse, in_turns


class UploadRoutes:
    """`POST /v1/audio/transcriptions` and `/v1/audio/translations`."""

    def __init__(self, context: Context, forms: FormReader) -> None:
        self._context = context
        self._forms = forms
        self._limits = context.limits
        self._transcriber = Transcriber(context.engine, self._limits.uploads)

    async def transcriptions(self, request: Request) -> Response:
        return await self._take(request, None)

    async def translations(self, request: Request) -> Response:
        """The same, in English whatever is spoken."""
        return await self._take(request, TRANSLATE)

    async def _take(self, request: Request, task: str | None) -> Response:
        self._context.caller_of(request)
        upload = await self._forms.open(request)
        async with self.answering(upload):
            return await self._answer(upload, request, task)

    @asynccontextmanager
    async def answering(self, upload: Upload) -> AsyncIterator[None]:
        """Around the making of an answer. An upload keeps its place until its answer has left, or there is none."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, Refusal):
                self.count(error.code)
            await upload.close()
            raise

    async def _answer(self, upload: Upload, request: Request, task: str | None) -> Response:
        file = upload.file
        wanted = read_request(upload.form, self._context.engine.spec, task)
        if wanted.stream:
            transcript = self._new_transcript()
            deltas = self._watched(self._transcriber.deltas(file, wanted, transcript), request)
            return await self._stream(deltas, transcript, upload, wanted)
        transcript = await self.transcript(upload, wanted, request)
        pieces, media_type = write_answer(transcript, wanted)
        return PiecesResponse(pieces, media_type, upload.close)

    async def transcript(self, upload: Upload, wanted: UploadRequest, request: Request) -> Transcript:
        """All that is said in a file, with its place among the others; raises Refusal. The file is let go then."""
        transcript = self._new_transcript()
        deltas = self._watched(self._transcriber.deltas(upload.file, wanted, transcript), request)
        async with aclosing(deltas):
            async for _ in deltas:
                pass
        await upload.let_file_go()
        self.count("ok")
        return transcript

    def _new_transcript(self) -> Transcript:
        spec = self._context.engine.spec
        return Transcript(spec.sample_rate, spec.options.only_language)

    async def _watched(self, deltas: AsyncGenerator[str], request: Request) -> AsyncGenerator[str]:
        """The text as it comes, for so long as one may take. A client that leaves gives its place to the next file."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._limits.upload_s
        gone = asyncio.create_task(_disconnected(request), name="upload's client")
        try:
            while (delta := await _next(deltas, gone, deadline - loop.time())) is not None:
                yield delta
        finally:
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
            await deltas.aclose()

    async def _stream(
        self, deltas: AsyncGenerator[str], transcript: Transcript, upload: Upload, wanted: UploadRequest
    ) -> Response:
        """The answer begins with the first text or the end; until then a refusal can have a status of its own."""
        first = await anext(deltas, None)

        async def body() -> AsyncIterator[bytes]:
            try:
                told = 0
                async for delta in _with_first(first, deltas):
                    event, told = sse_delta(delta, transcript, told, wanted), len(transcript.words)
                    if event:
                        yield event
                self.count("ok")
                async for part in in_turns(sse_done(transcript, wanted)):
                    yield part
            except Refusal as refusal:
                self.count(refusal.code)
                yield sse(dict(refusal.body()))

        async def end() -> None:
            await deltas.aclose()
            await upload.close()

        return _Streamed(body(), end)

    def count(self, outcome: str) -> None:
        self._context.metrics.uploads.labels(outcome).inc()


class _Streamed(StreamingResponse):
    """Server-sent events with something to do at their end, also if the client leaves before the first one."""

    def __init__(self, body: AsyncIterator[bytes], end: Callable[[], Awaitable[None]]) -> None:
        super().__init__(body, media_type="text/event-stream")
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._end()


async def _with_first(first: str | None, rest: AsyncIterator[str]) -> AsyncIterator[str]:
    if first is not None:
        yield first
    async for delta in rest:
        yield delta


async def _next(deltas: AsyncGenerator[str], gone: asyncio.Task[None], seconds: float) -> str | None:
    """The next text, or None at the end; raises Refusal if the client leaves or the time is over before it comes."""
    step = asyncio.ensure_future(anext(deltas, None))
    try:
        await asyncio.wait((step, gone), timeout=max(seconds, 0.0), return_when=asyncio.FIRST_COMPLETED)
        if step.done():
            return step.result()
        if gone.done():
            raise client_gone()
        text = "The transcription took too long; send a shorter file."
        raise Refusal(504, "timeout", text, kind="server_error")
    finally:
        step.cancel()
        await asyncio.gather(step, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
