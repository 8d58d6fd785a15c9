"""`EngineHost`: the engine's side of all links; connects the engine loop with any number of gateways.

`engine/server/main.py` runs it on the engine's one thread. A tick receives messages, passes their commands to the loop
(`CommandIntake`), runs one step, and sends one message to each gateway that has outputs, with the engine's load
(`LoadReport`). Each gateway has its own cache, numbering and streams (`engine/server/hosted_streams.py`), and cannot
see or harm those of the others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from engine import messages
from engine.boundary import codec
from engine.boundary.codec import (
    Frames,
    Payload,
    PayloadPlace,
    UnreadableCommand,
    WireError,
    decode_commands,
    error_code_of,
    package_version,
)
from engine.boundary.crash_suspects import CrashRecord
from engine.boundary.input_cache import ReceiverCache
from engine.boundary.items import complaint_about, positions_in
from engine.boundary.sockets import (
    BEAT_SECONDS,
    SILENCE_SECONDS,
    STOPPED_SECONDS,
    Arrival,
    EngineSocket,
)
from engine.errors import AtCapacity, BadItem, DuplicateStream, EngineDead, StreamFailed
from engine.server.handoff import HandoffTable
from engine.server.hosted_streams import HostedStreams, Peer
from engine.server.load_report import LoadReport
from engine.server.loop import EngineLoop

# Intake of a gateway's batch: its audio goes through the gateway's cache, then its commands are applied one by one. A
# bad or unreadable command affects only its own stream.

logger = logging.getLogger(__name__)

# (key, size in bytes, data or None if only the hash was sent).
Keyed = tuple[bytes, int, Payload | None]


class CommandIntake:
    """Checks the commands of gateways and passes them to the loop, under the loop's names for streams.

    `clock`: seconds.
    """

    def __init__(
        self, loop: EngineLoop, hosted_streams: HostedStreams, handoffs: HandoffTable, clock: Callable[[], float]
    ) -> None:
        self._loop = loop
        self.hosted = hosted_streams
        self.handoffs = handoffs
        self._clock = clock
        # No new streams are accepted.
        self.draining = False
        # Commands not passed to the loop yet. They must be passed on before its streams are looked at.
        self._coming: list[messages.Command] = []

    def apply(self, peer: Peer, batch: codec.Batch, frames: Frames, now: int) -> list[bytes]:
        """Apply a batch. Returns the keys of missing data, which must be sent again first; then nothing is applied."""
        keyed = [self._keyed(peer, data, frames) for data in batch.data]
        missing = [key for key in peer.cache.missing(keyed, peer.repaired) if key not in peer.gone]
        if missing:
            return missing
        audio = [(data.key, payload) for data, payload in zip(batch.data, self._unpack(peer, keyed), strict=True)]
        try:
            for command in decode_commands(batch.commands):
                self._take_command(peer, command, audio, now)
        finally:
            self._hand_on(now)
        return []

    @staticmethod
    def _keyed(peer: Peer, data: PayloadPlace, frames: Frames) -> Keyed:
        try:
            payload = codec.payload_of(data, frames)
        except WireError as error:
            logger.warning("gateway %s sent invalid audio: %s", peer.gateway, error)
            peer.gone.add(data.key)
            payload = None
        return data.key, 0 if payload is None else payload.nbytes, payload

    @staticmethod
    def _unpack(peer: Peer, keyed: Sequence[Keyed]) -> list[Payload | None]:
        sized = [
            (key, peer.repaired[key].nbytes if data is None and key in peer.repaired else size, data)
            for key, size, data in keyed
        ]
        found = peer.cache.resolve(sized, peer.repaired)
        peer.repaired, peer.gone = {}, set()
        return found

    # Commands.

    def _take_command(
        self,
        peer: Peer,
        command: messages.Command | UnreadableCommand,
        audio: Sequence[tuple[bytes, Payload | None]],
        now: int,
    ) -> None:
        if isinstance(command, messages.Feed):
            self._feed(peer, command, audio)
        elif isinstance(command, messages.SessionCommand):
            self.handoffs.on_command(peer, command)
        elif isinstance(command, messages.Open):
            self._hand_on(now)
            self._open(peer, command, audio)
        elif isinstance(command, UnreadableCommand):
            self._end_unread(peer, command)
        elif (name := peer.streams.get(command.stream)) is not None:
            # An unknown stream has ended; its gateway has been told, but sent this command before it knew.
            self._take_request(peer, name, command)

    def _feed(self, peer: Peer, command: messages.Feed, audio: Sequence[tuple[bytes, Payload | None]]) -> None:
        name = peer.streams.get(command.stream)
        if name is None:
            return
        try:
            self._fill_in(name, command.items, audio)
        except BadItem as error:
            self._fail(name, str(error))
        else:
            self.hosted.streams[name].on_audio(command.items, self._loop.scheduler.spec.samples_per_position)
            self._coming.append(messages.Feed(name, command.items))

    def _take_request(
        self, peer: Peer, name: str, command: messages.Flush | messages.ChangeTurns | messages.Finish | messages.Abort
    ) -> None:
        match command:
            case messages.Flush():
                self.hosted.streams[name].flushed(command.tag, command.pause, command.ends_speech)
                self._coming.append(
                    messages.Flush(name, command.tag, command.pause, command.ends_speech, command.turn_over)
                )
            case messages.ChangeTurns():
                self.hosted.streams[name].turns_changed(command.turns)
                self._coming.append(messages.ChangeTurns(name, command.turns))
            case messages.Finish():
                self.hosted.streams[name].finished()
                self._coming.append(messages.Finish(name))
            case messages.Abort():
                self.hosted.release(peer, command.stream, name)
                self._coming.append(messages.Abort(name))

    def _open(self, peer: Peer, command: messages.Open, audio: Sequence[tuple[bytes, Payload | None]]) -> None:
        open_as = peer.streams.get(command.stream)
        if open_as is not None and open_as in self._loop.scheduler.streams:
            error = DuplicateStream(command.stream, "is open already; use another id")
            peer.outputs.append(messages.Refused(command.stream, type(error).__name__, str(error)))
            return
        if self.draining:
            refusal = AtCapacity(command.stream, "this engine is draining and takes no new streams; try again")
            peer.outputs.append(messages.Failed(command.stream, type(refusal).__name__, str(refusal)))
            return
        spec = self._loop.scheduler.spec
        name = self.hosted.open(peer, command, spec, self._clock())
        try:
            self._fill_in(name, command.items, audio)
        except BadItem as error:
            self._fail(name, str(error))
        else:
            self.hosted.streams[name].on_audio(command.items, spec.samples_per_position)
            self._coming.append(msgspec.structs.replace(command, stream=name))
        # The command is kept with the stream, for its options; its audio is not.
        command.items = []

    def _fill_in(
        self, name: str, items: Sequence[messages.Item], audio: Sequence[tuple[bytes, Payload | None]]
    ) -> None:
        """Give items the audio that came with their batch. Raises BadItem."""
        spec = self._loop.scheduler.spec
        for item in items:
            index, item.data = item.data, None
            item.key, item.payload, item.arrival, item.embeds = b"", None, 0, 0
            if index is not None:
                if index >= len(audio):
                    raise BadItem(name, f"the item at position {item.offset} refers to audio that was not sent")
                item.key, item.payload = audio[index]
            complaint = complaint_about(item, spec)
            if complaint is not None:
                raise BadItem(name, f"item at position {item.offset}: {complaint}")
            if item.key and item.payload is None:
                why = f"the engine has no data for the hash {item.key.hex()} and none came with it"
                raise BadItem(name, f"{why}; send the item's data")

    # Failed streams.

    def _end_unread(self, peer: Peer, unread: UnreadableCommand) -> None:
        logger.warning("gateway %s, stream %s: %s", peer.gateway, unread.stream, unread.why)
        if unread.stream is None:
            return
        name = peer.streams.get(unread.stream)
        if name is not None:
            self._fail(name, unread.why, error_code_of(unread.opens))
        elif unread.opens:
            text = f"stream {unread.stream!r}: {unread.why}"
            peer.outputs.append(messages.Failed(unread.stream, error_code_of(unread.opens), text))

    def _fail(self, name: str, why: str, code: str = BadItem.__name__) -> None:
        """End one stream with an error."""
        hosted = self.hosted.streams[name]
        hosted.send_output(messages.Failed(hosted.name, code, why.replace(name, hosted.name)))
        self.hosted.forget(name)
        self._coming.append(messages.Abort(name))

    def _hand_on(self, now: int) -> None:
        coming, self._coming = self._coming, []
        self._loop.submit(coming, now)


# Seconds that an acknowledgement may wait for outputs, and seconds between reports of progress and of the load.
ACK_SECONDS = 0.02
PROGRESS_SECONDS = 0.04
STATUS_SECONDS = 0.08
# Items of audio taken in before the next step, per position that a step reads of a stream, and the fewest. The number
# of other commands that count as one item: with appends of 20 ms a position comes with four saved handoffs.
ITEMS_A_POSITION = 2
LEAST_ITEMS = 256
COMMANDS_AN_ITEM = 4
# Longest time spent on taking in commands. Opening a stream with many keywords takes a third of a second; an engine
# that opened many at once would be taken for dead.
TAKE_SECONDS = 0.1
# Longest time spent on receiving messages before the next step.
RECEIVE_SECONDS = 0.02
# Consecutive undecodable messages after which a gateway must connect again.
MOST_UNREADABLE = 5


@dataclass(frozen=True, slots=True)
class DrainRequest:
    """Whether the engine was asked to drain (accept nothing new, end when empty), and how long that may take."""

    asked: Callable[[], bool]
    seconds: float


class EngineHost:
    """The engine's side of all links, around one loop. `clock`: monotonic seconds."""

    def __init__(
        self,
        loop: EngineLoop,
        socket: EngineSocket,
        engine: str,
        clock: Callable[[], float],
        record: CrashRecord | None = None,
    ) -> None:
        self._loop = loop
        self._record = CrashRecord() if record is None else record
        loop.announce = self._record.write
        self._socket = socket
        self._engine = engine
        self._clock = clock
        self.peers: dict[bytes, Peer] = {}
        self.hosted = HostedStreams()
        self.handoffs = HandoffTable(self.hosted, clock, self._reaches, self._apply_received, self._abort)
        self._intake = CommandIntake(loop, self.hosted, self.handoffs, clock)
        self._progress_at = self._status_at = 0.0
        # When the last report was made, and from when on the silence of gateways counts: this process may be stopped.
        self._reported_at = self._silence_from = clock()
        self._drains_until = 0.0
        self.load = LoadReport(loop, clock())

    def serve(self, stop: Callable[[], bool], drain: DrainRequest | None = None) -> None:
        """Run until `stop` returns True or the engine has drained. Raises EngineDead if the loop fails for all
        streams."""
        while not stop() and not (drain is not None and drain.asked() and self.is_drained(drain.seconds)):
            self._socket.wait(0 if self._loop.has_work() or self._runnable() else self._patience())
            self.tick()

    def is_drained(self, seconds: float) -> bool:
        """Start draining if not started; returns whether nothing is left or the time is over."""
        now, status = self._clock(), self.load.status
        if not status.draining:
            logger.info("draining: %d streams and %d sessions to migrate", len(self.hosted.streams), len(self.handoffs))
            self._drains_until = now + seconds
            status.draining = self._intake.draining = True
            for peer in self.peers.values():
                peer.last_sent_at = now - BEAT_SECONDS
        nothing_left = not self.hosted.streams and not len(self.handoffs)
        return nothing_left or now >= self._drains_until

    def tick(self) -> None:
        """Receive all messages, take in batches, run one step, and send the results."""
        began, steps = self._clock(), self._loop.meter.totals
        stepped_ns = steps.ns
        self._receive_all()
        now = self._clock()
        self._take_turns(now)
        dead = self._step()
        self._report(now)
        if not self._loop.has_launched_step:
            self.load.spend_beside_steps(self._clock() - began - (steps.ns - stepped_ns) / 1e9)
        if dead is not None:
            raise EngineDead(dead)

    def _patience(self) -> float:
        """How long to wait for a message when there is nothing to do."""
        unacknowledged = any(peer.numbering.accepted > peer.acknowledged for peer in self.peers.values())
        return ACK_SECONDS if unacknowledged or self._loop.waits_for_results else BEAT_SECONDS / 4

    def _runnable(self) -> bool:
        return any(peer.waits_for_a_turn for peer in self.peers.values())

    # Arrivals.

    def _receive_all(self) -> None:
        """Receive what has arrived, for `RECEIVE_SECONDS` at most: a peer may send faster than messages are read. The
        socket reads its peers in turn, so the messages of the others come all the same."""
        until = self._clock() + RECEIVE_SECONDS
        while self._clock() <= until and (arrived := self._socket.receive()) is not None:
            self._receive(*arrived)

    def _receive(self, name: bytes, frames: Frames) -> None:
        peer = self.peers.get(name)
        try:
            message = codec.decode(frames, to_engine=True)
            if isinstance(message, codec.Hello):
                self._greet(name, message)
            elif peer is None:
                self._dismiss(name, "this engine does not know the connection; connect again")
            else:
                peer.last_received_at = self._clock()
                self._dispatch(peer, message, frames)
        except WireError as error:
            logger.warning("a gateway sent a message that cannot be decoded: %s", error)
            self._count_undecodable(name, peer, str(error))

    def _greet(self, name: bytes, hello: codec.Hello) -> None:
        spec = self._loop.scheduler.spec
        if hello.wire != codec.WIRE_VERSION:
            self._dismiss(
                name,
                f"the engine runs tickertape {package_version()} (wire {codec.WIRE_VERSION}), the gateway "
                f"{hello.version} (wire {hello.wire}); install the same version on both",
            )
            return
        if hello.model not in (None, spec.name):
            self._dismiss(name, f"the engine runs {spec.name!r}, the gateway wants {hello.model!r}")
            return
        # The gateway reconnects, or the connection's name was used by another one. Drop the old state: the gateway has
        # what it needs to open its streams again, and says which sessions it continues.
        for old in [peer for peer in self.peers.values() if peer.gateway == hello.gateway or peer.name == name]:
            self._drop(old, comes_back=True)
        cache: ReceiverCache[Payload] = ReceiverCache(max(0, hello.cache_bytes))
        self.peers[name] = Peer(name, hello.gateway, cache, self._clock())
        welcome = codec.Welcome(codec.WIRE_VERSION, package_version(), self._engine, spec, self.load.status)
        self._socket.send(name, codec.encode(welcome))

    def _dismiss(self, name: bytes, why: str) -> None:
        peer = self.peers.get(name)
        if peer is not None:
            self._drop(peer, comes_back=True)
        self._socket.send(name, codec.encode(codec.Unwelcome(why)))

    def _count_undecodable(self, name: bytes, peer: Peer | None, why: str) -> None:
        """A message could not be decoded. If it was a batch, its number is missed and it is sent again. A gateway that
        sends only such messages must connect again with new numbers; otherwise its streams would stall."""
        if peer is not None:
            peer.unreadable += 1
            if peer.unreadable < MOST_UNREADABLE:
                return
        self._dismiss(name, why)

    def _drop(self, peer: Peer, *, comes_back: bool = False) -> None:
        """Forget a gateway and its streams, except sessions that another gateway may adopt.

        A gateway that comes back opens its streams again. If it is gone for good, its last messages are applied first.
        """
        if not comes_back:
            self._apply_received(peer)
            if self.peers.get(peer.name) is not peer:
                return
        del self.peers[peer.name]
        self.handoffs.leave(peer)
        for name in self.hosted.leave(peer):
            self._abort(name)

    def _apply_received(self, peer: Peer) -> None:
        """Take in all received batches of a gateway."""
        while self._take_batch(peer, self._clock()):
            pass

    def _abort(self, name: str) -> None:
        self.hosted.forget(name)
        self._loop.submit([messages.Abort(name)], time.monotonic_ns())

    def _reaches(self, peer: Peer, wanted: messages.Wanted) -> bool:
        """Ask a gateway to give up a session; False if it is gone, which only a failed send shows."""
        if self.peers.get(peer.name) is not peer:
            return False
        beat = codec.Beat(peer.numbering.sent, peer.numbering.accepted, self.load.status)
        if not self._socket.send(peer.name, codec.encode(beat)):
            self._lose_gateway(peer)
            return False
        peer.outputs.append(wanted)
        return True

    def _dispatch(self, peer: Peer, message: Any, frames: Frames) -> None:
        numbering = peer.numbering
        match message:
            case codec.Batch():
                numbering.acknowledged(message.ack)
                arrival = numbering.classify(message.seq, len(peer.inbox))
                if arrival is Arrival.NEXT:
                    peer.inbox.append((message, frames, peer.last_received_at))
                elif arrival is Arrival.AFTER_A_GAP:
                    self._ask_again(peer)
            case codec.Beat():
                numbering.acknowledged(message.ack)
                if message.sent > numbering.accepted + len(peer.inbox):
                    self._ask_again(peer)
            case codec.ResendRequest():
                for kept in numbering.kept_since(message.seq):
                    self._socket.send(peer.name, kept)
            case codec.Repair():
                self._take_repair(peer, message, frames)
            case codec.Bye():
                self._drop(peer)

    def _take_repair(self, peer: Peer, repair: codec.Repair, frames: Frames) -> None:
        if repair.seq != peer.numbering.accepted + 1:
            return  # a second answer, because the question was repeated
        for data in repair.data:
            try:
                payload = codec.payload_of(data, frames)
            except WireError:
                payload = None
            if payload is None:
                peer.gone.add(data.key)
            else:
                peer.repaired[data.key] = payload
        peer.gone.update(repair.gone)
        peer.asked_at = None

    def _ask_again(self, peer: Peer) -> None:
        again = codec.ResendRequest(peer.numbering.accepted + len(peer.inbox) + 1)
        self._socket.send(peer.name, codec.encode(again))

    # Batches into the loop.

    def _take_turns(self, now: float) -> None:
        """Take in batches, one of each gateway in turn, but not more than a step has room for.

        A step computes one position of each stream (a stride for windowed models), and many of a stream that is
        rebuilt. An engine that is late and took in everything at once would never catch up.
        """
        positions = len(self.hosted.streams) * self._loop.scheduler.spec.stride_positions
        left = float(max(LEAST_ITEMS, ITEMS_A_POSITION * positions, self._loop.replay_room))
        peers = list(self.peers.values())
        while peers and left > 0 and self._clock() <= now + TAKE_SECONDS:
            for peer in peers:
                if peer.waits_for_a_turn:
                    batch = peer.inbox[0][0]
                    left -= max(self._positions(batch), len(batch.commands) / COMMANDS_AN_ITEM)
            peers = [peer for peer in peers if self._take_batch(peer, now)]

    def _positions(self, batch: codec.Batch) -> int:
        """Positions of the audio in a batch: those of a replay come in long items."""
        spec = self._loop.scheduler.spec
        return sum(positions_in(data.size, spec) for data in batch.data)

    def _take_batch(self, peer: Peer, now: float) -> bool:
        """Take in one batch; returns whether there may be another one."""
        if not (peer.inbox and peer.numbering.may_send):
            return False
        batch, frames, _ = peer.inbox[0]
        try:
            missing = self._intake.apply(peer, batch, frames, time.monotonic_ns())
        except Exception:
            logger.exception("a batch of gateway %s cannot be applied; the gateway must connect again", peer.gateway)
            self._dismiss(peer.name, "the engine could not apply a batch; connect again")
            return False
        if missing:
            if peer.asked_at is None or now - peer.asked_at > BEAT_SECONDS:
                peer.asked_at = now
                self._socket.send(peer.name, codec.encode(codec.Missing(batch.seq, missing)))
            return False
        peer.inbox.popleft()
        peer.asked_at, peer.unreadable = None, 0
        peer.numbering.accept(batch.seq)
        return True

    # Outputs.

    def _step(self) -> str | None:
        """Run one step if there is work; returns the reason if the engine died of it, else None."""
        dead = None
        self._loop.scheduler.advance_clock(time.monotonic_ns())
        if self._loop.has_work():
            result = self._loop.step()
            for output in [] if result is None else result.outputs:
                if isinstance(output, messages.Dead):
                    dead = output.message
                    for peer in self.peers.values():
                        peer.outputs.append(output)
                else:
                    self._route(output)
            if dead is None and not self._loop.has_launched_step:
                self._record.wipe()
        return dead

    def _route(self, output: Any) -> None:
        name, hosted = output.stream, self.hosted.find(output.stream)
        if isinstance(output, messages.Speech):
            if hosted is not None and output.probabilities:
                hosted.speaking = output.track.speaking
                if hosted.speaking or output.spoken or output.events:
                    hosted.last_active_at = self._clock()
        elif isinstance(output, (messages.Closed, messages.Failed)):
            self.hosted.forget(name)
        if hosted is None:
            return
        if isinstance(output, (messages.Failed, messages.Refused)):
            output.message = output.message.replace(name, hosted.name)
        output.stream = hosted.name
        hosted.send_output(output)

    def _report(self, now: float) -> None:
        self.load.count(self._loop)
        progress: dict[bytes, list[codec.Progress]] = {}
        if self.hosted.changed or now - self._progress_at >= PROGRESS_SECONDS:
            self._progress_at = now
            progress = self._progress(now)
            self.handoffs.tick(now)
        if self.hosted.changed or now - self._status_at >= STATUS_SECONDS:
            self._status_at, self.hosted.changed = now, False
            waited = [now - peer.inbox[0][2] for peer in self.peers.values() if peer.waits_for_a_turn]
            self.load.measure(self._loop, self.hosted.streams.values(), max(waited, default=0.0), now)
        if now - self._reported_at > STOPPED_SECONDS:
            self._silence_from = now
        self._reported_at = now
        for peer in list(self.peers.values()):
            if now - max(peer.last_received_at, self._silence_from) > SILENCE_SECONDS:
                logger.warning("gateway %s has been silent for %.0f s; its streams end", peer.gateway, SILENCE_SECONDS)
                self._drop(peer)
            elif peer.outputs or peer.name in progress:
                self._send(peer, self._update(peer, progress.get(peer.name, [])), now)
            elif self._beat_is_due(peer, now):
                beat = codec.Beat(peer.numbering.sent, peer.numbering.accepted, self.load.status)
                self._send(peer, codec.encode(beat), now)

    def _beat_is_due(self, peer: Peer, now: float) -> bool:
        unacknowledged = peer.numbering.accepted > peer.acknowledged
        return now - peer.last_sent_at >= (ACK_SECONDS if unacknowledged else BEAT_SECONDS)

    def _send(self, peer: Peer, frames: list[Any], now: float) -> None:
        """Send to a gateway. Only a failed send shows that a gateway is gone."""
        peer.acknowledged, peer.last_sent_at = peer.numbering.accepted, now
        if not self._socket.send(peer.name, frames):
            self._lose_gateway(peer)

    def _lose_gateway(self, peer: Peer) -> None:
        logger.warning("gateway %s is gone; its sessions wait to be adopted", peer.gateway)
        # Its last messages may have arrived since.
        self._receive_all()
        if self.peers.get(peer.name) is peer:
            self._drop(peer)

    def _update(self, peer: Peer, progress: list[codec.Progress]) -> list[Any]:
        try:
            frames = self._encode_update(peer, progress)
        except Exception:
            logger.exception("an output cannot be encoded; its stream is ended")
            self._end_unwritable(peer)
            frames = self._encode_update(peer, progress)
        peer.numbering.keep(frames)
        peer.outputs = []
        return frames

    def _encode_update(self, peer: Peer, progress: list[codec.Progress]) -> list[Any]:
        numbering = peer.numbering
        update = codec.Update(numbering.next_number, numbering.accepted, peer.outputs, progress, self.load.status)
        return codec.encode(update)

    def _end_unwritable(self, peer: Peer) -> None:
        """Replace the outputs that cannot be encoded by failures, and end their streams."""
        for index, output in enumerate(peer.outputs):
            try:
                codec.encode(output)
            except Exception as error:
                stream = getattr(output, "stream", "")
                text = f"stream {stream!r}: an output cannot be sent: {type(error).__name__}"
                peer.outputs[index] = messages.Failed(stream, StreamFailed.__name__, text)
                name = peer.streams.get(stream)
                if name is not None:
                    self.hosted.forget(name)
                    self._loop.submit([messages.Abort(name)], time.monotonic_ns())

    def _progress(self, now: float) -> dict[bytes, list[codec.Progress]]:
        """Progress of every stream that advanced since the last report, by peer."""
        progress: dict[bytes, list[codec.Progress]] = {}
        moving_is_work = not self._loop.silence_is_free
        for name, stream in self._loop.scheduler.streams.items():
            hosted = self.hosted.streams.get(name)
            if hosted is None:
                continue
            if moving_is_work and hosted.computed != stream.computed:
                hosted.computed, hosted.last_active_at = stream.computed, now
            reached = self._loop.reached(name)
            if hosted.reported != reached:
                hosted.reported = reached
                if hosted.peer is not None:
                    report = codec.Progress(hosted.name, reached)
                    progress.setdefault(hosted.peer.name, []).append(report)
        return progress
