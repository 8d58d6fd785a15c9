"""Bookkeeping in plain integers: what each stream has, what is computed, and what the next step does (engine process).

Imports the standard library and the root modules `messages`, `spec` and `errors`; no torch, no clock, no threads.
"""
