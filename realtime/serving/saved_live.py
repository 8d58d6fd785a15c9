"""A live session as a value: the core's, and what the serving layer adds to it.

Part of the value: the dialect and its state, ids, events that wait for the client, how far the numbers of the sent ones
have come (the sent ones themselves travel beside it), and what the engine was yet to be told. Settled instead of saved:
bytes of an unfinished sample, and what a resampler holds back, which the client sends again or which is flushed.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine import messages
from realtime.errors import UnreadableValue
from realtime.session import events
from realtime.session.saved import SavedSession
from realtime.session.settings import Settings

# Goes up whenever an older process could misread a value.
LIVE_VERSION = 5

NOTED = (
    events.Gap,
    messages.Text,
    messages.Speech,
    messages.Opened,
    messages.Flushed,
    messages.Closed,
    messages.Failed,
    messages.Refused,
    events.Tick,
)
_SAID = (
    events.SessionUpdated,
    events.SpeechStarted,
    events.SpeechStopped,
    events.TimedOut,
    events.Committed,
    events.Cleared,
    events.Delta,
    events.Completed,
    events.ItemFailed,
    events.Problem,
    events.Acknowledged,
    events.Answered,
    events.Injected,
    events.Ended,
    events.Closing,
)
_TYPES: dict[str, type] = {kind.__name__: kind for kind in (*NOTED, *_SAID)}
# In the place of an event: the next one that waited for the client was written.
WROTE = "wrote"

Named = tuple[str, Any]


class SavedLive(msgspec.Struct, array_like=True):
    """Times are on the clock of the process that saved it."""

    version: int
    session: SavedSession
    caller: str
    created: int
    started_at: float
    may_inject: bool
    dialect: str
    dialect_state: dict[str, Any]
    dialect_fixed: bool
    item_ids: tuple[str, int]
    outbox: list[Named]
    # The number of the last event that was sent.
    sequence: int
    engine_settings: Settings
    streams_opened: int
    # The session's sample up to which audio was fed, where there is no stream to tell.
    fed: int
    # What was decided and not done yet: to begin a new stream here after so many samples, or with other options.
    reanchor: tuple[int, int] | None
    reopen: bool
    now: float
    # Audio that was fed and has not left for the engine, with what must stand before it; float32.
    rest: bytes = b""
    # The stream with the old options was told to end, so audio from here on belongs to the one with the new ones.
    runs_out: bool = False


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(SavedLive)
_entry_decoder = msgspec.msgpack.Decoder(tuple[float, str, Any])
_frames_decoder = msgspec.msgpack.Decoder(tuple[int, list[str]])


def encode_live(saved: SavedLive) -> bytes:
    return _encoder.encode(saved)


def decode_live(value: bytes) -> SavedLive:
    """Raises UnreadableValue."""
    try:
        saved = _decoder.decode(value)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise UnreadableValue(f"not a session's value: {error}") from None
    if saved.version != LIVE_VERSION:
        raise UnreadableValue(f"a session's value of version {saved.version}; this server reads {LIVE_VERSION}")
    return saved


def named(event: Any) -> Named:
    return type(event).__name__, event


def plain(name: str, fields: Any) -> Any:
    """The event of that name."""
    try:
        return msgspec.convert(fields, _TYPES[name])
    except (msgspec.ValidationError, KeyError) as error:
        raise UnreadableValue(f"not an event of a session: {error}") from None


def encode_entry(now: float, name: str, event: Any) -> bytes:
    return _encoder.encode((now, name, event))


def decode_entry(entry: bytes) -> tuple[float, Any]:
    """When it was, and the event; None for `WROTE`. Raises UnreadableValue."""
    try:
        now, name, fields = _entry_decoder.decode(entry)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise UnreadableValue(f"not an entry of a session: {error}") from None
    return now, None if name == WROTE else plain(name, fields)


def encode_frames(first: int, frames: list[str]) -> bytes:
    """Frames that were sent, from the one with this number on."""
    return _encoder.encode((first, frames)) if frames else b""


def decode_frames(chunk: bytes) -> tuple[int, list[str]]:
    try:
        return _frames_decoder.decode(chunk)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise UnreadableValue(f"not the frames of a session: {error}") from None
