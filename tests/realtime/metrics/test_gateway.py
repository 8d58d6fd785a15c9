"""The gateway's own figures."""

from __future__ import annotations

from realtime.metrics.gateway import Metrics


def test_two_gateways_in_one_process_count_apart() -> None:
    one, other = Metrics(), Metrics()
    one.measure("stalls", 1)
    assert b"tickertape_stalls_total 1.0" in one.exposition() and b"tickertape_stalls_total 0.0" in other.exposition()
