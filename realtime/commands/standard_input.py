"""Sound from standard input, as it arrives: any container that can be read from front to back."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from audio.containers import ContainerDecoder
from audio.errors import CorruptAudio, EmptyAudio
from audio.formats import PCM16_SCALE
from audio.resample import Resampler
from realtime.session.events import Samples

READ_BYTES = 64 * 1024
# How soon it is noticed that nobody wants more.
WAIT_S = 0.2
# Chunks before the samples of a WAV stream hold a few names; a longer head is left to libav.
MAX_HEAD_BYTES = 16 * 1024
PCM, EXTENSIBLE = 1, 0xFFFE
# Writers that do not know the length leave zero or nearly the largest value.
UNKNOWN_LENGTH = 0x7FFF_0000


class StandardInput:
    """Read like a file that is not seekable. It is at its end as soon as `ended` says so, whatever its writer does."""

    def __init__(self, ended: Callable[[], bool]) -> None:
        self._fd = sys.stdin.fileno()
        self._ended = ended
        self._stopped = False

    def stop(self) -> None:
        """Nobody will read any more; a read that waits returns soon."""
        self._stopped = True

    def read1(self, size: int) -> bytes:
        """What there is, at most `size` bytes; nothing at the end."""
        while not self._stopped and not self._ended():
            if select.select([self._fd], [], [], WAIT_S)[0]:
                return os.read(self._fd, size)
        return b""


def blocks_of(source: StandardInput) -> Iterator[Samples]:
    """16 kHz mono as it arrives. Raises AudioError after everything that could be decoded, and OSError."""
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
    """A WAV head that is followed by 16-bit samples. `data_bytes` None: the writer did not know how many."""

    head_bytes: int
    rate: int
    channels: int
    data_bytes: int | None


def _plain_wav(head: bytes) -> PlainWav | bool | None:
    """The head of a WAV stream of 16-bit samples; False if this is something else, None if more bytes are needed.

    libav would read 128 KiB of such a stream before it hands out the first sample: four seconds of speech.
    """
    if not head.startswith(b"RIFF"[: len(head)]) or head[8:12] != b"WAVE"[: max(0, len(head) - 8)]:
        return False
    rate = channels = 0
    at = 12
    while at + 8 <= len(head):
        name, size = head[at : at + 4], int.from_bytes(head[at + 4 : at + 8], "little")
        if name == b"data":
            unknown = size == 0 or size >= UNKNOWN_LENGTH
            return PlainWav(at + 8, rate, channels, None if unknown else size) if rate else False
        body = head[at + 8 : at + 8 + size]
        if name == b"fmt " and len(body) == size:
            rate, channels = _plain_format(body)
            if not rate:
                return False
        at += 8 + size + size % 2
    return None if at <= MAX_HEAD_BYTES else False


def _plain_format(body: bytes) -> tuple[int, int]:
    """Rate and channels of a `fmt ` chunk that means 16-bit samples; zeros otherwise."""
    kind, channels = int.from_bytes(body[:2], "little"), int.from_bytes(body[2:4], "little")
    rate, bits = int.from_bytes(body[4:8], "little"), int.from_bytes(body[14:16], "little")
    if kind == EXTENSIBLE:
        kind = int.from_bytes(body[24:26], "little")
    return (rate, channels) if kind == PCM and bits == 16 and channels else (0, 0)


def _plain_blocks(source: StandardInput, wav: PlainWav, data: bytes) -> Iterator[Samples]:
    resampler = Resampler(wav.rate)
    frame_bytes = 2 * wav.channels
    left = wav.data_bytes
    received = 0
    rest = b""
    # The head may come alone.
    data = data or source.read1(READ_BYTES)
    while data and left != 0:
        data = data if left is None else data[:left]
        left = None if left is None else left - len(data)
        received += len(data)
        data = rest + data
        whole = len(data) // frame_bytes * frame_bytes
        rest = data[whole:]
        yield resampler.resample(_mono(data[:whole], wav.channels))
        data = source.read1(READ_BYTES)
    yield resampler.flush()
    if not received:
        raise EmptyAudio("the audio track holds no samples; send one that has sound in it")
    if left:
        seconds = received / frame_bytes / wav.rate
        raise CorruptAudio(f"the audio is cut short: {seconds:.2f} s came, {left} bytes are missing")


def _mono(data: bytes, channels: int) -> NDArray[np.float32]:
    samples = np.frombuffer(data, "<i2").reshape(-1, channels)
    mixed: NDArray[np.float32] = samples.mean(axis=1, dtype=np.float32) * PCM16_SCALE
    return mixed
