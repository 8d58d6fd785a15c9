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
_HEAD_BYTES = 8
# Shortest payload with a length of two bytes.
_SHORTEST = 126
# The parser gets the payload of a frame in fragments of at most this size, because unmasking, copying and decoding more
# at once would delay other clients. A multiple of the mask's length (4).
PART_BYTES = 64 * 1024
_FINAL, _OPCODE, _MASKED = 0x80, 0x0F, 0x80
_CONTINUED, _FIRST_CONTROL = 0x0, 0x8


def text_of_whole_frame(data: bytes, max_size: int) -> str | None:
    """The text if the data is exactly one final, masked text frame with a two-byte length; else None."""
    length = len(data) - _HEAD_BYTES
    if not _SHORTEST <= length <= max_size or data[0] != _WHOLE_TEXT or data[1] != _MASKED_MIDDLE_LENGTH:
        return None
    if int.from_bytes(data[2:4]) != length:
        return None
    try:
        return str(apply_mask(data[_HEAD_BYTES:], data[4:_HEAD_BYTES]), "utf-8")
    except UnicodeDecodeError:
        return None


class FrameSplitter:
    """Rewrites a client's byte stream so that long frames reach the parser as fragments of `PART_BYTES`.

    RFC 6455 allows intermediaries to fragment messages, so the result is valid. A frame that makes its message longer
    than `max_size` is passed on unchanged: the parser refuses it by its header.
    """

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._head = b""
        # Payload bytes left in the current fragment, and in the frame after it.
        self._left = 0
        self._later = 0
        # FIN bit of the frame that is being split.
        self._final = 0
        self._mask = b""
        self._message_size = 0

    @property
    def at_start(self) -> bool:
        """Whether the next byte is the first byte of a frame."""
        return not self._left and not self._later and not self._head

    def split(self, data: bytes) -> bytes:
        """The bytes to give to the parser in place of `data`."""
        if len(data) <= self._left:
            self._left -= len(data)
            return data
        seen, place = [], 0
        while place < len(data):
            if not self._left and self._later:
                seen.append(self._fragment(_CONTINUED))
            if self._left:
                step = min(self._left, len(data) - place)
                self._left -= step
                seen.append(data[place : place + step])
            else:
                step = min(_missing(self._head), len(data) - place)
                self._head += data[place : place + step]
                if not _missing(self._head):
                    head, self._head = self._head, b""
                    seen.append(self._begin(head))
            place += step
        return b"".join(seen)

    def _begin(self, head: bytes) -> bytes:
        """The header to give to the parser: of the whole frame, or of its first fragment."""
        opcode, length = head[0] & _OPCODE, _length(head)
        if opcode < _FIRST_CONTROL:
            self._message_size = length + (self._message_size if opcode == _CONTINUED else 0)
        masked = head[1] & _MASKED
        if length <= PART_BYTES or not masked or self._message_size > self._max_size:
            self._left = length
            return head
        self._later, self._final, self._mask = length, head[0] & _FINAL, head[-4:]
        return self._fragment(head[0] & ~_FINAL)

    def _fragment(self, first_byte: int) -> bytes:
        """The header of the next fragment; the last one has the FIN bit of the frame."""
        self._left = min(PART_BYTES, self._later)
        self._later -= self._left
        if not self._later:
            first_byte |= self._final
        return bytes((first_byte,)) + _masked_length(self._left) + self._mask


def _masked_length(length: int) -> bytes:
    if length < 126:
        return bytes((_MASKED | length,))
    return (
        bytes((_MASKED | 126,)) + length.to_bytes(2) if length < 2**16 else bytes((_MASKED | 127,)) + length.to_bytes(8)
    )


def _missing(head: bytes) -> int:
    """Bytes that are still missing to complete the header of a frame, or to know its length."""
    if len(head) < 2:
        return 2 - len(head)
    mask_bytes = 4 if head[1] & 0x80 else 0
    return 2 + _length_bytes(head) + mask_bytes - len(head)


def _length_bytes(head: bytes) -> int:
    return {126: 2, 127: 8}.get(head[1] & 0x7F, 0)


def _length(head: bytes) -> int:
    size = _length_bytes(head)
    return int.from_bytes(head[2 : 2 + size]) if size else head[1] & 0x7F
