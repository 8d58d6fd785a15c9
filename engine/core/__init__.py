"""The scheduler and its bookkeeping in plain integers: what each stream has, what is computed, what the next step does.

Runs in the engine process, on its one thread, called by `engine/server/loop.py`. Imports the standard library and the
root modules `messages`, `spec` and `errors`; no torch, no clock, no threads.
"""
