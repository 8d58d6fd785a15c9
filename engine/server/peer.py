"""One gateway as an engine sees it: its numbering, its mirror of the input cache, its streams, what waits for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine import messages
from engine.boundary import codec
from engine.boundary.codec import Frames, Payload
from engine.boundary.input_cache import ReceiverCache
from engine.boundary.sockets import Numbering

# Outputs kept of a stream until its gateway accounts for them. Without a will nobody does, and few are kept.
MOST_OUTPUTS_KEPT = 4096
OUTPUTS_KEPT_WITHOUT_HANDOFF = 64


@dataclass(slots=True)
class HostedStream:
    """Where a stream of the loop belongs, what its gateway calls it, and how far it has come.

    `peer` is None while its gateway is lost and no other has adopted it.
    """

    peer: Peer | None
    name: str
    live: bool
    # When it last made work; a new stream is expected to.
    heard_at: float
    loop_name: str
    opening: messages.Open
    # Where its audio ends, and where the current segment of it began.
    end: int
    end_sample: int = 0
    segment: int = 0
    # The last flush that came, and the last that was answered; the position of the next token.
    flushes: int = 0
    answered: int = 0
    tokens: int = 0
    # Positions computed, and how far its gateway was told that it is.
    computed: int = 0
    reported: int = 0
    speaking: bool = False
    # Outputs with their numbers, from the first that its gateway does not account for.
    told: int = 0
    outputs: deque[tuple[int, messages.Output]] = field(default_factory=deque)
    accounted: bool = False

    def fed(self, items: Sequence[messages.Item], samples_per_position: int) -> None:
        for item in items[-1:]:
            self.end = item.offset + item.length
            came = item.length * samples_per_position if item.samples is None else item.samples
            self.end_sample = item.sample + came

    def flushed(self, tag: int, pause: int | None) -> None:
        self.flushes = tag
        if pause is None:
            self.segment = self.end_sample

    def finished(self) -> None:
        self.segment = self.end_sample

    def tell(self, output: messages.Output) -> None:
        """Say something, to the gateway if there is one; kept until it is accounted for."""
        self.told += 1
        if isinstance(output, messages.Flushed):
            self.answered = output.tag
        elif isinstance(output, messages.Text):
            self.tokens += len(output.tokens)
        self.outputs.append((self.told, output))
        if len(self.outputs) > (MOST_OUTPUTS_KEPT if self.accounted else OUTPUTS_KEPT_WITHOUT_HANDOFF):
            self.outputs.popleft()
        if self.peer is not None:
            self.peer.outputs.append(output)

    def forget_outputs(self, consumed: int) -> None:
        """The first `consumed` outputs are accounted for."""
        self.accounted = True
        while self.outputs and self.outputs[0][0] <= consumed:
            self.outputs.popleft()


@dataclass(slots=True)
class Peer:
    """One gateway."""

    name: bytes
    gateway: str
    cache: ReceiverCache[Payload]
    heard_at: float
    numbering: Numbering = field(default_factory=Numbering)
    # Batches to be taken in, and when each of them came.
    inbox: deque[tuple[codec.Batch, Frames, float]] = field(default_factory=deque)
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

    @property
    def waits_for_a_turn(self) -> bool:
        """There is a batch that nothing keeps from being taken in. A gateway that does not take its outputs is not
        served until it does: that bounds what waits for it."""
        return bool(self.inbox) and self.asked_at is None and self.numbering.may_send

    @property
    def has_room(self) -> bool:
        """Little enough is under way to it, and waits for it, for more."""
        return self.numbering.may_send and len(self.outputs) < MOST_OUTPUTS_KEPT


class HostedStreams:
    """Every stream of the loop, and whose it is.

    Two gateways may use the same name, and one gateway may use a name again while the loop has yet to say that the
    stream before has ended. So each opening gets a name of its own in the loop, and no two are ever confused.
    """

    def __init__(self) -> None:
        self.streams: dict[str, HostedStream] = {}
        # Whether streams have come or gone since somebody last looked.
        self.changed = False
        self._openings = 0

    def open(self, peer: Peer, opening: messages.Open, first_position: int, now: float) -> str:
        """The loop's name of a new stream. It tells whose the stream was when the engine is gone."""
        self._openings += 1
        stream = opening.stream
        name = f"{peer.gateway}/{self._openings}/{stream}"
        hosted = HostedStream(peer, stream, opening.live, now, name, opening, first_position)
        hosted.tokens = first_position + len(opening.forced_tokens)
        self.streams[name] = hosted
        peer.streams[stream] = name
        self.changed = True
        return name

    def forget(self, name: str) -> None:
        """The loop has no such stream any more. Harmless for one that is not there."""
        hosted = self.streams.pop(name, None)
        if hosted is not None:
            if hosted.peer is not None:
                self.release(hosted.peer, hosted.name, name)
            self.changed = True

    def find(self, name: str) -> HostedStream | None:
        """Whose a stream of the loop is; None if nobody wants to hear of it: its gateway has opened another since."""
        hosted = self.streams.get(name)
        if hosted is not None and hosted.peer is not None and hosted.peer.streams.get(hosted.name, name) != name:
            return None
        return hosted

    def release(self, peer: Peer, stream: str, name: str) -> None:
        """The stream takes no more commands: what its gateway calls by this name from now on is another."""
        if peer.streams.get(stream) == name:
            del peer.streams[stream]

    def detach(self, hosted: HostedStream) -> None:
        """No gateway has the stream now; what its last one still sends is not for it."""
        if hosted.peer is not None:
            self.release(hosted.peer, hosted.name, hosted.loop_name)
        hosted.peer = None

    def attach(self, hosted: HostedStream, peer: Peer) -> None:
        """This gateway has the stream from now on."""
        hosted.peer = peer
        # It is told at once how far the stream is.
        hosted.reported, self.changed = -1, True
        if hosted.loop_name in self.streams:
            peer.streams[hosted.name] = hosted.loop_name

    def leave(self, peer: Peer) -> list[str]:
        """Forget all streams of a gateway; the loop's names of them."""
        names = [name for name, hosted in self.streams.items() if hosted.peer is peer]
        for name in names:
            self.forget(name)
        return names
