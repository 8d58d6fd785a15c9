"""The real gateway with the page, over the deterministic engine, as a process of its own: tests can kill it.

    python -m tests.web.page_server PORT [--key KEY] [--slots N]
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from starlette.staticfiles import StaticFiles

import realtime
from realtime.app import build_server
from realtime.config import AuthConfig, Config, ServerConfig
from tests.realtime.gateway_doubles import FakeEngine

PAGE = Path(realtime.__file__).parent / "web"
SENTENCES = (
    "The tide went out before anyone had noticed.",
    "We walked along the wet sand, and counted the boats that were left behind.",
    "One of them still had its lamp lit.",
    "Nobody could say who had been aboard.",
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--key")
    parser.add_argument("--slots", type=int, default=8)
    given = parser.parse_args()
    engine = FakeEngine(slots=given.slots, words=" ".join(SENTENCES).split())
    auth = AuthConfig(keys=(given.key,) if given.key else ())
    server = build_server(engine, Config(server=ServerConfig(port=given.port), auth=auth))
    server.config.app.mount("/", StaticFiles(directory=PAGE, html=True))  # type: ignore[union-attr]
    asyncio.run(server.serve())


if __name__ == "__main__":
    main()
