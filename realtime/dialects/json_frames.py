"""Frames <-> JSON objects and audio bytes; no state. Sizes are checked by the caller before anything is parsed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from realtime.dialects.base import MAX_EVENT_ID
from realtime.errors import ClientFault

Json = dict[str, Any]

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
