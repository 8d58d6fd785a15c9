"""Filters untrusted MP4 before libav reads it: only checked boxes that describe or contain audio pass.

A few bytes of an MP4 index can describe billions of samples, and libav would allocate an entry for each. So the numbers
in the index are checked, and boxes that do not describe audio become `free` boxes of the same size, because an index
contains offsets in the file.

- `Mp4Boxes` filters streams, also endless ones.
- `index_first` reorders uploaded files, because phones and ffmpeg write the index after the media. It keeps only the
  description of the first audio track, and puts it in front; then the file is read like a stream, with the same limits.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from audio.container_filters import READ_BYTES, ByteReader, LibavSource
from audio.errors import CorruptAudio, NoAudioTrack

# The largest box that describes media; normal ones have kilobytes.
MAX_BOX_BYTES = 1 << 20
# Stands for the length of a box of size 0, which extends to the end of the stream.
MAX_MEDIA_BYTES = 1 << 62
# Most bytes up to the end of a stream's index. They are stored, because a long stream is opened again with them.
MAX_HEADER_BYTES = 1 << 20
# libav keeps every packet of a fragmented MP4, about 4 KB per second of audio, until the stream is opened again.
MAX_FRAGMENTS = 256
MAX_FRAGMENT_SAMPLES = 1 << 16
# Most packets in an index, over all tracks and edits: six hours of AAC. libav needs 24 bytes for each.
MAX_INDEX_ENTRIES = 1 << 20
# libav joins this many PCM samples to one packet.
PCM_SAMPLES_PER_ENTRY = 1024

# The boxes that are passed to libav, by the box that contains them; and those at the top level.
KEPT_BOXES: dict[bytes, tuple[bytes, ...]] = {
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
TOP_LEVEL_BOXES = (b"ftyp", b"styp", b"moov", b"moof", b"mdat")
# The end of an error text: what the client can send instead.
REMEDY = (
    "put the index in front (ffmpeg -i IN -c copy -movflags +faststart OUT), send fragmented MP4, WebM, Ogg, FLAC or "
    "WAV, or upload the file"
)


class Mp4Boxes(LibavSource):
    """An MP4 stream for libav. A box that is not media is checked, and then returned as one piece.

    libav seeks back a few bytes when it reads a box; in a stream it can do that only within the last bytes it read. A
    long stream is ended after `MAX_FRAGMENTS` and opened again with the same header, so that libav frees its memory.
    """

    def __init__(self, reader: ByteReader, max_index_bytes: int = MAX_HEADER_BYTES) -> None:
        super().__init__()
        self._reader = reader
        self._max_index_bytes = max_index_bytes
        # The current box, and how much of it was read; then the bytes of media that follow it.
        self._box = b""
        self._offset = 0
        self._media_bytes = 0
        # The boxes up to the index.
        self._header: list[bytes] = []
        self._header_bytes = 0
        self._has_index = False
        # Fragments, and samples in them, since libav opened the stream.
        self._fragments = 0
        self._samples = 0
        # The index of the fragment with which the stream has to be opened again.
        self._next_part = b""

    def reopen(self) -> bool:
        """Called when libav has reached the end. True if the stream continues, and has to be opened again."""
        self._box, self._offset = b"".join([*self._header, self._next_part]) if self._next_part else b"", 0
        self._next_part = b""
        self._fragments, self._samples = 1, 0
        return bool(self._box)

    def _read(self, size: int) -> bytes:
        if self._offset == len(self._box) and not self._media_bytes:
            self._box, self._offset = self._next_box(), 0
        if self._offset < len(self._box):
            part = self._box[self._offset : self._offset + size]
            self._offset += len(part)
            return part
        part = self._reader.read(min(size, self._media_bytes))
        # The stream may end within a box.
        self._media_bytes = self._media_bytes - len(part) if part else 0
        return part

    def _next_box(self) -> bytes:
        """The next box, or only its header if its content is media or too large to keep; empty at the end."""
        if self._next_part:
            return b""
        header = self._reader.read_all(8)
        if len(header) < 8:
            return header
        size, kind = int.from_bytes(header[:4], "big"), header[4:8]
        if size == 1:
            header += self._reader.read_all(8)
            size = int.from_bytes(header[8:], "big")
        content = max(size - len(header), 0) if size else MAX_MEDIA_BYTES
        if not self._has_index:
            self._check_prologue(kind, len(header) + content)
        if kind not in TOP_LEVEL_BOXES:
            header, kind = header[:4] + b"free" + header[8:], b"free"
        if kind == b"mdat" or (content > MAX_BOX_BYTES and kind == b"free"):
            self._media_bytes = content
            return header
        if content > (self._max_index_bytes if kind == b"moov" else MAX_BOX_BYTES):
            raise CorruptAudio(f"a box that describes the audio is larger than {MAX_BOX_BYTES} bytes; {REMEDY}")
        box = header + self._reader.read_all(content)
        if kind == b"moof" and len(box) < size:
            return b""
        return self._filter(kind, box, len(header))

    def _check_prologue(self, kind: bytes, size: int) -> None:
        if kind == b"mdat":
            raise CorruptAudio(f"the MP4 stream has its index (moov) at the end; {REMEDY}")
        self._header_bytes += size
        if self._header_bytes > self._max_index_bytes:
            raise CorruptAudio(
                f"more than {self._max_index_bytes} bytes come before the end of the MP4 index (moov); {REMEDY}"
            )

    def _filter(self, kind: bytes, box: bytes, header: int) -> bytes:
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


def checked_index(box: bytes, header: int) -> bytes:
    """A `moov` box with only the description of audio tracks. Raises CorruptAudio and NoAudioTrack."""
    entries, tracks = 0, 0
    filtered = bytearray(box)
    for kind, start, content, end in boxes_of(box, header, len(box)):
        if kind == b"trak" and (track := _audio_track(box, content, end)) is not None:
            tracks += 1
            entries += _index_entries(track)
            _free_other_boxes(filtered, b"trak", content, end)
        elif kind == b"mvex":
            _free_other_boxes(filtered, b"mvex", content, end)
        elif kind != b"mvhd":
            filtered[start + 4 : start + 8] = b"free"
    if entries > MAX_INDEX_ENTRIES:
        raise CorruptAudio(f"the MP4 index describes {entries} packets, more than {MAX_INDEX_ENTRIES}; {REMEDY}")
    if not tracks:
        raise NoAudioTrack("the file has no audio track; send one that has sound in it")
    return bytes(filtered)


def checked_fragment(box: bytes, header: int) -> bytes:
    """A `moof` box with only the description of packets. Raises CorruptAudio."""
    filtered = bytearray(box)
    _free_other_boxes(filtered, b"moof", header, len(box))
    if _fragment_samples(box) > MAX_FRAGMENT_SAMPLES:
        raise CorruptAudio(f"an MP4 fragment describes more than {MAX_FRAGMENT_SAMPLES} packets; send shorter ones")
    return bytes(filtered)


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


def _free_other_boxes(filtered: bytearray, parent: bytes, start: int, end: int) -> None:
    """Turn every box that is not in KEPT_BOXES into a `free` box."""
    for kind, at, content, stop in boxes_of(filtered, start, end):
        if kind not in KEPT_BOXES[parent]:
            filtered[at + 4 : at + 8] = b"free"
        elif kind in KEPT_BOXES:
            _free_other_boxes(filtered, kind, content, stop)


def _audio_track(box: bytes, start: int, end: int) -> dict[bytes, bytes] | None:
    """The content of each box of an audio track, by its kind; None for another track. Raises CorruptAudio."""
    found: dict[bytes, bytes] = {}
    places = [(b"trak", start, end)]
    while places:
        parent, at, stop = places.pop()
        for kind, _, content, last in boxes_of(box, at, stop):
            if kind not in KEPT_BOXES[parent]:
                continue
            if kind in found:
                raise CorruptAudio(f"the MP4 index is damaged: a track has two boxes '{kind.decode()}'")
            found[kind] = box[content:last]
            if kind in KEPT_BOXES:
                places.append((kind, content, last))
    if found.get(b"hdlr", b"")[8:12] != b"soun":
        return None
    # The description of a codec contains boxes too, and libav would accept any kind of box there.
    if any(kind in found.get(b"stsd", b"") for kind in (b"trak", b"trun", *KEPT_BOXES[b"stbl"], b"elst", b"cmov")):
        raise CorruptAudio("the MP4 index is damaged: the description of the codec contains an index")
    return found


def _index_entries(track: dict[bytes, bytes]) -> int:
    """The number of entries that libav would allocate for a track."""
    chunks = _read_number(track.get(b"stco", track.get(b"co64", b"")), 4)
    runs = _rows(track.get(b"stsc", b""), 3)
    ends = np.append(runs[1:, 0], chunks + 1)
    lengths = np.maximum(0, ends[: len(runs)] - runs[:, 0])
    times = _rows(track.get(b"stts", b""), 2)
    if len(times) == 1 and times[0][1] == 1:
        entries = _sum_of_products(lengths, -(-runs[:, 1] // PCM_SAMPLES_PER_ENTRY))
    else:
        offsets = int(_rows(track.get(b"ctts", b""), 2)[:, 0].sum())
        sizes = max(_read_number(track.get(b"stsz", b""), 8), _read_number(track.get(b"stz2", b""), 8))
        entries = max(_sum_of_products(lengths, runs[:, 1]), sizes, offsets, int(times[:, 0].sum()))
    # libav processes the index once for each edit.
    return entries * max(1, _read_number(track.get(b"elst", b""), 4))


def _rows(table: bytes, numbers: int) -> NDArray[np.int64]:
    """The rows of a table, with `numbers` integers each, after its version, flags and number of rows."""
    count = max(0, min(_read_number(table, 4), (len(table) - 8) // (4 * numbers)))
    return np.frombuffer(table, ">u4", count * numbers, 8 if count else 0).reshape(-1, numbers).astype(np.int64)


def _sum_of_products(counts: NDArray[np.int64], each: NDArray[np.int64]) -> int:
    """The sum of the products, in floating point so that it cannot overflow."""
    return int((counts.astype(np.float64) * each).sum())


def _read_number(table: bytes, at: int) -> int:
    return int.from_bytes(table[at : at + 4], "big")


def _fragment_samples(fragment: bytes) -> int:
    """Number of packets in the fragment. The bytes `trun` in other data only make the result larger."""
    _, *runs = fragment.split(b"trun")
    return sum(_read_number(run, 4) for run in runs)


def _points_into_file(fragment: bytes) -> bool:
    """True if the fragment contains the offset of its media in the file; most have the distance from the fragment."""
    _, found, track_header = fragment.partition(b"tfhd")
    # One byte of version, three bytes of flags; the last bit means that an offset in the file follows.
    return not found or bool(int.from_bytes(track_header[1:4], "big") & 1)


# Files with their index after the media (uploads)

# Most bytes of the description of an audio track: six hours of AAC.
MAX_TRACK_BYTES = 8 << 20
# Most boxes visited until the audio track is found; ordinary files have a few dozen.
MAX_BOXES = 1024
# Most bytes up to the end of the index, once it is in front.
MAX_INDEX_BYTES = MAX_TRACK_BYTES + (1 << 20)

# Kind, start, start of the content, and end, as offsets in the file.
Box = tuple[bytes, int, int, int]


def index_first(file: BinaryIO) -> Iterator[bytes]:
    """The parts of an MP4 file, with its index before its media. Raises CorruptAudio and NoAudioTrack.

    A fragmented file already has its index in front, and is passed on unchanged.
    """
    finder = _BoxFinder(file)
    _, start, content, end = finder.find((b"moov",), 0, finder.size) or _no_index()
    if finder.find((b"mvex",), content, end) is not None:
        yield from _range(file, 0, finder.size)
        return
    index, last_chunk = _front_index(finder, content, end)
    head = finder.first_box_end()
    yield from _range(file, 0, head)
    yield index
    yield from _range(file, head, start)
    # An index at the end is left out. One between media becomes a `free` box, so that offsets stay right.
    if last_chunk >= start:
        yield finder.read(start, 4) + b"free"
        yield from _range(file, start + 8, finder.size)


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


class _BoxFinder:
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


def _front_index(finder: _BoxFinder, start: int, end: int) -> tuple[bytes, int]:
    """A `moov` box with only the first audio track, and the original offset of the last chunk of audio.

    The offsets in the box are shifted, because it is put before the media.
    """
    header = finder.find((b"mvhd",), start, end)
    track = next((box for box in finder.boxes(start, end) if box[0] == b"trak" and _is_audio(finder, box)), None)
    if track is None:
        raise NoAudioTrack("the file has no audio track; send one that has sound in it")
    sizes = [box[3] - box[1] for box in (header, track) if box is not None]
    if track[3] > end or sum(sizes) > MAX_TRACK_BYTES:
        raise CorruptAudio(
            f"the MP4 index takes more than {MAX_TRACK_BYTES} bytes to describe the sound, or is cut short; "
            "split the recording, or send it as WebM, Ogg, FLAC or WAV"
        )
    content = bytearray(b"".join(finder.read(box[1], box[3] - box[1]) for box in (header, track) if box is not None))
    track_content = len(content) - (track[3] - track[2])
    last = _shift_offsets(content, track_content, 8 + len(content))
    return struct.pack(">I4s", 8 + len(content), b"moov") + content, last


def _is_audio(finder: _BoxFinder, track: Box) -> bool:
    handler = finder.find((b"mdia", b"hdlr"), track[2], track[3])
    return handler is not None and finder.read(handler[2] + 8, 4) == b"soun"


def _shift_offsets(content: bytearray, track: int, by: int) -> int:
    """Add `by` to all chunk offsets of the track whose boxes begin at `track`; returns the largest old offset."""
    last = 0
    places = [(b"trak", track, len(content))]
    while places:
        parent, start, end = places.pop()
        for kind, _, at, stop in boxes_of(content, start, end):
            if kind in KEPT_BOXES[parent] and kind in KEPT_BOXES:
                places.append((kind, at, stop))
            elif kind in (b"stco", b"co64"):
                last = max(last, _shift_table(content, at, stop, ">u4" if kind == b"stco" else ">u8", by))
    return last


def _shift_table(content: bytearray, start: int, end: int, kind: str, by: int) -> int:
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
