"""The messages between gateway and engine as bytes: a header frame, then a frame with the payloads one after another.

Headers are msgpack arrays with a tag, decoded into checked types. Payloads are float32 data of a few kilobytes: they
share a frame, because a frame costs the sockets more than it costs to copy them, and are copied out of it, so that one
that is kept for long does not keep the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine import messages
from engine.errors import BadItem, BadOption
from engine.messages import Message
from engine.spec import ModelSpec

# Goes up whenever an older peer could misread what is sent.
WIRE_VERSION = 13

Frames = Sequence[Any]
Payload = NDArray[np.float32]


class WireError(Exception):
    """Bytes that are not a message of this protocol."""


class Progress(Message):
    """How far a stream is: positions below `computed` are done."""

    stream: str
    computed: int


class Status(Message):
    """What an engine has and how busy it is."""

    slots_used: int = 0
    slots_total: int = 0
    speaking: int = 0
    load: float = 0.0
    lag_ms: float = 0.0
    encoder_queries: int = 0
    encoder_hits: int = 0
    steps: int = 0
    # Nanoseconds of all steps, by part.
    step_ns: dict[str, int] = {}
    # Tokens that the guard against blank ruts changed.
    blank_guard: int = 0
    # Live streams that speak or did so lately, and what steps cost them, as shares of the engine's time.
    counted: int = 0
    load_per_step: float = 0.0
    load_per_stream: float = 0.0
    # It takes no new streams and wants to be rid of those it has.
    draining: bool = False


class Hello(msgspec.Struct, tag="hello"):
    """First word of a gateway. A map, so that any version can read any other's."""

    wire: int
    version: str
    gateway: str
    cache_bytes: int
    model: str | None = None


class Welcome(msgspec.Struct, tag="welcome"):
    """First word of an engine: it is warm, and its caches for this gateway are empty."""

    wire: int
    version: str
    engine: str
    spec: ModelSpec
    status: Status


class Unwelcome(msgspec.Struct, tag="unwelcome"):
    """The engine does not talk to this gateway (any more)."""

    message: str


class PayloadPlace(Message):
    """The audio of one item of a message: a hash, and where in the message its bytes are."""

    key: bytes
    # Where its bytes begin in the frame of payloads; None: the receiver holds it.
    start: int | None
    size: int
    # Rows of a payload with two axes (features); None for samples.
    rows: int | None


class Batch(Message, tag="batch"):
    """What a gateway has to say in one tick, for all its streams.

    The audio of all commands stands beside them: whether a command can be read changes nothing for either cache, and
    audio that no command refers to is for the receiver's cache alone. `commands` are read one by one.
    """

    seq: int
    ack: int
    data: list[PayloadPlace]
    commands: list[msgspec.Raw]


class Update(Message, tag="update"):
    """What an engine has to say after a step, for all streams of one gateway."""

    seq: int
    ack: int
    outputs: list[messages.Output]
    progress: list[Progress]
    status: Status


class Beat(Message, tag="beat"):
    """Alive; `sent` is the last numbered message, `ack` the last one taken."""

    sent: int
    ack: int
    status: Status | None = None


class Again(Message, tag="again"):
    """Numbered messages from `seq` on did not arrive: send them again."""

    seq: int


class Missing(Message, tag="missing"):
    """All hashes of batch `seq` that the receiver does not hold."""

    seq: int
    keys: list[bytes]


class Repair(Message, tag="repair"):
    """The data of those hashes; `gone` are those the sender has no data for."""

    seq: int
    data: list[PayloadPlace]
    gone: list[bytes]


class Bye(Message, tag="bye"):
    """The gateway leaves; its streams are forgotten."""


ToEngine = Batch | Beat | Again | Repair | Bye
ToGateway = Update | Beat | Again | Missing

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
    """Frames ready for the socket."""
    joined = b"".join(payloads)
    return [_encoder.encode(header), joined] if joined else [_encoder.encode(header)]


def decode(frames: Frames, to_engine: bool) -> Any:
    """The header of a message to an engine or to a gateway: greetings are maps, everything else is an array."""
    if not frames:
        raise WireError("a message without a header")
    header = memoryview(frames[0])
    try:
        if header and 0x80 <= header[0] <= 0x8F:
            return _greeting_decoder.decode(header)
        return _decoders[to_engine].decode(header)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise WireError(f"not a message of this protocol: {error}") from None


def payload_of(data: PayloadPlace, frames: Frames) -> Payload | None:
    """A copy of an item's data, if the message carries it. Frame 0 is the header."""
    start, size = data.start, data.size
    if start is None:
        return None
    there = len(frames[1]) if len(frames) > 1 else 0
    if start < 0 or not 0 < size <= there - start:
        raise WireError(f"a payload of {size} bytes from {start} on, in a message that has {there}")
    if size % 4:
        raise WireError(f"a payload is not float32 data: it has {size} bytes")
    try:
        payload = np.frombuffer(frames[1], np.float32, size // 4, start).copy()
        return payload if data.rows is None else payload.reshape(data.rows, -1)
    except (ValueError, OverflowError) as error:
        raise WireError(f"a payload is not float32 data: {error}") from None


def rows_of(payload: Payload | None) -> int | None:
    """What must be said of a payload's shape beside its bytes."""
    return None if payload is None or payload.ndim == 1 else int(payload.shape[0])


# Commands of a batch are encoded and decoded one by one: a command that cannot be written or read, because of what a
# client sent, ends its own stream, and the other commands of the batch are taken.

_UNREADABLE = (msgspec.DecodeError, ValueError, RecursionError)
# Begins an array in MessagePack, before its length in four bytes.
_ARRAY = b"\xdd"


@dataclass(frozen=True, slots=True)
class UnreadableCommand:
    """A command of which at most the stream can be told, and whether it was to open it."""

    stream: str | None
    opens: bool
    why: str


def code_of(opens: bool) -> str:
    """What a command that cannot be written or read is called: an opening is made of options, all others of items."""
    return BadOption.__name__ if opens else BadItem.__name__


def encode_command(command: messages.Command, items: list[messages.Item]) -> msgspec.Raw:
    """Raises whatever the encoder makes of values that are not what their types say."""
    if isinstance(command, messages.Feed | messages.Open):
        command = msgspec.structs.replace(command, items=items)
    return msgspec.Raw(_encoder.encode(command))


def decode_commands(commands: list[msgspec.Raw]) -> list[messages.Command | UnreadableCommand]:
    """All of a batch at once, or one by one if one of them cannot be read."""
    try:
        return [*_commands_decoder.decode(b"".join([_ARRAY, len(commands).to_bytes(4, "big"), *commands]))]
    except _UNREADABLE:
        return [_decode_alone(command) for command in commands]


def _decode_alone(raw: msgspec.Raw) -> messages.Command | UnreadableCommand:
    try:
        return _command_decoder.decode(raw)
    except _UNREADABLE as error:
        stream, opens = _guess(raw)
        return UnreadableCommand(stream, opens, f"a command that cannot be read: {error}")


def _guess(raw: msgspec.Raw) -> tuple[str | None, bool]:
    """Whose command it seems to be, and whether it opens a stream."""
    try:
        parts: Any = _any_decoder.decode(raw)
    except _UNREADABLE:
        return None, False
    if isinstance(parts, list) and len(parts) > 1 and isinstance(parts[1], str):
        return parts[1], parts[0] == "open"
    return None, False
