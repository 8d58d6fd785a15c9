"""Filters for the bytes of untrusted containers, before libav reads them: only what describes or holds audio passes,
other files are refused.

They run in the decoder processes of a gateway and in the commands; `audio/containers.py` puts them before libav.

Sources of bytes are `PartsReader` (an iterator) and `BytePipe` (fed by another thread); both limit the bytes that are
read without audio. `LibavSource` is the file object that libav reads, `IteratorSource` its simplest form. With a
`BytePipe`, libav's thread and its feeder take turns: one waits while the other runs. So a pipe contains at most one
piece, and libav decodes no more than is taken.

- `without_tags` removes tags, pictures, chapters and indexes from WAV, FLAC, MP3 and WebM. From Ogg it drops streams
  without audio, and it refuses more than `MAX_OGG_TAGS` tags. libav's time for tags is quadratic: a quarter of a
  megabyte of tags blocks it for half a minute.
- `Mp4Boxes` filters endless streams of MP4. A few bytes of an MP4 index can describe billions of samples, and libav
  would allocate an entry for each. So libav gets only the boxes that describe audio, after their numbers were checked.
  Other boxes become `free` boxes of the same size, because an index contains offsets in the file.
- `index_first` reorders uploaded MP4 files, because phones and ffmpeg write the index after the media. It finds the
  index, keeps only the description of the first audio track, and puts it in front; then the file is read like a stream,
  with the same limits.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from audio.errors import AudioError, CorruptAudio, NoAudioTrack

READ_BYTES = 32_768
# Most bytes without audio: headers, pictures, a video track between two pieces of audio. libav may keep all of it.
MAX_SILENT_BYTES = 16 << 20
# Writers that do not know the length of a WAV file write zero or nearly the largest value.
WAV_UNKNOWN_LENGTH = 0x7FFF_0000
WAV_CHUNKS = (b"fmt ", b"ds64", b"fact")
# Longest element that is passed on: a packet of audio, or the description of the tracks.
MAX_ELEMENT_BYTES = 1 << 20

FLAC_STREAM_INFO = 0

EBML_OPENED = {0x18538067: "Segment", 0x1F43B675: "Cluster"}
EBML_KEPT = {
    0x1A45DFA3: "EBML header",
    0x1549A966: "Info",
    0x1654AE6B: "Tracks",
    0xE7: "Timestamp",
    0xA3: "SimpleBlock",
    0xA0: "BlockGroup",
}
EBML_UNKNOWN_LENGTH = b"\xff"

# Audio codecs in Ogg, by the first bytes of their first packet.
OGG_SOUND = (b"OpusHead", b"\x01vorbis", b"\x7fFLAC", b"Speex   ")
MAX_OGG_STREAMS = 16
MAX_OGG_TAGS = 256
# A box that describes media has kilobytes.
MAX_BOX_BYTES = 1 << 20
# Length of a box of size 0, which extends to the end.
MAX_MEDIA_BYTES = 1 << 62
# Bytes up to the end of the index. They are kept, because a long stream is opened again with them.
MAX_HEADER_BYTES = 1 << 20
# libav keeps every packet of a fragmented MP4, about 4 KB per second of audio, until the stream is opened again.
MAX_FRAGMENTS = 256
MAX_FRAGMENT_SAMPLES = 1 << 16
# Packets in an index, over all tracks and edits: six hours of AAC. libav needs 24 bytes for each.
MAX_INDEX_ENTRIES = 1 << 20
# libav joins this many PCM samples to one packet.
PCM_SAMPLES_PER_ENTRY = 1024

# Box -> the boxes in it that libav gets.
KEPT: dict[bytes, tuple[bytes, ...]] = {
    b"moov": (b"mvhd", b"trak", b"mvex"),
    b"trak": (b"tkhd", b"edts", b"mdia"),
    b"edts": (b"elst",),
    b"mdia": (b"mdhd", b"hdlr", b"minf"),
    b"minf": (b"smhd", b"stbl"),
    b"stbl": (b"stsd", b"stts", b"ctts", b"stsc", b"stsz", b"stz2", b"stco", b"co64"),
    b"mvex": (b"mehd", b"trex"),
    b"moof": (b"mfhd", b"traf"),
    b"traf": (b"tfhd", b"tfdt", b"trun"),
}
SEEN_AT_TOP = (b"ftyp", b"styp", b"moov", b"moof", b"mdat")


class PipeClosed(Exception):
    """The pipe was closed by the side that feeds it."""


class ByteReader:
    """Reads a stream without seeking. The bytes read without audio are limited to `MAX_SILENT_BYTES`."""

    def __init__(self) -> None:
        self.bytes_read = 0
        self._piece = b""
        self._taken = 0
        self._sound_at = 0

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; empty only at the end. Raises CorruptAudio."""
        raise NotImplementedError

    def sound_came(self) -> None:
        """Samples were decoded from the bytes so far: restart the count."""
        self._sound_at = self.bytes_read

    def read_all(self, size: int) -> bytes:
        """Exactly `size` bytes, with waiting; fewer at the end of the stream."""
        if self._taken + size <= len(self._piece):
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
        """The next `size` bytes without taking them; fewer at the end of the stream."""
        head = self.read_all(size)
        self._piece = head + self._piece[self._taken :]
        self._taken = 0
        self.bytes_read -= len(head)
        return head

    def _next(self, size: int) -> bytes:
        """Up to `size` bytes of the current piece. Raises CorruptAudio."""
        part = self._piece[self._taken : self._taken + size]
        self._taken += len(part)
        self.bytes_read += len(part)
        if self.bytes_read - self._sound_at > MAX_SILENT_BYTES:
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
        if self._taken == len(self._piece):
            self._piece, self._taken = next(self._parts, b""), 0
        return self._next(size)


class BytePipe(ByteReader):
    """A pipe that one thread reads like a file and another one feeds."""

    def __init__(self, on_turn: Callable[[], None]) -> None:
        """`on_turn` is called on the reader's thread when it gives the turn back, and when it is finished. After that
        `hand_over` calls it itself."""
        super().__init__()
        self.failure: Exception | None = None
        self.finished = False
        # True: the reader needs more bytes. False: it waits until its samples were taken.
        self.hungry = True
        self._on_turn = on_turn
        self._pieces: SimpleQueue[bytes | None] = SimpleQueue()
        self._ended = False
        self._closed = False

    # The feeding side. It may call `hand_over` when it has the turn, and `close` at any time; neither waits.

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

    # The reading side

    def begin(self) -> None:
        """Wait for the first turn."""
        self._take(self._pieces.get())

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; waits for the next piece if there are none. Empty only at the end."""
        while self._taken == len(self._piece) and not self._ended:
            self._take(self._give_turn(hungry=True))
        return self._next(size)

    def pause(self) -> None:
        """Wait until the samples were taken. Raises PipeClosed."""
        if self._give_turn(hungry=False) is None:
            raise PipeClosed

    def finish(self, failure: Exception | None) -> None:
        """The reader is finished, and takes no more turns."""
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


class LibavSource:
    """The file object that libav reads; subclasses remove tags or boxes. A fault ends the stream and is kept in
    `fault`, because libav does not expect an exception from `read`."""

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
        self._taken = 0

    def _read(self, size: int) -> bytes:
        if self._taken == len(self._part):
            self._part, self._taken = next(self._parts, b""), 0
        part = self._part[self._taken : self._taken + size]
        self._taken += len(part)
        return part


def without_tags(container: str, pipe: ByteReader) -> Iterator[bytes]:
    """The bytes of a stream as they arrive, without its tags, in non-empty parts. Raises CorruptAudio."""
    return {"wav": _wav, "flac": _flac, "mp3": _mp3, "ogg": _ogg, "matroska": _matroska}[container](pipe)


def _wav(pipe: ByteReader) -> Iterator[bytes]:
    yield pipe.read_all(12)
    while len(head := pipe.read_all(8)) == 8:
        kind, length = head[:4], int.from_bytes(head[4:], "little")
        if kind == b"data":
            yield head
            unknown = length == 0 or length >= WAV_UNKNOWN_LENGTH
            yield from pipe.rest() if unknown else pipe.parts(length)
            return
        # Chunks begin at even offsets.
        length += length & 1
        if kind in WAV_CHUNKS and length <= MAX_ELEMENT_BYTES:
            yield head + pipe.read_all(length)
        else:
            pipe.skip(length)


def _flac(pipe: ByteReader) -> Iterator[bytes]:
    yield pipe.read_all(4)
    last = False
    while not last and len(head := pipe.read_all(4)) == 4:
        last, kind, length = bool(head[0] & 0x80), head[0] & 0x7F, int.from_bytes(head[1:], "big")
        if kind == FLAC_STREAM_INFO and length <= MAX_ELEMENT_BYTES:
            # Marked as the last metadata block, because the others are left out.
            yield bytes([0x80 | kind]) + head[1:] + pipe.read_all(length)
        else:
            pipe.skip(length)
    yield from pipe.rest()


def _mp3(pipe: ByteReader) -> Iterator[bytes]:
    while (head := pipe.peek(10)).startswith(b"ID3") and len(head) == 10:
        # Seven bits per byte; a footer has the size of the header.
        length = sum((byte & 0x7F) << shift for byte, shift in zip(head[6:], (21, 14, 7, 0), strict=True))
        pipe.skip(10 + length + (10 if head[5] & 0x10 else 0))
    yield from pipe.rest()


def _matroska(pipe: ByteReader) -> Iterator[bytes]:
    while head := pipe.read_all(1):
        name = head + pipe.read_all(_bytes_behind(head[0], 4))
        first = pipe.read_all(1)
        size = first + pipe.read_all(_bytes_behind(first[0], 8) if first else 0)
        kind, length = int.from_bytes(name, "big"), _ebml_length(size)
        if kind in EBML_OPENED:
            # Parts of it are removed, so its length is replaced by the unknown length.
            yield name + EBML_UNKNOWN_LENGTH
        elif length is None or (kind in EBML_KEPT and length > MAX_ELEMENT_BYTES):
            raise CorruptAudio(f"the WebM stream is damaged after {pipe.bytes_read} bytes: an element without an end")
        elif kind in EBML_KEPT:
            yield name + size + pipe.read_all(length)
        else:
            pipe.skip(length)


def _bytes_behind(first: int, most: int) -> int:
    """Number of bytes after the first byte of an EBML number, given by the position of its highest bit."""
    behind = 8 - first.bit_length()
    if behind >= most:
        raise CorruptAudio("the WebM stream is damaged: an element has no name or length")
    return behind


def _ebml_length(size: bytes) -> int | None:
    """The length in bytes; None for an element of unknown length, which has all bits set."""
    bits = 7 * len(size)
    value = int.from_bytes(size, "big") & ((1 << bits) - 1)
    return None if not size or value == (1 << bits) - 1 else value


def _ogg(pipe: ByteReader) -> Iterator[bytes]:
    """The pages of audio streams; pages of other streams are left out."""
    # Of each audio stream that has not ended: its codec, and the number of its packets so far.
    streams: dict[bytes, tuple[bytes, int]] = {}
    while len(head := pipe.read_all(27)) == 27:
        segments = pipe.read_all(head[26])
        body = pipe.read_all(sum(segments))
        stream, goes_on, begins, ends = head[14:18], head[5] & 1, head[5] & 2, head[5] & 4
        if begins and (codec := next((magic for magic in OGG_SOUND if body.startswith(magic)), None)):
            streams[stream] = codec, 0
        if head[:4] != b"OggS" or len(streams) > MAX_OGG_STREAMS:
            raise CorruptAudio(
                f"the Ogg stream is damaged after {pipe.bytes_read} bytes; begin a new Ogg stream with its header"
            )
        if stream not in streams:
            continue
        codec, number = streams[stream]
        for packet in _begun_packets(segments, body, bool(goes_on)):
            _check_ogg_tags(codec, packet, number)
            number += 1
        streams[stream] = codec, number
        yield head + segments + body
        if ends:
            del streams[stream]
    if head:
        yield head


def _begun_packets(segments: bytes, body: bytes, goes_on: bool) -> Iterator[bytes]:
    """The part on this page of each packet that begins on it. A segment shorter than 255 bytes ends a packet."""
    start = end = 0
    for length in segments:
        end += length
        if length < 255:
            if not goes_on:
                yield body[start:end]
            start, goes_on = end, False
    if start < end and not goes_on:
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


class Mp4Boxes(LibavSource):
    """An MP4 stream for libav. Boxes that are not media are returned whole.

    libav seeks back a few bytes when it reads a box; in a stream it can do that only within the last bytes it read. A
    long stream is ended after `MAX_FRAGMENTS` and opened again with the same header, so that libav frees its memory.
    """

    def __init__(self, pipe: ByteReader, most_index_bytes: int = MAX_HEADER_BYTES) -> None:
        super().__init__()
        self._pipe = pipe
        self._most_index_bytes = most_index_bytes
        self._box = b""
        self._taken = 0
        self._media_bytes = 0
        self._header: list[bytes] = []
        self._header_bytes = 0
        self._has_index = False
        self._fragments = 0
        self._samples = 0
        self._next_part = b""

    def start_over(self) -> bool:
        """Called at the end: returns True if the stream continues and has to be opened again."""
        self._box, self._taken = b"".join([*self._header, self._next_part]) if self._next_part else b"", 0
        self._next_part = b""
        self._fragments, self._samples = 1, 0
        return bool(self._box)

    def _read(self, size: int) -> bytes:
        if self._taken == len(self._box) and not self._media_bytes:
            self._box, self._taken = self._next_box(), 0
        if self._taken < len(self._box):
            part = self._box[self._taken : self._taken + size]
            self._taken += len(part)
            return part
        part = self._pipe.read(min(size, self._media_bytes))
        # The stream may end within a box.
        self._media_bytes = self._media_bytes - len(part) if part else 0
        return part

    def _next_box(self) -> bytes:
        """The next box, or only its header if its content is media or too large to keep; empty at the end."""
        if self._next_part:
            return b""
        header = self._pipe.read_all(8)
        if len(header) < 8:
            return header
        size, kind = int.from_bytes(header[:4], "big"), header[4:8]
        if size == 1:
            header += self._pipe.read_all(8)
            size = int.from_bytes(header[8:], "big")
        content = max(size - len(header), 0) if size else MAX_MEDIA_BYTES
        if not self._has_index:
            self._check_prologue(kind, len(header) + content)
        if kind not in SEEN_AT_TOP:
            header, kind = header[:4] + b"free" + header[8:], b"free"
        if kind == b"mdat" or (content > MAX_BOX_BYTES and kind == b"free"):
            self._media_bytes = content
            return header
        if content > (self._most_index_bytes if kind == b"moov" else MAX_BOX_BYTES):
            raise CorruptAudio(f"a box that describes the audio is larger than {MAX_BOX_BYTES} bytes; {REMEDY}")
        box = header + self._pipe.read_all(content)
        if kind == b"moof" and len(box) < size:
            return b""
        return self._described(kind, box, len(header))

    def _check_prologue(self, kind: bytes, size: int) -> None:
        if kind == b"mdat":
            raise CorruptAudio(f"the MP4 stream has its index (moov) at the end; {REMEDY}")
        self._header_bytes += size
        if self._header_bytes > self._most_index_bytes:
            raise CorruptAudio(
                f"more than {self._most_index_bytes} bytes come before the end of the MP4 index (moov); {REMEDY}"
            )

    def _described(self, kind: bytes, box: bytes, header: int) -> bytes:
        if kind == b"moof":
            return self._next_fragment(checked_fragment(box, header))
        if kind == b"moov":
            box = checked_index(box, header)
        if not self._has_index:
            self._header.append(box)
            self._has_index = kind == b"moov"
        return box

    def _next_fragment(self, box: bytes) -> bytes:
        """The index of the next fragment; empty if the stream has to be opened again before it."""
        self._fragments += 1
        self._samples += _fragment_samples(box)
        full = self._fragments > MAX_FRAGMENTS or self._samples > MAX_FRAGMENT_SAMPLES
        if not full or self._fragments == 1 or _points_into_file(box):
            return box
        self._next_part = box
        return b""


REMEDY = (
    "put the index in front (ffmpeg -i IN -c copy -movflags +faststart OUT), send fragmented MP4, WebM, Ogg, FLAC or "
    "WAV, or upload the file"
)


def checked_index(box: bytes, header: int) -> bytes:
    """A `moov` box with only the description of audio tracks. Raises CorruptAudio and NoAudioTrack."""
    entries, tracks = 0, 0
    shown = bytearray(box)
    for kind, start, content, end in boxes_of(box, header, len(box)):
        if kind == b"trak" and (track := _sound_track(box, content, end)) is not None:
            tracks += 1
            entries += _entries(track)
            _blank(shown, b"trak", content, end)
        elif kind == b"mvex":
            _blank(shown, b"mvex", content, end)
        elif kind != b"mvhd":
            shown[start + 4 : start + 8] = b"free"
    if entries > MAX_INDEX_ENTRIES:
        raise CorruptAudio(f"the MP4 index describes {entries} packets, more than {MAX_INDEX_ENTRIES}; {REMEDY}")
    if not tracks:
        raise NoAudioTrack("the file has no audio track; send one that has sound in it")
    return bytes(shown)


def checked_fragment(box: bytes, header: int) -> bytes:
    """A `moof` box with only the description of packets. Raises CorruptAudio."""
    shown = bytearray(box)
    _blank(shown, b"moof", header, len(box))
    if _fragment_samples(box) > MAX_FRAGMENT_SAMPLES:
        raise CorruptAudio(f"an MP4 fragment describes more than {MAX_FRAGMENT_SAMPLES} packets; send shorter ones")
    return bytes(shown)


def boxes_of(data: bytes | bytearray, start: int, end: int) -> Iterator[tuple[bytes, int, int, int]]:
    """Kind, start, start of the content, and end of each box between two offsets. Raises CorruptAudio."""
    while start + 8 <= end:
        size, content = int.from_bytes(data[start : start + 4], "big"), start + 8
        if size == 1:
            size, content = int.from_bytes(data[start + 8 : start + 16], "big"), start + 16
        stop = start + size if size else end
        if not content <= stop <= end:
            raise CorruptAudio("the MP4 index is damaged: a box is larger than the box that contains it")
        yield bytes(data[start + 4 : start + 8]), start, content, stop
        start = stop


def _blank(shown: bytearray, parent: bytes, start: int, end: int) -> None:
    """Turn every box that the parent does not need into a `free` box."""
    for kind, at, content, stop in boxes_of(shown, start, end):
        if kind not in KEPT[parent]:
            shown[at + 4 : at + 8] = b"free"
        elif kind in KEPT:
            _blank(shown, kind, content, stop)


def _sound_track(box: bytes, start: int, end: int) -> dict[bytes, bytes] | None:
    """The content of each box of an audio track, by its kind; None for another track. Raises CorruptAudio."""
    found: dict[bytes, bytes] = {}
    places = [(b"trak", start, end)]
    while places:
        parent, at, stop = places.pop()
        for kind, _, content, last in boxes_of(box, at, stop):
            if kind not in KEPT[parent]:
                continue
            if kind in found:
                raise CorruptAudio(f"the MP4 index is damaged: a track has two boxes '{kind.decode()}'")
            found[kind] = box[content:last]
            if kind in KEPT:
                places.append((kind, content, last))
    if found.get(b"hdlr", b"")[8:12] != b"soun":
        return None
    # The description of a codec contains boxes too, and libav would accept any kind of box there.
    if any(kind in found.get(b"stsd", b"") for kind in (b"trak", b"trun", *KEPT[b"stbl"], b"elst", b"cmov")):
        raise CorruptAudio("the MP4 index is damaged: the description of the codec contains an index")
    return found


def _entries(track: dict[bytes, bytes]) -> int:
    """The number of entries that libav would allocate for a track."""
    chunks = _number(track.get(b"stco", track.get(b"co64", b"")), 4)
    runs = _rows(track.get(b"stsc", b""), 3)
    ends = np.append(runs[1:, 0], chunks + 1)
    lengths = np.maximum(0, ends[: len(runs)] - runs[:, 0])
    times = _rows(track.get(b"stts", b""), 2)
    if len(times) == 1 and times[0][1] == 1:
        entries = _product(lengths, -(-runs[:, 1] // PCM_SAMPLES_PER_ENTRY))
    else:
        offsets = int(_rows(track.get(b"ctts", b""), 2)[:, 0].sum())
        sizes = max(_number(track.get(b"stsz", b""), 8), _number(track.get(b"stz2", b""), 8))
        entries = max(_product(lengths, runs[:, 1]), sizes, offsets, int(times[:, 0].sum()))
    # libav processes the index once for each edit.
    return entries * max(1, _number(track.get(b"elst", b""), 4))


def _rows(table: bytes, numbers: int) -> NDArray[np.int64]:
    """The rows of a table, with `numbers` integers each, after its version, flags and number of rows."""
    count = max(0, min(_number(table, 4), (len(table) - 8) // (4 * numbers)))
    return np.frombuffer(table, ">u4", count * numbers, 8 if count else 0).reshape(-1, numbers).astype(np.int64)


def _product(counts: NDArray[np.int64], each: NDArray[np.int64]) -> int:
    """The sum of the products, in floating point so that it cannot overflow."""
    return int((counts.astype(np.float64) * each).sum())


def _number(table: bytes, at: int) -> int:
    return int.from_bytes(table[at : at + 4], "big")


def _fragment_samples(fragment: bytes) -> int:
    """Number of packets in the fragment. The bytes `trun` in other data only make the result larger."""
    _, *runs = fragment.split(b"trun")
    return sum(_number(run, 4) for run in runs)


def _points_into_file(fragment: bytes) -> bool:
    """True if the fragment contains the offset of its media in the file; most have the distance from the fragment."""
    _, found, track_header = fragment.partition(b"tfhd")
    # One byte of version, three bytes of flags; the last bit means that an offset in the file follows.
    return not found or bool(int.from_bytes(track_header[1:4], "big") & 1)


# Uploaded files

# Bytes of the description of an audio track: six hours of AAC.
MAX_TRACK_BYTES = 8 << 20
# Boxes visited until the audio track is found; ordinary files have a few dozen.
MAX_BOXES = 1024
# Bytes up to the end of the index that was put in front.
MAX_INDEX_BYTES = MAX_TRACK_BYTES + (1 << 20)

Box = tuple[bytes, int, int, int]


def index_first(file: BinaryIO) -> Iterator[bytes]:
    """The parts of an MP4 file, with its index before its media. Raises CorruptAudio and NoAudioTrack.

    A fragmented file already has its index in front, and is passed on unchanged.
    """
    walk = _Walk(file)
    _, start, content, end = walk.find((b"moov",), 0, walk.size) or _no_index()
    if walk.find((b"mvex",), content, end) is not None:
        yield from _range(file, 0, walk.size)
        return
    index, last_chunk = _front_index(walk, content, end)
    head = walk.first_box_end()
    yield from _range(file, 0, head)
    yield index
    yield from _range(file, head, start)
    # An index at the end is left out. One between media becomes a `free` box, so that offsets stay right.
    if last_chunk >= start:
        yield walk.read(start, 4) + b"free"
        yield from _range(file, start + 8, walk.size)


def _no_index() -> Box:
    raise CorruptAudio("the MP4 file has no index (moov): it is cut short, or its recording was never finished")


def _range(file: BinaryIO, start: int, end: int) -> Iterator[bytes]:
    while start < end:
        file.seek(start)
        part = file.read(min(READ_BYTES, end - start))
        if not part:
            return
        yield part
        start += len(part)


class _Walk:
    """Finds boxes in a file without reading their content."""

    def __init__(self, file: BinaryIO) -> None:
        self.size = file.seek(0, 2)
        self._file = file
        self._seen = 0

    def boxes(self, start: int, end: int) -> Iterator[Box]:
        """Kind, start, start of the content, and end of each box between two offsets. Raises CorruptAudio."""
        while start + 8 <= end:
            self._seen += 1
            if self._seen > MAX_BOXES:
                raise CorruptAudio(f"the MP4 file has more than {MAX_BOXES} boxes before its audio is described")
            head = self.read(start, min(16, end - start))
            size, kind, content = int.from_bytes(head[:4], "big"), head[4:8], start + 8
            if size == 1:
                size, content = int.from_bytes(head[8:16], "big"), start + 16
            stop = start + size if size else end
            if stop < content:
                raise CorruptAudio("the MP4 file is damaged: a box is shorter than its own header")
            yield kind, start, content, stop
            start = stop

    def find(self, path: tuple[bytes, ...], start: int, end: int) -> Box | None:
        """The first box at this path of kinds; None if there is none. Raises CorruptAudio."""
        found: Box | None = None
        for kind in path:
            found = next((box for box in self.boxes(start, end) if box[0] == kind), None)
            if found is None:
                return None
            if found[3] > end:
                raise CorruptAudio("the MP4 file is cut short: its index is not complete")
            start, end = found[2], found[3]
        return found

    def first_box_end(self) -> int:
        """The end of the first box if it is `ftyp`; else 0."""
        kind, _, _, end = next(self.boxes(0, self.size))
        return min(end, self.size) if kind == b"ftyp" else 0

    def read(self, start: int, size: int) -> bytes:
        self._file.seek(start)
        return self._file.read(size)


def _front_index(walk: _Walk, start: int, end: int) -> tuple[bytes, int]:
    """A `moov` box with only the first audio track, whose offsets are shifted for a place before the media; and the
    original offset of the last chunk of audio."""
    header = walk.find((b"mvhd",), start, end)
    track = next((box for box in walk.boxes(start, end) if box[0] == b"trak" and _is_sound(walk, box)), None)
    if track is None:
        raise NoAudioTrack("the file has no audio track; send one that has sound in it")
    sizes = [box[3] - box[1] for box in (header, track) if box is not None]
    if track[3] > end or sum(sizes) > MAX_TRACK_BYTES:
        raise CorruptAudio(
            f"the MP4 index takes more than {MAX_TRACK_BYTES} bytes to describe the sound, or is cut short; "
            "split the recording, or send it as WebM, Ogg, FLAC or WAV"
        )
    content = bytearray(b"".join(walk.read(box[1], box[3] - box[1]) for box in (header, track) if box is not None))
    track_content = len(content) - (track[3] - track[2])
    last = _move(content, track_content, 8 + len(content))
    return struct.pack(">I4s", 8 + len(content), b"moov") + content, last


def _is_sound(walk: _Walk, track: Box) -> bool:
    handler = walk.find((b"mdia", b"hdlr"), track[2], track[3])
    return handler is not None and walk.read(handler[2] + 8, 4) == b"soun"


def _move(content: bytearray, track: int, by: int) -> int:
    """Add `by` to all chunk offsets of the track whose boxes begin at `track`; returns the largest old offset."""
    last = 0
    places = [(b"trak", track, len(content))]
    while places:
        parent, start, end = places.pop()
        for kind, _, at, stop in boxes_of(content, start, end):
            if kind in KEPT[parent] and kind in KEPT:
                places.append((kind, at, stop))
            elif kind in (b"stco", b"co64"):
                last = max(last, _move_table(content, at, stop, ">u4" if kind == b"stco" else ">u8", by))
    return last


def _move_table(content: bytearray, start: int, end: int, kind: str, by: int) -> int:
    number = np.dtype(kind)
    count = max(0, min(int.from_bytes(content[start + 4 : start + 8], "big"), (end - start - 8) // number.itemsize))
    places = np.frombuffer(content, number, count, start + 8)
    if not count:
        return 0
    last = int(places.max())
    if last + by > np.iinfo(number).max:
        raise CorruptAudio("the MP4 index is damaged: it contains an offset beyond the end of any file")
    places += number.type(by)
    return last
