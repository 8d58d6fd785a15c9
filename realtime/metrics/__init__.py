"""Prometheus metrics of a gateway process: its own, and those of the engines that it is connected to.

Part of the gateway. It imports `realtime.session.events` and the counters of `engine.client`. The sums over several
workers are made in `realtime/serving/metric_totals.py`.
"""
