"""Runners execute plans on a device: `frames` for frame-synchronous models, `windowed` for encoder-decoders.

Part of the engine process; torch lives here. Imports `core`, `models`, `weights` and the engine's vocabulary.
"""
