"""Runners execute plans on a device: `frames` for frame-synchronous models, `windowed` for encoder-decoder models.

Part of the engine process; uses torch. Imports `core`, `models`, `weights` and the root modules of `engine`.
"""
