"""Prometheus metrics of the engines of a gateway, read from the engine client at each scrape.

`engine_collector` reads steps, caches, streams and load; nothing is counted here. All gateways of an engine show the
same values, except for the metrics in `COUNTED_BY_EACH_GATEWAY`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine.client.pool import Capacity
from engine.client.supervisor import EngineMetrics

# Metrics that each gateway process counts itself, of its own cache and streams. Engines report the others to all.
COUNTED_BY_EACH_GATEWAY = (
    "mm_cache_queries",
    "mm_cache_hits",
    "mm_cache_bytes_sent",
    "mm_cache_bytes_saved",
    "mm_cache_repairs",
    "engine_streams_recovered",
    "engine_streams_given_up",
    "engine_poisonous_streams",
    "engine_recovery_seconds",
)


def engine_collector(
    metrics: Callable[[], EngineMetrics], capacity: Callable[[], Capacity]
) -> Callable[[], Iterable[Metric]]:
    """The collector for `Metrics.add_collector`."""

    def collect() -> Iterable[Metric]:
        seen, room = metrics(), capacity()
        cache = seen.input_cache
        for name, text, count in (
            ("mm_cache_queries", "Items looked up in the input cache", cache.queries),
            ("mm_cache_hits", "Items found in the input cache, which were not sent to the engine", cache.hits),
            ("mm_cache_bytes_sent", "Bytes of audio sent to the engines", cache.bytes_sent),
            ("mm_cache_bytes_saved", "Bytes of audio that the input cache saved", cache.bytes_saved),
            ("mm_cache_repairs", "Times the two sides of the input cache disagreed and were repaired", cache.repairs),
            ("encoder_cache_queries", "Items looked up in the encoder cache", seen.encoder_queries),
            ("encoder_cache_hits", "Items found in the encoder cache", seen.encoder_hits),
            ("steps", "Steps the engines have run", seen.steps),
            ("blank_guard", "Tokens changed by the guard against endless blanks", seen.blank_guard),
            ("finals_revised", "Parts of finals that were decoded again", seen.revised),
            ("finals_not_revised", "Parts of finals not decoded again for lack of time", seen.revisions_skipped),
            ("words_revised", "Words of finals that differ from the streamed ones", seen.words_revised),
            ("engine_restarts", "Engines that were lost and came back", seen.restarts),
            ("engine_streams_recovered", "Streams rebuilt on a new engine", seen.streams_recovered),
            ("engine_streams_given_up", "Streams that could not be rebuilt", seen.streams_given_up),
            ("engine_poisonous_streams", "Streams ended because they crashed the engine", seen.crashing_streams),
            ("engine_recovery_seconds", "Time until streams of a lost engine were rebuilt", seen.recovery_seconds_sum),
        ):
            yield CounterMetricFamily(f"tickertape_{name}", text, value=count)
        parts = CounterMetricFamily("tickertape_step_seconds", "Time of all steps, by part", labels=["part"])
        for part, nanoseconds in seen.step_ns.items():
            parts.add_metric([part], nanoseconds / 1e9)
        yield parts
        for name, text, value in (
            ("engine_streams", "Streams open on the engines", room.used),
            ("engine_streams_max", "Streams the engines have room for", room.total),
            ("engine_streams_parked", "Silent streams whose state is in host memory", room.parked),
            ("engine_speaking", "Engine streams with speech now", room.speaking),
            ("engine_streams_counted", "Live streams with speech now or recently", room.counted),
            ("engine_streams_that_hold", "Live streams that could have speech at once, by measured cost", room.holds),
            ("engine_spares", "Spare engines, which replace an engine that is lost", room.spares_ready),
            ("engine_load", "Share of its time the least busy engine spends on live streams", room.load),
            ("engine_load_per_stream", "Load that one more stream with speech would add", room.load_per_stream),
        ):
            yield GaugeMetricFamily(f"tickertape_{name}", text, value=value)
        yield from _by_engine(room)

    return collect


def _by_engine(room: Capacity) -> Iterable[Metric]:
    """The metrics of each engine, labelled with its name."""
    for name, text, values in (
        ("streams", "Streams open on an engine", [engine.used for engine in room.engines]),
        ("streams_free", "Streams an engine can still take", [engine.free for engine in room.engines]),
        ("load", "Share of its time an engine spends on live streams", [engine.load for engine in room.engines]),
        ("draining", "Whether an engine takes no new streams", [engine.draining for engine in room.engines]),
        ("beat_age_seconds", "Time since an engine's last message", [engine.silent_s for engine in room.engines]),
    ):
        gauge = GaugeMetricFamily(f"tickertape_each_engine_{name}", text, labels=["engine"])
        for engine, value in zip(room.engines, values, strict=True):
            gauge.add_metric([engine.name], value)
        yield gauge
    up = GaugeMetricFamily("tickertape_each_engine_up", "Whether an engine is connected", labels=["engine"])
    for engine in room.engines:
        up.add_metric([engine.name], 1)
    for missing in room.missing:
        up.add_metric([missing.name], 0)
    yield up
