"""The HTTP side of file transcription: multipart form in; JSON, text, subtitles or server-sent events out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from realtime.errors import Refusal
from realtime.http.context import Context
from realtime.http.files import Transcriber, Transcript, UploadRequest, read_request, sse, sse_done, write_answer
from realtime.http.forms import FormReader


class UploadRoutes:
    """`POST /v1/audio/transcriptions`."""

    def __init__(self, context: Context, forms: FormReader) -> None:
        self._context = context
        self._forms = forms
        self._limits = context.limits
        self._transcriber = Transcriber(context.engine, self._limits.uploads)

    async def transcriptions(self, request: Request) -> Response:
        self._context.caller_of(request)
        self._forms.check(request)
        form = await self._forms.read(request)
        try:
            return await self._answer(form, request)
        except BaseException as error:
            if isinstance(error, Refusal):
                self._count(error.code)
            await form.close()
            raise

    async def _answer(self, form: FormData, request: Request) -> Response:
        wanted, file = self._read(form)
        if wanted.stream:
            return await self._stream(file, wanted, form)
        transcript = await self._transcribe(file, wanted, request)
        await form.close()
        self._count("ok")
        body, media_type = write_answer(transcript, wanted)
        return Response(body, media_type=media_type)

    async def _transcribe(self, file: UploadFile, wanted: UploadRequest, request: Request) -> Transcript:
        """The whole transcript. A client that leaves gives its place to the next file."""
        work = asyncio.create_task(self._transcriber.transcribe(file.file, wanted), name="upload")
        gone = asyncio.create_task(_disconnected(request), name="upload's client")
        try:
            await asyncio.wait((work, gone), timeout=self._limits.upload_s, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            if gone.done():
                raise Refusal(499, "client_gone", "The client left before its file was transcribed.")
            text = "The transcription took too long; send a shorter file."
            raise Refusal(504, "timeout", text, kind="server_error")
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    def _read(self, form: FormData) -> tuple[UploadRequest, UploadFile]:
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise Refusal(400, "missing_file", "The form has no file in the field 'file'.", param="file")
        fields: dict[str, Any] = {}
        for name in form:
            values = form.getlist(name)
            fields[name] = values if len(values) > 1 else values[0]
        wanted = read_request(fields)
        if (file.size or 0) > self._limits.upload_bytes:
            raise Refusal(413, "file_too_large", f"The file is larger than {self._limits.upload_bytes} bytes.")
        return wanted, file

    async def _stream(self, file: UploadFile, wanted: UploadRequest, form: FormData) -> Response:
        """The answer begins with the first text or the end; until then a refusal can have a status of its own."""
        transcript = Transcript(self._context.engine.spec.sample_rate)
        deltas = self._transcriber.deltas(file.file, wanted, transcript)
        first = await anext(deltas, None)

        async def body() -> AsyncIterator[str]:
            try:
                if first is not None:
                    yield sse({"type": "transcript.text.delta", "delta": first})
                async for delta in deltas:
                    yield sse({"type": "transcript.text.delta", "delta": delta})
                self._count("ok")
                for event in sse_done(transcript):
                    yield event
            except Refusal as refusal:
                self._count(refusal.code)
                yield sse(dict(refusal.body()))
            finally:
                await deltas.aclose()  # type: ignore[attr-defined]
                await form.close()

        return StreamingResponse(body(), media_type="text/event-stream")

    def _count(self, outcome: str) -> None:
        self._context.metrics.uploads.labels(outcome).inc()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
