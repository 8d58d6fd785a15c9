"""Reads the bytes of untrusted audio files and streams without seeking, and limits the bytes that come without audio.

`PartsReader` reads the parts of an iterator. `BytePipe` is fed by another thread: that thread and the reading thread
take turns, and one waits while the other runs. So a pipe contains at most one piece, and libav decodes no more than is
consumed. `LibavSource` is the file object that libav reads; `IteratorSource` is its simplest form. The filters between
a reader and libav are in `audio/tag_filter.py` and `audio/mp4_filter.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import SimpleQueue

from audio.errors import AudioError, CorruptAudio

# Bytes of one read.
READ_BYTES = 32_768
# Most bytes without audio: headers, pictures, a video track between two pieces of audio. libav may keep all of it.
MAX_SILENT_BYTES = 16 << 20


class PipeClosed(Exception):
    """The pipe was closed by the side that feeds it."""


class ByteReader:
    """Reads a stream without seeking. The bytes read without audio are limited to `MAX_SILENT_BYTES`."""

    def __init__(self) -> None:
        self.bytes_read = 0
        self._piece = b""
        # Bytes of the piece that were read, and `bytes_read` when the newest samples were decoded.
        self._offset = 0
        self._bytes_at_audio = 0

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; empty only at the end. Raises CorruptAudio."""
        raise NotImplementedError

    def audio_decoded(self) -> None:
        """Samples were decoded from the bytes so far: restart the count of bytes without audio."""
        self._bytes_at_audio = self.bytes_read

    def read_all(self, size: int) -> bytes:
        """Exactly `size` bytes; waits for them. Fewer at the end of the stream."""
        if self._offset + size <= len(self._piece):
            return self._next(size)
        return b"".join(self.parts(size))

    def parts(self, size: int) -> Iterator[bytes]:
        """The next `size` bytes as they arrive; fewer at the end of the stream."""
        while size and (part := self.read(min(size, READ_BYTES))):
            yield part
            size -= len(part)

    def rest(self) -> Iterator[bytes]:
        """All bytes up to the end, as they arrive."""
        while part := self.read(READ_BYTES):
            yield part

    def skip(self, size: int) -> None:
        for _ in self.parts(size):
            pass

    def peek(self, size: int) -> bytes:
        """The next `size` bytes, which stay unread; fewer at the end of the stream."""
        head = self.read_all(size)
        self._piece = head + self._piece[self._offset :]
        self._offset = 0
        self.bytes_read -= len(head)
        return head

    def _next(self, size: int) -> bytes:
        """Up to `size` bytes of the current piece. Raises CorruptAudio."""
        part = self._piece[self._offset : self._offset + size]
        self._offset += len(part)
        self.bytes_read += len(part)
        if self.bytes_read - self._bytes_at_audio > MAX_SILENT_BYTES:
            raise CorruptAudio(
                f"more than {MAX_SILENT_BYTES >> 20} MiB came without any audio; send the audio track alone, "
                "without pictures"
            )
        return part


class PartsReader(ByteReader):
    """Reads the parts of an iterator; none of them may be empty."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        super().__init__()
        self._parts = parts

    def read(self, size: int) -> bytes:
        if self._offset == len(self._piece):
            self._piece, self._offset = next(self._parts, b""), 0
        return self._next(size)


class BytePipe(ByteReader):
    """A pipe that one thread reads like a file and another one feeds."""

    def __init__(self, on_turn: Callable[[], None]) -> None:
        """`on_turn` is called on the reader's thread when it gives the turn to the feeding side, and when it finishes.
        Once it has finished, `hand_over` calls `on_turn` at once."""
        super().__init__()
        self.failure: Exception | None = None
        self.finished = False
        # Why the reader waits. True: it needs more bytes. False: its samples have to be consumed first.
        self.needs_bytes = True
        self._on_turn = on_turn
        self._pieces: SimpleQueue[bytes | None] = SimpleQueue()
        self._ended = False
        self._closed = False

    # Methods of the feeding side. It may call `hand_over` when it has the turn, and `close` at any time; neither waits.

    def hand_over(self, piece: bytes | None) -> None:
        """Give the turn to the reader, with more bytes, with empty bytes to continue, or with None for the end."""
        if self.finished:
            self._on_turn()
        else:
            self._pieces.put(piece)

    def close(self) -> None:
        """Make the reader stop at its next read or pause."""
        self._closed = True
        self._pieces.put(None)

    # Methods of the reading side

    def begin(self) -> None:
        """Wait for the first turn."""
        self._set_piece(self._pieces.get())

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; waits for the next piece if there are none. Empty only at the end."""
        while self._offset == len(self._piece) and not self._ended:
            self._set_piece(self._give_turn(needs_bytes=True))
        return self._next(size)

    def pause(self) -> None:
        """Wait until the decoded samples were consumed. Raises PipeClosed."""
        if self._give_turn(needs_bytes=False) is None:
            raise PipeClosed

    def finish(self, failure: Exception | None) -> None:
        """The reader has finished, and needs no more turns."""
        self.failure = failure
        self.finished = True
        self._on_turn()

    def _next(self, size: int) -> bytes:
        return b"" if self._closed else super()._next(size)

    def _give_turn(self, *, needs_bytes: bool) -> bytes | None:
        if self._closed:
            return None
        self.needs_bytes = needs_bytes
        self._on_turn()
        return self._pieces.get()

    def _set_piece(self, piece: bytes | None) -> None:
        self._piece, self._offset, self._ended = piece or b"", 0, piece is None


class LibavSource:
    """The file object that libav reads; subclasses filter its bytes.

    libav does not expect an exception from `read`, so a fault is stored in `fault`, and ends the stream for libav.
    """

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


class IteratorSource(LibavSource):
    """Gives libav the parts of an iterator; none of them may be empty."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        super().__init__()
        self._parts = parts
        self._part = b""
        self._offset = 0

    def _read(self, size: int) -> bytes:
        if self._offset == len(self._part):
            self._part, self._offset = next(self._parts, b""), 0
        part = self._part[self._offset : self._offset + size]
        self._offset += len(part)
        return part
