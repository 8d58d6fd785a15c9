"""Figures for Prometheus, which needs no key to read them: however many ask, making them takes a tenth of the time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

# Figures are good for so many times as long as it took to make them.
KEPT_TIMES = 10


class Scrapes:
    """Made once for all who ask meanwhile and right after that."""

    def __init__(self, make: Callable[[], Awaitable[bytes]], clock: Callable[[], float]) -> None:
        self._make = make
        self._clock = clock
        self._last = b""
        self._good_until = float("-inf")
        self._making: asyncio.Task[bytes] | None = None

    async def read(self) -> bytes:
        """Raises what making them raises."""
        if self._clock() < self._good_until:
            return self._last
        if self._making is None:
            self._making = asyncio.create_task(self._make_anew(), name="figures for a scrape")
        # One who leaves does not take them from the others.
        return await asyncio.shield(self._making)

    async def _make_anew(self) -> bytes:
        began = self._clock()
        try:
            self._last = await self._make()
            ended = self._clock()
            self._good_until = ended + KEPT_TIMES * (ended - began)
            return self._last
        finally:
            self._making = None
