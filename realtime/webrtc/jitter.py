"""The jitter buffer of a WebRTC call: puts RTP packets in order, and marks where packets are missing.

`opus_track.py` uses one for each call. A late packet is waited for, but not longer than `WAIT_S`, and not after
`MAX_HELD_PACKETS` later ones have arrived.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

# Seconds for which later packets wait for a missing one.
WAIT_S = 0.2
MAX_HELD_PACKETS = 50
# A sequence number that is farther away begins a new count: the sender was restarted, or lies.
MAX_JUMP = 3000
_WRAP, _HALF = 1 << 16, 1 << 15


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
        ahead = (packet.sequence - self._next + _HALF) % _WRAP - _HALF
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
        first = min(self._held, key=lambda sequence: (sequence - expected) % _WRAP)
        return self._passed(self._held.pop(first)[0], True)

    def _in_order(self) -> Iterator[Arrived]:
        while self._next in self._held:
            yield self._passed(self._held.pop(self._next)[0], False)

    def _passed(self, packet: Packet, after_loss: bool) -> Arrived:
        self._next = (packet.sequence + 1) % _WRAP
        return Arrived(packet, after_loss)
