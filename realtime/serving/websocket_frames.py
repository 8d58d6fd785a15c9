"""WebSocket frames of clients: a fast decoder for a typical frame, and a splitter that fragments long frames.

Both stand before the parser of `websockets` in `RealtimeWebSocket` (`uvicorn_protocols.py`). Nearly every append is one
frame that arrives in one read; `text_of_whole_frame` decodes it without the parser. `FrameSplitter` cuts a long frame
into fragments, because parsing much at once would delay other clients.
"""

from __future__ import annotations

from websockets.frames import (  # type: ignore[attr-defined]
    apply_mask,
)

# First two bytes of such a frame: a final text frame; masked, with a length of two bytes.
_WHOLE_TEXT, _MASKED_MIDDLE_LENGTH = 0x81, 0xFE
_HEADER_BYTES = 8
# Shortest payload with a length of two bytes.
_SHORTEST = 126
# The parser gets the payload of a frame in fragments of at most this size, because unmasking, copying and decoding more
# at once would delay other clients. A multiple of the mask's length (4).
PART_BYTES = 64 * 1024
_FINAL, _OPCODE, _MASKED = 0x80, 0x0F, 0x80
_CONTINUED, _FIRST_CONTROL = 0x0, 0x8


def text_of_whole_frame(data: bytes, max_size: int) -> str | None:
    """The text if the data is exactly one final, masked text frame with a two-byte length; else None."""
    length = len(data) - _HEADER_BYTES
    if not _SHORTEST <= length <= max_size or data[0] != _WHOLE_TEXT or data[1] != _MASKED_MIDDLE_LENGTH:
        return None
    if int.from_bytes(data[2:4]) != length:
        return None
    try:
        return str(apply_mask(data[_HEADER_BYTES:], data[4:_HEADER_BYTES]), "utf-8")
    except UnicodeDecodeError:
        return None


class FrameSplitter:
    """Rewrites a client's byte stream so that long frames reach the parser as fragments of `PART_BYTES`.

    RFC 6455 allows intermediaries to fragment messages, so the result is valid. A frame that makes its message longer
    than `max_size` is passed on unchanged: the parser refuses it by its header.
    """

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._header = b""
        # Payload bytes left in the current fragment, and in the frame after it.
        self._fragment_left = 0
        self._frame_left = 0
        # FIN bit of the frame that is being split.
        self._final = 0
        self._mask = b""
        self._message_size = 0

    @property
    def at_start(self) -> bool:
        """Whether the next byte is the first byte of a frame."""
        return not self._fragment_left and not self._frame_left and not self._header

    def split(self, data: bytes) -> bytes:
        """The bytes to give to the parser in place of `data`."""
        if len(data) <= self._fragment_left:
            self._fragment_left -= len(data)
            return data
        output, position = [], 0
        while position < len(data):
            if not self._fragment_left and self._frame_left:
                output.append(self._fragment(_CONTINUED))
            if self._fragment_left:
                step = min(self._fragment_left, len(data) - position)
                self._fragment_left -= step
                output.append(data[position : position + step])
            else:
                step = min(_missing(self._header), len(data) - position)
                self._header += data[position : position + step]
                if not _missing(self._header):
                    header, self._header = self._header, b""
                    output.append(self._begin(header))
            position += step
        return b"".join(output)

    def _begin(self, header: bytes) -> bytes:
        """The header to give to the parser: of the whole frame, or of its first fragment."""
        opcode, length = header[0] & _OPCODE, _length(header)
        if opcode < _FIRST_CONTROL:
            self._message_size = length + (self._message_size if opcode == _CONTINUED else 0)
        masked = header[1] & _MASKED
        if length <= PART_BYTES or not masked or self._message_size > self._max_size:
            self._fragment_left = length
            return header
        self._frame_left, self._final, self._mask = length, header[0] & _FINAL, header[-4:]
        return self._fragment(header[0] & ~_FINAL)

    def _fragment(self, first_byte: int) -> bytes:
        """The header of the next fragment; the last one has the FIN bit of the frame."""
        self._fragment_left = min(PART_BYTES, self._frame_left)
        self._frame_left -= self._fragment_left
        if not self._frame_left:
            first_byte |= self._final
        return bytes((first_byte,)) + _masked_length(self._fragment_left) + self._mask


def _masked_length(length: int) -> bytes:
    if length < 126:
        return bytes((_MASKED | length,))
    return (
        bytes((_MASKED | 126,)) + length.to_bytes(2) if length < 2**16 else bytes((_MASKED | 127,)) + length.to_bytes(8)
    )


def _missing(header: bytes) -> int:
    """Bytes that are still missing to complete the header of a frame, or to know its length."""
    if len(header) < 2:
        return 2 - len(header)
    mask_bytes = 4 if header[1] & 0x80 else 0
    return 2 + _length_bytes(header) + mask_bytes - len(header)


def _length_bytes(header: bytes) -> int:
    return {126: 2, 127: 8}.get(header[1] & 0x7F, 0)


def _length(header: bytes) -> int:
    size = _length_bytes(header)
    return int.from_bytes(header[2 : 2 + size]) if size else header[1] & 0x7F
