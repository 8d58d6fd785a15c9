"""Bookkeeping on ints: what is available, computed and held, and what the next step does. Runs in the engine process.

Imports the standard library and the engine's vocabulary (`messages`, `spec`, `errors`); no torch, no clock, no threads.
"""
