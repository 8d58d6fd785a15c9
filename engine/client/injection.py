"""Items that others prepared, on their way into the engines' caches.

Nobody waits for them, so they leave as replays do: in pieces, within the link's credits, when nothing live waits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from engine.boundary.preparation import payload_bytes
from engine.client.link import EngineLink
from engine.client.outbox import Queued
from engine.client.processor import Processor
from engine.messages import Item

# Items are hashed off the event loop, so many at a time.
CHECKED_AT_ONCE = 64
# So much travels in one piece: small enough for others to take turns.
PIECE_BYTES = 64 * 1024


class Injection:
    """The way of some items to one engine. A source of its link's outbox until all have left."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting = deque(items)

    def take(self) -> Queued | None:
        piece: list[Item] = []
        size = 0
        while self._waiting and size < PIECE_BYTES:
            piece.append(self._waiting.popleft())
            size += payload_bytes(piece[-1])
        if not self._waiting and not self.left.done():
            self.left.set_result(None)
        return (None, piece) if piece else None


async def inject(items: Sequence[Item | None], processor: Processor, links: Sequence[EngineLink]) -> int:
    """Returns how many have left for every engine that is still there. Raises ItemRefused, and then none has."""
    checked: list[Item] = []
    for start in range(0, len(items), CHECKED_AT_ONCE):
        checked += await asyncio.to_thread(processor.check, items[start : start + CHECKED_AT_ONCE])
    with_data = [item for item in checked if item.payload is not None]
    if with_data:
        await asyncio.gather(*(_send(link, Injection(with_data)) for link in links))
    return len(with_data)


async def _send(link: EngineLink, injection: Injection) -> None:
    link.pace(injection)
    await asyncio.wait({injection.left, link.ended}, return_when=asyncio.FIRST_COMPLETED)
