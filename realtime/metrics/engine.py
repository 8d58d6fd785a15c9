"""The engine client's counters as Prometheus metrics, read when somebody asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine.client.capacity import Capacity
from engine.client.supervisor import EngineMetrics


def engine_collector(
    metrics: Callable[[], EngineMetrics], capacity: Callable[[], Capacity]
) -> Callable[[], Iterable[Metric]]:
    """What `Metrics.add_collector` takes."""

    def collect() -> Iterable[Metric]:
        seen, room = metrics(), capacity()
        cache = seen.input_cache
        for name, text, count in (
            ("mm_cache_queries", "Items looked up in the input cache", cache.queries),
            ("mm_cache_hits", "Items that did not have to cross to the engine", cache.hits),
            ("mm_cache_bytes_sent", "Bytes of audio that crossed to the engines", cache.bytes_sent),
            ("mm_cache_bytes_saved", "Bytes of audio that did not have to cross", cache.bytes_saved),
            ("mm_cache_repairs", "Times the two sides of the input cache disagreed and were repaired", cache.repairs),
            ("encoder_cache_queries", "Items looked up in the encoder cache", seen.encoder_queries),
            ("encoder_cache_hits", "Items whose encoder output was there already", seen.encoder_hits),
            ("steps", "Steps the engines have run", seen.steps),
            ("blank_guard", "Tokens changed by the guard against endless blanks", seen.blank_guard),
            ("engine_restarts", "Engines that were lost and came back", seen.restarts),
            ("engine_streams_recovered", "Streams carried over to a new engine", seen.streams_recovered),
            ("engine_streams_given_up", "Streams that could not be carried over", seen.streams_given_up),
            ("engine_poisonous_streams", "Streams ended because they killed the engine", seen.poisonous_streams),
            ("engine_recovery_seconds", "Time streams waited to be carried over", seen.recovery_seconds_sum),
        ):
            yield CounterMetricFamily(f"tickertape_{name}", text, value=count)
        parts = CounterMetricFamily("tickertape_step_seconds", "Time of all steps, by part", labels=["part"])
        for part, nanoseconds in seen.step_ns.items():
            parts.add_metric([part], nanoseconds / 1e9)
        yield parts
        for name, text, value in (
            ("engine_streams", "Streams open on the engines", room.used),
            ("engine_streams_max", "Streams the engines have room for", room.total),
            ("engine_speaking", "Engine streams that hear speech now", room.speaking),
            ("engine_streams_counted", "Live streams that speak or did so lately", room.counted),
            ("engine_streams_that_hold", "Live streams that could speak at once, by the measured cost", room.holds),
            ("engine_spares", "Engines that wait for another one to be lost", room.spares_ready),
            ("engine_load", "Share of its time the least busy engine spends on live streams", room.load),
            ("engine_load_per_stream", "What one more speaking stream would add to the load", room.load_per_stream),
        ):
            yield GaugeMetricFamily(f"tickertape_{name}", text, value=value)

    return collect
