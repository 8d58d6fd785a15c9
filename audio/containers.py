"""Decodes containers and codecs (WebM, Ogg, MP3, FLAC, WAV, MP4, ...) to float32 mono at 16 kHz, with PyAV.

`read_file` reads a trusted local file (in the commands). `read_upload` reads an untrusted file, and `read_stream` an
untrusted stream, which may be endless; both run in the decoder processes of a gateway. `ContainerDecoder` is fed pieces
of a stream; only `tickertape transcribe -` uses it, and it runs `read_stream`, so standard input has the formats and
limits of the server. All of them keep only the current piece and the codec's state in memory. This module also has the
formats and codecs that the server accepts (`SERVED_*`), the longer lists for local files (`FILE_*`), and the limits on
untrusted audio.

PyAV reads bytes from a file object, so a `ContainerDecoder` runs PyAV on a thread that is used as a coroutine: the
thread gets one piece, and continues when its samples were consumed. So nothing queues up, a small piece with hours of
silence is decoded in steps, and the result depends on the bytes only and not on timing.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from os import PathLike
from queue import SimpleQueue
from typing import BinaryIO

import av
import numpy as np
from av.audio.codeccontext import AudioCodecContext
from av.audio.stream import AudioStream
from av.container import InputContainer
from numpy.typing import NDArray

from audio.container_filters import (
    READ_BYTES,
    WAV_UNKNOWN_LENGTH,
    BytePipe,
    ByteReader,
    IteratorSource,
    LibavSource,
    PartsReader,
    PipeClosed,
    without_tags,
)
from audio.errors import (
    AudioError,
    CorruptAudio,
    EmptyAudio,
    NoAudioTrack,
    NotAudio,
    TooCompressed,
    UnsupportedFormat,
)
from audio.formats import MODEL_RATE, Resampler, checked_samples
from audio.mp4_filter import MAX_HEADER_BYTES, MAX_INDEX_BYTES, Mp4Boxes, index_first

# Bytes by which `sniff` recognises a container.
HEAD_BYTES = 12
# A ContainerDecoder pauses after this many samples, and at most one packet more, until they are consumed.
STEP_SAMPLES = 5 * MODEL_RATE
# The largest packet and number of channels of untrusted audio; normal ones are far smaller.
MAX_PACKET_BYTES = 4 << 20
MAX_PACKET_SAMPLES = 1 << 18
MAX_CHANNELS = 64
# Most audio per byte. Speech codecs need 80 bytes per second, and 20 in silence. The first minute is not counted.
MAX_SECONDS_PER_BYTE = 0.1
FREE_SECONDS = 60.0

Source = BinaryIO | LibavSource

# Containers and codecs for untrusted audio: the common ones only, because rare decoders of libav are less well tested.
# Names of libav; some codecs have two decoders.
SERVED_FORMATS = "flac,matroska,mov,mp3,mp4,ogg,wav,webm"
SERVED_CODECS = (
    *("aac", "alac", "flac", "libopus", "libvorbis", "mp3", "mp3float", "opus", "vorbis"),
    *("pcm_alaw", "pcm_mulaw", "pcm_u8", "pcm_s16le", "pcm_s16be", "pcm_s24le", "pcm_s24be", "pcm_s32le", "pcm_s32be"),
    *("pcm_f32le", "pcm_f32be", "pcm_f64le", "pcm_f64be"),
)
# First bytes of formats that are not served, for a refusal by name: offset, bytes, name.
UNSERVED_FORMATS = (
    (8, b"AVI ", "AVI"),
    (8, b"AIFF", "AIFF"),
    (8, b"AIFC", "AIFF"),
    (0, b"#!AMR", "AMR"),
    (0, b"caff", "CAF"),
    (0, b".snd", "AU"),
    (0, b"FLV\x01", "FLV"),
    (0, b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "WMA"),
    (0, b"riff\x2e\x91\xcf\x11", "Wave64"),
    (0, b"\x0b\x77", "AC-3"),
    (0, b"\x00\x00\x01\xba", "MPEG"),
    (0, b"\xff\xf1", "AAC without a container"),
    (0, b"\xff\xf9", "AAC without a container"),
    (0, b"MThd", "MIDI"),
    (0, b"ADIF", "AAC without a container"),
)
SEND_FORMATS = "send WebM, Ogg, MP3, FLAC, WAV or MP4"
SEND_CODECS = "send Opus, AAC, MP3, FLAC, Vorbis, ALAC or PCM"
# `read_file` opens more formats, because local files are trusted. Formats without audio (subtitles, images) and formats
# that refer to other files (playlists) are not among them.
FILE_FORMATS = f"{SERVED_FORMATS},aac,ac3,aiff,amr,asf,au,avi,caf,eac3,flv,mpeg,mpegts,w64"
FILE_CODECS = tuple(
    "aac ac3 adpcm_ alac amr eac3 flac g722 g726 gsm mp1 mp2 mp3 opus libopus pcm_ speex vorbis wma".split()
)


def _rules(formats: str, codecs: Iterable[str]) -> dict[str, str]:
    """libav options that restrict formats, codecs and protocols, also while libav probes a file."""
    return {"format_whitelist": formats, "codec_whitelist": ",".join(codecs), "protocol_whitelist": "none"}


SERVED = _rules(SERVED_FORMATS, SERVED_CODECS)
OPEN_OPTIONS = _rules(FILE_FORMATS, sorted(name for name in av.codecs_available if name.startswith(FILE_CODECS)))
# By default libav reads five seconds of a stream before it returns the first samples. Its seek index is kept small,
# because a stream is never seeked.
STREAM_OPTIONS = SERVED | {"analyzeduration": "1", "indexmem": "16384", "max_streams": "64"}

# Formats whose declared duration is exact and not an estimate from the bit rate.
EXACT_DURATION_FORMATS = frozenset({"matroska,webm", "ogg", "flac", "mov,mp4,m4a,3gp,3g2,mj2"})
# How much of the declared duration may be missing because of codec delay and rounding: seconds, plus a share of it.
MISSING_SECONDS = 0.25
MISSING_SHARE = 0.01


def read_file(path: str | PathLike[str]) -> Iterator[NDArray[np.float32]]:
    """The first audio track of a trusted file, in short blocks of 16 kHz mono.

    Raises AudioError after the blocks that could be decoded, and OSError if the file cannot be read.
    """
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
        file.seek(0)
        yield from _decode(file, head, None, OPEN_OPTIONS)


def read_upload(file: BinaryIO) -> Iterator[NDArray[np.float32]]:
    """The first audio track of an untrusted file in short blocks, with all limits of streams. Raises AudioError.

    The file is seekable, so an MP4 may have its index at the end.
    """
    head = file.read(HEAD_BYTES)
    file.seek(0)
    if sniff(head) == "mp4":
        return read_stream(PartsReader(index_first(file)), MAX_INDEX_BYTES)
    return read_stream(PartsReader(iter(partial(file.read, READ_BYTES), b"")))


def sniff(head: bytes) -> str | None:
    """libav's name of the container that begins with these bytes; None if it is none of the served ones."""
    if head.startswith(b"\x1aE\xdf\xa3"):
        return "matroska"
    if head[:4] in (b"RIFF", b"RF64") and head[8:12] == b"WAVE":
        return "wav"
    if head[4:8] in (b"ftyp", b"styp", b"moov", b"mdat", b"wide"):
        return "mp4"
    if head.startswith(b"OggS"):
        return "ogg"
    if head.startswith(b"fLaC"):
        return "flac"
    if head.startswith(b"ID3") or _is_mpeg_audio(head):
        return "mp3"
    return None


def _is_mpeg_audio(head: bytes) -> bool:
    """Whether the bytes begin with the sync bits of an MPEG audio frame and a valid layer."""
    return len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0 and head[1] & 0x06 != 0


class ContainerDecoder:
    """Decodes one stream of container bytes, in pieces of any size.

    A stream must be readable without seeking: an MP4 file must be fragmented or have its index in front. The first
    samples come after 128 KiB of WAV and about a second of FLAC, because libav probes that much.
    """

    def __init__(self) -> None:
        # The thread puts an item when it gives the turn back.
        self._turns: SimpleQueue[None] = SimpleQueue()
        self._pipe = BytePipe(partial(self._turns.put, None))
        self._pending = _PendingBlocks()
        self._ended = False
        # The thread has no reference to the decoder, so an unused decoder is collected, and its thread ends.
        weakref.finalize(self, self._pipe.close)
        args = (self._pipe, self._pending)
        self._thread = threading.Thread(target=_decoder_thread, args=args, name="container-decoder", daemon=True)

    def decode(self, data: bytes) -> Iterator[NDArray[np.float32]]:
        """Decode a piece: yields blocks of 16 kHz mono. The thread continues when the blocks so far were consumed.

        Raises AudioError if the stream cannot be decoded, or not beyond this point, and again on every later call.
        """
        self._feed(data)
        return self._blocks()

    def flush(self) -> Iterator[NDArray[np.float32]]:
        """End the stream; returns the remaining blocks. Raises AudioError like `decode`, and if there was no audio."""
        self._feed(None)
        return self._blocks()

    def close(self) -> None:
        """End the stream without waiting for its thread, which may be decoding. May be called twice."""
        self._ended = True
        self._pipe.close()

    def _feed(self, data: bytes | None) -> None:
        """Give the thread a piece, empty bytes to let it continue, or None for the end of the stream."""
        if self._ended and data != b"":
            raise ValueError("the stream has been flushed or closed")
        self._ended = self._ended or data is None
        if not self._thread.ident:
            self._thread.start()
        self._pipe.hand_over(data)

    def _new_blocks(self) -> list[NDArray[np.float32]]:
        """The blocks of the thread's last turn, at most one step and one packet. Raises AudioError."""
        if isinstance(self._pipe.failure, AudioError):
            raise type(self._pipe.failure)(str(self._pipe.failure))
        if self._pipe.failure is not None:
            raise self._pipe.failure
        return self._pending.pop_all()

    def _blocks(self) -> Iterator[NDArray[np.float32]]:
        self._turns.get()
        yield from self._new_blocks()
        # The thread can decode more without new bytes.
        while not self._pipe.needs_bytes and not self._pipe.finished:
            self._feed(b"")
            self._turns.get()
            yield from self._new_blocks()


class _PendingBlocks:
    """Decoded blocks that were not consumed yet. Only the side that has the turn may use them."""

    def __init__(self) -> None:
        self.samples = 0
        self._blocks: list[NDArray[np.float32]] = []

    def add(self, block: NDArray[np.float32]) -> None:
        self._blocks.append(block)
        self.samples += len(block)

    def pop_all(self) -> list[NDArray[np.float32]]:
        blocks, self._blocks, self.samples = self._blocks, [], 0
        return blocks


def _decoder_thread(pipe: BytePipe, pending: _PendingBlocks) -> None:
    """Main function of a ContainerDecoder's thread. It ends after all blocks were consumed."""
    failure: Exception | None = None
    try:
        try:
            _decode_in_steps(pipe, pending)
        except AudioError as error:
            failure = error
        if pending.samples:
            pipe.pause()
    except PipeClosed:
        pass
    except Exception as error:
        failure = error
    pipe.finish(failure)


def _decode_in_steps(pipe: BytePipe, pending: _PendingBlocks) -> None:
    """Decode the stream in steps, each after the blocks of the previous step were consumed."""
    pipe.begin()
    for block in read_stream(pipe):
        pending.add(block)
        if pending.samples >= STEP_SAMPLES:
            pipe.pause()


def read_stream(reader: ByteReader, max_index_bytes: int = MAX_HEADER_BYTES) -> Iterator[NDArray[np.float32]]:
    """Blocks of an untrusted stream. Raises AudioError.

    An error found by our filters takes precedence over libav's error, which follows from it.
    """
    head = reader.peek(HEAD_BYTES)
    container_format = sniff(head)
    if head and container_format is None:
        raise _not_served(head)
    source: LibavSource = Mp4Boxes(reader, max_index_bytes)
    if container_format is not None and container_format != "mp4":
        source = IteratorSource(without_tags(container_format, reader))
    try:
        yield from _check_compression(_decode(source, head, container_format, STREAM_OPTIONS), reader)
    except AudioError as error:
        raise source.fault or error from error
    if source.fault is not None:
        raise source.fault


def _not_served(head: bytes) -> NotAudio:
    name = next((name for offset, magic, name in UNSERVED_FORMATS if head[offset:].startswith(magic)), None)
    if name is not None:
        return UnsupportedFormat(f"the format {name} is not served; {SEND_FORMATS}")
    return NotAudio("the stream is none of WebM, Ogg, MP3, FLAC, WAV and MP4, or does not start at its beginning")


def _check_compression(blocks: Iterator[NDArray[np.float32]], reader: ByteReader) -> Iterator[NDArray[np.float32]]:
    """The same blocks. Raises TooCompressed if they are more audio than MAX_SECONDS_PER_BYTE allows."""
    seconds = 0.0
    for block in blocks:
        reader.audio_decoded()
        seconds += len(block) / MODEL_RATE
        if seconds > FREE_SECONDS + MAX_SECONDS_PER_BYTE * reader.bytes_read:
            raise TooCompressed(
                f"{seconds:.0f} s of audio were decoded from {reader.bytes_read} bytes, less than any codec needs for "
                "speech; send Opus, MP3 or raw samples, or FLAC in blocks of 4096 samples"
            )
        yield block


def _decode(
    source: Source, head: bytes, container_format: str | None, options: dict[str, str]
) -> Iterator[NDArray[np.float32]]:
    """Blocks of the first audio track; with `container_format` None libav detects the format."""
    if not head:
        raise EmptyAudio("there are no bytes to decode; send an audio file or stream that is not empty")
    packets = _packets(source, head, container_format, options)
    # The resampler sometimes returns an empty block.
    return filter(len, _to_model_rate(_frames(packets, head)))


def _packets(
    source: Source, head: bytes, container_format: str | None, options: dict[str, str]
) -> Iterator[av.Packet[AudioStream]]:
    """Packets of the first audio track, and an empty packet whenever libav has reached the end.

    A long live MP4 is ended for libav from time to time, and opened again (see `Mp4Boxes.reopen`).
    """
    has_more = True
    while has_more:
        with _open(source, head, container_format, options) as container:
            yield from container.demux(container.streams.audio[0])
        has_more = isinstance(source, Mp4Boxes) and source.reopen()
        # The edit list says how much of the start to skip, so it must not be applied when the stream is opened again.
        options = options | {"ignore_editlist": "1"}


def _open(source: Source, head: bytes, container_format: str | None, options: dict[str, str]) -> InputContainer:
    """Open the container, and check its audio track. Raises AudioError."""
    known = sniff(head)
    try:
        container = av.open(
            source,
            mode="r",
            format=container_format,
            options=options,
            metadata_errors="ignore",
            buffer_size=READ_BYTES,
        )
    except av.error.FFmpegError as error:
        if known is None:
            raise NotAudio(f"the file is not audio in a format that can be read; {SEND_FORMATS}") from error
        raise CorruptAudio(f"the {known} header is damaged or incomplete; send the file from its start") from error
    if not container.streams.audio:
        with container:
            if not container.streams:
                raise CorruptAudio(f"the {known or 'file'} header is incomplete; send the file from its start")
            raise NoAudioTrack("the file has no audio track; send one that has sound in it")
    # An unknown codec has no context, although the type says otherwise.
    decoder: AudioCodecContext | None = container.streams.audio[0].codec_context
    if decoder is None or decoder.name not in options["codec_whitelist"].split(","):
        with container:
            codec = "an unknown codec" if decoder is None else f"the codec {decoder.name!r}"
            raise UnsupportedFormat(f"{codec} is not served; {SEND_CODECS}")
    # libav has 0 for a number of channels that it does not support.
    if known == "wav" and decoder.channels == 0:
        with container:
            text = "the WAV header declares no channels, or more than can be read"
            raise NotAudio(f"{text}; send 1 to {MAX_CHANNELS} channels, or mix them to one")
    decoder.options = {"max_samples": str(MAX_PACKET_SAMPLES)}
    return container


def _frames(packets: Iterator[av.Packet[AudioStream]], head: bytes) -> Iterator[av.AudioFrame]:
    """Decoded frames. Raises CorruptAudio if the audio is damaged or ends too early."""
    decoder: AudioCodecContext | None = None
    seconds = 0.0
    declared: float | None = None
    cut_short = False
    try:
        for packet in packets:
            if decoder is None:
                decoder = packet.stream.codec_context
            if not packet.size:
                declared = _declared_seconds(packet.stream)
                continue
            if packet.size > MAX_PACKET_BYTES:
                raise CorruptAudio(f"a packet after {seconds:.2f} s is larger than {MAX_PACKET_BYTES} bytes")
            cut_short |= packet.is_corrupt
            for frame in decoder.decode(packet):
                seconds += frame.samples / frame.sample_rate
                yield frame
        assert decoder is not None, "libav ends with an empty packet"
        for frame in decoder.decode(None):
            seconds += frame.samples / frame.sample_rate
            yield frame
    except av.error.FFmpegError as error:
        raise CorruptAudio(f"the audio is damaged after {seconds:.2f} s; send it again from there") from error
    missing = declared - seconds if declared is not None else 0.0
    if missing > MISSING_SECONDS + MISSING_SHARE * seconds or (cut_short and not _wav_of_unknown_length(head)):
        of = "" if declared is None else f" of {declared:.2f} s"
        raise CorruptAudio(f"the audio is cut short or damaged: {seconds:.2f} s{of} could be decoded")


def _declared_seconds(track: AudioStream) -> float | None:
    """The declared duration of the track; None if the format's duration is not reliable."""
    container = track.container
    assert isinstance(container, InputContainer)
    if container.format.name not in EXACT_DURATION_FORMATS:
        return None
    if track.duration is not None and track.time_base is not None:
        return float(track.duration * track.time_base)
    # The container's duration is that of its longest track.
    if container.duration is not None and len(container.streams) == 1:
        return container.duration / av.time_base
    return None


def _wav_of_unknown_length(head: bytes) -> bool:
    """True for a WAV stream whose writer did not know its length; its last packet looks incomplete."""
    declared_bytes = int.from_bytes(head[4:8], "little")
    return sniff(head) == "wav" and (declared_bytes == 0 or declared_bytes >= WAV_UNKNOWN_LENGTH)


def _to_model_rate(frames: Iterator[av.AudioFrame]) -> Iterator[NDArray[np.float32]]:
    """The frames, mixed to mono and resampled. An AudioError is raised after all valid samples were returned."""
    resampler: Resampler | None = None
    error_at_end: AudioError | None = None
    try:
        for frame in frames:
            if resampler is None:
                resampler = Resampler(frame.sample_rate)
            elif resampler.rate != frame.sample_rate:
                yield resampler.flush()
                resampler = Resampler(frame.sample_rate)
            yield resampler.resample(mix_down(frame))
    except AudioError as error:
        error_at_end = error
    if resampler is not None:
        yield resampler.flush()
    if error_at_end is not None:
        raise error_at_end
    if resampler is None:
        raise EmptyAudio("the audio track has no samples; send one that has sound in it")


def mix_down(frame: av.AudioFrame) -> NDArray[np.float32]:
    """Mono samples: the mean of all channels. Raises NotAudio and BadSamples."""
    channels = frame.layout.nb_channels
    if channels > MAX_CHANNELS:
        raise NotAudio(f"the audio track has {channels} channels; send at most {MAX_CHANNELS}, or mix them to one")
    samples = frame.to_ndarray()
    if not frame.format.is_planar:
        samples = samples.reshape(-1, channels).T
    mono: NDArray[np.float32] = (
        samples[0].astype(np.float32) if channels == 1 else samples.mean(axis=0, dtype=np.float32)
    )
    if samples.dtype == np.uint8:
        mono -= 128
        mono /= 128
    elif samples.dtype.kind == "i":
        mono /= 2 ** (8 * samples.dtype.itemsize - 1)
    else:
        mono = checked_samples(mono)
    return mono
