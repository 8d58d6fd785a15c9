"""The audio track of a WebRTC call: orders RTP packets (jitter buffer), decodes Opus to samples at 16 kHz, fills gaps.

It runs in the process of the call, which sends the result to the gateway. `JitterBuffer` puts the packets in order, and
marks where packets are missing. A late packet is waited for, but not longer than `WAIT_S`, and not after
`MAX_HELD_PACKETS` later ones have arrived. `OpusTrack` decodes them. Time comes from the timestamps of the packets, so
the times of words stay right when packets are missing. A call's audio never runs ahead of the clock by more than
`MAX_AHEAD_S`, whatever the timestamps are.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import av
import numpy as np
from numpy.typing import NDArray

from audio.formats import MODEL_RATE, PCM16_SCALE, Resampler

# Seconds for which later packets wait for a missing one.
WAIT_S = 0.2
MAX_HELD_PACKETS = 50
# A sequence number that is farther away begins a new count: the sender was restarted, or lies.
MAX_JUMP = 3000
_NUMBERS, _HALF_NUMBERS = 1 << 16, 1 << 15
OPUS_RATE = 48_000
# The longest packet of Opus: 120 ms.
MAX_PACKET_SAMPLES = OPUS_RATE * 120 // 1000
# Seconds of audio that may come faster than the clock; packets beyond it are dropped.
MAX_AHEAD_S = 2.0
# Clocks of senders differ from ours by less than this share.
DRIFT = 1.002
HEADER = struct.Struct("!BBHII")
_TIMES, _HALF_TIMES = 1 << 32, 1 << 31


@dataclass(frozen=True, slots=True)
class Packet:
    sequence: int
    timestamp: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Arrived:
    """A packet in its place. `after_loss`: at least one before it is missing."""

    packet: Packet
    after_loss: bool


class JitterBuffer:
    """Orders the packets of one source. Times are those of the caller's clock, in seconds."""

    def __init__(self) -> None:
        self._next: int | None = None
        # Sequence number -> packet and its time of arrival; all are ahead of the next.
        self._held: dict[int, tuple[Packet, float]] = {}

    @property
    def is_waiting(self) -> bool:
        return bool(self._held)

    def add(self, packet: Packet, now: float) -> Iterator[Arrived]:
        """Take a packet; yields those that are in order now."""
        if self._next is None:
            self._next = packet.sequence
        ahead = (packet.sequence - self._next + _HALF_NUMBERS) % _NUMBERS - _HALF_NUMBERS
        if abs(ahead) > MAX_JUMP:
            yield from self._give_up_waiting()
            self._next = packet.sequence
            yield self._passed(packet, True)
            return
        if ahead < 0 or packet.sequence in self._held:
            return  # too late, or a copy
        if ahead == 0:
            yield self._passed(packet, False)
            yield from self._in_order()
        else:
            self._held[packet.sequence] = (packet, now)
        yield from self.expired(now)

    def expired(self, now: float) -> Iterator[Arrived]:
        """The packets that have waited long enough for others."""
        while self._held and (
            len(self._held) > MAX_HELD_PACKETS or now - min(at for _, at in self._held.values()) >= WAIT_S
        ):
            yield self._skip()
            yield from self._in_order()

    def _give_up_waiting(self) -> Iterator[Arrived]:
        while self._held:
            yield self._skip()
            yield from self._in_order()

    def _skip(self) -> Arrived:
        """Go on with the first packet that is there."""
        expected = self._next or 0
        first = min(self._held, key=lambda sequence: (sequence - expected) % _NUMBERS)
        return self._passed(self._held.pop(first)[0], True)

    def _in_order(self) -> Iterator[Arrived]:
        while self._next in self._held:
            yield self._passed(self._held.pop(self._next)[0], False)

    def _passed(self, packet: Packet, after_loss: bool) -> Arrived:
        self._next = (packet.sequence + 1) % _NUMBERS
        return Arrived(packet, after_loss)


@dataclass(frozen=True, slots=True)
class MissingAudio:
    """Samples at 16 kHz that did not come. `is_lost`: the network lost them; otherwise the client sent no silence."""

    samples: int
    is_lost: bool


Heard = NDArray[np.float32] | MissingAudio


def read_packet(data: bytes, payload_type: int) -> tuple[int, Packet] | None:
    """The source and the content of an RTP packet; None if it is not of this payload type, or not valid."""
    if len(data) < HEADER.size:
        return None
    first, second, sequence, timestamp, source = HEADER.unpack_from(data)
    if first >> 6 != 2 or second & 0x7F != payload_type:
        return None
    start, end = HEADER.size + 4 * (first & 0x0F), len(data)
    if first & 0x10:
        if start + 4 > end:
            return None
        start += 4 + 4 * int.from_bytes(data[start + 2 : start + 4])
    if first & 0x20:
        end -= data[-1]
    if start >= end:
        return None
    return source, Packet(sequence, timestamp, data[start:end])


class OpusTrack:
    """Decodes the packets of one call."""

    def __init__(self, payload_type: int, clock: Callable[[], float]) -> None:
        self._payload_type = payload_type
        self._clock = clock
        self._source: int | None = None
        self._buffer = JitterBuffer()
        self._decoder = _OpusDecoder()
        self._resampler = Resampler(OPUS_RATE)
        # The timestamp at which the next packet is expected.
        self._expected: int | None = None
        self._began = 0.0
        # Samples at 48 kHz so far, and how many samples at 16 kHz were reported as missing.
        self._samples = 0

    @property
    def is_waiting(self) -> bool:
        return self._buffer.is_waiting

    def take(self, data: bytes) -> Iterator[Heard]:
        """Take a decrypted RTP packet; yields the audio and the gaps that are in order now."""
        found = read_packet(data, self._payload_type)
        if found is None:
            return
        source, packet = found
        now = self._clock()
        if source != self._source:
            # Another source counts in its own way; what is missing between them is unknown.
            for arrived in self._buffer.expired(float("inf")):
                yield from self._hear(arrived)
            self._source, self._buffer, self._expected = source, JitterBuffer(), None
        for arrived in self._buffer.add(packet, now):
            yield from self._hear(arrived)

    def look(self) -> Iterator[Heard]:
        """The audio and the gaps after packets that were waited for long enough."""
        for arrived in self._buffer.expired(self._clock()):
            yield from self._hear(arrived)

    def _hear(self, arrived: Arrived) -> Iterator[Heard]:
        packet = arrived.packet
        if not self._samples:
            self._began = self._clock()
        missing = 0
        if self._expected is not None:
            behind = (packet.timestamp - self._expected + _HALF_TIMES) % _TIMES - _HALF_TIMES
            missing = max(0, min(behind, self._room() - MAX_PACKET_SAMPLES))
        if missing >= OPUS_RATE // MODEL_RATE:
            rest = self._resampler.flush()
            if len(rest):
                yield rest
            self._samples += missing
            yield MissingAudio(missing * MODEL_RATE // OPUS_RATE, arrived.after_loss)
        if self._room() < MAX_PACKET_SAMPLES:
            return
        decoded = self._decoder.decode(packet.payload)
        self._expected = (packet.timestamp + len(decoded)) % _TIMES
        self._samples += len(decoded)
        samples = self._resampler.resample(decoded)
        if len(samples):
            yield samples

    def _room(self) -> int:
        """Samples by which the audio may advance now without running ahead of the clock."""
        passed = (self._clock() - self._began) * DRIFT
        return int((passed + MAX_AHEAD_S) * OPUS_RATE) - self._samples


class _OpusDecoder:
    """libopus, by PyAV. A packet that is no Opus is silence of no length."""

    def __init__(self) -> None:
        self._codec = av.CodecContext.create("libopus", "r")
        self._codec.sample_rate = OPUS_RATE
        self._codec.layout = "mono"
        self._codec.format = "s16"

    def decode(self, payload: bytes) -> NDArray[np.float32]:
        try:
            frames = self._codec.decode(av.Packet(payload))
        except av.FFmpegError:
            return np.empty(0, np.float32)
        parts = [frame.to_ndarray().reshape(-1) for frame in frames]
        joined = np.concatenate(parts) if parts else np.empty(0, np.int16)
        return joined.astype(np.float32) * PCM16_SCALE
