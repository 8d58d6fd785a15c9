"""Running sessions on asyncio: admission, sockets, queues, and the engine stream of each session.

Part of the gateway. It imports `realtime.session`, `realtime.dialects` and `realtime.metrics`, and the engine through
`engine_api` and `engine.client`; it imports nothing of `realtime.http`.
"""
