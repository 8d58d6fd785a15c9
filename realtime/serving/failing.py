"""Errors of what runs outside a task on behalf of a task group."""

from __future__ import annotations

import asyncio
from typing import NoReturn


def fail(group: asyncio.TaskGroup, error: Exception) -> None:
    """End the group as if a task of it had met this error. Whoever called does not notice."""
    failing = _raise(error)
    try:
        group.create_task(failing)
    except RuntimeError:
        failing.close()  # the group is ending already


async def _raise(error: Exception) -> NoReturn:
    raise error
