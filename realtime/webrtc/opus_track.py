"""The audio track of a WebRTC call: orders RTP packets (jitter buffer), decodes Opus to 16 kHz, and reports gaps.

It runs in the process of the call, which sends samples and gaps to the gateway. `JitterBuffer` puts the packets in
order, and marks where packets are missing. Later packets wait for a missing one for at most `WAIT_S`, and at most
`MAX_WAITING_PACKETS` of them. `OpusTrack` decodes the packets. Time comes from the timestamps of the packets, so the
times of words stay right when packets are missing. Whatever the timestamps are, a call's audio never runs ahead of the
clock by more than `MAX_AHEAD_S`, plus 0.2 % of the call's length for a sender's fast clock (`CLOCK_DRIFT`).
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
MAX_WAITING_PACKETS = 50
# A sequence number farther than this from the expected one begins a new count: the sender was restarted, or the number
# is false.
MAX_JUMP = 3000
# Sequence numbers have 16 bits and wrap around.
_NUMBERS, _HALF_NUMBERS = 1 << 16, 1 << 15
OPUS_RATE = 48_000
# The longest packet of Opus: 120 ms.
MAX_PACKET_SAMPLES = OPUS_RATE * 120 // 1000
# Seconds of audio by which a track may be ahead of the clock; packets beyond it are dropped.
MAX_AHEAD_S = 2.0
# A sender's clock may run faster than ours by this factor.
CLOCK_DRIFT = 1.002
# The fixed header of RTP (RFC 3550): flags, marker and payload type, sequence number, timestamp, source (SSRC).
HEADER = struct.Struct("!BBHII")
# Timestamps have 32 bits and wrap around.
_TIMES, _HALF_TIMES = 1 << 32, 1 << 31


@dataclass(frozen=True, slots=True)
class Packet:
    """An RTP packet of Opus. `timestamp` counts samples at 48 kHz."""

    sequence: int
    timestamp: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class OrderedPacket:
    """A packet in order. `after_loss`: packets directly before it are missing, or it begins a new count."""

    packet: Packet
    after_loss: bool


class JitterBuffer:
    """Puts the packets of one source in order. Times are those of the caller's clock, in seconds."""

    def __init__(self) -> None:
        # The sequence number that comes next in order.
        self._next: int | None = None
        # Sequence number -> packet and its time of arrival; all numbers are after `_next`.
        self._waiting: dict[int, tuple[Packet, float]] = {}

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)

    def add(self, packet: Packet, now: float) -> Iterator[OrderedPacket]:
        """Add a packet; yields the packets that are in order now."""
        if self._next is None:
            self._next = packet.sequence
        ahead = (packet.sequence - self._next + _HALF_NUMBERS) % _NUMBERS - _HALF_NUMBERS
        if abs(ahead) > MAX_JUMP:
            yield from self._all_waiting()
            self._next = packet.sequence
            yield self._emit(packet, True)
            return
        if ahead < 0 or packet.sequence in self._waiting:
            return  # too late, or a copy
        if ahead == 0:
            yield self._emit(packet, False)
            yield from self._in_order()
        else:
            self._waiting[packet.sequence] = (packet, now)
        yield from self.expired(now)

    def expired(self, now: float) -> Iterator[OrderedPacket]:
        """The packets that have waited `WAIT_S` for a missing one, those beyond the bound, and those that follow."""
        while self._waiting and (
            len(self._waiting) > MAX_WAITING_PACKETS
            or now - min(arrival for _, arrival in self._waiting.values()) >= WAIT_S
        ):
            yield self._skip()
            yield from self._in_order()

    def _all_waiting(self) -> Iterator[OrderedPacket]:
        while self._waiting:
            yield self._skip()
            yield from self._in_order()

    def _skip(self) -> OrderedPacket:
        """Give up the missing packets before the first waiting one, and emit that one."""
        expected = self._next or 0
        first = min(self._waiting, key=lambda sequence: (sequence - expected) % _NUMBERS)
        return self._emit(self._waiting.pop(first)[0], True)

    def _in_order(self) -> Iterator[OrderedPacket]:
        while self._next in self._waiting:
            yield self._emit(self._waiting.pop(self._next)[0], False)

    def _emit(self, packet: Packet, after_loss: bool) -> OrderedPacket:
        self._next = (packet.sequence + 1) % _NUMBERS
        return OrderedPacket(packet, after_loss)


@dataclass(frozen=True, slots=True)
class MissingAudio:
    """A gap of `samples` samples at 16 kHz. `is_lost`: the network lost packets. Otherwise the client sent none because
    it was silent (DTX)."""

    samples: int
    is_lost: bool


# Samples at 16 kHz, or a gap.
TrackAudio = NDArray[np.float32] | MissingAudio


def read_packet(data: bytes, payload_type: int) -> tuple[int, Packet] | None:
    """The source (SSRC) and the content of an RTP packet; None if it is not of this payload type, or not valid."""
    if len(data) < HEADER.size:
        return None
    first, second, sequence, timestamp, source = HEADER.unpack_from(data)
    if first >> 6 != 2 or second & 0x7F != payload_type:
        return None
    # After the fixed header: the contributing sources, then a header extension.
    start, end = HEADER.size + 4 * (first & 0x0F), len(data)
    if first & 0x10:
        if start + 4 > end:
            return None
        start += 4 + 4 * int.from_bytes(data[start + 2 : start + 4])
    # The last byte of a padded packet is the length of the padding.
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
        # The timestamp that the next packet has if no audio is missing before it.
        self._next_timestamp: int | None = None
        # When the first packet was decoded.
        self._began = 0.0
        # Samples at 48 kHz so far, decoded and missing ones.
        self._samples = 0

    @property
    def is_waiting(self) -> bool:
        return self._buffer.is_waiting

    def receive(self, data: bytes) -> Iterator[TrackAudio]:
        """Accept a decrypted RTP packet; yields the samples and the gaps that are in order now."""
        source_and_packet = read_packet(data, self._payload_type)
        if source_and_packet is None:
            return
        source, packet = source_and_packet
        now = self._clock()
        if source != self._source:
            # A new source has its own sequence numbers and timestamps, so a gap before it is unknown.
            for ordered in self._buffer.expired(float("inf")):
                yield from self._decode(ordered)
            self._source, self._buffer, self._next_timestamp = source, JitterBuffer(), None
        for ordered in self._buffer.add(packet, now):
            yield from self._decode(ordered)

    def expired(self) -> Iterator[TrackAudio]:
        """The samples and the gaps of packets that have waited `WAIT_S` for a missing one."""
        for ordered in self._buffer.expired(self._clock()):
            yield from self._decode(ordered)

    def _decode(self, ordered: OrderedPacket) -> Iterator[TrackAudio]:
        packet = ordered.packet
        if not self._samples:
            self._began = self._clock()
        missing = 0
        if self._next_timestamp is not None:
            ahead = (packet.timestamp - self._next_timestamp + _HALF_TIMES) % _TIMES - _HALF_TIMES
            missing = max(0, min(ahead, self._max_advance() - MAX_PACKET_SAMPLES))
        if missing >= OPUS_RATE // MODEL_RATE:
            rest = self._resampler.flush()
            if len(rest):
                yield rest
            self._samples += missing
            yield MissingAudio(missing * MODEL_RATE // OPUS_RATE, ordered.after_loss)
        if self._max_advance() < MAX_PACKET_SAMPLES:
            return
        decoded = self._decoder.decode(packet.payload)
        self._next_timestamp = (packet.timestamp + len(decoded)) % _TIMES
        self._samples += len(decoded)
        samples = self._resampler.resample(decoded)
        if len(samples):
            yield samples

    def _max_advance(self) -> int:
        """Samples at 48 kHz by which the audio may advance now without running too far ahead of the clock."""
        passed = (self._clock() - self._began) * CLOCK_DRIFT
        return int((passed + MAX_AHEAD_S) * OPUS_RATE) - self._samples


class _OpusDecoder:
    """libopus, used through PyAV. A packet that is not valid Opus gives no samples."""

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
