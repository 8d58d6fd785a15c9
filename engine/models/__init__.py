"""One architecture, one file: weights are shared, state is passed. Torch only; no streams, no engine, no files.

Imports nothing of the engine but its errors.
"""
