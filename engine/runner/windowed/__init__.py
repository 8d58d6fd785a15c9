"""The runner of windowed models (Moonshine, Whisper): reads a window again in every pass and commits stable text.

Imports `engine.models`, `engine.core` and the modules directly in `engine.runner`; nothing of `frames`.
"""
