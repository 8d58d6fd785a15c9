"""Streams that lost their engine: they wait, and get another one as soon as there is one.

The recovery promises: a stream that was lost is either waiting here, being reopened, on an engine, or ended; it is in
one of these places at a time, and ends with a word to its reader when no engine comes in time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine import messages
from engine.client.seats import Seats
from engine.client.stream import EngineStream
from engine.errors import AtCapacity, EngineDead, EngineError

RETRY_S = 0.25
# How long a suspect that neither kills the engine nor gets on is waited for, before the next one is tried.
PROBATION_S = 10.0
RECOVERIES_KEPT = 256


@dataclass(slots=True)
class RecoveryCounts:
    recovered: int = 0
    given_up: int = 0
    seconds_sum: float = 0.0


class Recovery:
    def __init__(self, seats: Seats, timeout_s: float, clock: Callable[[], float]) -> None:
        self.counts = RecoveryCounts()
        self.recent_seconds: deque[float] = deque(maxlen=RECOVERIES_KEPT)
        self._seats = seats
        self._timeout_s = timeout_s
        self._clock = clock
        self._waiting: list[EngineStream] = []
        # The one suspect that is being tried, and since when.
        self._on_probation: tuple[EngineStream, float] | None = None
        self._wake = asyncio.Event()
        self._reopening: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        while True:
            try:
                await asyncio.wait_for(self._wake.wait(), RETRY_S if self._waiting else None)
            except TimeoutError:
                pass
            self._wake.clear()
            self._place_waiting(self._clock())

    async def close(self) -> list[EngineStream]:
        """Stop; returns the streams that still wait."""
        for task in self._reopening:
            task.cancel()
        await asyncio.gather(*self._reopening, return_exceptions=True)
        return list(self._waiting)

    def take(self, streams: list[EngineStream]) -> None:
        """These streams have lost their engine."""
        if self._on_probation is not None and self._on_probation[0] in streams:
            self._on_probation = None
        self._waiting += [stream for stream in streams if stream.is_open]
        self._wake.set()

    def wake(self) -> None:
        """An engine is there that was not before."""
        self._wake.set()

    def forget(self, stream: EngineStream) -> None:
        """The stream has ended."""
        if stream in self._waiting:
            self._waiting.remove(stream)

    def note_progress(self, stream: EngineStream) -> None:
        """The stream may have passed the point where its last engine stopped."""
        lost_at = stream.place.lost_at
        if lost_at is None or not stream.place.goes_on:
            return
        stream.place.lost_at = None
        took = self._clock() - lost_at
        self.recent_seconds.append(took)
        self.counts.seconds_sum += took
        self.counts.recovered += 1
        self._wake.set()

    def _place_waiting(self, now: float) -> None:
        self._review_probation(now)
        for stream in list(self._waiting):
            if not stream.is_open:
                self._waiting.remove(stream)
            elif self._is_too_late(stream, now):
                self.counts.given_up += 1
                stream.end(messages.Dead(f"no engine came back within {self._timeout_s:g} s"))
            elif self._seats.links() and self._may_try(stream, now):
                self._waiting.remove(stream)
                task = asyncio.create_task(self._reopen(stream), name=f"reopen {stream.id}")
                self._reopening.add(task)
                task.add_done_callback(self._reopening.discard)

    def _is_too_late(self, stream: EngineStream, now: float) -> bool:
        lost_at = stream.place.lost_at
        assert lost_at is not None, "only streams that were lost wait"
        return now - lost_at > self._timeout_s

    def _may_try(self, stream: EngineStream, now: float) -> bool:
        """Suspects of an engine whose last step nobody saw are tried one at a time."""
        if not stream.suspicion.must_wait:
            return True
        if self._on_probation is not None:
            return False
        self._on_probation = (stream, now)
        return True

    def _review_probation(self, now: float) -> None:
        if self._on_probation is None:
            return
        suspect, since = self._on_probation
        if not suspect.suspicion.strikes or not suspect.is_open or now - since > PROBATION_S:
            suspect.suspicion.must_wait = False
            self._on_probation = None

    async def _reopen(self, stream: EngineStream) -> None:
        for seat in self._seats.by_lag():
            try:
                await self._seats.open_on(seat, stream)
            except AtCapacity:
                continue
            except EngineDead:
                return  # lost again while it was opening, and queued by that loss
            except (EngineError, ValueError) as error:
                stream.end(messages.Failed(stream.id, type(error).__name__, str(error)))
                return
            self.note_progress(stream)
            return
        stream.place.link = None
        if stream.is_open:
            self._waiting.append(stream)
