"""The real gateway, which serves the page, as a process of its own, which tests can kill.

python -m tests.web.page_server PORT [--real]
"""

from __future__ import annotations

import argparse
import asyncio

from realtime.app import listening, running_server
from realtime.config import Config, ModelConfig, ServerConfig
from tests.realtime.gateway_doubles import FakeEngine

SENTENCES = ("The tide fell.", "Boats lay far out.", "One lamp burned.", "Nobody was aboard.")
WORDS = " ".join(SENTENCES).split()


async def serve(port: int, *, real: bool) -> None:
    """Serve until the process is killed."""
    # The smaller model: what is tested is the page, and a browser leaves little of two cores.
    config = Config(server=ServerConfig(port=port), model=ModelConfig(name="moonshine-tiny"))
    async with running_server(config) if real else listening(FakeEngine(words=WORDS), config) as running:
        await running.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--real", action="store_true", help="with the embedded model")
    given = parser.parse_args()
    asyncio.run(serve(given.port, real=given.real))


if __name__ == "__main__":
    main()
