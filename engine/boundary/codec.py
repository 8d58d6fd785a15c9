"""The link protocol between a gateway and an engine: its envelope messages, and their encoding as frames of bytes.

Greeting and farewell (`Hello`, `Welcome`, `Unwelcome`, `Bye`), numbered messages (`Batch` with a gateway's commands,
`Update` with an engine's outputs), heartbeats and resends (`Beat`, `ResendRequest`), repair of the input cache
(`Missing`, `Repair`), and the engine's `Status`. The commands and outputs inside are in `engine/messages.py`, the
sockets in `engine/boundary/sockets.py`. `WIRE_VERSION` is the version of all of them.

A message is a header frame, and if there are payloads one frame with all of them. Headers are msgpack arrays with a
tag, decoded into checked types. Payloads are float32 data of a few kilobytes. They share a frame, because an additional
frame costs more than a copy. Each is copied out of the frame, so that a payload that is kept does not keep the frame in
memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine import messages
from engine.errors import BadItem, BadOption
from engine.messages import Message
from engine.spec import ModelSpec

# Must be raised whenever an older peer could misread a message.
WIRE_VERSION = 24

Frames = Sequence[Any]
Payload = NDArray[np.float32]


class WireError(Exception):
    """The received bytes are not a message of this protocol."""


def package_version() -> str:
    """The installed version of tickertape, for greetings."""
    try:
        return version("tickertape")
    except PackageNotFoundError:
        return "unknown"


class Progress(Message):
    """Progress of a stream: positions below `computed` have been computed."""

    stream: str
    computed: int


class Status(Message):
    """Capacity, load and counters of an engine."""

    # Open streams, and most streams.
    slots_used: int = 0
    slots_total: int = 0
    # Most streams that can be active at once (the others are silent and parked), and streams that are parked now.
    active_total: int = 0
    parked: int = 0
    # Streams with speech now.
    speaking: int = 0
    # Share of the engine's time that live streams need.
    load: float = 0.0
    # Age of the oldest audio of a live stream that is not computed.
    lag_ms: float = 0.0
    # Items that needed rows of the encoder cache, and those of them that had rows already.
    encoder_queries: int = 0
    encoder_hits: int = 0
    steps: int = 0
    # Nanoseconds of all steps together, by part of the step.
    step_ns: dict[str, int] = {}
    # Tokens changed by the guard against endless blanks.
    blank_guard: int = 0
    # Second pass of a windowed model: finals decoded again, finals not decoded again for lack of time, words changed.
    revised: int = 0
    revisions_skipped: int = 0
    words_revised: int = 0
    # Live streams to count against capacity: those with speech in the last `COUNTED_SECONDS`; of many streams, how many
    # are likely to compute at the same time.
    counted: int = 0
    # The fixed cost of steps, and the cost per counted stream, as shares of the engine's time.
    load_per_step: float = 0.0
    load_per_stream: float = 0.0
    # The engine accepts no new streams, and its streams are to be migrated.
    draining: bool = False
    # Positions of replayed audio that a gateway may have sent and not acknowledged; 0: the engine sets no bound.
    replay_positions: int = 0
    # Positions of a live stream's audio that a gateway should send in one message: more than one while the engine's
    # thread is busy.
    message_positions: int = 1
    # Frame-synchronous models with many streams: the length of a tick as a share of a position's time, and the counted
    # streams when it was measured. 0 streams: not measured.
    tick_share: float = 0.0
    tick_streams: int = 0


class Hello(msgspec.Struct, tag="hello"):
    """First message of a gateway. Greetings are maps, so that every version can read every other version's."""

    # `WIRE_VERSION`, and the version of the package.
    wire: int
    version: str
    # A name that is unique for each start of the gateway.
    gateway: str
    # Capacity of the input cache that the engine keeps for this gateway.
    cache_bytes: int
    # The model that the gateway expects; None: any.
    model: str | None = None


class Welcome(msgspec.Struct, tag="welcome"):
    """First message of an engine: it is warm, and its caches for this gateway are empty."""

    wire: int
    version: str
    engine: str
    spec: ModelSpec
    status: Status


class Unwelcome(msgspec.Struct, tag="unwelcome"):
    """The engine refuses this gateway, or ends the connection with it."""

    message: str


class PayloadPlace(Message):
    """The payload of one item of a message: its hash, and the place of its bytes in the payload frame."""

    key: bytes
    # Byte offset in the payload frame; None: the receiver's cache holds the payload.
    start: int | None
    size: int
    # Number of rows of a two-dimensional payload (features); None for samples.
    rows: int | None


class Batch(Message, tag="batch"):
    """The commands of a gateway in one tick, for all its streams.

    The payloads of all commands are listed apart from them, so that an unreadable command does not make the two caches
    differ. A payload that no command refers to is for the receiver's cache only.
    """

    # Number of this message, and of the last message accepted from the other side.
    seq: int
    ack: int
    data: list[PayloadPlace]
    # Encoded one by one (`encode_command`).
    commands: list[msgspec.Raw]


class Update(Message, tag="update"):
    """The outputs of an engine after a step, for all streams of one gateway."""

    seq: int
    ack: int
    outputs: list[messages.Output]
    progress: list[Progress]
    status: Status


class Beat(Message, tag="beat"):
    """Heartbeat. `sent` is the number of the last message sent, `ack` that of the last message accepted."""

    sent: int
    ack: int
    status: Status | None = None


class ResendRequest(Message, tag="again"):
    """Request to send the numbered messages from `seq` on again."""

    seq: int


class Missing(Message, tag="missing"):
    """The hashes of payloads that batch `seq` does not contain and that are not in the receiver's cache either."""

    seq: int
    keys: list[bytes]


class Repair(Message, tag="repair"):
    """Answers `Missing` with the payloads; `gone` are hashes whose payloads the sender no longer has."""

    seq: int
    data: list[PayloadPlace]
    gone: list[bytes]


class Bye(Message, tag="bye"):
    """The gateway disconnects; the engine drops its streams."""


ToEngine = Batch | Beat | ResendRequest | Repair | Bye
ToGateway = Update | Beat | ResendRequest | Missing

# Errors of msgspec for bytes that a peer has sent; TypeError: the key of a map is not hashable.
_UNREADABLE = (msgspec.DecodeError, ValueError, TypeError, RecursionError)
_encoder = msgspec.msgpack.Encoder()
_decoders: dict[bool, msgspec.msgpack.Decoder[Any]] = {
    True: msgspec.msgpack.Decoder(ToEngine),
    False: msgspec.msgpack.Decoder(ToGateway),
}
_command_decoder: msgspec.msgpack.Decoder[messages.Command] = msgspec.msgpack.Decoder(messages.Command)
_commands_decoder: msgspec.msgpack.Decoder[list[messages.Command]] = msgspec.msgpack.Decoder(list[messages.Command])
_any_decoder = msgspec.msgpack.Decoder()
_greeting_decoder = msgspec.msgpack.Decoder(Hello | Welcome | Unwelcome)


def encode(header: msgspec.Struct, payloads: Iterable[memoryview] = ()) -> list[Any]:
    """Return the frames to send."""
    joined = b"".join(payloads)
    return [_encoder.encode(header), joined] if joined else [_encoder.encode(header)]


def decode(frames: Frames, to_engine: bool) -> Any:
    """Decode the header of a message. Greetings are maps (first byte 0x80 to 0x8f), all other messages are arrays.
    Raises WireError."""
    if not frames:
        raise WireError("a message without a header")
    header = memoryview(frames[0])
    try:
        if header and 0x80 <= header[0] <= 0x8F:
            return _greeting_decoder.decode(header)
        return _decoders[to_engine].decode(header)
    except _UNREADABLE as error:
        raise WireError(f"not a message of this protocol: {error}") from None


def payload_of(data: PayloadPlace, frames: Frames) -> Payload | None:
    """Return a copy of an item's payload, or None if the message does not carry it. The payload frame may be a list of
    its pieces. Raises WireError."""
    start, size = data.start, data.size
    if start is None:
        return None
    frame = frames[1] if len(frames) > 1 else b""
    available = sum(map(len, frame)) if isinstance(frame, list) else len(frame)
    if start < 0 or not 0 < size <= available - start:
        raise WireError(f"a payload of {size} bytes from {start} on, in a message that has {available}")
    if size % 4:
        raise WireError(f"a payload is not float32 data: it has {size} bytes")
    try:
        if isinstance(frame, list):
            payload = np.frombuffer(_cut(frame, start, size), np.float32)
        else:
            payload = np.frombuffer(frame, np.float32, size // 4, start).copy()
        return payload if data.rows is None else payload.reshape(data.rows, -1)
    except (ValueError, OverflowError) as error:
        raise WireError(f"a payload is not float32 data: {error}") from None


def _cut(pieces: Sequence[Any], start: int, size: int) -> bytearray:
    """Return a copy of these bytes of a frame that came in pieces."""
    parts = []
    for piece in pieces:
        parts.append(memoryview(piece)[start : start + size])
        start, size = max(0, start - len(piece)), size - len(parts[-1])
    return bytearray().join(parts)


def rows_of(payload: Payload | None) -> int | None:
    """Return the value for `PayloadPlace.rows`."""
    return None if payload is None or payload.ndim == 1 else int(payload.shape[0])


# Commands of a batch are encoded and decoded one by one: if what a client sent makes a command unencodable or
# undecodable, only its own stream ends, and the other commands of the batch are executed.

# MessagePack prefix of an array; its length follows in four bytes.
_ARRAY = b"\xdd"


@dataclass(frozen=True, slots=True)
class UnreadableCommand:
    """A command that cannot be decoded."""

    # The stream it is for, if that can be read.
    stream: str | None
    # It is an Open.
    opens: bool
    why: str


def error_code_of(opens: bool) -> str:
    """Return the error code for a command that cannot be encoded or decoded; `opens`: it is an Open. The fault is
    probably an option in an Open, and an item in any other command."""
    return BadOption.__name__ if opens else BadItem.__name__


def encode_command(command: messages.Command, items: list[messages.Item]) -> msgspec.Raw:
    """Encode a command with these items. Raises the encoder's error if a value does not match its type."""
    if isinstance(command, messages.Feed | messages.Open):
        command = msgspec.structs.replace(command, items=items)
    return msgspec.Raw(_encoder.encode(command))


def decode_commands(commands: list[msgspec.Raw]) -> list[messages.Command | UnreadableCommand]:
    """Decode all commands of a batch at once, or one by one if one of them cannot be decoded."""
    try:
        return [*_commands_decoder.decode(b"".join([_ARRAY, len(commands).to_bytes(4, "big"), *commands]))]
    except _UNREADABLE:
        return [_decode_alone(command) for command in commands]


def _decode_alone(raw: msgspec.Raw) -> messages.Command | UnreadableCommand:
    try:
        return _command_decoder.decode(raw)
    except _UNREADABLE as error:
        stream, opens = _addressee(raw)
        return UnreadableCommand(stream, opens, f"a command that cannot be read: {error}")


def _addressee(raw: msgspec.Raw) -> tuple[str | None, bool]:
    """Return the stream that the command seems to be for, if any, and whether it opens the stream."""
    try:
        parts: Any = _any_decoder.decode(raw)
    except _UNREADABLE:
        return None, False
    if isinstance(parts, list) and len(parts) > 1 and isinstance(parts[1], str):
        return parts[1], parts[0] == "open"
    return None, False
