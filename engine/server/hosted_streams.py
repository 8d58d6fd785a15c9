"""State of the engine's host: one connected gateway (`Peer`), and the streams of all gateways (`HostedStreams`).

The host is `engine/server/host.py`. A `Peer` has its connection's message numbers, its input cache, and the messages
waiting in both directions. A `HostedStream` has what the host knows of a stream: its gateway, the end of its audio, and
the outputs and commands that are kept in case another gateway adopts it. The state for computing the stream is in the
scheduler (`engine/core/stream.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field

from engine import messages
from engine.boundary import codec
from engine.boundary.codec import Frames, Payload
from engine.boundary.input_cache import ReceiverCache
from engine.boundary.replay import ReplayLog
from engine.boundary.sockets import Numbering
from engine.spec import ModelSpec

# Most outputs kept per stream until a saved handoff includes them, and for streams whose session saves no handoffs.
MAX_OUTPUTS_KEPT = 4096
OUTPUTS_KEPT_WITHOUT_HANDOFF = 64


@dataclass(slots=True)
class HostedStream:
    """A stream of the loop: its gateway, its names, its audio and its progress."""

    # None while its gateway is lost or has released the session, and no other one has adopted it.
    peer: Peer | None
    # The gateway's name for the stream.
    name: str
    live: bool
    # When it last caused work (clock seconds); the opening counts as work.
    last_active_at: float
    opened_at: float
    # The loop's name for the stream.
    loop_name: str
    # The command that opened it, without audio and with the current turn rule.
    opening: messages.Open
    # End of its audio (position and sample), and the sample at which the current segment began.
    end: int
    end_sample: int = 0
    segment: int = 0
    # Tags of the last flush received and of the last flush answered.
    flushes: int = 0
    answered: int = 0
    # Position of the next token.
    next_token: int = 0
    # Positions computed when that was last checked, and positions reported to the gateway.
    computed: int = 0
    reported: int = 0
    # There is speech now, or the possible start of it.
    speaking: bool = False
    # Number of outputs so far, sent or not, and (sequence number, output) of those that no saved handoff includes.
    output_count: int = 0
    outputs: deque[tuple[int, messages.Output]] = field(default_factory=deque)
    # The session saves handoffs.
    saves_handoffs: bool = False
    # Speech before this sample was sent, and the speech track after it.
    heard_until: int = 0
    track: messages.TrackState | None = None
    # For an adopting gateway that rebuilds the stream on another engine: the last state sent, if any, and the commands
    # since then with the audio that the state needs. `kept` is None if the stream is not rebuilt from a state.
    state: messages.StreamState | None = None
    kept: ReplayLog | None = None
    # The last state of its speaker labels.
    labels: messages.Saved | None = None

    def on_audio(self, items: Sequence[messages.Item], samples_per_position: int) -> None:
        for item in items[-1:]:
            self.end = item.offset + item.length
            self.end_sample = item.sample + item.covered_samples(samples_per_position)
        if self.kept is not None:
            # Copies: the scheduler removes the payload of an item that it has planned.
            self.kept.add([copy(item) for item in items])

    def on_flush(self, tag: int, pause: int | None, ends_speech: bool = False) -> None:
        if self.kept is not None:
            self.kept.mark_flush(tag, range(self.answered + 1, tag), pause, ends_speech)
        self.flushes = max(self.flushes, tag)
        if pause is None:
            self.segment = self.end_sample

    def on_turn_rule(self, turns: messages.TurnRule | None) -> None:
        self.opening.turns = turns
        if self.kept is not None:
            self.kept.mark_turns(turns)

    def on_finish(self) -> None:
        self.segment = self.end_sample

    def send_output(self, output: messages.Output) -> None:
        """Send an output to the gateway, if there is one, and keep it until a saved handoff includes it."""
        self.output_count += 1
        if isinstance(output, messages.Flushed):
            self.answered = max(self.answered, output.tag)
        elif isinstance(output, messages.Text):
            self.next_token += len(output.tokens)
        elif isinstance(output, messages.Speech):
            if output.end > self.heard_until:
                self.heard_until, self.track = output.end, output.track
        elif isinstance(output, messages.Labels):
            self.labels = output.state or self.labels
        elif isinstance(output, messages.StreamState) and self.kept is not None:
            self.state = output
            self.kept.drop_before(output.audio_from)
            self.kept.drop_flushes(output.tag)
        self.outputs.append((self.output_count, output))
        if len(self.outputs) > (MAX_OUTPUTS_KEPT if self.saves_handoffs else OUTPUTS_KEPT_WITHOUT_HANDOFF):
            self.outputs.popleft()
        if self.peer is not None:
            self.peer.outputs.append(output)

    def forget_outputs(self, consumed: int) -> None:
        """A saved handoff includes the first `consumed` outputs."""
        self.saves_handoffs = True
        while self.outputs and self.outputs[0][0] <= consumed:
            self.outputs.popleft()


@dataclass(slots=True)
class Peer:
    """One gateway's connection."""

    name: bytes
    gateway: str
    cache: ReceiverCache[Payload]
    last_received_at: float
    numbering: Numbering = field(default_factory=Numbering)
    # Batches that are not applied yet, each with the time at which it arrived (clock seconds).
    inbox: deque[tuple[codec.Batch, Frames, float]] = field(default_factory=deque)
    # For the first batch of the inbox: payloads that were sent again, and hashes whose payload neither side has.
    repaired: dict[bytes, Payload] = field(default_factory=dict)
    gone: set[bytes] = field(default_factory=set)
    # When `Missing` was sent for the first batch of the inbox; None: nothing is missing.
    missing_sent_at: float | None = None
    # Consecutive undecodable messages.
    unreadable: int = 0
    # Outputs to send with the next message.
    outputs: list[messages.Output] = field(default_factory=list)
    # The gateway's name -> the loop's name, of each stream that accepts commands.
    streams: dict[str, str] = field(default_factory=dict)
    # Number of the last message that was acknowledged, and when a message was last sent (clock seconds).
    acknowledged: int = 0
    last_sent_at: float = 0.0

    @property
    def has_batch(self) -> bool:
        """Whether a batch can be applied. For a gateway that does not acknowledge its outputs none is applied until it
        does; this bounds the outputs waiting for it."""
        return bool(self.inbox) and self.missing_sent_at is None and self.numbering.may_send

    @property
    def has_room(self) -> bool:
        """Whether few enough outputs are waiting for it or unacknowledged to add more."""
        return self.numbering.may_send and len(self.outputs) < MAX_OUTPUTS_KEPT


class HostedStreams:
    """Every stream of the loop, and its gateway.

    Two gateways may use the same name for a stream, and one gateway may use a name again before the loop has reported
    the end of the stream before. So each opened stream gets a unique name in the loop.
    """

    def __init__(self) -> None:
        self.streams: dict[str, HostedStream] = {}
        # Streams were opened or ended since the last status report.
        self.changed = False
        self._openings = 0

    def open(self, peer: Peer, opening: messages.Open, spec: ModelSpec, now: float) -> str:
        """Register a new stream; returns its name in the loop. The crash record needs the gateway's name in it."""
        self._openings += 1
        stream = opening.stream
        name = f"{peer.gateway}/{self._openings}/{stream}"
        state, first_position = opening.state, spec.prefix_positions
        hosted = HostedStream(peer, stream, opening.live, now, now, name, opening, first_position)
        hosted.end = first_position if state is None else state.position
        hosted.end_sample, hosted.segment = opening.sample, opening.segment
        hosted.next_token = first_position + len(opening.forced_tokens)
        hosted.heard_until, hosted.flushes, hosted.answered = opening.heard_until, opening.flushes, opening.answered
        if spec.rereads_window and opening.live:
            hosted.state, hosted.kept = state, ReplayLog(spec)
        self.streams[name] = hosted
        peer.streams[stream] = name
        self.changed = True
        return name

    def forget(self, name: str) -> None:
        """Remove a stream that the loop has ended, or that the host gives up. Does nothing if it is unknown."""
        hosted = self.streams.pop(name, None)
        if hosted is not None:
            if hosted.peer is not None:
                self.release(hosted.peer, hosted.name, name)
            self.changed = True

    def find(self, name: str) -> HostedStream | None:
        """The stream with this name in the loop; None if its gateway has opened another one under its name since."""
        hosted = self.streams.get(name)
        if hosted is not None and hosted.peer is not None and hosted.peer.streams.get(hosted.name, name) != name:
            return None
        return hosted

    def release(self, peer: Peer, stream: str, name: str) -> None:
        """The stream accepts no more commands; its gateway may use the name for another one."""
        if peer.streams.get(stream) == name:
            del peer.streams[stream]

    def detach(self, hosted: HostedStream) -> None:
        """The stream has no gateway any more; later commands of its gateway do not reach it."""
        if hosted.peer is not None:
            self.release(hosted.peer, hosted.name, hosted.loop_name)
        hosted.peer = None

    def attach(self, hosted: HostedStream, peer: Peer) -> None:
        """The stream belongs to this gateway from now on."""
        hosted.peer = peer
        # Its progress is to be reported at once.
        hosted.reported, self.changed = -1, True
        if hosted.loop_name in self.streams:
            peer.streams[hosted.name] = hosted.loop_name

    def forget_all(self, peer: Peer) -> list[str]:
        """Forget all streams of a gateway; returns the loop's names of them."""
        names = [name for name, hosted in self.streams.items() if hosted.peer is peer]
        for name in names:
            self.forget(name)
        return names
