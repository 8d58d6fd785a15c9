"""The engine process: its main, the host that talks to gateways, the loop, the listener. Single-threaded, no asyncio.

Imports `core`, `boundary`, `runner` and the engine's vocabulary; nothing of `client`. Torch stays behind `runner`.
"""
