"""Where weights come from, and how files become models: registry, cache folder, checkpoints, vocabularies.

Imports `models`, `core` (vocabularies) and the engine's errors; used by the engine process and by commands that fetch.
"""
