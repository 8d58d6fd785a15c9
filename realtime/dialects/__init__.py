"""Wire dialects: event names and shapes of each kind of client, over one session core.

Runs in the gateway, without I/O. Imports `realtime.session` and `realtime.errors`, nothing of the engine.
"""
