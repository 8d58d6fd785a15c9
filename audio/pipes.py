"""The bytes of a stream on their way to a library that wants to read them from a file.

The library runs on a thread of its own, used as a coroutine: one side runs at a time and the other has given its turn
away. So a pipe never holds more than the piece that is being read, and the library never makes more than is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import SimpleQueue

from audio.errors import AudioError, CorruptAudio

READ_BYTES = 32_768
# So much may go by without a sound: a header, a picture, a picture track between two pieces of sound. What describes
# sound takes kilobytes, and libav may keep all of it.
MAX_SILENT_BYTES = 16 << 20


class PipeClosed(Exception):
    """Nobody waits for the reader any more."""


class ByteReader:
    """Reads a stream from front to back. What it has read without a sound among it is bounded."""

    def __init__(self) -> None:
        self.bytes_read = 0
        self._piece = b""
        self._taken = 0
        self._sound_at = 0

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; nothing only at the end. Raises CorruptAudio."""
        raise NotImplementedError

    def sound_came(self) -> None:
        """What was read so far has led to samples."""
        self._sound_at = self.bytes_read

    def read_all(self, size: int) -> bytes:
        """`size` bytes, however long they take to come; fewer at the end of the stream."""
        if self._taken + size <= len(self._piece):
            return self._next(size)
        return b"".join(self.parts(size))

    def parts(self, size: int) -> Iterator[bytes]:
        """The next `size` bytes as they come; fewer at the end of the stream."""
        while size and (part := self.read(min(size, READ_BYTES))):
            yield part
            size -= len(part)

    def rest(self) -> Iterator[bytes]:
        """Everything up to the end, as it comes."""
        while part := self.read(READ_BYTES):
            yield part

    def skip(self, size: int) -> None:
        for _ in self.parts(size):
            pass

    def peek(self, size: int) -> bytes:
        """The next `size` bytes without taking them; fewer at the end of the stream."""
        head = self.read_all(size)
        self._piece = head + self._piece[self._taken :]
        self._taken = 0
        self.bytes_read -= len(head)
        return head

    def _next(self, size: int) -> bytes:
        """Up to `size` bytes of the piece at hand."""
        part = self._piece[self._taken : self._taken + size]
        self._taken += len(part)
        self.bytes_read += len(part)
        if self.bytes_read - self._sound_at > MAX_SILENT_BYTES:
            raise CorruptAudio(
                f"more than {MAX_SILENT_BYTES >> 20} MiB came without any sound among them; send the sound alone, "
                "without pictures"
            )
        return part


class PartsReader(ByteReader):
    """Reads parts as a generator gives them; none of them is empty."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        super().__init__()
        self._parts = parts

    def read(self, size: int) -> bytes:
        if self._taken == len(self._piece):
            self._piece, self._taken = next(self._parts, b""), 0
        return self._next(size)


class BytePipe(ByteReader):
    """Read like a file by one thread, fed by another."""

    def __init__(self, on_turn: Callable[[], None]) -> None:
        """`on_turn` is called on the reader's thread whenever it gives the turn back, and when it is done."""
        super().__init__()
        self.failure: Exception | None = None
        self.finished = False
        # True: the reader has used up what it was given. False: it waits until what it made is taken.
        self.hungry = True
        self._on_turn = on_turn
        self._pieces: SimpleQueue[bytes | None] = SimpleQueue()
        self._ended = False
        self._closed = False

    # The side that feeds. It may hand over when it has the turn, and close at any time; neither waits.

    def hand_over(self, piece: bytes | None) -> None:
        """Give the turn away, with more bytes, with none to let the reader go on, or with None for the end."""
        if self.finished:
            self._on_turn()
        else:
            self._pieces.put(piece)

    def close(self) -> None:
        """Let the reader stop as soon as it asks for anything; nothing more comes of it."""
        self._closed = True
        self._pieces.put(None)

    # The side that reads

    def begin(self) -> None:
        """Wait for the first turn."""
        self._take(self._pieces.get())

    def read(self, size: int) -> bytes:
        """Up to `size` bytes. Waits for the next piece if nothing is there; returns nothing only at the end."""
        while self._taken == len(self._piece) and not self._ended:
            self._take(self._give_turn(hungry=True))
        return self._next(size)

    def pause(self) -> None:
        """Wait until what was made is taken. Raises PipeClosed if nobody will take it."""
        if self._give_turn(hungry=False) is None:
            raise PipeClosed

    def finish(self, failure: Exception | None) -> None:
        """The reader is done: it takes no more turns."""
        self.failure = failure
        self.finished = True
        self._on_turn()

    def _next(self, size: int) -> bytes:
        return b"" if self._closed else super()._next(size)

    def _give_turn(self, *, hungry: bool) -> bytes | None:
        if self._closed:
            return None
        self.hungry = hungry
        self._on_turn()
        return self._pieces.get()

    def _take(self, piece: bytes | None) -> None:
        self._piece, self._taken, self._ended = piece or b"", 0, piece is None


class Filtered:
    """What a library gets to see of a stream, read like a file. A fault ends it: libraries do not expect one here."""

    def __init__(self) -> None:
        self.fault: AudioError | None = None

    def read(self, size: int) -> bytes:
        if self.fault is None:
            try:
                return self._read(size)
            except AudioError as error:
                self.fault = error
        return b""

    def _read(self, size: int) -> bytes:
        raise NotImplementedError


class Parts(Filtered):
    """Parts of a stream as a generator lets them through; none of them is empty."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        super().__init__()
        self._parts = parts
        self._part = b""
        self._taken = 0

    def _read(self, size: int) -> bytes:
        if self._taken == len(self._part):
            self._part, self._taken = next(self._parts, b""), 0
        part = self._part[self._taken : self._taken + size]
        self._taken += len(part)
        return part
