"""The real gateway, which serves the page, as a process of its own, which tests can kill.

python -m tests.web.page_server PORT [--key KEY] [--slots N] [--real]
"""

from __future__ import annotations

import argparse
import asyncio

from realtime.app import listening, running_server
from realtime.config import AuthConfig, Config, ServerConfig
from tests.realtime.gateway_doubles import FakeEngine

SENTENCES = (
    "The tide went out early.",
    "We counted the boats left behind.",
    "One lamp was lit.",
    "Nobody had been aboard.",
)


async def serve(port: int, key: str | None, slots: int, *, real: bool) -> None:
    """Serve until the process is killed."""
    auth = AuthConfig(keys=(key,) if key else ())
    config = Config(server=ServerConfig(port=port), auth=auth)
    engine = FakeEngine(slots=slots, words=" ".join(SENTENCES).split())
    async with running_server(config) if real else listening(engine, config) as running:
        await running.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--key")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--real", action="store_true", help="with the embedded model")
    given = parser.parse_args()
    asyncio.run(serve(given.port, given.key, given.slots, real=given.real))


if __name__ == "__main__":
    main()
