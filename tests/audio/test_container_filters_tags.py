"""Tags never reach libav: the sound is the same without them, and thousands of them cost nothing."""

from __future__ import annotations

import itertools
import string
import struct
import time
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from audio.container_filters import MAX_ELEMENT_BYTES, MAX_OGG_STREAMS, MAX_OGG_TAGS, BytePipe, ByteReader, without_tags
from audio.containers import ContainerDecoder
from audio.errors import CorruptAudio
from tests.audio.test_container_filters_pipes import run
from tests.audio.test_containers import KINDS, decode, decode_until_error, write

TAGS = 20_000


def names(count: int) -> list[bytes]:
    letters = itertools.product(string.ascii_uppercase + string.digits, repeat=4)
    return ["".join(next(letters)).encode() for _ in range(count)]


def through(container: str, data: bytes, piece: int = 1000) -> bytes:
    """What libav would see."""
    parts: list[bytes] = []

    def reader(pipe: BytePipe) -> None:
        for part in without_tags(container, pipe):
            assert part
            parts.append(part)

    failure = run([data[start : start + piece] for start in range(0, len(data), piece)], reader).failure
    if failure is not None:
        raise failure
    return b"".join(parts)


def comments(count: int) -> bytes:
    """A block of Vorbis comments, as FLAC and Ogg have them."""
    tags = [name + b"=a" for name in names(count)]
    lines = b"".join(struct.pack("<I", len(tag)) + tag for tag in tags)
    return struct.pack("<I", 4) + b"test" + struct.pack("<I", count) + lines


def wav_with(count: int) -> bytes:
    data = write(*KINDS["wav"])
    info = b"INFO" + b"".join(name + struct.pack("<I", 1) + b"a\0" for name in names(count))
    return data[:12] + b"LIST" + struct.pack("<I", len(info)) + info + data[12:]


def flac_with(count: int) -> bytes:
    data = write(*KINDS["flac"])
    block = comments(count)
    return data[:42] + b"\x04" + len(block).to_bytes(3, "big") + block + data[42:]


def mp3_with(count: int) -> bytes:
    frames = b"".join(b"T" + name[1:] + struct.pack(">I", 2) + b"\0\0" + b"\0a" for name in names(count))
    length = bytes(len(frames) >> shift & 0x7F for shift in (21, 14, 7, 0))
    return b"ID3\x03\0\0" + length + frames + write(*KINDS["mp3"])


def element(name: bytes, content: bytes) -> bytes:
    return name + (len(content) | 1 << 56).to_bytes(8, "big") + content


def webm_with(count: int) -> bytes:
    """Tags stand in front of the first cluster."""
    data = write(*KINDS["webm"])
    tags = b"".join(
        element(b"\x73\x73", element(b"\x67\xc8", element(b"\x45\xa3", name) + element(b"\x44\x87", b"a")))
        for name in names(count)
    )
    at = data.index(b"\x1f\x43\xb6\x75")
    return data[:at] + element(b"\x12\x54\xc3\x67", tags) + data[at:]


@pytest.mark.parametrize(
    ("kind", "make"), [("wav", wav_with), ("flac", flac_with), ("mp3", mp3_with), ("webm", webm_with)]
)
def test_thousands_of_tags_cost_nothing_and_change_nothing(kind: str, make: Callable[[int], bytes]) -> None:
    plain, data = write(*KINDS[kind]), make(TAGS)
    begun = time.monotonic()
    samples = decode(data, [*range(0, len(data), 65_536), len(data)])
    # libav alone takes half a minute.
    assert time.monotonic() - begun < 5
    np.testing.assert_array_equal(samples, decode(plain, [0, len(plain)]))


def ogg_page(flags: int, serial: int, packet: bytes, number: int = 0) -> bytes:
    segments = bytes([255] * (len(packet) // 255) + [len(packet) % 255])
    return b"OggS\0" + struct.pack("<BqIII", flags, 0, serial, number, 0) + bytes([len(segments)]) + segments + packet


@pytest.mark.parametrize(
    ("head", "prefix"),
    [(b"OpusHead", b"OpusTags"), (b"\x01vorbis", b"\x03vorbis"), (b"\x7fFLAC", b"\x04\0\0\0"), (b"Speex   ", b"")],
)
def test_ogg_with_many_tags_is_refused(head: bytes, prefix: bytes) -> None:
    few = ogg_page(2, 1, head) + ogg_page(0, 1, prefix + comments(10))
    assert through("ogg", few) == few
    many = ogg_page(2, 1, head) + ogg_page(0, 1, prefix + comments(MAX_OGG_TAGS + 1))
    with pytest.raises(CorruptAudio, match="tags"):
        through("ogg", many)
    with pytest.raises(CorruptAudio, match="tags"):
        through("ogg", ogg_page(2, 1, head) + ogg_page(0, 1, prefix + struct.pack("<I", 10_000) + bytes(100)))


def test_ended_ogg_streams_leave_nothing_behind() -> None:
    """A radio station starts a stream for each song, for years."""

    class Radio(ByteReader):
        serial, rest = 0, b""

        def read(self, size: int) -> bytes:
            if not self.rest and self.serial < 20_000:
                self.serial += 1
                self.rest = ogg_page(2, self.serial, b"OpusHead") + ogg_page(4, self.serial, b"sound")
            part, self.rest = self.rest[:size], self.rest[size:]
            return part

    pieces = iter(without_tags("ogg", Radio()))
    for _ in range(1_000):
        next(pieces)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        assert sum(1 for _ in itertools.islice(pieces, 30_000)) == 30_000
        assert tracemalloc.get_traced_memory()[0] - before < 64 * 1024
    finally:
        tracemalloc.stop()


def test_ogg_streams_of_something_else_are_left_out() -> None:
    sound = ogg_page(2, 1, b"OpusHead") + ogg_page(0, 1, b"OpusTags" + comments(1)) + ogg_page(4, 1, b"sound")
    data = ogg_page(2, 7, b"\x80theora") + ogg_page(0, 7, b"picture") + sound
    assert through("ogg", data) == sound
    chained = sound * (3 * MAX_OGG_STREAMS)
    assert through("ogg", chained) == chained
    # A station that begins a stream for each song, and does not mark the end of the last one.
    songs = b"".join(
        ogg_page(2, serial, b"OpusHead")
        + ogg_page(0, serial, b"OpusTags" + comments(1))
        + ogg_page(0, serial, b"sound")
        for serial in range(3 * MAX_OGG_STREAMS)
    )
    assert through("ogg", songs) == songs
    with pytest.raises(CorruptAudio, match="Ogg"):
        through("ogg", b"".join(ogg_page(2, serial, b"OpusHead") for serial in range(100)))
    with pytest.raises(CorruptAudio, match="Ogg"):
        through("ogg", sound + b"nonsense" * 10)


@pytest.mark.parametrize(
    "broken",
    [b"\0", b"\xa3\0", element(b"\xa3", b"")[:1] + b"\xff", b"\xa3" + (MAX_ELEMENT_BYTES + 1 | 1 << 56).to_bytes(8)],
    ids=["name", "length", "endless", "huge"],
)
def test_webm_that_makes_no_sense_is_refused(broken: bytes) -> None:
    data = write(*KINDS["webm"])
    samples, error = decode_until_error(data[:20_000] + broken + bytes(100))
    assert isinstance(error, CorruptAudio)


def test_a_second_recording_follows_the_first() -> None:
    data = write(*KINDS["webm"])
    decoder = ContainerDecoder()
    assert sum(len(block) for piece in (data, data) for block in decoder.decode(piece)) > 4 * 16_000


def test_what_comes_after_the_sound_of_a_wav_file_is_left_out() -> None:
    data = write(*KINDS["wav"])
    assert through("wav", data + b"LIST" + struct.pack("<I", 4) + b"INFO") == through("wav", data)
