"""The endpoints for files: OpenAI's `/v1/audio/transcriptions` and `/v1/audio/translations`, Deepgram's `/v1/listen`.

This file has the endpoints and their documented shapes: `upload_forms.py` receives the file, and
`file_transcription.py` transcribes it and writes OpenAI's answers.

OpenAI's clients send a multipart form; JSON, text, subtitles or server-sent events go out (`UploadRoutes`). For
Deepgram's clients the file is the body, and the answer is Deepgram's JSON (`ListenRoute`). It receives and transcribes
the file with the same code and limits, and differs in its options and in the shape of its answer. Deepgram's live
socket, on the same path, is in `websocket_routes.py`.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from typing import Annotated, Any, BinaryIO, Literal
from uuid import uuid4

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from engine.options import TRANSLATE
from realtime.dialects.base import Json
from realtime.dialects.deepgram import (
    MAX_PAUSE_S,
    READ_ONCE,
    FileQuery,
    mean_confidence,
    model_info,
    plain,
    plain_parts,
    read_file_query,
    seconds,
    written_hit,
    written_word,
)
from realtime.dialects.event_schema import (
    ChannelFields,
    DurationUsage,
    FormattedText,
    ListenAlternative,
    ListenModel,
    ListenWord,
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
    READ_BYTES,
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
    ENTRIES_AT_ONCE,
    Entries,
    LazyValue,
    PiecesResponse,
    TextParts,
    in_turns,
    json_pieces,
    steps,
)
from realtime.http.openapi import EVENTS, JSON, UPLOADED, Operation, Parameter, described
from realtime.http.upload_forms import FormReader, Upload, client_gone
from realtime.http.websocket_routes import LISTEN_PARAMETERS, check_once
from realtime.http.websocket_routes import Flag as ListenFlag
from realtime.serving.shared_places import FairPlaces
from realtime.session.formatting import paragraph_end, sentences_of
from realtime.session.settings import AudioFormat, Settings
from realtime.text_values import now_text

Flag = Annotated[str, one_of(("true", "false", "1", "0"))]
# WAV format number and bytes per sample of the raw formats.
WAV_FORMATS = {"audio/pcm": (1, 2), "audio/pcmu": (7, 1), "audio/pcma": (6, 1)}
UNKNOWN_LENGTH = 0xFFFF_FFFF
# A paragraph may have two hundred words.
PARAGRAPHS_AT_ONCE = 4


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
        return await self._take(request, None)

    @described(_operation("Transcribe a file into English"))
    async def translations(self, request: Request) -> Response:
        """Like `transcriptions`, with the text translated to English."""
        return await self._take(request, TRANSLATE)

    async def _take(self, request: Request, task: str | None) -> Response:
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
        await upload.let_file_go()
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
        """The response with server-sent events. It begins with the first text; a refusal before that has its own HTTP
        status."""
        first = await anext(deltas, None)

        async def body() -> AsyncIterator[bytes]:
            try:
                told, segments = 0, SegmentEvents(transcript) if wanted.settings.speakers else None
                async for delta in _with_first(first, deltas):
                    event, told = sse_delta(delta, transcript, told, wanted), len(transcript.words)
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

        return _Streamed(body(), end)

    def count(self, outcome: str) -> None:
        self._context.metrics.uploads.labels(outcome).inc()


class _Streamed(StreamingResponse):
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


async def _next(deltas: AsyncGenerator[str], gone: asyncio.Task[None], seconds: float) -> str | None:
    """The next text, or None at the end. Raises Refusal if the client leaves or the time is over."""
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


class Sentence(Shape):
    text: str
    start: float
    end: float


class Paragraph(Shape):
    sentences: list[Sentence]
    num_words: int
    start: float
    end: float
    speaker: int | UnsetType = UNSET


class Paragraphs(Shape):
    transcript: str
    paragraphs: list[Paragraph]


class FileAlternative(ListenAlternative):
    paragraphs: Paragraphs | UnsetType = UNSET


class FileChannel(ChannelFields):
    alternatives: list[FileAlternative]


class Utterance(Shape):
    start: float
    channel: int
    words: list[ListenWord]
    end: float
    confidence: float
    transcript: str
    id: str
    speaker: int | UnsetType = UNSET
    languages: list[str] | UnsetType = UNSET


class FileResults(Shape):
    channels: list[FileChannel]
    utterances: list[Utterance] | UnsetType = UNSET


class FileMetadata(Shape):
    transaction_key: str
    request_id: str
    sha256: str
    created: str
    duration: float
    channels: int
    models: list[str]
    model_info: dict[str, ListenModel]


class ListenAnswer(Shape):
    """Deepgram's answer for recorded audio."""

    metadata: FileMetadata
    results: FileResults


PARAMETERS = (
    *LISTEN_PARAMETERS,
    Parameter("utterances", "Adds the utterances.", ListenFlag),
    Parameter(
        "utt_split", "The pause in seconds between two utterances.", Annotated[float, Meta(ge=0, le=MAX_PAUSE_S)]
    ),
)
Bytes = Annotated[Any, Meta(description="A file in any container, or raw samples with `encoding`.")]


class ListenRoute:
    """`POST /v1/listen`: Deepgram's files. They count as uploads like those of other clients."""

    def __init__(self, context: Context, forms: FormReader, uploads: UploadRoutes) -> None:
        self._context = context
        self._forms = forms
        self._uploads = uploads

    @described(
        Operation(
            "Transcribe a file, for Deepgram's clients",
            "Files",
            {200: {JSON: ListenAnswer}},
            "The body is the file itself. The server fetches nothing, so that a JSON body with a `url` is refused.",
            body={"application/octet-stream": Bytes, "audio/*": Bytes},
            parameters=PARAMETERS,
            refusals=(UPLOADED, {400: ("invalid_query_parameter", "url_not_supported")}),
            deepgram=True,
        )
    )
    async def transcribe(self, request: Request) -> Response:
        caller = self._context.caller_of(request)
        check_once(request.query_params, READ_ONCE)
        query = read_file_query(request.query_params, request.query_params.multi_items())
        taken = query.settings.in_force(self._context.engine.spec)
        if request.headers.get("content-type", "").startswith("application/json"):
            text = "The server does not fetch files; send the audio itself as the body instead of a 'url'."
            raise Refusal(400, "url_not_supported", text)
        head = b"" if query.format is None else _wav_head(query.format)
        upload = await self._forms.open_body(request, caller, head)
        async with self._uploads.answering(upload):
            return await self._answer(upload, query, taken, request, len(head))

    async def _answer(self, upload: Upload, query: FileQuery, taken: Settings, request: Request, head: int) -> Response:
        sha256 = await asyncio.to_thread(_digest, upload.file, head)
        wanted = UploadRequest("json", taken, stream=False, words=True, logprobs=False)
        transcript = await self._uploads.transcript(upload, wanted, request)
        request_id = str(uuid4())
        pieces = write_listen_answer(transcript, query, self._context.sessions.models()[0], request_id, sha256)
        return PiecesResponse(pieces, "application/json", upload.close, {"dg-request-id": request_id})


def write_listen_answer(
    transcript: Transcript, query: FileQuery, model: str, request_id: str, sha256: str
) -> Iterator[bytes]:
    """The JSON response in pieces."""
    rate, words, text = transcript.sample_rate, transcript.words, transcript.text
    languages = list(transcript.languages)
    whole: Json = {
        "transcript": text if query.punctuate else TextParts(plain_parts(text)),
        "confidence": mean_confidence(transcript.confidence_sum, transcript.confidences),
        "words": Entries(written_word(word, rate, query.punctuate, sure=True) for word in words),
        **({"languages": languages} if languages else {}),
        **({} if transcript.raw_text is None else {"raw_transcript": transcript.raw_text}),
    }
    if query.settings.formatting.paragraphs:
        whole["paragraphs"] = {
            "transcript": TextParts(_paragraph_texts(transcript)),
            "paragraphs": Entries(_paragraphs(transcript), at_once=PARAGRAPHS_AT_ONCE),
        }
    channel: Json = {}
    if query.settings.formatting.search:
        channel["search"] = Entries(
            (
                {"query": term, "hits": Entries(written_hit(hit, rate) for hit in hits)}
                for term, hits in transcript.hits.items()
            ),
            nested=True,
        )
    channel["alternatives"] = Entries([whole], nested=True)
    if query.settings.language in (None, "", "multi") and languages:
        channel["detected_language"] = languages[0]
    results: Json = {"channels": Entries([channel], nested=True)}
    if query.utterances:
        results["utterances"] = Entries(_utterances(transcript, query), nested=True)
    metadata = {
        "transaction_key": "deprecated",
        "request_id": request_id,
        "sha256": sha256,
        "created": now_text(),
        "duration": round(transcript.seconds, 3),
        "channels": 1,
        "models": [model],
        "model_info": {model: model_info(model)},
    }
    return json_pieces({"metadata": metadata, "results": results})


def _paragraphs(transcript: Transcript) -> Iterator[Json]:
    """Paragraphs with their sentences, as in Deepgram's responses."""
    words, rate, start = transcript.words, transcript.sample_rate, 0
    while start < len(words):
        end = paragraph_end(words, start, rate)
        speaker = words[start].speaker
        yield {
            "sentences": [
                {
                    "text": " ".join(word.text.strip() for word in words[first:last]),
                    "start": seconds(words[first].start, rate),
                    "end": seconds(words[last - 1].end, rate),
                }
                for first, last in sentences_of(words, start, end)
            ],
            "num_words": end - start,
            "start": seconds(words[start].start, rate),
            "end": seconds(words[end - 1].end, rate),
            **({} if speaker is None else {"speaker": speaker}),
        }
        start = end


def _paragraph_texts(transcript: Transcript) -> Iterator[str]:
    """The text with an empty line before each paragraph, and with the speaker of each if it is known."""
    words, start, before = transcript.words, 0, None
    while start < len(words):
        end = paragraph_end(words, start, transcript.sample_rate)
        speaker = words[start].speaker
        who = f"Speaker {speaker}: " if speaker is not None and speaker != before else ""
        yield ("\n\n" if start else "\n") + who + " ".join(word.text.strip() for word in words[start:end])
        start, before = end, speaker


def _utterances(transcript: Transcript, query: FileQuery) -> Iterator[Json]:
    start = 0
    while start < len(transcript.words):
        utterance = _Utterance(transcript, start, query)
        yield utterance.written()
        start = utterance.end


class _Utterance:
    """Words up to a pause. The end is found while the words are written, so later fields use `LazyValue`."""

    def __init__(self, transcript: Transcript, start: int, query: FileQuery) -> None:
        self.end = start
        self._start = start
        self._words = transcript.words
        self._rate = transcript.sample_rate
        self._gap = round(query.split_s * self._rate)
        self._punctuate = query.punctuate
        self._has_languages = bool(transcript.languages)
        # Sums over the words written so far.
        self._told = Transcript(self._rate)

    def written(self) -> Json:
        return {
            "start": seconds(self._words[self._start].start, self._rate),
            "channel": 0,
            **({} if (speaker := self._words[self._start].speaker) is None else {"speaker": speaker}),
            "words": Entries(self._written_words()),
            "end": LazyValue(lambda: seconds(self._words[self.end - 1].end, self._rate)),
            "confidence": LazyValue(lambda: mean_confidence(self._told.confidence_sum, self._told.confidences)),
            **({"languages": LazyValue(lambda: list(self._told.languages))} if self._has_languages else {}),
            "transcript": TextParts(self._text()),
            "id": str(uuid4()),
        }

    def _written_words(self) -> Iterator[Json | None]:
        while self.end < len(self._words):
            word = self._words[self.end]
            last = self._words[self.end - 1] if self.end > self._start else word
            if word.start - last.end >= self._gap or word.speaker != last.speaker:
                return
            self.end += 1
            self._told.count(word)
            yield written_word(word, self._rate, self._punctuate, sure=True)

    def _text(self) -> Iterator[str]:
        before = ""
        for start in range(self._start, self.end, ENTRIES_AT_ONCE):
            words = self._words[start : min(start + ENTRIES_AT_ONCE, self.end)]
            text = " ".join(word.text for word in words)
            part = text if self._punctuate else plain(text)
            yield before + part if part else ""
            before = " " if before or part else ""


def _wav_head(audio_format: AudioFormat) -> bytes:
    """A WAV header for raw samples, so that they are decoded like any other file."""
    number, size = WAV_FORMATS[audio_format.type]
    rate = audio_format.rate
    described = struct.pack("<HHIIHH", number, 1, rate, rate * size, size, 8 * size)
    return b"".join(
        (
            struct.pack("<4sI4s", b"RIFF", UNKNOWN_LENGTH, b"WAVE"),
            struct.pack("<4sI", b"fmt ", len(described)),
            described,
            struct.pack("<4sI", b"data", UNKNOWN_LENGTH),
        )
    )


def _digest(file: BinaryIO, head: int) -> str:
    """SHA-256 of the client's bytes, without the `head` bytes that we wrote before them."""
    digest = hashlib.sha256()
    file.seek(head)
    while piece := file.read(READ_BYTES):
        digest.update(piece)
    file.seek(0)
    return digest.hexdigest()
