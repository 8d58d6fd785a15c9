"""The engine as the gateway sees it: streams, links to engines, recovery after deaths. Runs in the event loop.

Imports `boundary` and the engine's vocabulary. Nothing of the engine process is imported here, except by `handles`,
which starts one.
"""
