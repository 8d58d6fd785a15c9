"""One command of a gateway as bytes, encoded and decoded alone.

A batch carries commands of many streams. What one of them holds may come from a client, so one that cannot be written
or read costs its own stream, and the others of its batch go on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from engine import messages
from engine.boundary.items import LARGEST_COUNT
from engine.errors import BadItem, BadOption

Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_COUNT)]
# A token, or what stands for a position that was cut out.
Token = Annotated[int, msgspec.Meta(ge=messages.SKIPPED, le=LARGEST_COUNT)]


class Wire(msgspec.Struct, array_like=True, gc=False):
    """Base of everything that travels inside a header."""


class WireItem(Wire):
    offset: Count
    length: Count
    sample: Count
    # Which entry of the batch's data is this item's audio; None: it is a gap.
    data: Count | None
    mask: list[bool] | None
    samples: Count | None


class WireStreamState(Wire, tag="state"):
    stream: str
    audio_from: int
    position: int
    tag: int
    parts: dict[str, messages.Saved]


class WireTurnRule(Wire):
    threshold: Annotated[float, msgspec.Meta(gt=0, le=1)]
    min_speech_samples: Count
    silence_samples: Count


class WireOpen(Wire, tag="open"):
    stream: str
    live: bool
    delay_positions: int | None
    options: dict[str, str]
    forced_tokens: list[Token]
    state: WireStreamState | None
    items: list[WireItem]
    catch_up_until: int
    suspect: tuple[int, int] | None
    turns: WireTurnRule | None


class WireFeed(Wire, tag="feed"):
    stream: str
    items: list[WireItem]


class WireFlush(Wire, tag="flush"):
    stream: str
    tag: int
    pause: Count | None


class WireChangeTurns(Wire, tag="turns"):
    stream: str
    turns: WireTurnRule | None


class WireFinish(Wire, tag="finish"):
    stream: str


class WireAbort(Wire, tag="abort"):
    stream: str


class WireSaveHandoff(Wire, tag="entrust"):
    stream: str
    key: str
    number: Count
    consumed: Count
    entries: list[bytes]
    base: bytes | None
    chunk: bytes
    keep_bytes: Count
    keep_s: float
    position_offset: Count
    sample_offset: Count
    last: bool


class WireAsk(Wire, tag="ask"):
    stream: str
    key: str
    tag: Count


class WireAdopt(Wire, tag="adopt"):
    stream: str
    key: str
    number: Count


class WireRenew(Wire, tag="renew"):
    stream: str
    key: str
    tag: Count
    number: Count


class WireClaim(Wire, tag="claim"):
    stream: str
    tag: Count
    claims: list[tuple[str, Count, bool]]


class WireDropHandoff(Wire, tag="disown"):
    stream: str
    key: str
    number: Count


WireSessionCommand = WireSaveHandoff | WireAsk | WireAdopt | WireRenew | WireClaim | WireDropHandoff
WireCommand = WireOpen | WireFeed | WireFlush | WireChangeTurns | WireFinish | WireAbort | WireSessionCommand

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[WireCommand] = msgspec.msgpack.Decoder(WireCommand)
_list_decoder: msgspec.msgpack.Decoder[list[WireCommand]] = msgspec.msgpack.Decoder(list[WireCommand])
_anything = msgspec.msgpack.Decoder()


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


def encode_command(command: messages.Command, items: list[WireItem]) -> msgspec.Raw:
    """Raises whatever the encoder makes of values that are not what their types say."""
    return msgspec.Raw(_encoder.encode(_wire_command(command, items)))


def decode_commands(commands: list[msgspec.Raw]) -> list[WireCommand | UnreadableCommand]:
    """All of a batch at once, or one by one if one of them cannot be read."""
    try:
        return [*_list_decoder.decode(b"".join([_ARRAY, len(commands).to_bytes(4, "big"), *commands]))]
    except _UNREADABLE:
        return [_decode_alone(command) for command in commands]


def _decode_alone(raw: msgspec.Raw) -> WireCommand | UnreadableCommand:
    try:
        return _decoder.decode(raw)
    except _UNREADABLE as error:
        stream, opens = _guess(raw)
        return UnreadableCommand(stream, opens, f"a command that cannot be read: {error}")


def _guess(raw: msgspec.Raw) -> tuple[str | None, bool]:
    """Whose command it seems to be, and whether it opens a stream."""
    try:
        parts: Any = _anything.decode(raw)
    except _UNREADABLE:
        return None, False
    if isinstance(parts, list) and len(parts) > 1 and isinstance(parts[1], str):
        return parts[1], parts[0] == "open"
    return None, False


def _wire_command(command: messages.Command, items: list[WireItem]) -> WireCommand:
    match command:
        case messages.Feed():
            return WireFeed(command.stream, items)
        case messages.Open():
            return wire_open(command, items)
        case messages.Flush():
            return WireFlush(command.stream, command.tag, command.pause)
        case messages.ChangeTurns():
            return WireChangeTurns(command.stream, _wire_rule(command.turns))
        case messages.Finish():
            return WireFinish(command.stream)
        case messages.Abort():
            return WireAbort(command.stream)
        case _:
            return _wire_session_command(command)


def _wire_session_command(command: messages.SessionCommand) -> WireSessionCommand:
    match command:
        case messages.Ask():
            return WireAsk(command.stream, command.key, command.tag)
        case messages.Adopt():
            return WireAdopt(command.stream, command.key, command.number)
        case messages.Renew():
            return WireRenew(command.stream, command.key, command.tag, command.number)
        case messages.Claim():
            return WireClaim(command.stream, command.tag, command.claims)
        case messages.DropHandoff():
            return WireDropHandoff(command.stream, command.key, command.number)
        case messages.SaveHandoff():
            return _wire_save_handoff(command)


def _wire_save_handoff(command: messages.SaveHandoff) -> WireSaveHandoff:
    return WireSaveHandoff(
        command.stream,
        command.key,
        command.number,
        command.consumed,
        command.entries,
        command.base,
        command.chunk,
        command.keep_bytes,
        command.keep_s,
        command.position_offset,
        command.sample_offset,
        command.last,
    )


def wire_open(command: messages.Open, items: list[WireItem]) -> WireOpen:
    return WireOpen(
        command.stream,
        command.live,
        command.delay_positions,
        command.options,
        command.forced_tokens,
        None if command.state is None else wire_state(command.state),
        items,
        command.catch_up_until,
        command.suspect,
        _wire_rule(command.turns),
    )


def _wire_rule(rule: messages.TurnRule | None) -> WireTurnRule | None:
    return None if rule is None else WireTurnRule(rule.threshold, rule.min_speech_samples, rule.silence_samples)


def plain_rule(rule: WireTurnRule | None) -> messages.TurnRule | None:
    return None if rule is None else messages.TurnRule(rule.threshold, rule.min_speech_samples, rule.silence_samples)


def plain_open(command: WireOpen, name: str, items: list[messages.Item]) -> messages.Open:
    """The command under the name the engine knows the stream by."""
    return messages.Open(
        name,
        command.live,
        command.delay_positions,
        command.options,
        command.forced_tokens,
        None if command.state is None else plain_state(command.state),
        items,
        command.catch_up_until,
        command.suspect,
        plain_rule(command.turns),
    )


def wire_state(state: messages.StreamState) -> WireStreamState:
    return WireStreamState(state.stream, state.audio_from, state.position, state.tag, state.parts)


def plain_state(state: WireStreamState) -> messages.StreamState:
    return messages.StreamState(state.stream, state.audio_from, state.position, state.tag, state.parts)
