"""Audio input: turns the bytes of clients and files into float32 mono samples at 16 kHz (decode, mix down, resample).

Used by the gateway, its decoder processes, the commands and the engine. It imports nothing of `engine` or `realtime`.
"""
