"""What gateway and engine process share: message codec, ZeroMQ sockets, items, audio cache, replay log, crash record.

Both processes import this package. It imports the root modules of `engine` and `audio`, nothing of `engine/client` or
`engine/server`.
"""
