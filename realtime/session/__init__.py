"""One session as a state machine without I/O: no socket, no clock, no asyncio, no wire dialect.

Part of the gateway. It imports `engine.end_of_turn`, `engine.messages`, `engine.options`, `engine.spec` and
`realtime.errors`, and nothing else of the gateway.
"""
