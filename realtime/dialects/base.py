"""The interface of a dialect: it reads a client's JSON message into a request, and writes core events as JSON.

`Dialect` is the protocol that every other module of this folder implements; `realtime/serving/inbox.py` calls `read`,
`realtime/serving/live_session.py` calls `write`. This module also has the JSON and base64 coding that all dialects
share. The caller checks sizes before anything is parsed.

`LongAppend` parses one long audio message as its bytes arrive: an `input_audio_buffer.append` that is too long to be
parsed at once. Only audio may be long: the rest of the message is kept until the end, up to the size of a control
message. The audio of each part is returned before the rest of the message is known, so if an append turns out to be
invalid, the audio before the mistake has already been transcribed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Annotated, Any, Literal, Protocol
from uuid import uuid4

import msgspec

from realtime.errors import ClientFault
from realtime.session.events import Clear, Commit, Configure, End, ServerEvent
from realtime.session.formatting import FinalFormatter
from realtime.session.settings import Settings

Json = dict[str, Any]

# Longest event id in characters, as for OpenAI.
MAX_EVENT_ID = 512
# The only type of message, in any dialect, that may be longer than a control message.
AUDIO_MESSAGE = "input_audio_buffer.append"
# Most JSON strings (names and values) in a long message.
MAX_AUDIO_TEXTS = 32
# Placeholder for the audio while the message before it is parsed. Random, so that a client cannot send it.
_AUDIO_PLACEHOLDER = uuid4().hex

_AUDIO_BEGINS = re.compile(rb'"audio"[ \t\r\n]*:[ \t\r\n]*"$')
# The rest of a string, up to its closing quote or to a backslash at the end of the data.
_IN_TEXT = re.compile(rb'(?>[^"\\]+|\\.)*+', re.DOTALL)
# Bytes of the longest JSON escape.
_ESCAPE = 6

_text_decoder = msgspec.json.Decoder(str)


@dataclass(frozen=True, slots=True)
class AudioText:
    """Audio in base64, not decoded yet, and the silence that was left out before it, in source samples."""

    data: str
    silence_before: int = 0


@dataclass(frozen=True, slots=True)
class Update:
    """A change of settings, and the faults of fields that were invalid and keep their old value."""

    settings: Settings
    event_id: str | None
    faults: Sequence[ClientFault] = ()


@dataclass(frozen=True, slots=True)
class GapRequest:
    """Declared silence, in source samples."""

    source_samples: int


@dataclass(frozen=True, slots=True)
class InjectRequest:
    """Prepared items as JSON data."""

    items: list[Any]
    event_id: str | None


@dataclass(frozen=True, slots=True)
class Nothing:
    """A valid message that has no effect and needs no answer."""


@dataclass(frozen=True, slots=True)
class DirectAnswer:
    """A message that the dialect answers itself, without the core."""

    body: Json


Request = Configure | Update | AudioText | GapRequest | InjectRequest | Commit | Clear | End | DirectAnswer | Nothing


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """The facts about a session that its dialect needs."""

    session_id: str
    created: int
    sample_rate: int
    model: str
    models: frozenset[str]
    new_event_id: Callable[[], str]
    # The resume token (empty if sessions cannot be resumed), and the seconds for which a session waits for its client.
    resume_token: str = ""
    resume_seconds: int = 0
    # The longest silence that a client may declare in one event.
    gap_seconds: float = 24 * 3600.0
    # Formats the finals of the session; its viewers and webhooks use the same one.
    finals: FinalFormatter = field(default_factory=FinalFormatter)


class Dialect(Protocol):
    """Translates between one kind of client and the session core."""

    name: str
    # Whether the dialect is certain: no later message changes it to another.
    fixed: bool
    # Whether an empty binary frame ends the audio.
    empty_frame_ends: bool
    # Where a client's message has the options, for the `param` of errors; one that is not listed has its own name.
    option_paths: Mapping[str, str]
    # Whether audio comes in base64, as `input_audio_buffer.append`.
    has_appends: bool

    def start_settings(self, settings: Settings) -> Settings:
        """These settings with the defaults of this dialect."""

    def created(self, settings: Settings) -> Json | None:
        """The first event to the client, if the dialect has one."""

    def read(self, message: Json, settings: Settings) -> Request:
        """The request in a client's message. Raises ClientFault if it is invalid."""

    def write(self, event: ServerEvent, settings: Settings) -> list[Json]:
        """A core event as JSON objects: none, one or several."""


def text_field(message: Json, name: str) -> str:
    """A required string of a client event. Raises ClientFault."""
    value = message.get(name)
    if not isinstance(value, str):
        raise ClientFault("invalid_value", f"'{name}' must be a string.", param=name, event_id=event_id_of(message))
    return value


def event_id_of(message: Json) -> str | None:
    """The client's id of its event, which is repeated in answers. Raises ClientFault if it is too long."""
    value = message.get("event_id")
    if not isinstance(value, str):
        return None
    if len(value) > MAX_EVENT_ID:
        raise ClientFault("invalid_value", f"'event_id' may have at most {MAX_EVENT_ID} characters.", param="event_id")
    return value


# JSON and base64

_decoder = msgspec.json.Decoder()
_encoder = msgspec.json.Encoder()


def decode_json(data: str | bytes) -> Json:
    """The JSON object in a message. Raises ClientFault, also for nesting that is too deep for the parser."""
    return _decode_object(data, "message", "a JSON object with a 'type'")


def decode_body(data: bytes) -> Json:
    """The JSON object in the body of a request; otherwise like `decode_json`."""
    return _decode_object(data, "body", "a JSON object")


def _decode_object(data: str | bytes, what: str, expected: str) -> Json:
    try:
        value = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ClientFault("invalid_json", f"The {what} is not valid JSON.") from None
    if not isinstance(value, dict):
        raise ClientFault("invalid_json", f"The {what} must be {expected}.")
    return value


class _PlainAppend(msgspec.Struct):
    """The usual form of an append."""

    type: Literal["input_audio_buffer.append"]
    audio: bytes
    event_id: Annotated[str, msgspec.Meta(max_length=MAX_EVENT_ID)] = ""


_append_decoder = msgspec.json.Decoder(_PlainAppend)


def audio_of_append(text: str) -> bytes:
    """Fast path: the audio of a frame that is a usual append; empty for any other message.

    JSON and base64 are decoded in one pass, which saves a third of the time.
    """
    try:
        return _append_decoder.decode(text).audio
    except (msgspec.DecodeError, RecursionError):
        return b""


def decode_base64(data: str) -> bytes:
    """The audio bytes of an append. Strict, because a skipped character would shift all later samples.

    msgspec is three times as fast as the standard library. Raises ClientFault.
    """
    try:
        return msgspec.convert(data, bytes)
    except msgspec.ValidationError:
        raise ClientFault("invalid_audio", "'audio' is not valid base64.", param="audio") from None


def json_bytes(value: Any) -> int:
    """Length of a value as JSON; a dataclass counts as an object of its fields."""
    return len(_encoder.encode(value))


def encode_json(value: Json) -> str:
    return _encoder.encode(value).decode()


class _State(Enum):
    """Where the next byte of the message is: outside strings, in a string, or in the audio."""

    OUTSIDE = auto()
    TEXT = auto()
    AUDIO = auto()


class LongAppend:
    """Parses one long message. `max_other_bytes`: the most bytes that it may have besides its audio."""

    def __init__(self, max_other_bytes: int) -> None:
        self._max_other_bytes = max_other_bytes
        # The message without its audio.
        self._other_bytes = bytearray()
        self._texts = 0
        self._state = _State.OUTSIDE
        self._after_backslash = False
        self._base64: _Base64 | None = None
        # The client's event id, once it is known.
        self.event_id: str | None = None

    def read(self, data: bytes) -> bytes:
        """The audio in the next bytes of the message. Raises ClientFault; the message cannot be continued then."""
        audio, place = b"", 0
        while place < len(data):
            match self._state:
                case _State.AUDIO:
                    assert self._base64 is not None
                    # An escaped quote is not valid base64 either, so any quote ends the audio.
                    end = _index(data, b'"', place)
                    audio += self._base64.decode(data[place:end])
                    if end < len(data):
                        self._base64.end()
                        self._keep(b'"')
                        self._state = _State.OUTSIDE
                    place = end + 1
                case _State.TEXT:
                    place = self._read_text(data, place)
                case _State.OUTSIDE:
                    end = _index(data, b'"', place)
                    self._keep(data[place : end + 1])
                    if end < len(data):
                        self._begin_text()
                    place = end + 1
        return audio

    def end(self) -> Json:
        """The message without its audio. Raises ClientFault if it is not an append, or not complete."""
        message = decode_json(bytes(self._other_bytes))
        self.event_id = event_id_of(message)
        if self._base64 is None or message.get("type") != AUDIO_MESSAGE:
            raise self._too_large()
        return message

    def _read_text(self, data: bytes, place: int) -> int:
        """Keep a string that is not the audio; returns the index after its end, or after the data."""
        begin, place = place, place + self._after_backslash
        found = _IN_TEXT.match(data, place)
        assert found is not None
        end = found.end()
        self._after_backslash = end < len(data) and data[end : end + 1] == b"\\"
        if data[end : end + 1] == b'"':
            self._state = _State.OUTSIDE
        self._keep(data[begin : end + 1])
        return end + 1

    def _begin_text(self) -> None:
        self._texts += 1
        if self._texts > MAX_AUDIO_TEXTS:
            raise self._too_large()
        self._state = _State.AUDIO if self._is_audio() else _State.TEXT

    def _is_audio(self) -> bool:
        """Whether the string that begins here is the value of `audio` at the top level. Raises ClientFault."""
        if _AUDIO_BEGINS.search(self._other_bytes[-64:]) is None:
            return False
        try:
            before = decode_json(bytes(self._other_bytes) + _AUDIO_PLACEHOLDER.encode() + b'"}')
        except ClientFault:
            return False
        if before.get("audio") != _AUDIO_PLACEHOLDER:
            return False
        self.event_id = event_id_of(before)
        if before.get("type", AUDIO_MESSAGE) != AUDIO_MESSAGE:
            raise self._too_large()
        if self._base64 is not None:
            raise ClientFault("invalid_json", "The message has 'audio' twice.", param="audio")
        self._base64 = _Base64()
        return True

    def _keep(self, data: bytes) -> None:
        self._other_bytes += data
        if len(self._other_bytes) > self._max_other_bytes:
            raise self._too_large()

    def _too_large(self) -> ClientFault:
        text = f"Messages that are not audio may have at most {self._max_other_bytes} bytes (limits.control_bytes)."
        return ClientFault("message_too_large", text)


class _Base64:
    """Decodes base64 in a JSON string, in pieces of any length; as strict as `decode_base64`."""

    def __init__(self) -> None:
        # An incomplete escape, and an incomplete group of four characters.
        self._escape = b""
        self._letters = ""
        self._has_padding = False

    def decode(self, data: bytes) -> bytes:
        letters = self._letters + self._unescaped(self._escape + data)
        whole = len(letters) // 4 * 4
        letters, self._letters = letters[:whole], letters[whole:]
        if not letters:
            return b""
        if self._has_padding:
            raise _bad_audio()
        self._has_padding = letters.endswith("=")
        try:
            return decode_base64(letters)
        except ClientFault:
            raise _bad_audio() from None

    def end(self) -> None:
        if self._letters or self._escape:
            raise _bad_audio()

    def _unescaped(self, data: bytes) -> str:
        cut = _cut_escape(data)
        data, self._escape = data[:cut], data[cut:]
        try:
            return _text_decoder.decode(b'"' + data + b'"') if b"\\" in data else data.decode("ascii")
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise _bad_audio() from None


def _cut_escape(data: bytes) -> int:
    """Index of an incomplete escape at the end of the data, or the end of the data."""
    place = _index(data, b"\\", max(0, len(data) - _ESCAPE + 1))
    while place < len(data):
        end = place + (_ESCAPE if data[place + 1 : place + 2] == b"u" else 2)
        if end > len(data):
            return place
        # Another escape may follow a complete one, for example escaped slashes.
        place = _index(data, b"\\", end)
    return place


def _index(data: bytes, mark: bytes, start: int) -> int:
    """Index of the mark, or the end of the data."""
    found = data.find(mark, start)
    return len(data) if found < 0 else found


def _bad_audio() -> ClientFault:
    text = "'audio' is not valid base64; the audio before the mistake was accepted."
    return ClientFault("invalid_audio", text, param="audio")
