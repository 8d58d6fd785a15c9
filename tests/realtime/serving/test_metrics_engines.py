"""The engine's counters, as Prometheus shows them."""

from __future__ import annotations

from engine.client.pool import Capacity
from engine.client.supervisor import EngineMetrics
from realtime.serving.metrics import Metrics, engine_collector, name_collector


def test_engine_counters_are_shown_with_the_gateways_own() -> None:
    seen = EngineMetrics(encoder_queries=5, encoder_hits=3, restarts=1)
    seen.input_cache.queries, seen.input_cache.hits, seen.input_cache.bytes_saved = 10, 4, 4096
    metrics = Metrics()
    metrics.add_collector(engine_collector(lambda: seen, lambda: Capacity(2, 8, 1, 0.25, 1.0, holds=5)))
    metrics.add_collector(name_collector("g1"))
    shown = metrics.exposition().decode().splitlines()
    for line in (
        "tickertape_mm_cache_queries_total 10.0",
        "tickertape_mm_cache_hits_total 4.0",
        "tickertape_mm_cache_bytes_saved_total 4096.0",
        "tickertape_encoder_cache_hits_total 3.0",
        "tickertape_engine_restarts_total 1.0",
        "tickertape_engine_streams 2.0",
        "tickertape_engine_load 0.25",
        "tickertape_engine_streams_that_hold 5.0",
        "tickertape_stalls_total 0.0",
        'tickertape_gateway_info{gateway="g1"} 1.0',
    ):
        assert line in shown
