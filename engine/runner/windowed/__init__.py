"""The runner of windowed models (Moonshine, Whisper): rereads a window, commits what is stable.

Imports `engine.models`, `engine.core` and what `engine.runner` shares; nothing of `frames`.
"""
