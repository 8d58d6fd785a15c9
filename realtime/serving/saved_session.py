"""The encoding of a session's saved state: the whole session as a value, entries for its events, and sent frames.

`SessionHandoff` (`handoff.py`) sends these bytes to an engine, which stores them without reading them.
`session_factory.py` decodes them when the session is adopted by another process.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine import messages
from realtime.errors import UnreadableValue
from realtime.session import events
from realtime.session.core import SavedSession
from realtime.session.settings import Settings

# Version of the encoding. Increase it whenever an older process could misread a value.
LIVE_VERSION = 10

# Events that become entries of a handoff. After any other event a new base is saved.
RECORDED = (
    events.Gap,
    messages.Text,
    messages.Speech,
    messages.Labels,
    messages.Opened,
    messages.Flushed,
    messages.Revised,
    messages.Closed,
    messages.Failed,
    messages.Refused,
    events.Tick,
)
# Events that may be in the outbox.
_OUTBOX_EVENTS = (
    events.SessionUpdated,
    events.SpeechStarted,
    events.EagerTurnEnd,
    events.TurnResumed,
    events.PauseScored,
    events.SpeechStopped,
    events.TimedOut,
    events.Committed,
    events.Cleared,
    events.Delta,
    events.Completed,
    events.WordsLabelled,
    events.ItemFailed,
    events.Problem,
    events.Acknowledged,
    events.Answered,
    events.Injected,
    events.Ended,
    events.Closing,
)
_TYPES: dict[str, type] = {kind.__name__: kind for kind in (*RECORDED, *_OUTBOX_EVENTS)}
# Name of the entry for: the next event of the outbox was encoded as frames.
WROTE = "wrote"

# The class name of an event, and the event.
Named = tuple[str, Any]


class SavedLive(msgspec.Struct, array_like=True):
    """A live session as a value: the session core, and the state that the serving layer adds to it.

    Times are on the clock of the process that saved it. Sent frames are encoded separately, in chunks. Bytes of an
    incomplete sample are not saved: the client sends them again. Samples in the resampler are submitted before the last
    save.
    """

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
    # Sequence number of the last sent frame.
    sequence: int
    engine_settings: Settings
    streams_opened: int
    # The session's sample up to which audio was fed; used if there is no stream that knows it.
    fed: int
    # Decided and not carried out yet: begin a new stream at (session sample, samples since then).
    reanchor: tuple[int, int] | None
    # Decided and not carried out yet: change the stream's options.
    reopen: bool
    now: float
    # float32 audio that was fed and not sent to the engine yet, including the audio that must precede it.
    rest: bytes = b""
    # The stream with the old options is finishing; audio from here on belongs to a stream with the new options.
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
        raise UnreadableValue(f"the saved session cannot be decoded: {error}") from None
    if saved.version != LIVE_VERSION:
        raise UnreadableValue(
            f"the saved session has version {saved.version}, and this server reads version {LIVE_VERSION}"
        )
    return saved


def named(event: Any) -> Named:
    return type(event).__name__, event


def plain(name: str, fields: Any) -> Any:
    """The event with this class name and these fields. Raises UnreadableValue."""
    try:
        return msgspec.convert(fields, _TYPES[name])
    except (msgspec.ValidationError, KeyError) as error:
        raise UnreadableValue(f"an event of the saved session cannot be decoded: {error}") from None


def encode_entry(now: float, name: str, event: Any) -> bytes:
    return _encoder.encode((now, name, event))


def decode_entry(entry: bytes) -> tuple[float, Any]:
    """The time and the event of an entry; the event is None for `WROTE`. Raises UnreadableValue."""
    try:
        now, name, fields = _entry_decoder.decode(entry)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise UnreadableValue(f"an entry of the saved session cannot be decoded: {error}") from None
    return now, None if name == WROTE else plain(name, fields)


def encode_frames(first: int, frames: list[str]) -> bytes:
    """A chunk of sent frames; `first` is the sequence number of the first one."""
    return _encoder.encode((first, frames)) if frames else b""


def decode_frames(chunk: bytes) -> tuple[int, list[str]]:
    """The sequence number of the first frame, and the frames. Raises UnreadableValue."""
    try:
        return _frames_decoder.decode(chunk)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise UnreadableValue(f"the sent frames of the saved session cannot be decoded: {error}") from None
