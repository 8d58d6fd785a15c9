"""Modules of both processes, gateway and engine: message codec, ZeroMQ sockets, items, audio cache, replay, crash
record.

It imports the root modules of `engine` and `audio`, nothing of `engine/client` or `engine/server`.
"""
