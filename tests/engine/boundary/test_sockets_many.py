"""Many links of one process: ZeroMQ's own limit on sockets would end them at 341."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import asyncio
from engine.boundary.sockets import GatewaySocket, LinkKeys, link_context
from realtime.listeners import raise_file_limit

async def main():
    raise_file_limit()
    keys = LinkKeys.from_secret(b"a secret of a fleet in a test")
    nothing = lambda *_: None
    links = [
        GatewaySocket(link_context(), f"ipc:///nowhere/{n}", nothing, nothing, nothing, keys) for n in range(400)
    ]
    for link in links:
        link.close()
    print(len(links))

asyncio.run(main())
"""


def test_a_gateway_may_have_more_links_than_zeromq_allows_by_default() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.stdout == "400\n", done.stderr
