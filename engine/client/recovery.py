"""Opens streams again on another engine, after their engine was lost (`Recovery`) or while it is drained
(`Migrations`).

Both are tasks of the supervisor, in the gateway's event loop. What a new engine is sent is decided in
`engine/boundary/replay.py`.

`Recovery` owns the lists of lost streams. Invariant: a lost stream is in exactly one state. It is held until the crash
suspects are known, waiting, being reopened by one task, on an engine, or ended. Only `hold`, `release`, `reopen_on`,
`forget`, the loop `run` and the reopening task change the state, and the task only while it is the stream's registered
task. A stream that gets no engine in time is ended with an error.

A stream that may have crashed its engine (a suspect) is on probation while it is the only suspect that is reopened: if
the engine crashes again, it was this stream.

`Migrations` checks the pool a few times per second, and migrates the streams of draining engines, a few at a time. A
stream migrates in a pause of speech if one comes soon, because the interruption is least noticed there. A slot on the
target is reserved first, with a placeholder stream; if there is none, the stream stays. The stream is then reopened on
the target as after the loss of an engine, and its words do not change. The old engine keeps it until the new one has
all of its audio.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine import messages
from engine.client.pool import EnginePool, PooledEngine
from engine.client.stream import EngineStream
from engine.errors import AtCapacity, EngineError, EngineUnavailable

logger = logging.getLogger(__name__)

# How often waiting streams look for an engine with room, besides when one becomes available.
RETRY_S = 0.25
# Probation ends after this time if the suspect has neither crashed the engine nor passed the audio of the crash.
PROBATION_S = 10.0
# Last recoveries whose durations are kept for the metrics.
RECOVERIES_KEPT = 256
# How often the pool is checked for draining engines.
MIGRATION_POLL_SECONDS = 0.25
# How long a stream waits for a pause before it migrates without one.
PAUSE_WAIT_SECONDS = 15.0
# Most streams of a gateway that migrate at a time. Each is interrupted until it is rebuilt, and the target rebuilds
# many at once no faster than a few, so the others stay where they are meanwhile.
MAX_MIGRATING = 4
# A migration that has not ended after this time counts no more: its client may send no audio.
MIGRATION_COUNTS_SECONDS = 5.0


@dataclass(slots=True)
class RecoveryCounts:
    """Counters since the start of the gateway: streams, and the sum of their interruptions in seconds."""

    recovered: int = 0
    given_up: int = 0
    seconds_sum: float = 0.0


class Recovery:
    """The lost streams of a gateway, and the tasks that reopen them. `run` is the loop that starts these tasks."""

    def __init__(self, pool: EnginePool, timeout_s: float, clock: Callable[[], float]) -> None:
        self.counts = RecoveryCounts()
        self.recent_seconds: deque[float] = deque(maxlen=RECOVERIES_KEPT)
        self._pool = pool
        self._timeout_s = timeout_s
        self._clock = clock
        self.held: set[EngineStream] = set()
        self.waiting: list[EngineStream] = []
        self.reopening: dict[EngineStream, asyncio.Task[None]] = {}
        # The crash suspect on probation, and the time of its start.
        self._on_probation: tuple[EngineStream, float] | None = None
        self._wake = asyncio.Event()

    async def run(self) -> None:
        while True:
            try:
                # Not `wait_for`, which would miss a cancellation that comes together with the wake-up.
                async with asyncio.timeout(RETRY_S if self.waiting else None):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            self._place_waiting(self._clock())

    async def close(self) -> list[EngineStream]:
        """Stop. Returns the streams that are on no engine."""
        tasks = dict(self.reopening)
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        return [*self.held, *self.waiting, *tasks]

    @property
    def is_under_way(self) -> bool:
        """Whether a stream has not passed the point where its engine was lost."""
        lost = self.held or self.waiting or self.reopening
        return bool(lost) or any(stream.placement.lost_at is not None for stream in self._pool.streams())

    def hold(self, streams: list[EngineStream]) -> None:
        """The engine of these streams is lost: keep them until `release`.

        A stream that was never opened is not kept: `EngineClient.open` tries the next engine.
        """
        if self._on_probation is not None and self._on_probation[0] in streams:
            self._on_probation = None
        for stream in streams:
            self.reopening.pop(stream, None)
            if stream.is_open and stream.was_opened:
                self.held.add(stream)

    def release(self, streams: list[EngineStream]) -> None:
        """The crash suspects are known: streams that have not been ended may be reopened, those with speech first, and
        of these the ones with the least to replay: so most wait for less."""
        for stream in sorted(streams, key=lambda stream: (stream.is_silent, len(stream.replay_log))):
            if stream in self.held:
                self.held.remove(stream)
                self.waiting.append(stream)
        self._wake.set()

    def reopen_on(self, stream: EngineStream, pooled: PooledEngine) -> None:
        """Start to reopen a stream on this engine, which has a free slot."""
        task = asyncio.create_task(self._reopen(stream, pooled), name=f"reopen {stream.id}")
        self.reopening[stream] = task

    def engine_available(self) -> None:
        """An engine has become available."""
        self._wake.set()

    def forget(self, stream: EngineStream) -> None:
        """The stream has ended."""
        self.held.discard(stream)
        self.reopening.pop(stream, None)
        if stream in self.waiting:
            self.waiting.remove(stream)

    def note_progress(self, stream: EngineStream) -> None:
        """Count the stream as recovered if it has passed the point where its last engine stopped."""
        lost_at = stream.placement.lost_at
        if lost_at is None or not stream.placement.is_recovered:
            return
        stream.placement.lost_at = None
        took = self._clock() - lost_at
        self.recent_seconds.append(took)
        self.counts.seconds_sum += took
        self.counts.recovered += 1
        self._wake.set()

    def _place_waiting(self, now: float) -> None:
        self._review_probation(now)
        for stream in list(self.waiting):
            if self._is_too_late(stream, now):
                self.counts.given_up += 1
                stream.end(
                    messages.Dead(f"the engine was lost, and no other took the stream within {self._timeout_s:g} s")
                )
                continue
            pooled = self._pool.engine_with_free_slot()
            if pooled is not None and self._may_reopen(stream, now):
                if stream.suspicion.must_wait:
                    self._on_probation = (stream, now)
                self.waiting.remove(stream)
                self.reopen_on(stream, pooled)

    def _is_too_late(self, stream: EngineStream, now: float) -> bool:
        lost_at = stream.placement.lost_at
        assert lost_at is not None, "a waiting stream has a time of loss"
        return now - lost_at > self._timeout_s

    def _may_reopen(self, stream: EngineStream, now: float) -> bool:
        """Whether the stream may be reopened now. If the last step is unknown, suspects are tried one at a time."""
        if not stream.suspicion.must_wait:
            return True
        another_on_probation = self._on_probation is not None and self._on_probation[0] is not stream
        return not another_on_probation and now >= stream.suspicion.not_before

    def _review_probation(self, now: float) -> None:
        """End the probation if the suspect is cleared or has ended, or after `PROBATION_S`."""
        if self._on_probation is None:
            return
        suspect, since = self._on_probation
        if not suspect.suspicion.strikes or not suspect.is_open or now - since > PROBATION_S:
            suspect.suspicion.must_wait = False
            self._on_probation = None

    async def _reopen(self, stream: EngineStream, pooled: PooledEngine) -> None:
        mine = asyncio.current_task()
        if self.reopening.get(stream) is not mine:
            return  # the stream ended before this task ran
        refusal: Exception | None = None
        try:
            await self._pool.open_on(pooled, stream)
        except (EngineError, ValueError) as error:
            refusal = error
        except Exception as error:
            logger.exception("stream %s cannot be reopened", stream.id)
            refusal = error
        if self.reopening.get(stream) is not mine:
            return  # the stream ended, or its engine was lost again and it is held
        del self.reopening[stream]
        if refusal is None:
            self.note_progress(stream)
            self._wake.set()
        elif isinstance(refusal, (AtCapacity, EngineUnavailable)):
            self.waiting.append(stream)
        else:
            stream.end(messages.Failed(stream.id, type(refusal).__name__, str(refusal)))


class Migrations:
    """Migrates streams until closed. `make_placeholder` makes a stream that reserves a slot for another one."""

    def __init__(
        self,
        pool: EnginePool,
        recovery: Recovery,
        make_placeholder: Callable[[EngineStream], EngineStream],
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._recovery = recovery
        self._make_placeholder = make_placeholder
        self._clock = clock
        # Since when each engine is draining.
        self._draining_since: dict[PooledEngine, float] = {}
        self._migrating: dict[EngineStream, asyncio.Task[None]] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(MIGRATION_POLL_SECONDS)
            self.start_migrations()

    async def close(self) -> None:
        tasks = list(self._migrating.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def start_migrations(self) -> None:
        """Start the migration of every stream that can migrate now."""
        draining = [pooled for pooled in self._pool.all if pooled.link is not None and pooled.draining]
        now = self._clock()
        self._draining_since = {pooled: self._draining_since.get(pooled, now) for pooled in draining}
        free = MAX_MIGRATING - self._migrating_count(now) if draining else 0
        for pooled in draining:
            is_late = now - self._draining_since[pooled] >= PAUSE_WAIT_SECONDS
            for stream in list(pooled.streams.values()):
                if free <= 0:
                    return
                if stream in self._migrating or not stream.can_migrate or not (is_late or stream.is_at_pause):
                    continue
                target = self._pool.engine_with_free_slot()
                if target is None:
                    return
                self._migrating[stream] = asyncio.create_task(
                    self._migrate(stream, pooled, target), name=f"migrate {stream.id} to {target.name}"
                )
                free -= 1

    def _migrating_count(self, now: float) -> int:
        """How many streams have left an engine, or are about to, and are not continued by another one yet."""
        streams = {*self._pool.streams(), *self._recovery.reopening, *self._recovery.waiting}
        lost = [stream.placement.lost_at for stream in streams]
        return len(self._migrating) + sum(at is not None and now - at < MIGRATION_COUNTS_SECONDS for at in lost)

    async def _migrate(self, stream: EngineStream, pooled: PooledEngine, target: PooledEngine) -> None:
        placeholder = self._make_placeholder(stream)
        try:
            await self._pool.open_on(target, placeholder)
        except (EngineError, ValueError) as error:
            logger.info("stream %s is not migrated now and stays on its engine: %s", stream.id, error)
            return
        finally:
            del self._migrating[stream]
        # Free the reserved slot for the stream.
        placeholder.abort_everywhere()
        if pooled.streams.get(stream.id) is stream and stream.can_migrate:
            del pooled.streams[stream.id]
            stream.start_migration(self._clock())
            self._recovery.reopen_on(stream, target)
