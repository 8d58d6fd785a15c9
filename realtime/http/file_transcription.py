"""Transcribes uploaded files on the engine, and writes their transcripts in OpenAI's formats.

`read_request` reads the options of a form, and `Transcriber` feeds a file to an engine stream and collects a
`Transcript`. No session is involved. In the engine uploads have lower priority than live streams.

`write_answer` writes a transcript as JSON, text or subtitles, and the functions after it write server-sent events.
Responses are made in pieces (`long_responses.py`), because a file may have hours of words. The endpoints are in
`transcription_routes.py`; `listen_route.py` has Deepgram's endpoint, and writes the answers to Deepgram's clients.
"""

from __future__ import annotations

import asyncio
import secrets
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, BinaryIO

from audio.errors import AudioError, TooManyDecoders
from engine import messages
from engine.errors import AtCapacity, EngineError, StreamFinished
from engine.options import MAX_PROMPT_CHARACTERS
from engine.spec import NAMES, ModelSpec
from realtime.dialects.base import decode_json, encode_json
from realtime.dialects.openai import read_formatting
from realtime.errors import ClientFault, Refusal
from realtime.http.long_responses import Entries, TextParts, json_pieces, text_pieces
from realtime.http.upload_forms import MAX_FIELD_BYTES, MAX_REFERENCE_BYTES, REFERENCE_FIELDS, Form
from realtime.serving.engine_api import EngineApi, StreamApi
from realtime.serving.enrolment import REFERENCES, Reference, base64_of, check_speaker_names, enrolled, refused
from realtime.serving.isolated_decoder import decoded_file
from realtime.serving.quota import FairPlaces
from realtime.session.events import Samples, TimedWord
from realtime.session.formatting import (
    Hit,
    format_words,
    paragraph_end,
    redacted_times,
    redactor_of,
    search_words,
    sentence_parts,
)
from realtime.session.redaction import RedactedStream
from realtime.session.settings import NO_FORMATTING, Formatting, Settings
from realtime.session.speakers import SpeakerTimeline, letter_name
from realtime.session.words import (
    Subtitle,
    each_subtitle,
    first_word,
    spoken_lines,
    srt_blocks,
    subtitles,
    text_of,
    timed_words,
    token_logprobs,
    vtt_blocks,
    word_fields,
)
from realtime.text_values import decimal_number

DIARIZED = "diarized_json"
# OpenAI's name of a model that says who speaks.
DIARIZING_MODEL = "gpt-4o-transcribe-diarize"
FORMATS = ("json", "verbose_json", "text", "srt", "vtt", DIARIZED)
# Bytes of a file that are read at once.
READ_BYTES = 256 * 1024
# The longest value of a field, in characters, unless the field has a limit of its own.
MAX_VALUE_CHARACTERS = 256
# The longest `format` in characters; its lists have bounds of their own.
MAX_FORMAT_CHARACTERS = 32 * 1024
# Hits in a file that are listed for one search term.
MAX_HITS = 1000
# OpenAI's field for the names of known speakers; `REFERENCES` is the one for their recordings, as data URLs.
SPEAKER_NAMES = "known_speaker_names"


@dataclass(frozen=True, slots=True)
class UploadRequest:
    """The options of a transcription request. Unsupported fields of the form are not part of it."""

    response_format: str
    # Only the model's options have an effect.
    settings: Settings
    stream: bool
    words: bool
    logprobs: bool
    # Names and recordings of speakers to enrol.
    references: tuple[Reference, ...] = ()


@dataclass(slots=True)
class Transcript:
    """The text of a file. Sums over its words are updated as they arrive, so a response needs no loop over all."""

    sample_rate: int
    # Code of the spoken language, if the model reports one.
    language: str = ""
    text: str = ""
    words: list[TimedWord] = field(default_factory=list)
    samples: int = 0
    tokens: int = 0
    # Number of tokens that have a log-probability.
    chances: int = 0
    # Number and sum of the confidences of words, and the language codes of words in order of appearance.
    confidences: int = 0
    confidence_sum: float = 0.0
    languages: dict[str, None] = field(default_factory=dict)
    # Labels of speakers, the number of words that have theirs, and the names of the enrolled speakers.
    speakers: SpeakerTimeline = field(default_factory=SpeakerTimeline)
    labelled: int = 0
    names: Sequence[str] = ()
    # The text before formatting (redacted), if it was formatted; and the places of each search term.
    raw_text: str | None = None
    hits: dict[str, list[Hit]] = field(default_factory=dict)

    def format(self, formatting: Formatting) -> Iterator[None]:
        """Format the whole text, and search it; a step is the work for a bounded number of words."""
        if not formatting.changes_finals and not formatting.search:
            return
        words: list[TimedWord] = []
        texts: list[str] = []
        for query in formatting.search:
            self.hits[query] = []
        for start, end in sentence_parts(self.words):
            part = self.words[start:end]
            for query, hits in search_words(part, formatting):
                self.hits[query] += hits[: MAX_HITS - len(self.hits[query])]
            text, part = format_words(part, formatting)
            texts.append(text)
            words += part
            yield
        if formatting.changes_finals:
            self.raw_text, self.text, self.words = self.text, "".join(texts).lstrip(), words

    def label(self, labels: messages.Labels | None) -> None:
        """Take in labels, and label the words that are known by now; None: no more labels come."""
        if labels is not None:
            self.speakers.add(labels, 0)
        while self.labelled < len(self.words) and (
            labels is None or self.speakers.is_decided(self.words[self.labelled])
        ):
            self.words[self.labelled] = self.speakers.with_best_label(self.words[self.labelled])
            self.labelled += 1
        if self.labelled:
            self.speakers.forget_before(self.words[self.labelled - 1].start)

    @property
    def seconds(self) -> float:
        return self.samples / self.sample_rate

    def extend(self, delta: str, words: list[TimedWord]) -> str:
        """Add text and words; returns the text as it was added: the first has no white space before it."""
        delta = delta if self.text else delta.lstrip()
        self.text += delta
        if words and not self.words:
            words[0] = first_word(words[0])
        self.add_words(words)
        return delta

    def add_words(self, words: Sequence[TimedWord]) -> None:
        self.words += words
        for word in words:
            self.count(word)

    def count(self, word: TimedWord) -> None:
        """Add a word to the sums."""
        self.chances += len(word.chances)
        if word.confidence is not None:
            self.confidences += 1
            self.confidence_sum += word.confidence
        if word.language:
            self.languages[word.language] = None


def read_request(form: Form, spec: ModelSpec, task: str | None) -> UploadRequest:
    """Read the form. Lists are fields `name[]` or `name`; unknown fields are ignored. Raises Refusal."""
    response_format = _field(form, "response_format") or "json"
    if response_format not in FORMATS:
        text = f"'response_format' must be one of {', '.join(FORMATS)}."
        raise Refusal(400, "invalid_value", text, param="response_format")
    granularities = _chosen(form, "timestamp_granularities", ("word", "segment"))
    logprobs = "logprobs" in _chosen(form, "include", ("logprobs",))
    _check_temperature(_field(form, "temperature"))
    # OpenAI ignores `stream` for this model, so its clients expect a single answer.
    model, stream = _field(form, "model"), _field(form, "stream").lower() in ("true", "1")
    stream = stream and model != "whisper-1"
    speakers = response_format == DIARIZED or _field(form, "speakers").lower() in ("true", "1")
    # OpenAI sends segments with the events of this model.
    speakers = speakers or (stream and model == DIARIZING_MODEL)
    if logprobs and response_format != "json" and not stream:
        text = "'include' with logprobs needs 'response_format' json."
        raise Refusal(400, "invalid_value", text, param="include")
    # Names without recordings have no effect, unless the client wants to know who speaks.
    speakers = speakers or any(name in REFERENCE_FIELDS for name, _ in form.fields)
    settings = _settings(form, spec, task, speakers)
    references = tuple(read_references(form)) if speakers else ()
    return UploadRequest(response_format, settings, stream, "word" in granularities, logprobs, references)


def read_references(form: Form) -> list[Reference]:
    """The names of known speakers and their recordings, which are not decoded here. Raises Refusal."""
    names = form.texts(f"{SPEAKER_NAMES}[]", MAX_REFERENCE_BYTES) + form.texts(SPEAKER_NAMES, MAX_REFERENCE_BYTES)
    urls = form.texts(f"{REFERENCES}[]", MAX_REFERENCE_BYTES) + form.texts(REFERENCES, MAX_REFERENCE_BYTES)
    if len(names) != len(urls):
        raise refused(
            f"'{SPEAKER_NAMES}' has {len(names)} entries and '{REFERENCES}' {len(urls)}; send one recording for each "
            "name.",
            SPEAKER_NAMES,
        )
    check_speaker_names(names, SPEAKER_NAMES)
    return [(name, base64_of(name, url)) for name, url in zip(names, urls, strict=True)]


def _read_format(form: Form) -> Formatting:
    """The field `format`: the same object as in a session, as JSON. Raises Refusal."""
    written = _field(form, "format", MAX_FORMAT_CHARACTERS)
    if not written.lstrip().startswith("{"):
        # Clients send other things by this name, such as the container of the audio; they have no effect.
        return NO_FORMATTING
    try:
        return read_formatting(decode_json(written), "format")
    except ClientFault as fault:
        text = "'format' must be a JSON object." if fault.code == "invalid_json" else fault.message
        raise Refusal(400, "invalid_value", text, param="format") from fault


def _chosen(form: Form, name: str, known: Sequence[str]) -> list[str]:
    """The values of a list field; each must be one of `known`."""
    values = _values(form, name)
    for value in values:
        if value not in known:
            raise Refusal(400, "invalid_value", f"'{name}' can contain {' and '.join(known)}.", param=name)
    return values


def _check_temperature(given: str) -> None:
    """The temperature has no effect, because the text is always the most probable one; an invalid value is refused."""
    try:
        if given:
            decimal_number("temperature", given, 0, 1)
    except ValueError as error:
        raise Refusal(400, "invalid_value", str(error), param="temperature") from None


def _settings(form: Form, spec: ModelSpec, task: str | None, speakers: bool) -> Settings:
    """The model's options, by the same rule as for sockets: hints that the model does not support have no effect."""
    asked = Settings(
        language=_field(form, "language") or None,
        languages=tuple(_values(form, "languages")),
        prompt=_field(form, "prompt", MAX_PROMPT_CHARACTERS),
        keywords=tuple((word, 1.0) for word in _values(form, "keywords")),
        task=task,
        speakers=speakers,
        formatting=_read_format(form),
    )
    try:
        return asked.in_force(spec)
    except ClientFault as fault:
        raise Refusal(400, fault.code, fault.message, param=fault.param) from fault


def _values(form: Form, name: str) -> list[str]:
    """The texts of a list field; the caller checks their length."""
    return form.texts(f"{name}[]", MAX_FIELD_BYTES) + form.texts(name, MAX_FIELD_BYTES)


def _field(form: Form, name: str, most: int = MAX_VALUE_CHARACTERS) -> str:
    """A field that has one value; empty if it is missing."""
    values = form.texts(name, most)
    if len(values) > 1:
        raise Refusal(400, "invalid_value", f"'{name}' was sent {len(values)} times; send it once.", param=name)
    if form.file_field == name.encode():
        raise Refusal(400, "invalid_value", f"'{name}' must be text, not a file.", param=name)
    return values[0] if values else ""


class Transcriber:
    """Transcribes files: as many at the same time as there are places."""

    def __init__(self, engine: EngineApi, places: FairPlaces) -> None:
        self._engine = engine
        self._places = places

    async def deltas(
        self, file: BinaryIO, caller: str, request: UploadRequest, transcript: Transcript
    ) -> AsyncGenerator[str]:
        """The text of a file as it arrives; `transcript` is complete at the end. Raises Refusal."""
        async with self._places.place(caller), self._stream(await self._enrolled(request, transcript)) as stream:
            # A file that is not audio fails at its first piece, before the response has begun.
            feeding = asyncio.create_task(self._feed(file, stream, transcript), name=f"feed {stream.id}")
            try:
                formatting = request.settings.formatting
                redaction = RedactedStream(redactor_of(formatting)) if formatting.redacts else None
                async for delta in self._listen(stream, feeding, transcript, redaction):
                    yield delta
                await feeding
            finally:
                feeding.cancel()
                await asyncio.gather(feeding, return_exceptions=True)

    async def _enrolled(self, request: UploadRequest, transcript: Transcript) -> UploadRequest:
        """The request with the voices of its speakers. Raises Refusal."""
        if not request.references:
            return request
        known = await enrolled(self._engine, request.references)
        transcript.names = [name for name, _ in known]
        return replace(request, settings=replace(request.settings, known_speakers=known), references=())

    @asynccontextmanager
    async def _stream(self, request: UploadRequest) -> AsyncIterator[StreamApi]:
        name = f"file_{secrets.token_hex(8)}"
        try:
            stream = await self._engine.open(name, live=False, options=request.settings.engine_options())
        except AtCapacity as error:
            retry_s = max(1, round(self._engine.capacity().retry_after_s))
            text = "The server is at capacity; try again."
            raise Refusal(503, "server_busy", text, retry_after_s=retry_s, kind="server_error") from error
        except EngineError as error:
            raise _engine_gone() from error
        except ValueError as error:
            raise Refusal(400, "invalid_value", f"{error}.") from error
        try:
            yield stream
        finally:
            await stream.abort()

    async def _listen(
        self,
        stream: StreamApi,
        feeding: asyncio.Task[None],
        transcript: Transcript,
        redaction: RedactedStream | None,
    ) -> AsyncIterator[str]:
        outputs = aiter(stream)
        while True:
            waiting = asyncio.ensure_future(anext(outputs))
            try:
                await asyncio.wait((waiting, feeding), return_when=asyncio.FIRST_COMPLETED)
                if feeding.done():
                    # Raises if the file cannot be decoded.
                    feeding.result()
                output = await waiting
            finally:
                waiting.cancel()
            if isinstance(output, messages.Text) and (output.delta or output.words):
                delta, words = output.delta, timed_words(output)
                if redaction is not None:
                    words = redaction.take(words)
                    delta = text_of(words)
                delta = transcript.extend(delta, words)
                transcript.tokens += len(output.tokens)
                transcript.language = transcript.language or output.language
                # A word may be completed without new text.
                if delta or words:
                    yield delta
            elif isinstance(output, messages.Labels):
                transcript.label(output)
                yield ""
            elif isinstance(output, messages.Closed):
                if redaction is not None and (words := redaction.take([], ends=True)):
                    yield transcript.extend(text_of(words), words)
                transcript.label(None)
                return
            elif isinstance(output, messages.Failed | messages.Dead | messages.Refused):
                raise Refusal(500, "transcription_failed", output.message, kind="server_error")

    async def _feed(self, file: BinaryIO, stream: StreamApi, transcript: Transcript) -> None:
        try:
            async with aclosing(decoded(file)) as steps:
                async for samples in steps:
                    transcript.samples += len(samples)
                    await stream.feed(samples)
            await stream.finish()
        except StreamFinished:
            # The stream has failed meanwhile; its last output says why.
            return
        except EngineError as error:
            raise _engine_gone() from error


async def decoded(file: BinaryIO) -> AsyncGenerator[Samples]:
    """The samples of a file in steps; the next step is decoded when the last one was taken. Raises Refusal."""
    try:
        async with aclosing(decoded_file(file)) as steps:
            async for samples in steps:
                yield samples
    except TooManyDecoders as error:
        raise Refusal(503, error.code, error.client_message, retry_after_s=60, kind="server_error") from error
    except AudioError as error:
        raise Refusal(400, error.code, error.client_message, param="file") from error


def _engine_gone() -> Refusal:
    return Refusal(503, "engine_unavailable", "The engine is not available; try again.", None, 5, "server_error")


# Responses, made in pieces.


PLAIN = "text/plain; charset=utf-8"
# Segments in one piece of a response: fewer than other entries, because a segment has many words and its text is
# compressed for `compression_ratio`.
SEGMENTS_AT_ONCE = 16


def write_answer(transcript: Transcript, request: UploadRequest) -> tuple[Iterator[bytes], str]:
    """The body in pieces, and its content type."""
    lines, names = each_subtitle(transcript.words, transcript.sample_rate), transcript.names
    match request.response_format:
        case "text" if request.settings.speakers:
            return text_pieces(spoken_lines(transcript.words, names)), PLAIN
        case "text":
            return text_pieces(chain(_shown_text(transcript, request), ("\n",))), PLAIN
        case "srt":
            return text_pieces(srt_blocks(lines, names)), PLAIN
        case "vtt":
            return text_pieces(vtt_blocks(lines, names)), PLAIN
        case "json":
            asked = {"logprobs": _logprobs(transcript, empty=None)} if request.logprobs else {}
            asked |= _formatted(transcript, request.settings.formatting)
            shown = TextParts(_shown_text(transcript, request))
            return json_pieces({"text": shown, **asked, "usage": _duration(transcript)}), "application/json"
    if request.response_format == DIARIZED:
        segments = (diarized_segment(number, line, names) for number, line in enumerate(lines))
        whole: dict[str, Any] = {
            "task": request.settings.task or "transcribe",
            "duration": round(transcript.seconds, 3),
            "text": transcript.text,
            "segments": Entries(segments, at_once=SEGMENTS_AT_ONCE),
            "usage": _duration(transcript),
            **_formatted(transcript, request.settings.formatting),
        }
        return json_pieces(whole), "application/json"
    body: dict[str, Any] = {
        "task": request.settings.task or "transcribe",
        "language": language_name(transcript, request.settings),
        "duration": round(transcript.seconds, 3),
        "text": TextParts(_shown_text(transcript, request)),
        "segments": Entries(
            (_segment(number, line, names) for number, line in enumerate(lines)), at_once=SEGMENTS_AT_ONCE
        ),
        "usage": _duration(transcript),
        **_formatted(transcript, request.settings.formatting),
    }
    if request.words:
        body["words"] = Entries(word_fields(word, transcript.sample_rate, names) for word in transcript.words)
    return json_pieces(body), "application/json"


def _shown_text(transcript: Transcript, request: UploadRequest) -> Iterator[str]:
    """The text in parts; with `paragraphs` there is an empty line between two of them."""
    if not request.settings.formatting.paragraphs:
        yield transcript.text
        return
    start, words = 0, transcript.words
    while start < len(words):
        end = paragraph_end(words, start, transcript.sample_rate)
        yield ("\n\n" if start else "") + " ".join(word.text.strip() for word in words[start:end])
        start = end


def _formatted(transcript: Transcript, formatting: Formatting) -> dict[str, Any]:
    """Fields of a text that was formatted, redacted or searched; times in seconds."""
    rate = transcript.sample_rate
    fields: dict[str, Any] = {} if transcript.raw_text is None else {"raw_text": transcript.raw_text}
    if formatting.redacts:
        fields["redactions"] = Entries(_time(start, end, rate) for start, end in redacted_times(transcript.words))
    if formatting.search:
        fields["search"] = Entries(
            (
                {"query": query, "hits": Entries(_time(hit.start, hit.end, rate) for hit in hits)}
                for query, hits in transcript.hits.items()
            ),
            nested=True,
        )
    return fields


def _time(start: int, end: int, sample_rate: int) -> dict[str, float]:
    return {"start": round(start / sample_rate, 3), "end": round(end / sample_rate, 3)}


def _duration(transcript: Transcript) -> dict[str, Any]:
    return {"type": "duration", "seconds": round(transcript.seconds, 3)}


def _logprobs(transcript: Transcript, empty: list[Any] | None) -> Entries | list[Any] | None:
    """The log-probabilities of all tokens; `empty` if the model has none."""
    if not transcript.chances:
        return empty
    # None is not written, but it counts as work in `Entries`.
    return Entries(entry for word in transcript.words for entry in token_logprobs((word,)) or (None,))


def language_name(transcript: Transcript, settings: Settings) -> str:
    """The name of the text's language, as in OpenAI's responses."""
    code = "en" if settings.task else transcript.language or settings.language
    return NAMES[code] if code else "unknown"


def diarized_segment(number: int, line: Subtitle, names: Sequence[str]) -> dict[str, Any]:
    """A segment of one speaker, as in OpenAI's responses and events."""
    return {
        "type": "transcript.text.segment",
        "id": f"seg_{number:03}",
        "start": round(line.start, 3),
        "end": round(line.end, 3),
        "text": line.text,
        "speaker": letter_name(line.speaker or 0, names),
    }


def _segment(number: int, line: Subtitle, names: Sequence[str]) -> dict[str, Any]:
    logs = [log for word in line.words for _, log in word.chances]
    unheard = [word.no_speech for word in line.words if word.no_speech is not None]
    spelled = line.text.encode()
    return {
        "id": number,
        "seek": 0,
        "start": round(line.start, 3),
        "end": round(line.end, 3),
        "text": line.text,
        "tokens": [],
        "temperature": 0.0,
        "avg_logprob": round(sum(logs) / len(logs), 4) if logs else 0.0,
        "compression_ratio": round(len(spelled) / len(zlib.compress(spelled)), 3),
        "no_speech_prob": round(sum(unheard) / len(unheard), 4) if unheard else 0.0,
        **({} if line.speaker is None else {"speaker": letter_name(line.speaker, names)}),
    }


def sse(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return f"data: {encode_json(body)}\n\n".encode()


def sse_delta(delta: str, transcript: Transcript, first: int, request: UploadRequest) -> bytes:
    """The event with a delta, and with the requested fields for the words from index `first` on; empty if there is
    nothing to send."""
    extras: dict[str, Any] = {}
    words = transcript.words[first:]
    if request.words:
        extras["words"] = [word_fields(word, transcript.sample_rate, transcript.names) for word in words]
    if request.logprobs:
        extras["logprobs"] = token_logprobs(words) or []
    if not delta and not any(extras.values()):
        return b""
    return sse({"type": "transcript.text.delta", "delta": delta, **extras})


class SegmentEvents:
    """The events with segments of one speaker each, as soon as their labels are known."""

    def __init__(self, transcript: Transcript) -> None:
        self._transcript = transcript
        # Words and segments that were sent.
        self._words = self._segments = 0

    def due(self, ended: bool = False) -> list[bytes]:
        """The events that are due now. The last segment may go on until the transcript has `ended`."""
        known = self._transcript.words[self._words : self._transcript.labelled]
        lines = subtitles(known, self._transcript.sample_rate)
        events = []
        for line in lines if ended else lines[:-1]:
            events.append(sse(diarized_segment(self._segments, line, self._transcript.names)))
            self._segments, self._words = self._segments + 1, self._words + len(line.words)
        return events


def sse_done(transcript: Transcript, request: UploadRequest) -> Iterator[bytes]:
    """The last events, in pieces."""
    audio_tokens = round(transcript.seconds * 12.5)
    usage = {
        "type": "tokens",
        "input_tokens": audio_tokens,
        "output_tokens": transcript.tokens,
        "total_tokens": audio_tokens + transcript.tokens,
        "input_token_details": {"text_tokens": 0, "audio_tokens": audio_tokens},
    }
    extra: dict[str, Any] = {"duration": round(transcript.seconds, 3)} if request.words else {}
    if request.logprobs:
        extra["logprobs"] = _logprobs(transcript, empty=[])
    yield b"data: "
    extra |= _formatted(transcript, request.settings.formatting)
    shown = TextParts(_shown_text(transcript, request))
    yield from json_pieces({"type": "transcript.text.done", "text": shown, "usage": usage, **extra})
    yield b"\n\ndata: [DONE]\n\n"
