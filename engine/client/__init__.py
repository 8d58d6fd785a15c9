"""The gateway's side of the engine: streams, links to engines, recovery after an engine dies.

Everything here runs in the gateway's event loop; `EngineClient` (`client.py`) is what the gateway uses. Imports
`boundary` and the root modules of `engine`. Only `engine_handles`, which starts engines, imports the engine process,
and only inside functions.
"""
