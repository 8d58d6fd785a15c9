"""Where frames begin in what a client sends, and the short way for one that came whole.

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
# Heads and payloads that are passed over in one go; who sends more at once takes the long way from then on.
MOST_STEPS = 256


def text_of_whole_frame(data: bytes) -> str | None:
    """The text, if the data is one frame with a whole text of some length, and nothing else."""
    length = len(data) - _HEAD_BYTES
    if length < _SHORTEST or data[0] != _WHOLE_TEXT or data[1] != _MASKED_MIDDLE_LENGTH:
        return None
    if int.from_bytes(data[2:4]) != length:
        return None
    try:
        return str(apply_mask(data[_HEAD_BYTES:], data[4:_HEAD_BYTES]), "utf-8")
    except UnicodeDecodeError:
        return None


class FrameTrack:
    """Follows a client's bytes from frame to frame, without a look at what is in them, while that costs little."""

    def __init__(self) -> None:
        self._head = b""
        self._left = 0
        self._is_lost = False

    @property
    def at_start(self) -> bool:
        """The next byte is the first of a frame, for all that is known."""
        return not self._left and not self._head and not self._is_lost

    def pass_over(self, data: bytes) -> None:
        place = steps = 0
        while place < len(data) and not self._is_lost:
            steps += 1
            # Thousands of tiny frames may come at once, and nobody else has a turn meanwhile.
            self._is_lost = steps > MOST_STEPS
            if self._left:
                step = min(self._left, len(data) - place)
                self._left -= step
            else:
                step = min(_missing(self._head), len(data) - place)
                self._head += data[place : place + step]
                if not _missing(self._head):
                    self._left, self._head = _length(self._head), b""
            place += step


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
