"""Keeps a gateway's engines running and connected: starts its own engines, notices losses, hands streams to recovery.

`Supervisor` is the part of `EngineClient` with tasks: one per engine that starts it, connects to it and waits for its
loss, one for recovery and one for migration. All run in the gateway's event loop. It owns the engine pool and the
counters across engine restarts. It applies the fleet's engine table, and after a crash it ends the stream that caused
the crash, if that is certain. An engine is "ours" if this gateway starts its process; other engines are only connected
to.
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
from engine.client.fleet_table import Table
from engine.client.link import EngineLink, EngineMismatch, LinkEvents
from engine.client.pool import EnginePool, PooledEngine
from engine.client.recovery import Migrations, Recovery
from engine.client.stream import EngineStream
from engine.errors import EngineDead, StreamFailed
from engine.spec import ModelSpec

logger = logging.getLogger(__name__)

# Wait after the first failed attempt to connect to an engine; it doubles with each further one, up to the maximum.
MIN_BACKOFF_S = 0.25
MAX_BACKOFF_S = 5.0
# Delay before another attempt to start a spare: each attempt takes time from the serving engines.
SPARE_RETRY_S = 60.0
# With spares, an engine is started after those before it in the list, and a spare also after lost streams have been
# recovered: while an engine loads its model, others compute more slowly. This is the longest wait.
TURN_WAIT_S = 30.0
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

    def add_engine(self, status: codec.Status) -> None:
        """Add the last counters of one engine process."""
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
        recovery_timeout_s: float,
        max_load: float,
        spares: int,
        on_session: Callable[[PooledEngine, messages.SessionOutput], None],
        on_connected: Callable[[PooledEngine], None],
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
        # Called for every engine that has connected, before anything else is sent to it.
        self._on_connected = on_connected
        self._cache_bytes = cache_bytes
        self._keys = keys
        self._gateway = uuid4().hex
        self._clock = asyncio.get_running_loop().time
        self.recovery = Recovery(self.pool, recovery_timeout_s, self._clock)
        self._migrations = Migrations(self.pool, self.recovery, make_placeholder, self._clock)
        self._keepers: dict[PooledEngine, asyncio.Task[None]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._connected = asyncio.Event()
        self._past_counters = EngineMetrics()

    async def start(self) -> None:
        """Start to keep the engines connected; returns after the first attempt to start each of our own that is no
        spare.

        Raises if none of these could be started, or if one of them has another model. Other engines may connect at any
        later time.
        """
        for pooled in self.pool.all:
            self._start_keeping(pooled)
        self._tasks = [
            asyncio.create_task(self.recovery.run(), name="recovery of streams"),
            asyncio.create_task(self._migrations.run(), name="migration of streams"),
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
        tasks = [*self._tasks, *self._keepers.values()]
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
        self.pool.remove(stream)
        self.recovery.forget(stream)

    def metrics(self) -> EngineMetrics:
        past, counts = self._past_counters, self.recovery.counts
        total = replace(past, input_cache=replace(past.input_cache), step_ns=Counter(past.step_ns))
        total.streams_recovered, total.streams_given_up = counts.recovered, counts.given_up
        total.recovery_seconds_sum = counts.seconds_sum
        total.recent_recovery_seconds = list(self.recovery.recent_seconds)
        for pooled in self.pool.all:
            if pooled.link is not None:
                total.input_cache.add(pooled.link.cache.stats)
            total.add_engine(pooled.last_status if pooled.link is None else pooled.link.status)
        return total

    # The engine table.

    def follow(self, table: Table) -> None:
        """Apply a new engine table: connect to new engines, mark removed and draining ones.

        `disconnect_delisted` disconnects from a removed engine when it has no streams of ours.
        """
        wanted = {(entry.name, entry.address): entry for entry in table.engines}
        for pooled in self.pool.all:
            entry = wanted.pop((pooled.name, pooled.engine.address), None)
            pooled.delisted, pooled.marked_draining = entry is None, entry is not None and entry.state == "draining"
        for entry in wanted.values():
            logger.info("engine %s at %s was added to the table; connecting to it", entry.name, entry.address)
            pooled = PooledEngine(RemoteEngine(entry.address), entry.name)
            pooled.marked_draining = entry.state == "draining"
            self.pool.all.append(pooled)
            self._start_keeping(pooled)

    async def disconnect_delisted(self) -> None:
        """Disconnect from engines that were removed from the table and have none of our streams."""
        for pooled in [
            pooled for pooled in self.pool.all if pooled.delisted and not pooled.streams and not pooled.opening
        ]:
            logger.info(
                "disconnecting from engine %s at %s: not in the table any more", pooled.name, pooled.engine.address
            )
            self.pool.all.remove(pooled)
            holding = self._keepers.pop(pooled)
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)
            if pooled.link is not None:
                self._past_counters.input_cache.add(pooled.link.cache.stats)
                pooled.last_status = pooled.link.status
                pooled.link.close()
                pooled.link = None
            self._past_counters.add_engine(pooled.last_status)

    def _start_keeping(self, pooled: PooledEngine) -> None:
        if self._keys is None and leaves_the_machine(pooled.engine.address):
            logger.warning("the link to %s is neither encrypted nor authenticated", pooled.engine.address)
        self._keepers[pooled] = asyncio.create_task(self._keep_connected(pooled), name=f"engine {pooled.name}")

    # One engine, from its start to its loss.

    async def _keep_connected(self, pooled: PooledEngine) -> None:
        """Keep the engine running and connected until the task is cancelled."""
        backoff = MIN_BACKOFF_S
        while True:
            began = self._clock()
            try:
                await self._wait_for_turn(pooled)
                await self._connect(pooled)
            except Exception as error:
                if not pooled.first_try.done():
                    pooled.first_try.set_exception(error)
                    pooled.first_try.exception()
                if self._enough_serve():
                    logger.error("the spare engine cannot be used; the serving engines continue without it: %s", error)
                    await asyncio.sleep(SPARE_RETRY_S)
                    continue
                if pooled.problem != str(error):
                    logger.error("the engine at %s cannot be used: %s", pooled.engine.address, error)
                pooled.problem = str(error)
                # An attempt waits for the engine, too. A longer pause would only find it later.
                await asyncio.sleep(max(MIN_BACKOFF_S, backoff - (self._clock() - began)))
                backoff = min(2 * backoff, MAX_BACKOFF_S)
                continue
            backoff, pooled.problem = MIN_BACKOFF_S, ""
            if not pooled.first_try.done():
                pooled.first_try.set_result(None)
            self.recovery.engine_available()
            why = await self._wait_for_loss(pooled)
            await self._lose(pooled, why)

    async def _wait_for_turn(self, pooled: PooledEngine) -> None:
        """With spares, start the engines one after the other, so that the serving ones are ready sooner, and streams
        are recovered sooner."""
        if not self.pool.spares:
            return
        before = self.pool.all[: self.pool.all.index(pooled)]
        with suppress(TimeoutError):
            async with asyncio.timeout(TURN_WAIT_S):
                while any(other.link is None for other in before):
                    self._connected.clear()
                    await self._connected.wait()
                while self._enough_serve() and self.recovery.is_under_way:  # noqa: ASYNC110
                    await asyncio.sleep(RECOVERY_POLL_S)

    def _enough_serve(self) -> bool:
        """Whether as many engines take streams as should serve. Then those that are missing are only spares."""
        return len(self.pool.links()) == len(self.pool.all) - self.pool.spares

    async def _connect(self, pooled: PooledEngine) -> None:
        """Start the engine if it is ours, and connect. Raises EngineDead if its process exits before that."""
        await pooled.engine.start()
        pooled.loss = asyncio.get_running_loop().create_future()
        link = EngineLink(pooled.engine.address, self._cache_bytes, self._events(pooled), self._keys)
        connecting = asyncio.create_task(
            link.connect(link_context(), self._gateway, self._model, pooled.engine.start_timeout_s)
        )
        exited = asyncio.create_task(pooled.engine.exited())
        try:
            await asyncio.wait({connecting, exited}, return_when=asyncio.FIRST_COMPLETED)
            if not connecting.done():
                raise EngineDead(f"{exited.result()} before it was ready; its log says why")
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
        self._add_to_pool(pooled, link)

    def _add_to_pool(self, pooled: PooledEngine, link: EngineLink) -> None:
        """Put a connected engine into the pool. Counts a restart only if it is another process than before."""
        if pooled.engine_id not in ("", link.engine):
            self._past_counters.add_engine(pooled.last_status)
            self._past_counters.restarts += 1
        pooled.engine_id = link.engine
        self.pool.connected(pooled, link)
        self._on_connected(pooled)
        self._connected.set()

    def _events(self, pooled: PooledEngine) -> LinkEvents:
        def on_output(output: messages.Output) -> None:
            if isinstance(output, messages.SessionOutput):
                self._on_session(pooled, output)
                return
            stream = None if isinstance(output, messages.Dead) else pooled.streams.get(output.stream)
            if stream is None:
                return
            continues = isinstance(output, messages.Closed) or (
                isinstance(output, messages.Text) and bool(output.delta)
            )
            if continues and stream.placement.lost_at is not None:
                stream.placement.note_new_words()
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
            if not pooled.loss.done():
                pooled.loss.set_result(why)

        return LinkEvents(on_output, on_progress, on_room, on_lost)

    async def _wait_for_loss(self, pooled: PooledEngine) -> str:
        """Wait until the connection breaks or the engine's process ends; returns the reason."""
        exited = asyncio.create_task(pooled.engine.exited())
        try:
            await asyncio.wait({pooled.loss, exited}, return_when=asyncio.FIRST_COMPLETED)
            # The end of the connection does not show the cause; the end of the process does.
            return "; ".join(task.result() for task in (pooled.loss, exited) if task.done())
        finally:
            exited.cancel()
            await asyncio.gather(exited, return_exceptions=True)

    async def _lose(self, pooled: PooledEngine, why: str) -> None:
        """Detach the streams of a lost engine, end the one that crashed it if that is certain, and recover the
        others."""
        link = pooled.link
        substitute = self.pool.disconnected(pooled)
        streams, pooled.streams = list(pooled.streams.values()), {}
        assert link is not None
        link.close()
        pooled.last_status = link.status
        self._past_counters.input_cache.add(link.cache.stats)
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
            has_other_gateways = link.status.slots_used > len(streams)
            crashing = self._crashing_stream(streams, pooled.engine.in_flight(), crashed, has_other_gateways)
            if crashing is not None:
                self._end_crashing_stream(crashing)
        finally:
            self.recovery.release(streams)

    def _end_crashing_stream(self, stream: EngineStream) -> None:
        self._past_counters.crashing_streams += 1
        text = "was ended because the engine died each time it reached this audio; other streams continue"
        error = StreamFailed(stream.id, text)
        stream.end(messages.Failed(stream.id, type(error).__name__, str(error)))

    def _crashing_stream(
        self, streams: list[EngineStream], in_step: list[StreamInStep] | None, crashed: bool, has_other_gateways: bool
    ) -> EngineStream | None:
        """Return the stream that crashed the engine, if that is certain.

        `in_step`: the streams in the engine's last step, if known. `has_other_gateways`: other gateways had streams on
        the engine, as far as is known without `in_step`.
        """
        by_suspicion = {stream.suspicion: stream for stream in streams}
        if in_step is None:
            suspects = {stream.suspicion: stream.uncomputed() for stream in streams}
        else:
            ours = {suspect.stream_of(self._gateway): suspect for suspect in in_step}
            has_other_gateways = None in ours
            suspects = {
                stream.suspicion: stream.placement.to_stream_positions(ours[stream.id].start, ours[stream.id].end)
                for stream in streams
                if stream.id in ours
            }
        death = EngineDeath(self._clock(), crashed, step_known=in_step is not None, other_gateways=has_other_gateways)
        guilty = find_culprit(suspects, death)
        return None if guilty is None else by_suspicion[guilty]


def _difference(address: str, spec: ModelSpec, others: ModelSpec) -> str:
    """How an engine's model differs from that of the other engines."""
    if spec.name != others.name:
        difference = f"runs another model ({spec.name!r}) than the other engines ({others.name!r})"
    elif spec.weights != others.weights:
        ours, theirs = spec.weights or "without a digest", others.weights or "without a digest"
        difference = f"runs {spec.name!r} with other weights ({ours}, not {theirs}) than the other engines"
    else:
        difference = f"runs {spec.name!r} with other settings than the other engines"
    return f"the engine at {address} {difference}; all engines of a gateway must run the same model"
