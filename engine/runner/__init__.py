"""Runners execute plans on a device: `frames` for frame-synchronous models, `windowed` for encoder-decoder models.

Beside the runners: the speech detector, the models on background threads, and `load.py`, which builds them all. Part of
the engine process; uses torch. Imports `core`, `models`, `weights` and the root modules of `engine`.
"""
