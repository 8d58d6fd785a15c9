"""The session core: one client's session as a state machine without sockets, clock, asyncio or wire format.

Part of the gateway process; `realtime/serving/live_session.py` drives it. Beside the state machine this folder has the
rules for the text of finals (formatting, redaction). It imports `engine.end_of_turn`, `engine.messages`,
`engine.options`, `engine.spec` and `realtime.errors`, and nothing else of the gateway.
"""
