"""The engine: streams of audio in, text out. At the root: the vocabulary that gateway and engine process share.

`client` runs in the gateway, `server` in the engine process, `boundary` is what crosses between them, on both sides;
`core` is the bookkeeping, `runner`, `models` and `weights` know torch. Nothing here imports `realtime`.
"""
