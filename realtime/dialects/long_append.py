"""An incremental parser for one long audio message: decodes the base64 audio of an append as its bytes arrive.

`realtime/serving/inbox.py` uses it for `input_audio_buffer.append` messages that are too long to be parsed at once.
Only audio may be long: the rest of the message is kept until the end, up to the size of a control message. The audio of
each part is returned before the rest of the message is known, so if an append turns out to be invalid, the audio before
the mistake has already been transcribed.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from uuid import uuid4

import msgspec

from realtime.dialects.base import Json, decode_base64, decode_json, event_id_of
from realtime.errors import ClientFault

# The only type of message, in any dialect, that may be longer than a control message.
AUDIO_MESSAGE = "input_audio_buffer.append"
# Most JSON strings (names and values) in a long message.
MAX_AUDIO_TEXTS = 32
# Placeholder for the audio while the message before it is parsed. Random, so that a client cannot send it.
_PLACE_OF_AUDIO = uuid4().hex

_AUDIO_BEGINS = re.compile(rb'"audio"[ \t\r\n]*:[ \t\r\n]*"$')
# The rest of a string, up to its closing quote or to a backslash at the end of the data.
_IN_TEXT = re.compile(rb'(?>[^"\\]+|\\.)*+', re.DOTALL)
# Bytes of the longest JSON escape.
_ESCAPE = 6

_text_decoder = msgspec.json.Decoder(str)


class _State(Enum):
    """Where the next byte of the message is: outside strings, in a string, or in the audio."""

    OUTSIDE = auto()
    TEXT = auto()
    AUDIO = auto()


class LongAppend:
    """Parses one long message. `most_others` is the most bytes beside its audio."""

    def __init__(self, most_others: int) -> None:
        self._most_others = most_others
        # The message without its audio.
        self._others = bytearray()
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
        message = decode_json(bytes(self._others))
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
        if _AUDIO_BEGINS.search(self._others[-64:]) is None:
            return False
        try:
            before = decode_json(bytes(self._others) + _PLACE_OF_AUDIO.encode() + b'"}')
        except ClientFault:
            return False
        if before.get("audio") != _PLACE_OF_AUDIO:
            return False
        self.event_id = event_id_of(before)
        if before.get("type", AUDIO_MESSAGE) != AUDIO_MESSAGE:
            raise self._too_large()
        if self._base64 is not None:
            raise ClientFault("invalid_json", "The message has 'audio' twice.", param="audio")
        self._base64 = _Base64()
        return True

    def _keep(self, data: bytes) -> None:
        self._others += data
        if len(self._others) > self._most_others:
            raise self._too_large()

    def _too_large(self) -> ClientFault:
        text = f"Messages that are not audio may have at most {self._most_others} bytes (limits.control_bytes)."
        return ClientFault("message_too_large", text)


class _Base64:
    """Decodes base64 in a JSON string, in pieces of any length; as strict as `decode_base64`."""

    def __init__(self) -> None:
        # An incomplete escape, and an incomplete group of four characters.
        self._escape = b""
        self._letters = ""
        self._padded = False

    def decode(self, data: bytes) -> bytes:
        letters = self._letters + self._unescaped(self._escape + data)
        whole = len(letters) // 4 * 4
        letters, self._letters = letters[:whole], letters[whole:]
        if not letters:
            return b""
        if self._padded:
            raise _bad_audio()
        self._padded = letters.endswith("=")
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
