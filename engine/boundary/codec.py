"""The messages between gateway and engine as bytes: a header frame, then a frame with the payloads one after another.

Headers are msgpack arrays with a tag, decoded into checked types. Payloads are float32 data of a few kilobytes: they
share a frame, because a frame costs the sockets more than it costs to copy them, and are copied out of it, so that one
that is kept for long does not keep the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine import messages
from engine.boundary.commands import Wire, WireStreamState, plain_state, wire_state
from engine.spec import ModelSpec

# Goes up whenever an older peer could misread what is sent.
WIRE_VERSION = 12

Frames = Sequence[Any]
Payload = NDArray[np.float32]


class WireError(Exception):
    """Bytes that are not a message of this protocol."""


class WireWord(Wire):
    text: str
    start_sample: int
    end_sample: int
    chances: list[messages.Chance]


class WireText(Wire, tag="text"):
    stream: str
    delta: str
    words: list[WireWord]
    tokens: list[int]
    sample: int
    language: str
    no_speech: float | None


class WireSpeech(Wire, tag="speech"):
    stream: str
    sample: int
    frame_samples: int
    probabilities: list[float]


class WireOpened(Wire, tag="opened"):
    stream: str


class WireFlushed(Wire, tag="flushed"):
    stream: str
    tag: int
    sample: int


class WireClosed(Wire, tag="closed"):
    stream: str
    sample: int


class WireFailed(Wire, tag="failed"):
    stream: str
    code: str
    message: str


class WireRefused(Wire, tag="refused"):
    stream: str
    code: str
    message: str


class WireDead(Wire, tag="dead"):
    message: str


class WireWanted(Wire, tag="wanted"):
    key: str
    number: int


class WireFenced(Wire, tag="fenced"):
    key: str
    number: int


class WireHeld(Wire, tag="held"):
    key: str
    tag: int
    number: int
    whole: bool


class WireRenewed(Wire, tag="renewed"):
    tag: int
    number: int


class WireClaimed(Wire, tag="claimed"):
    tag: int


class WireSessionGiven(Wire, tag="inherited"):
    """The fields of `messages.Inherited`, in its order."""

    key: str
    number: int
    stream: str
    base: bytes
    chunks: list[bytes]
    entries: list[bytes]
    consumed: int
    position_offset: int
    sample_offset: int
    end: int
    sample: int
    segment: int
    flushes: int
    answered: int
    token: int
    delay_positions: int | None
    options: dict[str, str]


WireSessionOutput = WireWanted | WireFenced | WireHeld | WireRenewed | WireClaimed | WireSessionGiven
_SESSION_OUTPUTS: dict[type[messages.SessionOutput], type[WireSessionOutput]] = {
    messages.Wanted: WireWanted,
    messages.Fenced: WireFenced,
    messages.Held: WireHeld,
    messages.Renewed: WireRenewed,
    messages.Claimed: WireClaimed,
    messages.SessionGiven: WireSessionGiven,
}

WireOutput = (
    WireText
    | WireSpeech
    | WireStreamState
    | WireOpened
    | WireFlushed
    | WireClosed
    | WireFailed
    | WireRefused
    | WireDead
    | WireSessionOutput
)


class Progress(Wire):
    """How far a stream is: positions below `computed` are done."""

    stream: str
    computed: int


class Status(Wire):
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


class WireData(Wire):
    """The audio of one item of a message: a hash, and where in the message its bytes are."""

    key: bytes
    # Where its bytes begin in the frame of payloads; None: the receiver holds it.
    start: int | None
    size: int
    # Rows of a payload with two axes (features); None for samples.
    rows: int | None


class Batch(Wire, tag="batch"):
    """What a gateway has to say in one tick, for all its streams.

    The audio of all commands stands beside them: whether a command can be read changes nothing for either cache, and
    audio that no command refers to is for the receiver's cache alone. `commands` are read one by one.
    """

    seq: int
    ack: int
    data: list[WireData]
    commands: list[msgspec.Raw]


class Update(Wire, tag="update"):
    """What an engine has to say after a step, for all streams of one gateway."""

    seq: int
    ack: int
    outputs: list[WireOutput]
    progress: list[Progress]
    status: Status


class Beat(Wire, tag="beat"):
    """Alive; `sent` is the last numbered message, `ack` the last one taken."""

    sent: int
    ack: int
    status: Status | None = None


class Again(Wire, tag="again"):
    """Numbered messages from `seq` on did not arrive: send them again."""

    seq: int


class Missing(Wire, tag="missing"):
    """All hashes of batch `seq` that the receiver does not hold."""

    seq: int
    keys: list[bytes]


class Repair(Wire, tag="repair"):
    """The data of those hashes; `gone` are those the sender has no data for."""

    seq: int
    data: list[WireData]
    gone: list[bytes]


class Bye(Wire, tag="bye"):
    """The gateway leaves; its streams are forgotten."""


ToEngine = Batch | Beat | Again | Repair | Bye
ToGateway = Update | Beat | Again | Missing

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[bool, msgspec.msgpack.Decoder[Any]] = {
    True: msgspec.msgpack.Decoder(ToEngine),
    False: msgspec.msgpack.Decoder(ToGateway),
}
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


def payload_of(data: WireData, frames: Frames) -> Payload | None:
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


def wire_output(output: messages.Output) -> WireOutput:
    match output:
        case messages.Speech():  # what engines say most often
            return WireSpeech(output.stream, output.sample, output.frame_samples, output.probabilities)
        case messages.Text(stream, delta, words, tokens, sample, language, no_speech):
            spoken = [WireWord(word.text, word.start_sample, word.end_sample, word.chances) for word in words]
            return WireText(stream, delta, spoken, tokens, sample, language, no_speech)
        case messages.StreamState():
            return wire_state(output)
        case messages.Opened(stream):
            return WireOpened(stream)
        case messages.Flushed(stream, tag, sample):
            return WireFlushed(stream, tag, sample)
        case messages.Closed(stream, sample):
            return WireClosed(stream, sample)
        case messages.Failed(stream, code, message):
            return WireFailed(stream, code, message)
        case messages.Refused(stream, code, message):
            return WireRefused(stream, code, message)
        case messages.Dead(message):
            return WireDead(message)
        case _:
            wire = _SESSION_OUTPUTS[type(output)]
            return wire(*(getattr(output, name) for name in wire.__struct_fields__))


def plain_output(output: WireOutput) -> messages.Output:
    match output:
        case WireStreamState():
            return plain_state(output)
        case WireText():
            words = [
                messages.Word(word.text, word.start_sample, word.end_sample, word.chances) for word in output.words
            ]
            told = output.language, output.no_speech
            return messages.Text(output.stream, output.delta, words, output.tokens, output.sample, *told)
        case WireSpeech():
            return messages.Speech(output.stream, output.sample, output.frame_samples, output.probabilities)
        case WireOpened():
            return messages.Opened(output.stream)
        case WireFlushed():
            return messages.Flushed(output.stream, output.tag, output.sample)
        case WireClosed():
            return messages.Closed(output.stream, output.sample)
        case WireFailed():
            return messages.Failed(output.stream, output.code, output.message)
        case WireRefused():
            return messages.Refused(output.stream, output.code, output.message)
        case WireDead():
            return messages.Dead(output.message)
        case _:
            plain = next(kind for kind, wire in _SESSION_OUTPUTS.items() if wire is type(output))
            return plain(*(getattr(output, name) for name in output.__struct_fields__))
