"""`EngineClient`: the gateway's interface to all of its engines. Opens streams, adopts sessions, reports capacity.

`realtime/app.py` makes one per gateway, and one in the parent of workers to run the engine; commands that work without
a server make one with an engine thread. It runs in the event loop. It owns the set of open stream ids and the parts
that do the work: the `Supervisor` with its pool of engines, and the `HandoffClient`. A new stream is offered to the
engines in the order of `EnginePool.in_order` until one accepts it, and stays there until that engine is lost or
drained. Then the supervisor has it rebuilt on another engine, or on the same one when that is back: the stream's reader
sees a pause, no loss. `inject` puts prepared audio into the caches of the engines, and `render` says which of it is
there (`prepared_audio.py`). With a table file, the client polls it for engines that come and go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from engine import messages
from engine.boundary.input_cache import SenderCache
from engine.boundary.replay import StreamLimits, positions_to_keep
from engine.boundary.sockets import LinkKeys
from engine.client.engine_handles import EngineHandle
from engine.client.fleet_table import TABLE_POLL_SECONDS, TableFile
from engine.client.handoff import AdoptedSession, HandoffClient, OwnedSession, handoff_target
from engine.client.link import EngineLink, ItemChecker, warm_up
from engine.client.pool import Capacity, TableReport, capacity_of
from engine.client.prepared_audio import Rendered, inject, render
from engine.client.stream import EngineStream, HandoffTarget
from engine.client.supervisor import EngineMetrics, Supervisor
from engine.errors import AtCapacity, DuplicateStream, EngineError, EngineUnavailable, EngineUnreachable
from engine.messages import Item
from engine.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Settings of an `EngineClient`."""

    # The model that all engines must run; None accepts any, as long as all engines run the same.
    model: str | None = None
    # Size of the cache, on each side of a link, of audio that was sent; 0 disables it.
    cache_bytes: int = 64 * 1024 * 1024
    # Most seconds of computed audio kept per stream for a replay.
    keep_seconds: float = 120.0
    # A stream accepts no more audio while the engine is this many seconds behind.
    ahead_seconds: float = 60.0
    # Seconds a stream waits for an engine before it is ended.
    recovery_timeout_s: float = 120.0
    # Number of engines that stay empty until another one is lost.
    spares: int = 0
    # Load from live streams at which an engine counts as full (1.0: busy all the time); 0: only max_streams counts.
    max_load: float = 0.95
    # Path of a table file that lists engines, in addition to those passed to the constructor.
    table: str | None = None
    # The fleet secret that encrypts links over tcp; None: they are not encrypted.
    fleet_secret: bytes | None = field(default=None, repr=False)


class EngineClient:
    """All engines of a gateway as one object, created and used in one event loop.

    `start` it, open streams, `close` it.
    """

    def __init__(self, engines: Sequence[EngineHandle], settings: ClientSettings | None = None) -> None:
        self._settings = settings or ClientSettings()
        if not engines and not self._settings.table:
            raise ValueError("a client needs at least one engine, or a table of them")
        self._table = TableFile(self._settings.table) if self._settings.table else None
        self._table_task: asyncio.Task[None] | None = None
        self._engines = engines
        self._supervisor: Supervisor | None = None
        self._preparing_checker: ItemChecker | None = None
        # Ids of the open streams.
        self._open_ids: set[str] = set()
        # Saved states of sessions on the engines, and adoption of other gateways' sessions.
        self.handoffs = HandoffClient(self._make_adopted)

    async def start(self) -> None:
        """Start the client. Returns when the engines it starts itself are warm; remote ones may connect later.

        Raises EngineUnavailable or EngineMismatch if an engine that it starts itself cannot be used.
        """
        settings = self._settings
        self._supervisor = Supervisor(
            self._engines,
            settings.model,
            settings.cache_bytes,
            settings.recovery_timeout_s,
            settings.max_load,
            settings.spares,
            self.handoffs.on_output,
            self.handoffs.claim,
            self._make_placeholder,
            None if settings.fleet_secret is None else LinkKeys.from_secret(settings.fleet_secret),
        )
        self._supervisor.spec.add_done_callback(self._on_spec)
        if self._table is not None:
            self._table_task = asyncio.create_task(self._follow_table(self._table), name="table of engines")
        await self._supervisor.start()

    async def _follow_table(self, file: TableFile) -> None:
        while True:
            table = await asyncio.to_thread(file.poll)
            if table is not None:
                self.supervisor.follow(table)
            await self.supervisor.disconnect_delisted()
            await asyncio.sleep(TABLE_POLL_SECONDS)

    def _on_spec(self, spec: asyncio.Future[ModelSpec]) -> None:
        """The first engine has connected and reported its model."""
        if not spec.cancelled():
            self._preparing_checker = ItemChecker("preparing", spec.result(), SenderCache(self._settings.cache_bytes))
            warm_up(self._preparing_checker)

    async def wait_until_ready(self) -> None:
        """Wait until an engine has connected, without a time limit."""
        await asyncio.shield(self.supervisor.spec)

    async def close(self, at_once: bool = False) -> None:
        """Stop. `at_once`: engines started here are killed even in the middle of a step."""
        if self._table_task is not None:
            self._table_task.cancel()
            await asyncio.gather(self._table_task, return_exceptions=True)
        if self._supervisor is not None:
            await self._supervisor.close(at_once)

    @property
    def spec(self) -> ModelSpec:
        """The model that the engines run. Raises EngineUnreachable while no engine has answered."""
        if self._supervisor is None or not self._supervisor.spec.done():
            raise EngineUnreachable("no engine has answered yet; try again in a few seconds")
        return self._supervisor.spec.result()

    @property
    def ready(self) -> bool:
        """Whether a stream could be opened now: an engine is connected and warm."""
        return self._preparing_checker is not None and bool(self._links())

    def _links(self) -> list[EngineLink]:
        return [] if self._supervisor is None else self._supervisor.pool.links()

    async def open(
        self,
        stream: str,
        *,
        live: bool = True,
        delay_positions: int | None = None,
        options: dict[str, str] | None = None,
        turns: messages.TurnRule | None = None,
        track: messages.TrackState | None = None,
        heard_until: int = 0,
        labels: tuple[messages.Saved, int] | None = None,
    ) -> EngineStream:
        """Open a stream on an engine with room. Raises AtCapacity, DuplicateStream, ValueError (bad options) or
        EngineUnavailable.

        `track`: where the speech track continues, if another stream has judged the audio up to sample `heard_until`;
        the speech before that sample is not reported again. `labels`: the last state of speaker labels of another
        stream, which this one continues, and the sample of that stream at which this one begins.
        """
        if stream in self._open_ids:
            raise DuplicateStream(stream, "is open already; use another id")
        _check_texts(options or {})
        state, earlier = labels or (None, 0)
        opening = messages.Open(
            stream,
            live,
            delay_positions,
            dict(options or {}),
            turns=turns,
            track=track,
            heard_until=heard_until,
            labels=state,
            labels_earlier=earlier,
        )
        refusal: EngineError = EngineUnreachable("no engine is running at the moment; try again in a few seconds")
        self._open_ids.add(stream)
        try:
            for pooled in self.supervisor.pool.in_order():
                opened = EngineStream(opening, self.spec, self._limits(), self._ended)
                try:
                    await self.supervisor.pool.open_on(pooled, opened)
                    return opened
                except BaseException as error:
                    opened.cancel_opening()
                    if not isinstance(error, (AtCapacity, EngineUnavailable)):
                        raise
                    refusal = error
        except BaseException:
            self._open_ids.discard(stream)
            raise
        self._open_ids.discard(stream)
        raise refusal

    def handoff_target(self, stream: EngineStream | None) -> HandoffTarget | None:
        """The engine that keeps the saved state of a session with this stream; None if there is none at the moment."""
        return handoff_target(stream, self.supervisor.pool)

    async def adopt(self, key: str, is_wanted: Callable[[], bool] = lambda: True) -> AdoptedSession | None:
        """Adopt a session of another gateway, with its stream; None if no engine has it."""
        return await self.handoffs.adopt(self.supervisor.pool, key, is_wanted)

    async def renew(self, owned: OwnedSession) -> int:
        """Raise the owner number of a session of this gateway; returns it, or 0 if another gateway adopted the
        session."""
        return await self.handoffs.renew(self.supervisor.pool, owned)

    async def confirm(self) -> None:
        """Wait until the engines have reported which sessions of this gateway others have adopted."""
        await self.handoffs.confirm(self.supervisor.pool)

    def _make_placeholder(self, stream: EngineStream) -> EngineStream:
        """A placeholder stream that reserves room on an engine for this one."""
        return EngineStream(messages.Open(f"place for {stream.id}"), self.spec, self._limits(), self._ended)

    def _make_adopted(self, adopted: messages.SessionGiven) -> EngineStream:
        self._open_ids.add(adopted.stream)
        opening = messages.Open(adopted.stream, True, adopted.delay_positions, adopted.options, turns=adopted.turns)
        return EngineStream(opening, self.spec, self._limits(), self._ended)

    def capacity(self) -> Capacity:
        connected = capacity_of([link.status for link in self._links()], self._settings.max_load)
        if self._supervisor is None:
            return connected
        pool, spares, file = self._supervisor.pool, self._settings.spares, self._table
        return replace(
            connected,
            engines=pool.shares(),
            missing=pool.missing(),
            engines_wanted=len(pool.all) - spares,
            spares_ready=pool.spares_ready,
            spares_wanted=spares,
            table=None if file is None else TableReport(file.number, file.problem),
        )

    async def inject(self, items: Sequence[Item | None]) -> int:
        """Put prepared items into the engines' audio caches; returns how many had data. Raises ItemRefused.

        Does nothing and returns 0 if the caches are disabled. Items that are None or have no data are skipped.
        """
        links = self._links()
        if not links or not links[0].cache.enabled:
            return 0
        return await inject(items, links[0].item_checker, links)

    def render(self, samples: NDArray[np.float32], delay_positions: int | None = None) -> Rendered:
        """Prepare audio without executing it, and report which of it an engine has cached. Raises ItemRefused."""
        if self._preparing_checker is None:
            raise EngineUnreachable("no engine has answered yet; try again in a few seconds")
        links = self._links()
        engine_cache = links[0].cache if links else SenderCache(0)
        return render(self._preparing_checker, samples, engine_cache, delay_positions)

    def metrics(self) -> EngineMetrics:
        return EngineMetrics() if self._supervisor is None else self._supervisor.metrics()

    @property
    def supervisor(self) -> Supervisor:
        """The object that keeps the engines running and connected. It exists from `start` on."""
        assert self._supervisor is not None, "start the client first"
        return self._supervisor

    def set_limits(self, max_load: float, keep_seconds: float) -> None:
        """Applies to streams opened from now on and to admission; open streams keep their limits."""
        self._settings = replace(self._settings, max_load=max_load, keep_seconds=keep_seconds)
        if self._supervisor is not None:
            self._supervisor.pool.max_load = max_load

    def _limits(self) -> StreamLimits:
        per_second = self.spec.sample_rate / self.spec.samples_per_position
        return StreamLimits(
            keep_positions=positions_to_keep(self.spec, self._settings.keep_seconds),
            # The engine computes an upload only once it has `upload_positions` of it. With a lower limit, gateway and
            # engine would wait for each other.
            ahead_positions=max(int(self._settings.ahead_seconds * per_second), self.spec.upload_positions),
        )

    def _ended(self, stream: EngineStream) -> None:
        self._open_ids.discard(stream.id)
        self.supervisor.ended(stream)


def _check_texts(options: Mapping[str, str]) -> None:
    """Raises ValueError unless names and values are strings. Clients may send any JSON value."""
    for name, value in options.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise ValueError(
                f"an option and its name must be strings, not {type(value).__name__} for {type(name).__name__}"
            )
