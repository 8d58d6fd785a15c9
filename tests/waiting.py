"""Tests wait for a condition, not for a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

# So long a condition is waited for: a busy machine takes its time, and a test that fails need not fail soon.
PATIENCE_S = 60.0
LOOK_AGAIN_S = 0.01


async def until(condition: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    """Look again and again until it is so. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(LOOK_AGAIN_S)


def until_so(condition: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    """The same without an event loop."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(LOOK_AGAIN_S)


async def stays(condition: Callable[[], object], seconds: float = 0.3) -> None:
    """It is so, and stays so for a while: what would change it has had its chance. A slow machine cannot fail this."""
    deadline = time.monotonic() + seconds
    assert condition()
    while time.monotonic() < deadline:
        await asyncio.sleep(LOOK_AGAIN_S)
        assert condition()


async def forever() -> None:
    """Until cancelled."""
    await asyncio.Event().wait()
