"""The bytes of a stream on their way to a library that wants to read them from a file.

The library runs on a thread of its own, used as a coroutine: one side runs at a time and the other waits for its turn.
So a pipe never holds more than the piece that is being read.
"""

from __future__ import annotations

from queue import SimpleQueue

from audio.errors import CorruptAudio

# A box that describes media takes kilobytes; a larger box is passed on as it comes. A box of size 0 lasts to the end.
MAX_BOX_BYTES = 1 << 20
MAX_MEDIA_BYTES = 1 << 62
# libav remembers every packet of a fragmented MP4, about 4 KB per second of audio, until it is opened again.
MAX_FRAGMENTS = 256


class BytePipe:
    """Read like a file by one thread, fed by another."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self._pieces: SimpleQueue[bytes | None] = SimpleQueue()
        self._turns: SimpleQueue[None] = SimpleQueue()
        self._finished = False
        self._piece = b""
        self._taken = 0
        self._ended = False

    # The side that feeds

    def hand_over(self, piece: bytes | None) -> None:
        """Hand over a piece, or None for the end, and wait until all of it is used."""
        if not self._finished:
            self._pieces.put(piece)
            self.wait()

    def wait(self) -> None:
        """Wait until the reader has nothing left to read, or is done."""
        self._turns.get()
        if self._finished:
            # Somebody else may be waiting too, and the reader gives no more turns.
            self._turns.put(None)

    def end(self) -> None:
        """Let the reader run out without waiting for it."""
        self._pieces.put(None)

    # The side that reads

    def read(self, size: int) -> bytes:
        """Up to `size` bytes. Waits for the next piece if nothing is there; returns nothing only at the end."""
        if self._taken == len(self._piece) and not self._ended:
            self._turns.put(None)
            piece = self._pieces.get()
            self._piece, self._taken, self._ended = piece or b"", 0, piece is None
        part = self._piece[self._taken : self._taken + size]
        self._taken += len(part)
        return part

    def read_all(self, size: int) -> bytes:
        """`size` bytes, however long they take to come; fewer at the end of the stream."""
        parts = []
        while size and (part := self.read(size)):
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def peek(self, size: int) -> bytes:
        """The next `size` bytes without taking them; fewer at the end of the stream."""
        head = self.read_all(size)
        self._piece = head + self._piece[self._taken :]
        self._taken = 0
        return head

    def finish(self, failure: Exception | None) -> None:
        """The reader is done: nobody needs to wait for it any more."""
        self.failure = failure
        self._finished = True
        self._turns.put(None)


class Mp4Boxes:
    """An MP4 stream, made readable for libav from front to back and without end.

    Boxes that are not media arrive whole: libav steps back a few bytes when it reads one; in a stream it can do so only
    within what it was last given, and loses its place otherwise. A long stream is also
    ended now and then and opened again with the same header: libav remembers every packet of a fragmented MP4.
    """

    def __init__(self, pipe: BytePipe) -> None:
        self._pipe = pipe
        self._box = b""
        self._media_bytes = 0
        self._header = b""
        self._has_index = False
        self._fragments = 0
        self._next_part = b""

    def start_over(self) -> bool:
        """Ask at the end: True if the stream goes on and has to be opened again."""
        self._box, self._next_part = self._next_part and self._header + self._next_part, b""
        self._fragments = 1
        return bool(self._box)

    def read(self, size: int) -> bytes:
        if not self._box and not self._media_bytes:
            self._box = self._next_box()
        if self._box:
            part, self._box = self._box[:size], self._box[size:]
        else:
            part = self._pipe.read(min(size, self._media_bytes))
            # A stream that ends inside a box ends.
            self._media_bytes = self._media_bytes - len(part) if part else 0
        return part

    def _next_box(self) -> bytes:
        """The next box, or only its header if its content is media or too large to wait for; nothing at the end."""
        if self._next_part:
            return b""
        header = self._pipe.read_all(8)
        size, kind = int.from_bytes(header[:4], "big"), header[4:8]
        if size == 1:
            header += self._pipe.read_all(8)
            size = int.from_bytes(header[8:], "big")
        content = size - len(header) if size else MAX_MEDIA_BYTES
        if kind == b"mdat" and not self._has_index:
            raise CorruptAudio(
                "the MP4 stream has its index (moov) at the end; put it in front (faststart), send fragmented MP4, or "
                "upload the whole file"
            )
        if kind == b"mdat" or content > MAX_BOX_BYTES:
            self._media_bytes = content
            return header
        box = header + self._pipe.read_all(max(content, 0))
        if not self._has_index:
            self._header += box
            self._has_index = kind == b"moov"
        elif kind == b"moof":
            return self._next_fragment(box)
        return box

    def _next_fragment(self, box: bytes) -> bytes:
        """The index of the next fragment, unless it is time for the stream to end here."""
        self._fragments += 1
        if self._fragments <= MAX_FRAGMENTS or _points_into_file(box):
            return box
        self._next_part = box
        return b""


def _points_into_file(fragment: bytes) -> bool:
    """True if the fragment gives the place of its media in the file; most give the distance from the fragment."""
    _, found, track_header = fragment.partition(b"tfhd")
    # A byte of version, then three of flags, of which the last bit says that an offset into the file follows.
    return not found or bool(int.from_bytes(track_header[1:4], "big") & 1)
