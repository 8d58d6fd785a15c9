"""The engine process: its start, the host that talks to gateways, the main loop, and everything that runs in the loop.

One thread, no asyncio. `main.py` builds a loop (`loop.py`) and a host (`host.py`); the other modules are parts of these
two. Imports `core`, `boundary`, `runner` and the root modules of `engine`; nothing of `client`. Only `runner` uses
torch.
"""
