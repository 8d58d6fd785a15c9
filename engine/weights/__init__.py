"""Where weights come from, and how files become models: registry, cache folder, checkpoints, vocabularies.

Imports `models` and the engine's errors and texts; used by the engine process and by commands that fetch.
"""
