"""The real gateway, which serves the page, as a process of its own, which tests can kill.

python -m tests.web.page_server PORT [--model NAME]
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import replace

from realtime.app import listening, running_server
from realtime.config import Config, ModelConfig, ServerConfig
from tests.realtime.gateway_doubles import FakeEngine

SENTENCES = ("The tide fell.", "Boats lay far out.", "One lamp burned.", "Nobody was aboard.")
WORDS = " ".join(SENTENCES).split()


async def serve(port: int, model: str | None) -> None:
    """Serve until the process is killed."""
    config = Config(server=ServerConfig(port=port))
    if model is None:
        engine = FakeEngine(words=WORDS)
        engine.file_window_s = 30.0
        serving = listening(engine, config)
    else:
        serving = running_server(replace(config, model=ModelConfig(name=model)))
    async with serving as running:
        await running.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--model", metavar="NAME", help="with this model instead of a deterministic engine")
    given = parser.parse_args()
    asyncio.run(serve(given.port, given.model))


if __name__ == "__main__":
    main()
