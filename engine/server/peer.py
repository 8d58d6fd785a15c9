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
    """Where a stream of the loop belongs, and what its gateway calls it."""

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
    cache: ReceiverCache[Payload]
    heard_at: float
    numbering: Numbering = field(default_factory=Numbering)
    inbox: deque[tuple[codec.Batch, Frames]] = field(default_factory=deque)
    # Data that was sent again for the batch at the head of the inbox, and hashes that nobody has data for.
    repaired: dict[bytes, Payload] = field(default_factory=dict)
    gone: set[bytes] = field(default_factory=set)
    asked_at: float | None = None
    # Messages that were none, since the last one that was taken.
    unreadable: int = 0
    outputs: list[messages.Output] = field(default_factory=list)
    # The loop's name of each stream that takes commands, by the gateway's own.
    streams: dict[str, str] = field(default_factory=dict)
    acknowledged: int = 0
    spoke_at: float = 0.0


class Roster:
    """Every stream of the loop, and whose it is.

    Two gateways may use the same name, and one gateway may use a name again while the loop has yet to say that the
    stream before has ended. So each opening gets a name of its own in the loop, and no two are ever confused.
    """

    def __init__(self) -> None:
        self.streams: dict[str, HostedStream] = {}
        # Whether streams have come or gone since somebody last looked.
        self.changed = False
        self._openings = 0

    def open(self, peer: Peer, stream: str, live: bool, now: float) -> str:
        """The loop's name of a new stream. It tells whose the stream was when the engine is gone."""
        self._openings += 1
        name = f"{peer.gateway}/{self._openings}/{stream}"
        self.streams[name] = HostedStream(peer, stream, live, now)
        peer.streams[stream] = name
        self.changed = True
        return name

    def forget(self, name: str) -> None:
        """The loop has no such stream any more. Harmless for one that is not there."""
        hosted = self.streams.pop(name, None)
        if hosted is not None:
            self.release(hosted.peer, hosted.name, name)
            self.changed = True

    def find(self, name: str) -> HostedStream | None:
        """Whose a stream of the loop is; None if nobody wants to hear of it: its gateway has opened another since."""
        hosted = self.streams.get(name)
        if hosted is None or hosted.peer.streams.get(hosted.name, name) != name:
            return None
        return hosted

    def release(self, peer: Peer, stream: str, name: str) -> None:
        """The stream takes no more commands: what its gateway calls by this name from now on is another."""
        if peer.streams.get(stream) == name:
            del peer.streams[stream]

    def leave(self, peer: Peer) -> list[str]:
        """Forget all streams of a gateway; the loop's names of them."""
        names = [name for name, hosted in self.streams.items() if hosted.peer is peer]
        for name in names:
            self.forget(name)
        return names
