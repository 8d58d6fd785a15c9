"""The messages between gateway and engine as bytes: one header frame, then one raw frame per payload.

Headers are msgpack arrays with a tag, decoded into checked types. Payloads are float32 frames that are read by view.
A payload is copied once, into the socket's buffer: for a few kilobytes that is cheaper than pinning the array until
the socket has let go of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine import messages
from engine.spec import ModelSpec

# Goes up whenever an older peer could misread what is sent.
WIRE_VERSION = 4

Frames = Sequence[Any]
Payload = NDArray[np.float32]


class WireError(Exception):
    """Bytes that are not a message of this protocol."""


class _Wire(msgspec.Struct, array_like=True, gc=False):
    """Base of everything that travels inside a header."""


class WireItem(_Wire):
    offset: int
    length: int
    sample: int
    key: bytes
    # Which of the message's payload frames is this item's data; None: the receiver holds it, or it is a gap.
    frame: int | None
    mask: list[bool] | None
    samples: int | None
    # Rows of a payload with two axes (features); None for samples.
    rows: int | None


class WireStreamState(_Wire, tag="state"):
    stream: str
    audio_from: int
    position: int
    tag: int
    parts: dict[str, messages.Saved]


class WireOpen(_Wire, tag="open"):
    stream: str
    live: bool
    delay_positions: int | None
    options: dict[str, str]
    forced_tokens: list[int]
    state: WireStreamState | None
    items: list[WireItem]
    catch_up_until: int
    suspect: tuple[int, int] | None


class WireFeed(_Wire, tag="feed"):
    stream: str
    items: list[WireItem]


class WireFlush(_Wire, tag="flush"):
    stream: str
    tag: int
    at_pause: bool


class WireFinish(_Wire, tag="finish"):
    stream: str


class WireAbort(_Wire, tag="abort"):
    stream: str


class Inject(_Wire, tag="inject"):
    """Items for the receiver's cache alone."""

    items: list[WireItem]


WireCommand = WireOpen | WireFeed | WireFlush | WireFinish | WireAbort | Inject


class WireWord(_Wire):
    text: str
    start_sample: int
    end_sample: int


class WireText(_Wire, tag="text"):
    stream: str
    delta: str
    words: list[WireWord]
    tokens: list[int]
    sample: int


class WireSpeech(_Wire, tag="speech"):
    stream: str
    sample: int
    frame_samples: int
    probabilities: list[float]


class WireOpened(_Wire, tag="opened"):
    stream: str


class WireFlushed(_Wire, tag="flushed"):
    stream: str
    tag: int
    sample: int


class WireClosed(_Wire, tag="closed"):
    stream: str
    sample: int


class WireFailed(_Wire, tag="failed"):
    stream: str
    code: str
    message: str


class WireRefused(_Wire, tag="refused"):
    stream: str
    code: str
    message: str


class WireDead(_Wire, tag="dead"):
    message: str


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
)


class Progress(_Wire):
    """How far a stream is: positions below `computed` are done."""

    stream: str
    computed: int


class Status(_Wire):
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


class Batch(_Wire, tag="batch"):
    """What a gateway has to say in one tick, for all its streams."""

    seq: int
    ack: int
    commands: list[WireCommand]


class Update(_Wire, tag="update"):
    """What an engine has to say after a step, for all streams of one gateway."""

    seq: int
    ack: int
    outputs: list[WireOutput]
    progress: list[Progress]
    status: Status


class Beat(_Wire, tag="beat"):
    """Alive; `sent` is the last numbered message, `ack` the last one taken."""

    sent: int
    ack: int
    status: Status | None = None


class Again(_Wire, tag="again"):
    """Numbered messages from `seq` on did not arrive: send them again."""

    seq: int


class Missing(_Wire, tag="missing"):
    """All hashes of batch `seq` that the receiver does not hold."""

    seq: int
    keys: list[bytes]


class Repair(_Wire, tag="repair"):
    """The data of those hashes, one payload frame each; `gone` are those the sender has no data for."""

    seq: int
    items: list[WireItem]
    gone: list[bytes]


class Bye(_Wire, tag="bye"):
    """The gateway leaves; its streams are forgotten."""


ToEngine = Batch | Beat | Again | Repair | Bye
ToGateway = Update | Beat | Again | Missing

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[bool, msgspec.msgpack.Decoder[Any]] = {
    True: msgspec.msgpack.Decoder(ToEngine),
    False: msgspec.msgpack.Decoder(ToGateway),
}
_greeting_decoder = msgspec.msgpack.Decoder(Hello | Welcome | Unwelcome)


def encode(header: msgspec.Struct, payloads: Sequence[Payload] = ()) -> list[Any]:
    """Frames ready for the socket; payloads go by view."""
    return [_encoder.encode(header), *(payload.data for payload in payloads)]


def decode(frames: Frames, to_engine: bool) -> Any:
    """The header of a message to an engine or to a gateway: greetings are maps, everything else is an array."""
    if not frames:
        raise WireError("a message without a header")
    header = memoryview(frames[0])
    try:
        if header and 0x80 <= header[0] <= 0x8F:
            return _greeting_decoder.decode(header)
        return _decoders[to_engine].decode(header)
    except (msgspec.DecodeError, ValueError) as error:
        raise WireError(f"not a message of this protocol: {error}") from None


def payload_of(item: WireItem, frames: Frames) -> Payload | None:
    """An item's data by view, if the message carries it. Frame 0 is the header."""
    if item.frame is None:
        return None
    if not 0 < item.frame < len(frames):
        raise WireError(f"payload frame {item.frame} of {len(frames) - 1}")
    try:
        payload = np.frombuffer(frames[item.frame], dtype=np.float32)
        return payload if item.rows is None else payload.reshape(item.rows, -1)
    except ValueError as error:
        raise WireError(f"a payload is not float32 data: {error}") from None


def wire_item(item: messages.Item, frame: int | None) -> WireItem:
    payload = item.payload
    rows = None if payload is None or payload.ndim == 1 else payload.shape[0]
    return WireItem(item.offset, item.length, item.sample, item.key, frame, item.mask, item.samples, rows)


def plain_item(item: WireItem, payload: Payload | None) -> messages.Item:
    return messages.Item(item.offset, item.length, item.sample, item.key, payload, item.mask, item.samples)


def wire_open(command: messages.Open, items: list[WireItem]) -> WireOpen:
    state = None if command.state is None else _wire_state(command.state)
    return WireOpen(
        command.stream,
        command.live,
        command.delay_positions,
        command.options,
        command.forced_tokens,
        state,
        items,
        command.catch_up_until,
        command.suspect,
    )


def plain_open(command: WireOpen, name: str, items: list[messages.Item]) -> messages.Open:
    """The command under the name the engine knows the stream by."""
    return messages.Open(
        name,
        command.live,
        command.delay_positions,
        command.options,
        command.forced_tokens,
        None if command.state is None else _plain_state(command.state),
        items,
        command.catch_up_until,
        command.suspect,
    )


def _wire_state(state: messages.StreamState) -> WireStreamState:
    return WireStreamState(state.stream, state.audio_from, state.position, state.tag, state.parts)


def _plain_state(state: WireStreamState) -> messages.StreamState:
    return messages.StreamState(state.stream, state.audio_from, state.position, state.tag, state.parts)


def wire_output(output: messages.Output) -> WireOutput:
    match output:
        case messages.StreamState():
            return _wire_state(output)
        case messages.Text(stream, delta, words, tokens, sample):
            spoken = [WireWord(word.text, word.start_sample, word.end_sample) for word in words]
            return WireText(stream, delta, spoken, tokens, sample)
        case messages.Speech(stream, sample, frame_samples, probabilities):
            return WireSpeech(stream, sample, frame_samples, probabilities)
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


def plain_output(output: WireOutput) -> messages.Output:
    match output:
        case WireStreamState():
            return _plain_state(output)
        case WireText():
            words = [messages.Word(word.text, word.start_sample, word.end_sample) for word in output.words]
            return messages.Text(output.stream, output.delta, words, output.tokens, output.sample)
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
