"""Where frames begin in what a client sends: the short way for one that came whole, and fragments of one that is long.

Nearly every append is one frame that arrives by itself. To read it as such costs less than the parser that can read
anything.
"""

from __future__ import annotations

# As the parser itself has it: in C where that was built.
from websockets.frames import apply_mask  # type: ignore[attr-defined]

# A text that is all of its message, with a mask and a length of two bytes.
_WHOLE_TEXT, _MASKED_MIDDLE_LENGTH = 0x81, 0xFE
_HEAD_BYTES = 8
_SHORTEST = 126
# The payload of a frame reaches the parser in fragments of at most so many bytes: to take a mask off, to copy and to
# decode more than that would keep everybody else waiting. A multiple of the mask's length.
PART_BYTES = 64 * 1024
_FINAL, _OPCODE, _MASKED = 0x80, 0x0F, 0x80
_CONTINUED, _FIRST_CONTROL = 0x0, 0x8


def text_of_whole_frame(data: bytes, max_size: int) -> str | None:
    """The text, if the data is one frame with a whole text of some length, and nothing else."""
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
    """Follows a client's bytes from frame to frame, and makes fragments of frames that are long.

    RFC 6455 lets anybody on the way cut a message like that, so the parser sees nothing unusual. A frame that makes its
    message longer than `max_size` is passed on as it is: the parser refuses it by its head.
    """

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._head = b""
        # Bytes of the fragment that goes on now, and of the frame behind it.
        self._left = 0
        self._later = 0
        self._final = 0
        self._mask = b""
        self._message_size = 0

    @property
    def at_start(self) -> bool:
        """The next byte is the first of a frame."""
        return not self._left and not self._later and not self._head

    def split(self, data: bytes) -> bytes:
        """What the parser is to see of the next bytes."""
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
        """The head of a frame, or of its first fragment."""
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
        """The head of the next fragment; the last one ends the message if its frame does."""
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
    """How many bytes the head of a frame lacks, as far as it can be told."""
    if len(head) < 2:
        return 2 - len(head)
    mask_bytes = 4 if head[1] & 0x80 else 0
    return 2 + _length_bytes(head) + mask_bytes - len(head)


def _length_bytes(head: bytes) -> int:
    return {126: 2, 127: 8}.get(head[1] & 0x7F, 0)


def _length(head: bytes) -> int:
    size = _length_bytes(head)
    return int.from_bytes(head[2 : 2 + size]) if size else head[1] & 0x7F
