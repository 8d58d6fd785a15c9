"""The next message to an engine, command by command.

A command joins a batch whole or not at all: everything that can go wrong with its values goes wrong in `add`, before
the batch, its number or the mirror of the engine's cache knows of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from engine import messages
from engine.boundary import codec
from engine.boundary.codec import Batch, WireData
from engine.boundary.commands import WireItem, encode_command
from engine.messages import Item


class OutgoingBatch:
    def __init__(self) -> None:
        # All items with audio, in the order in which commands refer to them.
        self.items: list[Item] = []
        self._views: list[memoryview | None] = []
        self._commands: list[msgspec.Raw] = []

    def __bool__(self) -> bool:
        return bool(self._commands or self.items)

    def add(self, command: messages.Command | None, carried: Sequence[Item]) -> None:
        """A command and its items; without a command, the items are for the engine's cache alone.

        Raises what the codec raises for a value it cannot write.
        """
        items: list[Item] = []
        views: list[memoryview | None] = []
        described: list[WireItem] = []
        for item in carried:
            data = None
            if item.key:
                data = len(self.items) + len(items)
                items.append(item)
                views.append(_view(item))
            described.append(WireItem(item.offset, item.length, item.sample, data, item.mask, item.samples))
        if command is not None:
            self._commands.append(encode_command(command, described))
        self.items += items
        self._views += views

    def frames(self, number: int, taken: int, pack: Callable[[list[Item]], list[bool]]) -> list[Any]:
        """The batch as bytes; `pack` tells which items' audio must travel. They must then be sent."""
        travels = pack(self.items)
        data = lay_out(self.items, travels)
        views = [view for view, goes in zip(self._views, travels, strict=True) if goes and view is not None]
        return codec.encode(Batch(number, taken, data, self._commands), views)


def lay_out(items: Sequence[Item], travels: Sequence[bool]) -> list[WireData]:
    """Where the audio of those that travel lies in the message's payloads, one after the other."""
    data, end = [], 0
    for item, goes in zip(items, travels, strict=True):
        if not goes:
            data.append(WireData(item.key, None, 0, None))
            continue
        assert item.payload is not None, "only audio that is here travels"
        data.append(WireData(item.key, end, item.payload.nbytes, codec.rows_of(item.payload)))
        end += item.payload.nbytes
    return data


def _view(item: Item) -> memoryview | None:
    """The bytes of an item's audio. Raises TypeError if there is no sending it."""
    if type(item.key) is not bytes:
        raise TypeError(f"a key is bytes, not {type(item.key).__name__}")
    payload = item.payload
    if payload is None:
        return None
    if not isinstance(payload, np.ndarray) or payload.dtype != np.float32 or payload.ndim > 2:
        raise TypeError("audio is an array of float32 with one axis or two")
    return payload.data.cast("B")
