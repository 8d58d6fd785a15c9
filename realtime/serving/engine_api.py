"""The engine client's interface as protocols: `EngineApi` is all engines of a gateway, `StreamApi` is one stream.

The gateway's code is written against them. `engine/client` implements them, and so do the fake engines of the tests.
Only handoffs need more than this interface and use `engine/client` directly.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from engine import messages
from engine.client.pool import Capacity
from engine.client.prepared_audio import Rendered
from engine.spec import ModelSpec
from realtime.session.events import Samples


class StreamApi(Protocol):
    """One stream of the engine. Its outputs are read by iteration, or passed to a listener as they arrive. The methods
    are described in `EngineStream` (`engine/client/stream.py`)."""

    @property
    def id(self) -> str: ...
    async def feed(self, samples: Samples) -> None: ...
    def feed_now(self, samples: Samples) -> bool: ...
    async def gap(self, samples: int) -> None: ...
    async def flush(self, pause: int | None = None, ends_speech: bool = False, turn_over: bool = False) -> int: ...
    def change_turns(self, turns: messages.TurnRule | None) -> None: ...
    async def finish(self) -> None: ...
    async def abort(self) -> None: ...
    def __aiter__(self) -> AsyncIterator[messages.Output]: ...
    def subscribe(self, listener: Callable[[messages.Output], None]) -> None: ...


class EngineApi(Protocol):
    """All engines of the gateway behind one interface. The methods are described in `EngineClient`
    (`engine/client/client.py`)."""

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
        turns: messages.TurnRule | None = None,
        track: messages.TrackState | None = None,
        heard_until: int = 0,
        labels: tuple[messages.Saved, int] | None = None,
    ) -> StreamApi: ...
