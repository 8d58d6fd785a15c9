"""One session as a state machine without I/O: no socket, no clock, no asyncio, no wire dialect.

Runs in the gateway. Imports `audio.speech_edges`, `engine.messages` (what the engine says) and `realtime.errors`, and
no other room of the gateway.
"""
