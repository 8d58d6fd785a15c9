"""Runs a blocking function in a daemon thread, and returns its result as an asyncio future.

For DNS lookups and disk writes, which may hang: a daemon thread does not keep the process from ending, as a thread of
asyncio's executor does.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def in_thread(function: Callable[[], T], name: str) -> asyncio.Future[T]:
    """The future result of the function. It must not be awaited without `asyncio.shield` or `asyncio.wait` if it is
    shared. Threads of an executor are waited for at the end of the process, and a lookup or a disk may hang."""
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
