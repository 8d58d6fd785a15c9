"""`LoadReport`: capacity, load and counters of an engine, which the host sends to every gateway as `Status`.

The values come from the loop's meter (`engine/server/metering.py`), its scheduler and the host's streams. Gateways
compute from them how many more streams the engine can have (`engine/client/pool.py`).
"""

from __future__ import annotations

import time
from collections.abc import Collection
from math import ceil, sqrt

from engine.boundary.codec import Status
from engine.options import COUNTED_SECONDS
from engine.server.hosted_streams import HostedStream
from engine.server.loop import EngineLoop

# Seconds over which the load is measured: the share of time spent on live streams, in steps and, between steps, on
# messages.
LOAD_SECONDS = 1.0
# With fewer recently active streams than this, all of them count, because all may be active at once by chance. With
# more, the number that is active at a time is estimated.
MANY_STREAMS = 64
# A stream is active if it had something to compute within this time. Until it has been open for NEW_SECONDS, it counts
# as active.
ACTIVE_NS = 1_000_000_000
NEW_SECONDS = 5.0
# Standard deviations by which the estimate exceeds the number of streams that are active now.
MARGIN_DEVIATIONS = 3


def active_at_once(recent: int, active: int) -> int:
    """How many of `recent` streams must be expected to be active at once, if `active` are now. Speakers are taken as
    independent of each other."""
    spread = sqrt(active * (recent - active) / recent) if recent else 0.0
    return min(recent, ceil(active + MARGIN_DEVIATIONS * max(spread, 1.0)))


class LoadReport:
    """Keeps the `Status` that all gateways are sent up to date, from the loop's counters."""

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

    def add_time_between_steps(self, seconds: float) -> None:
        """Messages were read and written for this long while no step was running."""
        self._between_steps_s += max(0.0, seconds)

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
        status, spec, totals = self.status, loop.scheduler.spec, loop.meter.totals
        lags = [stream.available - stream.computed for stream in loop.scheduler.streams.values() if stream.live]
        status.lag_ms = 1000 * (max(lags, default=0) * spec.samples_per_position / spec.sample_rate + waited_s)
        status.speaking = sum(stream.speaking for stream in streams)
        limits = loop.scheduler.limits
        if limits.resident_streams is not None:
            # An upload keeps its pages on the device as long as it has something to compute.
            uploads = sum(not stream.live for stream in loop.scheduler.streams.values())
            status.active_total = max(0, limits.resident_streams - uploads)
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
