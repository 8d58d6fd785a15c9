"""Model files on disk: registry of names, download cache, checkpoints, vocabularies.

Imports `models` and the root modules of `engine`. Used by the engine process and by commands that download models.
"""
