"""Reads audio files and standard input for the commands, as samples at 16 kHz mono.

Standard input is decoded as it arrives. A WAV stream of 16-bit samples, which other programs usually write, is decoded
here; all other formats are decoded by `audio/containers.py`.
"""

from __future__ import annotations

import asyncio
import os
import select
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray

from audio.containers import OPEN_OPTIONS, ContainerDecoder, read_file
from audio.errors import AudioError, CorruptAudio, EmptyAudio
from audio.formats import MODEL_RATE, PCM16_SCALE, Resampler
from realtime.commands.terminal import (
    STANDARD_INPUT,
    EndOnInterrupt,
)
from realtime.session.events import Samples

# Bytes of one read.
READ_BYTES = 64 * 1024
# Seconds after which a waiting read checks whether it has to stop.
POLL_S = 0.2
# A WAV stream with a longer header is decoded by libav.
MAX_HEAD_BYTES = 16 * 1024
# Format codes of WAV: PCM, and a code that stands later in the chunk.
PCM, EXTENSIBLE = 1, 0xFFFE
# Writers that do not know the length of the data write zero or nearly the largest value.
UNKNOWN_LENGTH = 0x7FFF_0000


class StandardInput:
    """Standard input as a file that cannot seek. It ends when its writer closes it, or `ended()` is True."""

    def __init__(self, ended: Callable[[], bool]) -> None:
        self._fd = sys.stdin.fileno()
        self._ended = ended
        self._stopped = False

    def stop(self) -> None:
        """End the input; a waiting read returns soon."""
        self._stopped = True

    def read1(self, size: int) -> bytes:
        """The available bytes, at most `size`; empty at the end."""
        while not self._stopped and not self._ended():
            if select.select([self._fd], [], [], POLL_S)[0]:
                return os.read(self._fd, size)
        return b""


def read_standard_input(source: StandardInput) -> Iterator[Samples]:
    """Samples at 16 kHz mono as they arrive. Raises AudioError after everything that could be decoded, and OSError."""
    head = b""
    while (plain := _plain_wav(head)) is None and (data := source.read1(READ_BYTES)):
        head += data
    if isinstance(plain, PlainWav):
        yield from _plain_blocks(source, plain, head[plain.head_bytes :])
    else:
        yield from _container_blocks(source, head)


def _container_blocks(source: StandardInput, head: bytes) -> Iterator[Samples]:
    decoder = ContainerDecoder()
    try:
        data = head
        while data:
            yield from decoder.decode(data)
            data = source.read1(READ_BYTES)
        yield from decoder.flush()
    finally:
        decoder.close()


@dataclass(frozen=True, slots=True)
class PlainWav:
    """The header of a WAV stream of 16-bit samples. `data_bytes` is None if its writer did not know the length."""

    head_bytes: int
    rate: int
    channels: int
    data_bytes: int | None


def _plain_wav(head: bytes) -> PlainWav | bool | None:
    """The header of a WAV stream of 16-bit samples; False if it is another format, None if more bytes are needed.

    Parsed here because libav reads 128 KiB (four seconds of speech) before it returns the first sample.
    """
    if not head.startswith(b"RIFF"[: len(head)]) or head[8:12] != b"WAVE"[: max(0, len(head) - 8)]:
        return False
    rate = channels = 0
    offset = 12
    while offset + 8 <= len(head):
        name, size = head[offset : offset + 4], int.from_bytes(head[offset + 4 : offset + 8], "little")
        if name == b"data":
            unknown = size == 0 or size >= UNKNOWN_LENGTH
            return PlainWav(offset + 8, rate, channels, None if unknown else size) if rate else False
        body = head[offset + 8 : offset + 8 + size]
        if name == b"fmt " and len(body) == size:
            rate, channels = _plain_format(body)
            if not rate:
                return False
        offset += 8 + size + size % 2
    return None if offset <= MAX_HEAD_BYTES else False


def _plain_format(body: bytes) -> tuple[int, int]:
    """Rate and channels of a `fmt ` chunk of 16-bit samples; zeros for other formats."""
    kind, channels = int.from_bytes(body[:2], "little"), int.from_bytes(body[2:4], "little")
    rate, bits = int.from_bytes(body[4:8], "little"), int.from_bytes(body[14:16], "little")
    if kind == EXTENSIBLE:
        kind = int.from_bytes(body[24:26], "little")
    return (rate, channels) if kind == PCM and bits == 16 and channels else (0, 0)


def _plain_blocks(source: StandardInput, wav: PlainWav, data: bytes) -> Iterator[Samples]:
    resampler = Resampler(wav.rate)
    frame_bytes = 2 * wav.channels
    # Bytes that the header announces and that have not come; None if their number is unknown.
    missing = wav.data_bytes
    received = 0
    rest = b""
    # The header may arrive without samples.
    data = data or source.read1(READ_BYTES)
    while data and missing != 0:
        data = data if missing is None else data[:missing]
        missing = None if missing is None else missing - len(data)
        received += len(data)
        data = rest + data
        complete = len(data) // frame_bytes * frame_bytes
        rest = data[complete:]
        yield resampler.resample(_mono(data[:complete], wav.channels))
        data = source.read1(READ_BYTES)
    yield resampler.flush()
    if not received:
        raise EmptyAudio("the audio track has no samples; send audio that has some")
    if missing:
        seconds = received / frame_bytes / wav.rate
        raise CorruptAudio(f"the audio is cut short: {seconds:.2f} s came, {missing} bytes are missing")


def _mono(data: bytes, channels: int) -> NDArray[np.float32]:
    samples = np.frombuffer(data, "<i2").reshape(-1, channels)
    mixed: NDArray[np.float32] = samples.mean(axis=1, dtype=np.float32) * PCM16_SCALE
    return mixed


# Decoded audio is returned in pieces of about this length.
PIECE_SAMPLES = MODEL_RATE


async def read_pieces(path: Path, samples: int = PIECE_SAMPLES) -> AsyncIterator[Samples]:
    """The audio of a file, or of standard input as it arrives, in pieces. Ctrl-C ends standard input."""
    if path != STANDARD_INPUT:
        pieces = read_audio(path, samples)
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            yield piece
        return
    with EndOnInterrupt() as interrupt:
        source = StandardInput(lambda: interrupt.ended)
        pieces = join_blocks(read_standard_input(source), samples)
        try:
            while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                yield piece
        finally:
            source.stop()


def read_audio(path: Path, samples: int = PIECE_SAMPLES) -> Iterator[Samples]:
    """The audio of a file in pieces, like `join_blocks`."""
    return join_blocks(read_file(path), samples)


def join_blocks(blocks: Iterator[Samples], samples: int) -> Iterator[Samples]:
    """Join blocks to pieces of at least `samples` samples; the last piece may be shorter.

    An error of `blocks` is raised after all samples before it were returned.
    """
    pending: list[Samples] = []
    count = 0
    error_at_end: AudioError | OSError | None = None
    try:
        for block in blocks:
            pending.append(block)
            count += len(block)
            if count >= samples:
                yield np.concatenate(pending)
                pending, count = [], 0
    except (AudioError, OSError) as error:
        error_at_end = error
    if count:
        yield np.concatenate(pending)
    if error_at_end is not None:
        raise error_at_end


def duration_of(path: Path) -> float | None:
    """The duration of a file in seconds by its container, for the progress bar; None if it has none."""
    if path == STANDARD_INPUT:
        return None
    try:
        with path.open("rb") as file, av.open(file, mode="r", options=OPEN_OPTIONS) as container:
            return container.duration / av.time_base if container.duration else None
    except (av.error.FFmpegError, OSError):
        return None
