"""The gateway's side of the engine: streams, links to engines, recovery after an engine dies. Runs in the event loop.

Imports `boundary` and the root modules of `engine`. Only `engine_handles`, which starts engines, imports the engine
process, and only inside functions.
"""
