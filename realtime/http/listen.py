"""`POST /v1/listen`: a file as Deepgram's clients send it, the body itself, and the answer in Deepgram's shape."""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import Iterator, Sequence
from typing import BinaryIO
from uuid import uuid4

from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import Response

from realtime.dialects.deepgram_query import READ_ONCE, FileQuery, read_file_query
from realtime.dialects.deepgram_shapes import Json, alternative, model_info, now_text
from realtime.dialects.json_frames import encode_json
from realtime.errors import Refusal
from realtime.http.context import Context
from realtime.http.files import READ_BYTES, Transcript, UploadRequest
from realtime.http.forms import FormReader, Upload
from realtime.http.gateway import check_once
from realtime.http.uploads import UploadRoutes
from realtime.session.events import TimedWord
from realtime.session.settings import AudioFormat, Settings
from realtime.session.words import languages_of

# How WAV files number the raw formats, and how long their samples are.
WAV_FORMATS = {"audio/pcm": (1, 2), "audio/pcmu": (7, 1), "audio/pcma": (6, 1)}
UNKNOWN_LENGTH = 0xFFFF_FFFF


class ListenRoute:
    """One place among the uploads, like a file of any other client."""

    def __init__(self, context: Context, forms: FormReader, uploads: UploadRoutes) -> None:
        self._context = context
        self._forms = forms
        self._uploads = uploads

    async def transcribe(self, request: Request) -> Response:
        self._context.caller_of(request)
        check_once(request.query_params, READ_ONCE)
        query = read_file_query(request.query_params, request.query_params.multi_items())
        taken = query.settings.in_force(self._context.engine.spec)
        if request.headers.get("content-type", "").startswith("application/json"):
            text = "Files are not fetched from elsewhere; send the audio itself as the body, without a 'url'."
            raise Refusal(400, "url_not_supported", text)
        head = b"" if query.format is None else _wav_head(query.format)
        upload = await self._forms.open_body(request, head)
        try:
            return await self._answer(upload, query, taken, request, len(head))
        except Refusal as refusal:
            self._uploads.count(refusal.code)
            raise
        finally:
            await upload.close()

    async def _answer(self, upload: Upload, query: FileQuery, taken: Settings, request: Request, head: int) -> Response:
        file = upload.form["file"]
        assert isinstance(file, UploadFile)
        sha256 = await asyncio.to_thread(_digest, file.file, head)
        wanted = UploadRequest("json", taken, stream=False, words=True, logprobs=False)
        transcript = await self._uploads.transcript(file.file, wanted, request)
        request_id = str(uuid4())
        body = write_answer(transcript, query, self._context.sessions.models()[0], request_id, sha256)
        return Response(encode_json(body), media_type="application/json", headers={"dg-request-id": request_id})


def write_answer(transcript: Transcript, query: FileQuery, model: str, request_id: str, sha256: str) -> Json:
    rate, words = transcript.sample_rate, transcript.words
    whole = alternative(transcript.text, words, rate, punctuate=query.punctuate)
    channel: Json = {"alternatives": [whole]}
    if query.settings.language in (None, "", "multi") and (languages := languages_of(words)):
        channel["detected_language"] = languages[0]
    results: Json = {"channels": [channel]}
    if query.utterances:
        results["utterances"] = [
            _utterance(part, rate, query) for part in split_words(words, round(query.split_s * rate))
        ]
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
    return {"metadata": metadata, "results": results}


def split_words(words: Sequence[TimedWord], gap: int) -> Iterator[list[TimedWord]]:
    """Words in parts, cut where a pause of at least `gap` samples lies between two of them."""
    part: list[TimedWord] = []
    for word in words:
        if part and word.start - part[-1].end >= gap:
            yield part
            part = []
        part.append(word)
    if part:
        yield part


def _utterance(words: list[TimedWord], rate: int, query: FileQuery) -> Json:
    text = " ".join(word.text for word in words)
    written = alternative(text, words, rate, punctuate=query.punctuate)
    times = {"start": round(words[0].start / rate, 3), "end": round(words[-1].end / rate, 3)}
    return {**times, "channel": 0, **written, "id": str(uuid4())}


def _wav_head(audio_format: AudioFormat) -> bytes:
    """Raw samples behind this are a WAV file, and are read like any other."""
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
    """Of what the client sent, without the bytes of ours before it."""
    digest = hashlib.sha256()
    file.seek(head)
    while piece := file.read(READ_BYTES):
        digest.update(piece)
    file.seek(0)
    return digest.hexdigest()
