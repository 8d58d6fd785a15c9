"""`EngineHost`: the engine's side of all links; connects the engine loop with any number of gateways.

`engine/server/main.py` runs it on the engine's one thread. A tick receives messages, passes their commands to the loop
(`CommandIntake`), runs one step, and sends one message to each gateway that has outputs. Each gateway has its own
cache, numbering and streams (`engine/server/hosted_streams.py`), and cannot see or harm those of the others.

With each update and heartbeat the host sends capacity, load and counters of the engine, as `Status` (`LoadReport`).
They come from the loop's meter (`engine/server/metering.py`), its scheduler and the host's streams. Gateways compute
from them how many more streams the engine can have (`engine/client/pool.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from typing import Any

import msgspec

from engine import messages
from engine.boundary import codec
from engine.boundary.codec import (
    Frames,
    Payload,
    PayloadPlace,
    Status,
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
from engine.options import COUNTED_SECONDS
from engine.server.handoff import HandoffTable
from engine.server.hosted_streams import HostedStream, HostedStreams, Peer
from engine.server.loop import EngineLoop

logger = logging.getLogger(__name__)

# The engine's load.

# Seconds over which the load is measured: the share of time spent on live streams, in steps and, between steps, on
# messages.
LOAD_SECONDS = 1.0
# With fewer recently active streams than this, all of them count, because all may be active at once by chance. With
# more, the number that is active at a time is estimated.
MANY_STREAMS = 64
# A stream is active if it had something to compute within this time. Until it has been open for NEW_SECONDS, it counts
# as active.
ACTIVE_NS = 400_000_000
NEW_SECONDS = 1.0
# Seconds over which the lengths of ticks are measured.
TICKS_SECONDS = 0.5
# Gateways are asked for one position more in each message if the engine's thread is busy for more than the first share
# of the time, without waiting for the device, and ticks take more than `LONG_TICK_SHARE` of a position's time; for one
# less if it is busy for less than the second share. A busy thread alone is no reason: while ticks are short, more work
# makes them fewer and longer, and then each stream costs less. Positions of one message are computed in one pass each,
# so longer messages cost the device more, and words come later by up to the time of their positions.
THREAD_BUSY_SHARE, THREAD_CALM_SHARE = 0.85, 0.75
LONG_TICK_SHARE = 0.35
MAX_MESSAGE_POSITIONS = 4
# The engine is busy if a tick takes more than the first share of a position's time, or if more than this share of its
# places for active streams is taken by at least `MANY_STREAMS`, until both are below the second share. While it is
# busy, silence is skipped sooner (`engine/server/skipped_silence.py`).
BUSY_SHARE, CALM_SHARE = 0.7, 0.55
# Standard deviations by which the estimate exceeds the number of streams that are active now. If more become active,
# some wait until others are silent.
MARGIN_DEVIATIONS = 2


def active_at_once(recent: int, active: int) -> int:
    """How many of `recent` streams must be expected to be active at once, if `active` are now. Speakers are taken as
    independent of each other."""
    spread = sqrt(active * (recent - active) / recent) if recent else 0.0
    return min(recent, ceil(active + MARGIN_DEVIATIONS * max(spread, 1.0)))


@dataclass(slots=True)
class TickTimes:
    """The sum of the lengths of ticks in seconds, and of their squares; without those in which streams were rebuilt."""

    seconds: float = 0.0
    squares: float = 0.0
    # Of `seconds`: waiting for the device.
    waited_s: float = 0.0
    # The sum of the lengths of the other ticks.
    rebuilding_s: float = 0.0


class LoadReport:
    """Keeps up to date the `Status` that is sent to all gateways, from the loop's counters."""

    def __init__(self, loop: EngineLoop, now: float) -> None:
        limits = loop.scheduler.limits
        active = limits.max_streams if limits.resident_streams is None else limits.resident_streams
        self.status = Status(slots_total=limits.max_streams, active_total=active)
        self.status.load_per_step, self.status.load_per_stream = loop.meter.live_cost.shares()
        # The warm-up's cache lookups are not reported.
        self._queries_at_start, self._hits_at_start = loop.scheduler.cache.queries, loop.scheduler.cache.hits
        # The totals at `_load_since`.
        totals = loop.meter.totals
        self._live_ns, self._live_speech_ns, self._speech_ns = totals.live_ns, totals.live_speech_ns, totals.speech_ns
        self._load_since = now
        # Seconds spent on messages since `_load_since` while no step was running.
        self._between_steps_s = 0.0
        # Silence should be skipped sooner.
        self.is_busy = False
        # The ticks since `_ticks_since`.
        self._ticks, self._ticks_since = TickTimes(), now

    def add_time_between_steps(self, seconds: float) -> None:
        """Messages were read and written for this long while no step was running."""
        self._between_steps_s += max(0.0, seconds)

    def add_tick(self, seconds: float, waited_s: float, rebuilds: bool) -> None:
        """A tick took this long. For `waited_s` of it the thread waited for the device. `rebuilds`: streams were being
        rebuilt."""
        ticks = self._ticks
        if rebuilds:
            ticks.rebuilding_s += seconds
        else:
            ticks.seconds += seconds
            ticks.squares += seconds * seconds
            ticks.waited_s += waited_s

    def count(self, loop: EngineLoop) -> None:
        """Update the values that change with every step."""
        cache, status = loop.scheduler.cache, self.status
        status.slots_used, status.parked = len(loop.scheduler.streams), loop.scheduler.parked
        status.encoder_queries = cache.queries - self._queries_at_start
        status.encoder_hits = cache.hits - self._hits_at_start

    def measure(self, loop: EngineLoop, streams: Collection[HostedStream], waited_s: float, now: float) -> None:
        """Update the values that are reported less often. `waited_s`: age of the oldest received batch that is not
        applied yet."""
        self._measure_load(loop, now)
        self._measure_ticks(loop, now)
        status, scheduler, totals = self.status, loop.scheduler, loop.meter.totals
        spec = scheduler.spec
        if len(scheduler.rebuilding) >= MANY_STREAMS and not scheduler.on_time_count:
            # All live streams are late by seconds, so longer messages delay no word, and the thread has more time for
            # the rebuild.
            status.message_positions = MAX_MESSAGE_POSITIONS
        lags = [stream.available - stream.computed for stream in scheduler.streams.values() if stream.live]
        status.lag_ms = 1000 * (max(lags, default=0) * spec.samples_per_position / spec.sample_rate + waited_s)
        status.speaking = sum(stream.speaking for stream in streams)
        recent = [stream for stream in streams if stream.live and stream.last_active_at > now - COUNTED_SECONDS]
        status.counted = len(recent) if len(recent) < MANY_STREAMS else self._expected(recent, loop, now)
        status.steps = totals.steps
        status.step_ns = {
            "speech": totals.speech_ns,
            "plan": totals.plan_ns,
            "execute": totals.execute_ns,
            "commit": totals.commit_ns,
        }
        status.blank_guard = loop.runner.blank_guard_activations
        revisions = loop.revisions
        status.revised, status.revisions_skipped = revisions.done, revisions.skipped
        status.words_revised = revisions.words_changed

    @staticmethod
    def _expected(recent: Collection[HostedStream], loop: EngineLoop, now: float) -> int:
        """Expected number of streams that compute at the same time. All new streams count, because their share of
        speech is not known yet. Of the others those count that compute now, with a margin for chance."""
        older = [stream for stream in recent if stream.opened_at < now - NEW_SECONDS]
        scheduled = (loop.scheduler.streams.get(stream.loop_name) for stream in older)
        spec = loop.scheduler.spec
        # Between two steps the oldest audio that waits becomes as old as two strides.
        strides_ns = 2 * spec.stride_positions * spec.samples_per_position * 1_000_000_000 // spec.sample_rate
        since = time.monotonic_ns() - ACTIVE_NS - strides_ns
        active = sum(stream is not None and (stream.queued or stream.waiting_since > since) for stream in scheduled)
        return len(recent) - len(older) + active_at_once(len(older), active)

    def _measure_load(self, loop: EngineLoop, now: float) -> None:
        elapsed = now - self._load_since
        if elapsed < LOAD_SECONDS:
            return
        status, totals = self.status, loop.meter.totals
        per_step, per_stream = loop.meter.live_cost.shares()
        detector_ns, live_detector_ns = totals.speech_ns - self._speech_ns, totals.live_speech_ns - self._live_speech_ns
        # The number of messages follows the amount of audio, so the time for messages is divided between live streams
        # and uploads like the time of the speech detector.
        live_part = live_detector_ns / detector_ns if detector_ns else 1.0
        between_steps = self._between_steps_s / elapsed * live_part
        live = sum(stream.live for stream in loop.scheduler.streams.values())
        status.load = min(1.0, (totals.live_ns - self._live_ns) / 1e9 / elapsed + between_steps)
        # The speech detector runs on silent streams, too.
        status.load_per_step = per_step + live_detector_ns / 1e9 / elapsed
        status.load_per_stream = per_stream + between_steps / live if per_stream and live else per_stream
        self._live_ns, self._live_speech_ns, self._speech_ns = totals.live_ns, totals.live_speech_ns, totals.speech_ns
        self._load_since, self._between_steps_s = now, 0.0

    def _measure_ticks(self, loop: EngineLoop, now: float) -> None:
        """Decide from the last ticks how long messages should be and whether silence is skipped sooner, and report how
        long ticks are."""
        elapsed = now - self._ticks_since
        if elapsed < TICKS_SECONDS:
            return
        ticks, self._ticks, self._ticks_since = self._ticks, TickTimes(), now
        status, spec = self.status, loop.scheduler.spec
        if spec.rereads_window:
            return
        # The length of the tick in which audio arrives, on average.
        tick_s = ticks.squares / ticks.seconds if ticks.seconds else 0.0
        status.tick_share = tick_s * spec.sample_rate / spec.samples_per_position
        status.tick_streams = status.counted if tick_s and status.counted >= MANY_STREAMS else 0
        measured_s = elapsed - ticks.rebuilding_s
        if loop.runner.overlaps_steps and ticks.seconds and measured_s > elapsed / 2:
            thread_share = (ticks.seconds - ticks.waited_s) / measured_s
            if thread_share > THREAD_BUSY_SHARE and status.tick_share > LONG_TICK_SHARE:
                status.message_positions = min(status.message_positions + 1, MAX_MESSAGE_POSITIONS)
            elif thread_share < THREAD_CALM_SHARE:
                status.message_positions = max(status.message_positions - 1, 1)
        # A small engine may be full with the streams that it was made for.
        taken = status.counted / status.active_total if status.counted >= MANY_STREAMS else 0.0
        share = max(status.tick_share, taken)
        self.is_busy = status.message_positions > 1 or share > (CALM_SHARE if self.is_busy else BUSY_SHARE)


# Commands of gateways.

# (key, size in bytes, payload or None if only the hash was sent).
KeyedPayload = tuple[bytes, int, Payload | None]


class CommandIntake:
    """Checks the commands of gateways and passes them to the loop, under the loop's names for streams.

    The payloads of a batch go through the gateway's input cache, then its commands are applied one by one. A bad or
    unreadable command affects only its own stream. `clock` returns seconds.
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
        # Commands not passed to the loop yet. They must be passed on before the loop's streams are read.
        self._pending: list[messages.Command] = []

    def apply(self, peer: Peer, batch: codec.Batch, frames: Frames, now: int) -> list[bytes]:
        """Apply a batch. Returns the keys of missing data, which must be sent again first; then nothing is applied."""
        keyed = [self._keyed(peer, data, frames) for data in batch.data]
        missing = [key for key in peer.cache.missing(keyed, peer.repaired) if key not in peer.gone]
        if missing:
            return missing
        audio = [(data.key, payload) for data, payload in zip(batch.data, self._resolve(peer, keyed), strict=True)]
        try:
            for command in decode_commands(batch.commands):
                self._apply_command(peer, command, audio, now)
        finally:
            self._submit_pending(now)
        return []

    @staticmethod
    def _keyed(peer: Peer, data: PayloadPlace, frames: Frames) -> KeyedPayload:
        try:
            payload = codec.payload_of(data, frames)
        except WireError as error:
            logger.warning("gateway %s sent invalid audio: %s", peer.gateway, error)
            peer.gone.add(data.key)
            payload = None
        return data.key, 0 if payload is None else payload.nbytes, payload

    @staticmethod
    def _resolve(peer: Peer, keyed: Sequence[KeyedPayload]) -> list[Payload | None]:
        """Store the batch's payloads in the gateway's cache, and return all of them, cached or not."""
        sized = [
            (key, peer.repaired[key].nbytes if data is None and key in peer.repaired else size, data)
            for key, size, data in keyed
        ]
        payloads = peer.cache.resolve(sized, peer.repaired)
        peer.repaired, peer.gone = {}, set()
        return payloads

    # Commands.

    def _apply_command(
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
            self._submit_pending(now)
            self._open(peer, command, audio)
        elif isinstance(command, UnreadableCommand):
            self._end_unreadable(peer, command)
        elif (name := peer.streams.get(command.stream)) is not None:
            # A stream that is not in `peer.streams` has ended: its gateway sent this command before it received the
            # end.
            self._apply_request(peer, name, command)

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
            self._pending.append(messages.Feed(name, command.items))

    def _apply_request(
        self, peer: Peer, name: str, command: messages.Flush | messages.ChangeTurns | messages.Finish | messages.Abort
    ) -> None:
        match command:
            case messages.Flush():
                self.hosted.streams[name].on_flush(command.tag, command.pause, command.ends_speech)
                self._pending.append(
                    messages.Flush(name, command.tag, command.pause, command.ends_speech, command.turn_over)
                )
            case messages.ChangeTurns():
                self.hosted.streams[name].on_turn_rule(command.turns)
                self._pending.append(messages.ChangeTurns(name, command.turns))
            case messages.Finish():
                self.hosted.streams[name].on_finish()
                self._pending.append(messages.Finish(name))
            case messages.Abort():
                self.hosted.release(peer, command.stream, name)
                self._pending.append(messages.Abort(name))

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
            self._pending.append(msgspec.structs.replace(command, stream=name))
        # The command is kept with the stream, for its options. Its audio is not kept.
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

    def _end_unreadable(self, peer: Peer, command: UnreadableCommand) -> None:
        """End the stream of a command that cannot be decoded."""
        logger.warning("gateway %s, stream %s: %s", peer.gateway, command.stream, command.why)
        if command.stream is None:
            return
        name = peer.streams.get(command.stream)
        if name is not None:
            self._fail(name, command.why, error_code_of(command.opens))
        elif command.opens:
            text = f"stream {command.stream!r}: {command.why}"
            peer.outputs.append(messages.Failed(command.stream, error_code_of(command.opens), text))

    def _fail(self, name: str, why: str, code: str = BadItem.__name__) -> None:
        """End one stream with an error."""
        hosted = self.hosted.streams[name]
        hosted.send_output(messages.Failed(hosted.name, code, why.replace(name, hosted.name)))
        self.hosted.forget(name)
        self._pending.append(messages.Abort(name))

    def _submit_pending(self, now: int) -> None:
        """Pass the pending commands to the loop."""
        pending, self._pending = self._pending, []
        self._loop.submit(pending, now)


# All links.

# How long an acknowledgement may wait to be sent together with outputs.
ACK_SECONDS = 0.02
# How long to wait when there is nothing to do but to see whether copies of pages are complete.
COPY_SECONDS = 0.001
# A draining engine of a frame-synchronous model begins steps no more often than this: its streams move to an engine
# that may be on the same device, and steps with few streams in each take the most time of the device.
DRAIN_STEP_SECONDS = 0.04
# Intervals of the reports of streams' progress and of the engine's load. After a stream was opened or has ended they
# are due at once on an engine with few streams, and later on one with many: a report takes time for each stream.
PROGRESS_SECONDS = 0.08
STATUS_SECONDS = 0.08
CHANGED_SECONDS_A_STREAM = 0.0001
# Items of audio applied before the next step, per position that a step reads of a stream; and the fewest in all.
ITEMS_A_POSITION = 2
MIN_ITEMS = 256
# How many commands without audio count as one item: with appends of 20 ms a position comes with four saved handoffs.
COMMANDS_AN_ITEM = 4
# Longest time spent on applying commands before the next step. Opening a stream may take milliseconds (a long list of
# keywords, a saved state); an engine that opened many at once would be silent for so long that gateways give it up.
APPLY_SECONDS = 0.1
# Longest time spent on receiving messages before the next step.
RECEIVE_SECONDS = 0.02
# Consecutive undecodable messages after which a gateway must connect again.
MAX_UNREADABLE = 5


@dataclass(frozen=True, slots=True)
class DrainRequest:
    """How the engine is asked to drain: it then accepts no new streams, and ends when it is empty."""

    # Whether draining was requested.
    is_requested: Callable[[], bool]
    # The engine ends after this time even if it is not empty.
    seconds: float


class EngineHost:
    """The engine's side of all links, around one loop. `clock` returns monotonic seconds; `engine` is a name that is
    unique for each start of the engine."""

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
        self.handoffs = HandoffTable(self.hosted, clock, self._request_release, self._apply_received, self._abort)
        self._intake = CommandIntake(loop, self.hosted, self.handoffs, clock)
        # When progress and load were last reported.
        self._progress_at = self._status_at = 0.0
        # When `_report` was last called, and from when on the silence of gateways counts: this process may have been
        # stopped.
        self._reported_at = self._silence_from = clock()
        # When the last tick began.
        self._ticked_at = 0.0
        # The engine ends at this time at the latest, if it drains.
        self._drains_until = 0.0
        self.load = LoadReport(loop, clock())

    def serve(self, stop: Callable[[], bool], drain: DrainRequest | None = None) -> None:
        """Run until `stop` returns True or the engine has drained. Raises EngineDead if the loop fails for all
        streams."""
        while not stop() and not (drain is not None and drain.is_requested() and self.drain(drain.seconds)):
            self._socket.wait(0 if self._has_batches() else self._wait_seconds())
            if self.load.status.draining and not self._loop.scheduler.spec.rereads_window:
                time.sleep(max(0.0, self._ticked_at + DRAIN_STEP_SECONDS - self._clock()))
            self._ticked_at = self._clock()
            self.tick()

    def drain(self, seconds: float) -> bool:
        """Start draining if not started; returns whether the engine is empty or the time is over."""
        now, status = self._clock(), self.load.status
        if not status.draining:
            logger.info("draining: %d streams and %d sessions to migrate", len(self.hosted.streams), len(self.handoffs))
            self._drains_until = now + seconds
            status.draining = self._intake.draining = True
            for peer in self.peers.values():
                peer.last_sent_at = now - BEAT_SECONDS
        is_empty = not self.hosted.streams and not len(self.handoffs)
        return is_empty or now >= self._drains_until

    def tick(self) -> None:
        """Receive messages, apply batches, run one step, and send the results."""
        began, steps = self._clock(), self._loop.meter.totals
        ns_before, waited_before = steps.ns, steps.wait_ns
        rebuilds = bool(self._loop.scheduler.rebuilding)
        self._receive_all()
        now = self._clock()
        self._apply_batches(now)
        dead = self._step()
        self._report(now)
        took = self._clock() - began
        rebuilds = rebuilds or bool(self._loop.scheduler.rebuilding)
        self.load.add_tick(took, (steps.wait_ns - waited_before) / 1e9, rebuilds)
        if not self._loop.has_launched_step:
            self.load.add_time_between_steps(took - (steps.ns - ns_before) / 1e9)
        if dead is not None:
            raise EngineDead(dead)

    def _wait_seconds(self) -> float:
        """How long to wait for a message before the next tick."""
        if self._loop.has_work():
            return COPY_SECONDS if self._loop.waits_for_copies else 0
        unacknowledged = any(peer.numbering.accepted > peer.acknowledged for peer in self.peers.values())
        return ACK_SECONDS if unacknowledged or self._loop.waits_for_results else BEAT_SECONDS / 4

    def _has_batches(self) -> bool:
        return any(peer.has_batch for peer in self.peers.values())

    # Received messages.

    def _receive_all(self) -> None:
        """Receive the messages that have arrived, for `RECEIVE_SECONDS` at most: a gateway may send faster than its
        messages are read. The socket reads its peers in turn, so one gateway does not keep others from being read."""
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
                self._refuse(name, "this engine does not know the connection; connect again")
            else:
                peer.last_received_at = self._clock()
                self._dispatch(peer, message, frames)
        except WireError as error:
            logger.warning("a gateway sent a message that cannot be decoded: %s", error)
            self._count_undecodable(name, peer, str(error))

    def _greet(self, name: bytes, hello: codec.Hello) -> None:
        spec = self._loop.scheduler.spec
        if hello.wire != codec.WIRE_VERSION:
            self._refuse(
                name,
                f"the engine runs tickertape {package_version()} (wire {codec.WIRE_VERSION}), the gateway "
                f"{hello.version} (wire {hello.wire}); install the same version on both",
            )
            return
        if hello.model not in (None, spec.name):
            self._refuse(name, f"the engine runs {spec.name!r}, the gateway wants {hello.model!r}")
            return
        # The gateway reconnects, or the connection's name was used by another one. Its old state is dropped: the
        # gateway can open its streams again, and sends which sessions it continues (`Claim`).
        for old in [peer for peer in self.peers.values() if peer.gateway == hello.gateway or peer.name == name]:
            self._drop(old, is_connected=True)
        cache: ReceiverCache[Payload] = ReceiverCache(max(0, hello.cache_bytes))
        self.peers[name] = Peer(name, hello.gateway, cache, self._clock())
        welcome = codec.Welcome(codec.WIRE_VERSION, package_version(), self._engine, spec, self.load.status)
        self._socket.send(name, codec.encode(welcome))

    def _refuse(self, name: bytes, why: str) -> None:
        """End a connection: the gateway may connect again."""
        peer = self.peers.get(name)
        if peer is not None:
            self._drop(peer, is_connected=True)
        self._socket.send(name, codec.encode(codec.Unwelcome(why)))

    def _count_undecodable(self, name: bytes, peer: Peer | None, why: str) -> None:
        """A message could not be decoded. If it was a batch, its number is missing and the batch is requested again. A
        gateway that sends only such messages must connect again with new numbers; otherwise its streams would stall."""
        if peer is not None:
            peer.unreadable += 1
            if peer.unreadable < MAX_UNREADABLE:
                return
        self._refuse(name, why)

    def _drop(self, peer: Peer, *, is_connected: bool = False) -> None:
        """Forget a gateway and its streams, except sessions that another gateway may adopt.

        A gateway that is connected opens its streams again. If it is gone, its last messages are applied first.
        """
        if not is_connected:
            self._apply_received(peer)
            if self.peers.get(peer.name) is not peer:
                return
        del self.peers[peer.name]
        self.handoffs.on_lost(peer)
        for name in self.hosted.forget_all(peer):
            self._abort(name)

    def _apply_received(self, peer: Peer) -> None:
        """Apply all received batches of a gateway."""
        while self._apply_batch(peer, self._clock()):
            pass

    def _abort(self, name: str) -> None:
        """End a stream whose outputs no gateway receives."""
        self.hosted.forget(name)
        self._loop.submit([messages.Abort(name)], time.monotonic_ns())

    def _request_release(self, peer: Peer, wanted: messages.Wanted) -> bool:
        """Ask a gateway to release a session; False if it is gone, which is only noticed when a send fails."""
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
                    self._request_resend(peer)
            case codec.Beat():
                numbering.acknowledged(message.ack)
                if message.sent > numbering.accepted + len(peer.inbox):
                    self._request_resend(peer)
            case codec.ResendRequest():
                for kept in numbering.kept_since(message.seq):
                    self._socket.send(peer.name, kept)
            case codec.Repair():
                self._on_repair(peer, message, frames)
            case codec.Bye():
                self._drop(peer)

    def _on_repair(self, peer: Peer, repair: codec.Repair, frames: Frames) -> None:
        if repair.seq != peer.numbering.accepted + 1:
            # A second answer, because `Missing` was sent twice.
            return
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
        peer.missing_sent_at = None

    def _request_resend(self, peer: Peer) -> None:
        request = codec.ResendRequest(peer.numbering.accepted + len(peer.inbox) + 1)
        self._socket.send(peer.name, codec.encode(request))

    # Batches into the loop.

    def _apply_batches(self, now: float) -> None:
        """Apply batches, one of each gateway in turn, but not much more audio than the next step computes.

        A step computes one position of each stream (a stride for windowed models), or many of streams that are rebuilt:
        for these there is room of its own. A late engine that applied everything at once would never catch up.
        """
        positions = len(self.hosted.streams) * self._loop.scheduler.spec.stride_positions
        budget = float(max(MIN_ITEMS, ITEMS_A_POSITION * positions) + self._loop.replay_room)
        peers = list(self.peers.values())
        while peers and budget > 0 and self._clock() <= now + APPLY_SECONDS:
            for peer in peers:
                if peer.has_batch:
                    batch = peer.inbox[0][0]
                    budget -= max(self._positions(batch), len(batch.commands) / COMMANDS_AN_ITEM)
            peers = [peer for peer in peers if self._apply_batch(peer, now)]

    def _positions(self, batch: codec.Batch) -> int:
        """Positions of the audio in a batch; the items of a replay have several."""
        spec = self._loop.scheduler.spec
        return sum(positions_in(data.size, spec) for data in batch.data)

    def _apply_batch(self, peer: Peer, now: float) -> bool:
        """Apply the oldest batch of a gateway; returns whether there may be another one."""
        if not (peer.inbox and peer.numbering.may_send):
            return False
        batch, frames, _ = peer.inbox[0]
        try:
            missing = self._intake.apply(peer, batch, frames, time.monotonic_ns())
        except Exception:
            logger.exception("a batch of gateway %s cannot be applied; the gateway must connect again", peer.gateway)
            self._refuse(peer.name, "the engine could not apply a batch; connect again")
            return False
        if missing:
            if peer.missing_sent_at is None or now - peer.missing_sent_at > BEAT_SECONDS:
                peer.missing_sent_at = now
                self._socket.send(peer.name, codec.encode(codec.Missing(batch.seq, missing)))
            return False
        peer.inbox.popleft()
        peer.missing_sent_at, peer.unreadable = None, 0
        peer.numbering.accept(batch.seq)
        return True

    # Outputs.

    def _step(self) -> str | None:
        """Run one step if there is work; returns the reason if the engine has failed for all streams, else None."""
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
        """Pass an output of the loop to its stream, under the gateway's name for the stream."""
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
        """Send outputs, progress and heartbeats that are due, and drop gateways that have been silent for too long."""
        self.load.count(self._loop)
        self.load.status.replay_positions = self._replay_positions()
        progress: dict[bytes, list[codec.Progress]] = {}
        after_change = len(self.hosted.streams) * CHANGED_SECONDS_A_STREAM if self.hosted.changed else PROGRESS_SECONDS
        if now - self._progress_at >= min(after_change, PROGRESS_SECONDS):
            self._progress_at = now
            progress = self._progress(now)
            self.handoffs.tick(now)
        if now - self._status_at >= min(after_change, STATUS_SECONDS):
            self._status_at, self.hosted.changed = now, False
            waited = [now - peer.inbox[0][2] for peer in self.peers.values() if peer.has_batch]
            self.load.measure(self._loop, self.hosted.streams.values(), max(waited, default=0.0), now)
            self._loop.silence_skipper.skip_sooner(self.load.is_busy)
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

    def _replay_positions(self) -> int:
        """The positions of replays that one gateway may have under way: an equal share for each that sends some; before
        the first one does, for each."""
        positions = self._loop.replay_positions_under_way
        if not positions:
            return 0
        hosted = (self.hosted.streams.get(name) for name in self._loop.scheduler.rebuilding)
        sending = {stream.peer.name for stream in hosted if stream is not None and stream.peer is not None}
        return ceil(positions / max(1, len(sending) or len(self.peers)))

    def _beat_is_due(self, peer: Peer, now: float) -> bool:
        unacknowledged = peer.numbering.accepted > peer.acknowledged
        return now - peer.last_sent_at >= (ACK_SECONDS if unacknowledged else BEAT_SECONDS)

    def _send(self, peer: Peer, frames: list[Any], now: float) -> None:
        """Send to a gateway. That a gateway is gone is only noticed when a send fails."""
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
        """The next numbered message to a gateway, with its outputs."""
        try:
            frames = self._encode_update(peer, progress)
        except Exception:
            logger.exception("an output cannot be encoded; its stream is ended")
            self._replace_unencodable(peer)
            frames = self._encode_update(peer, progress)
        peer.numbering.keep(frames)
        peer.outputs = []
        return frames

    def _encode_update(self, peer: Peer, progress: list[codec.Progress]) -> list[Any]:
        numbering = peer.numbering
        update = codec.Update(numbering.next_number, numbering.accepted, peer.outputs, progress, self.load.status)
        return codec.encode(update)

    def _replace_unencodable(self, peer: Peer) -> None:
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
        # Computed positions mean activity only if the model computes silence too.
        computes_silence = not self._loop.silence_is_free
        for name, stream in self._loop.scheduler.streams.items():
            hosted = self.hosted.streams.get(name)
            if hosted is None:
                continue
            if computes_silence and hosted.computed != stream.computed:
                hosted.computed, hosted.last_active_at = stream.computed, now
            computed = self._loop.progress_of(name)
            if hosted.reported != computed:
                hosted.reported = computed
                if hosted.peer is not None:
                    report = codec.Progress(hosted.name, computed)
                    progress.setdefault(hosted.peer.name, []).append(report)
        return progress
