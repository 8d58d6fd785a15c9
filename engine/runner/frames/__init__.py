"""The runner of frame-synchronous models (Voxtral Realtime): one position per stream and step, as one recorded batch.

Imports `engine.models`, `engine.core` and the shared modules of `engine.runner`, but nothing of `windowed`.
"""
