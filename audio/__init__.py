"""From a client's bytes to items for the model: decoding, resampling, cutting into items, edges of speech.

Used by the gateway, the commands and the engine. It imports nothing of `engine` or `realtime`.
"""
