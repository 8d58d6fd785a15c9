"""What crosses between gateway and engine process, and how: items, codec, sockets, mirrored caches, the crash record.

Both processes import it; it imports the engine's vocabulary and `audio`, and nothing that runs on one side only.
"""
