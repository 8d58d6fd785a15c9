"""The runner of frame-synchronous models (Voxtral Realtime): one position per stream and step, batched, recorded.

Imports `engine.models`, `engine.core` and what `engine.runner` shares; nothing of `windowed`.
"""
