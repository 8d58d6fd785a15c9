"""The engine process: main, the host that talks to gateways, the loop, speech detection. Single-threaded, no asyncio.

Imports `core`, `boundary`, `runner` and the root modules of `engine`; nothing of `client`. Only `runner` uses torch.
"""
