"""One gateway as an engine sees it: its numbering, its mirror of the input cache, its streams, what waits for it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from engine import messages
from engine.boundary import codec
from engine.boundary.codec import Frames, Payload
from engine.boundary.input_cache import ReceiverCache
from engine.boundary.sockets import Numbering


@dataclass(slots=True)
class HostedStream:
    """Where a stream of the loop belongs."""

    peer: Peer
    name: str
    live: bool
    # When it last made work; a new stream is expected to.
    heard_at: float
    reported: int = 0
    speaking: bool = False


@dataclass(slots=True)
class Peer:
    """One gateway."""

    name: bytes
    gateway: str
    number: int
    cache: ReceiverCache[Payload]
    heard_at: float
    numbering: Numbering = field(default_factory=Numbering)
    inbox: deque[tuple[codec.Batch, Frames]] = field(default_factory=deque)
    # Data that was sent again for the batch at the head of the inbox, and hashes that nobody has data for.
    repaired: dict[bytes, Payload] = field(default_factory=dict)
    gone: set[bytes] = field(default_factory=set)
    asked_at: float | None = None
    outputs: list[messages.Output] = field(default_factory=list)
    streams: set[str] = field(default_factory=set)
    acknowledged: int = 0
    spoke_at: float = 0.0

    def loop_name(self, stream: str) -> str:
        """The loop's name of a stream: two gateways may use one id, and the crash record must tell whose it was."""
        return f"{self.gateway}/{self.number}/{stream}"
