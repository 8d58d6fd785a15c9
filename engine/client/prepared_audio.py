"""Prepared audio: cuts audio into items without transcribing it (render), and puts items into engines' caches (inject).

`EngineClient.render` and `EngineClient.inject` call it, for `POST /v1/audio/render` and `/v1/audio/inject`. Rendered
items are JSON, with what transcribing them would cost. A client can store them, send them elsewhere, and inject them
into the audio caches of a gateway's engines, if these run the same model.
"""

from __future__ import annotations

import asyncio
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.boundary.input_cache import SenderCache
from engine.boundary.items import make_cutter, payload_bytes, prepare
from engine.client.link import EngineLink, ItemChecker, ItemRefused, Queued
from engine.messages import LARGEST_COUNT, Item
from engine.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Rendered:
    """The items of one piece of audio, and what executing them would cost."""

    model: str
    samples: int
    positions: int
    items: list[Item]
    # For each item: whether the engine has its data cached.
    cached: list[bool]

    @property
    def payload_bytes(self) -> int:
        return sum(map(payload_bytes, self.items))

    @property
    def bytes_to_send(self) -> int:
        """Bytes that would be sent to the engine: each hash that it has not cached, once."""
        return sum({item.key: payload_bytes(item) for item in self._uncached()}.values())

    @property
    def positions_to_encode(self) -> int:
        return sum({item.key: item.length for item in self._uncached()}.values())

    def _uncached(self) -> list[Item]:
        return [item for item, cached in zip(self.items, self.cached, strict=True) if item.key and not cached]

    def as_json(self, with_data: bool = True) -> dict[str, Any]:
        """The summary and all items as JSON types."""
        return self.summary() | {"items": list(self.entries(with_data))}

    def entries(self, with_data: bool = True) -> Iterator[dict[str, Any]]:
        """The items as JSON types, one by one. Only the first item with a hash has the data."""
        described: set[bytes] = set()
        for item, cached in zip(self.items, self.cached, strict=True):
            entry = describe(item, with_data=with_data and item.key not in described)
            yield entry | {"bytes": payload_bytes(item), "cached": cached}
            described.add(item.key)

    def summary(self) -> dict[str, Any]:
        """Everything except the items."""
        return {
            "model": self.model,
            "samples": self.samples,
            "positions": self.positions,
            "payload_bytes": self.payload_bytes,
            "cost": {
                "bytes_to_send": self.bytes_to_send,
                "positions_to_encode": self.positions_to_encode,
                "positions_to_decode": self.positions,
            },
        }


def render(
    checker: ItemChecker,
    samples: NDArray[np.float32],
    engine_cache: SenderCache,
    delay_positions: int | None = None,
) -> Rendered:
    """Cut and hash one complete piece of audio at the model's rate. Changes nothing in the engine."""
    if samples.ndim != 1 or samples.dtype != np.float32:
        raise ItemRefused(
            f"audio of shape {samples.shape} and type {samples.dtype}; give one channel of float32 samples"
        )
    spec = checker.spec
    cutter = make_cutter(spec)
    delay = spec.default_delay_positions if delay_positions is None else delay_positions
    items = prepare(cutter, cutter.cut(samples), spec)
    items += prepare(cutter, cutter.flush(spec.flush_positions_for(delay)), spec)
    end = items[-1].offset + items[-1].length if items else spec.prefix_positions
    return Rendered(
        model=spec.name,
        samples=len(samples),
        positions=end - spec.prefix_positions,
        items=items,
        cached=[item.key in engine_cache for item in items],
    )


def describe(item: Item, with_data: bool) -> dict[str, Any]:
    """One item as JSON types; the inverse of `parse_items`."""
    entry: dict[str, Any] = {"offset": item.offset, "length": item.length, "sample": item.sample}
    if item.samples is not None:
        entry["samples"] = item.samples
    if item.mask is not None:
        entry["mask"] = item.mask
    if item.key:
        entry["hash"] = item.key.hex()
    if with_data and item.payload is not None:
        entry["data"] = b64encode(item.payload.data).decode()
        entry["shape"] = list(item.payload.shape)
    return entry


def parse_items(entries: Sequence[Mapping[str, Any] | None]) -> list[Item | None]:
    """Items from JSON types. Raises ItemRefused; hashes are not verified here but where the items are used."""
    return [None if entry is None else _parse_item(entry) for entry in entries]


def _parse_item(entry: Mapping[str, Any]) -> Item:
    mask = entry.get("mask")
    if mask is not None and not (isinstance(mask, list) and all(isinstance(flag, bool) for flag in mask)):
        raise ItemRefused("an item is malformed: 'mask' must be a list of true and false")
    samples = None if entry.get("samples") is None else _count(entry, "samples")
    offset, length, sample = _count(entry, "offset"), _count(entry, "length"), _count(entry, "sample")
    try:
        key = bytes.fromhex(entry.get("hash", ""))
        payload = None
        if entry.get("data") is not None:
            payload = np.frombuffer(b64decode(entry["data"], validate=True), dtype=np.float32)
            payload = payload.reshape(_shape(entry))
    except (TypeError, ValueError, OverflowError) as error:
        raise ItemRefused(f"an item is malformed: {error}") from None
    return Item(offset, length, sample, key, payload, mask, samples)


def _count(entry: Mapping[str, Any], name: str) -> int:
    """A whole number from 0 to `LARGEST_COUNT`. Raises ItemRefused."""
    if name not in entry:
        raise ItemRefused(f"an item lacks {name!r}; an item has offset, length, sample, hash and data")
    value = entry[name]
    if type(value) is not int or not 0 <= value <= LARGEST_COUNT:
        raise ItemRefused(f"an item is malformed: {name!r} must be a whole number from 0 to {LARGEST_COUNT}")
    return value


def _shape(entry: Mapping[str, Any]) -> list[int]:
    shape = entry.get("shape", [-1])
    if not isinstance(shape, list) or not 1 <= len(shape) <= 2 or not all(type(size) is int for size in shape):
        raise ValueError("'shape' must be one or two whole numbers")
    return shape


def check_same_model(rendered_for: str, spec: ModelSpec) -> None:
    """Raises ItemRefused if items were prepared for another model."""
    if rendered_for != spec.name:
        raise ItemRefused(f"these items were prepared for {rendered_for!r}; this engine runs {spec.name!r}")


# Injection of prepared items into the engines' caches. It is not urgent, so they are sent as replays are: in pieces,
# while the link has few unacknowledged messages, when no live audio waits.

# Items that one call checks and hashes in a thread.
CHECK_BATCH = 64
# Bytes per piece: small enough for other senders to take turns.
PIECE_BYTES = 64 * 1024


class Injection:
    """Items that are being sent to one engine: a `PacedSource` of its link until all are sent."""

    is_rebuilt = False

    def __init__(self, items: Sequence[Item]) -> None:
        self.all_sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting = deque(items)

    def next_piece(self) -> Queued | None:
        piece: list[Item] = []
        size = 0
        while self._waiting and size < PIECE_BYTES:
            piece.append(self._waiting.popleft())
            size += payload_bytes(piece[-1])
        if not self._waiting and not self.all_sent.done():
            self.all_sent.set_result(None)
        return (None, piece) if piece else None


async def inject(items: Sequence[Item | None], checker: ItemChecker, links: Sequence[EngineLink]) -> int:
    """Send the items to all engines; returns how many had data. Raises ItemRefused before anything is sent."""
    checked: list[Item] = []
    for start in range(0, len(items), CHECK_BATCH):
        checked += await asyncio.to_thread(checker.check, items[start : start + CHECK_BATCH])
    with_data = [item for item in checked if item.payload is not None]
    if with_data:
        await asyncio.gather(*(_send(link, Injection(with_data)) for link in links))
    return len(with_data)


async def _send(link: EngineLink, injection: Injection) -> None:
    link.send_paced(injection)
    await asyncio.wait({injection.all_sent, link.ended}, return_when=asyncio.FIRST_COMPLETED)
