"""Keeps a gateway's engines running and connected: starts its own engines, notices losses, hands streams to recovery.

`Supervisor` is the part of `EngineClient` with tasks: one per engine that starts it, connects to it and waits for its
loss, one for recovery and one for migration. All run in the gateway's event loop. It owns the engine pool and the
counters across engine restarts. An engine is "ours" if this gateway starts its process; other engines are only
connected to.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from uuid import uuid4

from engine import messages
from engine.boundary import codec
from engine.boundary.crash_suspects import EngineDeath, StreamInStep, find_culprit
from engine.boundary.input_cache import CacheStats
from engine.boundary.sockets import LinkKeys, leaves_the_machine, link_context
from engine.client.engine_handles import EngineHandle, RemoteEngine
from engine.client.link import EngineLink, EngineMismatch, LinkEvents
from engine.client.pool import EnginePool, PooledEngine, Table
from engine.client.recovery import RETRY_S, Migrations, Recovery
from engine.client.stream import EngineStream
from engine.errors import EngineDead, StreamFailed
from engine.spec import ModelSpec

logger = logging.getLogger(__name__)

MAX_BACKOFF_S = 5.0
# Delay before another attempt to start a spare: each attempt takes time from the serving engines.
SPARE_RETRY_S = 60.0
# With spares, an engine waits at most this long for those before it in the list to start, and for the recovery of
# streams: an engine that loads its model takes the device's time from the engine that rebuilds them.
START_APART_S = 30.0
RECOVERY_POLL_S = 0.1


@dataclass(slots=True)
class EngineMetrics:
    """Counters since the start of the gateway, across engine restarts."""

    input_cache: CacheStats = field(default_factory=CacheStats)
    encoder_queries: int = 0
    encoder_hits: int = 0
    steps: int = 0
    step_ns: Counter[str] = field(default_factory=Counter)
    blank_guard: int = 0
    revised: int = 0
    revisions_skipped: int = 0
    words_revised: int = 0
    restarts: int = 0
    streams_recovered: int = 0
    streams_given_up: int = 0
    crashing_streams: int = 0
    recovery_seconds_sum: float = 0.0
    recent_recovery_seconds: list[float] = field(default_factory=list)

    def add_life(self, status: codec.Status) -> None:
        """Add the counters of one engine process."""
        self.encoder_queries += status.encoder_queries
        self.encoder_hits += status.encoder_hits
        self.steps += status.steps
        self.step_ns.update(status.step_ns)
        self.blank_guard += status.blank_guard
        self.revised += status.revised
        self.revisions_skipped += status.revisions_skipped
        self.words_revised += status.words_revised


class Supervisor:
    """Owns the engine pool, the task that keeps each engine connected, recovery and migrations."""

    def __init__(
        self,
        engines: Sequence[EngineHandle],
        model: str | None,
        cache_bytes: int,
        timeout_s: float,
        max_load: float,
        spares: int,
        on_session: Callable[[PooledEngine, messages.SessionOutput], None],
        on_arrival: Callable[[PooledEngine], None],
        make_placeholder: Callable[[EngineStream], EngineStream],
        keys: LinkKeys | None = None,
    ) -> None:
        """`spares`: number of engines that serve only after another one is lost. `keys`: keys of links over tcp."""
        # The model that all engines run: known when the first of them has connected.
        self.spec: asyncio.Future[ModelSpec] = asyncio.get_running_loop().create_future()
        self.pool = EnginePool(engines, max_load, spares)
        self._model = model
        # Called with outputs about sessions.
        self._on_session = on_session
        # Called for every engine that connects, before anything else is sent to it.
        self._on_arrival = on_arrival
        self._cache_bytes = cache_bytes
        self._keys = keys
        self._gateway = uuid4().hex
        self._clock = asyncio.get_running_loop().time
        self.recovery = Recovery(self.pool, timeout_s, self._clock)
        self._migrations = Migrations(self.pool, self.recovery, make_placeholder, self._clock)
        self._holding: dict[PooledEngine, asyncio.Task[None]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._arrival = asyncio.Event()
        self._past = EngineMetrics()

    async def start(self) -> None:
        """Start to keep the engines connected; returns after the first attempt to start each of our own.

        Raises if none of our engines could be started, or if one of them has another model. Engines elsewhere may
        connect at any later time.
        """
        for pooled in self.pool.all:
            self._begin_to_hold(pooled)
        self._tasks = [
            asyncio.create_task(self.recovery.run(), name="recovery of streams"),
            asyncio.create_task(self._migrations.run(), name="moves of streams"),
        ]
        serving = self.pool.all[: len(self.pool.all) - self.pool.spares]
        tries = [pooled.first_try for pooled in serving if pooled.engine.is_ours]
        results = await asyncio.gather(*tries, return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        mismatches = [error for error in errors if isinstance(error, EngineMismatch)]
        if mismatches or (errors and len(errors) == len(tries)):
            await self.close()
            raise (mismatches or errors)[0]

    async def close(self, at_once: bool = False) -> None:
        """End all streams, disconnect from the engines, and stop our own ones."""
        tasks = [*self._tasks, *self._holding.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._migrations.close()
        waiting = await self.recovery.close()
        for stream in [*waiting, *self.pool.streams()]:
            stream.end(messages.Dead("the server is shutting down"))
        for pooled in self.pool.all:
            if pooled.link is not None:
                pooled.link.close()
                pooled.link = None
        await asyncio.gather(*(pooled.engine.stop(at_once) for pooled in self.pool.all))

    def ended(self, stream: EngineStream) -> None:
        """The stream has ended: forget it."""
        self.pool.leave(stream)
        self.recovery.forget(stream)

    def metrics(self) -> EngineMetrics:
        past, counts = self._past, self.recovery.counts
        total = replace(past, input_cache=replace(past.input_cache), step_ns=Counter(past.step_ns))
        total.streams_recovered, total.streams_given_up = counts.recovered, counts.given_up
        total.recovery_seconds_sum = counts.seconds_sum
        total.recent_recovery_seconds = list(self.recovery.recent_seconds)
        for pooled in self.pool.all:
            if pooled.link is not None:
                total.input_cache.add(pooled.link.cache.stats)
            total.add_life(pooled.last_status if pooled.link is None else pooled.link.status)
        return total

    # The engine table.

    def follow(self, table: Table) -> None:
        """Apply a new engine table: connect to new engines; removed ones are left when they are empty."""
        wanted = {(entry.name, entry.address): entry for entry in table.engines}
        for pooled in self.pool.all:
            entry = wanted.pop((pooled.name, pooled.engine.address), None)
            pooled.delisted, pooled.emptied = entry is None, entry is not None and entry.state == "draining"
        for entry in wanted.values():
            logger.info("engine %s at %s was added to the table; connecting to it", entry.name, entry.address)
            pooled = PooledEngine(RemoteEngine(entry.address), entry.name)
            pooled.emptied = entry.state == "draining"
            self.pool.all.append(pooled)
            self._begin_to_hold(pooled)

    async def leave_delisted(self) -> None:
        """Disconnect from engines that were removed from the table and have none of our streams."""
        for pooled in [
            pooled for pooled in self.pool.all if pooled.delisted and not pooled.streams and not pooled.opening
        ]:
            logger.info(
                "disconnecting from engine %s at %s: not in the table any more", pooled.name, pooled.engine.address
            )
            self.pool.all.remove(pooled)
            holding = self._holding.pop(pooled)
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)
            if pooled.link is not None:
                self._past.input_cache.add(pooled.link.cache.stats)
                pooled.last_status = pooled.link.status
                pooled.link.close()
                pooled.link = None
            self._past.add_life(pooled.last_status)

    def _begin_to_hold(self, pooled: PooledEngine) -> None:
        if self._keys is None and leaves_the_machine(pooled.engine.address):
            logger.warning("the link to %s is neither encrypted nor authenticated", pooled.engine.address)
        self._holding[pooled] = asyncio.create_task(self._hold(pooled), name=f"engine {pooled.name}")

    # One engine, from its start to its loss.

    async def _hold(self, pooled: PooledEngine) -> None:
        """Keep the engine running and connected until the task is cancelled."""
        backoff = RETRY_S
        while True:
            try:
                await self._wait_for_turn(pooled)
                await self._connect(pooled)
            except Exception as error:
                if not pooled.first_try.done():
                    pooled.first_try.set_exception(error)
                    pooled.first_try.exception()
                if self._is_only_spare():
                    logger.error("the spare engine cannot be used; the serving engines continue without it: %s", error)
                    await asyncio.sleep(SPARE_RETRY_S)
                    continue
                if pooled.problem != str(error):
                    logger.error("the engine at %s cannot be used: %s", pooled.engine.address, error)
                pooled.problem = str(error)
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, MAX_BACKOFF_S)
                continue
            backoff, pooled.problem = RETRY_S, ""
            if not pooled.first_try.done():
                pooled.first_try.set_result(None)
            self.recovery.wake()
            why = await self._loss_of(pooled)
            await self._lose(pooled, why)

    async def _wait_for_turn(self, pooled: PooledEngine) -> None:
        """With spares, start the engines one after the other, so that the serving ones are ready sooner, and streams
        are recovered sooner."""
        if not self.pool.spares:
            return
        before = self.pool.all[: self.pool.all.index(pooled)]
        with suppress(TimeoutError):
            async with asyncio.timeout(START_APART_S):
                while any(other.link is None for other in before):
                    self._arrival.clear()
                    await self._arrival.wait()
                while self._is_only_spare() and self.recovery.is_under_way:  # noqa: ASYNC110
                    await asyncio.sleep(RECOVERY_POLL_S)

    def _is_only_spare(self) -> bool:
        """Whether enough engines serve, so that a missing engine is only missing as a spare."""
        return len(self.pool.links()) == len(self.pool.all) - self.pool.spares

    async def _connect(self, pooled: PooledEngine) -> None:
        """Start the engine if it is ours, and connect. Raises EngineDead if its process exits before that."""
        await pooled.engine.start()
        pooled.lost = asyncio.get_running_loop().create_future()
        link = EngineLink(pooled.engine.address, self._cache_bytes, self._events(pooled), self._keys)
        connecting = asyncio.create_task(
            link.connect(link_context(), self._gateway, self._model, pooled.engine.start_timeout_s)
        )
        exited = asyncio.create_task(pooled.engine.exited())
        try:
            await asyncio.wait({connecting, exited}, return_when=asyncio.FIRST_COMPLETED)
            if not connecting.done():
                raise EngineDead(f"{exited.result()}. That was before it was ready; its log says why")
            spec = connecting.result()
        finally:
            for task in (connecting, exited):
                task.cancel()
            await asyncio.gather(connecting, exited, return_exceptions=True)
        if not self.spec.done():
            self.spec.set_result(spec)
        elif spec != self.spec.result():
            link.close()
            raise EngineMismatch(_difference(pooled.engine.address, spec, self.spec.result()))
        self._greet(pooled, link)

    def _greet(self, pooled: PooledEngine, link: EngineLink) -> None:
        """Put a connected engine into the pool. Counts a restart only if it is another process than before."""
        if pooled.engine_id not in ("", link.engine):
            self._past.add_life(pooled.last_status)
            self._past.restarts += 1
        pooled.engine_id = link.engine
        self.pool.arrived(pooled, link)
        self._on_arrival(pooled)
        self._arrival.set()

    def _events(self, pooled: PooledEngine) -> LinkEvents:
        def on_output(output: messages.Output) -> None:
            if isinstance(output, messages.SessionOutput):
                self._on_session(pooled, output)
                return
            stream = None if isinstance(output, messages.Dead) else pooled.streams.get(output.stream)
            if stream is None:
                return
            is_new = isinstance(output, messages.Closed) or (isinstance(output, messages.Text) and bool(output.delta))
            if is_new and stream.placement.lost_at is not None:
                stream.placement.speaks()
                self.recovery.note_progress(stream)
            stream.on_output(output)

        def on_progress(progress: codec.Progress) -> None:
            stream = pooled.streams.get(progress.stream)
            if stream is not None:
                stream.progress(progress.computed)
                self.recovery.note_progress(stream)

        def on_room() -> None:
            for stream in pooled.streams.values():
                stream.wake()

        def on_lost(why: str) -> None:
            if not pooled.lost.done():
                pooled.lost.set_result(why)

        return LinkEvents(on_output, on_progress, on_room, on_lost)

    async def _loss_of(self, pooled: PooledEngine) -> str:
        exited = asyncio.create_task(pooled.engine.exited())
        try:
            await asyncio.wait({pooled.lost, exited}, return_when=asyncio.FIRST_COMPLETED)
            # The end of the connection says nothing of the cause; the end of the process does.
            return "; ".join(task.result() for task in (pooled.lost, exited) if task.done())
        finally:
            exited.cancel()
            await asyncio.gather(exited, return_exceptions=True)

    async def _lose(self, pooled: PooledEngine, why: str) -> None:
        """Take the streams off a lost engine, end the stream that crashed it if that is certain, recover the others."""
        link = pooled.link
        substitute = self.pool.lost(pooled)
        streams, pooled.streams = list(pooled.streams.values()), {}
        assert link is not None
        link.close()
        pooled.last_status = link.status
        self._past.input_cache.add(link.cache.stats)
        pooled.problem = why
        logger.warning("%s; %d streams will be recovered", why, len(streams))
        if substitute is not None:
            logger.warning("the spare engine at %s serves from now on", substitute.engine.address)
        now = self._clock()
        for stream in streams:
            stream.detach(why, now)
        self.recovery.hold(streams)
        try:
            crashed = await pooled.engine.crashed() or link.engine_failed
            others = link.status.slots_used > len(streams)
            crashing = self._crashing_stream(streams, pooled.engine.in_flight(), crashed, others)
            if crashing is not None:
                self._end_crashing_stream(crashing)
        finally:
            self.recovery.release(streams)

    def _end_crashing_stream(self, stream: EngineStream) -> None:
        self._past.crashing_streams += 1
        text = "was ended because the engine died each time it reached this audio; other streams go on"
        error = StreamFailed(stream.id, text)
        stream.end(messages.Failed(stream.id, type(error).__name__, str(error)))

    def _crashing_stream(
        self, streams: list[EngineStream], in_step: list[StreamInStep] | None, crashed: bool, others: bool
    ) -> EngineStream | None:
        """Return the stream that crashed the engine, if that is certain. `others`: other gateways had streams on it."""
        by_suspicion = {stream.suspicion: stream for stream in streams}
        if in_step is None:
            suspects = {stream.suspicion: stream.uncomputed() for stream in streams}
        else:
            ours = {suspect.stream_of(self._gateway): suspect for suspect in in_step}
            others = None in ours
            suspects = {
                stream.suspicion: stream.placement.own_count(ours[stream.id].start, ours[stream.id].end)
                for stream in streams
                if stream.id in ours
            }
        death = EngineDeath(self._clock(), crashed, step_known=in_step is not None, other_gateways=others)
        guilty = find_culprit(suspects, death)
        return None if guilty is None else by_suspicion[guilty]


def _difference(address: str, spec: ModelSpec, others: ModelSpec) -> str:
    """Say how an engine's model differs from that of the other engines."""
    what = "other settings or another model than"
    if (spec.name, spec.weights) != (others.name, others.weights) and spec.name == others.name:
        what = f"other weights ({spec.weights or 'unmarked'}, not {others.weights or 'unmarked'}) than"
    return (
        f"the engine at {address} runs {spec.name!r} with {what} {others.name!r} on the other engines; "
        "behind one gateway all must be the same"
    )
