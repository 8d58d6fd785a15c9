"""The fields of all events on the wire as msgspec classes, and the JSON schema made from them (`/events.schema.json`).

This is a description: the dialects read and write plain dictionaries and do not use these classes. The tests decode
every event of their sockets with them, so a field that is missing here fails. Where the code has a table of values, the
schema has that table. The published schema allows more fields, because later versions add some.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from realtime.dialects.base import MAX_EVENT_ID, Json
from realtime.dialects.openai import (
    BETA_FORMATS,
    DELAYS,
    EAGERNESS,
    IDLE_TIMEOUT_MS,
    MAX_DELAY_MS,
    MAX_PROMPT,
)
from realtime.session.settings import (
    BETTER_FINALS,
    EAGER_EOT_THRESHOLDS,
    EOT_THRESHOLDS,
    EOT_TIMEOUTS_MS,
    INCLUDED,
    KINDS,
    MAX_KNOWN_SPEAKERS,
    MAX_RATE,
    MAX_SPEAKER_NAME,
    MAX_TERMS,
    MAX_URL_CHARACTERS,
    MIN_RATE,
    PUBLISHED_NAME,
    STREAMED_FINALS,
)


def one_of(values: Sequence[str]) -> Meta:
    """The values of a string, from a table of the code."""
    return Meta(extra_json_schema={"enum": list(values)})


WebhookUrl = Annotated[str, Meta(min_length=1, max_length=MAX_URL_CHARACTERS)]
PublishedName = Annotated[str, Meta(pattern=f"^(?:{PUBLISHED_NAME.pattern})$")]
Seconds = Annotated[float, Meta(description="In seconds of the session, or of the file.")]


class Shape(Struct, forbid_unknown_fields=True):
    """An object that the server sends: it has exactly these fields."""


class Sent(Struct):
    """An object that a client sends. Fields that the server does not know have no effect."""


# Parts of OpenAI's events


class Word(Shape):
    word: str
    start: Seconds
    end: Seconds
    confidence: float | UnsetType = UNSET
    speaker: Annotated[str, Meta(description="A, B, ... or an enrolled name.")] | UnsetType = UNSET


class Logprob(Shape):
    token: str
    logprob: float
    bytes: list[int]


class Span(Shape):
    start: Seconds
    end: Seconds


class Search(Shape):
    query: str
    hits: list[Span]


class FormattedText(Shape, kw_only=True):
    """What formatting, redaction and search add to the text of a file."""

    raw_text: str | UnsetType = UNSET
    redactions: list[Span] | UnsetType = UNSET
    search: list[Search] | UnsetType = UNSET


class FormatOptions(Sent):
    """How the text of finals is written; see docs/formatting.md. Other keys are refused."""

    smart: bool | UnsetType = UNSET
    numerals: bool | UnsetType = UNSET
    profanity_filter: bool | UnsetType = UNSET
    paragraphs: Annotated[bool, Meta(description="Files only.")] | UnsetType = UNSET
    redact: list[Annotated[str, one_of(KINDS)]] | UnsetType = UNSET
    names: Annotated[list[str], Meta(max_length=MAX_TERMS)] | UnsetType = UNSET
    replace: Annotated[dict[str, str], Meta(max_length=MAX_TERMS)] | UnsetType = UNSET
    search: Annotated[list[str], Meta(max_length=MAX_TERMS)] | UnsetType = UNSET


Delay = Annotated[str, one_of(DELAYS)] | Annotated[int, Meta(ge=0, le=MAX_DELAY_MS)]
Finals = Annotated[str, one_of((BETTER_FINALS, STREAMED_FINALS))]


class KnownSpeaker(Sent):
    """A voice by its name. Without a reference it is one that the session has enrolled before."""

    name: Annotated[str, Meta(min_length=1, max_length=MAX_SPEAKER_NAME)]
    reference: Annotated[str, Meta(description="A data URL with 2 to 10 s of this voice.")] | None | UnsetType = UNSET


class TranscriptionOptions(Sent):
    model: str | None | UnsetType = UNSET
    language: str | None | UnsetType = UNSET
    prompt: Annotated[str, Meta(max_length=MAX_PROMPT)] | None | UnsetType = UNSET
    languages: list[str] | None | UnsetType = UNSET
    keywords: list[str] | None | UnsetType = UNSET
    task: str | None | UnsetType = UNSET
    delay: Delay | None | UnsetType = UNSET
    finals: Finals | None | UnsetType = UNSET
    format: FormatOptions | None | UnsetType = UNSET
    known_speakers: Annotated[list[KnownSpeaker], Meta(max_length=MAX_KNOWN_SPEAKERS)] | None | UnsetType = UNSET


class EnrolledSpeaker(Shape):
    name: str


class Transcription(Shape):
    model: str
    language: str | None
    prompt: str | None
    task: str | UnsetType = UNSET
    languages: list[str] | None | UnsetType = UNSET
    keywords: list[str] | None | UnsetType = UNSET
    delay: Delay | UnsetType = UNSET
    finals: Finals | UnsetType = UNSET
    format: FormatOptions | UnsetType = UNSET
    known_speakers: list[EnrolledSpeaker] | UnsetType = UNSET


AUDIO_TYPES = ("audio/pcm", "audio/pcm-f32", "audio/pcmu", "audio/pcma", "audio/webm", "audio/ogg")


class AudioFormat(Shape):
    type: Annotated[str, one_of(AUDIO_TYPES)]
    rate: Annotated[int, Meta(ge=MIN_RATE, le=MAX_RATE)] | UnsetType = UNSET
    transport: Literal["binary"] | UnsetType = UNSET


class TurnDetection(Shape):
    """How the server ends turns. Null instead of this object: the client commits."""

    type: Literal["server_vad", "semantic_vad"]
    threshold: Annotated[float, Meta(ge=0, le=1)] | UnsetType = UNSET
    prefix_padding_ms: int | UnsetType = UNSET
    silence_duration_ms: int | UnsetType = UNSET
    idle_timeout_ms: Annotated[int, Meta(ge=IDLE_TIMEOUT_MS[0], le=IDLE_TIMEOUT_MS[1])] | None | UnsetType = UNSET
    eagerness: Annotated[str, one_of(EAGERNESS)] | UnsetType = UNSET
    speaker_change: (
        Annotated[bool, Meta(description="A turn ends where the speaker changes; needs speakers in include.")]
        | None
        | UnsetType
    ) = UNSET
    create_response: bool | UnsetType = UNSET
    interrupt_response: bool | UnsetType = UNSET


class NoiseReduction(Sent):
    type: str | UnsetType = UNSET


class InputOptions(Sent):
    format: AudioFormat | None | UnsetType = UNSET
    transcription: TranscriptionOptions | None | UnsetType = UNSET
    noise_reduction: NoiseReduction | None | UnsetType = UNSET
    turn_detection: TurnDetection | None | UnsetType = UNSET


class AudioOptions(Sent):
    input: InputOptions | None | UnsetType = UNSET


Include = list[Annotated[str, one_of(INCLUDED)]]


class SessionOptions(Sent):
    """A session that a client asks for. A key that is missing changes nothing, null clears it."""

    type: str | UnsetType = UNSET
    audio: AudioOptions | None | UnsetType = UNSET
    include: Include | None | UnsetType = UNSET
    publish: PublishedName | None | UnsetType = UNSET
    on_final: WebhookUrl | None | UnsetType = UNSET


class BetaSessionOptions(Sent):
    """The same in the shape of OpenAI's beta."""

    input_audio_format: Annotated[str, one_of(tuple(BETA_FORMATS))] | None | UnsetType = UNSET
    input_audio_transcription: TranscriptionOptions | None | UnsetType = UNSET
    input_audio_noise_reduction: NoiseReduction | None | UnsetType = UNSET
    turn_detection: TurnDetection | None | UnsetType = UNSET
    include: Include | None | UnsetType = UNSET
    publish: PublishedName | None | UnsetType = UNSET
    on_final: WebhookUrl | None | UnsetType = UNSET


class AudioInput(Shape):
    format: AudioFormat
    transcription: Transcription
    noise_reduction: None
    turn_detection: TurnDetection | None


class Audio(Shape):
    input: AudioInput


class Resume(Shape):
    token: str
    keep_seconds: int


class Session(Shape):
    """The session in force."""

    type: Literal["transcription"]
    object: Literal["realtime.transcription_session"]
    id: str
    expires_at: int
    audio: Audio
    include: Include | None
    resume: Resume | UnsetType = UNSET
    publish: PublishedName | UnsetType = UNSET
    on_final: WebhookUrl | UnsetType = UNSET


class IssuedSecret(Shape):
    value: str
    expires_at: int


class BetaSession(Shape):
    """The session in force, in the shape of OpenAI's beta."""

    id: str
    object: Literal["realtime.transcription_session"]
    input_audio_format: Annotated[str, one_of(tuple(BETA_FORMATS))]
    input_audio_transcription: Transcription
    input_audio_noise_reduction: None
    turn_detection: TurnDetection | None
    modalities: list[Literal["text"]]
    include: Include | None
    client_secret: IssuedSecret | None
    publish: PublishedName | UnsetType = UNSET
    on_final: WebhookUrl | UnsetType = UNSET


class Content(Shape):
    type: Literal["input_audio"]
    transcript: None


class Item(Shape):
    id: str
    object: Literal["realtime.item"]
    type: Literal["message"]
    status: Literal["completed"]
    role: Literal["user"]
    content: list[Content]


class ErrorDetails(Shape):
    type: str
    code: str
    message: str
    param: str | None
    event_id: str | None | UnsetType = UNSET


class DurationUsage(Shape):
    type: Literal["duration"]
    seconds: float


class Language(Shape):
    code: str


# OpenAI's events from the server; `seq` with `session.resume` in `include`


class Event(Shape, kw_only=True, tag_field="type"):
    event_id: str
    seq: int | UnsetType = UNSET


EndOfTurn = Annotated[float, Meta(ge=0, le=1, description="The probability that the turn is over.")]


class SessionCreated(Event, tag="session.created"):
    id: str
    created: int
    session: Session


class BetaCreated(Event, tag="transcription_session.created"):
    id: str
    created: int
    session: BetaSession


class SessionResumed(Event, tag="session.resumed"):
    id: str
    created: int
    session: Annotated[dict[str, Any], Meta(description="As in the greeting: Session, or BetaSession for the beta.")]
    received_samples: int


class SessionUpdated(Event, tag="session.updated"):
    session: Session


class BetaUpdated(Event, tag="transcription_session.updated"):
    session: BetaSession


class SessionClosing(Event, tag="session.closing"):
    reason: str


class SpeechStarted(Event, tag="input_audio_buffer.speech_started"):
    audio_start_ms: int
    item_id: str


class SpeechStopped(Event, tag="input_audio_buffer.speech_stopped"):
    audio_end_ms: int
    item_id: str
    end_of_turn_confidence: EndOfTurn | UnsetType = UNSET


class PauseScored(Event, tag="input_audio_buffer.pause_scored"):
    item_id: str
    audio_end_ms: int
    end_of_turn_confidence: EndOfTurn


class TimeoutTriggered(Event, tag="input_audio_buffer.timeout_triggered"):
    item_id: str
    audio_start_ms: int
    audio_end_ms: int


class BufferCommitted(Event, tag="input_audio_buffer.committed"):
    item_id: str
    previous_item_id: str | None


class BufferCleared(Event, tag="input_audio_buffer.cleared"):
    pass


class BufferAcknowledged(Event, tag="input_audio_buffer.acknowledged"):
    samples: int


class BufferInjected(Event, tag="input_audio_buffer.injected"):
    items: int


class ItemAdded(Event, tag="conversation.item.added"):
    item: Item
    previous_item_id: str | None


class ItemDone(Event, tag="conversation.item.done"):
    item: Item
    previous_item_id: str | None


class ItemCreated(Event, tag="conversation.item.created"):
    item: Item
    previous_item_id: str | None


class TranscriptionDelta(Event, tag="conversation.item.input_audio_transcription.delta"):
    item_id: str
    content_index: int
    delta: str
    words: list[Word] | UnsetType = UNSET
    logprobs: list[Logprob] | None | UnsetType = UNSET


class TranscriptionCompleted(Event, tag="conversation.item.input_audio_transcription.completed"):
    item_id: str
    content_index: int
    transcript: str
    usage: DurationUsage
    words: list[Word] | UnsetType = UNSET
    logprobs: list[Logprob] | None | UnsetType = UNSET
    audio_start_ms: int | UnsetType = UNSET
    audio_end_ms: int | UnsetType = UNSET
    speaker: str | UnsetType = UNSET
    end_of_turn_confidence: EndOfTurn | UnsetType = UNSET
    languages: list[Language] | UnsetType = UNSET
    raw_transcript: str | UnsetType = UNSET
    redactions: list[Span] | UnsetType = UNSET
    search: list[Search] | UnsetType = UNSET


class TranscriptionFailed(Event, tag="conversation.item.input_audio_transcription.failed"):
    item_id: str
    content_index: int
    error: ErrorDetails


class ErrorEvent(Event, tag="error"):
    error: ErrorDetails


OPENAI_SERVER: tuple[type[Struct], ...] = (
    *(SessionCreated, BetaCreated, SessionResumed, SessionUpdated, BetaUpdated, SessionClosing),
    *(SpeechStarted, SpeechStopped, TimeoutTriggered, BufferCommitted, BufferCleared, BufferAcknowledged),
    *(PauseScored, BufferInjected, ItemAdded, ItemDone, ItemCreated),
    *(TranscriptionDelta, TranscriptionCompleted, TranscriptionFailed, ErrorEvent),
)


# OpenAI's and vLLM's events from the client


class ClientEvent(Sent, kw_only=True, tag_field="type"):
    event_id: Annotated[str, Meta(max_length=MAX_EVENT_ID)] | UnsetType = UNSET


class UpdateSession(ClientEvent, tag="session.update"):
    session: SessionOptions | UnsetType = UNSET
    model: Annotated[str, Meta(description="vLLM's clients send this instead of 'session'.")] | UnsetType = UNSET


class UpdateBetaSession(ClientEvent, tag="transcription_session.update"):
    session: BetaSessionOptions


class Append(ClientEvent, tag="input_audio_buffer.append"):
    audio: Annotated[str, Meta(extra_json_schema={"contentEncoding": "base64"})]


class CommitBuffer(ClientEvent, tag="input_audio_buffer.commit"):
    final: Annotated[bool, Meta(description="vLLM: ends the utterance.")] | UnsetType = UNSET


class ClearBuffer(ClientEvent, tag="input_audio_buffer.clear"):
    pass


class DeclareGap(ClientEvent, tag="input_audio_buffer.gap"):
    """Silence that is declared instead of sent: `duration_ms` or `samples`."""

    duration_ms: Annotated[float, Meta(ge=0)] | UnsetType = UNSET
    samples: Annotated[float, Meta(ge=0)] | UnsetType = UNSET


class InjectItems(ClientEvent, tag="input_audio_buffer.inject"):
    items: Annotated[list[dict[str, Any] | None], Meta(description="Items of POST /v1/audio/render.")]


OPENAI_CLIENT: tuple[type[Struct], ...] = (
    *(UpdateSession, UpdateBetaSession, Append, CommitBuffer, ClearBuffer, DeclareGap, InjectItems),
)


# vLLM's events from the server, after the greeting `session.created`


class VllmUpdated(Shape, tag_field="type", tag="session.updated"):
    id: str
    model: str


class VllmDelta(Shape, tag_field="type", tag="transcription.delta"):
    delta: str


class VllmUsage(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: None


class VllmDone(Shape, tag_field="type", tag="transcription.done"):
    text: str
    usage: VllmUsage


class VllmError(Shape, tag_field="type", tag="error"):
    error: str
    code: str


VLLM_SERVER: tuple[type[Struct], ...] = (VllmUpdated, VllmDelta, VllmDone, VllmError)


# Deepgram's messages; also parts of its answers to files


class ListenWord(Shape):
    word: str
    start: Seconds
    end: Seconds
    confidence: float
    punctuated_word: str | UnsetType = UNSET
    speaker: int | UnsetType = UNSET
    speaker_confidence: float | UnsetType = UNSET


class ListenHit(Shape):
    confidence: float
    start: Seconds
    end: Seconds
    snippet: str


class ListenSearch(Shape):
    query: str
    hits: list[ListenHit]


class ListenAlternative(Shape):
    transcript: str
    confidence: float
    words: list[ListenWord]
    languages: list[str] | UnsetType = UNSET
    raw_transcript: str | UnsetType = UNSET


class ChannelFields(Shape, kw_only=True):
    """What channels of live and of recorded audio have beside their alternatives."""

    search: list[ListenSearch] | UnsetType = UNSET
    detected_language: str | UnsetType = UNSET


class ListenChannel(ChannelFields):
    alternatives: list[ListenAlternative]


class ListenModel(Shape):
    name: str
    version: str
    arch: str


class ResultMetadata(Shape):
    request_id: str
    model_info: ListenModel
    model_uuid: str


class Message(Shape, tag_field="type"):
    pass


class Results(Message, tag="Results"):
    channel_index: list[int]
    start: Seconds
    duration: float
    is_final: bool
    speech_final: bool
    from_finalize: bool
    channel: ListenChannel
    metadata: ResultMetadata


class ListenSpeechStarted(Message, tag="SpeechStarted"):
    channel: list[int]
    timestamp: Seconds


class UtteranceEnd(Message, tag="UtteranceEnd"):
    channel: list[int]
    last_word_end: Seconds


class Metadata(Message, tag="Metadata"):
    transaction_key: str
    request_id: str
    sha256: str
    created: str
    duration: float
    channels: int


class ListenConfigured(Message, tag="ConfigureSuccess"):
    request_id: str
    keyterms: list[str] | UnsetType = UNSET


class ListenConfigureFailed(Message, tag="ConfigureFailure"):
    request_id: str
    code: str
    description: str


class ListenError(Message, tag="Error"):
    variant: str
    description: str
    message: str


DEEPGRAM_SERVER: tuple[type[Struct], ...] = (
    *(Results, ListenSpeechStarted, UtteranceEnd, Metadata, ListenConfigured, ListenConfigureFailed, ListenError),
)


class KeepAlive(Sent, tag_field="type", tag="KeepAlive"):
    pass


class Finalize(Sent, tag_field="type", tag="Finalize"):
    channel: int | UnsetType = UNSET


class CloseStream(Sent, tag_field="type", tag="CloseStream"):
    pass


class ConfigureKeyterms(Sent, tag_field="type", tag="Configure"):
    keyterms: list[str] | None | UnsetType = UNSET


DEEPGRAM_CLIENT: tuple[type[Struct], ...] = (KeepAlive, Finalize, CloseStream, ConfigureKeyterms)


# Deepgram Flux


class FluxWord(Shape):
    word: str
    confidence: float
    start: Seconds
    end: Seconds


EotThreshold = Annotated[float, Meta(ge=EOT_THRESHOLDS[0], le=EOT_THRESHOLDS[1])]
EagerThreshold = Annotated[float, Meta(ge=EAGER_EOT_THRESHOLDS[0], le=EAGER_EOT_THRESHOLDS[1])]
EotTimeout = Annotated[int, Meta(ge=EOT_TIMEOUTS_MS[0], le=EOT_TIMEOUTS_MS[1])]


class Thresholds(Shape):
    eot_threshold: EotThreshold
    eot_timeout_ms: EotTimeout
    eager_eot_threshold: EagerThreshold | UnsetType = UNSET


class FluxMessage(Shape, tag_field="type"):
    request_id: str
    sequence_id: int


class Connected(FluxMessage, tag="Connected"):
    pass


class TurnInfo(FluxMessage, tag="TurnInfo"):
    event: Literal["StartOfTurn", "Update", "EagerEndOfTurn", "TurnResumed", "EndOfTurn"]
    turn_index: int
    audio_window_start: Seconds
    audio_window_end: Seconds
    transcript: str
    words: list[FluxWord]
    end_of_turn_confidence: float
    trigger: Literal["model", "timeout", "manual", "length", "failure"] | UnsetType = UNSET
    languages: list[str] | UnsetType = UNSET
    languages_hinted: list[str] | UnsetType = UNSET


class FluxConfigured(FluxMessage, tag="ConfigureSuccess"):
    thresholds: Thresholds
    keyterms: list[str]


class FluxConfigureFailed(FluxMessage, tag="ConfigureFailure"):
    code: str
    description: str


class FluxWarning(FluxMessage, tag="Warning"):
    code: str
    description: str


class FluxError(FluxMessage, tag="Error"):
    code: str
    description: str


FLUX_SERVER: tuple[type[Struct], ...] = (
    *(Connected, TurnInfo, FluxConfigured, FluxConfigureFailed, FluxWarning, FluxError),
)


class ForceEndTurn(Sent, tag_field="type", tag="ForceEndTurn"):
    pass


class ThresholdChanges(Sent):
    eot_threshold: EotThreshold | None | UnsetType = UNSET
    eot_timeout_ms: EotTimeout | None | UnsetType = UNSET
    eager_eot_threshold: EagerThreshold | None | UnsetType = UNSET


class ConfigureFlux(Sent, tag_field="type", tag="Configure"):
    thresholds: ThresholdChanges | None | UnsetType = UNSET
    keyterms: list[str] | str | None | UnsetType = UNSET


FLUX_CLIENT: tuple[type[Struct], ...] = (CloseStream, ForceEndTurn, KeepAlive, ConfigureFlux)


# What the viewers of a published session get


class ViewerEvent(Shape, tag_field="type"):
    seq: int


class OpenLine(Shape):
    id: str
    text: str


class Line(Shape):
    id: str
    text: str
    start: Seconds
    end: Seconds


class Snapshot(ViewerEvent, tag="snapshot"):
    name: str
    live: bool
    lines: list[Line]
    open: list[OpenLine]


class ViewerDelta(ViewerEvent, tag="delta"):
    id: str
    text: str


class ViewerFinal(ViewerEvent, tag="final"):
    id: str
    text: str
    start: Seconds
    end: Seconds


class Removed(ViewerEvent, tag="removed"):
    id: str


class Begin(ViewerEvent, tag="begin"):
    pass


class End(ViewerEvent, tag="end"):
    pass


class Closed(Shape, tag_field="type", tag="closed"):
    reason: str


VIEWER: tuple[type[Struct], ...] = (Snapshot, ViewerDelta, ViewerFinal, Removed, Begin, End, Closed)


# What a stream that the server pulls adds to the events of its session


class StreamSession(Shape, tag_field="type", tag="stream.session"):
    stream_id: str
    session_id: str
    stream_seconds: float


class StreamGap(Shape, tag_field="type", tag="stream.gap"):
    stream_id: str
    audio_start_ms: int
    audio_end_ms: int


class StreamStatus(Shape, tag_field="type", tag="stream.status"):
    stream_id: str
    status: str
    message: str | None


STREAM: tuple[type[Struct], ...] = (StreamSession, StreamGap, StreamStatus)


# What a WebRTC call adds to the events of its session


class CallGap(Shape, tag_field="type", tag="call.gap"):
    """Audio that the network lost; the session has silence there."""

    event_id: str
    audio_start_ms: int
    audio_end_ms: int


class CallEnded(Shape, tag_field="type", tag="call.ended"):
    """The server ends the call. The codes are those of WebSockets."""

    event_id: str
    code: int
    reason: str


CALL: tuple[type[Struct], ...] = (CallGap, CallEnded)


# What a transcription with `stream=true` sends


class TokenDetails(Shape):
    text_tokens: int
    audio_tokens: int


class TokenUsage(Shape):
    type: Literal["tokens"]
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_token_details: TokenDetails


class TextDelta(Shape, tag_field="type", tag="transcript.text.delta"):
    delta: str
    words: list[Word] | UnsetType = UNSET
    logprobs: list[Logprob] | UnsetType = UNSET


class TextSegment(Shape, tag_field="type", tag="transcript.text.segment"):
    """A segment of one speaker; also in the answer `diarized_json`."""

    id: str
    start: Seconds
    end: Seconds
    text: str
    speaker: str


class TextDone(FormattedText, tag_field="type", tag="transcript.text.done"):
    text: str
    usage: TokenUsage
    duration: float | UnsetType = UNSET
    logprobs: list[Logprob] | UnsetType = UNSET


UPLOAD: tuple[type[Struct], ...] = (TextDelta, TextSegment, TextDone)


# The schema

# Each name is a definition of the schema that stands for any event of its list.
UNIONS: dict[str, tuple[type[Struct], ...]] = {
    "OpenAIClientEvent": OPENAI_CLIENT,
    "OpenAIServerEvent": OPENAI_SERVER,
    "VllmServerEvent": VLLM_SERVER,
    "DeepgramClientMessage": DEEPGRAM_CLIENT,
    "DeepgramServerMessage": DEEPGRAM_SERVER,
    "FluxClientMessage": FLUX_CLIENT,
    "FluxServerMessage": FLUX_SERVER,
    "ViewerEvent": VIEWER,
    "PulledStreamEvent": (*STREAM, *OPENAI_SERVER),
    "CallEvent": (*CALL, *OPENAI_SERVER),
    "UploadEvent": UPLOAD,
}


def union(shapes: Sequence[type[Struct]]) -> Any:
    """The type that stands for any of these events, for a decoder or a schema."""
    return reduce(or_, shapes)


def schema(*, strict: bool = False) -> Json:
    """The JSON schema of all events. `strict`: a field that is not described is wrong."""
    shapes = [union(shapes) for shapes in UNIONS.values()]
    any_of, definitions = msgspec.json.schema_components(shapes, ref_template="#/$defs/{name}")
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Events of Tickertape's sockets and event streams",
        "anyOf": [{"$ref": f"#/$defs/{name}"} for name in UNIONS],
        "$defs": definitions | dict(zip(UNIONS, any_of, strict=True)),
    }
    return document if strict else without_closing(document)


def without_closing(value: Any) -> Any:
    """A schema in which objects may have more fields than it describes."""
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if not (key == "additionalProperties" and item is False)}
        return {key: without_closing(item) for key, item in kept.items()}
    return [without_closing(item) for item in value] if isinstance(value, list) else value
