"""Migration: moves the streams of draining engines, one by one, to engines with room.

`Migrations` is a task of the supervisor, in the gateway's event loop. It checks the pool a few times per second. A
stream migrates in a pause of speech if one comes soon, when the interruption is least noticed. A slot on the target is
reserved first, with a placeholder stream; without one the stream stays. `engine/client/recovery.py` then rebuilds the
stream on the target, as after the death of an engine and with the same words, and the old engine keeps it until the new
one has all of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from engine.client.pool import EnginePool, PooledEngine
from engine.client.recovery import Recovery
from engine.client.stream import EngineStream
from engine.errors import EngineError

logger = logging.getLogger(__name__)

# How often the pool is checked for draining engines.
MIGRATION_POLL_SECONDS = 0.25
# How long a stream waits for a pause before it migrates without one.
PATIENCE_SECONDS = 15.0


class Migrations:
    """Migrates streams until closed. `make_placeholder` makes a stream that reserves a slot for another one."""

    def __init__(
        self,
        pool: EnginePool,
        recovery: Recovery,
        make_placeholder: Callable[[EngineStream], EngineStream],
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._recovery = recovery
        self._make_placeholder = make_placeholder
        self._clock = clock
        self._since: dict[PooledEngine, float] = {}
        self._moving: dict[EngineStream, asyncio.Task[None]] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(MIGRATION_POLL_SECONDS)
            self.look()

    async def close(self) -> None:
        tasks = list(self._moving.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def look(self) -> None:
        """Start the migration of every stream that can migrate now."""
        draining = [pooled for pooled in self._pool.all if pooled.link is not None and pooled.draining]
        now = self._clock()
        self._since = {pooled: self._since.get(pooled, now) for pooled in draining}
        for pooled in draining:
            is_late = now - self._since[pooled] >= PATIENCE_SECONDS
            for stream in list(pooled.streams.values()):
                if stream in self._moving or not stream.may_move or not (is_late or stream.at_pause):
                    continue
                target = self._pool.engine_with_free_slot()
                if target is None:
                    return
                self._moving[stream] = asyncio.create_task(
                    self._move(stream, pooled, target), name=f"move {stream.id} to {target.name}"
                )

    async def _move(self, stream: EngineStream, pooled: PooledEngine, target: PooledEngine) -> None:
        placeholder = self._make_placeholder(stream)
        try:
            await self._pool.open_on(target, placeholder)
        except (EngineError, ValueError) as error:
            logger.info("stream %s is not migrated now and stays on its engine: %s", stream.id, error)
            return
        finally:
            del self._moving[stream]
        # Free the reserved slot; the stream takes it.
        placeholder.abort_everywhere()
        if pooled.streams.get(stream.id) is stream and stream.may_move:
            del pooled.streams[stream.id]
            stream.start_migration(self._clock())
            self._recovery.reopen_on(stream, target)
