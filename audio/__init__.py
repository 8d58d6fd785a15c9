"""Audio between a client's bytes and a model's clock: decoding, resampling, cutting into items, edges of speech.

Runs in the gateway and in commands; `engine.boundary` cuts items with it for both processes. Nothing here knows a
session, a wire or a model, and nothing of `engine` or `realtime` is imported.
"""
