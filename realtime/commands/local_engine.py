"""An engine inside this very process, for commands that need no server."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from engine.logs import set_up_logging
from realtime.commands.pull import fetch, model_name
from realtime.commands.terminal import is_debugging

if TYPE_CHECKING:
    from engine.client.client import EngineClient


@asynccontextmanager
async def local_engine(model: str, device: str, max_streams: int = 4) -> AsyncIterator[EngineClient]:
    """Fetch the model if it is not here, load it, and have it ready. Raises EngineError."""
    from realtime.app import engine_in_thread

    # An engine that fails says why in its error; its log is for those who debug.
    set_up_logging(logging.BASIC_FORMAT, "info" if is_debugging() else "critical")
    name = model_name(model)
    fetch(name)
    async with engine_in_thread(name, device, max_streams) as client:
        yield client
