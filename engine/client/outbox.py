"""What waits to travel to one engine: live commands first, then replays, in turns.

The outbox promises that a command that is sent now leaves with the next batch, however much is being replayed. No more
of replays is under way than `REPLAY_WINDOW_BYTES`; the rest stays with those who replay until it is their turn.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from engine import messages
from engine.boundary.preparation import payload_bytes

# A batch carries about so much; more waits for the next one.
BATCH_BYTES = 1024 * 1024
# Bytes of replays that may be under way without being acknowledged.
REPLAY_WINDOW_BYTES = 4 * 1024 * 1024

# A command, and the items it carries. Without a command, the items are for the engine's cache alone.
Queued = tuple[messages.Command | None, list[messages.Item]]


class Source(Protocol):
    """Somebody with much to send, who is asked for it piece by piece."""

    def take(self) -> Queued | None:
        """The next piece; None if there is none at the moment."""


class Outbox:
    def __init__(self) -> None:
        self._live: deque[Queued] = deque()
        self._sources: deque[Source] = deque()
        # Bytes of replays in each batch that was not acknowledged.
        self._replays: dict[int, int] = {}
        # The sum of these: bytes of replays under way.
        self._replay_bytes = 0

    @property
    def has_live(self) -> bool:
        """Whether a live command waits."""
        return bool(self._live)

    @property
    def has_more(self) -> bool:
        """Whether a batch could leave now."""
        return bool(self._live) or (bool(self._sources) and self._replay_bytes < REPLAY_WINDOW_BYTES)

    def put(self, queued: Queued) -> None:
        self._live.append(queued)

    def pace(self, source: Source) -> None:
        """Ask this source from now on, until it has nothing to give."""
        if source not in self._sources:
            self._sources.append(source)

    def next_batch(self, number: int) -> list[Queued]:
        """What the batch with this number carries."""
        batch: list[Queued] = []
        size = 0
        while self._live and size < BATCH_BYTES:
            batch.append(self._live.popleft())
            size += _bytes(batch[-1])
        replayed = self._add_replays(batch, max(1, BATCH_BYTES - size))
        if replayed:
            # A batch whose commands all fail is not sent, and its number is used again.
            self._replays[number] = self._replays.get(number, 0) + replayed
            self._replay_bytes += replayed
        return batch

    def _add_replays(self, batch: list[Queued], most: int) -> int:
        """One piece of each source in turn; returns their bytes."""
        added = 0
        while self._sources and added < most and self._replay_bytes + added < REPLAY_WINDOW_BYTES:
            piece = self._sources[0].take()
            if piece is None:
                self._sources.popleft()
                continue
            self._sources.rotate(-1)
            batch.append(piece)
            added += _bytes(piece)
        return added

    def acknowledged(self, number: int) -> None:
        """The engine has taken this batch."""
        self._replay_bytes -= self._replays.pop(number, 0)


def _bytes(queued: Queued) -> int:
    return sum(map(payload_bytes, queued[1]))
