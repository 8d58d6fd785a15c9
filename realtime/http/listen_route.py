"""Deepgram's endpoint for files, `POST /v1/listen`: the file is the body, and the answer is Deepgram's JSON.

`ListenRoute` receives and transcribes the file with the code and the limits of the other uploads
(`transcription_routes.py`); it differs in its options and in the shape of its answer. Deepgram's live socket, on the
same path, is in `websocket_routes.py`.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import Iterator
from typing import Annotated, Any, BinaryIO
from uuid import uuid4

from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.responses import Response

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
    ListenAlternative,
    ListenModel,
    ListenWord,
    Shape,
)
from realtime.errors import Refusal
from realtime.http.authentication import Context
from realtime.http.file_transcription import (
    READ_BYTES,
    Transcript,
    UploadRequest,
)
from realtime.http.long_responses import (
    ENTRIES_AT_ONCE,
    Entries,
    LazyValue,
    PiecesResponse,
    TextParts,
    json_pieces,
)
from realtime.http.openapi import JSON, UPLOADED, Operation, Parameter, described
from realtime.http.transcription_routes import UploadRoutes
from realtime.http.upload_forms import FormReader, Upload
from realtime.http.websocket_routes import LISTEN_PARAMETERS, check_once
from realtime.http.websocket_routes import Flag as ListenFlag
from realtime.session.formatting import paragraph_end, sentences_of
from realtime.session.settings import AudioFormat, Settings
from realtime.text_values import now_text

# WAV format number and bytes per sample of the raw formats.
WAV_FORMATS = {"audio/pcm": (1, 2), "audio/pcmu": (7, 1), "audio/pcma": (6, 1)}
# The length in a WAV header of a stream whose length is not known.
UNKNOWN_LENGTH = 0xFFFF_FFFF
# Paragraphs in one piece of a response; a paragraph may have two hundred words.
PARAGRAPHS_AT_ONCE = 4


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
        "words": Entries(written_word(word, rate, query.punctuate, with_speaker_confidence=True) for word in words),
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
        yield utterance.to_json()
        start = utterance.end


class _Utterance:
    """Words up to a pause. The end is found while the words are encoded, so later fields use `LazyValue`."""

    def __init__(self, transcript: Transcript, start: int, query: FileQuery) -> None:
        self.end = start
        self._start = start
        self._words = transcript.words
        self._rate = transcript.sample_rate
        self._gap = round(query.split_s * self._rate)
        self._punctuate = query.punctuate
        self._has_languages = bool(transcript.languages)
        # Sums over the words encoded so far.
        self._sums = Transcript(self._rate)

    def to_json(self) -> Json:
        return {
            "start": seconds(self._words[self._start].start, self._rate),
            "channel": 0,
            **({} if (speaker := self._words[self._start].speaker) is None else {"speaker": speaker}),
            "words": Entries(self._written_words()),
            "end": LazyValue(lambda: seconds(self._words[self.end - 1].end, self._rate)),
            "confidence": LazyValue(lambda: mean_confidence(self._sums.confidence_sum, self._sums.confidences)),
            **({"languages": LazyValue(lambda: list(self._sums.languages))} if self._has_languages else {}),
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
            self._sums.count(word)
            yield written_word(word, self._rate, self._punctuate, with_speaker_confidence=True)

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
