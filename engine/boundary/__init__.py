"""What gateway and engine process exchange: items, message codec, sockets, mirrored audio caches, the crash record.

Both processes import this package. It imports the root modules of `engine` and `audio`, nothing of either side.
"""
