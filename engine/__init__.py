"""The speech engine: audio streams in, text out. The modules at the root are shared by gateway and engine process.

`client` runs in the gateway, `server` in the engine process, and `boundary` (messages and sockets between them) in
both. In the engine process, `core` schedules streams in plain Python; `runner`, `models` and `weights` use torch.
Nothing here imports `realtime`.
"""
