"""OpenAI's endpoints for files: `/v1/audio/transcriptions` and `/v1/audio/translations`.

This module has the endpoints and their documented shapes. A multipart form comes in (`upload_forms.py` receives it),
`file_transcription.py` transcribes the file and writes the answer: JSON, text, subtitles or server-sent events.
Deepgram's endpoint for files is in `listen_route.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from engine.options import TRANSLATE
from realtime.dialects.event_schema import (
    DurationUsage,
    FormattedText,
    Logprob,
    Shape,
    TextSegment,
    Word,
    one_of,
)
from realtime.errors import Refusal
from realtime.http.authentication import Context
from realtime.http.file_transcription import (
    FORMATS,
    SegmentEvents,
    Transcriber,
    Transcript,
    UploadRequest,
    read_request,
    sse,
    sse_delta,
    sse_done,
    write_answer,
)
from realtime.http.long_responses import (
    PiecesResponse,
    in_turns,
    steps,
)
from realtime.http.openapi import EVENTS, JSON, UPLOADED, Operation, described
from realtime.http.upload_forms import FormReader, Upload, client_gone
from realtime.serving.quota import FairPlaces

Flag = Annotated[str, one_of(("true", "false", "1", "0"))]


class UploadForm(Struct):
    """The form of a file. Lists are repeated fields, with or without the brackets. Other fields have no effect."""

    file: Annotated[str, Meta(extra_json_schema={"contentMediaType": "application/octet-stream"})]
    model: str | UnsetType = UNSET
    response_format: Annotated[str, one_of(FORMATS)] = FORMATS[0]
    stream: Annotated[Flag, Meta(description="Server-sent events; no effect with the model name whisper-1.")] = "false"
    language: str | UnsetType = UNSET
    languages: Annotated[list[str], Meta(description="Languages that may be spoken.")] = msgspec.field(
        default_factory=list, name="languages[]"
    )
    prompt: str | UnsetType = UNSET
    keywords: Annotated[list[str], Meta(description="Words to expect.")] = msgspec.field(
        default_factory=list, name="keywords[]"
    )
    temperature: Annotated[str, Meta(description="From 0 to 1; has no effect.")] | UnsetType = UNSET
    timestamp_granularities: list[Literal["word", "segment"]] = msgspec.field(
        default_factory=list, name="timestamp_granularities[]"
    )
    include: list[Literal["logprobs"]] = msgspec.field(default_factory=list, name="include[]")
    speakers: Annotated[Flag, Meta(description="Who speaks, in every format.")] = "false"
    known_speaker_names: list[str] = msgspec.field(default_factory=list, name="known_speaker_names[]")
    known_speaker_references: Annotated[list[str], Meta(description="Recordings as data URLs.")] = msgspec.field(
        default_factory=list, name="known_speaker_references[]"
    )
    format: Annotated[str, Meta(description="The object FormatOptions as JSON.")] | UnsetType = UNSET


class TranscriptionText(FormattedText):
    """The answer to `response_format=json`."""

    text: str
    usage: DurationUsage
    logprobs: list[Logprob] | None | UnsetType = UNSET


class Segment(Shape):
    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    speaker: str | UnsetType = UNSET


class VerboseTranscription(FormattedText):
    """The answer to `response_format=verbose_json`."""

    task: str
    language: str
    duration: float
    text: str
    segments: list[Segment]
    usage: DurationUsage
    words: list[Word] | UnsetType = UNSET


class DiarizedTranscription(FormattedText):
    """The answer to `response_format=diarized_json`."""

    task: str
    duration: float
    text: str
    segments: list[TextSegment]
    usage: DurationUsage


def _operation(summary: str) -> Operation:
    answers = (TranscriptionText, VerboseTranscription, DiarizedTranscription)
    events = Annotated[str, Meta(description="The data of each event is an UploadEvent of /events.schema.json.")]
    return Operation(
        summary,
        "Files",
        {200: {JSON: answers, "text/plain": str, EVENTS: events}},
        "Live sessions have priority over files.",
        body={"multipart/form-data": UploadForm},
        refusals=(UPLOADED,),
    )


class UploadRoutes:
    """`POST /v1/audio/transcriptions` and `/v1/audio/translations`."""

    def __init__(self, context: Context, forms: FormReader) -> None:
        self._context = context
        self._forms = forms
        self._limits = context.limits
        places = FairPlaces(self._limits.uploads, lambda: len(context.config.auth.keys))
        self._transcriber = Transcriber(context.engine, places)

    @described(_operation("Transcribe a file"))
    async def transcriptions(self, request: Request) -> Response:
        return await self._transcribe(request, None)

    @described(_operation("Transcribe a file into English"))
    async def translations(self, request: Request) -> Response:
        """Like `transcriptions`, with the text translated to English."""
        return await self._transcribe(request, TRANSLATE)

    async def _transcribe(self, request: Request, task: str | None) -> Response:
        upload = await self._forms.open(request, self._context.caller_of(request))
        async with self.answering(upload):
            return await self._answer(upload, request, task)

    @asynccontextmanager
    async def answering(self, upload: Upload) -> AsyncIterator[None]:
        """Wraps the making of a response: counts refusals and closes the upload on an error. Otherwise the response
        closes the upload when it has been sent."""
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
            deltas = self._watched(self._transcriber.deltas(file, upload.caller, wanted, transcript), request)
            return await self._stream(deltas, transcript, upload, wanted)
        transcript = await self.transcript(upload, wanted, request)
        pieces, media_type = write_answer(transcript, wanted)
        return PiecesResponse(pieces, media_type, upload.close)

    async def transcript(self, upload: Upload, wanted: UploadRequest, request: Request) -> Transcript:
        """Transcribe the whole file, then release it. Raises Refusal."""
        transcript = self._new_transcript()
        deltas = self._watched(self._transcriber.deltas(upload.file, upload.caller, wanted, transcript), request)
        async with aclosing(deltas):
            async for _ in deltas:
                pass
        await upload.release_file()
        await steps(transcript.format(wanted.settings.formatting))
        self.count("ok")
        return transcript

    def _new_transcript(self) -> Transcript:
        spec = self._context.engine.spec
        return Transcript(spec.sample_rate, spec.options.only_language)

    async def _watched(self, deltas: AsyncGenerator[str], request: Request) -> AsyncGenerator[str]:
        """The text as it arrives. Raises Refusal after `limits.upload_s`, or when the client leaves, so that the next
        file can begin."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._limits.upload_s
        client_left = asyncio.create_task(_disconnected(request), name="upload's client")
        try:
            while (delta := await _next(deltas, client_left, deadline - loop.time())) is not None:
                yield delta
        finally:
            client_left.cancel()
            await asyncio.gather(client_left, return_exceptions=True)
            await deltas.aclose()

    async def _stream(
        self, deltas: AsyncGenerator[str], transcript: Transcript, upload: Upload, wanted: UploadRequest
    ) -> Response:
        """The response with server-sent events. It begins with the first text; a refusal before that has its own HTTP
        status."""
        first = await anext(deltas, None)

        async def body() -> AsyncIterator[bytes]:
            try:
                words_sent, segments = 0, SegmentEvents(transcript) if wanted.settings.speakers else None
                async for delta in _with_first(first, deltas):
                    event, words_sent = sse_delta(delta, transcript, words_sent, wanted), len(transcript.words)
                    if event:
                        yield event
                    for segment in [] if segments is None else segments.due():
                        yield segment
                for segment in [] if segments is None else segments.due(ended=True):
                    yield segment
                await steps(transcript.format(wanted.settings.formatting))
                self.count("ok")
                async for part in in_turns(sse_done(transcript, wanted)):
                    yield part
            except Refusal as refusal:
                self.count(refusal.code)
                yield sse(dict(refusal.body()))

        async def end() -> None:
            await deltas.aclose()
            await upload.close()

        return _EventStreamResponse(body(), end)

    def count(self, outcome: str) -> None:
        self._context.metrics.uploads.labels(outcome).inc()


class _EventStreamResponse(StreamingResponse):
    """Server-sent events; `end` is called afterwards, also if the client leaves before the first one."""

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


async def _next(deltas: AsyncGenerator[str], client_left: asyncio.Task[None], seconds: float) -> str | None:
    """The next text, or None at the end. Raises Refusal if the client leaves or the time is over."""
    step = asyncio.ensure_future(anext(deltas, None))
    try:
        await asyncio.wait((step, client_left), timeout=max(seconds, 0.0), return_when=asyncio.FIRST_COMPLETED)
        if step.done():
            return step.result()
        if client_left.done():
            raise client_gone()
        text = "The transcription took too long; send a shorter file."
        raise Refusal(504, "timeout", text, kind="server_error")
    finally:
        step.cancel()
        await asyncio.gather(step, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
