"""Sessions as they run: admission, sockets, queues, and the engine stream of each session, on asyncio.

Runs in the gateway. Imports session, dialects and metrics below it, and the engine through `engine_api` and what
`engine` shares with its clients; nothing of `realtime.http`.
"""
