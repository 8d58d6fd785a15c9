"""How busy an engine is, as its gateways are told: places, load, lag, and what one more stream would cost."""

from __future__ import annotations

from collections.abc import Collection

from engine.boundary.codec import Status
from engine.config import COUNTED_SECONDS
from engine.server.loop import EngineLoop
from engine.server.peer import HostedStream

# The load is the share of so long a time that live streams took: steps, and messages while there was no step.
LOAD_SECONDS = 1.0


class LoadReport:
    """Fills in one status again and again, from the loop's own counts."""

    def __init__(self, loop: EngineLoop, now: float) -> None:
        self.status = Status(slots_total=loop.scheduler.limits.max_streams)
        self.status.load_per_step, self.status.load_per_stream = loop.meter.live_cost.shares()
        # Lookups of the warm-up are not reported.
        self._queries_at_start, self._hits_at_start = loop.scheduler.cache.queries, loop.scheduler.cache.hits
        totals = loop.meter.totals
        self._live_ns, self._live_speech_ns, self._speech_ns = totals.live_ns, totals.live_speech_ns, totals.speech_ns
        self._load_since = now
        # Seconds since then that went to messages, while no step was under way.
        self._beside_steps_s = 0.0

    def spend_beside_steps(self, seconds: float) -> None:
        """So long messages were taken in and written, and nothing was computed meanwhile."""
        self._beside_steps_s += max(0.0, seconds)

    def count(self, loop: EngineLoop) -> None:
        """What changes with every step."""
        cache, status = loop.scheduler.cache, self.status
        status.slots_used = len(loop.scheduler.streams)
        status.encoder_queries = cache.queries - self._queries_at_start
        status.encoder_hits = cache.hits - self._hits_at_start

    def measure(self, loop: EngineLoop, streams: Collection[HostedStream], waited_s: float, now: float) -> None:
        """What is worth a look now and then. Messages wait to be taken in, the oldest for so long."""
        self._measure_load(loop, now)
        status, spec, totals = self.status, loop.scheduler.spec, loop.meter.totals
        lags = [stream.available - stream.computed for stream in loop.scheduler.streams.values() if stream.live]
        status.lag_ms = 1000 * (max(lags, default=0) * spec.samples_per_position / spec.sample_rate + waited_s)
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
        status.blank_guard = loop.runner.blank_guard_activations

    def _measure_load(self, loop: EngineLoop, now: float) -> None:
        elapsed = now - self._load_since
        if elapsed < LOAD_SECONDS:
            return
        status, totals = self.status, loop.meter.totals
        per_step, per_stream = loop.meter.live_cost.shares()
        listened, listened_live = totals.speech_ns - self._speech_ns, totals.live_speech_ns - self._live_speech_ns
        # Messages are as many as pieces of audio; what backlog sends is not counted.
        beside = self._beside_steps_s / elapsed * (listened_live / listened if listened else 1.0)
        live = sum(stream.live for stream in loop.scheduler.streams.values())
        status.load = min(1.0, (totals.live_ns - self._live_ns) / 1e9 / elapsed + beside)
        # Streams that are silent are listened to as well.
        status.load_per_step = per_step + listened_live / 1e9 / elapsed
        status.load_per_stream = per_stream + beside / live if per_stream and live else per_stream
        self._live_ns, self._live_speech_ns, self._speech_ns = totals.live_ns, totals.live_speech_ns, totals.speech_ns
        self._load_since, self._beside_steps_s = now, 0.0
