"""What a dialect is: it reads a client's JSON object into a request, and writes core events as JSON objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

import msgspec

from realtime.errors import ClientFault
from realtime.session.events import Clear, Commit, Configure, End, ServerEvent
from realtime.session.settings import Settings

Json = dict[str, Any]

# As long as OpenAI allows.
MAX_EVENT_ID = 512


@dataclass(frozen=True, slots=True)
class AudioText:
    """Audio in base64, not decoded yet."""

    data: str


@dataclass(frozen=True, slots=True)
class Update:
    """A change of settings, and what of it was wrong and stays as it is."""

    settings: Settings
    event_id: str | None
    faults: Sequence[ClientFault] = ()


@dataclass(frozen=True, slots=True)
class GapRequest:
    """Declared silence, in the client's own samples."""

    source_samples: int


@dataclass(frozen=True, slots=True)
class InjectRequest:
    """Items prepared elsewhere, as plain data."""

    items: list[Any]
    event_id: str | None


@dataclass(frozen=True, slots=True)
class Nothing:
    """A message that needs no answer."""


@dataclass(frozen=True, slots=True)
class DirectAnswer:
    """A message that the dialect answers by itself."""

    body: Json


Request = Configure | Update | AudioText | GapRequest | InjectRequest | Commit | Clear | End | DirectAnswer | Nothing


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """What a dialect must know of the session it speaks for."""

    session_id: str
    created: int
    sample_rate: int
    model: str
    models: frozenset[str]
    new_event_id: Callable[[], str]
    # Set when the session can be resumed: the token, and for how many seconds it is kept after a disconnect.
    resume_token: str = ""
    resume_seconds: int = 0
    # The longest silence a client may declare in one event.
    gap_seconds: float = 24 * 3600.0


class Dialect(Protocol):
    """One way of speaking to a client."""

    name: str
    # The dialect is certain: no message of the client changes it to another.
    fixed: bool
    # A binary frame without a byte in it means that no more audio will come.
    empty_frame_ends: bool
    # Where in a client's message the model's options are.
    option_path: str
    # Audio comes as `input_audio_buffer.append`, in base64.
    has_appends: bool

    def start_settings(self, settings: Settings) -> Settings:
        """What this dialect's sessions begin with."""

    def created(self, settings: Settings) -> Json | None:
        """The event that greets the client, where the dialect has one."""

    def read(self, message: Json, settings: Settings) -> Request:
        """Raises ClientFault for what the client may not send."""

    def write(self, event: ServerEvent, settings: Settings) -> list[Json]:
        """The wire form of a core event: none, one or several objects."""


def text_field(message: Json, name: str) -> str:
    """A required string of a client event."""
    value = message.get(name)
    if not isinstance(value, str):
        raise ClientFault("invalid_value", f"'{name}' must be a string.", param=name, event_id=event_id_of(message))
    return value


def event_id_of(message: Json) -> str | None:
    """The client's own name for its event, which answers repeat. Raises ClientFault if it is too long for that."""
    value = message.get("event_id")
    if not isinstance(value, str):
        return None
    if len(value) > MAX_EVENT_ID:
        raise ClientFault("invalid_value", f"'event_id' may have at most {MAX_EVENT_ID} characters.", param="event_id")
    return value


# Frames <-> JSON objects and audio bytes; no state. Sizes are checked by the caller before anything is parsed.

_decoder = msgspec.json.Decoder()
_encoder = msgspec.json.Encoder()


def decode_json(data: str | bytes) -> Json:
    """The JSON object in a frame. Nesting that would exhaust the stack is refused like any other bad JSON."""
    try:
        value = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ClientFault("invalid_json", "The message is not valid JSON.") from None
    if not isinstance(value, dict):
        raise ClientFault("invalid_json", "The message must be a JSON object with a 'type'.")
    return value


class _PlainAppend(msgspec.Struct):
    """An append as nearly all of them are."""

    type: Literal["input_audio_buffer.append"]
    audio: bytes
    event_id: Annotated[str, msgspec.Meta(max_length=MAX_EVENT_ID)] = ""


_append_decoder = msgspec.json.Decoder(_PlainAppend)


def audio_of_append(text: str) -> bytes:
    """The audio of a frame that is an append and nothing else; none of anything that needs a closer look.

    Parsed and decoded in one go, it takes two thirds of the time.
    """
    try:
        return _append_decoder.decode(text).audio
    except (msgspec.DecodeError, RecursionError):
        return b""


def decode_base64(data: str) -> bytes:
    """Audio bytes of an append event; strict, because skipped characters would shift every sample behind them.

    msgspec's decoder takes a third of the time of the standard library's.
    """
    try:
        return msgspec.convert(data, bytes)
    except msgspec.ValidationError:
        raise ClientFault("invalid_audio", "'audio' is not valid base64.", param="audio") from None


def json_bytes(value: Any) -> int:
    """How long a value is as JSON; dataclasses count with their fields."""
    return len(_encoder.encode(value))


def encode_json(value: Json) -> str:
    return _encoder.encode(value).decode()
