"""An append that is too long to be parsed in one go: its audio is decoded as its bytes arrive, piece by piece.

Only audio may be long, so whatever else is in such a message is kept until its end and bounded as a control message is.
The audio of each piece is handed out before the rest of the message is known: of an append that turns out to be broken,
what stood before the mistake has been heard.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from uuid import uuid4

import msgspec

from realtime.dialects.base import Json, decode_base64, decode_json, event_id_of
from realtime.errors import ClientFault

# The only kind of message, in any dialect, that may be longer than control messages.
AUDIO_MESSAGE = "input_audio_buffer.append"
# Names and texts that a long message may have; all the rest of it is one long text.
MAX_AUDIO_TEXTS = 32
# Stands for the audio while the message before it is looked at. Nobody can send it by chance or on purpose.
_PLACE_OF_AUDIO = uuid4().hex

_AUDIO_BEGINS = re.compile(rb'"audio"[ \t\r\n]*:[ \t\r\n]*"$')
# The rest of a text up to the quote that ends it, or to a backslash whose letter is not there yet.
_IN_TEXT = re.compile(rb'(?>[^"\\]+|\\.)*+', re.DOTALL)
# The longest escape of JSON has six bytes.
_ESCAPE = 6

_text_decoder = msgspec.json.Decoder(str)


class _State(Enum):
    """Where in the message the next byte stands."""

    OUTSIDE = auto()
    TEXT = auto()
    AUDIO = auto()


class LongAppend:
    """Reads one message. `most_others`: bytes that it may have beside its audio."""

    def __init__(self, most_others: int) -> None:
        self._most_others = most_others
        # The message with nothing between the quotes of its audio.
        self._others = bytearray()
        self._texts = 0
        self._state = _State.OUTSIDE
        self._after_backslash = False
        self._base64: _Base64 | None = None
        # The client's own name for the message, once it is known.
        self.event_id: str | None = None

    def read(self, data: bytes) -> bytes:
        """The audio in the next bytes of the message. Raises ClientFault; then the rest of the message is of no use."""
        audio, place = b"", 0
        while place < len(data):
            match self._state:
                case _State.AUDIO:
                    assert self._base64 is not None
                    # A quote with a backslash before it is not base64 either.
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
        """The message without its audio. Raises ClientFault if it was no append, or was not complete."""
        message = decode_json(bytes(self._others))
        self.event_id = event_id_of(message)
        if self._base64 is None or message.get("type") != AUDIO_MESSAGE:
            raise self._too_large()
        return message

    def _read_text(self, data: bytes, place: int) -> int:
        """Pass over a text that is not the audio; where it ends, or the data does."""
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
        """Whether the text that begins here is the value of `audio`, at the top level of a message that may have it."""
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
            raise ClientFault("invalid_json", "'audio' came twice in one message.", param="audio")
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
    """Base64 inside a JSON text, cut anywhere. As strict as `decode_base64` about the whole of it."""

    def __init__(self) -> None:
        # The beginning of an escape that is not complete, and letters that do not fill three bytes yet.
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
    """Where an escape begins whose end has yet to come, or the end of the data."""
    place = _index(data, b"\\", max(0, len(data) - _ESCAPE + 1))
    while place < len(data):
        end = place + (_ESCAPE if data[place + 1 : place + 2] == b"u" else 2)
        if end > len(data):
            return place
        # Others may follow one that is complete, as where a writer escapes slashes.
        place = _index(data, b"\\", end)
    return place


def _index(data: bytes, mark: bytes, start: int) -> int:
    """Where the mark is, or the end of the data."""
    found = data.find(mark, start)
    return len(data) if found < 0 else found


def _bad_audio() -> ClientFault:
    text = "'audio' is not valid base64; what stood before the mistake was heard."
    return ClientFault("invalid_audio", text, param="audio")
