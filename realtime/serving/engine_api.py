"""What the gateway needs of the engine, as protocols. `engine.client` fulfils them, and so do the doubles in tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from engine import messages
from engine.client.capacity import Capacity
from engine.client.render import Rendered
from engine.spec import ModelSpec
from realtime.session.events import Samples


class StreamApi(Protocol):
    """One stream of the engine: audio goes in, outputs come out by iteration."""

    @property
    def id(self) -> str: ...
    async def feed(self, samples: Samples) -> None: ...
    async def gap(self, samples: int) -> None: ...
    async def flush(self, at_pause: bool = False) -> int: ...
    async def finish(self) -> None: ...
    async def abort(self) -> None: ...
    def __aiter__(self) -> AsyncIterator[messages.Output]: ...


class EngineApi(Protocol):
    """The engine as the gateway sees it."""

    @property
    def spec(self) -> ModelSpec: ...
    @property
    def ready(self) -> bool: ...
    def capacity(self) -> Capacity: ...
    def render(self, samples: Samples, delay_positions: int | None = None) -> Rendered: ...
    async def inject(self, items: Sequence[messages.Item | None]) -> int: ...
    async def open(
        self,
        stream: str,
        *,
        live: bool = True,
        delay_positions: int | None = None,
        options: dict[str, str] | None = None,
    ) -> StreamApi: ...
