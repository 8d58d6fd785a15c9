"""Figures for Prometheus: the gateway's own, and the engine's as its client counts them.

Runs in the gateway. Imports `realtime.session.events` and the counters of `engine.client`.
"""
