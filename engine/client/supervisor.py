"""Keeps engines connected, and carries streams over when one dies.

Who killed the engine? The streams in the step that it died in are suspects. They come back at once with the others,
but no step has two of them until they are past the spot. If the engine dies at the same spot of the same stream again,
that one is ended, and only that one. Deaths that somebody else may have caused (a signal from outside) count for less
than crashes. Of an engine on another machine the last step is not known: there, whoever had audio to compute is a
suspect, and after a second death suspects come back one at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from uuid import uuid4

import zmq

from engine import messages
from engine.boundary import codec
from engine.boundary.input_cache import CacheStats
from engine.client.capacity import streams_held
from engine.client.handles import Engine
from engine.client.link import EngineLink, EngineMismatch, LinkEvents
from engine.client.stream import EngineStream
from engine.errors import AtCapacity, EngineDead, EngineError, StreamFailed
from engine.spec import ModelSpec

logger = logging.getLogger(__name__)

RETRY_S = 0.25
MAX_BACKOFF_S = 5.0
# A suspect that neither kills the engine nor gets on is waited for so long before the next one is tried.
PROBATION_S = 10.0
# Deaths at one spot that convict a stream: crashes, ends by a signal that anybody may have sent, and ends of engines
# whose last step is not known. An operator may well kill an engine twice just as it comes back.
STRIKES_IF_CRASHED = 2
STRIKES_IF_UNKNOWN = 3
STRIKES_IF_UNSEEN = 4
# One death with more streams than this in a step is no reason to hold all of them up.
FEW_SUSPECTS = 16
RECOVERIES_KEPT = 256
# Streams wait so long for the next stride or step even where there is plenty of room.
USUAL_LAG_MS = 1000.0


@dataclass(slots=True)
class EngineMetrics:
    """Counters since the start, across engine restarts."""

    input_cache: CacheStats = field(default_factory=CacheStats)
    encoder_queries: int = 0
    encoder_hits: int = 0
    steps: int = 0
    step_ns: Counter[str] = field(default_factory=Counter)
    blank_guard: int = 0
    restarts: int = 0
    streams_recovered: int = 0
    streams_given_up: int = 0
    poisonous_streams: int = 0
    recovery_seconds_sum: float = 0.0
    recent_recovery_seconds: list[float] = field(default_factory=list)

    def add_link(self, link: EngineLink) -> None:
        self.input_cache.add(link.cache.stats)
        self.encoder_queries += link.status.encoder_queries
        self.encoder_hits += link.status.encoder_hits
        self.steps += link.status.steps
        self.step_ns.update(link.status.step_ns)
        self.blank_guard += link.status.blank_guard


class Seat:
    """One engine and, while it lives, the link to it and the streams on it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.link: EngineLink | None = None
        self.streams: dict[str, EngineStream] = {}
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.first_try: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Supervisor:
    def __init__(
        self, engines: Sequence[Engine], model: str | None, cache_bytes: int, timeout_s: float, max_load: float
    ) -> None:
        self.spec: ModelSpec | None = None
        self.seats = [Seat(engine) for engine in engines]
        self._model = model
        self._cache_bytes = cache_bytes
        self._timeout_s = timeout_s
        self._max_load = max_load
        self._gateway = uuid4().hex
        self._waiting: list[EngineStream] = []
        self._probation: tuple[EngineStream, float] | None = None
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._reopening: set[asyncio.Task[None]] = set()
        self._past = EngineMetrics()
        self._recoveries: deque[float] = deque(maxlen=RECOVERIES_KEPT)
        self._clock = asyncio.get_running_loop().time

    async def start(self) -> None:
        """Connect to the engines. One of several is enough; none, or one with another model, is an error."""
        self._tasks = [asyncio.create_task(self._hold(seat), name=seat.engine.address) for seat in self.seats]
        self._tasks.append(asyncio.create_task(self._recover(), name="recovery of streams"))
        results = await asyncio.gather(*(seat.first_try for seat in self.seats), return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        mismatches = [error for error in errors if isinstance(error, EngineMismatch)]
        if mismatches or len(errors) == len(self.seats):
            await self.close()
            raise (mismatches or errors)[0]

    async def close(self) -> None:
        """End all streams, leave the engines, and stop those that are ours."""
        tasks = [*self._tasks, *self._reopening]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        streams = [*self._waiting, *(stream for seat in self.seats for stream in seat.streams.values())]
        for stream in streams:
            stream.end(messages.Dead("the server is shutting down"))
        for seat in self.seats:
            if seat.link is not None:
                seat.link.close()
                seat.link = None
        await asyncio.gather(*(seat.engine.stop() for seat in self.seats))

    def links(self) -> list[EngineLink]:
        return [seat.link for seat in self.seats if seat.link is not None]

    def seats_by_lag(self) -> list[Seat]:
        """Engines that can take a stream, the best first: not behind, not full, with few streams."""

        def order(entry: tuple[codec.Status, Seat]) -> tuple[float, bool, float]:
            status, seat = entry
            full = status.counted >= streams_held(status, self._max_load)
            return max(0.0, status.lag_ms - USUAL_LAG_MS), full, len(seat.streams) / max(1, status.slots_total)

        ready = [(seat.link.status, seat) for seat in self.seats if seat.link is not None]
        return [seat for _, seat in sorted(ready, key=order)]

    async def open_on(self, seat: Seat, stream: EngineStream) -> None:
        """Raises what the engine answers, or EngineDead; then the stream is on no engine."""
        if seat.link is None:
            raise EngineDead(f"the engine at {seat.engine.address} is not running at the moment")
        seat.streams[stream.id] = stream
        try:
            await stream.open_on(seat.link)
        except asyncio.CancelledError:
            stream.forsake()
            seat.streams.pop(stream.id, None)
            raise
        except (EngineError, ValueError):
            seat.streams.pop(stream.id, None)
            raise

    def ended(self, stream: EngineStream) -> None:
        """The stream has said its last word."""
        for seat in self.seats:
            if seat.streams.get(stream.id) is stream:
                del seat.streams[stream.id]
        if stream in self._waiting:
            self._waiting.remove(stream)

    def metrics(self) -> EngineMetrics:
        past = self._past
        total = replace(past, input_cache=replace(past.input_cache), step_ns=Counter(past.step_ns))
        total.recent_recovery_seconds = list(self._recoveries)
        for link in self.links():
            total.add_link(link)
        return total

    # The life of an engine.

    async def _hold(self, seat: Seat) -> None:
        """Have the engine running and connected, for ever."""
        backoff = RETRY_S
        while True:
            try:
                await self._connect(seat)
            except Exception as error:
                if not seat.first_try.done():
                    seat.first_try.set_exception(error)
                    seat.first_try.exception()
                logger.error("the engine at %s cannot be used: %s", seat.engine.address, error)
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, MAX_BACKOFF_S)
                continue
            backoff = RETRY_S
            if not seat.first_try.done():
                seat.first_try.set_result(None)
            self._wake.set()
            why = await self._loss_of(seat)
            await self._lose(seat, why)

    async def _connect(self, seat: Seat) -> None:
        """Start the engine if it is ours, and shake hands; gives up when its process does."""
        await seat.engine.start()
        seat.lost = asyncio.get_running_loop().create_future()
        link = EngineLink(seat.engine.address, self._cache_bytes, self._events(seat))
        connecting = asyncio.create_task(
            link.connect(zmq.Context.instance(), self._gateway, self._model, seat.engine.start_timeout_s)
        )
        exited = asyncio.create_task(seat.engine.exited())
        try:
            await asyncio.wait({connecting, exited}, return_when=asyncio.FIRST_COMPLETED)
            if not connecting.done():
                raise EngineDead(f"{exited.result()} before it was ready; its log says why")
            spec = connecting.result()
        finally:
            for task in (connecting, exited):
                task.cancel()
            await asyncio.gather(connecting, exited, return_exceptions=True)
        if self.spec is not None and spec != self.spec:
            link.close()
            raise EngineMismatch(
                f"the engine at {seat.engine.address} runs {spec.name!r} with other settings or another model than "
                f"{self.spec.name!r} on the other engines; behind one gateway all must be the same"
            )
        self.spec = spec
        seat.link = link

    def _events(self, seat: Seat) -> LinkEvents:
        def on_output(output: messages.Output) -> None:
            stream = None if isinstance(output, messages.Dead) else seat.streams.get(output.stream)
            if stream is not None:
                stream.take(output)

        def on_progress(progress: codec.Progress) -> None:
            stream = seat.streams.get(progress.stream)
            if stream is not None:
                stream.progress(progress)
                if stream.lost_at is not None and stream.goes_on:
                    self._recovered(stream, stream.lost_at)

        def on_room() -> None:
            for stream in seat.streams.values():
                stream.wake()

        def on_lost(why: str) -> None:
            if not seat.lost.done():
                seat.lost.set_result(why)

        return LinkEvents(on_output, on_progress, on_room, on_lost)

    async def _loss_of(self, seat: Seat) -> str:
        exited = asyncio.create_task(seat.engine.exited())
        try:
            await asyncio.wait({seat.lost, exited}, return_when=asyncio.FIRST_COMPLETED)
            return seat.lost.result() if seat.lost.done() else exited.result()
        finally:
            exited.cancel()
            await asyncio.gather(exited, return_exceptions=True)

    async def _lose(self, seat: Seat, why: str) -> None:
        """Take the streams off a dead engine, end the one that killed it if that is clear, and queue the others."""
        link, seat.link = seat.link, None
        streams, seat.streams = list(seat.streams.values()), {}
        assert link is not None
        link.close()
        self._past.restarts += 1
        self._past.add_link(link)
        logger.warning("%s; %d streams will be carried over", why, len(streams))
        now = self._clock()
        for stream in streams:
            stream.detach(why, now)
        crashed = await seat.engine.crashed() or link.engine_failed
        poisonous = self._poisonous(seat, streams, crashed)
        if self._probation is not None and self._probation[0] in streams:
            self._probation = None
        for stream in streams:
            if stream is poisonous:
                self._past.poisonous_streams += 1
                error = StreamFailed(
                    stream.id, "was ended because the engine died each time it reached this audio; other streams go on"
                )
                stream.end(messages.Failed(stream.id, type(error).__name__, str(error)))
            elif stream.is_open:
                self._waiting.append(stream)
        self._wake.set()

    def _poisonous(self, seat: Seat, streams: list[EngineStream], crashed: bool) -> EngineStream | None:
        """The one stream that the death must be blamed on, if there is one."""
        flights = seat.engine.in_flight()
        if flights is None:
            computed = {stream: stream.unheard() for stream in streams}
            enough = STRIKES_IF_CRASHED if crashed else STRIKES_IF_UNSEEN
        else:
            ours = {flight.stream_of(self._gateway): flight for flight in flights}
            computed = {stream: (ours[stream.id].start, ours[stream.id].end) for stream in streams if stream.id in ours}
            enough = STRIKES_IF_CRASHED if crashed else STRIKES_IF_UNKNOWN
        for stream, (start, end) in computed.items():
            stream.strike(start, end)
        for stream in computed:
            stream.alone = len(computed) <= FEW_SUSPECTS or stream.strikes > 1
            stream.must_wait = flights is None and stream.strikes > 1
        guilty = [stream for stream in computed if stream.strikes >= enough]
        return guilty[0] if len(guilty) == 1 else None

    # Streams without an engine.

    async def _recover(self) -> None:
        """Give streams that lost their engine another one, as soon as there is one."""
        while True:
            try:
                await asyncio.wait_for(self._wake.wait(), RETRY_S if self._waiting else None)
            except TimeoutError:
                pass
            self._wake.clear()
            self._place_waiting(self._clock())

    def _place_waiting(self, now: float) -> None:
        if self._probation is not None:
            suspect, since = self._probation
            if not suspect.strikes or not suspect.is_open or now - since > PROBATION_S:
                suspect.must_wait = False
                self._probation = None
        for stream in list(self._waiting):
            assert stream.lost_at is not None
            if not stream.is_open:
                self._waiting.remove(stream)
                continue
            if now - stream.lost_at > self._timeout_s:
                self._past.streams_given_up += 1
                stream.end(messages.Dead(f"no engine came back within {self._timeout_s:g} s"))
                continue
            seats = self.seats_by_lag()
            if not seats or (stream.must_wait and self._probation is not None):
                continue
            if stream.must_wait:
                self._probation = (stream, now)
            self._waiting.remove(stream)
            task = asyncio.create_task(self._reopen(stream, seats), name=f"reopen {stream.id}")
            self._reopening.add(task)
            task.add_done_callback(self._reopening.discard)

    async def _reopen(self, stream: EngineStream, seats: list[Seat]) -> None:
        for seat in seats:
            try:
                await self.open_on(seat, stream)
            except AtCapacity:
                continue
            except EngineDead:
                return  # lost again while it was opening, and queued by that loss
            except (EngineError, ValueError) as error:
                stream.end(messages.Failed(stream.id, type(error).__name__, str(error)))
                return
            if stream.lost_at is not None and stream.goes_on:
                self._recovered(stream, stream.lost_at)
            return
        stream.link = None
        if stream.is_open:
            self._waiting.append(stream)

    def _recovered(self, stream: EngineStream, lost_at: float) -> None:
        stream.lost_at = None
        self._wake.set()
        took = self._clock() - lost_at
        self._recoveries.append(took)
        self._past.recovery_seconds_sum += took
        self._past.streams_recovered += 1
