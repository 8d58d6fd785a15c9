"""Audio input: from a client's bytes to samples at 16 kHz and to items for the model (decode, resample, cut).

Used by the gateway, its decoder processes, the commands and the engine. It imports nothing of `engine` or `realtime`.
"""
