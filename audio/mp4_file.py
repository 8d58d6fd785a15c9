"""MP4 files whose index stands behind the sound, as phones and ffmpeg write them: read as if it stood in front.

The file can be read anywhere, so its index is looked for, checked and put in front; what libav gets to see is a stream
from front to back all the same, with every bound that streams have. Nothing of an index is read but the description of
the first track of sound, so that of pictures may be as long as it likes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

from audio.errors import CorruptAudio, NoAudioTrack
from audio.mp4 import KEPT, boxes_of
from audio.pipes import READ_BYTES

# The description of a track of sound, of which libav gets to see no more packets than of a stream: six hours of AAC.
MAX_TRACK_BYTES = 8 << 20
# Boxes that are looked at until the sound is found; in files as people have them it is a few dozen.
MAX_BOXES = 1024
# A file's index in front, with what else comes before it.
MAX_INDEX_BYTES = MAX_TRACK_BYTES + (1 << 20)

Box = tuple[bytes, int, int, int]


def index_first(file: BinaryIO) -> Iterator[bytes]:
    """The parts of an MP4 file, its index before its media. Raises CorruptAudio and NoAudioTrack.

    A file in fragments has its index in front already, and is passed on as it is.
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
    # An index at the end is the end. One that stands between media keeps its place, as a box of nothing.
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
    """Finds boxes in a file without reading what is in them."""

    def __init__(self, file: BinaryIO) -> None:
        self.size = file.seek(0, 2)
        self._file = file
        self._seen = 0

    def boxes(self, start: int, end: int) -> Iterator[Box]:
        """Kind, start, start of the content, and end of each box between two places."""
        while start + 8 <= end:
            self._seen += 1
            if self._seen > MAX_BOXES:
                raise CorruptAudio(f"the MP4 file has more than {MAX_BOXES} boxes before its sound is described")
            head = self.read(start, min(16, end - start))
            size, kind, content = int.from_bytes(head[:4], "big"), head[4:8], start + 8
            if size == 1:
                size, content = int.from_bytes(head[8:16], "big"), start + 16
            stop = start + size if size else end
            if stop < content:
                raise CorruptAudio("the MP4 file is damaged: a box is shorter than its own head")
            yield kind, start, content, stop
            start = stop

    def find(self, path: tuple[bytes, ...], start: int, end: int) -> Box | None:
        """The first box of this kind, inside the first ones of the kinds before it."""
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
        """Where the first box ends, if it says what kind of file this is; else 0."""
        kind, _, _, end = next(self.boxes(0, self.size))
        return min(end, self.size) if kind == b"ftyp" else 0

    def read(self, start: int, size: int) -> bytes:
        self._file.seek(start)
        return self._file.read(size)


def _front_index(walk: _Walk, start: int, end: int) -> tuple[bytes, int]:
    """A `moov` box with the first track of sound and nothing else, whose places are those behind it; and where the last
    chunk of sound is in the file as it was."""
    header = walk.find((b"mvhd",), start, end)
    track = next((box for box in walk.boxes(start, end) if box[0] == b"trak" and _is_sound(walk, box)), None)
    if track is None:
        raise NoAudioTrack("the file has no audio track; send one that has sound in it")
    sizes = [box[3] - box[1] for box in (header, track) if box is not None]
    if track[3] > end or sum(sizes) > MAX_TRACK_BYTES:
        raise CorruptAudio(
            f"the MP4 index takes more than {MAX_TRACK_BYTES} bytes to describe the sound, or is cut short; "
            "cut the recording, or send it as WebM, Ogg, FLAC or WAV"
        )
    content = bytearray(b"".join(walk.read(box[1], box[3] - box[1]) for box in (header, track) if box is not None))
    track_content = len(content) - (track[3] - track[2])
    last = _move(content, track_content, 8 + len(content))
    return struct.pack(">I4s", 8 + len(content), b"moov") + content, last


def _is_sound(walk: _Walk, track: Box) -> bool:
    handler = walk.find((b"mdia", b"hdlr"), track[2], track[3])
    return handler is not None and walk.read(handler[2] + 8, 4) == b"soun"


def _move(content: bytearray, track: int, by: int) -> int:
    """Add to every place in the file that the track names whose boxes begin at `track`; returns the last of them."""
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
        raise CorruptAudio("the MP4 index is damaged: it names a place behind the end of any file")
    places += number.type(by)
    return last
