"""MP4 files with their index at the end, as phones and ffmpeg write them: read from disk, within all bounds."""

from __future__ import annotations

import io
import struct
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from audio.container_filters import READ_BYTES
from audio.containers import read_file, read_upload
from audio.errors import AudioError, CorruptAudio, NoAudioTrack
from audio.mp4_filter import MAX_BOXES, MAX_TRACK_BYTES, index_first
from tests.audio.test_containers import KINDS, SECONDS, assert_is_the_tone, joined, tone, write
from tests.audio.test_mp4_filter import box, full, index, track

TYPE = box(b"ftyp", b"M4A \0\0\0\0")


def uploaded(data: bytes) -> NDArray[np.float32]:
    return joined(list(read_upload(io.BytesIO(data))))


def refused(data: bytes) -> AudioError:
    with pytest.raises(AudioError) as error:
        uploaded(data)
    return error.value


def place(data: bytes, kind: bytes) -> int:
    """Where a box begins, at the top of a file."""
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        size = int.from_bytes(data[at + 8 : at + 16], "big") if size == 1 else size
        if data[at + 4 : at + 8] == kind:
            return at
        at += size
    raise AssertionError(f"no {kind!r}")


def video(sound: bool, seconds: float = SECONDS, picture: int = 16) -> bytes:
    """As a phone makes it: a track of pictures in front, the index at the end."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as output:
        pictures = output.add_stream("mpeg4", rate=10)
        pictures.width = pictures.height = picture
        pictures.pix_fmt = "yuv420p"
        heard = output.add_stream("aac", rate=48_000, layout="mono") if sound else None
        noise = np.random.default_rng(0)
        for number in range(round(10 * seconds)):
            shown = noise.integers(0, 255, (picture, picture, 3), np.uint8)
            frame = av.VideoFrame.from_ndarray(shown, format="rgb24").reformat(format="yuv420p")
            output.mux(pictures.encode(frame))
            if heard is not None:
                piece = np.ascontiguousarray(tone(48_000, seconds)[None, 4800 * number : 4800 * (number + 1)])
                spoken = av.AudioFrame.from_ndarray(piece, format="fltp", layout="mono")
                spoken.sample_rate, spoken.pts = 48_000, 4800 * number
                output.mux(heard.encode(spoken))
        for stream in filter(None, (pictures, heard)):
            output.mux(stream.encode(None))
    return buffer.getvalue()


def faststart(data: bytes) -> bytes:
    """As ffmpeg does it, which needs a file that it can read again."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.mp4"
        with av.open(io.BytesIO(data)) as source, av.open(str(path), "w", options={"movflags": "faststart"}) as output:
            copied = output.add_stream_from_template(source.streams.audio[0])
            for packet in source.demux(source.streams.audio[0]):
                if packet.size:
                    packet.stream = copied
                    output.mux(packet)
        return path.read_bytes()


FILES: dict[str, Callable[[], bytes]] = {
    "m4a": lambda: write("ipod", "aac", 44_100, {}),
    "m4a, lossless": lambda: write("ipod", "alac", 44_100, {}),
    "mp4 with opus": lambda: write("mp4", "libopus", 48_000, {}),
    "mov": lambda: write("mov", "pcm_s16le", 16_000, {}),
    "3gp": lambda: write("3gp", "aac", 16_000, {}),
    "video": lambda: video(sound=True),
    "large pictures": lambda: video(sound=True, picture=160),
    "index in front": lambda: faststart(write("mp4", "aac", 48_000, {})),
    "fragments": lambda: write(*KINDS["fragmented mp4"]),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_file_is_read_as_the_local_command_reads_it(kind: str, tmp_path: Path) -> None:
    data = FILES[kind]()
    path = tmp_path / "file"
    path.write_bytes(data)
    samples = uploaded(data)
    assert_is_the_tone(samples, SECONDS)
    if kind != "fragments":
        assert (place(data, b"mdat") < place(data, b"moov")) == (kind != "index in front")
        assert np.array_equal(samples, joined(list(read_file(path)))), "sample by sample"


def test_a_file_without_sound_says_so() -> None:
    error = refused(video(sound=False))
    assert isinstance(error, NoAudioTrack) and "no audio track" in str(error)
    assert isinstance(refused(TYPE + box(b"mdat", b"x") + index()), NoAudioTrack)


def test_an_index_between_two_pieces_of_media_is_found_too() -> None:
    data = FILES["m4a"]()
    media, described = place(data, b"mdat"), place(data, b"moov")
    cut = data[:media] + box(b"mdat", b"nothing of interest") + data[described:] + data[media:described]
    by = len(cut) - len(data[media:described]) - media
    for kind in (b"stco",):
        at = cut.index(kind) + 4
        (count,) = struct.unpack_from(">I", cut, at + 4)
        places = [value + by for value in struct.unpack_from(f">{count}I", cut, at + 8)]
        cut = cut[: at + 8] + struct.pack(f">{count}I", *places) + cut[at + 8 + 4 * count :]
    assert np.array_equal(uploaded(cut), uploaded(data))


def test_a_file_that_was_never_finished_says_so() -> None:
    data = FILES["m4a"]()
    described = place(data, b"moov")
    assert "no index" in str(refused(data[:described]))
    assert "cut short" in str(refused(data[: described + 100]))
    assert isinstance(refused(data[:30]), CorruptAudio)
    # Half of the media is missing, and the index is whole.
    media = place(data, b"mdat")
    middle = (media + described) // 2
    kept = bytearray(data[:middle] + data[described:])
    struct.pack_into(">I", kept, media, middle - media)
    assert isinstance(refused(bytes(kept)), CorruptAudio)


def test_an_index_as_long_as_that_of_hours_is_read() -> None:
    """That of a stream must end within a megabyte; an hour and a half of AAC takes more."""
    data = FILES["m4a"]()
    described = place(data, b"moov")
    head, moov = data[:described], data[described:]
    at, size = moov.index(b"trak") - 4, int.from_bytes(moov[moov.index(b"trak") - 4 :][:4], "big")
    padding = box(b"free", bytes(3 << 20))
    grown = struct.pack(">I", size + len(padding)) + moov[at + 4 : at + size] + padding
    long = head + box(b"moov", moov[8:at] + grown + moov[at + size :])
    parts = list(index_first(io.BytesIO(long)))
    assert parts[1][4:8] == b"moov" and len(parts[1]) > 3 << 20 and max(map(len, parts[2:])) <= READ_BYTES
    assert np.array_equal(uploaded(long), uploaded(data))


# What is too much


BOMBS = {
    "packets in a chunk": track(samples=50_000_000, per_chunk=50_000_000),
    "packets of one size": track(samples=0xFFFFFFFF, sample_bytes=1),
    "samples of PCM": track(
        codec=b"sowt", samples=1 << 31, sample_bytes=2, per_chunk=0x70000000, chunks=40, duration=1
    ),
    "edits": track(samples=100_000, per_chunk=100_000, edits=1000),
    "two tables": box(b"trak", track()[8:] + track()[8:]),
    "an index in the codec": track(codec_boxes=box(b"stsc", b"")),
    "a box larger than its place": b"\0\0\xff\xfftrak" + track()[8:],
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
@pytest.mark.parametrize("front", [True, False])
def test_what_an_index_may_not_say_in_a_stream_it_may_not_say_in_a_file(bomb: bytes, front: bool) -> None:
    media = box(b"mdat", bytes(1000))
    begun = time.monotonic()
    error = refused(TYPE + (index(bomb) + media if front else media + index(bomb)))
    assert isinstance(error, CorruptAudio) and time.monotonic() - begun < 2


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (TYPE + box(b"free", b"") * MAX_BOXES + index(track()), f"more than {MAX_BOXES} boxes"),
        (TYPE + index(*[track(handler=b"vide")] * MAX_BOXES), f"more than {MAX_BOXES} boxes"),
        (TYPE + index(box(b"trak", track()[8:] + box(b"free", bytes(MAX_TRACK_BYTES)))), "to describe the sound"),
        (TYPE + b"\0\0\0\x03mdat" + index(track()), "shorter than its own head"),
        (TYPE + b"\0\0\0\x01mdat" + bytes(7) + b"\x08" + index(track()), "shorter than its own head"),
        (TYPE + b"\0\0\0\x01mdat" + b"\xff" * 8 + index(track()), "no index"),
        (TYPE + b"\0\0\0\x00mdat" + index(track()), "no index"),
    ],
)
def test_boxes_without_end_or_sense_are_refused(data: bytes, text: str) -> None:
    begun = time.monotonic()
    assert text in str(refused(data)) and time.monotonic() - begun < 2


def test_places_behind_the_end_of_any_file_are_refused() -> None:
    far = track().replace(struct.pack(">I", 2000), b"\xff\xff\xff\xff")
    assert "beyond the end" in str(refused(TYPE + box(b"mdat", bytes(3000)) + index(far)))


def test_pictures_cost_no_memory() -> None:
    """The description of pictures is not read, however long it is."""
    pictures = track(handler=b"vide", samples=2_000_000, chunks=1_500_000)
    data = FILES["m4a"]()
    described = place(data, b"moov")
    size = int.from_bytes(data[described : described + 4], "big")
    grown = struct.pack(">I4s", size + len(pictures), b"moov") + pictures + data[described + 8 : described + size]
    file = io.BytesIO(data[:described] + grown)
    tracemalloc.start()
    try:
        samples = joined(list(read_upload(file)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert_is_the_tone(samples, SECONDS)
    assert len(pictures) > 5_000_000 and peak < 4_000_000


SMALL = write("ipod", "aac", 44_100, {}, tone(44_100, 0.3)[None])


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(st.integers(0, len(SMALL) - 1), st.integers(0, 255)), min_size=1, max_size=8), st.booleans())
def test_no_damage_does_more_than_an_error(changes: list[tuple[int, int]], in_index: bool) -> None:
    data = bytearray(SMALL)
    start = place(SMALL, b"moov") if in_index else 0
    for at, value in changes:
        data[start + at % (len(data) - start)] = value
    begun = time.monotonic()
    try:
        uploaded(bytes(data))
    except AudioError:
        pass
    assert time.monotonic() - begun < 10


def test_a_header_of_another_file_is_none() -> None:
    assert isinstance(refused(TYPE + full(b"moov", b"")), AudioError)
