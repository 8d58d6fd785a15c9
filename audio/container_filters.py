"""Reads the bytes of untrusted audio containers without seeking, and removes what libav must not read.

`audio/containers.py` puts these readers and filters before libav. The filter of MP4 is in `audio/mp4_filter.py`.

- Readers: `PartsReader` reads the parts of an iterator. `BytePipe` is fed by another thread: that thread and the
  reading thread take turns, and one waits while the other runs. So a pipe contains at most one piece, and libav decodes
  no more than is consumed. Both limit the bytes that come without audio.
- `LibavSource` is the file object that libav reads; `IteratorSource` is its simplest form.
- The tag filter (`without_tags`) removes tags, pictures, chapters and indexes from WAV, FLAC, MP3 and WebM, because
  libav's time for tags is quadratic: a quarter of a megabyte of tags blocks it for half a minute. Of an Ogg file only
  the audio streams pass, and one with more than `MAX_OGG_TAGS` tags is refused.
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


# The tag filter

# Writers that do not know the length of a WAV file write zero or nearly the largest value.
WAV_UNKNOWN_LENGTH = 0x7FFF_0000
# Chunks that are passed on, besides the samples.
WAV_CHUNKS = (b"fmt ", b"ds64", b"fact")
# Longest element that is passed on: a packet of audio, or the description of the tracks.
MAX_ELEMENT_BYTES = 1 << 20

# The type of the only FLAC metadata block that is passed on.
FLAC_STREAM_INFO = 0

# WebM elements by id: those that contain others to filter, and those that are passed on whole.
EBML_OPENED = {0x18538067: "Segment", 0x1F43B675: "Cluster"}
EBML_KEPT = {
    0x1A45DFA3: "EBML header",
    0x1549A966: "Info",
    0x1654AE6B: "Tracks",
    0xE7: "Timestamp",
    0xA3: "SimpleBlock",
    0xA0: "BlockGroup",
}
# A length with all bits set: the element ends where its contents end.
EBML_UNKNOWN_LENGTH = b"\xff"

# Audio codecs in Ogg, by the first bytes of their first packet.
OGG_AUDIO = (b"OpusHead", b"\x01vorbis", b"\x7fFLAC", b"Speex   ")
# Audio streams that have not ended, and tags of each.
MAX_OGG_STREAMS = 16
MAX_OGG_TAGS = 256


def without_tags(container: str, reader: ByteReader) -> Iterator[bytes]:
    """The bytes of a stream as they arrive, without its tags, in non-empty parts. Raises CorruptAudio."""
    return {"wav": _wav, "flac": _flac, "mp3": _mp3, "ogg": _ogg, "matroska": _matroska}[container](reader)


def _wav(reader: ByteReader) -> Iterator[bytes]:
    yield reader.read_all(12)
    while len(head := reader.read_all(8)) == 8:
        kind, length = head[:4], int.from_bytes(head[4:], "little")
        if kind == b"data":
            yield head
            unknown = length == 0 or length >= WAV_UNKNOWN_LENGTH
            yield from reader.rest() if unknown else reader.parts(length)
            return
        # Chunks begin at even offsets.
        length += length & 1
        if kind in WAV_CHUNKS and length <= MAX_ELEMENT_BYTES:
            yield head + reader.read_all(length)
        else:
            reader.skip(length)


def _flac(reader: ByteReader) -> Iterator[bytes]:
    yield reader.read_all(4)
    last = False
    while not last and len(head := reader.read_all(4)) == 4:
        last, kind, length = bool(head[0] & 0x80), head[0] & 0x7F, int.from_bytes(head[1:], "big")
        if kind == FLAC_STREAM_INFO and length <= MAX_ELEMENT_BYTES:
            # 0x80 marks it as the last metadata block: the others are dropped.
            yield bytes([0x80 | kind]) + head[1:] + reader.read_all(length)
        else:
            reader.skip(length)
    yield from reader.rest()


def _mp3(reader: ByteReader) -> Iterator[bytes]:
    while (head := reader.peek(10)).startswith(b"ID3") and len(head) == 10:
        # Seven bits per byte; a footer has the size of the header.
        length = sum((byte & 0x7F) << shift for byte, shift in zip(head[6:], (21, 14, 7, 0), strict=True))
        reader.skip(10 + length + (10 if head[5] & 0x10 else 0))
    yield from reader.rest()


def _matroska(reader: ByteReader) -> Iterator[bytes]:
    while head := reader.read_all(1):
        name = head + reader.read_all(_bytes_after_first(head[0], 4))
        first = reader.read_all(1)
        size = first + reader.read_all(_bytes_after_first(first[0], 8) if first else 0)
        kind, length = int.from_bytes(name, "big"), _ebml_length(size)
        if kind in EBML_OPENED:
            # Elements in it are removed, so its length becomes unknown.
            yield name + EBML_UNKNOWN_LENGTH
        elif length is None or (kind in EBML_KEPT and length > MAX_ELEMENT_BYTES):
            raise CorruptAudio(f"the WebM stream is damaged after {reader.bytes_read} bytes: an element without an end")
        elif kind in EBML_KEPT:
            yield name + size + reader.read_all(length)
        else:
            reader.skip(length)


def _bytes_after_first(first: int, max_bytes: int) -> int:
    """Number of bytes after the first byte of an EBML number, given by the position of its highest bit."""
    count = 8 - first.bit_length()
    if count >= max_bytes:
        raise CorruptAudio("the WebM stream is damaged: an element has no name or length")
    return count


def _ebml_length(size: bytes) -> int | None:
    """The length in bytes; None for an element of unknown length, which has all bits set."""
    bits = 7 * len(size)
    value = int.from_bytes(size, "big") & ((1 << bits) - 1)
    return None if not size or value == (1 << bits) - 1 else value


def _ogg(reader: ByteReader) -> Iterator[bytes]:
    """The pages of audio streams; pages of other streams are left out."""
    # By serial number, each audio stream that has not ended: its codec, and the number of its packets so far.
    streams: dict[bytes, tuple[bytes, int]] = {}
    follows_first_page = True
    while len(head := reader.read_all(27)) == 27:
        segments = reader.read_all(head[26])
        body = reader.read_all(sum(segments))
        stream, is_continued, is_first, is_last = head[14:18], head[5] & 1, head[5] & 2, head[5] & 4
        if is_first and not follows_first_page:
            # Streams that belong together begin together: those before have ended, even if no page says so.
            streams.clear()
        follows_first_page = bool(is_first)
        if is_first and (codec := next((magic for magic in OGG_AUDIO if body.startswith(magic)), None)):
            streams[stream] = codec, 0
        if head[:4] != b"OggS" or len(streams) > MAX_OGG_STREAMS:
            raise CorruptAudio(
                f"the Ogg stream is damaged after {reader.bytes_read} bytes; begin a new Ogg stream with its header"
            )
        if stream not in streams:
            continue
        codec, number = streams[stream]
        for packet in _begun_packets(segments, body, bool(is_continued)):
            _check_ogg_tags(codec, packet, number)
            number += 1
        streams[stream] = codec, number
        yield head + segments + body
        if is_last:
            del streams[stream]
    if head:
        yield head


def _begun_packets(segments: bytes, body: bytes, is_continued: bool) -> Iterator[bytes]:
    """The part on this page of each packet that begins on it. A segment shorter than 255 bytes ends a packet."""
    start = end = 0
    for length in segments:
        end += length
        if length < 255:
            if not is_continued:
                yield body[start:end]
            start, is_continued = end, False
    if start < end and not is_continued:
        yield body[start:end]


def _check_ogg_tags(codec: bytes, packet: bytes, number: int) -> None:
    """Raise CorruptAudio for a packet with too many tags. Their number follows the name of the encoder."""
    is_tags, start = {
        b"OpusHead": (packet.startswith(b"OpusTags"), 8),
        b"\x01vorbis": (packet.startswith(b"\x03vorbis"), 7),
        b"\x7fFLAC": (packet[:1] in (b"\x04", b"\x84"), 4),
        b"Speex   ": (number == 1, 0),
    }[codec]
    if is_tags:
        start += 4 + int.from_bytes(packet[start : start + 4], "little")
        count = packet[start : start + 4]
        if len(count) < 4 or int.from_bytes(count, "little") > MAX_OGG_TAGS:
            raise CorruptAudio(f"the Ogg stream has more than {MAX_OGG_TAGS} tags, or damaged ones; send it without")
