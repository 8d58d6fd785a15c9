"""What the gateway needs of the engine, as protocols: `engine.client` fulfils them, and so do the doubles in tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from engine import messages
from engine.spec import ModelSpec
from realtime.events import Samples


class Capacity(Protocol):
    """How full the engine is."""

    @property
    def used(self) -> int: ...
    @property
    def total(self) -> int: ...
    @property
    def speaking(self) -> int: ...
    @property
    def load(self) -> float: ...
    @property
    def retry_after_s(self) -> float: ...


class EngineStream(Protocol):
    """One stream of the engine: audio goes in, outputs come out by iteration."""

    @property
    def id(self) -> str: ...
    async def feed(self, samples: Samples) -> None: ...
    async def gap(self, samples: int) -> None: ...
    async def flush(self) -> int: ...
    async def finish(self) -> None: ...
    async def abort(self) -> None: ...
    def __aiter__(self) -> AsyncIterator[messages.Output]: ...


class EngineClient(Protocol):
    """The engine as the gateway sees it."""

    @property
    def spec(self) -> ModelSpec: ...
    @property
    def ready(self) -> bool: ...
    def capacity(self) -> Capacity: ...
    async def open(
        self,
        stream: str,
        *,
        live: bool = True,
        delay_positions: int | None = None,
        options: dict[str, str] | None = None,
    ) -> EngineStream: ...
