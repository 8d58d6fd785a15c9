"""Containers: errors by type, good audio before an error is kept, and any split gives the same samples."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import struct
import threading
import time
import tracemalloc
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import av
import av.logging
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from audio.containers import (
    MAX_PACKET_SAMPLES,
    SERVED_CODECS,
    STEP_SAMPLES,
    ContainerDecoder,
    read_file,
    read_upload,
    sniff,
)
from audio.errors import (
    AudioError,
    BadSamples,
    CorruptAudio,
    EmptyAudio,
    NoAudioTrack,
    NotAudio,
    TooCompressed,
    UnsupportedFormat,
    UnsupportedRate,
)
from tests.waiting import stays

SECONDS = 3.0
FREQUENCY = 440

FRAGMENTED = {"movflags": "frag_keyframe+empty_moov+default_base_moof", "frag_duration": "200000"}
# Container, codec, rate, and options of the writer.
KINDS: dict[str, tuple[str, str, int, dict[str, str]]] = {
    # As MediaRecorder writes it: no duration, no index, clusters of unknown size.
    "webm": ("webm", "libopus", 48000, {"live": "1"}),
    "ogg": ("ogg", "libopus", 48000, {"page_duration": "200000"}),
    "mp3": ("mp3", "libmp3lame", 44100, {}),
    "flac": ("flac", "flac", 44100, {}),
    "wav": ("wav", "pcm_s16le", 24000, {}),
    "fragmented mp4": ("mp4", "aac", 48000, FRAGMENTED),
}
FILES = KINDS | {
    "mp4": ("mp4", "aac", 44100, {}),
    "webm file": ("webm", "libopus", 48000, {}),
    # Its decoder holds a frame back until the end.
    "wma": ("asf", "wmav2", 44100, {}),
}


def tone(rate: int, seconds: float = SECONDS) -> NDArray[np.float32]:
    return (0.4 * np.sin(2 * np.pi * FREQUENCY * np.arange(round(rate * seconds)) / rate)).astype(np.float32)


def write(
    container: str, codec: str, rate: int, options: dict[str, str], channels: NDArray[np.float32] | None = None
) -> bytes:
    """A file with these channels, shaped (channels, samples); a mono tone without."""
    sound = tone(rate)[None] if channels is None else channels
    layout = {1: "mono", 2: "stereo", 6: "5.1"}[len(sound)]
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container, options=options) as output:
        track = output.add_stream(codec, rate=rate, layout=layout)
        # Enough for every codec's encoder on every processor to give the tone back.
        track.bit_rate = 96_000
        convert = av.AudioResampler(format=track.codec_context.format, layout=layout, rate=rate)
        for start in range(0, sound.shape[1], 960):
            piece = np.ascontiguousarray(sound[:, start : start + 960])
            frame = av.AudioFrame.from_ndarray(piece, format="fltp", layout=layout)
            frame.sample_rate = rate
            frame.pts = start
            for converted in convert.resample(frame):
                output.mux(track.encode(converted))
        output.mux(track.encode(None))
    return buffer.getvalue()


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return {name: write(*recipe) for name, recipe in FILES.items()}


def silent_video() -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as output:
        track = output.add_stream("mpeg4", rate=10)
        track.width = track.height = 16
        track.pix_fmt = "yuv420p"
        for _ in range(3):
            output.mux(track.encode(av.VideoFrame(16, 16, "yuv420p")))
        output.mux(track.encode(None))
    return buffer.getvalue()


def joined(blocks: list[NDArray[np.float32]]) -> NDArray[np.float32]:
    assert all(block.dtype == np.float32 and block.ndim == 1 and len(block) for block in blocks)
    return np.concatenate([np.empty(0, np.float32), *blocks])


def decode(data: bytes, edges: list[int]) -> NDArray[np.float32]:
    decoder = ContainerDecoder()
    blocks = [block for a, b in pairwise(edges) for block in decoder.decode(data[a:b])]
    return joined([*blocks, *decoder.flush()])


def decode_until_error(data: bytes, piece: int = 1000) -> tuple[NDArray[np.float32], AudioError]:
    decoder = ContainerDecoder()
    blocks: list[NDArray[np.float32]] = []
    with pytest.raises(AudioError) as error:
        for start in range(0, len(data), piece):
            for block in decoder.decode(data[start : start + piece]):
                blocks.append(block)  # noqa: PERF402 (what came before the error must stay)
        for block in decoder.flush():
            blocks.append(block)  # noqa: PERF402
    return joined(blocks), error.value


def read_until_error(path: Path) -> tuple[NDArray[np.float32], AudioError]:
    blocks: list[NDArray[np.float32]] = []
    with pytest.raises(AudioError) as error:
        for block in read_file(path):
            blocks.append(block)  # noqa: PERF402 (what came before the error must stay)
    return joined(blocks), error.value


def assert_is_the_tone(samples: NDArray[np.float32], seconds: float, tolerance: float = 0.08) -> None:
    assert abs(len(samples) / 16000 - seconds) < tolerance
    middle = samples[4000:20000].astype(np.float64)
    t = np.arange(len(middle)) / 16000
    basis = np.stack([np.sin(2 * np.pi * FREQUENCY * t), np.cos(2 * np.pi * FREQUENCY * t)], axis=1)
    weights, *_ = np.linalg.lstsq(basis, middle, rcond=None)
    # Loose, because lossy encoders change the level a little and add noise.
    assert np.hypot(*weights) == pytest.approx(0.4, rel=0.06)
    assert np.std(middle - basis @ weights) < 0.04


# Bad input


def test_no_bytes_is_an_error_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(EmptyAudio, match="no bytes"):
        list(ContainerDecoder().flush())
    empty = tmp_path / "empty.wav"
    empty.touch()
    with pytest.raises(EmptyAudio, match="no bytes"):
        next(read_file(empty))


@pytest.mark.parametrize(
    "data",
    [
        b"hello, this is plain text and not audio at all" * 10,
        b"\x89PNG\r\n\x1a\n" + bytes(200),
        b"{}",
        b"\x00" * 5000,
        # A script that libav would play, and a list of other files that it would open.
        b"SBAGEN\n-SE\noff: -\n00:00 off\n" * 20,
        b"#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:5,\nother.wav\n#EXT-X-ENDLIST\n",
    ],
)
def test_what_is_not_audio_is_refused(data: bytes, tmp_path: Path) -> None:
    _, error = decode_until_error(data)
    assert isinstance(error, NotAudio)
    path = tmp_path / "file.mp3"
    path.write_bytes(data)
    samples, error = read_until_error(path)
    assert isinstance(error, NotAudio)
    assert len(samples) == 0


def test_a_list_of_files_does_not_open_them(
    files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret.wav").write_bytes(files["wav"])
    (tmp_path / "list.wav").write_text("ffconcat version 1.0\nfile secret.wav\n")
    monkeypatch.chdir(tmp_path)
    samples, error = read_until_error(tmp_path / "list.wav")
    assert isinstance(error, NotAudio)
    assert len(samples) == 0


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        next(read_file(tmp_path / "missing.wav"))


def test_a_container_without_sound_is_an_error_of_its_own(tmp_path: Path) -> None:
    video = silent_video()
    _, error = decode_until_error(video)
    assert isinstance(error, NoAudioTrack)
    path = tmp_path / "video.mkv"
    path.write_bytes(video)
    _, error = read_until_error(path)
    assert isinstance(error, NoAudioTrack)


def test_an_unknown_codec_is_refused(files: dict[str, bytes]) -> None:
    _, error = decode_until_error(files["webm"].replace(b"A_OPUS", b"A_NONE"))
    assert isinstance(error, NotAudio)
    assert "codec" in str(error)


@pytest.mark.parametrize("channels", [0, 65_535])
def test_a_wav_header_with_no_possible_number_of_channels_says_so(channels: int, tmp_path: Path) -> None:
    fields = struct.pack("<HHIIHH", 1, channels, 16_000, 32_000, min(2 * channels, 65_535), 16)
    sound = bytes(64_000)
    data = b"RIFF" + struct.pack("<I", 36 + len(sound)) + b"WAVEfmt " + struct.pack("<I", 16) + fields
    data += b"data" + struct.pack("<I", len(sound)) + sound
    (tmp_path / "x.wav").write_bytes(data)
    for _, error in (decode_until_error(data), read_until_error(tmp_path / "x.wav")):
        assert isinstance(error, NotAudio) and "channels" in str(error) and "send 1 to 64 channels" in str(error)


def test_an_audio_track_without_samples_is_empty(files: dict[str, bytes], tmp_path: Path) -> None:
    path = tmp_path / "nothing.wav"
    path.write_bytes(files["wav"][: files["wav"].index(b"data")] + b"data" + bytes(4))
    with pytest.raises(EmptyAudio, match="no samples"):
        next(read_file(path))


@pytest.mark.parametrize("kind", ["webm", "ogg", "flac", "fragmented mp4"])
def test_a_header_alone_is_an_error(kind: str, files: dict[str, bytes]) -> None:
    samples, error = decode_until_error(files[kind][:60])
    assert isinstance(error, CorruptAudio)
    assert len(samples) == 0


# MP3 and Ogg do not say how long they are, and a stream never does: there, an early end is an end.
@pytest.mark.parametrize("kind", ["flac", "wav", "fragmented mp4", "webm file"])
def test_a_file_cut_short_is_reported_after_what_is_there(kind: str, files: dict[str, bytes], tmp_path: Path) -> None:
    path = tmp_path / "cut"
    path.write_bytes(files[kind][: len(files[kind]) * 7 // 10])
    samples, error = read_until_error(path)
    assert isinstance(error, CorruptAudio)
    # Seven tenths of the bytes are about as much of the sound.
    assert_is_the_tone(samples, 0.7 * SECONDS, tolerance=0.3)


@pytest.mark.parametrize("kind", ["mp3", "fragmented mp4", "mp4", "webm file", "ogg", "flac"])
def test_a_file_damaged_in_the_middle_is_reported_after_what_is_good(
    kind: str, files: dict[str, bytes], tmp_path: Path
) -> None:
    data = files[kind]
    middle = len(data) * 6 // 10
    hole = len(data) // 5
    path = tmp_path / "damaged"
    path.write_bytes(data[:middle] + bytes(hole) + data[middle + hole :])
    samples, error = read_until_error(path)
    assert isinstance(error, CorruptAudio)
    assert " s" in str(error)
    assert_is_the_tone(samples[: 16000 * 3 // 2], 1.5)


@pytest.mark.parametrize("kind", ["mp3", "fragmented mp4"])
def test_a_damaged_stream_hands_over_what_is_good_and_stays_failed(kind: str, files: dict[str, bytes]) -> None:
    data = files[kind]
    middle = len(data) * 6 // 10
    data = data[:middle] + bytes(len(data) // 5) + data[middle:]
    for piece in (500, len(data)):
        samples, error = decode_until_error(data, piece)
        assert isinstance(error, CorruptAudio)
        assert_is_the_tone(samples[: 16000 * 3 // 2], 1.5)
    decoder = ContainerDecoder()
    with pytest.raises(CorruptAudio):
        list(decoder.decode(data))
    for again in (lambda: decoder.decode(b"more"), decoder.flush):
        with pytest.raises(CorruptAudio):
            list(again())


def test_an_index_at_the_end_cannot_be_streamed_but_read(files: dict[str, bytes], tmp_path: Path) -> None:
    _, error = decode_until_error(files["mp4"])
    assert isinstance(error, CorruptAudio)
    assert "faststart" in str(error)
    path = tmp_path / "file.m4a"
    path.write_bytes(files["mp4"])
    assert_is_the_tone(joined(list(read_file(path))), SECONDS)


def test_samples_that_are_not_numbers_are_refused(tmp_path: Path) -> None:
    sound = tone(16000)[None].copy()
    sound[0, 30000] = np.nan
    data = write("wav", "pcm_f32le", 16000, {}, sound)
    samples, error = decode_until_error(data)
    assert isinstance(error, BadSamples)
    assert_is_the_tone(samples, 30000 / 16000)


def test_a_rate_that_cannot_be_resampled_is_refused() -> None:
    _, error = decode_until_error(write("wav", "pcm_s16le", 4000, {}, tone(4000)[None]))
    assert isinstance(error, UnsupportedRate)


def test_a_fault_of_ours_is_not_blamed_on_the_audio(files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(frame: av.AudioFrame) -> NDArray[np.float32]:
        raise ZeroDivisionError

    monkeypatch.setattr("audio.containers.mix_down", broken)
    decoder = ContainerDecoder()
    with pytest.raises(ZeroDivisionError):
        list(decoder.decode(files["webm"]))


def test_a_stream_that_ended_takes_nothing_more(files: dict[str, bytes]) -> None:
    decoder = ContainerDecoder()
    assert len(joined([*decoder.decode(files["wav"]), *decoder.flush()]))
    decoder.close()
    with pytest.raises(ValueError, match="flushed or closed"):
        decoder.decode(b"more")


# Good input


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_stream_in_pieces_is_the_tone(kind: str, files: dict[str, bytes]) -> None:
    data = files[kind]
    assert_is_the_tone(decode(data, [*range(0, len(data), 700), len(data)]), SECONDS)


@pytest.mark.parametrize("kind", list(FILES))
def test_a_file_is_the_tone(kind: str, files: dict[str, bytes], tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(files[kind])
    blocks = list(read_file(path))
    assert max(map(len, blocks)) < 16000
    assert_is_the_tone(joined(blocks), SECONDS)


@pytest.mark.parametrize("kind", list(KINDS))
def test_one_byte_at_a_time_gives_the_same_samples(kind: str, files: dict[str, bytes]) -> None:
    data = files[kind][:12_000]
    samples = []
    for piece in (1, len(data)):
        decoder = ContainerDecoder()
        blocks = [b for start in range(0, len(data), piece) for b in decoder.decode(data[start : start + piece])]
        with contextlib.suppress(CorruptAudio):
            for block in decoder.flush():
                blocks.append(block)  # noqa: PERF402 (what came before the error must stay)
        samples.append(joined(blocks).tobytes())
    assert samples[0] == samples[1] != b""


@pytest.mark.parametrize("kind", list(KINDS))
@settings(max_examples=8, deadline=None)
@given(cuts=st.lists(st.floats(0, 1), max_size=8))
def test_any_split_gives_the_same_samples(kind: str, files: dict[str, bytes], cuts: list[float]) -> None:
    data = files[kind]
    edges = [0, *sorted(int(cut * len(data)) for cut in cuts), len(data)]
    assert decode(data, edges).tobytes() == decode(data, [0, len(data)]).tobytes()


# Samples held back at most: a page, a fragment or a frame, plus what the decoder and the resampler hold.
@pytest.mark.parametrize(
    ("kind", "seconds"),
    [("webm", 0.2), ("ogg", 0.4), ("mp3", 0.35), ("fragmented mp4", 0.5), ("flac", 1.6), ("wav", 2.8)],
)
def test_samples_come_while_the_stream_goes_on(kind: str, seconds: float, files: dict[str, bytes]) -> None:
    data = files[kind]
    decoder = ContainerDecoder()
    piece = len(data) // 100
    heard = 0
    for start in range(0, len(data), piece):
        assert start / len(data) * SECONDS - heard / 16000 < seconds
        heard += sum(map(len, decoder.decode(data[start : start + piece])))
    decoder.close()


@pytest.mark.parametrize(
    ("codec", "tolerance"),
    [("pcm_u8", 0.01), ("pcm_s16le", 1e-4), ("pcm_s32le", 1e-6), ("pcm_f32le", 1e-6), ("pcm_f64le", 1e-6)],
)
def test_channels_are_mixed_down_and_formats_scaled(codec: str, tolerance: float) -> None:
    left = tone(16000)
    right = np.linspace(-0.5, 0.5, len(left), dtype=np.float32)
    data = write("wav", codec, 16000, {}, np.stack([left, right]))
    samples = decode(data, [0, len(data)])
    assert np.abs(samples - (left + right) / 2).max() < tolerance


def test_planar_surround_is_mixed_down(tmp_path: Path) -> None:
    channels = np.zeros((6, 16000), np.float32)
    channels[2] = tone(16000, 1.0)
    path = tmp_path / "surround.wav"
    path.write_bytes(write("wav", "pcm_f32le", 16000, {}, channels))
    assert np.abs(joined(list(read_file(path))) - channels[2] / 6).max() < 1e-6


def test_a_rate_that_changes_is_followed(files: dict[str, bytes]) -> None:
    data = files["mp3"] + write("mp3", "libmp3lame", 48000, {"write_xing": "0", "id3v2_version": "0"})
    samples = decode(data, [0, len(data)])
    assert_is_the_tone(samples[: len(samples) // 2], SECONDS)
    assert_is_the_tone(samples[len(samples) // 2 :], SECONDS)


@pytest.mark.parametrize("length", [0, 0xFFFFFFFF, 0x7FFFF000])
def test_a_wav_stream_of_unknown_length_ends_well(length: int, files: dict[str, bytes]) -> None:
    data = bytearray(files["wav"])
    at = data.index(b"data") + 4
    data[4:8] = data[at : at + 4] = length.to_bytes(4, "little")
    assert_is_the_tone(decode(bytes(data), [0, len(data)]), SECONDS)


@pytest.mark.parametrize(
    ("head", "container"),
    [
        (b"\x1aE\xdf\xa3" + bytes(8), "matroska"),
        (b"OggS" + bytes(8), "ogg"),
        (b"fLaC" + bytes(8), "flac"),
        (b"RIFF\0\0\0\0WAVE", "wav"),
        (b"RIFF\0\0\0\0AVI ", None),
        (b"\0\0\0\x20ftypM4A ", "mp4"),
        (b"ID3\x04" + bytes(8), "mp3"),
        (b"\xff\xfb\x90\x00" + bytes(8), "mp3"),
        (b"\xff\xf1" + bytes(10), None),
        (b"\xff", None),
        (b"", None),
    ],
)
def test_containers_are_known_by_their_first_bytes(head: bytes, container: str | None) -> None:
    assert sniff(head) == container


# Resources


def decoder_threads() -> int:
    return sum(thread.name == "container-decoder" for thread in threading.enumerate())


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    gc.collect()
    before = decoder_threads()
    yield
    gc.collect()
    deadline = time.monotonic() + 5
    while decoder_threads() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert decoder_threads() <= before


@pytest.mark.usefixtures("no_thread_is_left")
@pytest.mark.parametrize("end", ["flush", "close", "nobody holds it"])
def test_the_thread_ends_with_the_stream(end: str, files: dict[str, bytes]) -> None:
    decoder = ContainerDecoder()
    assert list(decoder.decode(files["webm"][:5000]))
    if end == "flush":
        list(decoder.flush())
    elif end == "close":
        decoder.close()


# With `delay_moov`, the header says how much of the start to skip.
@pytest.mark.parametrize("header", ["empty_moov", "delay_moov"])
def test_a_long_mp4_stream_is_opened_anew_without_a_trace(header: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"movflags": f"frag_keyframe+{header}+default_base_moof", "frag_duration": "200000"}
    data = write("mp4", "aac", 48000, flags)
    fragments = data.count(b"moof")
    whole = decode(data, [0, len(data)])
    opened: list[object] = []
    av_open = av.open
    monkeypatch.setattr(av, "open", lambda *args, **kwargs: opened.append(args) or av_open(*args, **kwargs))
    monkeypatch.setattr("audio.mp4_filter.MAX_FRAGMENTS", 2)
    for piece in (10, len(data)):
        opened.clear()
        assert decode(data, [*range(0, len(data), piece), len(data)]).tobytes() == whole.tobytes()
        assert len(opened) == -(-fragments // 2)


def test_a_long_mp4_stream_that_points_into_its_file_is_read_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    data = write("mp4", "aac", 48000, {"movflags": "frag_keyframe+empty_moov", "frag_duration": "200000"})
    monkeypatch.setattr("audio.mp4_filter.MAX_FRAGMENTS", 2)
    assert_is_the_tone(decode(data, [0, len(data)]), SECONDS)


# Bounds


def crc(data: bytes, bits: int, polynomial: int) -> bytes:
    value = 0
    for byte in data:
        value ^= byte << (bits - 8)
        for _ in range(8):
            value = (value << 1 ^ (polynomial if value >> (bits - 1) else 0)) & ((1 << bits) - 1)
    return value.to_bytes(bits // 8, "big")


def flac_silence(frames: int, block: int) -> bytes:
    """Silence at 8 kHz in blocks of any size: with the largest, 8 seconds in 14 bytes."""
    info = struct.pack(">HH", block, block) + bytes(6) + (8000 << 44 | 15 << 36).to_bytes(8, "big") + bytes(16)
    made = [b"fLaC\x80\0\0\x22" + info]
    for number in range(frames):
        head = b"\xff\xf8\x74\x08" + chr(number).encode() + (block - 1).to_bytes(2, "big")
        frame = head + crc(head, 8, 0x07) + bytes(3)
        made.append(frame + crc(frame, 16, 0x8005))
    return b"".join(made)


def test_a_piece_is_decoded_in_steps_and_the_next_one_when_the_last_is_taken() -> None:
    data = write("flac", "flac", 16_000, {}, np.zeros((1, 16_000 * 60), np.float32))
    decoder = ContainerDecoder()
    blocks = decoder.decode(data)
    next(blocks)
    most = STEP_SAMPLES + MAX_PACKET_SAMPLES
    asyncio.run(stays(lambda: decoder._pending.samples <= most))
    assert sum(map(len, blocks)) > 55 * 16_000
    decoder.close()


def test_sound_that_no_codec_makes_so_small_is_refused() -> None:
    data = flac_silence(1500, 65_535)
    assert len(data) < 21_000
    samples, error = decode_until_error(data, len(data))
    assert isinstance(error, TooCompressed)
    assert 60 < len(samples) / 16_000 < 60 + 0.1 * len(data) + 20
    # The largest blocks that a player has to take, and nothing but silence.
    pause = flac_silence(1500, 4608)
    assert len(decode(pause, [0, len(pause)])) == pytest.approx(2 * 1500 * 4608)


def test_memory_stays_bounded_however_much_a_piece_holds() -> None:
    data = write("flac", "flac", 16_000, {}, np.zeros((1, 16_000 * 1200), np.float32))
    decoder = ContainerDecoder()
    tracemalloc.start()
    try:
        samples = sum(len(block) for block in decoder.decode(data))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(data) < 230_000 and samples > 1100 * 16_000
    # The samples alone take 77 MB.
    assert peak < 3_000_000 + len(data)


def pcm_wav(channels: int, rate: int) -> bytes:
    block = 2 * channels & 0xFFFF
    form = struct.pack("<IHHIIHH", 16, 1, channels, rate, rate * block & 0xFFFFFFFF, block, 16)
    return b"RIFF\xff\xff\xff\xffWAVEfmt " + form + b"data\xff\xff\xff\xff" + bytes(400_000)


@pytest.mark.parametrize(
    ("channels", "rate"), [(255, 48_000), (65_535, 16_000), (0, 16_000), (1, 4_000_000_000), (1, 0), (2, 1_000_000)]
)
def test_absurd_channels_and_rates_are_refused(channels: int, rate: int) -> None:
    _, error = decode_until_error(pcm_wav(channels, rate), 65_536)
    assert isinstance(error, NotAudio | CorruptAudio | UnsupportedRate)


UNSERVED = {
    "ac3": ("matroska", "ac3", 48_000),
    "eac3": ("matroska", "eac3", 48_000),
    "mp2": ("matroska", "mp2", 48_000),
    "wavpack": ("matroska", "wavpack", 16_000),
    "tta": ("matroska", "tta", 16_000),
    "adpcm_ms": ("wav", "adpcm_ms", 16_000),
    "adpcm_ima_wav": ("wav", "adpcm_ima_wav", 16_000),
    "g726": ("wav", "g726", 8_000),
    "g722": ("wav", "g722", 16_000),
    "ac3 in mp4": ("mp4", "ac3", 48_000),
    "mp2 alone": ("mp2", "mp2", 48_000),
}


@pytest.mark.parametrize("kind", UNSERVED)
def test_a_codec_that_is_not_served_is_refused_by_its_name(kind: str, tmp_path: Path) -> None:
    """Also the local command's list has an end."""
    data = write(*UNSERVED[kind], {})
    for error in (decode_until_error(data)[1], upload_until_error(data)):
        if "mp4" not in kind or "index" not in str(error):
            assert isinstance(error, UnsupportedFormat), error
            assert f"the codec '{kind.split()[0]}' is not served; send Opus" in str(error)
    path = tmp_path / "file"
    path.write_bytes(data)
    if kind in ("wavpack", "tta"):
        assert isinstance(read_until_error(path)[1], UnsupportedFormat)
    else:
        assert_is_the_tone(joined(list(read_file(path))), SECONDS, tolerance=0.15)


@pytest.mark.parametrize(
    ("container", "codec", "rate", "name"),
    [
        ("aiff", "pcm_s16be", 16_000, "AIFF"),
        ("avi", "pcm_s16le", 16_000, "AVI"),
        ("au", "pcm_s16be", 16_000, "AU"),
        ("caf", "pcm_s16be", 16_000, "CAF"),
        ("w64", "pcm_s16le", 16_000, "Wave64"),
        ("asf", "wmav2", 44_100, "WMA"),
        ("flv", "libmp3lame", 44_100, "FLV"),
        ("ac3", "ac3", 48_000, "AC-3"),
        ("adts", "aac", 48_000, "AAC without a container"),
        ("mpeg", "mp2", 48_000, "MPEG"),
    ],
)
def test_a_format_that_is_not_served_is_refused_by_its_name(container: str, codec: str, rate: int, name: str) -> None:
    data = write(container, codec, rate, {})
    for error in (decode_until_error(data)[1], upload_until_error(data)):
        assert isinstance(error, UnsupportedFormat)
        assert str(error) == f"the format {name} is not served; send WebM, Ogg, MP3, FLAC, WAV or MP4"
    assert error.client_message.startswith("The format") and error.client_message.endswith("MP4.")


@pytest.mark.parametrize("kind", ["mp2", "video"])
def test_no_decoder_that_is_not_served_is_opened_to_find_out_what_is_in_a_file(kind: str) -> None:
    """libav opens the decoders of all tracks at once, unless it gets a list of allowed ones."""
    data = write(*UNSERVED["mp2"], {}) if kind == "mp2" else silent_video()
    av.logging.set_level(av.logging.VERBOSE)
    try:
        with av.logging.Capture(local=False) as logged:
            decode_until_error(data, 65_536)
    finally:
        av.logging.set_level(None)
    refused = [text for _, _, text in logged if "not on whitelist" in text]
    assert refused and len(SERVED_CODECS) < 30


def upload_until_error(data: bytes) -> AudioError:
    with pytest.raises(AudioError) as error:
        list(read_upload(io.BytesIO(data)))
    return error.value
