"""MP4 streams: boxes arrive whole, headers and indexes are bounded, and libav sees nothing but the sound."""

from __future__ import annotations

import struct
import time

import pytest

from audio.container_filters import BytePipe
from audio.containers import ContainerDecoder
from audio.errors import AudioError, CorruptAudio, NoAudioTrack
from audio.mp4_filter import (
    MAX_BOX_BYTES,
    MAX_FRAGMENT_SAMPLES,
    MAX_HEADER_BYTES,
    Mp4Boxes,
    checked_fragment,
    checked_index,
)
from tests.audio.test_container_filters_pipes import run


def parts_of(pieces: list[bytes], size: int = 1 << 16) -> list[bytes]:
    """What libav would read from these pieces of an MP4 stream."""
    parts: list[bytes] = []

    def reader(pipe: BytePipe) -> None:
        boxes = Mp4Boxes(pipe)
        while part := boxes.read(size):
            parts.append(part)
        if boxes.fault is not None:
            raise boxes.fault

    failure = run(pieces, reader).failure
    if failure is not None:
        raise failure
    return parts


def box(kind: bytes, content: bytes) -> bytes:
    return (8 + len(content)).to_bytes(4, "big") + kind + content


def one_by_one(data: bytes) -> list[bytes]:
    return [data[i : i + 1] for i in range(len(data))]


def full(kind: bytes, content: bytes) -> bytes:
    return box(kind, bytes(4) + content)


def track(
    *,
    codec: bytes = b"mp4a",
    samples: int = 1,
    sample_bytes: int = 1,
    per_chunk: int = 1,
    chunks: int = 1,
    duration: int = 1024,
    edits: int = 0,
    handler: bytes = b"soun",
    codec_boxes: bytes = b"",
) -> bytes:
    """A track of 16 kHz mono whose index says these numbers."""
    entry = box(codec, bytes(7) + b"\x01" + bytes(8) + struct.pack(">HHHHI", 1, 16, 0, 0, 16_000 << 16) + codec_boxes)
    table = box(
        b"stbl",
        full(b"stsd", struct.pack(">I", 1) + entry)
        + full(b"stts", struct.pack(">III", 1, samples, duration))
        + full(b"stsc", struct.pack(">IIII", 1, 1, per_chunk, 1))
        + full(b"stsz", struct.pack(">II", sample_bytes, samples))
        + full(b"stco", struct.pack(">I", chunks) + struct.pack(">I", 2000) * chunks),
    )
    header = full(b"mdhd", struct.pack(">IIII", 0, 0, 16_000, samples) + bytes(4))
    media = box(b"mdia", header + full(b"hdlr", bytes(4) + handler + bytes(13)) + box(b"minf", table))
    edit = box(b"edts", full(b"elst", struct.pack(">I", edits) + struct.pack(">IiI", 100, 0, 1 << 16) * edits))
    known = full(b"tkhd", struct.pack(">IIIII", 0, 0, 1, 0, 0) + bytes(60))
    return box(b"trak", known + (edit if edits else b"") + media)


def index(*tracks: bytes) -> bytes:
    return box(b"moov", full(b"mvhd", struct.pack(">IIII", 0, 0, 1000, 0) + bytes(80)) + b"".join(tracks))


HEADER = box(b"ftyp", b"M4A \0\0\0\0") + index(track())
FRAGMENT = box(b"moof", full(b"mfhd", b"frag"))


def test_boxes_arrive_whole_and_media_as_they_come() -> None:
    media = b"media bytes"
    stream = HEADER + FRAGMENT + box(b"mdat", media)
    assert parts_of(one_by_one(stream)) == [
        box(b"ftyp", b"M4A \0\0\0\0"),
        index(track()),
        FRAGMENT,
        box(b"mdat", media)[:8],
        *one_by_one(media),
    ]
    assert b"".join(parts_of([stream], size=5)) == stream


def test_long_sizes_and_media_up_to_the_end() -> None:
    long = (1).to_bytes(4, "big") + b"free" + (16 + 3).to_bytes(8, "big") + b"abc"
    endless = bytes(4) + b"mdat" + b"media"
    assert parts_of(one_by_one(HEADER + long + endless))[2:] == [long, endless[:8], *one_by_one(b"media")]


def test_a_box_too_large_to_wait_for_is_passed_on() -> None:
    large = box(b"free", bytes(MAX_BOX_BYTES + 1))
    parts = parts_of([HEADER + large[:1000], large[1000:]], size=1 << 30)
    assert parts[2:4] == [large[:8], large[8:1000]]
    assert b"".join(parts) == HEADER + large


def test_a_size_smaller_than_the_header_does_not_hang() -> None:
    broken = (3).to_bytes(4, "big") + b"free"
    assert parts_of([HEADER + broken])[2:] == [broken]


def test_media_before_the_index_cannot_be_streamed() -> None:
    with pytest.raises(CorruptAudio, match="faststart"):
        parts_of([box(b"ftyp", b"M4A \0\0\0\0"), box(b"mdat", b"media"), index(track())])


@pytest.mark.parametrize("cut", [3, 12, 14, -43, -19, -14, -5])
def test_a_stream_may_end_anywhere_but_in_an_index(cut: int) -> None:
    stream = HEADER + FRAGMENT + box(b"mdat", b"media bytes")
    assert b"".join(parts_of([stream[:cut]])) == stream[:cut]
    # A fragment of which only a part came is as if nothing of it had come.
    assert b"".join(parts_of([stream[:-30]])) == HEADER
    with pytest.raises(CorruptAudio):
        parts_of([HEADER[: len(HEADER) // 2]])


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        # Flags: default-base-is-moof, an offset into the file, and no track header at all.
        (box(b"tfhd", b"\0\x02\0\0"), [1, 2, 2]),
        (box(b"tfhd", b"\0\0\0\x01"), [5]),
        (b"", [5]),
    ],
)
def test_a_long_stream_ends_and_starts_over_with_its_header(
    content: bytes, parts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("audio.mp4_filter.MAX_FRAGMENTS", 2)
    fragment = box(b"moof", box(b"traf", content)) + box(b"mdat", b"media")
    streams: list[bytes] = []

    def reader(pipe: BytePipe) -> None:
        boxes = Mp4Boxes(pipe)
        more = True
        while more:
            streams.append(b"")
            while part := boxes.read(1 << 16):
                streams[-1] += part
            more = boxes.reopen()

    run([HEADER, *[fragment] * 5], reader)
    assert sorted(stream.removeprefix(HEADER).count(fragment) for stream in streams) == parts
    assert all(stream == HEADER + fragment * stream.count(fragment) for stream in streams)


# What is too much


def test_what_comes_before_the_index_is_bounded_and_takes_no_time() -> None:
    decoder = ContainerDecoder()
    begun = time.monotonic()
    with pytest.raises(CorruptAudio, match="before the end of the MP4 index"):
        for piece in [box(b"ftyp", b"M4A \0\0\0\0"), *[box(b"free", bytes(56)) * 1024] * 1024]:
            list(decoder.decode(piece))
    # A second: 64 MiB took sixteen, in a thread that nothing ends.
    assert time.monotonic() - begun < 5
    with pytest.raises(CorruptAudio, match="before the end of the MP4 index"):
        parts_of([box(b"ftyp", b"M4A \0\0\0\0"), (MAX_HEADER_BYTES + 1).to_bytes(4, "big") + b"free"])
    with pytest.raises(CorruptAudio, match="larger than"):
        parts_of([HEADER, (MAX_BOX_BYTES + 9).to_bytes(4, "big") + b"moof"])


@pytest.mark.parametrize(
    "bomb",
    [
        track(samples=50_000_000, per_chunk=50_000_000),
        track(samples=0xFFFFFFFF, sample_bytes=1),
        track(codec=b"sowt", samples=1 << 31, sample_bytes=2, per_chunk=0x70000000, chunks=40, duration=1),
        track(samples=100_000, per_chunk=100_000, edits=1000),
    ],
    ids=["packets in a chunk", "packets of one size", "samples of PCM", "edits"],
)
def test_a_small_index_of_endless_sound_is_refused_at_once(bomb: bytes) -> None:
    """libav would take gigabytes and many seconds for these few hundred bytes."""
    decoder = ContainerDecoder()
    begun = time.monotonic()
    with pytest.raises(CorruptAudio, match="the MP4 index describes"):
        list(decoder.decode(box(b"ftyp", b"M4A \0\0\0\0") + index(bomb) + box(b"mdat", bytes(1000))))
    assert time.monotonic() - begun < 2


def test_an_hour_of_pcm_in_one_chunk_is_no_bomb() -> None:
    hour = 3600 * 48_000
    made = index(track(codec=b"sowt", samples=hour, sample_bytes=2, per_chunk=hour, duration=1))
    assert checked_index(made, 8) == made


def test_a_fragment_of_endless_sound_is_refused() -> None:
    run_of = box(b"trun", bytes(4) + (MAX_FRAGMENT_SAMPLES + 1).to_bytes(4, "big"))
    with pytest.raises(CorruptAudio, match="fragment"):
        checked_fragment(box(b"moof", box(b"traf", run_of)), 8)


def test_only_boxes_that_describe_sound_are_shown_and_all_keep_their_places() -> None:
    hidden = box(b"udta", box(b"trak", b"x" * 8))
    video = track(handler=b"vide")
    shown = checked_index(index(hidden, video, track()), 8)
    assert len(shown) == len(index(hidden, video, track()))
    assert shown.count(b"trak") == 2 and b"udta" not in shown
    assert shown == index(hidden.replace(b"udta", b"free"), video.replace(b"trak", b"free"), track())
    assert parts_of([HEADER, box(b"trak", b"at the top"), box(b"sidx", b"")])[2:] == [
        box(b"free", b"at the top"),
        box(b"free", b""),
    ]


@pytest.mark.parametrize(
    ("made", "error"),
    [
        (index(), NoAudioTrack),
        (index(track(handler=b"vide")), NoAudioTrack),
        (index(track(codec_boxes=box(b"stsc", b""))), CorruptAudio),
        (index(box(b"trak", track()[8:] + track()[8:])), CorruptAudio),
        (index(b"\0\0\xff\xfftrak" + bytes(20)), CorruptAudio),
    ],
)
def test_an_index_that_makes_no_sense_is_refused(made: bytes, error: type[AudioError]) -> None:
    with pytest.raises(error):
        checked_index(made, 8)
