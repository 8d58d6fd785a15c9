"""Runs a blocking function in a daemon thread, and returns its result as an asyncio future.

Webhooks and pulled streams use it for DNS lookups and disk writes, which may hang: unlike a thread of asyncio's
executor, a daemon thread does not keep the process from ending.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def in_thread(function: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Start the function; returns its future result. Several tasks that wait for one result need `asyncio.shield`
    or `asyncio.wait`, because a cancelled task cancels what it awaits."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def take(value: T | None, error: BaseException | None) -> None:
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        value: T | None = None
        error: BaseException | None = None
        try:
            value = function()
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(take, value, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return result
