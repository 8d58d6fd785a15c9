"""Runs sessions on asyncio: sockets, admission, queues, engine streams, viewers, webhooks, and media from the network.

Part of the gateway; the modules that media processes run say so. It imports `realtime.session` and
`realtime.dialects`, and the engine through `engine_api` and `engine.client`; it imports nothing of `realtime.http`.
"""
