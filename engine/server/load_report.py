"""How busy an engine is, as its gateways are told: places, load, lag, and what one more stream would cost."""

from __future__ import annotations

from collections.abc import Collection

from engine.boundary.codec import Status
from engine.config import COUNTED_SECONDS
from engine.runner.base import GuardedRunner
from engine.server.loop import EngineLoop
from engine.server.peer import HostedStream

# The load is the share of so long a time that steps of live streams took.
LOAD_SECONDS = 1.0


class LoadReport:
    """Fills in one status again and again, from the loop's own counts."""

    def __init__(self, loop: EngineLoop, now: float) -> None:
        self.status = Status(slots_total=loop.scheduler.limits.max_streams)
        self.status.load_per_step, self.status.load_per_stream = loop.meter.live_cost.shares()
        # Lookups of the warm-up are not reported.
        self._queries_at_start, self._hits_at_start = loop.scheduler.cache.queries, loop.scheduler.cache.hits
        self._live_ns, self._live_speech_ns = loop.meter.totals.live_ns, loop.meter.totals.live_speech_ns
        self._load_since = now

    def count(self, loop: EngineLoop) -> None:
        """What changes with every step."""
        cache, status = loop.scheduler.cache, self.status
        status.slots_used = len(loop.scheduler.streams)
        status.encoder_queries = cache.queries - self._queries_at_start
        status.encoder_hits = cache.hits - self._hits_at_start

    def measure(self, loop: EngineLoop, streams: Collection[HostedStream], now: float) -> None:
        """What is worth a look now and then."""
        self._measure_load(loop, now)
        status, spec, totals = self.status, loop.scheduler.spec, loop.meter.totals
        lags = [stream.available - stream.computed for stream in loop.scheduler.streams.values() if stream.live]
        status.lag_ms = max(lags, default=0) * spec.samples_per_position * 1000 / spec.sample_rate
        status.speaking = sum(stream.speaking for stream in streams)
        counted_since = now - COUNTED_SECONDS
        status.counted = sum(stream.live and stream.heard_at > counted_since for stream in streams)
        status.steps = totals.steps
        status.step_ns = {
            "speech": totals.speech_ns,
            "plan": totals.plan_ns,
            "execute": totals.execute_ns,
            "commit": totals.commit_ns,
        }
        if isinstance(loop.runner, GuardedRunner):
            status.blank_guard = loop.runner.blank_guard_activations

    def _measure_load(self, loop: EngineLoop, now: float) -> None:
        elapsed = now - self._load_since
        if elapsed < LOAD_SECONDS:
            return
        status, totals = self.status, loop.meter.totals
        per_step, status.load_per_stream = loop.meter.live_cost.shares()
        status.load = min(1.0, (totals.live_ns - self._live_ns) / 1e9 / elapsed)
        # Streams that are silent are listened to as well.
        status.load_per_step = per_step + (totals.live_speech_ns - self._live_speech_ns) / 1e9 / elapsed
        self._live_ns, self._live_speech_ns, self._load_since = totals.live_ns, totals.live_speech_ns, now
