"""A gateway's connection to one engine (`EngineLink`): sends commands in batches, receives outputs, resends lost data.

The supervisor makes one per connected engine; it runs in the gateway's event loop. It owns the socket, the message
numbers, the queue of commands, and the sender's half of the audio cache. The commands of a tick (5 ms) are one message
(`OutgoingBatch`), live commands before replays (`SendQueue`); while too many bytes are unacknowledged, no batch is
sent. When the engine dies or sends nothing for too long, the link is lost for good; the supervisor makes a new one,
with empty caches on both sides.

Each link has an `ItemChecker`, whose cache mirrors the engine's cache of audio: audio that the engine has is sent as
its hash alone. If the engine does not have it after all, the link sends it again (repair). Clients may cut and hash
audio themselves and send items instead of samples; the checker verifies these. `EngineClient` has another checker for
requests that only prepare items and send none (`engine/client/prepared_audio.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
import zmq

from engine import messages
from engine.boundary import codec
from engine.boundary.codec import Batch, Frames, PayloadPlace, WireError, encode_command, error_code_of, package_version
from engine.boundary.input_cache import SenderCache
from engine.boundary.items import (
    KEY_BYTES,
    WARM_UP_SECONDS,
    complaint_about,
    hash_payload,
    make_cutter,
    payload_bytes,
    prepare,
)
from engine.boundary.sockets import (
    BEAT_SECONDS,
    SILENCE_SECONDS,
    STOPPED_SECONDS,
    WHY_REFUSED,
    Arrival,
    GatewaySocket,
    LinkKeys,
    Numbering,
)
from engine.errors import EngineError, EngineUnreachable
from engine.messages import Item
from engine.spec import ModelSpec

logger = logging.getLogger(__name__)


# Items: the checks of those that clients prepared, and which audio the engine already has


class ItemRefused(EngineError):
    """An item prepared elsewhere is malformed, or its hash is not the hash of its bytes. Nothing was changed."""


class ItemChecker:
    """Checks items for one model and looks up their audio in one sender cache.

    The checker of a link uses the cache that mirrors the engine's. The preparing checker has a cache of its own: if a
    request that only prepares items added their hashes to the mirror, the gateway would not send this audio later.
    `name` is used in log lines.
    """

    def __init__(self, name: str, spec: ModelSpec, cache: SenderCache) -> None:
        self.name = name
        self.spec = spec
        self.cache = cache

    def pack(self, items: Sequence[Item]) -> list[bool]:
        """Returns for each item of one message whether its data must be sent.

        This adds the items to the cache, so the message must then be sent.
        """
        seen: set[bytes] = set()
        has_data = []
        for item in items:
            # The data of an item with a hash alone must be in this message already, or in the cache.
            has_data.append(bool(item.key) and (item.payload is not None or item.key in seen or item.key in self.cache))
            if has_data[-1]:
                seen.add(item.key)
        sizes = [(item.key, payload_bytes(item)) for item, has in zip(items, has_data, strict=True) if has]
        is_sent = iter(self.cache.plan_send(sizes))
        return [has and next(is_sent) for has in has_data]

    def check(self, items: Iterable[Item | None]) -> list[Item]:
        """Verify items prepared elsewhere, without those that are None. Raises ItemRefused."""
        present = [item for item in items if item is not None]
        for index, item in enumerate(present):
            self._check_one(index, item)
        return present

    def _check_one(self, index: int, item: Item) -> None:
        complaint = complaint_about(item, self.spec)
        if complaint is None and item.payload is not None:
            if not np.isfinite(item.payload).all():
                complaint = "the data holds NaN or infinite values"
            elif hash_payload(item.payload) != item.key:
                complaint = (
                    f"the hash {item.key.hex()} is not the hash of its data; hash the float32 bytes "
                    f"with blake2b, {KEY_BYTES} bytes long, and send both unchanged"
                )
        if complaint is not None:
            raise ItemRefused(f"item {index}: {complaint}")

    def warm_up(self) -> None:
        """Run noise through the code of a request, then clear the cache and restore its statistics."""
        noise = np.random.default_rng(0).standard_normal(WARM_UP_SECONDS * self.spec.sample_rate, dtype=np.float32)
        cutter = make_cutter(self.spec)
        items = prepare(cutter, cutter.cut(noise), self.spec)
        items += prepare(cutter, cutter.flush(self.spec.flush_positions), self.spec)
        before = self.cache.stats
        self.cache.stats = type(before)()
        try:
            self.check(items)
            self.pack(items)
        finally:
            self.cache.stats = before
            self.cache.clear()


def warm_up(checker: ItemChecker) -> float | None:
    """Warm the checker up. Returns the seconds it took; None if it failed, and then the first request is slower."""
    began = time.perf_counter()
    try:
        checker.warm_up()
    except Exception:
        logger.warning(
            "warm-up of the %s item checker failed; its first request will be slower", checker.name, exc_info=True
        )
        return None
    took = time.perf_counter() - began
    logger.info("the %s item checker is warm after %.3f s", checker.name, took)
    return took


# Batches of commands

# A batch is full when its audio and its encoded commands have this many bytes; the rest is sent with the next one.
BATCH_BYTES = 2 * 1024 * 1024
# Most bytes of replays that may be sent and not acknowledged. An engine with live streams allows less
# (`Status.replay_positions`).
REPLAY_WINDOW_BYTES = 32 * 1024 * 1024
# Replays that are sent in turn; the others wait until one of these is done. An engine rebuilds a few streams as fast as
# many, and a rebuilt stream continues while the others wait. So no more are sent than have POSITIONS_A_REPLAY positions
# under way each, those of four steps; MAX_PARALLEL_REPLAYS if the engine sets no bound.
MAX_PARALLEL_REPLAYS = 64
POSITIONS_A_REPLAY = 256
# A replay that is rebuilt is sent this much audio in its turn, in positions: what a step computes of one stream. Its
# pieces are shorter, because they end at each flush.
TURN_POSITIONS = POSITIONS_A_REPLAY // 4
# Turns of replays that are rebuilt between two other pieces.
REBUILT_TURNS = 4
# Bytes of one sample of a payload.
SAMPLE_BYTES = 4
# Upper bound for the encoded position and hash of one item.
ITEM_HEADER_BYTES = 48
# Commands of one tick are sent together; the first command after an idle tick is sent at once.
TICK_SECONDS = 0.005
# An acknowledgement waits this long for a batch that can carry it.
ACK_SECONDS = 0.02


# A command and its items. Without a command, the items are only put into the engine's cache.
Queued = tuple[messages.Command | None, list[messages.Item]]


class PacedSource(Protocol):
    """Something large that a `SendQueue` sends in pieces: a replay, or items for the engine's cache."""

    @property
    def is_rebuilt(self) -> bool:
        """Whether an engine computes the next piece faster than live audio: its tokens are known, or a state is
        restored."""

    def next_piece(self) -> Queued | None:
        """Return the next piece; None if there is none at the moment."""


class SendQueue:
    """Commands that wait to be sent to one engine: live commands first, then replays, a few in turns.

    A live command is sent with the next batch, however much is being replayed. Of the replays, audio that is rebuilt
    goes before the rest, so that every stream is rebuilt before the first have caught up. At most `window_bytes` of
    replays are unacknowledged; the rest stays with its sources. The engine applies the commands of a gateway in order,
    so live audio waits there for the replays that were sent before it.
    """

    def __init__(self) -> None:
        self.window_bytes = REPLAY_WINDOW_BYTES
        self._parallel_rebuilds = MAX_PARALLEL_REPLAYS
        self._live_commands: deque[Queued] = deque()
        self._rebuilds: deque[PacedSource] = deque()
        # The first `_newly_rebuilt` of these were rebuilt just now.
        self._others: deque[PacedSource] = deque()
        self._newly_rebuilt = 0
        # Turns of rebuilds since the last other piece; bytes sent in the turn that is under way, and of a whole turn.
        self._rebuilt_turns = 0
        self._turn_bytes = self._whole_turn_bytes = 0
        # Bytes of replays in each unacknowledged batch, by batch number, and the sum of all.
        self._replays: dict[int, int] = {}
        self._replay_bytes = 0

    @property
    def has_commands(self) -> bool:
        """Whether a live command waits."""
        return bool(self._live_commands)

    @property
    def has_more(self) -> bool:
        """Whether there is something that a batch could carry now."""
        replays_wait = bool(self._rebuilds or self._others)
        return bool(self._live_commands) or (replays_wait and self._replay_bytes < self.window_bytes)

    def allow_replays(self, positions: int, position_bytes: int) -> None:
        """The engine allows so many positions of replays under way; 0: it sets no bound."""
        self._whole_turn_bytes = TURN_POSITIONS * position_bytes
        allowed = positions * position_bytes or REPLAY_WINDOW_BYTES
        self.window_bytes = min(allowed, REPLAY_WINDOW_BYTES)
        parallel = -(-positions // POSITIONS_A_REPLAY) if positions else MAX_PARALLEL_REPLAYS
        self._parallel_rebuilds = min(parallel, MAX_PARALLEL_REPLAYS)

    def put(self, queued: Queued) -> None:
        self._live_commands.append(queued)

    def add_source(self, source: PacedSource) -> None:
        """Ask this source for pieces until it returns None."""
        if source not in self._rebuilds and source not in self._others:
            (self._rebuilds if source.is_rebuilt else self._others).append(source)

    def fill(self, number: int, add: Callable[[Queued], int]) -> None:
        """Pass what the batch with this number carries to `add`, one command at a time; `add` returns its size in
        bytes."""
        size = 0
        while self._live_commands and size < BATCH_BYTES:
            size += add(self._live_commands.popleft())
        replayed = self._add_replays(add, max(1, BATCH_BYTES - size))
        if replayed:
            # If no command of a batch could be encoded, the batch is not sent, and its number is used again.
            self._replays[number] = self._replays.get(number, 0) + replayed
            self._replay_bytes += replayed

    def _add_replays(self, add: Callable[[Queued], int], size: int) -> int:
        """Add pieces of the first sources in turn, about `size` bytes; returns the bytes added."""
        added = 0
        while (self._rebuilds or self._others) and added < size and self._replay_bytes + added < self.window_bytes:
            source = self._next_source()
            was_rebuilt, piece = source.is_rebuilt, source.next_piece()
            if piece is None:
                self._turn_bytes = 0
                continue
            size_of_piece = add(piece)
            added += size_of_piece
            if was_rebuilt:
                self._turn_bytes += size_of_piece
            if source.is_rebuilt and self._turn_bytes < self._whole_turn_bytes:
                self._rebuilds.appendleft(source)
            elif source.is_rebuilt:
                self._end_turn()
                self._rebuilds.insert(self._parallel_rebuilds - 1, source)
            elif was_rebuilt:
                self._end_turn()
                # It gets the first of its new audio soon.
                self._others.insert(self._newly_rebuilt, source)
                self._newly_rebuilt += 1
            else:
                self._others.append(source)
        return added

    def _end_turn(self) -> None:
        self._turn_bytes, self._rebuilt_turns = 0, self._rebuilt_turns + 1

    def _next_source(self) -> PacedSource:
        if self._rebuilds and (self._rebuilt_turns < REBUILT_TURNS or not self._others):
            return self._rebuilds.popleft()
        self._rebuilt_turns = 0
        self._newly_rebuilt = max(0, self._newly_rebuilt - 1)
        return self._others.popleft()

    def acknowledged(self, number: int) -> None:
        """The engine has acknowledged this batch."""
        self._replay_bytes -= self._replays.pop(number, 0)


class OutgoingBatch:
    """The next message to an engine, built command by command.

    A command is added whole or not at all: `add` raises for a bad value before it changes the batch. The message number
    and the mirror of the engine's cache change only in `frames`.
    """

    def __init__(self) -> None:
        # All items that have a hash; commands refer to them by index.
        self.items: list[Item] = []
        self._views: list[memoryview | None] = []
        self._commands: list[msgspec.Raw] = []

    def __bool__(self) -> bool:
        return bool(self._commands or self.items)

    def add(self, command: messages.Command | None, carried: Sequence[Item]) -> int:
        """Add a command and its items; without a command, the items are only put into the engine's cache.

        Returns the most bytes that they take in the message: with all of their audio. Raises the codec's error for a
        value that it cannot encode.
        """
        items: list[Item] = []
        views: list[memoryview | None] = []
        described: list[Item] = []
        for item in carried:
            data = None
            if item.key:
                data = len(self.items) + len(items)
                items.append(item)
                views.append(_view(item))
            described.append(msgspec.structs.replace(item, key=b"", payload=None, data=data))
        size = len(items) * ITEM_HEADER_BYTES + sum(view.nbytes for view in views if view is not None)
        if command is not None:
            self._commands.append(encode_command(command, described))
            size += memoryview(self._commands[-1]).nbytes
        self.items += items
        self._views += views
        return size

    def frames(self, number: int, ack: int, pack: Callable[[list[Item]], list[bool]]) -> list[Any]:
        """Encode the batch. `ack`: the last number received. The frames must be sent, because `pack` changes the cache.

        `pack` returns for each item whether its audio must be sent (`ItemChecker.pack`).
        """
        is_sent = pack(self.items)
        data = lay_out(self.items, is_sent)
        views = [view for view, sent in zip(self._views, is_sent, strict=True) if sent and view is not None]
        return codec.encode(Batch(number, ack, data, self._commands), views)


def lay_out(items: Sequence[Item], is_sent: Sequence[bool]) -> list[PayloadPlace]:
    """Return the place of each item's audio in the payload frame, where the audio that is sent lies back to back."""
    data, end = [], 0
    for item, sent in zip(items, is_sent, strict=True):
        if not sent:
            data.append(PayloadPlace(item.key, None, 0, None))
            continue
        assert item.payload is not None, "only audio that the item has can be sent"
        data.append(PayloadPlace(item.key, end, item.payload.nbytes, codec.rows_of(item.payload)))
        end += item.payload.nbytes
    return data


def _view(item: Item) -> memoryview | None:
    """Return the bytes of an item's audio. Raises TypeError if they cannot be sent."""
    if type(item.key) is not bytes:
        raise TypeError(f"a key is bytes, not {type(item.key).__name__}")
    payload = item.payload
    if payload is None:
        return None
    if not isinstance(payload, np.ndarray) or payload.dtype != np.float32 or payload.ndim > 2:
        raise TypeError("audio is an array of float32 with one axis or two")
    return payload.data.cast("B")


# The link


class EngineMismatch(EngineError):
    """Engine and gateway cannot work together: another version, another model than the other engines, another fleet
    secret, or a message that cannot be decoded before the link is set up."""


@dataclass(slots=True)
class LinkEvents:
    """Callbacks of a link to its owner."""

    on_output: Callable[[messages.Output], None]
    on_progress: Callable[[codec.Progress], None]
    on_room: Callable[[], None]
    on_lost: Callable[[str], None]


class EngineLink:
    """A connection to one engine process; usable after `connect`."""

    def __init__(self, address: str, cache_bytes: int, events: LinkEvents, keys: LinkKeys | None = None) -> None:
        self.address = address
        # Id of the engine process, and its version.
        self.engine = ""
        self.version = ""
        self.status = codec.Status()
        self.cache = SenderCache(cache_bytes)
        # Why the link is lost or closed; None while it is neither.
        self.lost: str | None = None
        # Done as soon as the link is lost or closed.
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # The engine reported that its runner failed.
        self.engine_failed = False
        self._cache_bytes = cache_bytes
        self._position_bytes = 0  # of the audio of one position; not known before the welcome
        self._keys = keys
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._welcome: asyncio.Future[codec.Welcome] = self._loop.create_future()
        self.numbering = Numbering()
        self.outbox = SendQueue()
        # Items of unacknowledged batches, by batch number: a repair may ask for them.
        self._unacknowledged_items: dict[int, list[messages.Item]] = {}
        # Number of the last batch that needed a repair.
        self._last_repaired = 0
        self._batch_timer: asyncio.TimerHandle | None = None
        self._ack_timer: asyncio.TimerHandle | None = None
        self._beat_timer: asyncio.TimerHandle | None = None
        self._last_batch_at = 0.0
        # Called right before the next batch is made.
        self._collectors: list[Callable[[], None]] = []
        # Done when all commands except replays have been sent.
        self._sent_waiters: list[asyncio.Future[None]] = []
        # (batch number, done when the engine has acknowledged it)
        self._ack_waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._received_at = self._beat_at = self._loop.time()

    async def connect(
        self, context: zmq.Context[zmq.Socket[bytes]], gateway: str, model: str | None, timeout_s: float
    ) -> ModelSpec:
        """Say hello and wait for the engine to be warm. Raises EngineUnreachable or EngineMismatch."""
        self._socket = GatewaySocket(
            context, self.address, self._receive, self._disconnected, self._refused, self._keys
        )
        hello = codec.Hello(codec.WIRE_VERSION, package_version(), gateway, self._cache_bytes, model)
        self._socket.send(codec.encode(hello))
        try:
            async with asyncio.timeout(timeout_s):
                welcome = await asyncio.shield(self._welcome)
        except TimeoutError:
            self.close()
            raise EngineUnreachable(
                f"no engine answers at {self.address} within {timeout_s:g} s; "
                f"start one with `tickertape engine --listen {self.address}`"
            ) from None
        except BaseException:
            self.close()
            raise
        if welcome.wire != codec.WIRE_VERSION:
            self.close()
            raise EngineMismatch(
                f"the engine at {self.address} runs tickertape {welcome.version} (wire {welcome.wire}), this gateway "
                f"{package_version()} (wire {codec.WIRE_VERSION}); install the same version on both"
            )
        if self.lost is not None:
            raise EngineUnreachable(self.lost)  # the connection broke after the welcome
        self.engine, self.version = welcome.engine, welcome.version
        self.item_checker = ItemChecker("main", welcome.spec, self.cache)
        self._position_bytes = welcome.spec.samples_per_position * SAMPLE_BYTES
        self._set_status(welcome.status)
        # Nothing has been sent yet: the mirror is empty before and after, like the engine's cache.
        warm_up(self.item_checker)
        self._received_at = self._beat_at = self._loop.time()
        self._beat_timer = self._loop.call_later(BEAT_SECONDS, self.beat)
        return welcome.spec

    @property
    def silent_s(self) -> float:
        """Seconds since the last message of the engine."""
        return self._loop.time() - self._received_at

    @property
    def has_room(self) -> bool:
        """Whether the engine has acknowledged enough batches to be sent more."""
        return self.numbering.may_send

    def send(self, command: messages.Command, items: list[messages.Item] | None = None) -> None:
        """Queue a command and its items for the next batch.

        A command that cannot be encoded ends its own stream with `Failed`.
        """
        if self.lost is not None:
            return
        self.outbox.put((command, items or []))
        self._schedule_batch()

    def send_paced(self, source: PacedSource) -> None:
        """Send the source's pieces in the part of each batch that live commands leave free."""
        if self.lost is None:
            self.outbox.add_source(source)
            self._schedule_batch()

    def collect(self, collector: Callable[[], None]) -> None:
        """Call the collector once, right before the next batch is made: commands that it sends join that batch."""
        if self.lost is None:
            self._collectors.append(collector)
            self._schedule_batch()

    async def wait_sent(self) -> None:
        """Wait until all commands passed to `send` so far have been sent, or the link has ended. Replays are not
        waited for."""
        if self.lost is None and self._has_unsent_commands:
            waiter = self._loop.create_future()
            self._sent_waiters.append(waiter)
            await waiter

    async def wait_acknowledged(self) -> None:
        """Wait until the engine has acknowledged all commands passed to `send` so far, or the link has ended."""
        await self.wait_sent()
        number, waiter = self.numbering.sent, self._loop.create_future()
        if self.lost is None and self.numbering.acknowledged_until < number:
            self._ack_waiters.append((number, waiter))
            await asyncio.wait({waiter, self.ended}, return_when=asyncio.FIRST_COMPLETED)

    def close(self) -> None:
        """Disconnect and tell the engine; does not call `on_lost`. Idempotent."""
        if self.lost is None:
            self.lost = "closed"
            self._end()
            self._socket.close(codec.encode(codec.Bye()))
        self._stop_timers()

    def _lose(self, why: str) -> None:
        if self.lost is not None:
            return
        self.lost = why
        self._end()
        self._stop_timers()
        self._socket.close()
        if not self._welcome.done():
            self._welcome.set_exception(EngineMismatch(f"the engine at {self.address} refuses: {why}"))
        elif self.engine:
            self._events.on_lost(why)

    def _end(self) -> None:
        """Resolve all futures, because the link is lost or closed."""
        self.ended.set_result(None)
        self._resolve_sent()

    def _resolve_sent(self) -> None:
        """Resolve the futures of `wait_sent` if all commands have been sent, or the link is lost."""
        if self.lost is None and self._has_unsent_commands:
            return
        waiters, self._sent_waiters = self._sent_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _stop_timers(self) -> None:
        for timer in (self._batch_timer, self._ack_timer, self._beat_timer):
            if timer is not None:
                timer.cancel()

    def _disconnected(self) -> None:
        # Before the welcome the socket tries again until the timeout of `connect`.
        if self._welcome.done():
            self._lose(f"the connection to the engine at {self.address} broke")

    def _refused(self) -> None:
        if not self._welcome.done():
            self._lose(WHY_REFUSED)

    # Sending.

    def _schedule_batch(self) -> None:
        if self._batch_timer is None and self.numbering.may_send:
            wait = self._last_batch_at + TICK_SECONDS - self._loop.time()
            # Even without a wait, call_later lets commands of the same event loop iteration join the batch.
            self._batch_timer = self._loop.call_later(max(0.0, wait), self._send_batch)

    def _send_batch(self) -> None:
        """Send the next batch."""
        if self.numbering.may_send:
            self._call_collectors()
        self._batch_timer = None
        batch, failures = OutgoingBatch(), list[messages.Failed | None]()

        def add(queued: Queued) -> int:
            command, items = queued
            try:
                return batch.add(command, items)
            except Exception as error:
                failures.append(self._abort_stream_of(command, batch, error))
                return 0

        if self.numbering.may_send:
            self.outbox.fill(self.numbering.next_number, add)
        if not batch and not failures:
            self._resolve_sent()
            return
        self._last_batch_at = self._loop.time()
        if batch:
            numbering = self.numbering
            frames = batch.frames(numbering.next_number, numbering.accepted, self.item_checker.pack)
            numbering.keep(frames)
            self._unacknowledged_items[numbering.sent] = batch.items
            self._cancel_ack()
            self._socket.send(frames)
        self._resolve_sent()
        if self.outbox.has_more:
            self._schedule_batch()
        for failed in failures:
            if failed is not None:
                self._events.on_output(failed)

    def _call_collectors(self) -> None:
        """Call the collectors. If one fails, the batch is sent without its commands."""
        collectors, self._collectors = self._collectors, []
        for collect in collectors:
            try:
                collect()
            except Exception:
                logger.exception(
                    "commands for the engine at %s could not be collected; the others are sent", self.address
                )

    @property
    def _has_unsent_commands(self) -> bool:
        """Whether something other than replays waits for the next batch."""
        return bool(self._collectors) or self.outbox.has_commands

    def _abort_stream_of(
        self, command: messages.Command | None, batch: OutgoingBatch, error: Exception
    ) -> messages.Failed | None:
        """Abort the stream of a command that cannot be encoded. Returns the output for the stream's reader."""
        logger.error("a command to the engine at %s cannot be encoded", self.address, exc_info=error)
        if command is None:
            return None
        opens = isinstance(command, messages.Open)
        if not opens:
            # If the stream id itself cannot be encoded, the engine does not know the stream.
            with suppress(UnicodeEncodeError):
                batch.add(messages.Abort(command.stream), [])
        why = f"a value cannot be sent to the engine: {type(error).__name__}"
        return messages.Failed(command.stream, error_code_of(opens), f"stream {command.stream!r}: {why}")

    def beat(self) -> None:
        """Send a heartbeat, and give the link up if the engine has sent nothing for too long. Repeats itself."""
        now = self._loop.time()
        if now - self._beat_at > BEAT_SECONDS + STOPPED_SECONDS:
            # This process was stopped itself: its own pause is no silence of the engine.
            self._received_at = now
        self._beat_at = now
        if now - self._received_at > SILENCE_SECONDS:
            self._lose(f"the engine at {self.address} has been silent for {SILENCE_SECONDS:g} s")
            return
        self._send_beat()
        self._beat_timer = self._loop.call_later(BEAT_SECONDS, self.beat)

    def _send_beat(self) -> None:
        self._cancel_ack()
        self._socket.send(codec.encode(codec.Beat(self.numbering.sent, self.numbering.accepted)))

    def _schedule_ack(self) -> None:
        if self._ack_timer is None:
            self._ack_timer = self._loop.call_later(ACK_SECONDS, self._send_beat)

    def _cancel_ack(self) -> None:
        if self._ack_timer is not None:
            self._ack_timer.cancel()
            self._ack_timer = None

    # Receiving.

    def _receive(self, frames: Frames) -> None:
        try:
            message = codec.decode(frames, to_engine=False)
        except WireError as error:
            self._lose(str(error))
            return
        self._received_at = self._loop.time()
        self._dispatch(message)

    def _dispatch(self, message: Any) -> None:
        match message:
            case codec.Welcome():
                if not self._welcome.done():
                    self._welcome.set_result(message)
            case codec.Unwelcome():
                self._lose(message.message)
            case codec.Update():
                self._acknowledged(message.ack)
                arrival = self.numbering.classify(message.seq)
                if arrival is Arrival.NEXT:
                    self.numbering.accept(message.seq)
                    self._schedule_ack()
                    self._handle_update(message)
                elif arrival is Arrival.AFTER_A_GAP:
                    self._request_resend()
            case codec.Beat():
                self._set_status(message.status or self.status)
                self._acknowledged(message.ack)
                if message.sent > self.numbering.accepted:
                    self._request_resend()
            case codec.ResendRequest():
                for kept in self.numbering.kept_since(message.seq):
                    self._socket.send(kept)
            case codec.Missing():
                self._repair(message)

    def _set_status(self, status: codec.Status) -> None:
        self.status, before = status, self.outbox.window_bytes
        self.outbox.allow_replays(status.replay_positions, self._position_bytes)
        if self.outbox.window_bytes > before and self.outbox.has_more:
            self._schedule_batch()

    def _request_resend(self) -> None:
        self._socket.send(codec.encode(codec.ResendRequest(self.numbering.accepted + 1)))

    def _acknowledged(self, number: int) -> None:
        """The engine has received all batches up to this number."""
        acknowledged = self.numbering.acknowledged(number)
        for batch in acknowledged:
            self._unacknowledged_items.pop(batch, None)
            self.outbox.acknowledged(batch)
        while self._ack_waiters and self._ack_waiters[0][0] <= number:
            _, waiter = self._ack_waiters.pop(0)
            if not waiter.done():
                waiter.set_result(None)
        if acknowledged and self.numbering.may_send:
            if self.outbox.has_more or self._collectors:
                self._schedule_batch()
            self._events.on_room()

    def _handle_update(self, update: codec.Update) -> None:
        self._set_status(update.status)
        for output in update.outputs:
            if isinstance(output, messages.Dead):
                self.engine_failed = True
                self._lose(output.message)
                return
            self._events.on_output(output)
        for progress in update.progress:
            self._events.on_progress(progress)

    def _repair(self, missing: codec.Missing) -> None:
        """The mirror differs from the engine's cache: remove what the engine misses from it, and send the data
        again."""
        items = {item.key: item for item in self._unacknowledged_items.get(missing.seq, []) if item.payload is not None}
        found = [items[key] for key in missing.keys if key in items]
        gone = [key for key in missing.keys if key not in items]
        logger.warning(
            "the engine at %s does not have %d items of audio that were sent before; sending them again",
            self.address,
            len(missing.keys),
        )
        if missing.seq > self._last_repaired:
            # The engine may ask repeatedly for one batch; it is counted as one repair.
            self._last_repaired = missing.seq
            self.cache.forget(gone)
            self.cache.repair({item.key: item.payload.nbytes for item in found})
        data = lay_out(found, [True] * len(found))
        self._socket.send(codec.encode(codec.Repair(missing.seq, data, gone), [item.payload.data for item in found]))
