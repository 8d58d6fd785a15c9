"""Metrics for Prometheus: the gateway's own, and the engine's as the engine client counts them.

Part of the gateway. It imports `realtime.session.events` and the counters of `engine.client`.
"""
