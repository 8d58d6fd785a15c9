"""Containers and codecs (WebM, Ogg, MP3, FLAC, WAV, MP4, ...) -> float32 mono at 16 kHz, through PyAV.

`read_file` pulls blocks out of a file of any length. `ContainerDecoder` takes the bytes of a stream that may never end,
as they arrive. Both decode the same way, and hold no more than the piece at hand and what the codec needs.

PyAV pulls bytes from a file object, so a `ContainerDecoder` has a thread on which PyAV runs, used as a coroutine:
`decode` hands one piece over and waits until PyAV asks for the next. Nothing queues up, and the outcome depends on the
bytes alone. `decode` takes as long as the codec needs for the piece: call it off the event loop.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from os import PathLike
from typing import BinaryIO

import av
import numpy as np
from av.audio.codeccontext import AudioCodecContext
from av.audio.stream import AudioStream
from av.container import InputContainer
from numpy.typing import NDArray

from audio.errors import AudioError, CorruptAudio, EmptyAudio, NoAudioTrack, NotAudio
from audio.formats import checked_samples
from audio.pipes import BytePipe, Mp4Boxes
from audio.resample import Resampler

HEAD_BYTES = 12
READ_BYTES = 32_768

Source = BinaryIO | BytePipe | Mp4Boxes

# What may be opened. Other formats are not sound (subtitles, images) or refer to further files (playlists).
FILE_FORMATS = "aac,ac3,aiff,amr,asf,au,avi,caf,eac3,flac,flv,matroska,mov,mp3,mp4,mpeg,mpegts,ogg,w64,wav,webm"
OPEN_OPTIONS = {"format_whitelist": FILE_FORMATS, "protocol_whitelist": "none"}
# libav would read five seconds before it trusts a header, and a stream's first samples must not wait for that.
# Nobody seeks in a stream, so libav's index of it stays small.
STREAM_OPTIONS = OPEN_OPTIONS | {"analyzeduration": "1", "indexmem": "16384"}

# Formats whose declared duration is a fact and not an estimate from the bit rate.
EXACT_DURATION_FORMATS = frozenset({"matroska,webm", "ogg", "flac", "mov,mp4,m4a,3gp,3g2,mj2"})
# How much of the declared duration may be missing: codec delay, and rounding by the writer.
MISSING_SECONDS = 0.25
MISSING_SHARE = 0.01

# Writers that cannot go back and fill in the length of a WAV file leave zero or nearly the largest value.
WAV_UNKNOWN_LENGTH = 0x7FFF_0000


def read_file(path: str | PathLike[str]) -> Iterator[NDArray[np.float32]]:
    """The first audio track of a file in short blocks of 16 kHz mono; the file is never held in memory.

    Raises AudioError, after the blocks that could be decoded, and OSError if the file cannot be read.
    """
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
        file.seek(0)
        yield from _decode(file, head, None, OPEN_OPTIONS)


def sniff(head: bytes) -> str | None:
    """The name of the container that begins with these bytes, as libav calls it; None if it is none that streams."""
    if head.startswith(b"\x1aE\xdf\xa3"):
        return "matroska"
    if head[:4] in (b"RIFF", b"RF64") and head[8:12] == b"WAVE":
        return "wav"
    if head[4:8] in (b"ftyp", b"styp", b"moov"):
        return "mp4"
    if head.startswith(b"OggS"):
        return "ogg"
    if head.startswith(b"fLaC"):
        return "flac"
    if head.startswith(b"ID3") or _is_mpeg_audio(head):
        return "mp3"
    return None


def _is_mpeg_audio(head: bytes) -> bool:
    """Eleven bits of frame sync and a layer that exists."""
    return len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0 and head[1] & 0x06 != 0


class ContainerDecoder:
    """Decodes one stream of container bytes, however it is cut into pieces.

    A stream must be readable from front to back: an MP4 file needs its index in front or to be fragmented. WAV starts
    to flow after 128 KiB and FLAC after about a second: libav reads that much before it is sure what is inside.
    """

    def __init__(self) -> None:
        self._pipe = BytePipe()
        self._blocks: list[NDArray[np.float32]] = []
        self._ended = False
        # The thread does not know the decoder: one that nobody holds any more is collected, and its thread ends.
        weakref.finalize(self, self._pipe.end)
        thread = threading.Thread(target=_pump, args=(self._pipe, self._blocks), name="container-decoder", daemon=True)
        thread.start()
        self._pipe.wait()

    def decode(self, data: bytes) -> list[NDArray[np.float32]]:
        """Blocks of 16 kHz mono that `data` completes.

        Raises AudioError when the stream cannot be decoded (any further), on this and every later call; blocks from
        before the fault come with the first error.
        """
        if self._ended:
            raise ValueError("the stream has been flushed or closed")
        if data:
            self._pipe.hand_over(data)
        return self._take_blocks()

    def flush(self) -> list[NDArray[np.float32]]:
        """End the stream: the remaining blocks. Raises AudioError as `decode` does, and for no audio at all."""
        self.close()
        return self._take_blocks()

    def close(self) -> None:
        """End the stream and its thread; harmless when done twice."""
        self._ended = True
        self._pipe.hand_over(None)

    def abandon(self) -> None:
        """End the stream without waiting for its thread, which may be in the middle of a piece; nothing more comes."""
        self._ended = True
        self._pipe.end()

    def _take_blocks(self) -> list[NDArray[np.float32]]:
        blocks = self._blocks.copy()
        self._blocks.clear()
        failure = self._pipe.failure
        if isinstance(failure, AudioError):
            raise type(failure)(str(failure), blocks)
        if failure is not None:
            raise failure
        return blocks


def _pump(pipe: BytePipe, blocks: list[NDArray[np.float32]]) -> None:
    """The thread of a ContainerDecoder."""
    try:
        head = pipe.peek(HEAD_BYTES)
        container_format = sniff(head)
        if head and container_format is None:
            raise NotAudio(
                "the stream is none of WebM, Ogg, MP3, FLAC, WAV and MP4, or does not start at its beginning"
            )
        source = Mp4Boxes(pipe) if container_format == "mp4" else pipe
        for block in _decode(source, head, container_format, STREAM_OPTIONS):
            blocks.append(block)  # noqa: PERF402 (each block must be there when PyAV waits for the next piece)
    except Exception as error:
        pipe.finish(error)
    else:
        pipe.finish(None)


def _decode(
    source: Source, head: bytes, container_format: str | None, options: dict[str, str]
) -> Iterator[NDArray[np.float32]]:
    """Blocks of the first audio track; `container_format` None lets libav find out."""
    if not head:
        raise EmptyAudio("there are no bytes to decode; send an audio file or stream that is not empty")
    packets = _packets(source, head, container_format, options)
    # The resampler holds back a block now and then.
    return filter(len, _to_model_rate(_frames(packets, head)))


def _packets(
    source: Source, head: bytes, container_format: str | None, options: dict[str, str]
) -> Iterator[av.Packet[AudioStream]]:
    """Packets of the first audio track, and an empty one wherever the container ends."""
    more = True
    while more:
        with _open(source, head, container_format, options) as container:
            yield from container.demux(container.streams.audio[0])
        more = isinstance(source, Mp4Boxes) and source.start_over()
        # The header tells how much of the start to skip, and this is not the start.
        options = options | {"ignore_editlist": "1"}


def _open(source: Source, head: bytes, container_format: str | None, options: dict[str, str]) -> InputContainer:
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
            raise NotAudio(
                "the file is not audio in a format that can be read; send WAV, FLAC, MP3, Ogg, WebM or MP4"
            ) from error
        raise CorruptAudio(f"the {known} header is damaged or incomplete; send the file from its start") from error
    if not container.streams.audio:
        with container:
            if not container.streams:
                raise CorruptAudio(f"the {known or 'file'} header is incomplete; send the file from its start")
            raise NoAudioTrack("the file has no audio track; send one that has sound in it")
    # The type does not say so, but an unknown codec has no context.
    if container.streams.audio[0].codec_context is None:
        with container:
            raise NotAudio("the audio track is in a codec that cannot be read; send Opus, AAC, MP3, FLAC or PCM")
    return container


def _frames(packets: Iterator[av.Packet[AudioStream]], head: bytes) -> Iterator[av.AudioFrame]:
    """Decoded frames up to the end. Damage is an error, and so is an end that comes too early."""
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
    """How long the track says it is, where that can be relied on."""
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
    """True for a WAV stream whose writer could not know how long it would be: its last packet looks cut short."""
    declared_bytes = int.from_bytes(head[4:8], "little")
    return sniff(head) == "wav" and (declared_bytes == 0 or declared_bytes >= WAV_UNKNOWN_LENGTH)


def _to_model_rate(frames: Iterator[av.AudioFrame]) -> Iterator[NDArray[np.float32]]:
    """The frames, mixed down and resampled. A fault is raised after the last good sample has been handed out."""
    resampler: Resampler | None = None
    fault: AudioError | None = None
    try:
        for frame in frames:
            if resampler is None:
                resampler = Resampler(frame.sample_rate)
            elif resampler.rate != frame.sample_rate:
                yield resampler.flush()
                resampler = Resampler(frame.sample_rate)
            yield resampler.resample(_mix_down(frame))
    except AudioError as error:
        fault = error
    if resampler is not None:
        yield resampler.flush()
    if fault is not None:
        raise fault
    if resampler is None:
        raise EmptyAudio("the audio track holds no samples; send one that has sound in it")


def _mix_down(frame: av.AudioFrame) -> NDArray[np.float32]:
    """One channel: the mean of all, each weighing the same."""
    samples = frame.to_ndarray()
    channels = frame.layout.nb_channels
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
