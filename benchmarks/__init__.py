"""The measurements behind the figures of the documentation. `python -m benchmarks` lists them.

They are not part of the server. Every benchmark takes `--small`, a run of seconds that the tests use. `tickertape
bench` is another load test, for users (`realtime/bench/`).
"""
